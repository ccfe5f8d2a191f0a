"""The Edgeworth accountant (Wang, Gao, Zhang, Su 2022): the central limit theorem with corrections.

Three forms of delta(eps) = P_P(S > eps) - e^eps P_Q(S > eps), S the sum of privacy losses:

- "classic" (the paper's): an Edgeworth expansion of the law of S under each data set;
- "one_density": one expansion, under the first data set, integrated against 1 - exp(eps - S), so that no error is
  multiplied by e^eps;
- "tilted": the same around the saddle point. Its order 0 comes with a rigorous Berry-Esseen interval.

All are approximations; only `saddle_interval` is a bound.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
from scipy import optimize, special

from clipwise.accounting._numerics.gaussian import gaussian_delta, gaussian_epsilon
from clipwise.accounting._numerics.lattice import Floats, points_cut
from clipwise.accounting._numerics.laws import Composition
from clipwise.accounting._numerics.saddle import largest_loss, tail_share
from clipwise.accounting.accountants.definition import approximation
from clipwise.errors import AccountingError

__all__ = ["EDGEWORTH", "Form", "edgeworth_delta", "edgeworth_epsilon", "saddle_interval"]

Form = Literal["classic", "one_density", "tilted"]

_BERRY_ESSEEN = 1.12  # 2 times 0.56, Shevtsova's constant, for a difference of distribution functions
_SCAN = 4_000
_TAIL = 1e-20


@dataclass(frozen=True)
class Cumulants:
    """Mean, variance and the standardised cumulants lambda_3 .. lambda_6 of a sum of losses."""

    mean: Floats
    variance: Floats
    standard: tuple[Floats, Floats, Floats, Floats]
    third_absolute: Floats
    log_moment: Floats


def edgeworth_epsilon(composition: Composition, delta: float, order: int = 3, form: Form = "classic") -> float:
    """The largest epsilon at which the approximated delta reaches `delta` (it need not be monotone)."""
    _check(order, form)
    if not composition.terms:
        return gaussian_epsilon(math.sqrt(composition.gaussian), delta)
    if form == "tilted":
        return _tilted_epsilon(composition, delta, order)
    law = _cumulants(composition, (0.0,))
    top = min(float(law.mean[0]) + 12.0 * math.sqrt(float(law.variance[0])) + 1.0, largest_loss(composition))
    grid = np.linspace(0.0, top, _SCAN)
    above = np.nonzero(_approximation(composition, grid, order, form) > delta)[0]
    if len(above) == 0:
        return 0.0
    i = int(above[-1])
    if i + 1 == _SCAN:
        if top == largest_loss(composition):
            return top
        raise AccountingError("The Edgeworth expansion does not fall below this delta; use the exact accountant.")

    def gap(epsilon: float) -> float:
        return float(_approximation(composition, np.array([epsilon]), order, form)[0]) - delta

    return float(optimize.brentq(gap, grid[i], grid[i + 1], xtol=1e-10))


def edgeworth_delta(composition: Composition, epsilon: float, order: int = 3, form: Form = "classic") -> float:
    """The approximated delta, cut off at 0 and 1."""
    _check(order, form)
    if not composition.terms:
        return gaussian_delta(math.sqrt(composition.gaussian), epsilon)
    if form == "tilted":
        _, values, logs = _tilted_curve(composition, tuple(_abscissas(composition)), order)
        return min(1.0, math.exp(float(np.interp(epsilon, values, logs))))
    return min(1.0, max(0.0, float(_approximation(composition, np.array([epsilon]), order, form)[0])))


def saddle_interval(composition: Composition, delta: float) -> tuple[float, float]:
    """A rigorous interval for epsilon: the tilted form of order 0 with the Berry-Esseen error.

    Guarantees: the true epsilon lies inside (up to the quadrature's round-off). It is wide when few steps decide.
    """
    if not composition.terms:
        known = gaussian_epsilon(math.sqrt(composition.gaussian), delta)
        return known, known
    low, high, t = 0.0, math.inf, _abscissas(composition)
    for _ in range(3):
        epsilon, value, error = _with_error(composition, t)
        certain = np.isfinite(value) & np.isfinite(error) & (epsilon >= 0.0)
        above, below = certain & (value - error >= delta), certain & (value + error <= delta)
        low = max(low, float(np.max(epsilon[above], initial=0.0)))
        high = min(high, float(np.min(epsilon[below], initial=math.inf)))
        # Every point is rigorous by itself; the next round only looks closer at the two ends.
        ends = [int(np.nonzero(side)[0][pick]) for side, pick in ((above, -1), (below, 0)) if np.any(side)]
        if not ends:
            break
        t = np.concatenate([np.geomspace(t[max(0, i - 1)], t[min(len(t) - 1, i + 1)], 60) for i in ends])
    return low, high


def _with_error(composition: Composition, t: Floats) -> tuple[Floats, Floats, Floats]:
    law = _cumulants(composition, tuple(t))
    epsilon = law.mean - 1.0 / t - 1.0 / (1.0 + t)
    log_scale = law.log_moment - epsilon * t
    with np.errstate(over="ignore", invalid="ignore"):
        value = np.exp(log_scale) * _tilted_sum(law, t, epsilon, 0)
        ratio = law.third_absolute / law.variance**1.5
        error = np.exp(log_scale + t * np.log(t) - (1.0 + t) * np.log1p(t)) * _BERRY_ESSEEN * ratio
    return epsilon, value, error


def _approximation(composition: Composition, epsilon: Floats, order: int, form: Form) -> Floats:
    law = _cumulants(composition, (0.0,))
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        if form == "classic":
            other = _cumulants(composition, (-1.0,))
            found = _upper_tail(law, epsilon, order, 0.0 * epsilon) - _upper_tail(other, epsilon, order, epsilon)
        else:
            s = float(np.sqrt(law.variance[0]))
            z = (epsilon - law.mean[0]) / s
            exact, damped = _integrals(z, 0.0, order), _integrals(z, s, order)
            total = sum(c[0] * (exact[k] - damped[k]) for k, c in _coefficients(law, order).items())
            found = np.asarray(total * np.exp(-0.5 * z**2) / math.sqrt(2.0 * math.pi))
    if not np.all(np.isfinite(found)):
        raise AccountingError("The Edgeworth expansion leaves double precision here; use the exact accountant.")
    return found


def _check(order: int, form: str) -> None:
    if order not in (0, 1, 2, 3, 4) or (order == 0 and form != "tilted"):
        raise AccountingError(f"order must be 1 to 4, or 0 for the tilted form; got {order!r}.")
    if form not in ("classic", "one_density", "tilted"):
        raise AccountingError(f"form must be classic, one_density or tilted, got {form!r}.")


@lru_cache(maxsize=64)
def _cumulants(composition: Composition, tilts: tuple[float, ...]) -> Cumulants:
    """Cumulants of S tilted by exp(t S); t = 0 is the first data set's law and t = -1 the second's."""
    t = np.array(tilts)
    n = len(t)
    log_moment = 0.5 * composition.gaussian * t * (t + 1.0)
    mean, variance = composition.gaussian * (t + 0.5), np.full(n, composition.gaussian)
    higher = [np.zeros(n) for _ in range(4)]
    # E|N(0, g)|^3 of the plain Gaussian part, taken as one summand.
    third = np.full(n, composition.gaussian**1.5 * 2.0 * math.sqrt(2.0 / math.pi))
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        for law, count in composition.terms:
            grid = points_cut(law, tail_share(composition, _TAIL))
            tilted = grid.weight * np.exp(np.outer(t, grid.loss))
            moment = np.expm1(np.outer(t, grid.loss)) @ grid.weight
            tilted = tilted / tilted.sum(axis=1, keepdims=True)
            m = tilted @ grid.loss
            away = grid.loss - m[:, None]
            c2, c3, c4, c5, c6 = (np.sum(tilted * away**k, axis=1) for k in (2, 3, 4, 5, 6))
            log_moment = log_moment + count * np.log1p(moment)
            mean, variance = mean + count * m, variance + count * c2
            third = third + count * np.sum(tilted * np.abs(away) ** 3, axis=1)
            four = (c3, c4 - 3.0 * c2**2, c5 - 10.0 * c3 * c2, c6 - 15.0 * c4 * c2 - 10.0 * c3**2 + 30.0 * c2**3)
            higher = [total + count * one for total, one in zip(higher, four, strict=True)]
        a, b, c, d = (kappa / variance ** (0.5 * k) for k, kappa in zip((3, 4, 5, 6), higher, strict=True))
    return Cumulants(mean, variance, (a, b, c, d), third, log_moment)


def _coefficients(law: Cumulants, order: int) -> dict[int, Floats]:
    """The density is phi(x) times the sum of these coefficients times He_k(x)."""
    l3, l4, l5, l6 = law.standard
    found: dict[int, Floats] = {0: np.ones_like(l3)}
    if order >= 1:
        found[3] = l3 / 6.0
    if order >= 2:
        found |= {4: l4 / 24.0, 6: l3**2 / 72.0}
    if order >= 3:
        found |= {5: l5 / 120.0, 7: l3 * l4 / 144.0, 9: l3**3 / 1296.0}
    if order >= 4:
        found[6] = found[6] + l6 / 720.0
        found |= {8: l4**2 / 1152.0 + l3 * l5 / 720.0, 10: l3**2 * l4 / 1728.0, 12: l3**4 / 31104.0}
    return found


def _hermite(z: Floats | float, degree: int) -> list[Floats]:
    values = [np.ones_like(np.asarray(z, dtype=np.float64)), np.asarray(z, dtype=np.float64)]
    for k in range(1, degree):
        values.append(z * values[k] - k * values[k - 1])
    return values


def _integrals(z: Floats | float, s: Floats | float, order: int) -> list[Floats]:
    """int_z^inf exp(-s (x - z)) phi(x) He_k(x) dx / phi(z): a Mills ratio, then I_k = He_{k-1}(z) - s I_{k-1}."""
    degree = 3 * order
    hermite = _hermite(z, max(1, degree))
    values = [np.asarray(math.sqrt(0.5 * math.pi) * special.erfcx((z + s) / math.sqrt(2.0)))]
    for k in range(1, degree + 1):
        values.append(hermite[k - 1] - s * values[k - 1])
    return values


def _upper_tail(law: Cumulants, epsilon: Floats, order: int, log_factor: Floats) -> Floats:
    """The approximated probability that S exceeds epsilon, times exp(log_factor)."""
    z = (epsilon - law.mean[0]) / math.sqrt(float(law.variance[0]))
    hermite = _hermite(z, 12)
    correction = sum(float(c[0]) * hermite[k - 1] for k, c in _coefficients(law, order).items() if k)
    density = np.exp(np.minimum(700.0, log_factor - 0.5 * z**2)) / math.sqrt(2.0 * math.pi)
    return np.asarray(np.exp(np.minimum(700.0, log_factor + special.log_ndtr(-z))) + density * correction)


def _abscissas(composition: Composition) -> Floats:
    law = _cumulants(composition, (0.0,))
    return np.asarray(np.geomspace(1e-3, 1e4, 200) / math.sqrt(float(law.variance[0])))


def _tilted_sum(law: Cumulants, t: Floats, epsilon: Floats, order: int) -> Floats:
    s = np.sqrt(law.variance)
    z = (epsilon - law.mean) / s
    first, second = _integrals(z, t * s, order), _integrals(z, (t + 1.0) * s, order)
    total = sum(c * (first[k] - second[k]) for k, c in _coefficients(law, order).items())
    return np.asarray(total * np.exp(-0.5 * z**2) / math.sqrt(2.0 * math.pi))


def _tilted_epsilon(composition: Composition, delta: float, order: int) -> float:
    t, epsilon = _abscissas(composition), 0.0
    for _ in range(2):
        t, values, logs = _tilted_curve(composition, tuple(t), order)
        good = np.nonzero(logs <= math.log(delta))[0]
        if len(good) == 0:
            raise AccountingError("The tilted expansion does not reach this delta; use the exact accountant.")
        i = max(1, int(good[0]))
        epsilon = float(np.interp(-math.log(delta), -logs[i - 1 : i + 1], values[i - 1 : i + 1]))
        t = np.geomspace(t[max(0, i - 2)], t[min(len(t) - 1, i + 1)], 200)
    return max(0.0, epsilon)


@lru_cache(maxsize=64)
def _tilted_curve(composition: Composition, tilts: tuple[float, ...], order: int) -> tuple[Floats, Floats, Floats]:
    """The saddle points where the expansion is positive, with epsilon and log delta there."""
    t = np.array(tilts)
    law = _cumulants(composition, tilts)
    epsilon = law.mean - 1.0 / t - 1.0 / (1.0 + t)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        log_delta = law.log_moment - epsilon * t + np.log(_tilted_sum(law, t, epsilon, order))
    fine = np.isfinite(log_delta) & np.isfinite(epsilon)
    return t[fine], epsilon[fine], log_delta[fine]


EDGEWORTH = approximation("edgeworth", edgeworth_epsilon, edgeworth_delta)
