"""K(t) = sum over the steps of log E_P[exp(t L)] along the real axis, tabulated once per question."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy import optimize

from clipwise.accounting._numerics.gaussian import gaussian_delta, gaussian_epsilon
from clipwise.accounting._numerics.lattice import Floats, Points, points_cut
from clipwise.accounting._numerics.laws import Allocation, Composition, Law, Pair
from clipwise.errors import NotConverged

__all__ = [
    "Saddle",
    "abscissa",
    "first_guess",
    "largest_loss",
    "period",
    "quick_delta",
    "quick_epsilon",
    "saddle_table",
    "tail_share",
]

_TILT = 8.0
_WIDEST = 150.0  # distance of two means in deviations of the noise, at most
ALIAS = 1e-11  # share of delta that the equal steps of a contour may add, at most


@dataclass(frozen=True)
class Saddle:
    """K and its derivatives at rising t; beyond `reliable` the lattice may be too coarse to prove anything."""

    t: Floats
    K: Floats
    slope: Floats
    curvature: Floats
    reliable: float

    @property
    def epsilon(self) -> Floats:
        """The epsilon whose integrand has its saddle point at t."""
        return np.asarray(self.slope - 1.0 / self.t - 1.0 / (1.0 + self.t))

    @property
    def log_delta(self) -> Floats:
        """Laplace's approximation of log delta there."""
        bend = self.curvature + self.t**-2 + (1.0 + self.t) ** -2
        return np.asarray(
            self.K - self.epsilon * self.t - np.log(self.t * (1.0 + self.t)) - 0.5 * np.log(2.0 * math.pi * bend)
        )

    def at_delta(self, log_delta: float) -> tuple[float, float]:
        """The abscissa and epsilon where Laplace's approximation meets log delta."""
        logs, values = self.log_delta, self.epsilon
        below = np.nonzero(logs <= log_delta)[0]
        if len(below) == 0:
            raise NotConverged("The saddle point lies outside the table.")
        i = max(1, int(below[0]))
        share = float(np.clip((logs[i - 1] - log_delta) / (logs[i - 1] - logs[i]), 0.0, 1.0))
        epsilon = float((1.0 - share) * values[i - 1] + share * values[i])
        return self.at_epsilon(max(0.0, epsilon))[0], max(0.0, epsilon)

    def at_epsilon(self, epsilon: float) -> tuple[float, float]:
        """The abscissa of the saddle point for this epsilon, and Laplace's log delta there."""
        values = self.epsilon
        if not values[0] < epsilon < values[-1]:
            raise NotConverged("The saddle point lies outside the table.")
        log_t = np.log(self.t)
        position = float(np.interp(epsilon, values, log_t))
        return math.exp(position), float(np.interp(position, log_t, self.log_delta))

    def renyi_epsilon(self, log_delta: float) -> float:
        """The epsilon that K proves by Renyi's conversion, at the best tabulated order 1 + t."""
        t = self.t[self.t <= self.reliable]
        bounds = (self.K[: len(t)] - log_delta - np.log1p(t)) / t + np.log(t / (1.0 + t))
        return float(np.min(bounds, initial=math.inf))

    def chernoff_delta(self, epsilon: float) -> float:
        """The delta that K proves at `epsilon`: E[(1 - exp(eps - S))+] <= exp(K(t) - eps t) t^t / (1+t)^(1+t)."""
        t = self.t[self.t <= self.reliable]
        logs = self.K[: len(t)] - epsilon * t + t * np.log(t) - (1.0 + t) * np.log1p(t)
        return math.exp(min(0.0, float(np.min(logs, initial=0.0))))

    def width(self, t: float) -> float:
        """The deviation of the integrand along the contour through t, were it normal."""
        return 1.0 / math.sqrt(float(np.interp(t, self.t, self.curvature)) + t**-2 + (1.0 + t) ** -2)

    def other(self, t: float) -> float:
        """A second abscissa for the cross-check."""
        return max(0.85 * t, float(self.t[0]))


def tail_share(composition: Composition, mass: float) -> float:
    """The probability per step that may be faded out for a total of `mass`, rounded down: neighbours share it."""
    share = mass / max(1, sum(count for _, count in composition.terms))
    return 10.0 ** math.floor(math.log10(max(share, 1e-290)))


@lru_cache(maxsize=256)
def saddle_table(composition: Composition, tail: float) -> Saddle:
    """K at some abscissas around the reciprocal of the loss's standard deviation, `tail` per step faded out."""
    if any(pair.gap > _WIDEST for law, _ in composition.terms if isinstance(law, Law) for _, pair in law.parts):
        raise NotConverged("So little noise would need millions of points, for an epsilon in the millions.")
    grids = [(points_cut(law, tail), count) for law, count in composition.terms]
    spread = composition.gaussian + sum(count * float(g.weight @ g.loss**2) for g, count in grids)
    reliable = min(max(_TILT, 60.0 / math.sqrt(spread)), 1e5)
    if reliable > _TILT:
        grids = [(points_cut(law, tail, reliable), count) for law, count in composition.terms]
    t = _abscissas(math.sqrt(spread), max(float(grid.loss.max()) for grid, _ in grids))
    K = 0.5 * composition.gaussian * t * (t + 1.0)
    slope = composition.gaussian * (t + 0.5)
    curvature = np.full_like(t, composition.gaussian)
    with np.errstate(over="ignore", invalid="ignore"):
        for grid, count in grids:
            excess = np.expm1(np.outer(t, grid.loss))
            moment = excess @ grid.weight
            mean = (excess @ (grid.weight * grid.loss) + grid.weight @ grid.loss) / (1.0 + moment)
            second = (excess @ (grid.weight * grid.loss**2) + grid.weight @ grid.loss**2) / (1.0 + moment)
            K = K + count * np.log1p(moment)
            slope = slope + count * mean
            curvature = curvature + count * (second - mean**2)
    fine = np.isfinite(K) & np.isfinite(slope) & np.isfinite(curvature) & (curvature > 0.0)
    if np.count_nonzero(fine) < 3:
        raise NotConverged("The saddle point lies outside the table.")
    return Saddle(t[fine], K[fine], slope[fine], curvature[fine], 2.0 * reliable)


