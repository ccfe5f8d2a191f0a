"""Bootstrap intervals from sums over groups of samples, so that a stream of any length needs bounded memory.

Every sample joins a random one of `GROUPS` groups, and the bootstrap draws whole groups: sums over random groups vary
as sums over samples do, whatever the order of the samples. In a small data set most groups hold one sample.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["GROUPS", "Groups", "at_chance", "pivotal", "weights"]

Floats = NDArray[np.float64]

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
