"""What an evaluation found, as frozen values with a JSON form."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, TypeAlias

from clipwise._json import Fields
from clipwise._show import html_table, percent
from clipwise._validate import is_count, is_finite
from clipwise.calibration.bins import FINE_BINS, Bins
from clipwise.calibration.metrics import Metric, Task, metric_named, metrics_of, numbers_of

__all__ = ["CalibrationResult", "RegressionResult", "Result"]

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
