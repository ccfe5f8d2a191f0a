"""One epoch of balls in bins: a record is in one of `bins` steps, each with the same probability.

With mu = 1/sigma the worst case compares the mean of the N(mu e_t, I) over all bins t with N(0, I) (Chua et al. 2024):
anyone who knows where the others are, and sees the outputs one after the other, can make them of these by adding noise.
All that counts is the likelihood ratio S, the mean of independent X_t = exp(mu x_t - mu^2/2), x_t standard normal:
delta is E[(S - e^eps)+] for removing the record and E[(1 - e^eps S)+] for adding it. Where only `used` bins were
released, the others count with X_t = 1.

Both are expectations of convex functions of S. So every change of an X_t, or of a sum of some, that keeps its mean and
spreads it can only raise delta, in both directions at once and for any number of epochs. Here each value is split
between its neighbours on a grid of equal steps of its logarithm (and zero), and sums are made by doubling. Nothing is
subtracted, so that the smallest probabilities have all their digits. The mean beyond the grid's end is cut off and
counted as lost.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy import special

from clipwise.accounting._numerics.laws import Allocation

__all__ = ["LARGEST_ORDER", "allocation_losses", "allocation_moments"]

Floats = NDArray[np.float64]

_FINENESS = 48.0  # cells per standard deviation of the logarithm
_MOST_CELLS = 1 << 14
_CHUNK = 1 << 21
_ROUND_UP = 1.0 + 1e-9  # of a probability: a cell adds up some ten thousand products at each of up to 40 sums


@dataclass(frozen=True)
class _Sum:
    """The law of a sum of `count` X: at exp(step * (first + i)) with probability mass[i], at zero with `zero`.

    `cut` is the mean that was cut off.
    """

    count: int
    step: float
    first: int
    mass: Floats
    zero: float
    cut: float

    @property
    def logs(self) -> Floats:
        """The logarithms of the values."""
        return np.asarray(self.step * (self.first + np.arange(len(self.mass))))

    @property
    def deviation(self) -> float:
        """The standard deviation of the logarithm."""
        logs = self.logs
        return math.sqrt(float(self.mass @ (logs - self.mass @ logs) ** 2))


def allocation_losses(law: Allocation, tail: float) -> tuple[Floats, Floats, float]:
    """Losses of an epoch, the logs of their probabilities under the first data set, and the probability left out.

    Guarantees: a pair with these losses dominates that of the epoch; no more than `tail` is left out.
    """
    rounded = 10.0 ** (4 * math.floor(math.log10(tail) / 4.0))  # so that neighbours share it
    log_ratio, log_mass, zero, lost = _ratio(law.bins, law.used, law.mu, rounded)
    if law.reverse:
        return -log_ratio, log_mass, zero
    return log_ratio, log_ratio + log_mass, lost


@lru_cache(maxsize=64)
def _ratio(bins: int, used: int, mu: float, tail: float) -> tuple[Floats, Floats, float, float]:
    """Values of log S, the logs of their probabilities, the probability of S = 0, and the mean that was cut off."""
    share = 0.9 * tail / (used.bit_length() + 1)
    one = total = _single(mu, share)
    for bit in f"{used:b}"[1:]:
        total = _trimmed(_doubled(_refined(total)), share)
        if bit == "1":
            total = _added(total, one)
    if used < bins:
        total = _shifted(total, bins - used)
    seen = total.mass > 0.0
    log_ratio = total.logs[seen] - math.log(bins)
    log_mass = np.log(total.mass[seen]) + math.log(_ROUND_UP)
    for array in (log_ratio, log_mass):
        array.flags.writeable = False
    return log_ratio, log_mass, total.zero, total.cut * _ROUND_UP / bins


def _single(mu: float, share: float) -> _Sum:
    """One X: each cell's probability and mean, split between its ends; what is below the grid, between it and zero."""
    step, far = mu / _FINENESS, -float(special.ndtri(share))
    first, last = math.floor((-far - 0.5 * mu) * mu / step), math.ceil((far + 0.5 * mu) * mu / step)
    logs = np.asarray(step * np.arange(first, last + 1), dtype=np.float64)
    z = logs / mu + 0.5 * mu
    probability, mean = _between(z), _between(z - mu) * np.exp(-logs[:-1])
    up = np.clip((mean - probability) / math.expm1(step), 0.0, probability)
    mass = np.zeros(len(logs))
    mass[:-1] += probability - up
    mass[1:] += up
    below, its_mean = float(special.ndtr(z[0])), float(special.ndtr(z[0] - mu)) * math.exp(-logs[0])
    mass[0] += its_mean
    mass[-1] += float(special.ndtr(-z[-1]))
    return _Sum(1, step, first, mass, max(0.0, below - its_mean), float(special.ndtr(mu - z[-1])))


