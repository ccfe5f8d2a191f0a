"""CSV, NPZ and Parquet files as columns; errors name the row or line."""

from __future__ import annotations

import csv
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clipwise.errors import DataError, MissingExtra

__all__ = ["Column", "Table", "read_table"]

Column = list[str] | NDArray[Any]
Table = dict[str, Column]


def read_table(path: Path, delimiter: str) -> Table:
    """The columns of a CSV, NPZ or Parquet file, by its ending."""
    readers = {".csv": lambda: _csv(path, delimiter), ".npz": lambda: _npz(path)}
    readers |= {ending: lambda: _parquet(path) for ending in (".parquet", ".pq")}
    if path.suffix not in readers:
        raise DataError(f"{path} is neither .csv nor .npz nor .parquet.")
    try:
        return readers[path.suffix]()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from error


def _csv(path: Path, delimiter: str) -> Table:
    if len(delimiter) != 1 or delimiter in '\r\n"':
        raise DataError(f"the delimiter of {path} should be one character between its columns, not {delimiter!r}.")
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            rows = csv.reader(file, delimiter=delimiter, strict=True)
            header = [name.strip() for name in next(rows, [])]
            _check_header(header, path, delimiter)
            records = []
            for row in rows:
                if len(row) != len(header) and row:
                    raise DataError(
                        f"{path}, line {rows.line_num}: {len(row)} cells, but the header has {len(header)} columns."
                    )
                if row:
                    records.append(row)
    except csv.Error as error:
        raise DataError(f"{path}, line {rows.line_num}, is not CSV: {error}.") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not text in UTF-8, after its line {rows.line_num}.", str(error)) from None
    if not records:
        raise DataError(f"{path} has a header but no records.")
    return {name: [row[k].strip() for row in records] for k, name in enumerate(header)}


def _check_header(header: list[str], path: Path, delimiter: str) -> None:
    if not header:
        raise DataError(f"{path} is empty; the first line should name the columns.")
    twice = sorted({name for name in header if header.count(name) > 1})
    if twice:
        raise DataError(
            f"{path} has several columns of one name; its first line should name them.", ", ".join(map(repr, twice))
        )
    other = next((mark for mark in (";", "\t", ",", "|") if mark in header[0]), None) if len(header) == 1 else None
    if other and other != delimiter:
        raise DataError(
            f"{path} has a single column; should it be read with delimiter={other!r}?", repr(header[0][:60])
        )


def _npz(path: Path) -> Table:
    """The arrays of an NPZ file, without pickle."""
    try:
        loaded = np.load(path, allow_pickle=False)
        if isinstance(loaded, np.ndarray):  # what np.save writes
            arrays: Table = {}
        else:
            with loaded as archive:
                arrays = {name: archive[name] for name in archive.files}
    except (OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {error}.") from error
    except ValueError as error:
        raise DataError(f"{path} is no NPZ file of plain arrays (objects could run code): {error}.") from error
    lengths = {name: len(array) if np.ndim(array) else 0 for name, array in arrays.items()}
    if not arrays or 0 in lengths.values():
        raise DataError(f"{path} should hold named arrays with one entry for each record; it has {lengths}.")
    return arrays


def _parquet(path: Path) -> Table:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise MissingExtra("Parquet files need pyarrow: pip install 'clipwise[data]'.") from None
    try:
        table = pq.read_table(path)
    except pa.ArrowException as error:
        raise DataError(f"{path} is no Parquet file: {error}.") from error
    if not table.num_rows:
        raise DataError(f"{path} has no records.")
    return {name: _arrow(table.column(name)) for name in table.column_names}


def _arrow(column: Any) -> Column:
    """Numbers as an array, everything else as text; a missing value is empty text."""
    import pyarrow as pa

    kind = column.type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if column.null_count or pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return ["" if value is None else str(value) for value in column.to_pylist()]
    if pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return np.asarray(column.to_numpy(zero_copy_only=False))
    # Dates, lists, decimals: text that says so, refused where it is used and harmless where it is not.
    return [f"<{column.type}>"] * len(column)
