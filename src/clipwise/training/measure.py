"""What is measured while a run goes on: on held-out records, and on the private batch of a step."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from clipwise import calibration
from clipwise.calibration import CalibrationResult, RegressionResult
from clipwise.clipping import Layerwise, Normalize, Style
from clipwise.engine import clipped_gradients
from clipwise.errors import DataError
from clipwise.private import StepStatistics
from clipwise.training.job import Job

__all__ = ["evaluate", "headline", "layer_statistics", "step_statistics"]

HEADLINE = {
    "classification": ("accuracy", "nll", "ece", "mce", "brier"),
    "regression": ("mse", "rmse", "r2"),
}


def evaluate(job: Job, resamples: int = 0) -> CalibrationResult | RegressionResult:
    """Measure the network on the held-out records, with bootstrap intervals when `resamples` are given."""
    outputs, targets = job.predict(job.test), job.test.tensors[-1]
    if not bool(torch.isfinite(outputs).all()):
        raise DataError("the model's outputs are no longer finite: training has diverged. Lower the learning rate.")
    if job.data.task == "classification":
        return calibration.evaluate(
            logits=outputs, labels=targets, bins=job.config.evaluation.bins, resamples=resamples
        )
    return calibration.evaluate_regression(outputs, targets, resamples=resamples)


def headline(job: Job, result: CalibrationResult | RegressionResult) -> dict[str, float]:
    """The few numbers that are followed over training."""
    found = {name: getattr(result, name) for name in HEADLINE[job.data.task]}
    return {name: float(value) for name, value in found.items() if value is not None}


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
    }


def layer_statistics(job: Job, losses: Tensor, style: Style) -> dict[str, dict[str, float | None]]:
    """Median norm and share of clipped samples of every layer; the graph is kept. Not covered by epsilon."""
    if not losses.numel():
        return {}
    named: dict[str, Tensor] = dict(job.parameters)
    # Brought to length one layer by layer, a sample's factor is one over its norm.
    unit = clipped_gradients(losses, named, Layerwise(Normalize(1.0)), retain_graph=True).factors
    factors = clipped_gradients(losses, named, style, retain_graph=True).factors
    assert isinstance(unit, dict)
    layers: dict[str, dict[str, float | None]] = {}
    for layer, factor_B in unit.items():
        norms_B = torch.where(factor_B > 0, 1 / factor_B, torch.zeros_like(factor_B))
        groups = {style.group_of(layer, name) for name in named if name.rpartition(".")[0] == layer}
        vectors = [factors] if isinstance(factors, Tensor) else [factors[group] for group in groups]
        clipped = torch.stack([(vector < 1).double().mean() for vector in vectors]).mean()
        layers[layer] = {"fraction_clipped": float(clipped), "norm_median": _finite(float(norms_B.median()))}
    return layers


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
