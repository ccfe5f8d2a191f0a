"""What an evaluation found, as frozen values with a JSON form."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, TypeAlias

from clipwise.calibration.bins import Bins
from clipwise.calibration.metrics import Task, numbers_of
from clipwise.errors import DataError

__all__ = ["CalibrationResult", "RegressionResult", "Result"]

Interval = tuple[float, float]


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

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> CalibrationResult:
        """Read what `to_dict` wrote; unknown and missing fields are refused."""
        values = _read(cls, record)
        values |= {name: Bins.from_dict(values[name]) for name in ("bins", "adaptive_bins", "fine_bins")}
        values |= {name: tuple(values[name]) for name in ("true_class_histogram", "notes")}
        return cls(**{**values, "intervals": _read_intervals(values["intervals"])})


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

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> RegressionResult:
        """Read what `to_dict` wrote; unknown and missing fields are refused."""
        values = _read(cls, record)
        values["coverage"] = {float(level): float(share) for level, share in values["coverage"].items()}
        return cls(**{**values, "intervals": _read_intervals(values["intervals"])})


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


def _read(kind: type[Any], record: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a result; numbers that `to_dict` wrote as text are numbers again."""
    names = {f.name for f in fields(kind)}
    if not isinstance(record, Mapping) or set(record) != names:
        got = sorted(record) if isinstance(record, Mapping) else record
        raise DataError(f"A {kind.__name__} has the fields {sorted(names)}, got {got!r}.")
    numbers = [f.name for f in fields(kind) if f.type in ("float", "float | None")]
    return {**record, **{name: float(record[name]) for name in numbers if record[name] is not None}}


def _read_intervals(record: Mapping[str, Any] | None) -> dict[str, Interval] | None:
    if record is None:
        return None
    return {name: (float(low), float(high)) for name, (low, high) in record.items()}
