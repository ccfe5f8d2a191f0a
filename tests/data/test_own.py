"""The user's own files: what is read, and what an error tells of the column and the row."""

from __future__ import annotations

import datetime as dt
import io
import struct
import sys
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from clipwise.data import DataSet, from_file
from clipwise.errors import DataError, MissingExtra

PETS = "weight,legs,kind\n4.1,4,cat\n0.03,2,bird\n5.0,4,cat\n0.04,2,bird\n6.0,4,dog\n"


def csv(folder: Path, text: str, name: str = "pets.csv") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def refused(path: Path, **options: Any) -> str:
    with pytest.raises(DataError) as caught:
        from_file(path, **options)
    return str(caught.value)


def everything(data: DataSet) -> set[tuple[float, ...]]:
    parts = (data.train, data.test)
    return {(*x.tolist(), float(y)) for part in parts for x, y in zip(*part.tensors, strict=True)}


def test_text_becomes_classes(tmp_path: Path) -> None:
    data = from_file(csv(tmp_path, PETS), target="kind", test=2)
    assert data.task == "classification" and data.classes == ("bird", "cat", "dog")
    assert data.features == ("weight", "legs") and data.name == "pets" and data.source == "pets.csv"
    assert (len(data.train), len(data.test)) == (3, 2)
    assert (5, 4, 1) in everything(data) and (6, 4, 2) in everything(data)
    assert "epsilon does not cover" in data.note


def test_split_is_seeded_and_a_share_is_a_share(tmp_path: Path) -> None:
    path = csv(tmp_path, "x,y\n" + "\n".join(f"{k},{k / 2}" for k in range(50)))
    read = [from_file(path, task="regression", seed=seed) for seed in (0, 0, 1)]
    assert (len(read[0].train), len(read[0].test)) == (40, 10)
    assert read[0].fingerprint == read[1].fingerprint != read[2].fingerprint
    assert read[0].task == "regression" and read[0].train.tensors[1].dtype == torch.float32


def test_second_file_is_the_test_part(tmp_path: Path) -> None:
    train, test = csv(tmp_path, PETS), csv(tmp_path, "kind,legs,weight\ncat,4,1\n", "held.csv")
    data = from_file(train, target="kind", test_file=test)
    assert len(data.train) == 5 and data.test[0][0].tolist() == [1, 4], "columns are found by name, not by place"
    assert data.test[0][1] == 1
    other = csv(tmp_path, "kind,legs,weight\ncat,4,1\nfish,0,1\n", "fish.csv")
    message = refused(train, target="kind", test_file=other)
    assert "fish.csv" in message and "column 'kind', row 2: the value is none of the 3 classes" in message
    assert "not both" in refused(train, target="kind", test_file=test, test=0.1)
    fewer = csv(tmp_path, "kind,legs\ncat,4\n", "fewer.csv")
    assert "different columns: 'weight'" in refused(train, target="kind", test_file=fewer)


def test_named_classes_need_not_occur(tmp_path: Path) -> None:
    data = from_file(csv(tmp_path, PETS), target="kind", classes=["dog", "cat", "bird", "fish"], test=1)
    assert data.classes == ("dog", "cat", "bird", "fish") and data.note == ""
    assert "none of the 2 classes" in refused(csv(tmp_path, PETS), target="kind", classes=["dog", "cat"])
    assert "different names" in refused(csv(tmp_path, PETS), target="kind", classes=["dog", "dog"])


def test_numbers_as_classes_are_in_order_of_value(tmp_path: Path) -> None:
    path = csv(tmp_path, "x,y\n1,10\n2,9\n3,9.0\n4,10\n")
    assert from_file(path, task="classification", test=1).classes == ("9", "10")


