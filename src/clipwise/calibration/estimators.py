"""Calibration errors from sums over bins, for one sample or many resamples at once (any number of leading axes).

Smooth calibration error (Błasiok & Nakkiran 2023, "Smooth ECE") has no bins, and no bandwidth to choose. Each sample
puts its gap (confidence minus 1 when right) on the line of confidences; a Gaussian of width s, reflected at 0 and 1,
spreads it. smECE_s is the integral of the absolute value of the sum. It falls as s grows, and the smooth ECE is the one
s where smECE_s = s. Here the gaps lie on a grid, where the reflected Gaussian is a product after a cosine transform.

Bootstrap intervals come from sums over groups of samples, so that a stream of any length needs bounded memory. Every
sample joins a random one of `GROUPS` groups, and the bootstrap draws whole groups: sums over random groups vary as
sums over samples do, whatever the order of the samples. In a small data set most groups hold one sample.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy import fft, special

__all__ = [
    "GROUPS",
    "MOMENTS",
    "Groups",
    "adaptive_edges",
    "at_chance",
    "binned_errors",
    "calibrated_moments",
    "grid_shares",
    "normal_gaps",
    "pivotal",
    "sample_moments",
    "smooth_errors",
    "weights",
]

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


def grid_shares(confidence: Floats, cells: int) -> tuple[NDArray[np.intp], NDArray[np.intp], Floats]:
    """Two neighbouring cells for each confidence, and the share of the second: linear interpolation between centres.

    >>> left, right, share = grid_shares(np.array([0.25, 0.5]), cells=4)
    >>> left.tolist(), right.tolist(), share.tolist()
    ([0, 1], [1, 2], [0.5, 0.5])
    """
    place = confidence * cells - 0.5
    left = np.floor(place).astype(np.intp)
    share = place - left
    return np.clip(left, 0, cells - 1), np.clip(left + 1, 0, cells - 1), share


def smooth_errors(gaps: Floats, halvings: int = 34) -> Floats:
    """The smooth ECE of each row of `gaps` of shape (R, cells): sums of gaps by cell, over the number of samples.

    >>> smooth_errors(np.zeros((1, 64))).tolist()
    [0.0]
    """
    spectrum = fft.dct(gaps, type=2, norm="ortho", axis=-1)
    frequency = np.pi * np.arange(gaps.shape[-1])
    low, high = np.zeros(len(gaps)), np.abs(gaps).sum(axis=-1)  # smECE_s - s is >= 0 at the one, <= 0 at the other
    for _ in range(halvings):
        width = 0.5 * (low + high)
        kernel = np.exp(np.maximum(-0.5 * (width[:, None] * frequency) ** 2, -80.0))  # denormal numbers are slow
        spread = np.abs(fft.idct(spectrum * kernel, type=2, norm="ortho", axis=-1)).sum(axis=-1)
        low, high = np.where(spread > width, width, low), np.where(spread > width, high, width)
    widths: Floats = 0.5 * (low + high)
    return widths


GROUPS = 1_000
"""With this many groups the estimated standard error is itself known to 1/sqrt(2 * GROUPS), about 2 %."""


class Groups:
    """Hands out the group of each sample, the same whatever batches the samples come in.

    >>> one, other = Groups(seed=0), Groups(seed=0)
    >>> one.take(5).tolist() == other.take(2).tolist() + other.take(3).tolist()
    True
    """

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng([seed, 1])

    def take(self, count: int) -> NDArray[np.int64]:
        """The groups of the next `count` samples."""
        return (self._random.random(count) * GROUPS).astype(np.int64)


def weights(groups: int, resamples: int, seed: int) -> Floats:
    """How often each group is drawn in each resample: shape (resamples, groups), every row sums to `groups`."""
    drawn = np.random.default_rng([seed, 2]).integers(0, groups, size=(resamples, groups))
    cell = drawn + groups * np.arange(resamples)[:, None]
    return np.bincount(cell.ravel(), minlength=resamples * groups).reshape(resamples, groups).astype(np.float64)


def at_chance(estimate: float, calibrated: Floats, level: float) -> bool:
    """Whether a calibrated model would show an error as large as this one by chance.

    >>> at_chance(0.5, np.linspace(0.0, 1.0, 101), level=0.9), at_chance(0.96, np.linspace(0.0, 1.0, 101), level=0.9)
    (True, False)
    """
    return bool(estimate <= np.quantile(calibrated, 0.5 * (1.0 + level)))


def pivotal(
    estimate: float, truth: float, replicates: Floats, level: float, limits: tuple[float, float] = (0.0, 1.0)
) -> tuple[float, float]:
    """The basic (pivotal) bootstrap interval: the estimate less quantiles of (replicate - truth), cut to `limits`.

    In the bootstrap's world the sample is the truth, and `truth` the value there of what is estimated. Calibration
    errors are too large on average, in a sample and once more in its resamples; the difference measures that bias
    and takes it out of the lower end, where percentiles of the replicates would count it twice. The upper end keeps
    it: the measured bias can exceed the real one, and so the interval always holds the estimate.

    >>> low, high = pivotal(0.5, 0.5, np.linspace(0.45, 0.65, 1001), level=0.9)
    >>> round(low, 6), round(high, 6)
    (0.36, 0.59)
    """
    if not np.isfinite(estimate) or not np.isfinite(replicates).all():
        return limits  # an infinite loss: the data bound nothing
    tail = 0.5 * (1.0 - level)
    smallest, largest = np.quantile(replicates, [tail, 1.0 - tail])
    low, high = estimate - (largest - truth), estimate + (max(truth, float(replicates.mean())) - smallest)
    return max(float(low), limits[0]), min(float(high), limits[1])
