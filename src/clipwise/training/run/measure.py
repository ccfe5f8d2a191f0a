"""What is measured during a run: on held-out records, and on the private batch of a step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from clipwise import calibration
from clipwise.accounting import account
from clipwise.calibration import Result, metrics_of
from clipwise.errors import DataError
from clipwise.private import Private, StepStatistics
from clipwise.training.run.job import Job

if TYPE_CHECKING:
    from clipwise.federated import Server

__all__ = ["evaluate", "headline", "measured_row", "spent", "step_statistics"]


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
    """A row of metrics.jsonl; what is under "private" is exact and not covered by epsilon."""
    return {
        "step": step,
        "epoch": epoch,
        "epsilon": spent(job, run),
        "test": headline(evaluate(job)),
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
