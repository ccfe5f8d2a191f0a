"""K(t) = sum over the steps of log E_P[exp(t L)] along the real axis, tabulated once per question."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from clipwise.accounting.lattice import Floats, points_cut
from clipwise.accounting.laws import Composition
from clipwise.errors import ClipwiseError

__all__ = ["NotConverged", "Saddle", "saddle_table", "tail_share"]


class NotConverged(ClipwiseError):
    """The contour integral did not reach its accuracy; a bound must answer instead."""


@dataclass(frozen=True)
class Saddle:
    """K and its derivatives at rising t."""

    t: Floats
    K: Floats
    slope: Floats
    curvature: Floats

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
        bounds = (self.K - log_delta - np.log1p(self.t)) / self.t + np.log(self.t / (1.0 + self.t))
        return float(np.min(bounds))

    def other(self, t: float) -> float:
        """A second abscissa for the cross-check."""
        return max(0.85 * t, float(self.t[0]))


def tail_share(composition: Composition, mass: float) -> float:
    """The probability per step that may be faded out for a total of `mass`."""
    return mass / max(1, sum(count for _, count in composition.terms))


@lru_cache(maxsize=256)
def saddle_table(composition: Composition, tail: float) -> Saddle:
    """K at 81 abscissas around the reciprocal of the loss's standard deviation, `tail` per step faded out."""
    grids = [(points_cut(law, tail), count) for law, count in composition.terms]
    spread = composition.gaussian + sum(count * float(g.weight @ g.loss**2) for g, count in grids)
    t = np.geomspace(1e-3, 1e4, 81) / math.sqrt(spread)
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
    return Saddle(t[fine], K[fine], slope[fine], curvature[fine])
