"""A file of predicted probabilities with the true classes, of whatever model: one column for each class."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from clipwise.data.readers import FEW, Problems, Table, all_numbers, is_missing, no_column, numbers, read_table, texts
from clipwise.errors import DataError

__all__ = ["Predictions", "read_predictions"]

_ROUNDING = 1e-3  # files have few digits: a row of ten classes with four of them is off by up to 5e-4
_MOST_ROUNDING = 0.05  # of hundreds of classes with two digits each a sum says nothing any more
_CHOOSE = "--classes chooses the columns of probabilities."
_CASE = "Upper and lower case count."
_PERCENT = "If these are percentages, divide them by 100."


@dataclass(frozen=True, eq=False)
class Predictions:
    """Probabilities of the shape (samples, classes), the true class of each sample, and the classes in their order."""

    probabilities: NDArray[np.float64]
    labels: tuple[str, ...]
    classes: tuple[str, ...]
    off: float = 0.0
    """How far from 1 the probabilities of a sample added up, at most, before they were divided by their sum."""


def read_predictions(
    path: str | os.PathLike[str],
    label: str = "label",
    *,
    classes: Sequence[str] | None = None,
    positive: str | None = None,
    labels_file: str | os.PathLike[str] | None = None,
    prefix: str = "",
    normalise: bool = False,
    delimiter: str = ",",
) -> Predictions:
    r"""Probabilities and labels from a CSV, Parquet or NPZ file.

    - `label`: the column with the true class, in `labels_file` if there is one: row by row the same samples.
    - `classes`: the columns with the probabilities, named as the labels name the classes; all others by default.
    - `positive`: the class that a single column of probabilities is about; needed unless the column is named after a
      class, or the labels are 0 and 1.

    - `prefix`: what the names of the columns have before the name of the class; columns without it are not used.
    - `normalise`: divide each row by its sum, whatever that is.

    Rows may be off from the sum 1 by rounding to two decimals or more, and are divided by their sum.

    Raises: DataError, with all that is wrong with the cells in one message.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp(), "predictions.csv")
    >>> _ = path.write_text("cat,dog,label\n0.9,0.1,cat\n0.4,0.6,cat\n")
    >>> read_predictions(path).classes
    ('cat', 'dog')
    """
    file, table = str(path), read_table(Path(path), delimiter)
    named = file if labels_file is None else str(labels_file)
    true = _labels(named, table if labels_file is None else read_table(Path(labels_file), delimiter), label)
    if labels_file is None:
        table = {name: column for name, column in table.items() if name != label}
    if prefix:
        table = {name.removeprefix(prefix): column for name, column in table.items() if name.startswith(prefix)}
    chosen = tuple(table) if classes is None else tuple(classes)
    absent = [name for name in chosen if name not in table]
    if absent:
        raise no_column(file, absent, table, "of probabilities")
    if not chosen:
        begins = f" whose name begins with {prefix!r}" if prefix else ""
        raise DataError(f"{file} has no column of probabilities{begins}.")
    problems = Problems()
    columns = np.stack([_column(problems, file, name, table) for name in chosen], axis=1)
    if len(columns) != len(true):
        raise DataError(f"{file} has {len(columns):,} rows, but {named} has {len(true):,} labels.")
    if len(chosen) == 1:
        chosen = _two(problems, chosen[0], positive, true, named, label)
        columns = np.stack([1 - columns[:, 0], columns[:, 0]], axis=1)
    elif positive is not None:
        raise DataError(f"positive= goes with a single column of probabilities; {file} has {len(chosen)}.")
    chosen = _unquoted(chosen, true)
    known = set(chosen)
    missing = [row for row, each in enumerate(true, 1) if is_missing(each) and each not in known]
    other = [row for row, each in enumerate(true, 1) if each not in known and not is_missing(each)]
    if missing:
        problems.add(named, f"column {label!r}", "the label is missing", rows=missing)
    if other:
        problems.add(
            named,
            f"column {label!r}",
            f"the label is none of the {len(chosen)} classes{_named(chosen)}",
            rows=other,
            remedy=(
                _case({true[row - 1] for row in other}, chosen),
                "Columns are named as the labels name the classes; --prefix p_ is for names as p_cat.",
                _CHOOSE,
            ),
            found=true[other[0] - 1],
        )
    sums = columns.sum(axis=1)
    allowed = np.inf if normalise else _rounding(columns)
    off = np.flatnonzero(np.isfinite(sums) & ((np.abs(sums - 1) > allowed) | (sums == 0))) + 1
    if len(off):
        problems.add(
            file,
            "",
            f"the probabilities do not add up to 1{'' if normalise else ' within rounding'}",
            rows=off.tolist(),
            remedy=(_CHOOSE, "" if normalise else "--normalise divides each row by its sum."),
            found=f"the sum {sums[off[0] - 1]:.6g}",
        )
    problems.check()
    return Predictions(columns / sums[:, None], true, chosen, float(np.abs(sums - 1).max()))


def _named(classes: Sequence[str]) -> str:
    """The classes, unless the first line of the file may be a record."""
    shown = ", ".join(classes[:FEW]) + (", ..." if len(classes) > FEW else "")
    return "" if any(all_numbers([each]) for each in classes) else f", which are the columns {shown}"


def _case(given: Iterable[str], known: Iterable[str]) -> str:
    """What to say of names that are known in another case."""
    return _CASE if {each.casefold() for each in given} & {each.casefold() for each in known} else ""


def _rounding(columns: NDArray[np.float64]) -> float:
    """How far from 1 the sum of a row may be because its numbers have few decimals, and two at least."""
    finite = columns[np.isfinite(columns)]
    decimals = next((d for d in range(2, 7) if bool(np.all(np.abs(finite - finite.round(d)) < 1e-9))), 7)
    return float(max(_ROUNDING, min(columns.shape[1] * 0.5 * 10.0**-decimals, _MOST_ROUNDING) + 1e-9))


def _unquoted(classes: tuple[str, ...], true: Sequence[str]) -> tuple[str, ...]:
    """The classes without the apostrophe that `clipwise predict` puts before a name that looks like a formula."""
    occur = set(true)
    return tuple(name[1:] if name[:1] == "'" and name not in occur and name[1:] in occur else name for name in classes)


def _labels(file: str, table: Table, label: str) -> tuple[str, ...]:
    if label not in table:
        raise no_column(file, [label], table, "of labels", "Name it with --label.")
    try:
        return tuple(texts(table[label]))
    except ValueError as error:
        raise DataError(f"{file}, column {label!r}: labels are one number or text a row, not {error}.") from None


def _column(problems: Problems, file: str, name: str, table: Table) -> NDArray[np.float64]:
    """A column of probabilities; what is not one is reported."""
    where, column = f"column {name!r}", table[name]
    if not isinstance(column, list) and column.ndim != 1:
        raise DataError(f"{file}, {where}: one number a row is needed, not an array of shape {column.shape}.")
    try:
        found = numbers(column)
    except (TypeError, ValueError):
        raise DataError(f"{file}, {where}: numbers are needed.") from None
    outside = ~found.missing & ~found.wrong & ~((found.values >= 0) & (found.values <= 1))
    kinds = (("is missing", found.missing), ("is not a number", found.wrong), ("is not from 0 to 1", outside))
    for what, wrong in kinds:
        rows = np.flatnonzero(wrong) + 1
        if len(rows):
            problems.add(
                *(file, where, f"the value {what}"),
                rows=rows.tolist(),
                remedy=(_PERCENT if wrong is outside and _may_be_percentages(found.values) else "", _CHOOSE),
                found=column[rows[0] - 1],
            )
    return np.where(outside, np.nan, found.values)


def _may_be_percentages(values: NDArray[np.float64]) -> bool:
    return bool(np.nanmin(values) >= 0 and 2 < np.nanmax(values) <= 100)


def _two(
    problems: Problems, column: str, positive: str | None, true: Sequence[str], file: str, label: str
) -> tuple[str, str]:
    """The two classes of a single column, the one that it is about last."""
    values = sorted({each for each in true if not is_missing(each)})
    if positive is None:
        positive = column if column in values else "1" if values in (["0", "1"], ["1"], ["0"]) else None
    if positive is None:
        raise DataError(
            f"the single column {column!r} of probabilities is not named after a class: name the class that it is "
            "about with --positive."
        )
    if len(values) > 1 and positive not in values:
        problems.add(
            *(file, f"column {label!r}", f"{positive!r} is none of the {len(values)} labels"),
            remedy=(_case([positive], values), "--positive names one of them."),
            found=", ".join(values[:FEW]),
        )
        problems.check()
    others = [each for each in values if each != positive]
    if len(others) > 1:
        problems.add(file, f"column {label!r}", f"{len(values)} classes, but only one column of probabilities")
        problems.check()
    return (others or [f"not {positive}"])[0], positive
