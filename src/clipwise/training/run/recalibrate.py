"""Recalibration after training, as `[recalibration]` asks for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from clipwise import calibration
from clipwise.accounting import Ledger
from clipwise.calibration import CalibrationResult, RecalibrationMap, evaluate
from clipwise.errors import DataError, NotConverged
from clipwise.training.run.job import Job, private_scaling

__all__ = ["Recalibrated", "recalibrate"]

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
            results[method] = evaluate(probabilities, labels, bins=settings.bins, resamples=settings.resamples)
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
