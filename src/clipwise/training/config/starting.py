"""What a proposed configuration begins with: numbers by the size of a table and its task, and what was left out."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from clipwise.data import Kind, Number

__all__ = [
    "NARROW",
    "PAID_HEAD",
    "PROPOSAL",
    "READ_OFF_HEAD",
    "TOO_SPREAD",
    "Start",
    "bounds_of",
    "left_out_of",
    "plain",
    "range_of",
    "short",
]

READ_OFF_HEAD = """\
# A starting point, read off the records of {name}: epsilon does not cover [data.columns]. Replace bounds and categories
# by what is publicly known, then remove `columns_public = false`; until then the report says so."""
PAID_HEAD = """\
# A starting point for {name}. Bounds and categories were found with noise; what they cost is on the columns_ledger and
# part of the epsilon below."""
PROPOSAL = """\
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
TOO_SPREAD = "too spread out, or too many different texts, for this epsilon"
NARROW = (
    "target_bounds leave out ends that few records have, and no prediction is beyond them: widen them by what is "
    "publicly known"
)
_STEPS, _FEWEST_EPOCHS, _LARGEST_BATCH = 640, 20, 512
_FEW = 10_000


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


def range_of(column: Any) -> tuple[float, float] | None:
    """The smallest and the largest number of a target, which training looks at again; None where there are none."""
    try:
        values = [value for cell in column if math.isfinite(value := float(cell))]
    except (TypeError, ValueError):
        return None
    return (min(values), max(values)) if values and min(values) < max(values) else None


def bounds_of(column: Kind) -> tuple[float, float] | None:
    """Those of a column of numbers."""
    return (column.low, column.high) if isinstance(column, Number) else None


def short(column: Mapping[str, Any]) -> dict[str, Any]:
    """Whole numbers without the point."""
    return {k: plain(v) if isinstance(v, float) else v for k, v in column.items()}


def plain(value: float) -> float:
    """A whole number without the point."""
    return int(value) if value.is_integer() and abs(value) < 2**53 else value
