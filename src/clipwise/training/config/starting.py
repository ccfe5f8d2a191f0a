"""A configuration to start from: numbers by the size of a table and its task, its columns, and what was left out."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clipwise.accounting import Ledger
from clipwise.data import Kind, Number, PrivateSchema, Schema, class_names, no_column, proposed, read_table
from clipwise.errors import DataError, LedgerError
from clipwise.files import in_turn
from clipwise.training.config.toml import inline

__all__ = ["FEWEST_OF_A_CLASS", "FEWEST_QUANTITIES", "Start", "left_out_of", "proposal"]

_READ_OFF_HEAD = """\
# A starting point, read off the records of {name}: epsilon does not cover [data.columns], classes and target_bounds.
# Replace bounds, categories and classes by what is publicly known, then remove `columns_public = false`; until then the
# report says so."""
_PAID_HEAD = """\
# A starting point for {name}. Bounds and categories were found with noise; what they cost is on the columns_ledger and
# part of the epsilon below."""
_PROPOSAL = """\
{head}
epochs = {start.epochs}
batch_size = {start.batch_size}

[data]
{data}

[data.columns]
{columns}

[model]
source = "mlp"
hidden = [32]

[clip]
rule = "Abadi"
R = {start.norm}

[optimizer]
name = "Adam"
learning_rate = {start.learning_rate}

[privacy]
epsilon = 3.0
"""
_TOO_SPREAD = "too spread out, or too many different texts, for this epsilon"
_UNNAMED_CLASSES = (
    "the classes are not described: name those that are publicly known, [data] classes = [...]; without it they are "
    "those in the records, which epsilon does not cover"
)
_NARROW = (
    "target_bounds leave out ends that few records have, and no prediction is beyond them: widen them by what is "
    "publicly known"
)
_STEPS, _FEWEST_EPOCHS, _LARGEST_BATCH = 640, 20, 512
_FEW = 10_000
_ENOUGH = 0.9
"""Of the records: bounds that surely have fewer are called narrow."""
_MOST_CLASSES = 100
"""More are not listed."""
FEWEST_QUANTITIES = 20
"""A target with as many different numbers is proposed as a quantity."""
FEWEST_OF_A_CLASS = 5
"""Records of a class, on average, below which classes are doubted."""


