"""CSV, NPZ and Parquet files as columns, and their cells as numbers or text; errors name the row or line.

Nothing is made room for because a file says so: what its header claims is compared with the size of the file first.
Everything that is wrong with a file is gathered into one error.
"""

from __future__ import annotations

import csv
import difflib
import os
import sys
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from clipwise._validate import is_line
from clipwise.errors import DataError, MissingExtra
from clipwise.packing import read_npy

__all__ = [
    "Column",
    "Numbers",
    "Problems",
    "Table",
    "all_numbers",
    "check_cells",
    "is_missing",
    "no_column",
    "numbers",
    "read_parts",
    "read_table",
    "texts",
]

Column = list[str] | NDArray[Any]
Table = dict[str, Column]

_FREELY, _PER_BYTE = 1 << 23, 500
"""A file may unpack to this many bytes (Parquet: values) whatever its size, and to more only so many-fold."""
FEW, LONG = 20, 60
"""Names, and characters of a value, that an error shows."""


def read_table(path: Path, delimiter: str) -> Table:
    """The columns of a CSV, NPZ or Parquet file, by its ending."""
    return next(read_parts(path, delimiter, sys.maxsize))


def read_parts(path: Path, delimiter: str, most: int) -> Iterator[Table]:
    """The same, `most` records at a time, so that a long CSV or Parquet file takes no more memory than that."""
    readers = {".csv": lambda: _csv(path, delimiter, most), ".npz": lambda: _npz(path, most)}
    readers |= {ending: lambda: _parquet(path, most) for ending in (".parquet", ".pq")}
    if path.suffix not in readers:
        raise DataError(f"{path} is neither .csv nor .npz nor .parquet.")
    try:
        yield from readers[path.suffix]()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from error


def _csv(path: Path, delimiter: str, most: int) -> Iterator[Table]:
    if len(delimiter) != 1 or delimiter in '\r\n"':
        raise DataError(f"the delimiter of {path} should be one character between its columns, not {delimiter!r}.")
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            rows = csv.reader(_lines(file, path), delimiter=delimiter, strict=True)
            header = [name.strip() for name in next(rows, [])]
            _check_header(header, path, delimiter)
            records: list[list[str]] = []
            ragged: list[tuple[int, int]] = []
            begun = False
            for row in rows:
                if len(row) == len(header):
                    records.append(row)
                elif row:
                    ragged.append((rows.line_num, len(row)))
                if len(records) == most and not ragged:
                    yield _columns(header, records)
                    begun, records = True, []
    except csv.Error as error:
        raise DataError(f"{path}, line {rows.line_num}, is not CSV: {error}.") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not text in UTF-8, after its line {rows.line_num}.", str(error)) from None
    if ragged:
        _refuse_ragged(path, ragged, len(header))
    if not records and not begun:
        raise DataError(f"{path} has a header but no records.")
    if records:
        yield _columns(header, records)


def _columns(header: list[str], records: list[list[str]]) -> Table:
    return {name: [row[k].strip() for row in records] for k, name in enumerate(header)}


def _refuse_ragged(path: Path, lines: list[tuple[int, int]], columns: int) -> NoReturn:
    (line, cells), *others = lines
    more = ""
    if others:
        shown = [str(number) for number, _ in others[:FEW]] + (["..."] if len(others) > FEW else [])
        listed = f"{', '.join(shown[:-1])} and {shown[-1]}" if len(shown) > 1 else shown[0]
        more = f"; {len(others)} other lines ({listed}) do not fit it either"
    raise DataError(f"{path}, line {line}: {cells} cells, but the header has {columns} columns{more}.")


def _lines(file: Iterable[str], path: Path) -> Iterator[str]:
    for number, line in enumerate(file, 1):
        if "\0" in line:
            raise DataError(f"{path}, line {number} has a NUL character: it is damaged, or not a text file.")
        yield line


def _check_header(header: list[str], path: Path, delimiter: str) -> None:
    if not header:
        raise DataError(f"{path} is empty; the first line should name the columns.")
    _check_names(header, path)
    other = next((mark for mark in (";", "\t", ",", "|") if mark in header[0]), None) if len(header) == 1 else None
    if other and other != delimiter:
        is_record = any(all_numbers([each]) for each in header[0].split(other))
        raise DataError(
            f"{path} has a single column; should it be read with another delimiter? Give --delimiter "
            f"{'$' * (other == chr(9))}{other!r}, data.delimiter in a configuration, or delimiter={other!r} in Python.",
            repr(header[0][:LONG]) if is_record else "",
        )


def _check_names(names: Iterable[str], path: Path) -> None:
    """Refuse names that stand for several columns, or that a terminal would not show as they are."""
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    if twice:
        shown = ", ".join(map(repr, twice[:FEW]))
        raise DataError(f"{path} has several columns of one name; give each a name of its own.", shown)
    unclean = next((name for name in names if not is_line(name)), None)
    if unclean is not None:
        raise DataError(f"{path} has a column whose name has control characters; rename it.", repr(unclean[:LONG]))


