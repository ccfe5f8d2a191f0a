"""Every metric, one row each: what it is called, how it is printed, where it can lie, which way is better.

Tables, figures, intervals, curves and comparisons all read this list. A metric that is computed from a finished result
is one row here, with `of`; one that needs the samples is also a field of the result, which its evaluation fills.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from clipwise._show import number, percent

if TYPE_CHECKING:
    from clipwise.calibration.values import Result

__all__ = ["METRICS", "Metric", "Task", "metric_named", "metrics_of", "numbers_of"]

Task: TypeAlias = Literal["classification", "regression"]
"""What is predicted: a class, or a number."""


@dataclass(frozen=True)
class Metric:
    """A number that judges predictions.

    >>> metric_named("ece").title, metric_named("ece").better, metric_named("coverage 0.9").label
    ('Calibration error (ECE)', 'smaller', 'coverage of 90 %')
    """

    name: str
    """The attribute of the result, and the key in every file."""
    task: Task
    label: str
    """In a sentence, or above a narrow column."""
    words: str = ""
    """In words, above a figure; the label unless given."""
    better: Literal["larger", "smaller"] | None = "smaller"
    share: bool = True
    """Whether it is a share, and printed in per cent."""
    bounds: tuple[float, float] = (0.0, 1.0)
    """Where the measured quantity can lie."""
    overshoots: bool = False
    """Whether an estimate of it may lie outside: one that is corrected for its bias."""
    place: int | None = None
    """Among the few that come first on a page; None: in the table of all the others."""
    followed: bool = False
    """Whether it is measured during training as well."""
    of: Callable[[Any], float | None] | None = None
    """Computes it from a result that has no attribute of this name."""

    @property
    def heading(self) -> str:
        """The label with a capital letter."""
        return self.label[:1].upper() + self.label[1:]

    @property
    def title(self) -> str:
        """What stands above a figure of it."""
        return self.words or self.heading

    @property
    def range(self) -> tuple[float, float]:
        """Where an estimate of it can lie."""
        return (-math.inf, math.inf) if self.overshoots else self.bounds

    def text(self, value: float) -> str:
        """A value of it as tables print it.

        >>> metric_named("ece").text(0.0296), metric_named("nll").text(0.2512), metric_named("r2").text(-6.274)
        ('2.96 %', '0.251', '−6.274')
        """
        text = percent(value, 2) if self.share else number(value)
        return f"−{text[1:]}" if text.startswith("-") else text

    def span(self, low: float, high: float) -> str:
        """An interval of it as tables print it; the value beside it has the unit.

        >>> metric_named("ece").span(0.033, 0.035), metric_named("debiased_ece").span(-0.001, 0.004)
        ('3.30 – 3.50', '−0.10 – 0.40')
        """
        return " – ".join(f"{100 * end:.2f}" if self.share else number(end) for end in (low, high)).replace("-", "−")

    def read(self, result: Result) -> dict[str, float]:
        """Its numbers in a result, by name: one, none where it is not defined, or one for each level."""
        value = getattr(result, self.name) if self.of is None else self.of(result)
        if isinstance(value, Mapping):
            return {f"{self.name} {level:g}": share for level, share in value.items()}
        return {} if value is None else {self.name: value}


_ANY, _POSITIVE = (-math.inf, math.inf), (0.0, math.inf)

METRICS: tuple[Metric, ...] = (
    Metric("accuracy", "classification", "accuracy", better="larger", place=1, followed=True),
    Metric("confidence", "classification", "confidence", better=None, place=2),
    Metric("nll", "classification", "NLL", "Loss (NLL)", share=False, bounds=_POSITIVE, place=5, followed=True),
    Metric("ece", "classification", "ECE", "Calibration error (ECE)", place=3, followed=True),
    Metric("mce", "classification", "MCE", "Largest gap (MCE)", place=4, followed=True),
    Metric("brier", "classification", "Brier", "Brier score", share=False, bounds=(0.0, 2.0), followed=True),
    Metric("classwise_ece", "classification", "classwise ECE"),
    Metric("adaptive_ece", "classification", "adaptive ECE"),
    Metric("debiased_ece", "classification", "debiased ECE", overshoots=True),
    Metric("debiased_rmsce", "classification", "debiased RMSCE", overshoots=True),
    Metric("smooth_ece", "classification", "smooth ECE"),
    Metric("mse", "regression", "MSE", "Mean squared error", share=False, bounds=_POSITIVE, place=1, followed=True),
    Metric(
        "rmse", "regression", "RMSE", "Root mean squared error", share=False, bounds=_POSITIVE, place=2, followed=True
    ),
    Metric("r2", "regression", "R²", better="larger", share=False, bounds=(-math.inf, 1.0), place=3, followed=True),
    Metric("nll", "regression", "NLL", "Loss (NLL)", share=False, bounds=_ANY, place=4),
    Metric("coverage", "regression", "coverage", better=None, place=5),
)
"""All of them, in the order in which files and tables have them."""


def metrics_of(task: Task) -> tuple[Metric, ...]:
    """The metrics of a task.

    >>> [metric.name for metric in metrics_of("regression")]
    ['mse', 'rmse', 'r2', 'nll', 'coverage']
    """
    return tuple(metric for metric in METRICS if metric.task == task)


def metric_named(name: str, task: Task | None = None) -> Metric:
    """The row of a metric, of whichever task has it first; of a name that is not listed, nothing is known.

    >>> metric_named("nll", "regression").bounds, metric_named("my_score").better
    ((-inf, inf), None)
    """
    rows = METRICS if task is None else metrics_of(task)
    base, _, level = name.partition(" ")
    for metric in rows:
        if metric.name == name:
            return metric
        if metric.name == base == "coverage":
            return replace(metric, name=name, label=f"coverage of {100 * float(level):g} %")
    label = name.replace("_", " ")
    return Metric(name, task or "classification", label, label, better=None, share=False, bounds=_ANY)


def numbers_of(result: Result) -> dict[str, float]:
    """Every metric of a result by name, as far as it is defined."""
    found: dict[str, float] = {}
    for metric in metrics_of(result.task):
        found.update(metric.read(result))
    return found
