"""Renyi differential privacy: the fast certificate.

The moments of one step are a binomial sum for integer orders (Mironov, Talwar, Zhang 2019, section 3.3, every term
positive) and a quadrature otherwise; orders compose by addition, and the conversion to (epsilon, delta) is that of
Canonne, Kamath, Steinke 2020 (proposition 12). Guarantees: an upper bound at every order, so at their minimum.
"""

from __future__ import annotations

import itertools
import math
from functools import lru_cache

import numpy as np
from scipy import special

from clipwise.accounting._numerics.allocation import allocation_moments
from clipwise.accounting._numerics.lattice import Floats, Points, points_whole
from clipwise.accounting._numerics.laws import Allocation, Composition, Law
from clipwise.accounting.accountants.definition import upper_bound

__all__ = ["ORDERS", "RDP", "rdp_delta", "rdp_epsilon", "renyi"]

ORDERS: Floats = np.array(
    [1.02, 1.05] + [1.0 + k / 10.0 for k in range(1, 100)] + list(range(11, 65)) + [float(2**k) for k in range(7, 17)]
)

_LARGE = 500.0  # of a log: beyond, one is nothing beside the moment
_ROUND_OFF = 2.0**-52  # of a weight, for each unit of its log
_LONGEST = 1_500.0  # lattices reach no farther; so high an order is never the best one for such a law


def rdp_epsilon(composition: Composition, delta: float) -> float:
    """The smallest epsilon that the Renyi divergences prove at this delta."""
    rho = renyi(composition)
    with np.errstate(invalid="ignore", over="ignore"):
        candidates = rho + np.log1p(-1.0 / ORDERS) - (math.log(delta) + np.log(ORDERS)) / (ORDERS - 1.0)
        # Pinsker's bound in Bretagnolle and Huber's form: delta <= sqrt(1 - exp(-KL)) already at epsilon 0.
        candidates = np.where(delta**2 + np.expm1(-rho) > 0.0, 0.0, candidates)
    return max(0.0, float(np.nanmin(candidates)))


def rdp_delta(composition: Composition, epsilon: float) -> float:
    """The smallest delta that the Renyi divergences prove at this epsilon."""
    rho = renyi(composition)
    with np.errstate(invalid="ignore", divide="ignore"):
        logs = (ORDERS - 1.0) * (rho - epsilon + np.log1p(-1.0 / ORDERS)) - np.log(ORDERS)
        logs = np.minimum(logs, 0.5 * np.log(-np.expm1(-rho)))
    return min(1.0, math.exp(min(0.0, float(np.nanmin(logs)))))


def renyi(composition: Composition) -> Floats:
    """The Renyi divergences of the composition at `ORDERS`."""
    total = ORDERS * (0.5 * composition.gaussian)
    for law, count in composition.terms:
        total = total + count * _step(law)
    return np.asarray(total)


def _epoch(law: Allocation) -> Floats:
    """Of an epoch of balls in bins: whole orders, and chords between them, as the log of a moment is convex."""
    known = allocation_moments(law)
    chords = np.interp(ORDERS, np.arange(1.0, len(known)), known[1:], right=np.inf) / (ORDERS - 1.0)
    return np.asarray(np.minimum(chords, 0.5 * ORDERS * law.reach**2))


