"""Clipping by estimated norms (DP-SGD-JL): a step is a mixture over the error of the estimate.

The norm of a gradient g is estimated as M = ||g|| sqrt(X) from r random projections, X ~ chi2_r / r whatever g is, and
fresh in every step. A rule bounds factor * M by R, so a sample contributes at most R / sqrt(X). Let the projections be
published with every step: the result is only easier to attack, since throwing them away again is post-processing, and
they are drawn without looking at the data. Given the projections a step is the Gaussian mechanism (after sampling) with
mean shift 1 / (sigma sqrt(X)), so the whole step is the mixture over X of such pairs, with the component known. Its
hockey-stick divergence is E_X[delta(eps; 1 / (sigma sqrt(X)))] at most, for every history, so the mixture dominates
the step and its powers dominate the run (Zhu, Dong, Wang 2022, theorem 10).

`spread` replaces the law of X by a finite one that is worse for privacy, in one of two ways:

- *Rounding*: X is rounded down. All means grow by one factor, and y -> c y + noise undoes that.
- *Splitting*: delta(eps; mu) of N(mu, 1) against N(0, 1) has the derivatives phi(a) and -(mu/4 - eps^2/mu^3) phi(a) in
  mu, a = mu/2 - eps/mu. With u = Phi(mu/2), for which mu'' = mu/4 mu'^2, its second derivative in u is
  eps^2/mu^3 phi(a) mu'^2 >= 0: it is convex in u. So X may be moved to both ends of a cell if the mean of u is
  kept. Poisson sampling of one record replaces delta(eps) by a positive multiple of delta(eps'), plus a number without
  mu, so it stays convex. The error is of second order in the cell.

X below the first cell has a probability that is added to delta. Where neighbouring data sets differ in k records (two
for replacing one), nothing is known about how their X depend on each other: each is as small as the least of them,
and P(least < x) <= k P(X < x).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy import special

from clipwise.accounting._numerics.lattice import Floats

__all__ = ["Spread", "spread"]

_CELL = 0.04  # width of a cell in log mu; the error in epsilon is about its square over six
_FEWEST_CELLS, _MOST_CELLS = 24, 128
_LARGE = 1e-9  # the probability of an X that is rounded to the top of the cells
_HAIR = 1e-9  # by which shares are rounded to the safe side, far above the error of the quadrature
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(16)


@dataclass(frozen=True)
class Spread:
    """What estimates do to a mean shift: (share, factor) pairs, the shares summing to one, and what they do not cover.

    `lost` is the probability of a larger factor than any of these.
    """

    parts: tuple[tuple[float, float], ...]
    lost: float


@lru_cache(maxsize=256)
def spread(projections: int, records: int, mu: float, convex: bool, spare: float, widest: float) -> Spread:
    """The factors 1 / sqrt(X) as finitely many, worse for privacy: by splitting if `convex`, else by rounding.

    `mu` is the mean shift of exact norms. What is lost is about `spare`, or more where a shift would exceed `widest`.

    >>> found = spread(projections=100, records=1, mu=0.1, convex=True, spare=1e-12, widest=100.0)
    >>> len(found.parts), round(sum(share * factor for share, factor in found.parts), 4)
    (26, 1.0076)
    """
    half = 0.5 * projections
    low = max(float(special.gammaincinv(half, spare / records)) / half * (1.0 - _HAIR), (mu / widest) ** 2)
    top = special.gammainccinv(half, _LARGE) if records == 1 else special.gammaincinv(half, 1.0 / records)
    high = float(top) / half
    if low >= high:
        return Spread(((1.0, low**-0.5),), 1.0)
    count = min(max(_FEWEST_CELLS, math.ceil(0.5 * math.log(high / low) / _CELL)), _MOST_CELLS)
    edges = np.geomspace(low, high, count + 1)
    below = np.minimum(1.0, records * special.gammainc(half, half * edges))
    cells = np.diff(below)
    worse = _worse_share(half, mu, edges) if convex else np.ones(count)
    shares = np.zeros(count + 1)
    shares[:-1] += worse * cells
    shares[1:] += (1.0 - worse) * cells
    shares[-1] += 1.0 - below[-1]
    shares[0] += below[0]  # also lost, but a law has shares that sum to one
    used = shares > 0.0
    parts = tuple(zip((shares / shares.sum())[used].tolist(), (edges**-0.5)[used].tolist(), strict=True))
    return Spread(parts, float(below[0]) * (1.0 + _HAIR))


def _worse_share(half: float, mu: float, edges: Floats) -> Floats:
    """The part of each cell's probability for its lower end, such that the mean of Phi(mu / (2 sqrt(X))) is kept."""
    low, wide = np.log(edges[:-1, None]), np.diff(np.log(edges))[:, None]
    x = np.exp(low + 0.5 * wide * (1.0 + _NODES))
    log_density = half * (np.log(x) - x)  # of log X, up to a factor
    weight = _WEIGHTS * np.exp(log_density - log_density.max(axis=1, keepdims=True))
    weight /= weight.sum(axis=1, keepdims=True)
    # Differences from the cell's upper end, so that nothing cancels where mu is small.
    ends, inside = 0.5 * mu * edges**-0.5, 0.5 * mu * x**-0.5
    gain, whole = np.sum(weight * _between(ends[1:, None], inside), axis=1), _between(ends[1:], ends[:-1])
    share = np.divide(gain, whole, out=np.ones_like(gain), where=whole > 0.0)
    return np.asarray(np.minimum(1.0, share * (1.0 + _HAIR) + _HAIR))


def _between(low: Floats, high: Floats) -> Floats:
    """Phi(high) - Phi(low) for 0 < low <= high, twice as much."""
    low, high = low / math.sqrt(2.0), high / math.sqrt(2.0)
    return np.asarray(np.where(low < 0.5, special.erf(high) - special.erf(low), special.erfc(low) - special.erfc(high)))
