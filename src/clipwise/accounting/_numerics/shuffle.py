"""A proven lower end for shuffled batches (Chua et al., ICML 2024 and NeurIPS 2024).

The worst data there push every batch but one record's the other way. In units of the sensitivity the record's batch has
mean 2, or 1 once the record is blanked, all others 0, at a random place. The largest batch sum is a function of the
output, and so is its bin, so their privacy loss is a lower bound; composed losses are rounded down.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy import fft, optimize, special

from clipwise.accounting._numerics.lattice import Floats

__all__ = ["ShuffledRun", "shuffled_delta", "shuffled_epsilon"]

_BINS = 20_000
_GRID = 1 << 20
_ROUND_OFF = 1e-13


@dataclass(frozen=True)
class ShuffledRun:
    """Batches cut from a fresh random order each epoch: what the lower bound needs."""

    mu: float
    batches: int
    full_epochs: int


def shuffled_epsilon(run: ShuffledRun, delta: float) -> float:
    """The largest epsilon at which the lower bound of delta still reaches `delta`."""
    losses, _ = _composed(run)
    high = float(np.max(losses, initial=0.0))

    def gap(epsilon: float) -> float:
        return shuffled_delta(run, epsilon) - delta

    if high <= 0.0 or gap(0.0) <= 0.0:
        return 0.0
    return float(optimize.brentq(gap, 0.0, high, xtol=1e-9))


def shuffled_delta(run: ShuffledRun, epsilon: float) -> float:
    """A lower bound of delta at epsilon."""
    losses, mass = _composed(run)
    above = losses > epsilon
    return max(0.0, float(mass[above] @ -np.expm1(epsilon - losses[above])) - _ROUND_OFF)


def _bin_masses(shift: float, edges: Floats, mu: float, batches: int) -> Floats:
    """The law of max(N(shift, sigma), batches - 1 times N(0, sigma)), from the upper end where it is small."""
    log_cdf = special.log_ndtr((edges - shift) * mu) + (batches - 1) * special.log_ndtr(edges * mu)
    cdf, survival = np.exp(log_cdf), -np.expm1(log_cdf)
    return np.asarray(np.where(log_cdf[1:] > -0.7, survival[:-1] - survival[1:], cdf[1:] - cdf[:-1]))


@lru_cache(maxsize=32)
def _composed(run: ShuffledRun) -> tuple[Floats, Floats]:
    """Losses on a grid, rounded down, and their probabilities, after all full epochs."""
    sigma = 1.0 / run.mu
    edges = np.linspace(-9.0 * sigma, 2.0 + 9.0 * sigma, _BINS + 1)
    p, q = _bin_masses(2.0, edges, run.mu, run.batches), _bin_masses(1.0, edges, run.mu, run.batches)
    seen = (p > 1e-18) & (q > 1e-30)
    if not np.any(seen):  # so little noise that the two never overlap in double precision: nothing is proven
        return np.empty(0), np.empty(0)
    p, loss = p[seen], np.log(p[seen] / q[seen])
    step = run.full_epochs * (float(loss.max()) - float(loss.min())) / (_GRID // 2)
    place = np.floor(loss / step).astype(np.int64)
    lowest = int(place.min())
    one = np.bincount(place - lowest, weights=p)
    length = fft.next_fast_len(run.full_epochs * len(one), real=True)
    mass = fft.irfft(fft.rfft(one, length) ** run.full_epochs, length)
    mass = np.maximum(mass[: run.full_epochs * (len(one) - 1) + 1], 0.0)
    losses = step * (np.arange(len(mass)) + run.full_epochs * lowest)
    return np.asarray(losses, dtype=np.float64), np.asarray(mass, dtype=np.float64)
