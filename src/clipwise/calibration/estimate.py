"""A metric over several runs: mean, deviation and interval, and how far two of them are apart."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats

from clipwise.calibration.metrics import metric_named
from clipwise.calibration.values import Result

__all__ = ["Difference", "Estimate", "difference", "estimates_of"]

_LEVEL = 0.95


@dataclass(frozen=True)
class Estimate:
    """A metric of an arm: its mean over the seeds with their deviation, and an interval where there is one.

    `low` to `high` is a 95 % interval: Student's over the seeds when there are several, which is about training again
    and judging on the same held-out data; else the bootstrap's of the one run, which is about other held-out data.
    """

    mean: float
    deviation: float | None = None
    low: float | None = None
    high: float | None = None
    seeds: int = 1

    @classmethod
    def over_seeds(cls, values: Sequence[float], bounds: tuple[float, float] = (-math.inf, math.inf)) -> Estimate:
        """The mean with Student's interval, as far as it lies within the metric's `bounds`.

        >>> Estimate.over_seeds([0.90, 0.92, 0.94]).deviation
        0.02
        """
        mean, count = math.fsum(values) / len(values), len(values)
        if count == 1 or not math.isfinite(mean):
            return cls(mean, seeds=count)
        deviation = float(np.std(values, ddof=1))
        half = float(stats.t.ppf(0.5 + _LEVEL / 2, count - 1)) * deviation / math.sqrt(count)
        return cls(mean, round(deviation, 15), max(bounds[0], mean - half), min(bounds[1], mean + half), count)

    def to_dict(self) -> dict[str, Any]:
        """The estimate as a JSON object."""
        return {name: getattr(self, name) for name in ("mean", "deviation", "low", "high", "seeds")}


def estimates_of(results: Sequence[Result]) -> dict[str, Estimate]:
    """Every metric over the seeds, or of one run with its bootstrap intervals."""
    numbers, task = [result.metrics for result in results], results[0].task
    names = [name for name in numbers[0] if all(name in each for each in numbers)]
    if len(results) > 1:
        ranges = {name: metric_named(name, task).range for name in names}
        return {name: Estimate.over_seeds([each[name] for each in numbers], ranges[name]) for name in names}
    intervals = results[0].intervals or {}
    return {name: Estimate(numbers[0][name], None, *intervals.get(name, (None, None))) for name in names}


@dataclass(frozen=True)
class Difference:
    """How much a metric changes from one arm to another, and within which interval; `basis` says what that covers."""

    change: float
    low: float | None
    high: float | None
    basis: str

    @property
    def is_clear(self) -> bool:
        """Whether the interval leaves out zero."""
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)


def difference(before: Estimate, after: Estimate) -> Difference:
    """`after` minus `before`: Welch's interval over the seeds, else from both bootstrap intervals.

    >>> difference(Estimate.over_seeds([0.030, 0.031]), Estimate.over_seeds([0.010, 0.012])).is_clear
    True
    """
    change = after.mean - before.mean
    if before.deviation is not None and after.deviation is not None:
        first, second = (e.deviation**2 / e.seeds for e in (before, after) if e.deviation is not None)
        error = math.sqrt(first + second)
        if error == 0:
            return Difference(change, change, change, "over the seeds")
        freedom = (first + second) ** 2 / (first**2 / (before.seeds - 1) + second**2 / (after.seeds - 1))
        half = float(stats.t.ppf(0.5 + _LEVEL / 2, freedom)) * error
        return Difference(change, change - half, change + half, "over the seeds")
    ends = (before.low, before.high, after.low, after.high)
    if None in ends:
        return Difference(change, None, None, "")
    low, high = (float(e) for e in (before.low, before.high) if e is not None)
    other_low, other_high = (float(e) for e in (after.low, after.high) if e is not None)
    half = math.hypot((high - low) / 2, (other_high - other_low) / 2)
    return Difference(change, change - half, change + half, "over the held-out samples, from one run each")
