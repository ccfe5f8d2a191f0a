"""The cells of a column as numbers or text, and everything that is wrong with a file gathered into one error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clipwise.data.readers import FEW, LONG, Column
from clipwise.errors import DataError

__all__ = ["Numbers", "Problems", "all_numbers", "check_cells", "is_missing", "numbers", "texts"]

_MISSING = frozenset(("", "?", "na", "n/a", "nan", "null", "none"))
_ROWS = 4


class Problems:
    """What is wrong with some files. `check` raises one error that names all of it, without quoting a record.

    >>> problems = Problems()
    >>> problems.add("pets.csv", "column 'legs'", "the value is missing", rows=[3, 8])
    >>> problems.check()
    Traceback (most recent call last):
    clipwise.errors.DataError: pets.csv, column 'legs', rows 3 and 8: the value is missing.
    """

    def __init__(self) -> None:
        self._lines: dict[str, list[str]] = {}
        self._remedies: dict[str, None] = {}
        self._found: list[str] = []

    def add(
        self, file: str, where: str, what: str, *, rows: Sequence[int] = (), remedy: str = "", found: object = None
    ) -> None:
        """One kind of problem: in which file and column, in which rows, what to do, and a value that stands there."""
        self._lines.setdefault(file, []).append(f"{', '.join(filter(None, (where, _rows(rows))))}: {what}")
        if remedy:
            self._remedies[remedy] = None
        if found is not None:
            self._found.append(f"{str(found)[:LONG]!r} in {where}")

    def add_absent(self, file: str, names: Sequence[str], remedy: str) -> None:
        """Columns that a file should have and has not; none is no problem."""
        if names:
            shown = ", ".join(repr(name[:LONG]) for name in names[:FEW]) + (", ..." if len(names) > FEW else "")
            self.add(file, "header", f"there is no column {shown}", remedy=remedy)

    def check(self) -> None:
        """Raise the error, if there is a problem."""
        count = sum(map(len, self._lines.values()))
        if not count:
            return
        ((file, (first, *_)), *_) = self._lines.items()
        said = f"{file}, {first}." if count == 1 else "\n".join([*self._listed(FEW, count), ""])
        raise DataError(" ".join([said, *self._remedies]).strip(), "; ".join(self._found[:FEW]))

    def _listed(self, left: int, count: int) -> list[str]:
        lines = []
        for file, own in self._lines.items():
            lines += [f"{file} has {len(own)} problem{'s' if len(own) > 1 else ''}:", *(f"  {x}" for x in own[:left])]
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


def all_numbers(column: Any) -> bool:
    """Whether every cell is a number; NaN and infinity are."""
    try:
        np.array(column, dtype=np.float64)
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
        values = np.array(column, dtype=np.float64)
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