def test_what_numbers_mean_is_not_guessed(tmp_path: Path) -> None:
    assert "say task=" in refused(csv(tmp_path, "x,y\n1,0\n2,1\n"))
    assert "not 'ranking'" in refused(csv(tmp_path, PETS), target="kind", task="ranking")
    assert "no classes" in refused(csv(tmp_path, "x,y\n1,0\n2,1\n"), task="regression", classes=["0", "1"])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x,y\n1,0.5\ntwo,1\n", "column 'x', row 2: the value is not a number"),
        ("x,y\n1,0.5\n2,\n", "column 'y', row 2: the value is missing"),
        ("x,y\n,0.5\n2,1\n", "column 'x', row 1: the value is missing"),
        ("x,y\n1,0.5\n2,1\nnan,1\n", "column 'x', row 3: the value is missing"),
        ("x,y\n1,inf\n2,1\n", "column 'y', row 1: the value is not a finite"),
        ("x,y\n1e39,1\n2,1\n", "column 'x', row 1: the value is not a finite float32"),
        ("x,y\n1,2\n1,2,3\n", "line 3: 3 cells, but the header has 2"),
        ("x,x,y\n1,2,3\n", "several columns of one name"),
        ("a,b\n1,2\n", "has no column 'y'. It has a, b."),
        ("y\n1\n2\n", "no column beside the target"),
        ("x;y\n1;2\n", "--delimiter ';', data.delimiter in a configuration, or delimiter=';' in Python"),
        ("x,y\n", "no records"),
        ("", "is empty"),
        ('x,y\n"1,2\n', "line 2, is not CSV"),
        (",x,y\n0,1,2\n1,1,3\n", "a column without a name"),
        ("x,y\n1,2\n1\0,3\n", "line 3 has a NUL character"),
        ("x\x1b[31m,y\n1,2\n", "whose name has control characters"),
        ("x,y\n1,2\n" + "9" * 5_000 + ",3\n", "row 2: the value is not a finite float32"),
    ],
)
def test_bad_csv_files_are_told_by_column_and_row(text: str, expected: str, tmp_path: Path) -> None:
    message = refused(csv(tmp_path, text), task="regression")
    assert expected in message and "pets.csv" in message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x,y\n1,a\n2,\n", "column 'y', row 2: the class is missing"),
        ("x,y\n1,a\n2,NaN\n3,b\n", "column 'y', row 2: the class is missing"),
        ("x,y\n1,a\n2,a\n", "a single value"),
    ],
)
def test_bad_classes(text: str, expected: str, tmp_path: Path) -> None:
    assert expected in refused(csv(tmp_path, text))


def test_a_feature_may_be_called_x(tmp_path: Path) -> None:
    data = from_file(csv(tmp_path, "x,y\n1,0.5\n2,1\n3,1\n"), target="y", task="regression", test=1)
    assert data.features == ("x",)


def test_other_columns_may_be_text_when_they_are_left_out(tmp_path: Path) -> None:
    path = csv(tmp_path, "name,x,y\nann,1,0.5\nbob,2,1\n")
    assert "rows 1 and 2: the value is not a number. Leave the column out" in refused(path, task="regression")
    data = from_file(path, task="regression", features=["x"], test=1)
    assert data.features == ("x",) and data.shape == (1,)
    assert "has no column 'z'" in refused(path, task="regression", features=["z"])
    assert "cannot be a feature too" in refused(path, task="regression", features=["y"])


def test_csv_of_other_programs(tmp_path: Path) -> None:
    """A byte-order mark, quoted cells, semicolons, blank lines and Windows line ends."""
    path = tmp_path / "sheet.csv"
    path.write_bytes(b'\xef\xbb\xbf"the x";y\r\n"1";0,5\r\n\r\n"2";1,5\r\n'.replace(b",", b"."))
    data = from_file(path, task="regression", delimiter=";", test=1)
    assert data.features == ("the x",) and everything(data) == {(1, 0.5), (2, 1.5)}


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    assert "No such file" in refused(tmp_path / "none.csv")
    assert "neither .csv" in refused(csv(tmp_path, PETS, "pets.xlsx"))
    latin = tmp_path / "latin.csv"
    latin.write_bytes("x,y\n1,café\n".encode("latin-1"))
    assert "UTF-8" in refused(latin)
    for name in ("bad.npz", "bad.parquet"):
        if name.endswith("parquet"):
            pytest.importorskip("pyarrow")
        assert name in refused(csv(tmp_path, "rubbish", name))


def npz(folder: Path, **arrays: Any) -> Path:
    path = folder / "arrays.npz"
    np.savez(path, **arrays)
    return path


def test_npz_keeps_the_shape_of_inputs(tmp_path: Path) -> None:
    x = np.arange(5 * 12, dtype=np.uint8).reshape(5, 3, 2, 2)
    data = from_file(npz(tmp_path, x=x, y=np.array([0, 1, 0, 1, 1])), task="classification", test=1)
    assert data.shape == (3, 2, 2) and data.features == () and data.train.tensors[0].dtype == torch.float32
    assert data.classes == ("0", "1")


def test_npz_with_parts_of_its_own(tmp_path: Path) -> None:
    x, y = np.ones((4, 2)), np.array(["no", "yes", "yes", "no"])
    path = npz(tmp_path, x_train=x, y_train=y, x_test=x[:1], y_test=y[:1])
    data = from_file(path)
    assert (len(data.train), len(data.test)) == (4, 1) and data.classes == ("no", "yes")
    assert "its own test part" in refused(path, test_file=path)


