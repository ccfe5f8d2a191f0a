"""A public description of a table: which columns are used, within which bounds, with which categories.

Every cell is encoded by itself with these public numbers, so encoding costs no privacy. How a schema was *found* may:
`Schema.propose` reads the records, which epsilon does not cover; `clipwise.data.private_schema` pays for what it reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from clipwise._validate import is_finite, is_line
from clipwise.data.readers import LONG, Column, Numbers, Problems, Table, check_cells, is_missing, numbers, texts
from clipwise.errors import DataError

__all__ = ["Category", "Kind", "Number", "Schema", "proposed"]

MOST_FEATURES = 100_000
"""Columns after encoding; a one-hot code of more is a mistake in the schema."""
_MOST_PROPOSED = 100
"""A text column with more values is not proposed as categories."""
_FEWEST_COUNTED = 20
"""In fewer rows, consecutive numbers may be chance."""
_SAME = "the same in every row"
_ALLOW_EMPTY = "Allow empty cells with `missing = true` in the column's description."


@dataclass(frozen=True)
class Number:
    """A column of numbers between public bounds: scaled to [-1, 1], and clipped to it.

    With `missing`, a cell may be empty: it becomes 0, the middle, and a column says that it was empty.

    >>> Number("age", 20, 60).encode(["20", "50", "99"], "people.csv", Problems())
    array([[-1. ],
           [ 0.5],
           [ 1. ]])
    """

    kind: ClassVar[str] = "number"

    name: str
    low: float
    high: float
    missing: bool = False

    def __post_init__(self) -> None:
        _check_name(self.name, self.missing)
        if not (is_finite(self.low) and is_finite(self.high) and self.low < self.high):
            raise DataError(
                f"column {self.name!r} needs finite numbers low < high, got low = {self.low!r}, high = {self.high!r}."
            )
        if not is_finite(float(self.high) - float(self.low)):
            raise DataError(f"column {self.name!r}: the bounds are too far apart, {self.low!r} to {self.high!r}.")
        object.__setattr__(self, "low", float(self.low))
        object.__setattr__(self, "high", float(self.high))

    @property
    def features(self) -> tuple[str, ...]:
        """The names of its columns after encoding."""
        return (self.name, f"{self.name} is missing") if self.missing else (self.name,)

    def to_dict(self) -> dict[str, Any]:
        """What `Schema.of` reads."""
        return {"kind": self.kind, "low": self.low, "high": self.high, **({"missing": True} if self.missing else {})}

    def encode(self, column: Column, file: str, problems: Problems) -> NDArray[np.float64]:
        """The encoded column, (n, features); what is wrong with it is added to `problems`."""
        check_cells(column)
        found = numbers(column)
        _report(self.name, column, file, problems, found, self.missing)
        within = np.clip(np.where(np.isnan(found.values), self.low, found.values), self.low, self.high)
        x = np.where(found.missing, 0.0, np.clip(2.0 * (within - self.low) / (self.high - self.low) - 1.0, -1.0, 1.0))
        return np.stack([x, found.missing.astype(np.float64)] if self.missing else [x], axis=1)


def _report(name: str, column: Column, file: str, problems: Problems, found: Numbers, missing: bool) -> None:
    """Add what is wrong with a column of numbers."""
    wrong = np.flatnonzero(found.wrong | np.isinf(found.values))
    if len(wrong):
        problems.add(
            *(file, f"column {name[:LONG]!r}", "the value is not a finite number"),
            rows=[int(row) + 1 for row in wrong],
            remedy="Put numbers in, or describe the column as a category.",
            found=column[wrong[0]],
        )
    empty = np.flatnonzero(found.missing)
    if len(empty) and not missing:
        problems.add(
            *(file, f"column {name[:LONG]!r}", "the value is missing"),
            rows=[int(row) + 1 for row in empty],
            remedy=_ALLOW_EMPTY,
        )


@dataclass(frozen=True)
class Category:
    """A column of names out of a public list: one column for each, 1 where it is the name of the record.

    With `missing`, a cell may be empty or hold another name: it becomes zeros. Without it such a cell is refused.

    >>> Category("sex", ("Female", "Male")).encode(["Male", "Female"], "people.csv", Problems())
    array([[0., 1.],
           [1., 0.]])
    """

    kind: ClassVar[str] = "category"

    name: str
    categories: tuple[str, ...]
    missing: bool = False

    def __post_init__(self) -> None:
        _check_name(self.name, self.missing)
        given = self.categories
        if isinstance(given, str) or not all(isinstance(c, str) and c and c == c.strip() and is_line(c) for c in given):
            raise DataError(
                f"column {self.name!r}: categories should be a list of texts, none of them empty, with blanks at its "
                "ends or with control characters."
            )
        if not given or len(set(given)) != len(given):
            raise DataError(f"column {self.name!r}: categories should be one or more different names.")
        object.__setattr__(self, "categories", tuple(given))

    @property
    def features(self) -> tuple[str, ...]:
        """The names of its columns after encoding."""
        return tuple(f"{self.name}={category}" for category in self.categories)

    def to_dict(self) -> dict[str, Any]:
        """What `Schema.of` reads."""
        given = {"kind": self.kind, "categories": list(self.categories)}
        return {**given, "missing": True} if self.missing else given

    def encode(self, column: Column, file: str, problems: Problems) -> NDArray[np.float64]:
        """The encoded column, (n, features); what is wrong with it is added to `problems`."""
        place = {category: k for k, category in enumerate(self.categories)}
        cells = texts(column)
        places = np.array([place.get(cell, place.get(_plain(cell), -1)) for cell in cells])
        if not self.missing:
            self._report(cells, np.flatnonzero(places < 0).tolist(), file, problems)
        made = np.zeros((len(cells), len(place)))
        known = places >= 0
        made[known, places[known]] = 1.0
        return made

    def _report(self, cells: list[str], unknown: list[int], file: str, problems: Problems) -> None:
        """Add what is wrong with the rows whose cell is not a category."""
        where = f"column {self.name[:LONG]!r}"
        empty = [row for row in unknown if is_missing(cells[row])]
        others = [row for row in unknown if not is_missing(cells[row])]
        if empty:
            problems.add(file, where, "the value is missing", rows=[row + 1 for row in empty], remedy=_ALLOW_EMPTY)
        if others:
            problems.add(
                *(file, where, f"the value is none of the {len(self.categories)} categories"),
                rows=[row + 1 for row in others],
                remedy="Name all categories, or allow others and empty cells with `missing = true`.",
                found=cells[others[0]],
            )


def _plain(cell: str) -> str:
    """A whole number as other programs write it: 3.0 is 3."""
    head, point, zeros = cell.partition(".")
    return head if point and zeros and not zeros.strip("0") else cell


Kind = Number | Category
_KINDS: dict[str, type[Number] | type[Category]] = {each.kind: each for each in (Number, Category)}


def _check_name(name: object, missing: object) -> None:
    if not isinstance(name, str) or name != name.strip() or not name or not is_line(name):
        raise DataError(f"a column's name should be a text on one line, not {name!r}.")
    if not isinstance(missing, bool):
        raise DataError(f"column {name!r}: missing should be true or false, got {missing!r}.")


@dataclass(frozen=True)
class Schema:
    """The columns of a table that are used, in their order, each with what is publicly known of it.

    Guarantees: a record's code depends on that record and this schema alone, and every number of it is in [-1, 1].

    >>> schema = Schema((Number("age", 20, 60), Category("sex", ("Female", "Male"))))
    >>> schema.encode({"age": ["30"], "sex": ["Male"]}, "people.csv")
    tensor([[-0.5000,  0.0000,  1.0000]])
    >>> schema.features
    ('age', 'sex=Female', 'sex=Male')
    """

    columns: tuple[Kind, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "columns", tuple(self.columns))
        if not self.columns:
            raise DataError("a schema needs one column at least.")
        if self.width > MOST_FEATURES:
            raise DataError(f"the columns become {self.width} features, more than {MOST_FEATURES}.")
        names = [column.name for column in self.columns]
        for each in (names, self.features):
            if len(set(each)) != len(each):
                raise DataError(f"{next(name for name in each if each.count(name) > 1)!r} names two columns.")

    @property
    def features(self) -> tuple[str, ...]:
        """The names of the columns after encoding."""
        return tuple(name for column in self.columns for name in column.features)

    @property
    def width(self) -> int:
        """How many numbers a record becomes."""
        return sum(len(column.features) for column in self.columns)

    def encode(self, table: Table, file: str, remedy: str = "") -> Tensor:
        """The records as float32, (n, width). All that is wrong with the table is one `DataError`; `file` names it.

        It ends with `remedy`, or with what to change in the schema.
        """
        problems = Problems(remedy)
        encoded = self.gather(table, file, problems)
        problems.check()
        assert encoded is not None
        return encoded

    def gather(self, table: Table, file: str, problems: Problems) -> Tensor | None:
        """As `encode`, but what is wrong is added to `problems`; None where columns are missing or do not fit."""
        absent = [column.name for column in self.columns if column.name not in table]
        problems.add_absent(file, absent, table, "The schema names it.")
        parts = []
        for column in self.columns:
            if column.name not in table:
                continue
            try:
                parts.append(column.encode(table[column.name], file, problems).astype(np.float32))
            except ValueError as error:  # also bytes that are not UTF-8
                problems.add(file, f"column {column.name[:LONG]!r}", f"it holds {_kind_of(error)}")
        if len(parts) < len(self.columns):
            return None
        if len({len(part) for part in parts}) > 1:
            problems.add(file, "columns", f"they have different lengths, {sorted({len(part) for part in parts})}")
            return None
        return torch.from_numpy(np.concatenate(parts, axis=1))

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """What `Schema.of` reads, for JSON or TOML; the order of the columns counts."""
        return {column.name: column.to_dict() for column in self.columns}

    @classmethod
    def of(cls, columns: Mapping[str, Any]) -> Schema:
        """A schema from `to_dict()`, or from the table `[data.columns]` of a configuration.

        >>> Schema.of({"age": {"kind": "number", "low": 17, "high": 90}}).columns
        (Number(name='age', low=17.0, high=90.0, missing=False),)
        """
        if not isinstance(columns, Mapping):
            raise DataError(f"columns should be a table of columns by name, got {type(columns).__name__}.")
        return cls(tuple(_column(name, given) for name, given in columns.items()))

    @classmethod
    def propose(cls, table: Table, target: str | None = None) -> Schema:
        """A schema read off the records: bounds, categories and whether cells are missing.

        Epsilon does not cover what is read here. Round the bounds, and complete the categories, by what is publicly
        known. Columns without information, numbers that count the rows, and text with too many values to be categories
        are left out.

        >>> table = {"age": ["30", "41"], "sex": ["Male", "Female"], "y": ["0", "1"]}
        >>> [column.name for column in Schema.propose(table, "y").columns]
        ['age', 'sex']
        """
        return proposed(table, target)[0]


def proposed(table: Table, target: str | None = None) -> tuple[Schema, dict[str, str]]:
    """`Schema.propose`, and the columns that it leaves out, each with the reason.

    >>> proposed({"age": ["30", "41"], "plan": ["a", "a"]})[1]
    {'plan': 'the same in every row'}
    """
    made = {name: _proposed(name, column) for name, column in table.items() if name != target}
    columns = tuple(column for column in made.values() if not isinstance(column, str))
    if not columns:
        raise DataError("there is no column to describe: each is empty, the same in every record, or free text.")
    return Schema(columns), {name: column for name, column in made.items() if isinstance(column, str)}


def _kind_of(error: ValueError) -> str:
    return "text that is not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)


def _column(name: str, given: Any) -> Kind:
    """One column from its table; whatever is not known is refused."""
    if not isinstance(given, Mapping):
        raise DataError(f"column {name!r} should be a table such as {{kind = 'number', low = 0, high = 1}}.")
    kind = _KINDS.get(given.get("kind", "")) if isinstance(given.get("kind", ""), str) else None
    if kind is None:
        raise DataError(f"column {name!r}: kind should be one of {', '.join(_KINDS)}, got {given.get('kind')!r}.")
    needed = {"low", "high"} if kind is Number else {"categories"}
    odd = ({*given} - {"kind", "missing"}) ^ needed
    if odd:
        missing_or_unknown = ", ".join(sorted(map(str, odd)))[:LONG]
        raise DataError(
            f"column {name!r}: a {kind.kind} has {', '.join(sorted(needed))} and perhaps missing; missing or unknown "
            f"is {missing_or_unknown}."
        )
    missing = given.get("missing", False)
    if kind is Number:
        return Number(name, given["low"], given["high"], missing)
    categories = given["categories"]
    if not isinstance(categories, (list, tuple)) or not all(type(each) in (str, int) for each in categories):
        raise DataError(f"column {name!r}: categories should be a list of texts or whole numbers.")
    return Category(name, tuple(map(str, categories)), missing)


def _proposed(name: str, column: Column) -> Kind | str:
    """What one column seems to be, or why it is left out."""
    try:
        found, cells = numbers(column), texts(column)
    except ValueError:
        return "several numbers in a row, or bytes that are not text"
    present = ~found.missing
    if not present.any():
        return "empty"
    if not found.wrong.any():
        values = found.values[present]
        low, high = float(values.min()), float(values.max())
        if not is_finite(high - low):
            return "not finite"
        if _count_rows(values, low, high):
            return "a number for every row, one after the other"
        return Number(name, low, high, bool(found.missing.any())) if low < high else _SAME
    values_of = sorted({cell for cell in cells if not is_missing(cell) and is_line(cell)})
    if len(values_of) < 2:
        return _SAME
    if len(values_of) > _MOST_PROPOSED:
        every = "every row different" if len(values_of) == int(present.sum()) else f"{len(values_of):,} different texts"
        return f"text, {every}"
    return Category(name, tuple(values_of), any(map(is_missing, cells)))


def _count_rows(values: NDArray[np.float64], low: float, high: float) -> bool:
    """Whether the numbers only count the rows, as an identifier does."""
    count = len(values)
    if count < _FEWEST_COUNTED or high - low != count - 1:
        return False
    return bool(np.array_equal(np.sort(values), low + np.arange(count)))
