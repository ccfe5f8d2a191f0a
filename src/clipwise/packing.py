"""Nested values as JSON and raw tensors, and back: what a checkpoint holds, and what a digest is taken of.

What is read here may come from anyone: there is room for an array only once its bytes are known to be there.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import IO, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from clipwise._validate import is_count
from clipwise.errors import CheckpointError

__all__ = ["Packer", "read_npy", "tensor_bytes", "tensor_from", "unpacked"]


class Packer:
    """Python values as JSON with tags, tensors put aside; anything else is refused by its place.

    >>> packer = Packer()
    >>> packer.pack({"w": torch.ones(2), "at": (1, 2)}, "state")
    {'$dict': [['w', {'$tensor': 0}], ['at', {'$tuple': [1, 2]}]]}
    >>> packer.shapes()
    [{'dtype': 'float32', 'shape': [2]}]
    """

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self._known: dict[tuple[object, ...], int] = {}

    def pack(self, value: Any, place: str) -> Any:
        """The structure of `value`; `place` is its name in an error message."""
        if value is None or isinstance(value, (bool, int, str)):
            return value
        if isinstance(value, float):
            return value if math.isfinite(value) else {"$float": repr(value)}
        if isinstance(value, Tensor):
            return {"$tensor": self._tensor(value, place)}
        if isinstance(value, (list, tuple)):
            items = [self.pack(item, f"{place}[{i}]") for i, item in enumerate(value)]
            return items if isinstance(value, list) else {"$tuple": items}
        if isinstance(value, Mapping):
            pairs = [[self.pack(k, place), self.pack(v, f"{place}[{k!r}]")] for k, v in value.items()]
            return {"$dict": pairs}
        raise CheckpointError(
            f"{place} is a {type(value).__name__}, which cannot be saved without pickle. Numbers, strings, tensors, "
            "lists, tuples and dictionaries can."
        )

    def _tensor(self, tensor: Tensor, place: str) -> int:
        if tensor.layout is not torch.strided or tensor.is_meta:
            raise CheckpointError(f"{place} is a {tensor.layout} tensor on {tensor.device}; only dense ones are saved.")
        # Tied weights stand in a state_dict twice; their bytes are written once.
        key = (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        known = self._known.get(key)
        if known is None or tensor.numel() == 0:
            known = self._known[key] = len(self.tensors)
            self.tensors.append(tensor.detach())
        return known

    def shapes(self) -> list[dict[str, Any]]:
        """Type and shape of every tensor that was put aside."""
        return [{"dtype": str(t.dtype).removeprefix("torch."), "shape": list(t.shape)} for t in self.tensors]


def tensor_bytes(tensor: Tensor) -> bytes:
    """The numbers of a tensor, in order."""
    flat = tensor.to("cpu").contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def tensor_from(data: bytes, spec: Mapping[str, Any]) -> Tensor:
    """The tensor of these bytes, with the type and shape that `Packer.shapes` gave."""
    name, shape = spec["dtype"], spec["shape"]
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"a tensor of unknown type {name!r}")
    if not isinstance(shape, list) or not all(is_count(n, least=0) for n in shape):
        raise ValueError(f"a tensor of shape {shape!r}")
    if math.prod(shape) * dtype.itemsize != len(data):  # before there is room for it
        raise ValueError(f"a tensor of shape {shape} and type {name} in {len(data)} bytes")
    return (
        torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)
        if data
        else torch.empty(shape, dtype=dtype, device="cpu")
    )


def unpacked(value: Any, tensors: list[Tensor]) -> Any:
    """What `Packer.pack` packed."""
    if isinstance(value, list):
        return [unpacked(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    ((tag, content),) = value.items()
    if tag == "$dict":
        return {unpacked(k, tensors): unpacked(v, tensors) for k, v in content}
    if tag == "$tuple":
        return tuple(unpacked(item, tensors) for item in content)
    if tag == "$tensor" and is_count(content, least=0):
        return tensors[content]
    if tag == "$float":
        return float(content)
    raise ValueError(f"an unknown kind of value {tag!r}")


def read_npy(file: IO[bytes], size: int) -> NDArray[Any]:
    """The plain array that `np.save` wrote in `size` bytes; a `ValueError` says why there is none.

    >>> import io
    >>> file = io.BytesIO()
    >>> np.save(file, np.arange(3))
    >>> read_npy(io.BytesIO(file.getvalue()), len(file.getvalue()))
    array([0, 1, 2])
    """
    try:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of files that Python 2 wrote, and of the text of damaged ones
            shape, fortran, dtype = read(file)
    except Exception as error:  # NumPy takes a header for Python text, and fails in as many ways
        raise ValueError(f"not an array of NumPy ({error})") from error
    if dtype.hasobject:
        raise ValueError("not a plain array: objects could run code")
    count: int = math.prod(shape)
    content = size - file.tell()
    if any(length < 0 for length in shape) or count * dtype.itemsize != content or (count and not content):
        raise ValueError(f"{' x '.join(map(str, shape))} values of type {dtype} do not fit its {content} bytes")
    raw = file.read(content)
    if len(raw) != content:
        raise ValueError(f"{len(raw)} of {content} bytes are there")
    if dtype.kind == "U" and not _is_text(np.frombuffer(raw, np.dtype("u4").newbyteorder(dtype.byteorder))):
        raise ValueError("text with characters that do not exist")
    return np.frombuffer(raw, dtype=dtype).reshape(shape, order="F" if fortran else "C")


def _is_text(codes: NDArray[Any]) -> bool:
    """Whether these are the numbers of characters, and no halves of one."""
    return bool((codes <= 0x10FFFF).all() and not ((codes >= 0xD800) & (codes <= 0xDFFF)).any())
