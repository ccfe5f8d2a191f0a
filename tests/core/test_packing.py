"""Values as JSON and raw tensors: all that is written is read back, and nothing is made of bytes that are not there."""

from __future__ import annotations

import io
import json
import math
import re
import struct
from typing import Any

import numpy as np
import pytest
import torch

from clipwise.errors import CheckpointError
from clipwise.packing import Packer, read_npy, tensor_bytes, tensor_from, unpacked

DTYPES = [
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64),
    *(torch.int8, torch.int64, torch.uint8, torch.bool),
]


def written_and_read(value: Any) -> Any:
    packer = Packer()
    structure = json.loads(json.dumps(packer.pack(value, "state"), allow_nan=False))
    shapes = json.loads(json.dumps(packer.shapes()))
    tensors = [tensor_from(tensor_bytes(t), spec) for t, spec in zip(packer.tensors, shapes, strict=True)]
    return unpacked(structure, tensors)


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, False, 0, -3, 2**70, "", "é$", 0.0, -0.0, 1e-300, math.inf, -math.inf),
        *([], [1, [2, [None]]], (), (1, (2.5, "a")), [(1,), [1]]),
        *({}, {"a": 1, 2: "b", (3, 4): [5.0], None: {}}, {"$tensor": 0, "$dict": {"$float": "nan"}}),
    ],
    ids=repr,
)
def test_values_are_read_as_they_were_written(value: Any) -> None:
    again = written_and_read(value)
    assert again == value and repr(again) == repr(value)


def test_a_number_that_is_none_stays_one() -> None:
    assert math.isnan(written_and_read([math.nan])[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_are_read_as_they_were_written(dtype: torch.dtype) -> None:
    grid = torch.arange(12).reshape(3, 4).to(dtype)
    for tensor in (grid, grid.t(), grid[:, ::2], grid[0, 1], grid[:0], torch.zeros(0, 3, dtype=dtype)):
        (again,) = written_and_read([tensor])
        assert again.dtype == dtype and again.shape == tensor.shape and torch.equal(again, tensor)


def test_what_is_there_twice_is_written_once() -> None:
    """Tied weights, of a single number too; what lies in the same memory in another form is another tensor."""
    one, many, empty = torch.ones(1), torch.arange(6.0).reshape(2, 3), torch.zeros(0)
    packer = Packer()
    structure = packer.pack([one, one, many, many, many.t(), many.reshape(6), many.clone(), empty], "state")
    assert [entry["$tensor"] for entry in structure] == [0, 0, 1, 1, 2, 3, 4, 5] and len(packer.tensors) == 6
    assert packer.shapes()[1:3] == [{"dtype": "float32", "shape": [2, 3]}, {"dtype": "float32", "shape": [3, 2]}]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"a": [0, {1}]}, r"state\['a'\]\[1\] is a set, which cannot be saved without pickle"),
        ({"a": (b"b",)}, r"state\['a'\]\[0\] is a bytes"),
        (np.float32(1.0), "state is a float32"),
        ([torch.eye(2).to_sparse()], r"state\[0\] is a torch.sparse_coo tensor on cpu; only dense ones"),
        ([torch.ones(2, device="meta")], r"state\[0\] is a torch.strided tensor on meta"),
    ],
    ids=str,
)
def test_what_cannot_be_written_is_named_by_its_place(value: Any, said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        Packer().pack(value, "state")


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"dtype": "float31", "shape": [4]}, "a tensor of unknown type 'float31'"),
        ({"dtype": "Tensor", "shape": [4]}, "a tensor of unknown type 'Tensor'"),
        ({"dtype": 32, "shape": [4]}, "a tensor of unknown type 32"),
        ({"dtype": "float32", "shape": 4}, r"a tensor of shape 4$"),
        ({"dtype": "float32", "shape": "4"}, r"a tensor of shape '4'$"),
        ({"dtype": "float32", "shape": [-2, -2]}, r"a tensor of shape \[-2, -2\]$"),
        ({"dtype": "float32", "shape": [4, True]}, r"a tensor of shape \[4, True\]$"),
        ({"dtype": "float32", "shape": [4.0]}, r"a tensor of shape \[4.0\]$"),
        ({"dtype": "float32", "shape": [5]}, r"a tensor of shape \[5\] and type float32 in 16 bytes"),
        ({"dtype": "float32", "shape": [10**15]}, "in 16 bytes"),
        ({"dtype": "float64", "shape": [4]}, r"a tensor of shape \[4\] and type float64 in 16 bytes"),
    ],
    ids=str,
)
def test_a_tensor_that_its_bytes_do_not_hold_is_refused(spec: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        tensor_from(bytes(16), spec)
    assert tensor_from(bytes(16), {"dtype": "float32", "shape": [2, 2]}).tolist() == [[0.0, 0.0], [0.0, 0.0]]


@pytest.mark.parametrize("value", [{"$x": 0}, {"$tensor": True}, {"$tensor": -1}, {"$tensor": "0"}, {"$tensor": 0.0}])
def test_an_unknown_kind_of_value_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="an unknown kind of value"):
        unpacked(value, [torch.ones(1)])
    for several in ({}, {"$tuple": [], "$dict": []}):
        with pytest.raises(ValueError, match="unpack"):
            unpacked(several, [])