@lru_cache(maxsize=4096)
def _step(law: Law | Allocation) -> Floats:
    if isinstance(law, Allocation):
        return _epoch(law)
    if len(law.parts) > 1:
        # The moment of a mixture whose component is known is the mean of the components' moments.
        logs = np.array([(ORDERS - 1.0) * _step(Law(((1.0, pair),))) for _, pair in law.parts])
        shares = np.array([share for share, _ in law.parts])
        with np.errstate(over="ignore"):
            near, far = np.log1p(shares @ np.expm1(logs)), special.logsumexp(logs.T + np.log(shares), axis=1)
        # Moments of rare records are so close to one that only their excess has digits.
        return np.asarray(np.where(logs.max(axis=0) < _LARGE, near, far) / (ORDERS - 1.0))
    whole = np.floor(ORDERS) == ORDERS
    result = np.empty_like(ORDERS)
    pair = law.parts[0][1]
    if _is_plain_poisson(law.reversed()):
        # Adding a record moves no Renyi divergence more than removing one (Mironov, Talwar, Zhang 2019, theorem 5).
        return _step(law.reversed())
    if _is_plain_poisson(law):
        (_, _), (rate, mu) = pair.p
        result[whole] = [_log_moment(rate, mu, int(order)) / (order - 1.0) for order in ORDERS[whole]]
        result[~whole] = _by_quadrature(law, ORDERS[~whole])
    else:
        result = _by_quadrature(law, ORDERS)
    # Renyi divergences are quasi-convex, so no mixture exceeds its farthest components; far orders have no lattice.
    result = np.minimum(result, 0.5 * ORDERS * pair.reach**2)
    result.flags.writeable = False
    return result


def _is_plain_poisson(law: Law) -> bool:
    pair = law.parts[0][1]
    return pair.q == ((1.0, 0.0),) and len(pair.p) == 2 and not pair.symmetrised


@lru_cache(maxsize=len(ORDERS))
def _binomial(order: int) -> tuple[Floats, Floats]:
    """k = 2 .. order, and the log of binom(order, k)."""
    k = np.arange(2, order + 1, dtype=np.float64)
    return k, special.gammaln(order + 1.0) - special.gammaln(k + 1.0) - special.gammaln(order - k + 1.0)


def _log_moment(rate: float, mu: float, order: int) -> float:
    """The log of E_Q[(P/Q)^order] = log(1 + sum_k binom(order, k) q^k (1-q)^(order-k) (exp(k(k-1) mu^2/2) - 1))."""
    k, binomial = _binomial(order)
    gain = 0.5 * k * (k - 1.0) * mu**2
    small = np.minimum(gain, 30.0)
    # log(exp(g) - 1) = g + log(1 - exp(-g)), and from 30 on it is g.
    terms = binomial + k * (math.log(rate) - math.log1p(-rate)) + (gain - small) + np.log(np.expm1(small))
    top = float(terms.max())
    log_excess = order * math.log1p(-rate) + top + math.log(float(np.exp(terms - top).sum()))
    return float(np.logaddexp(0.0, log_excess))


def _by_quadrature(law: Law, orders: Floats) -> Floats:
    """The log of E_P[exp((order-1) loss)], over (order-1), on lattices that follow the tilted law to its end."""
    means = [mean for _, pair in law.parts for side in (pair.p, pair.q) for _, mean in side]
    spread, farthest = max(means) - min(means), max(map(abs, means))
    result = np.full(len(orders), np.inf)
    # A lattice serves the orders up to its reach; few lattices instead of one per order.
    for low, high in itertools.pairwise((1.0, 4.0, 11.5, 32.5, 64.5, *2.0 ** np.arange(7, 18))):
        chosen = (orders > low) & (orders <= high)
        reach = high * spread + farthest + 13.0
        if not np.any(chosen) or reach > _LONGEST:
            continue
        grid = points_whole(law, reach, tilt=float(orders[chosen].max()))
        result[chosen] = [_log_mean_exp(grid, order - 1.0) / (order - 1.0) for order in orders[chosen]]
    return result


def _log_mean_exp(grid: Points, t: float) -> float:
    """The log of E_P[exp(t loss)], rounded up: losses of both signs nearly cancel where records are rare."""
    exponents = t * grid.loss
    logs = exponents + grid.log_weight
    if float(logs.max()) > _LARGE:
        return max(0.0, float(special.logsumexp(logs)))
    small = np.minimum(exponents, 1.0)
    gains = np.where(exponents < 1.0, grid.weight * np.expm1(small), np.exp(logs) - grid.weight)
    round_off = _ROUND_OFF * float(np.abs(gains) @ (4.0 + np.abs(grid.log_weight)))
    return math.log1p(max(0.0, float(gains.sum())) + round_off)


RDP = upper_bound("rdp", rdp_epsilon, rdp_delta)