def _between(z: Floats) -> Floats:
    """The normal probability of each interval, from the side where it is small."""
    left, right = special.ndtr(z), special.ndtr(-z)
    return np.asarray(np.where(z[:-1] > 0.0, right[:-1] - right[1:], left[1:] - left[:-1]))


def _refined(total: _Sum) -> _Sum:
    """The same law on a grid that is fine enough for it."""
    step, mass, first, deviation = total.step, total.mass, total.first, total.deviation
    while step * _FINENESS > deviation and 2 * len(mass) <= _MOST_CELLS:
        finer = np.zeros(2 * len(mass) - 1)
        finer[::2] = mass
        step, mass, first = 0.5 * step, finer, 2 * first
    return replace(total, step=step, mass=mass, first=first)


def _doubled(total: _Sum) -> _Sum:
    """The sum of two such sums: exp(a) + exp(a - d step) is a cell, or some, above exp(a), whatever a is."""
    mass, step, n = total.mass, total.step, len(total.mass)
    found = np.zeros(n + 2)
    # From this distance on the smaller one moves the larger by less than a cell.
    near = min(n, math.floor(-math.log(math.expm1(step)) / step) + 1)
    apart = np.log1p(np.exp(-step * np.arange(near)))
    up_by = np.floor(apart / step).astype(np.int64)
    least = int(up_by[0])  # of twice the smallest value
    up = np.expm1(np.maximum(0.0, apart - step * up_by)) / math.expm1(step)
    for d in range(near):
        both = mass[d:] * mass[: n - d] * (2.0 if d else 1.0)
        at = d + int(up_by[d]) - least
        upper = up[d] * both
        found[at + 1 : at + 1 + n - d] += upper
        found[at : at + n - d] += both - upper
    if near < n:
        scale = np.exp(step * (np.arange(n) - 0.5 * n))
        larger = 2.0 * mass[near:]
        upper = larger * np.cumsum(mass * scale)[: n - near] / scale[near:] / math.expm1(step)
        found[near + 1 - least : n + 1 - least] += upper
        found[near - least : n - least] += np.maximum(0.0, larger * np.cumsum(mass)[: n - near] - upper)
    # Where one of the two is zero, what lies below the new grid is split between it and zero.
    alone, kept = 2.0 * total.zero * mass, np.exp(step * np.minimum(0.0, np.arange(n) - least))
    found[: max(0, n - least)] += alone[least:]
    found[0] += float((alone * kept)[:least].sum())
    zero = total.zero**2 + float((alone * (1.0 - kept))[:least].sum())
    return _normal(_Sum(2 * total.count, step, total.first + least, found, zero, 2.0 * total.cut))


def _normal(total: _Sum) -> _Sum:
    """The same with probabilities that add up to one: what rounding takes from them would double with every sum."""
    whole = float(total.mass.sum()) + total.zero
    return replace(total, mass=total.mass / whole, zero=total.zero / whole)


