"""The evaluation of a regression: errors, and whether Gaussian intervals hold the truth as often as they say."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy import special

from clipwise.calibration.bootstrap import GROUPS, Groups, pivotal, weights
from clipwise.calibration.inputs import ArrayLike, check_resamples, check_share, vector
from clipwise.calibration.metrics import metric_named
from clipwise.calibration.values import RegressionResult
from clipwise.errors import DataError

__all__ = ["evaluate_regression"]

Floats = NDArray[np.float64]


def evaluate_regression(
    predictions: ArrayLike,
    targets: ArrayLike,
    *,
    std: ArrayLike | float | None = None,
    levels: Sequence[float] = (0.5, 0.8, 0.9, 0.95),
    resamples: int = 0,
    level: float = 0.95,
    seed: int = 0,
) -> RegressionResult:
    """Mean squared error and R^2; with `std` also the Gaussian NLL and the share of targets in prediction +- z * std.

    `std` is the predicted standard deviation, one number or one per sample; `levels` are the nominal probabilities of
    the central intervals. `resamples=1000` adds bootstrap intervals, whose probability is `level`.

    >>> result = evaluate_regression([1.0, 2.0, 3.0], [1.5, 2.0, 2.0], std=0.5, levels=[0.5, 0.9])
    >>> round(result.mse, 4), result.coverage
    (0.4167, {0.5: 0.3333333333333333, 0.9: 0.6666666666666666})
    """
    check_resamples(resamples, seed)
    check_share("level", level)
    target_B = vector("targets", targets)
    error_B = vector("predictions", predictions, len(target_B)) - target_B
    columns = {"error": error_B**2, "target": target_B - target_B.mean(), "square": (target_B - target_B.mean()) ** 2}
    nominal = [check_share("a level of coverage", share) for share in levels]
    if std is not None:
        columns |= _interval_columns(error_B, vector("std", std, len(target_B)), nominal)
    names, values_BX = list(columns), np.stack([np.ones_like(error_B), *columns.values()], axis=1)
    whole = {name: float(value[0]) for name, value in _metrics(names, values_BX.sum(axis=0, keepdims=True)).items()}
    varied = bool(np.ptp(target_B) > 0)
    if not varied:
        whole.pop("r2")
    return RegressionResult(
        count=len(target_B),
        mse=whole["mse"],
        rmse=whole["rmse"],
        r2=whole.get("r2"),
        nll=whole.get("nll"),
        coverage={share: whole[_name(share)] for share in nominal if std is not None},
        intervals=_intervals(names, values_BX, whole, resamples, level, seed) if resamples else None,
        level=level,
        resamples=resamples,
    )


def _name(share: float) -> str:
    return f"coverage {share:g}"


def _interval_columns(error_B: Floats, std_B: Floats, levels: Sequence[float]) -> dict[str, Floats]:
    if not (std_B > 0).all():
        raise DataError(f"std must be positive, got {float(std_B.min()):g}.")
    score_B = np.abs(error_B) / std_B
    nll_B = 0.5 * score_B**2 + np.log(std_B) + 0.5 * math.log(2.0 * math.pi)
    inside = {_name(share): (score_B <= special.ndtri(0.5 * (1.0 + share))).astype(np.float64) for share in levels}
    return {"nll": nll_B, **inside}


def _metrics(names: Sequence[str], sums_RX: Floats) -> dict[str, Floats]:
    """The metrics from sums over samples; the first column counts them."""
    mean = dict(zip(names, sums_RX[:, 1:].T / sums_RX[:, 0], strict=True))
    spread = mean.pop("square") - mean.pop("target") ** 2
    mse = mean.pop("error")
    r2 = 1.0 - np.divide(mse, spread, out=np.full_like(mse, np.inf), where=spread > 0)
    return {"mse": mse, "rmse": np.sqrt(mse), "r2": r2, **mean}


def _intervals(
    names: Sequence[str], values_BX: Floats, whole: dict[str, float], resamples: int, level: float, seed: int
) -> dict[str, tuple[float, float]]:
    group_B = Groups(seed).take(len(values_BX))
    sums_GX = np.stack([np.bincount(group_B, weights=column, minlength=GROUPS) for column in values_BX.T], axis=1)
    sums_GX = sums_GX[sums_GX[:, 0] > 0]
    replicates = _metrics(names, weights(len(sums_GX), resamples, seed) @ sums_GX)
    return {
        name: pivotal(value, value, replicates[name], level, metric_named(name, "regression").bounds)
        for name, value in whole.items()
    }
