"""Recalibration after training, as `[recalibration]` asks for it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from clipwise import calibration
from clipwise.accounting import Ledger
from clipwise.calibration import CalibrationResult, evaluate
from clipwise.errors import DataError, NotConverged
from clipwise.training.run.job import Job, private_scaling

__all__ = ["recalibrate"]

PUBLIC: dict[str, type[Any]] = {
    "isotonic": calibration.IsotonicScaling,
    "temperature": calibration.TemperatureScaling,
    "vector": calibration.VectorScaling,
}


def recalibrate(job: Job, ledger: Ledger) -> tuple[dict[str, CalibrationResult], list[str]]:
    """Metrics on the held-out records after each method, and what to say of those that failed.

    Private methods put their event on the ledger first. A run is not lost because a map could not be fitted.
    """
    choice, settings = job.config.recalibration, job.config.evaluation
    results: dict[str, CalibrationResult] = {}
    problems: list[str] = []
    if not choice.methods:
        return results, problems
    logits, labels = job.predict(job.test), job.test.tensors[-1]
    for method in choice.methods:
        try:
            probabilities = _recalibrated(job, method, ledger, logits)
            results[method] = evaluate(probabilities, labels, bins=settings.bins, resamples=settings.resamples)
        except (DataError, NotConverged) as error:
            problems.append(f"Recalibration ({method}) failed: {error}")
    return results, problems


def _recalibrated(job: Job, method: str, ledger: Ledger, logits: Tensor) -> Tensor:
    """Fit a method on the records that are meant for it, and apply it."""
    if method in PUBLIC:
        assert job.public is not None
        fitted = PUBLIC[method]().fit(job.predict(job.public), job.public.tensors[-1])
        probabilities: Tensor = fitted.predict(logits)
        return probabilities
    records = job.train if job.aside is None else job.aside
    scaling = private_scaling(job.config)
    assert scaling is not None
    return scaling.fit(job.predict(records), records.tensors[-1], ledger).predict(logits)