@pytest.mark.parametrize(
    ("arrays", "expected"),
    [
        (dict(x=np.ones((3, 2)), z=np.ones(3)), "has no column 'y'"),
        (dict(x=np.array([[1.0, 2.0], [3.0, np.nan]]), y=np.ones(2)), "column 'x', row 2: the value is missing"),
        (dict(x=np.ones((2, 2)), y=np.ones((2, 3))), "one number a record"),
        (dict(x=np.ones((2, 2)), y=np.array([{}, {}])), "objects could run code"),
        (dict(x=np.array(["a", "b"]), y=np.ones(2)), "rows 1 and 2: the value is not a number"),
        (dict(x=np.ones((3, 2)), y=np.ones(2)), "different lengths"),
        (dict(x=np.ones((0, 2)), y=np.ones(0)), "one entry for each record"),
        (dict(x=np.ones((2, 2)), y=np.ones(2), version=np.array(3)), "'version': 0"),
        (dict(x=np.ones((2, 2)) * 1j, y=np.ones(2)), "type complex128; numbers are needed"),
        (dict(x=np.ones((2, 2)), z=np.ones((2, 2)), y=np.ones(2)), "several arrays can be features only"),
        (dict(a=np.ones(3), b=np.ones(2), y=np.ones(3)), "different lengths: {'a': 3, 'b': 2}"),
        (dict(x=np.array([["1", "2"], ["3", "four"]]), y=np.ones(2)), "row 2: the value is not a number"),
    ],
    ids=[
        *("no target", "nan", "matrix target", "objects", "text", "lengths", "empty", "a number", "complex"),
        *("two arrays", "lengths of features", "text in a matrix"),
    ],
)
def test_bad_npz_files(arrays: dict[str, Any], expected: str, tmp_path: Path) -> None:
    assert expected in refused(npz(tmp_path, **arrays), task="regression")


def test_npz_files_that_are_damaged_or_no_archive(tmp_path: Path) -> None:
    path = tmp_path / "arrays.npz"
    path.write_bytes(b"")
    assert "cannot be read" in refused(path)
    with open(path, "wb") as file:
        np.save(file, np.ones(3))
    assert "File is not a zip file" in refused(path)
    np.savez_compressed(path, x=np.zeros((10, 300)), y=np.ones(10))
    content = bytearray(path.read_bytes())
    content[80:100] = b"\xff" * 20
    path.write_bytes(content)
    assert "arrays.npz, 'x.npy': not an array" in refused(path)


def claiming(shape: str, content: bytes = b"", packed: bool = False) -> bytes:
    """An NPZ file whose array `x` says that it has this shape."""
    header = f"{{'descr': '<f8', 'fortran_order': False, 'shape': {shape}}}".ljust(117).encode() + b"\n"
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED if packed else zipfile.ZIP_STORED) as archive:
        archive.writestr("x.npy", b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + content)
    return file.getvalue()