def _check_claim(path: Path, claimed: int, what: str) -> None:
    """Refuse to make room for far more than a file of this size has."""
    size = os.path.getsize(path)
    if claimed > max(_FREELY, _PER_BYTE * size):
        raise DataError(
            f"{path} has {size} bytes, but claims {claimed} {what}: it is damaged, or packed more than "
            f"{_PER_BYTE}-fold. Write it again with less compression."
        )


def _npz(path: Path, most: int) -> Iterator[Table]:
    """The arrays of an NPZ file, without pickle."""
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            _check_names([member.filename for member in members], path)
            _check_claim(path, sum(member.file_size for member in members), "bytes unpacked")
            arrays = {m.filename.removesuffix(".npy"): _array(path, archive, m) for m in members}
    except DataError:
        raise
    except (OSError, EOFError, RuntimeError, ValueError, LookupError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {error}.") from error
    lengths = {name: len(array) if array.ndim and array.size else 0 for name, array in arrays.items()}
    if not arrays or 0 in lengths.values():
        raise DataError(f"{path} should hold named arrays with one entry for each record; it has {lengths}.")
    longest = max(lengths.values())
    for first in range(0, longest, most):
        yield {name: array if longest <= most else array[first : first + most] for name, array in arrays.items()}


def _array(path: Path, archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> NDArray[Any]:
    with archive.open(member) as file:
        try:
            return read_npy(file, member.file_size)
        except ValueError as error:
            raise DataError(f"{path}, {member.filename!r}: {error}.") from error


def _parquet(path: Path, most: int) -> Iterator[Table]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise MissingExtra("Parquet files need pyarrow: pip install 'clipwise[data]'.") from None
    try:
        with pq.ParquetFile(path) as file:
            _check_claim(path, file.metadata.num_rows * file.metadata.num_columns, "values")
            _check_names(file.schema_arrow.names, path)
            if not file.metadata.num_rows:
                raise DataError(f"{path} has no records.")
            left = file.metadata.num_rows
            for table in [file.read()] if left <= most else map(_as_table, file.iter_batches(most)):
                left -= table.num_rows
                if not table.num_rows:
                    break
                yield {name: _arrow(f"{path}, column {name!r}", table.column(name)) for name in table.column_names}
            if left:
                raise DataError(f"{path} is not a whole Parquet file: it claims {left} records more than it has.")
    except DataError:
        raise
    except (pa.ArrowException, UnicodeError) as error:
        raise DataError(f"{path} is not a whole Parquet file: {error}.") from error


def _as_table(batch: Any) -> Any:
    import pyarrow as pa

    return pa.Table.from_batches([batch])


def _arrow(where: str, column: Any) -> Column:
    """Numbers as an array, everything else as text; a missing value is empty text."""
    import pyarrow as pa

    kind = column.type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    numbers = pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind)
    if numbers and not column.null_count:
        return np.asarray(column.to_numpy(zero_copy_only=False))
    if numbers or pa.types.is_string(kind) or pa.types.is_large_string(kind):
        try:
            return ["" if value is None else str(value) for value in column.to_pylist()]
        except UnicodeDecodeError:
            raise DataError(f"{where}: text that is not UTF-8; write it again as UTF-8.") from None
    # Dates, lists, decimals: text that says so, refused where it is used and harmless where it is not.
    return [f"<{column.type}>"] * len(column)


_MISSING = frozenset(("", "?", "na", "n/a", "nan", "null", "none"))
_ROWS = 4


def no_column(file: str, names: Sequence[str], table: Table, what: str = "", remedy: str = "") -> DataError:
    """The error for columns that a file has not: what it has, and which of it was meant.

    >>> raise no_column("pets.csv", ["wieght"], {"weight": ["3"], "kind": ["cat"]}, "to predict")
    Traceback (most recent call last):
    clipwise.errors.DataError: pets.csv has no column 'wieght' to predict. It has weight, kind. Did you mean 'weight'?
    """
    has, found = _has_instead(names, table)
    return DataError(
        " ".join(filter(None, (f"{file} has no column", f"{_listed(names)}{what and ' '}{what}.", has, remedy))), found
    )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(repr(name[:LONG]) for name in names[:FEW]) + (", ..." if len(names) > FEW else "")


def _has_instead(names: Sequence[str], table: Table) -> tuple[str, str]:
    """What a file has instead of these columns, and its first line, if that is a record and no message's business."""
    shown = ", ".join(name[:LONG] for name in list(table)[:FEW]) + (", ..." if len(table) > FEW else "")
    if any(all_numbers([each]) for each in table):
        return "Its first line has numbers, no names.", shown
    near = [difflib.get_close_matches(name, list(table), 1) for name in names[:FEW]]
    meant = ", ".join(repr(found[0][:LONG]) for found in near if found)
    return f"It has {shown}." + (f" Did you mean {meant}?" if meant else ""), ""


class Problems:
    """What is wrong with some files. `check` raises one error that names all of it, without quoting a record.

    `remedy` is said instead of what each problem asks for.

    >>> problems = Problems()
    >>> problems.add("pets.csv", "column 'legs'", "the value is missing", rows=[3, 8])
    >>> problems.check()
    Traceback (most recent call last):
    clipwise.errors.DataError: pets.csv, column 'legs', rows 3 and 8: the value is missing.
    """

    def __init__(self, remedy: str = "") -> None:
        self._remedy = remedy
        self._lines: dict[str, list[str]] = {}
        self._remedies: dict[str, None] = {}
        self._found: list[str] = []

    def add(
        self,
        file: str,
        where: str,
        what: str,
        *,
        rows: Sequence[int] = (),
        remedy: str | tuple[str, ...] = (),
        found: object = None,
    ) -> None:
        """One kind of problem: in which file and column, in which rows, what to do, and a value that stands there.

        A sentence that says what to do for several problems stands once.
        """
        self._lines.setdefault(file, []).append(f"{', '.join(filter(None, (where, _rows(rows))))}: {what}")
        said = self._remedy or remedy
        self._remedies |= dict.fromkeys(filter(None, (said,) if isinstance(said, str) else said))
        if found is not None:
            self._found.append(f"{str(found)[:LONG]!r}{where and ' in '}{where}")

    def add_absent(self, file: str, names: Sequence[str], table: Table, remedy: str) -> None:
        """Columns that a file should have and does not have; none is not a problem."""
        if names:
            has, found = _has_instead(names, table)
            self.add(file, "header", f"there is no column {_listed(names)}", remedy=remedy, found=found or None)
            self._remedies = {has: None, **self._remedies}

    def check(self) -> None:
        """Raise the error, if there is a problem."""
        count = sum(map(len, self._lines.values()))
        if not count:
            return
        ((file, (first, *_)), *_) = self._lines.items()
        remedies = " ".join(self._remedies)
        said = [f"{file}, {first}. {remedies}"] if count == 1 else [*self._listed(FEW, count), f"  {remedies}"]
        raise DataError("\n".join(said).rstrip(), "; ".join(self._found[:FEW]))

    def _listed(self, left: int, count: int) -> list[str]:
        lines = []
        for file, own in self._lines.items():
            lines += [f"{file} has {len(own)} problem{'s' if len(own) > 1 else ''}:", *(f"  {x}." for x in own[:left])]
            left = max(0, left - len(own))
        return [*lines, f"  and {count - FEW} more."] if count > FEW else lines


def _rows(rows: Sequence[int]) -> str:
    """Which rows, counted from 1: the first few, and how many more."""
    if len(rows) < 2:
        return "".join(f"row {row}" for row in rows)
    shown, more = rows[:_ROWS], len(rows) - _ROWS
    if more > 0:
        return f"rows {', '.join(map(str, shown))} and {more} more"
    return f"rows {', '.join(map(str, shown[:-1]))} and {shown[-1]}"


@dataclass(frozen=True)
class Numbers:
    """A column as float64, with NaN where there is no number, and why: for each record (and element)."""

    values: NDArray[np.float64]
    missing: NDArray[np.bool_]
    wrong: NDArray[np.bool_]
    """Text that is not a number."""


def is_missing(cell: str) -> bool:
    """Whether a text says that there is no value.

    >>> is_missing(""), is_missing("NaN"), is_missing("?"), is_missing("0")
    (True, True, True, False)
    """
    return cell.strip().casefold() in _MISSING


def _floats(column: Any) -> NDArray[np.float64]:
    """The numbers of a column; refuses others. A NaN of any kind is one, also those that warn when they are read."""
    with np.errstate(invalid="ignore"):
        return np.array(column, dtype=np.float64)


def all_numbers(column: Any) -> bool:
    """Whether every cell is a number; NaN and infinity are."""
    try:
        _floats(column)
    except ValueError:
        return False
    return True


def numbers(column: Column) -> Numbers:
    """The numbers of a column, whatever else is in it.

    Guarantees: what a cell is depends on that cell alone.

    >>> numbers(["1.5", "?", "two"])
    Numbers(values=array([1.5, nan, nan]), missing=array([False,  True, False]), wrong=array([False, False,  True]))
    """
    try:
        values = _floats(column)
        missing = np.isnan(values)
    except ValueError:
        shape = (len(column),) if isinstance(column, list) else column.shape
        flat = column if isinstance(column, list) else [str(cell) for cell in column.ravel()]
        values = np.array([float(cell) if all_numbers(cell) else np.nan for cell in flat]).reshape(shape)
        known = np.array([all_numbers(cell) or is_missing(cell) for cell in flat], dtype=bool).reshape(shape)
        missing = np.isnan(values) & known
    return Numbers(values, missing, np.isnan(values) & ~missing)


def check_cells(column: Column) -> None:
    """Refuse an array that has not one number or text for each record."""
    if not isinstance(column, list) and (column.ndim != 1 or column.dtype.kind not in "biufUS"):
        raise ValueError(f"an array of shape {column.shape} and type {column.dtype}")


def texts(column: Column) -> list[str]:
    """A column of numbers or text as text; the number 3.0 is "3"."""
    check_cells(column)
    if isinstance(column, list):
        return column
    cells = (np.char.decode(column, "utf-8") if column.dtype.kind == "S" else column).tolist()
    return [str(int(v)) if isinstance(v, float) and v.is_integer() else str(v) for v in cells]