def _trimmed(total: _Sum, share: float) -> _Sum:
    """The same without cells that hardly count: those at the end are cut off, the first ones split with zero."""
    mass, logs = total.mass, total.logs
    with np.errstate(under="ignore"):
        weighted = mass * np.exp(logs)
    beyond = np.cumsum(weighted[::-1])[::-1]
    last = int(np.searchsorted(-beyond, -share * total.count))  # the first cell with at most so much from it on
    last = max(1, min(last, len(mass) - 1))
    below = np.cumsum(mass)
    low = min(int(np.searchsorted(below, share)), last - 1)  # cells before have at most so much together
    kept = mass[low:last].copy()
    cut = total.cut + float(beyond[last])
    kept[-1] += float(mass[last:].sum())
    zero = total.zero
    if low:
        mean = float(weighted[:low].sum()) * math.exp(-logs[low])
        kept[0] += mean
        zero += max(0.0, float(below[low - 1]) - mean)
    return _Sum(total.count, total.step, total.first + low, kept, zero, cut)


def _added(total: _Sum, one: _Sum) -> _Sum:
    """The sum with one more X."""
    # What moves no value by a part of a cell is split between zero and that.
    least = total.logs[0] + 2.0 * math.log(total.step)
    low = min(len(one.mass) - 1, max(0, math.ceil(least / one.step) - one.first))
    logs, mass, zero = one.logs[low:], one.mass[low:].copy(), one.zero
    if low:
        mean = float(one.mass[:low] @ np.exp(one.logs[:low] - logs[0]))
        mass[0] += mean
        zero += max(0.0, float(one.mass[:low].sum()) - mean)
    top, first = np.logaddexp(total.logs[-1], logs[-1]), total.first
    found = np.zeros(math.floor(top / total.step) + 3 - first)
    found[: len(total.mass)] += zero * total.mass
    # Where the others are zero, what lies below the grid is split between it and zero.
    within = np.maximum(logs, first * total.step)
    kept = np.exp(logs - within)
    _scatter(found, first, total.step, within, total.zero * kept * mass)
    at_zero = total.zero * (zero + float((1.0 - kept) @ mass))
    rows = max(1, _CHUNK // len(total.mass))
    for begin in range(0, len(logs), rows):
        part = slice(begin, begin + rows)
        both = np.logaddexp(logs[part, None], total.logs)
        _scatter(found, first, total.step, both.ravel(), np.outer(mass[part], total.mass).ravel())
    return _normal(_Sum(total.count + 1, total.step, first, found, at_zero, total.cut + one.cut))


def _shifted(total: _Sum, by: int) -> _Sum:
    """The sum and `by` more values, each of them one."""
    both = np.logaddexp(total.logs, math.log(by))
    logs, mass = np.append(both, math.log(by)), np.append(total.mass, total.zero)
    mean = float(mass @ logs)
    deviation = math.sqrt(float(mass @ (logs - mean) ** 2))
    step = max(deviation / _FINENESS, (float(logs.max()) - math.log(by)) / _MOST_CELLS)
    first = math.floor(math.log(by) / step)
    found = np.zeros(math.floor(float(logs.max()) / step) + 3 - first)
    _scatter(found, first, step, logs, mass)
    return _Sum(total.count + by, step, first, found, 0.0, total.cut)


def _scatter(found: Floats, first: int, step: float, logs: Floats, mass: Floats) -> None:
    """Split each value between its neighbours on the grid so that its mean is kept."""
    place = np.maximum(np.floor(logs / step), first)  # a value at the first cell may round below
    up = np.expm1(logs - step * place) / math.expm1(step)
    index = place.astype(np.int64) - first
    upper = mass * np.clip(up, 0.0, 1.0)
    found += np.bincount(index, weights=mass - upper, minlength=len(found))
    found += np.bincount(index + 1, weights=upper, minlength=len(found))


# Renyi divergences -------------------------------------------------------------------------------------------------

LARGEST_ORDER = 256
_LARGEST_REVERSE = 64
_FARTHEST, _LARGEST_MU = 29.0, 8.0  # no integral is computed for powers of S that reach farther, or for less noise
_ROUND_OFF = 1e-13  # of the log of a moment


@lru_cache(maxsize=256)
def allocation_moments(law: Allocation) -> Floats:
    """Bounds of log E_P[exp((k-1) loss)] for the orders k = 0, 1, ... up to `LARGEST_ORDER` (adding: 64).

    For removing the record, E[S^k] is a sum over all ways to deal k factors to the bins, k! times a coefficient of the
    power series that is the product of one factor for each bin: all terms are positive. For adding it, E[S^-a] is the
    integral of s^(a-1) E[exp(-s S)] / Gamma(a) over s, whose logarithm is taken as the variable.
    """
    found = _reverse_moments(law) if law.reverse else _forward_moments(law)
    found = np.where(np.arange(len(found)) > 1, found + _ROUND_OFF, 0.0)
    found.flags.writeable = False
    return np.asarray(found)


def _forward_moments(law: Allocation) -> Floats:
    k = np.arange(LARGEST_ORDER + 1.0)
    factorials = special.gammaln(k + 1.0)
    one = 0.5 * k * (k - 1.0) * law.mu**2 - factorials
    total = one
    for bit in f"{law.used:b}"[1:]:
        total = _product(total, total)
        total = _product(total, one) if bit == "1" else total
    if law.used < law.bins:
        total = _product(total, k * math.log(law.bins - law.used) - factorials)
    return np.asarray(total + factorials - k * math.log(law.bins))


def _product(a: Floats, b: Floats) -> Floats:
    """The logs of the coefficients of a product of two power series, as far as both are known."""
    return np.array([special.logsumexp(a[: k + 1] + b[k::-1]) for k in range(len(a))])


def _reverse_moments(law: Allocation) -> Floats:
    """The smaller of two bounds: the integral, and what convexity says of a mean, E[S^-a] <= mean of E[X^-a]."""
    a = np.arange(1.0, _LARGEST_REVERSE)
    own, others = (math.log(part / law.bins) if part else -math.inf for part in (law.used, law.bins - law.used))
    logs = np.logaddexp(own + 0.5 * a * (a + 1.0) * law.mu**2, others)
    if law.mu <= _LARGEST_MU:
        logs = np.minimum(logs, _integrals(law, a))
    return np.concatenate([[0.0, 0.0], logs])


def _integrals(law: Allocation, a: Floats) -> Floats:
    """Bounds of log E[S^-a], infinite for powers that would have to be followed too far."""
    # The double exponential has no growth for |Im x| < pi / (2 mu), nor the integrand over log s for |Im| < pi / 2.
    width = min(0.25, 0.24 / law.mu)
    # Standard deviations to which powers of S are followed: high ones matter where the noise is large.
    far = max(13.0, _FARTHEST / max(1.0, law.mu))
    x = np.arange(-far - 7.0, 13.0 + width, width)
    weight = width / math.sqrt(2.0 * math.pi) * np.exp(-0.5 * x**2)
    step = 0.4 / math.sqrt(_LARGEST_REVERSE)
    v = np.arange(-50.0, 0.5 * law.mu**2 + far * law.mu + math.log(law.bins) + 7.0, step)
    u = np.exp(v - math.log(law.bins))
    exponents = -np.outer(u, np.exp(law.mu * x - 0.5 * law.mu**2))
    missing, left = -np.expm1(exponents) @ weight, np.exp(exponents) @ weight
    with np.errstate(divide="ignore"):
        one = np.where(missing < 0.5, np.log1p(-np.minimum(missing, 0.5)), np.log(left))
    log_transform = law.used * one - (law.bins - law.used) * u
    terms = np.outer(a, v) + log_transform
    whole = np.logaddexp(special.logsumexp(terms, axis=1), _log_rest(terms))
    return np.asarray(whole + math.log(step) - special.gammaln(a))


def _log_rest(terms: Floats) -> Floats:
    """Bounds of what the sums have beyond their last terms, infinite where these do not fall yet.

    The transform of S is the probability that a sum of independent numbers with log-concave densities exceeds log s, so
    the terms are log-concave in log s: they fall by no less than they do at last.
    """
    last = terms[:, -1]
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        falls = terms[:, -2] - last
        rest = last - np.log(np.expm1(np.maximum(falls, 0.0)))
    return np.asarray(np.where(last == -np.inf, -np.inf, np.where(falls > 0.0, rest, np.inf)))