@pytest.mark.parametrize(
    ("shape", "size", "expected"),
    [
        ("(1000000000000,)", 0, "1000000000000 values of type float64 do not fit its 0 bytes"),
        ("(1000000000000, 0)", 0, "one entry for each record"),
        ("(2,)", 24, "2 values of type float64 do not fit its 24 bytes"),
        (f"({1 << 21},)", 1 << 24, "packed more than 500-fold"),
    ],
    ids=["rows that are not there", "rows of nothing", "bytes beside the rows", "a zip bomb"],
)
def test_room_is_made_only_for_what_an_npz_file_has(shape: str, size: int, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "arrays.npz"
    path.write_bytes(claiming(shape, bytes(size), packed=size > 1 << 20))
    tracemalloc.start()
    try:
        assert expected in refused(path, task="regression")
        assert tracemalloc.get_traced_memory()[1] < 1 << 24
    finally:
        tracemalloc.stop()


def test_many_columns_take_linear_time(tmp_path: Path) -> None:
    path = csv(tmp_path, ",".join(f"c{k}" for k in range(200_000)) + ",c7,y\n1\n")
    assert "several columns of one name" in refused(path)


@pytest.mark.parametrize("test", [float("nan"), 1.0, -0.1, "0.2", True, -1])
def test_a_test_part_is_a_share_or_a_number(test: Any, tmp_path: Path) -> None:
    assert "a share between 0 and 1 or a whole number" in refused(csv(tmp_path, PETS), target="kind", test=test)


@pytest.mark.parametrize("delimiter", ["", ";;", "\n"])
def test_a_delimiter_is_one_character(delimiter: str, tmp_path: Path) -> None:
    assert "should be one character" in refused(csv(tmp_path, PETS), delimiter=delimiter)


def test_a_nan_that_warns_when_it_is_read_is_a_nan_like_others(tmp_path: Path) -> None:
    """A signalling one: eight changed bits of a file of single precision."""
    x = np.array([[1.0, 0x7F800001], [2.0, 3.0]], dtype=np.float32)
    x.view(np.uint32)[0, 1] = 0x7F800001
    np.savez(tmp_path / "data.npz", x=x, y=np.array([0, 1]))
    with pytest.raises(DataError, match="column 'x', row 1: the value is missing"):
        from_file(tmp_path / "data.npz", target="y", task="classification")


def test_npz_classes_are_a_vector_of_numbers_or_text(tmp_path: Path) -> None:
    x = np.ones((3, 2))
    data = from_file(npz(tmp_path, x=x, y=np.array([b"cat", b"dog", b"cat"])), test=1)
    assert data.classes == ("cat", "dog")
    message = refused(npz(tmp_path, x=x, y=np.array([[0], [1], [0]])), task="classification")
    assert "array of shape (3, 1)" in message and "one class a record" in message
    assert "is not text in UTF-8" in refused(npz(tmp_path, x=x, y=np.array([b"\xff", b"a", b"b"])))


def parquet(folder: Path, **columns: Any) -> Path:
    pa = pytest.importorskip("pyarrow")
    path = folder / "table.parquet"
    pytest.importorskip("pyarrow.parquet").write_table(pa.table(columns), path)
    return path


def test_parquet_reads_numbers_booleans_and_categories(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    path = parquet(
        tmp_path,
        weight=[4.1, 0.5, 5.0, 6.0],
        legs=pa.array([4, 2, 4, 4], pa.int8()),
        tame=[True, False, True, True],
        kind=pa.array(["cat", "bird", "cat", "dog"]).dictionary_encode(),
    )
    data = from_file(path, target="kind", test=1)
    assert data.features == ("weight", "legs", "tame") and data.classes == ("bird", "cat", "dog")
    assert (0.5, 2, 0, 0) in everything(data)


def test_parquet_that_claims_records_it_does_not_have(tmp_path: Path) -> None:
    path = parquet(tmp_path, x=[1.0, 2.0], y=[1.0, 2.0])
    pq = pytest.importorskip("pyarrow.parquet")
    with mock.patch.object(pq.ParquetFile, "read", return_value=pq.read_table(path).slice(0, 0)):
        assert "claims 2 records more than it has" in refused(path)


def test_parquet_is_refused_by_column_and_row(tmp_path: Path) -> None:
    path = parquet(tmp_path, x=[1.0, None], y=[1.0, 2.0])
    assert "column 'x', row 2: the value is missing" in refused(path, task="regression")
    path = parquet(tmp_path, x=[1.0, 2.0], gap=[None, 2], y=[1.0, 2.0])
    assert from_file(path, task="regression", features=["x"], test=1).features == ("x",), "a gap elsewhere is no matter"
    assert "column 'kind', row 2: the class is missing" in refused(
        parquet(tmp_path, x=[1.0, 2.0, 3.0], kind=["a", None, "b"]), target="kind"
    )
    path = parquet(tmp_path, when=[dt.date(2020, 1, 1)] * 2, x=[1.0, 2.0], y=[1.0, 2.0])
    assert "column 'when', rows 1 and 2: the value is not a number" in refused(path, task="regression")
    assert from_file(path, task="regression", features=["x"], test=1).features == ("x",)


def test_parquet_with_text_that_is_not_utf8_or_rows_of_nothing_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pa = pytest.importorskip("pyarrow")
    bad = pa.Array.from_buffers(pa.string(), 2, pa.array([b"ann\xff", b"b"], pa.binary()).buffers())
    message = refused(parquet(tmp_path, x=[1.0, 2.0], kind=bad), target="kind")
    assert "column 'kind': text that is not UTF-8" in message and "ann" not in message
    path = parquet(tmp_path, x=np.zeros(100_000, dtype=np.int8), y=np.zeros(100_000, dtype=np.int8))
    assert len(from_file(path, task="regression").train) == 80_000
    monkeypatch.setattr("clipwise.data.readers._FREELY", 1_000)
    monkeypatch.setattr("clipwise.data.readers._PER_BYTE", 10)
    assert "claims 200000 values" in refused(path, task="regression")


def test_parquet_without_pyarrow_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtra, match=r"clipwise\[data\]"):
        from_file(csv(tmp_path, "", "table.parquet"), task="regression")