@dataclass(frozen=True)
class Start:
    """The numbers of a run to begin with. They depend on the number of records and the task alone, which are public."""

    records: int
    epochs: int
    batch_size: int
    learning_rate: float
    norm: float
    """R of Abadi's rule."""

    @classmethod
    def of(cls, records: int, task: str) -> Start:
        """For so many records, of which a fifth is held out.

        Batches are a twentieth of them, with an upper limit; a small table is read as often as `_STEPS` steps need.
        Noise grows with the norm: with few records a large one leaves a classifier under-confident, with many a small
        one leaves it over-confident. Squared errors of targets from -1 to 1 have gradients of the order of 1.

        >>> [(start.epochs, start.batch_size) for start in (Start.of(n, "regression") for n in (500, 3_000, 50_000))]
        [(40, 25), (40, 150), (20, 512)]
        """
        batch_size = max(1, min(_LARGEST_BATCH, records // 20))
        epochs = max(_FEWEST_EPOCHS, round(_STEPS * batch_size / (0.8 * records)))
        norm = 1.0 if task == "regression" else 3.0 if records < _FEW else 10.0
        return cls(records, epochs, batch_size, 0.005, norm)


def left_out_of(columns: Mapping[str, str], few: int | None = None) -> Iterator[str]:
    """A line for every column that is left out; last, that so `few` records are few for finding them with noise.

    >>> list(left_out_of({"id": "text, every row different"}))
    ["left out: 'id' (text, every row different)"]
    """
    for name, why in columns.items():
        yield f"left out: {name!a} ({why})"
    if few is not None and columns:
        yield (
            f"{few:,} records are few for this epsilon: describe these columns in [data.columns] by what is publicly "
            "known, or spend more"
        )


def _narrow(surely: Mapping[str, float], records: int) -> Iterator[str]:
    """A line for every column whose bounds surely have too few of the records; last, what to do about it.

    >>> next(_narrow({"age": 580.0, "visits": 1960.0}, 2_000))
    "bounds may be narrow: 'age' (only about 29 % of the records are surely within them)"
    """
    few = {name: count / records for name, count in surely.items() if count < _ENOUGH * records}
    for name, share in few.items():
        yield f"bounds may be narrow: {name!a} (only about {100 * share:.0f} % of the records are surely within them)"
    if few:
        yield "cells beyond bounds count as the bound: widen narrow bounds by what is publicly known, or spend more"


def _range_of(column: Any) -> tuple[float, float] | None:
    """The smallest and the largest number of a target, which training looks at again; None where there are none."""
    try:
        values = [value for cell in column if math.isfinite(value := float(cell))]
    except (TypeError, ValueError):
        return None
    return (min(values), max(values)) if values and min(values) < max(values) else None


def _bounds_of(column: Kind) -> tuple[float, float] | None:
    """Those of a column of numbers."""
    return (column.low, column.high) if isinstance(column, Number) else None


def _short(column: Mapping[str, Any]) -> dict[str, Any]:
    """Whole numbers without the point."""
    return {k: _plain(v) if isinstance(v, float) else v for k, v in column.items()}


def _plain(value: float) -> float:
    """A whole number without the point."""
    return int(value) if value.is_integer() and abs(value) < 2**53 else value


def proposal(
    path: str,
    target: str,
    *,
    delimiter: str = ",",
    task: str | None = None,
    spend: PrivateSchema | None = None,
    ledger: str | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> str:
    r"""A configuration to start from for a table in a file, as TOML.

    Epsilon does not cover what it reads, unless `spend` says how it looks; what that costs is then charged to the
    `ledger`, a file that is continued if it is there. `tell` hears what was guessed and left out.

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp(), "pets.csv")
    >>> _ = file.write_text("weight,kind\n4.1,cat\n0.03,bird\n5.0,cat\n")
    >>> [line for line in proposal(str(file), "kind").splitlines() if line.startswith("weight")]
    ['weight = { kind = "number", low = 0.03, high = 5 }']
    """
    if (spend is None) != (ledger is None):
        raise DataError("what a private schema costs goes on a ledger: name its file, and how much to spend.")
    if spend is not None and task is None:
        raise DataError("say --task classification or regression: otherwise it would be read off the records.")
    table = read_table(Path(path), delimiter)
    if target not in table:
        raise no_column(path, [target], table, "to predict", "Name it with --target.")
    if spend is None:
        task = _told_task(table[target], task, tell)
    chosen: dict[str, Any] = {"source": path, "target": target, "task": task}
    if delimiter != ",":
        chosen["delimiter"] = delimiter
    quantity = target if chosen["task"] == "regression" else None
    surely: dict[str, float] = {}
    if spend is None or ledger is None:
        schema, left_out = proposed(table, target)
        bounds, head = _range_of(table[target]) if quantity else None, _READ_OFF_HEAD
        chosen |= {} if quantity else _read_off_classes(path, target, table[target])
        chosen["columns_public"] = False
    else:
        with in_turn(os.path.realpath(ledger), LedgerError):  # others may charge it at the same time
            charged = Ledger.load(ledger) if Path(ledger).exists() else Ledger()
            found, surely = spend.proposed(table, None if quantity else target, charged, ledger)
        bounds, head = next((_bounds_of(each) for each in found.columns if each.name == quantity), None), _PAID_HEAD
        schema = Schema(tuple(column for column in found.columns if column.name != quantity))
        known = {target, *(column.name for column in schema.columns)}
        left_out = {name: _TOO_SPREAD for name in table if name not in known}
        chosen["columns_ledger"] = ledger
    start = Start.of(len(table[target]), chosen["task"])
    notes = [*left_out_of(left_out, start.records if spend else None), *_narrow(surely, start.records)]
    notes += [] if quantity or "classes" in chosen else [_UNNAMED_CLASSES]
    if bounds is not None:
        chosen["target_bounds"] = [_plain(end) for end in bounds]
        notes += [_NARROW] if spend else []
    elif quantity:
        notes.append(f"the bounds of the target were not found: give [data] target_bounds = [low, high] for {target!a}")
    for note in notes:
        tell(note)
    return _PROPOSAL.format(
        head="\n".join([head.format(name=ascii(Path(path).name)), *(f"# {note}" for note in notes)]),
        start=start,
        data=inline(chosen),
        columns=inline({name: _short(column) for name, column in schema.to_dict().items()}),
    )


def _read_off_classes(file: str, target: str, column: Any) -> dict[str, list[str]]:
    """The key of the classes that occur, unless they are too many to be read."""
    names = class_names(file, target, column)
    return {"classes": list(names)} if len(names) <= _MOST_CLASSES else {}


def _told_task(column: Any, task: str | None, tell: Callable[[str], None]) -> str:
    """The task that was named, or classes unless the target has many different numbers; doubts are reported."""
    try:
        count, what = len({float(value) for value in column}), "numbers"
    except ValueError:
        count, what = len(set(column)), "texts"
    if task is None:
        task = "classification" if what == "texts" or count < FEWEST_QUANTITIES else "regression"
        tell(f"task = {task} (the target has {count:,} different {what}); --task changes it")
    if task == "classification" and count >= FEWEST_QUANTITIES and count > len(column) // FEWEST_OF_A_CLASS:
        tell(f"warning: {count:,} classes for {len(column):,} records; is --target right, or is it a regression?")
    return task