# Arrays of NumPy


def saved(array: Any, version: tuple[int, int] = (1, 0)) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array(file, np.asanyarray(array), version=version)
    return file.getvalue()


def with_header(body: bytes, **changes: str) -> bytes:
    """An array of eight bytes whose header says something else."""
    raw = saved(np.zeros(1))
    header = raw[10:128].decode("latin1")
    for name, text in changes.items():
        header = re.sub(rf"'{name}': ('[^']*'|\(.*?\)|\w+)", f"'{name}': {text}", header)
    return raw[:10] + header.rstrip().ljust(117).encode("latin1") + b"\n" + body


def read(raw: bytes) -> Any:
    return read_npy(io.BytesIO(raw), len(raw))


@pytest.mark.filterwarnings("error")
def test_an_array_that_python_2_wrote_is_read_without_a_word() -> None:
    header = b"{'descr': '<f8', 'fortran_order': False, 'shape': (2L,), }".ljust(117) + b"\n"
    raw = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + np.arange(2.0).tobytes()
    assert read_npy(io.BytesIO(raw), len(raw)).tolist() == [0, 1]


@pytest.mark.parametrize("version", [(1, 0), (2, 0)])
@pytest.mark.parametrize(
    "array",
    [
        np.arange(6.0).reshape(2, 3),
        np.asfortranarray(np.arange(6).reshape(2, 3)),
        np.float64(3.5),
        np.zeros((0, 3)),
        np.array([True, False]),
        np.array(["a", "bcd", "\ud7ff\ue000\U0010ffff"]),
        np.arange(3, dtype=">i4"),
        np.array(["a", "é"], dtype=">U2"),
    ],
    ids=repr,
)
def test_an_array_is_read_as_it_was_saved(array: Any, version: tuple[int, int]) -> None:
    found = read(saved(array, version))
    assert found.dtype == array.dtype and found.shape == array.shape and np.array_equal(found, array)


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"", "not an array of NumPy"),
        (b"PK\x03\x04", "not an array of NumPy"),
        (saved(np.zeros(3))[:100], "not an array of NumPy"),
        (saved(np.zeros(3))[:-1], "3 values of type float64 do not fit its 23 bytes"),
        (saved(np.zeros(3)) + b"\0", "3 values of type float64 do not fit its 25 bytes"),
        (saved(np.zeros((2, 3))) + b"\0", "2 x 3 values of type float64 do not fit its 49 bytes"),
        (with_header(bytes(8), descr="'|O'"), "objects could run code"),
        (with_header(bytes(48), shape="(-2, -3)"), "-2 x -3 values of type float64 do not fit its 48 bytes"),
        (with_header(bytes(48), shape="(6, -1)"), "do not fit its 48 bytes"),
        (with_header(b"", shape="(1000000000000,)", descr="'|V0'"), "do not fit its 0 bytes"),
        (with_header(b"", shape="(1000000000000,)"), "do not fit its 0 bytes"),
    ],
)
def test_an_array_that_its_bytes_do_not_hold_is_refused(raw: bytes, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        read(raw)
    assert read(with_header(bytes(48), shape="(2, 3)")).shape == (2, 3)


def test_bytes_that_a_file_lacks_are_missed() -> None:
    raw = saved(np.zeros(3))
    with pytest.raises(ValueError, match="23 of 24 bytes are there"):
        read_npy(io.BytesIO(raw[:-1]), len(raw))


@pytest.mark.parametrize("code", [0xD800, 0xDBFF, 0xDFFF, 0x110000, 2**32 - 1])
@pytest.mark.parametrize("order", ["<", ">"])
def test_text_of_characters_that_do_not_exist_is_refused(code: int, order: str) -> None:
    raw = saved(np.array(["abc", "de"], dtype=f"{order}U3"))
    place = len(raw) - 4 * 4
    with pytest.raises(ValueError, match="characters that do not exist"):
        read(raw[:place] + np.array([code], dtype=f"{order}u4").tobytes() + raw[place + 4 :])