def _abscissas(deviation: float, largest: float) -> Floats:
    """Seven decades around 1 / deviation; more on the left where a single loss is larger than all others together."""
    wider = max(0.0, math.log10(1e-3 * largest / deviation) + 1.0)
    return np.asarray(np.geomspace(1e-3 * 10.0**-wider, 1e4, 81 + round(80 * wider / 7.0)) / deviation)


def abscissa(saddle: Saddle, epsilon: float, delta: float) -> float:
    """The saddle point, or a little left of it where longer steps of y more than pay for the cancellation."""
    best = saddle.at_epsilon(epsilon)[0]
    exponent = saddle.K - epsilon * saddle.t - np.log(saddle.t * (1.0 + saddle.t))
    near = (saddle.t > 0.2 * best) & (saddle.t <= best)
    near &= exponent < float(np.interp(best, saddle.t, exponent)) + 4.0
    candidates = [best, *(float(t) for t in saddle.t[near])]
    return min(candidates, key=lambda t: period(saddle, t, epsilon, delta))


def first_guess(composition: Composition, saddle: Saddle, delta: float, tail: float) -> float:
    """A first epsilon: Laplace's where the tilted law is near normal, else what one or many losses make of it."""
    t, laplace = saddle.at_delta(math.log(delta))
    grids = [(points_cut(law, tail), count) for law, count in composition.terms]
    if _asymmetry(composition.gaussian, grids, t) < 1.5:
        return laplace
    loss = np.concatenate([grid.loss for grid, _ in grids])
    weight = np.concatenate([count * grid.weight for grid, count in grids])
    common = weight > delta
    variance = composition.gaussian + float(weight[common] @ loss[common] ** 2)

    def excess(epsilon: float) -> float:
        return float(weight @ np.maximum(0.0, -np.expm1(np.minimum(0.0, epsilon - loss)))) - delta

    top = float(loss.max())
    single = 0.0 if excess(0.0) <= 0.0 or top <= 0.0 else float(optimize.brentq(excess, 0.0, top, xtol=1e-3 * top))
    return min(laplace, max(single, gaussian_epsilon(math.sqrt(variance), delta)))


def _asymmetry(gaussian: float, grids: list[tuple[Points, int]], t: float) -> float:
    """The tilted law's third absolute moment over its deviation cubed, as in the Berry-Esseen theorem."""
    second, third = gaussian, 0.0
    for grid, count in grids:
        tilted = grid.weight * np.exp(np.minimum(t * grid.loss, 700.0))
        tilted /= tilted.sum()
        away = np.abs(grid.loss - tilted @ grid.loss)
        second += count * float(tilted @ away**2)
        third += count * float(tilted @ away**3)
    # So strong a tilt that a single loss is left: nothing is farther from normal.
    return float(third / second**1.5) if second > 0.0 else math.inf


def period(saddle: Saddle, t: float, epsilon: float, delta: float) -> float:
    """H such that delta(eps - H) exp(-H t) and delta(eps + H) exp(H t) are both below `ALIAS` delta."""
    small = math.log(ALIAS * delta)
    right = saddle.t > 1.05 * t
    if not np.any(right):
        raise NotConverged("The saddle point lies at the end of the table.")
    chernoff = (saddle.K[right] - epsilon * saddle.t[right] - small) / (saddle.t[right] - t)
    return max(-small / t, float(np.min(chernoff)))


def largest_loss(composition: Composition) -> float:
    """A bound of the total loss that no output exceeds, or infinity."""
    total = math.inf if composition.gaussian else 0.0
    for law, count in composition.terms:
        most = law.largest_loss if isinstance(law, Allocation) else max(_largest_loss(pair) for _, pair in law.parts)
        total += count * most
    return total


def _largest_loss(pair: Pair) -> float:
    # N(0, 1) against a mixture that holds N(0, 1) with some weight: the ratio is at most one over that weight.
    if pair.p == ((1.0, 0.0),) and not pair.symmetrised and pair.q[0][1] == 0.0:
        return -math.log(pair.q[0][0])
    return math.inf


def quick_epsilon(composition: Composition, delta: float) -> float:
    """An upper bound of epsilon in well under a millisecond per law."""
    if not composition.terms:
        return gaussian_epsilon(math.sqrt(composition.gaussian), delta)
    proven = math.inf
    with contextlib.suppress(NotConverged):
        table = saddle_table(composition, tail_share(composition, 1e-6 * delta))
        proven = table.renyi_epsilon(math.log(delta * (1.0 - 1e-5)))
    plain = gaussian_epsilon(math.sqrt(composition.unamplified), delta)
    return max(0.0, min(proven, plain, largest_loss(composition)))


def quick_delta(composition: Composition, epsilon: float) -> float:
    """An upper bound of delta in well under a millisecond per law."""
    if not composition.terms:
        return gaussian_delta(math.sqrt(composition.gaussian), epsilon)
    if epsilon >= largest_loss(composition):
        return 0.0
    plain = gaussian_delta(math.sqrt(composition.unamplified), epsilon)
    with contextlib.suppress(NotConverged):
        return min(plain, saddle_table(composition, tail_share(composition, 1e-18)).chernoff_delta(epsilon) + 1e-17)
    return plain
