"""What is measured during a run, on held-out records and on the private batch of a step, and what a caller sees of it.

Recalibration follows after training, as `[recalibration]` asks for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from clipwise import calibration
from clipwise.accounting import Ledger, account
from clipwise.calibration import CalibrationResult, RecalibrationMap, Result, metrics_of
from clipwise.errors import DataError, NotConverged
from clipwise.private import Private, StepStatistics
from clipwise.training.run.job import Job, private_scaling

if TYPE_CHECKING:
    from clipwise.federated import Server

__all__ = [
    "Progress",
    "Recalibrated",
    "Watch",
    "evaluate",
    "headline",
    "measured_row",
    "recalibrate",
    "silent",
    "spent",
    "step_statistics",
]


def evaluate(job: Job, resamples: int = 0) -> Result:
    """Measure the network on the held-out records, with bootstrap intervals when `resamples` are given."""
    outputs, targets = job.predict(job.test), job.test.tensors[-1]
    if not bool(torch.isfinite(outputs).all()):
        raise DataError("the model's outputs are no longer finite: training has diverged. Lower the learning rate.")
    if job.data.task == "classification":
        return calibration.evaluate(
            logits=outputs, labels=targets, bins=job.config.evaluation.bins, resamples=resamples
        )
    return calibration.evaluate_regression(outputs, targets, std=job.config.evaluation.std, resamples=resamples)


def headline(result: Result) -> dict[str, float]:
    """The few numbers that are followed over training."""
    read = [metric.read(result) for metric in metrics_of(result.task) if metric.followed]
    return {name: float(value) for numbers in read for name, value in numbers.items()}


def spent(job: Job, run: Private | Server) -> float | None:
    """Epsilon so far, with what was charged before the run; None for a run that is not private."""
    if job.delta is None or not job.charged:
        return None if job.delta is None else run.epsilon(job.delta)
    return account((*run.ledger.events, *job.charged), job.delta).epsilon


def measured_row(
    job: Job, run: Private | Server, step: int, epoch: float, private: Mapping[str, Any]
) -> dict[str, Any]:
    """A row of metrics.jsonl; what is under "private" is exact and not covered by epsilon.

    An adaptive norm is made of noisy numbers, so it is "released": where it stands after the step.
    """
    return {
        "step": step,
        "epoch": epoch,
        "epsilon": spent(job, run),
        "test": headline(evaluate(job)),
        **({} if run.bound is None else {"released": {"clipping_norm": run.bound}}),
        "private": private,
    }


def step_statistics(last: StepStatistics | None, loss: float) -> dict[str, Any]:
    """Exact statistics of the private batch of a step: not covered by epsilon."""
    if last is None:
        return {}
    return {
        "loss": _finite(loss),
        "fraction_clipped": last.fraction_clipped,
        "norm_median": _finite(last.norm_quantiles[2]),
        "batch_size": last.batch_size,
        "bad_samples": last.bad_samples,
        "layers": {
            name: {"fraction_clipped": layer.fraction_clipped, "norm_median": _finite(layer.norm_quantiles[2])}
            for name, layer in last.layers.items()
        },
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


PUBLIC: dict[str, type[Any]] = {
    "isotonic": calibration.IsotonicScaling,
    "temperature": calibration.TemperatureScaling,
    "vector": calibration.VectorScaling,
}


@dataclass(frozen=True)
class Recalibrated:
    """What the methods of a configuration came to."""

    results: Mapping[str, CalibrationResult] = field(default_factory=dict)
    """Metrics on the held-out records after each method."""
    problems: tuple[str, ...] = ()
    """What to say of those that failed."""
    in_force: tuple[str, RecalibrationMap] | None = None
    """The method that the saved model applies: the private one if there is one, else the first."""

    @property
    def method(self) -> str | None:
        """The name of the method in force."""
        return None if self.in_force is None else self.in_force[0]


def recalibrate(job: Job, ledger: Ledger) -> Recalibrated:
    """Fit every method that the configuration asks for.

    Private methods put their event on the ledger first. A run is not lost because a map could not be fitted.
    """
    choice, settings = job.config.recalibration, job.config.evaluation
    results: dict[str, CalibrationResult] = {}
    problems: list[str] = []
    maps: dict[str, RecalibrationMap] = {}
    if not choice.methods:
        return Recalibrated()
    logits, labels = job.predict(job.test), job.test.tensors[-1]
    for method in choice.methods:
        try:
            fitted = _fitted(job, method, ledger)
            probabilities = fitted.predict(logits)
            results[method] = calibration.evaluate(
                probabilities, labels, bins=settings.bins, resamples=settings.resamples
            )
            maps[method] = fitted
        except (DataError, NotConverged) as error:
            problems.append(f"Recalibration ({method}) failed: {error}")
    chosen = next((method for method in (*choice.private, *choice.public) if method in maps), None)
    return Recalibrated(results, tuple(problems), None if chosen is None else (chosen, maps[chosen]))


def _fitted(job: Job, method: str, ledger: Ledger) -> RecalibrationMap:
    """Fit a method on the records that are meant for it."""
    if method in PUBLIC:
        assert job.public is not None
        fitted: RecalibrationMap = PUBLIC[method]().fit(job.predict(job.public), job.public.tensors[-1])
        return fitted
    records = job.train if job.aside is None else job.aside
    scaling = private_scaling(job.config)
    assert scaling is not None
    return scaling.fit(job.predict(records), records.tensors[-1], ledger)


@dataclass(frozen=True)
class Progress:
    """Where a run stands after a step."""

    step: int
    steps: int
    first: int
    """The step that this process began with: not 0 after a resume."""
    epsilon: Callable[[], float | None]
    """What has been spent; asking takes milliseconds."""
    test: Mapping[str, float] | None
    """What was measured on held-out records, when it was after this step."""


Watch: TypeAlias = Callable[[Progress], None]


def silent(progress: Progress) -> None:
    """Look on and say nothing."""
