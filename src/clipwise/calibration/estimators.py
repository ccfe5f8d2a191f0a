"""Calibration errors from sums over bins, for one sample or many resamples at once (any number of leading axes)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy import special

__all__ = ["MOMENTS", "adaptive_edges", "binned_errors", "calibrated_moments", "normal_gaps", "sample_moments"]

Floats = NDArray[np.float64]

COUNT, CONFIDENCE, CORRECT, SQUARED_GAP, CHANCE = range(5)
MOMENTS = 5
"""What is summed in a bin, the last axis of `moments`. The gap of a sample is its confidence minus 1 when right, and
its variance by chance alone, were the model calibrated, is confidence * (1 - confidence)."""


def binned_errors(moments: Floats) -> dict[str, Floats]:
    """ECE, MCE, debiased ECE and debiased RMS calibration error from `moments` of shape (..., M, 5).

    - `ece` = sum over bins of |sum of gaps| / n, `mce` = largest |mean gap| (Naeini et al. 2015, Guo et al. 2017).
    - `debiased_rmsce`: root of sum over bins of (n_m/n) (g_m^2 - s_m^2), with the mean gap g_m and its squared
      standard error s_m^2. Before the root this is free of bias, for g_m^2 alone is too large by s_m^2 on average
      (Ferro & Fricker 2012; Kumar, Liang & Ma 2019, definition 4.1).
    - `debiased_ece`: 2 ECE - E ECE', where in ECE' every g_m is drawn from N(g_m, s_m^2): the ECE less an estimate of
      its bias, as in the code of Kumar, Liang & Ma, with the expectation in closed form. Some bias it cannot see: of
      a perfectly calibrated model it removes about 40 %.

    A bin with a single sample has no standard error: it counts as 0 in the RMS error, as with Kumar, Liang & Ma, and is
    left uncorrected in the other. Both are cut at 0.
    """
    count, gap = moments[..., COUNT], moments[..., CONFIDENCE] - moments[..., CORRECT]
    total = count.sum(axis=-1)
    n = np.maximum(count, 1.0)
    mean = np.abs(gap) / n
    variance = np.maximum(moments[..., SQUARED_GAP] / n - mean**2, 0.0) / np.maximum(n - 1.0, 1.0)
    variance[count < 2] = 0.0
    share = count / total[..., None]
    deviation = np.sqrt(variance)
    z = np.divide(mean, deviation, out=np.full_like(mean, 40.0), where=deviation > 0)  # 40: no mass on the other side
    folded = deviation * np.sqrt(2 / np.pi) * np.exp(-0.5 * z**2) + mean * special.erf(z / np.sqrt(2))
    ece = (share * mean).sum(axis=-1)
    squared = share * mean**2
    return {
        "ece": ece,
        "mce": mean.max(axis=-1),
        "rmsce": np.sqrt(squared.sum(axis=-1)),
        "debiased_ece": np.maximum(2 * ece - (share * folded).sum(axis=-1), 0.0),
        "debiased_rmsce": np.sqrt(np.maximum(np.where(count > 1, squared - share * variance, 0.0).sum(axis=-1), 0.0)),
    }


def sample_moments(confidence: Floats, correct: Floats) -> tuple[Floats, ...]:
    """What each sample adds to the moments of its bin."""
    chance = np.maximum(confidence * (1.0 - confidence), 0.0)
    return np.ones_like(confidence), confidence, correct, (confidence - correct) ** 2, chance


def calibrated_moments(moments: Floats, random: np.random.Generator, resamples: int) -> Floats:
    """Moments (resamples, M, 5) as they would be if the model were calibrated: gaps by chance, normal in each bin."""
    drawn = np.repeat(moments[None], resamples, axis=0)
    drawn[..., CONFIDENCE] = normal_gaps(moments[..., CHANCE], random, resamples)
    drawn[..., CORRECT] = 0.0
    drawn[..., SQUARED_GAP] = drawn[..., CHANCE]
    return drawn


def normal_gaps(variance: Floats, random: np.random.Generator, resamples: int) -> Floats:
    """Independent normal numbers with these variances, `resamples` times."""
    drawn: Floats = random.standard_normal((resamples, *variance.shape)) * np.sqrt(variance)
    return drawn


def adaptive_edges(confidence: Floats, bins: int) -> Floats:
    """Edges of bins that hold (nearly) the same number of samples each; equal confidences stay together.

    The quantiles are those of scikit-learn's `calibration_curve(strategy="quantile")`, at places (n - 1) m/M in the
    sorted confidences, here in integers, so that rounding does not move a sample that lies on one.

    >>> adaptive_edges(np.array([0.5, 0.6, 0.7, 0.8, 0.9]), 2).tolist()
    [0.0, 0.7, 1.0]
    """
    place, rest = np.divmod((len(confidence) - 1) * np.arange(1, bins), bins)
    ordered = np.partition(confidence, np.unique(np.concatenate([place, place + (rest > 0)])))
    inner = ordered[place] + (ordered[place + (rest > 0)] - ordered[place]) * (rest / bins)
    return np.concatenate([[0.0], inner, [1.0]])
