"""What an evaluation found, as frozen values with a JSON form; and a metric over several runs, with differences."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, TypeAlias

import numpy as np
from scipy import stats

from clipwise._json import Fields
from clipwise._show import html_table, percent
from clipwise._validate import is_count, is_finite
from clipwise.calibration.bins import FINE_BINS, Bins
from clipwise.calibration.metrics import Metric, Task, metric_named, metrics_of, numbers_of

__all__ = ["CalibrationResult", "Difference", "Estimate", "RegressionResult", "Result", "difference", "estimates_of"]

Interval = tuple[float, float]
_NOT_FINITE = ("inf", "-inf", "nan")
_ROUNDING = 1e-9


@dataclass(frozen=True)
class _Written:
    count: int

    def to_dict(self) -> dict[str, Any]:
        """The result as a JSON object; infinite numbers, and numbers that are keys, are written as text."""
        return {f.name: _plain(getattr(self, f.name)) for f in fields(self)}


@dataclass(frozen=True)
class CalibrationResult(_Written):
    """How good the probabilities of a classifier are. `docs/calibration.md` says what each number means.

    `intervals` maps a metric's name to its bootstrap interval at the probability `level`, or is None when no
    resamples were asked for. `true_class_histogram` counts the probability of the true class over `bins.edges`.
    `fine_bins` are 60 bins: `fine_bins.merged(10)` are 10, and so for every divisor of 60. `notes` say what is
    approximate.
    """

    task: ClassVar[Task] = "classification"

    classes: int
    accuracy: float
    confidence: float
    nll: float
    ece: float
    mce: float
    brier: float
    classwise_ece: float
    adaptive_ece: float
    debiased_ece: float
    debiased_rmsce: float
    smooth_ece: float
    bins: Bins
    adaptive_bins: Bins
    fine_bins: Bins
    true_class_histogram: tuple[int, ...]
    intervals: Mapping[str, Interval] | None = None
    level: float = 0.95
    resamples: int = 0
    notes: tuple[str, ...] = field(default=())

    @property
    def metrics(self) -> dict[str, float]:
        """Every single number by its name, without the bins and the intervals."""
        return numbers_of(self)

    def __repr__(self) -> str:
        """The numbers, without bins and intervals: one line."""
        numbers = ", ".join(f"{name}={value:.4g}" for name, value in self.metrics.items())
        return f"CalibrationResult(count={self.count}, classes={self.classes}, {numbers}, bins={len(self.bins)})"

    def _repr_html_(self) -> str:
        return _html(self)

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> CalibrationResult:
        """Read what `to_dict` wrote; unknown and missing fields are refused."""
        given, values = _read(cls, record)
        for name in ("bins", "adaptive_bins", "fine_bins"):
            values[name] = Bins.from_dict(given.object(name).value)
        histogram = given.many("true_class_histogram", lambda n: is_count(n, 0), "counts")
        if len(histogram) != len(values["bins"]):
            given.fail("true_class_histogram", f"{len(values['bins'])} counts, one for each bin")
        if len(values["fine_bins"]) != FINE_BINS:
            given.fail("fine_bins", f"{FINE_BINS} bins")
        for bins in (values["bins"], values["fine_bins"]):
            if sum(bins.count) != values["count"]:
                given.fail("count", f"{sum(bins.count):,}, the samples in the bins")
            for name in ("accuracy", "confidence"):
                _agree(given, name, bins.mean(name))
        for name in ("ece", "mce"):
            _agree(given, name, getattr(values["bins"], name))
        return cls(
            **values,
            classes=given.count("classes", 2),
            true_class_histogram=tuple(histogram),
            notes=given.texts("notes"),
        )


@dataclass(frozen=True)
class RegressionResult(_Written):
    """How good predictions of a number are, and how often their Gaussian intervals hold the truth.

    `coverage` maps the nominal level of the central interval to the share of targets inside, and with `nll` (of the
    Gaussian) it needs predicted standard deviations; without them it is empty and `nll` is None. `r2` is None when
    all targets are equal. `intervals` has "coverage 0.9" for the coverage at 0.9.
    """

    task: ClassVar[Task] = "regression"

    mse: float
    rmse: float
    r2: float | None
    nll: float | None = None
    coverage: Mapping[float, float] = field(default_factory=dict)
    intervals: Mapping[str, Interval] | None = None
    level: float = 0.95
    resamples: int = 0

    @property
    def metrics(self) -> dict[str, float]:
        """Every single number by its name, as far as it is defined; the coverage at 0.9 is "coverage 0.9"."""
        return numbers_of(self)

    def _repr_html_(self) -> str:
        return _html(self)

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> RegressionResult:
        """Read what `to_dict` wrote; unknown and missing fields are refused."""
        given, values = _read(cls, record)
        if math.isfinite(values["mse"]) and values["mse"] >= 0.0:
            _agree(given, "rmse", math.sqrt(values["mse"]))
        levels = given.object("coverage")
        shares = {_level(levels, name): levels.number(name, 0.0, 1.0) for name in levels.value}
        return cls(**values, coverage=shares)


def _html(result: Result) -> str:
    """Every metric of a result as a table for a notebook, with its interval where there is one."""
    level, intervals = f"{percent(result.level, 0)} interval", result.intervals or {}
    rows = []
    for name, value in result.metrics.items():
        metric = metric_named(name, result.task)
        rows.append(
            (metric.heading, metric.text(value), *([metric.span(*intervals[name])] if name in intervals else []))
        )
    notes = result.notes if isinstance(result, CalibrationResult) else ()
    header = ("", "measured", level) if intervals else ()
    return html_table(f"{result.task} of {result.count:,} samples".capitalize(), rows, header, notes)


Result: TypeAlias = CalibrationResult | RegressionResult
"""What an evaluation found, of either task."""


def _plain(value: Any) -> Any:
    """Tuples as lists, mappings with text for keys, and numbers that strict JSON does not have as text."""
    if isinstance(value, Bins):
        return value.to_dict()
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _agree(given: Fields, name: str, value: float) -> None:
    """Refuse a number that the others of the same result do not give."""
    if not math.isclose(float(given.value[name]), value, rel_tol=_ROUNDING, abs_tol=_ROUNDING):
        given.fail(name, f"{value:.6g}, as the other numbers say")


def _read(kind: type[Any], record: Mapping[str, Any]) -> tuple[Fields, dict[str, Any]]:
    """The fields of a result, and those that both results have; numbers written as text are numbers again."""
    given = Fields(record, f"A {kind.__name__}", [f.name for f in fields(kind)])
    known = {metric.name: metric for metric in metrics_of(kind.task)}
    found: dict[str, Any] = {}
    for each in fields(kind):
        if each.name not in known or each.type not in ("float", "float | None"):
            continue
        value = given.value[each.name]
        found[each.name] = None if value is None and "None" in str(each.type) else _metric(given, known[each.name])
    found["count"] = given.count("count", 1)
    found["resamples"] = given.count("resamples")
    found["level"] = given.number("level", 0.0, 1.0)
    found["intervals"] = None if given.is_null("intervals") else _intervals(given.object("intervals"))
    return given, found


def _metric(given: Fields, metric: Metric) -> float:
    """A measured number within its range, up to rounding; an infinite one is written as text."""
    low, high = metric.range
    for end in (low, high):
        if math.isinf(end) and given.value[metric.name] == str(end):
            return end
    return given.number(metric.name, low - _ROUNDING, high + _ROUNDING)


def _intervals(given: Fields) -> dict[str, Interval]:
    found = {}
    for name in given.value:
        ends = given.many(name, lambda end: is_finite(end) or end in _NOT_FINITE, "two numbers")
        if len(ends) != 2:
            given.fail(name, "two numbers")
        found[name] = (float(ends[0]), float(ends[1]))
    return found


def _level(given: Fields, name: str) -> float:
    try:
        level = float(name)
    except ValueError:
        level = -1.0
    if not 0.0 < level < 1.0:
        given.fail(name, "named by a level between 0 and 1")
    return level


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
