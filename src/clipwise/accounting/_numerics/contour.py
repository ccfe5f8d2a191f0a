"""The exact accountant: one contour integral through the saddle point, in double precision.

With K(z) = sum over the steps of log E_P[exp(z L)], L the privacy loss,
delta(eps) = (1/pi) int_0^inf Re[exp(K(z) - eps z) / (z (z+1))] dy on z = t + iy, for any t > 0 (Alghamdi et al. 2023,
theorem 3.1). What makes it fast and safe:

- t at the saddle point, where the integrand cancels least;
- equal steps of y: the sum is then delta(eps) + sum over n != 0 of delta(eps + n H) exp(n H t) with H = 2 pi / step,
  every term positive, and H is chosen so that Chernoff's bound makes them negligible;
- the loss's far tail, less probable than 1e-12 delta, is faded out, so that events nobody will see do not rule t;
- where the integrand falls slowly because most runs see no large loss at all, the runs without one are taken out: they
  contribute nothing to delta, which Chernoff's bound shows, and the rest of the integrand falls fast;
- a second contour with another t and another lattice must agree.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy import optimize

from clipwise.accounting._numerics.gaussian import gaussian_delta, gaussian_epsilon
from clipwise.accounting._numerics.lattice import count_points, points, points_cut
from clipwise.accounting._numerics.laws import Composition, Law
from clipwise.accounting._numerics.moments import Complexes, large_share, log1p, log_moment, split_moment
from clipwise.accounting._numerics.saddle import (
    Saddle,
    abscissa,
    first_guess,
    period,
    quick_delta,
    saddle_table,
    tail_share,
)
from clipwise.accounting._numerics.single import single_delta, single_epsilon
from clipwise.errors import NotConverged

__all__ = ["EASY", "HARD", "Attempt", "exact_delta", "exact_epsilon"]

_REST = 1e-10  # share of delta in the part of the contour that is not summed
_AGREE = 1e-7  # two contours must agree to this share of delta
_LOST = 1e-4  # share of delta that may be left out with the tail, and is added again
_CANCEL = 1e7  # the summands' absolute values over delta, at most
_CHUNK = 64
_LONGEST_ROUND = 4096


@dataclass
class _Budget:
    """Lattice points times nodes that may still be spent."""

    left: int

    def spend(self, work: int) -> None:
        self.left -= work
        if self.left < 0:
            raise NotConverged("The contours need too many nodes.")


@dataclass(frozen=True)
class Attempt:
    """How hard to try: the share of delta faded out with the loss's tail, and the work (lattice points times nodes)."""

    tail: float
    split: bool
    work: int

    def budget(self, composition: Composition) -> _Budget:
        """The work for this composition: each pair of each law needs its own lattice."""
        return _Budget(self.work + 50_000 * sum(len(law.parts) for law, _ in composition.laws))


_ATTEMPTS = (
    Attempt(1e-12, split=False, work=3_000_000),
    Attempt(1e-10, split=True, work=16_000_000),
    Attempt(1e-7, split=False, work=4_000_000),
)


EASY, HARD = _ATTEMPTS[:1], _ATTEMPTS[1:]
"""The attempt that suits most runs and fails fast, and those for the others."""


def exact_epsilon(composition: Composition, delta: float, attempts: Sequence[Attempt] = _ATTEMPTS) -> float:
    """The epsilon at `delta`, to about 1e-9 of its value; raises `NotConverged` when it does not get so close."""
    if not composition.laws:
        return gaussian_epsilon(math.sqrt(composition.gaussian), delta)
    if composition.single is not None:
        return single_epsilon(composition.single, delta)
    if _total_variation(composition) <= delta:
        return 0.0
    return _first_sound(lambda attempt: _epsilon(composition, delta, attempt), attempts)


def exact_delta(
    composition: Composition, epsilon: float, attempts: Sequence[Attempt] = _ATTEMPTS, floor: float = 1e-18
) -> float:
    """The delta at `epsilon`; a value below `floor` is given as `floor`."""
    if composition.empty:
        return 0.0
    if not composition.laws:
        return max(floor, gaussian_delta(math.sqrt(composition.gaussian), epsilon))
    if composition.single is not None:
        return max(floor, single_delta(composition.single, epsilon))
    return _first_sound(lambda attempt: _delta(composition, epsilon, floor, attempt), attempts)


def _first_sound(answer: Callable[[Attempt], float], attempts: Sequence[Attempt]) -> float:
    for attempt in attempts[:-1]:
        with contextlib.suppress(NotConverged):
            return answer(attempt)
    return answer(attempts[-1])


def _epsilon(composition: Composition, delta: float, attempt: Attempt) -> float:
    budget = attempt.budget(composition)
    tail = tail_share(composition, attempt.tail * delta)
    saddle = saddle_table(composition, tail)
    epsilon = first_guess(composition, saddle, delta, tail)
    t = abscissa(saddle, epsilon, delta)
    for _ in range(8):
        contour = _Contour(composition, saddle, tail, t, epsilon, delta, attempt.split, budget)
        found = contour.solve(delta)
        settled = abs(found - epsilon) <= 0.1 * found
        t, epsilon = abscissa(saddle, found, delta), found
        if settled:
            break
    contour.assert_sound(epsilon, delta)
    if not epsilon <= max(0.0, saddle.renyi_epsilon(math.log(delta))) * (1.0 + 1e-6):
        raise NotConverged("The value exceeds the Renyi bound.")
    if not _one_step_delta(composition, epsilon) <= delta * (1.0 + 1e-6):
        raise NotConverged("The value lies below that of one step alone.")
    check = _Contour(composition, saddle, tail, saddle.other(t), epsilon, delta, attempt.split, budget, scale=0.83)
    # At epsilon 0 delta may stay below its target; the two contours must agree there all the same.
    _assert_agreement(contour.delta(epsilon), check.delta(epsilon), _AGREE * delta + contour.lost + check.lost)
    return epsilon


def _delta(composition: Composition, epsilon: float, floor: float, attempt: Attempt) -> float:
    size, budget = max(floor, quick_delta(composition, epsilon)), attempt.budget(composition)
    for _ in range(12):
        tail = tail_share(composition, attempt.tail * size)
        saddle = saddle_table(composition, tail)
        t = abscissa(saddle, epsilon, size)
        contour = _Contour(composition, saddle, tail, t, epsilon, size, attempt.split, budget)
        found = contour.delta(epsilon)
        if found > 0.3 * size or size <= floor:
            break
        # Until the tail and the steps suit the answer's size, it is known only up to that size.
        size = max(floor, found if found > 1e-6 * size else 1e-6 * size)
    contour.assert_sound(epsilon, max(found, floor))
    if not _one_step_delta(composition, epsilon) <= max(found, floor) * (1.0 + 1e-6):
        raise NotConverged("The value lies below that of one step alone.")
    if found <= floor:
        return floor
    check = _Contour(composition, saddle, tail, saddle.other(t), epsilon, size, attempt.split, budget, scale=0.83)
    _assert_agreement(found, check.delta(epsilon), contour.lost + check.lost)
    return min(1.0, found)


def _total_variation(composition: Composition) -> float:
    """A bound of delta at epsilon 0: total variation distances add up at most."""
    total = gaussian_delta(math.sqrt(composition.gaussian), 0.0)
    for law, count in composition.laws:
        total += count * single_delta(law, 0.0)
    return total


def _one_step_delta(composition: Composition, epsilon: float) -> float:
    """A lower bound of delta: anyone who sees all steps sees each one."""
    return max(single_delta(law, epsilon) for law, _ in composition.laws[:16])


def _assert_agreement(first: float, second: float, lost: float) -> None:
    if not abs(first - second) <= _AGREE * abs(first) + lost:
        raise NotConverged(f"Two contours disagree: delta {first:.6g} and {second:.6g}.")


class _Contour:
    """exp(K(z)) at equal steps along Re z = t, enough of them for a delta near `epsilon`."""

    def __init__(
        self,
        composition: Composition,
        saddle: Saddle,
        tail: float,
        t: float,
        epsilon: float,
        delta: float,
        split: bool,
        budget: _Budget,
        scale: float = 1.0,
    ) -> None:
        self._composition = composition
        self._t, self._guess, self._lattice_scale = t, epsilon, scale
        self._tail = tail
        self._step = 2.0 * math.pi / period(saddle, t, epsilon, delta)
        self._window = _window(composition, tail, epsilon, delta) if split else 0.0
        self._budget = budget
        self._z: Complexes = np.empty(0, np.complex128)
        self._value: Complexes = np.empty(0, np.complex128)
        self._log_scale, self.lost = 0.0, 0.0
        # A normal integrand is below 1e-21 after ten deviations; others need the later, longer rounds.
        self._grow(delta, int(np.clip(10.0 * saddle.width(t) / self._step, 16, _CHUNK)))

    def _grow(self, delta: float, count: int) -> None:
        while True:
            begin = len(self._z)
            z = np.asarray(self._t + 1j * self._step * np.arange(begin, begin + count), dtype=np.complex128)
            value = self._moments(z)
            self._z, self._value = np.concatenate([self._z, z]), np.concatenate([self._value, value])
            if self._rest(self._guess) <= _REST * delta:
                return
            if 0 < begin <= count:  # once, after the second round
                self._assert_within_reach(delta, count)
            count = min(2 * count, _LONGEST_ROUND)

    def _assert_within_reach(self, delta: float, count: int) -> None:
        """Raise early when the integrand is still too large as far out as the budget goes."""
        left, nodes = self._budget.left, len(self._z)
        while left > 0:
            nodes, count = nodes + count, min(2 * count, _LONGEST_ROUND)
            left -= count * sum(self._count(law, self._step * (nodes + count)) for law, _ in self._composition.laws)
        far = np.asarray(self._t + 1j * self._step * nodes * np.linspace(0.75, 1.0, 9), dtype=np.complex128)
        size = np.abs(self._moments(far) / (far * (far + 1.0)))
        if not nodes * float(np.max(size)) * self._factor(self._guess) <= _REST * delta:
            raise NotConverged("The contours need too many nodes.")

    def _count(self, law: Law, y: float) -> int:
        return count_points(law, self._tail, self._t, y, self._lattice_scale, self._window)

    def _moments(self, z: Complexes) -> Complexes:
        """exp(K(z)) over exp(K(t)), or of the runs with a large loss only; what overflows is caught by the checks."""
        total, lost = 0.5 * self._composition.gaussian * z * (z + 1.0), 0.0
        excess = np.zeros_like(z) if self._window else None
        with np.errstate(over="ignore", invalid="ignore"):
            for law, count in self._composition.laws:
                y = float(z[-1].imag)
                self._budget.spend(self._count(law, y) * len(z))
                grid = points(law, self._tail, self._t, y, self._lattice_scale, window=self._window)
                lost += count * grid.lost
                if excess is None:
                    total = total + count * log_moment(grid, z)
                    continue
                log_calm, ratio = split_moment(grid, z, self._window)
                total = total + count * log_calm
                excess = excess + count * log1p(ratio)
            self.lost = max(self.lost, lost)
            if len(self._z) == 0:
                self._log_scale = float(total[0].real)
            return np.asarray(np.exp(total - self._log_scale) * (1.0 if excess is None else np.expm1(excess)))

    def _terms(self, epsilon: float) -> Complexes:
        terms = self._value * np.exp(-1j * epsilon * self._z.imag) / (self._z * (self._z + 1.0))
        terms[0] *= 0.5
        return np.asarray(terms)

    def _factor(self, epsilon: float) -> float:
        return math.exp(min(700.0, self._log_scale - epsilon * self._t)) * self._step / math.pi

    def _rest(self, epsilon: float) -> float:
        # The integrand falls at least like y^-2, so the rest is at most about (last index) * (last terms).
        n = len(self._z)
        last = slice(n - max(4, n // 4), n)
        size = np.abs(self._value[last] / (self._z[last] * (self._z[last] + 1.0)))
        return float(n * np.max(size) * self._factor(epsilon))

    def assert_sound(self, epsilon: float, delta: float) -> None:
        """Raise unless the contour is long enough and keeps enough digits at this epsilon."""
        # Written so that a value that is not a number fails.
        if not self._rest(epsilon) <= 10.0 * _REST * delta:
            raise NotConverged("The contour is too short.")
        if not float(np.sum(np.abs(self._terms(epsilon)))) * self._factor(epsilon) <= _CANCEL * delta:
            raise NotConverged("The integrand cancels too much for double precision.")
        if not self.lost <= _LOST * delta:
            raise NotConverged("Too much of the loss's tail was left out.")

    def delta(self, epsilon: float) -> float:
        """The delta at `epsilon`; what was faded out counts as if it were all lost, so that it errs upwards."""
        return float(np.sum(self._terms(epsilon).real)) * self._factor(epsilon) + self.lost

    def solve(self, delta: float) -> float:
        """The epsilon at `delta`: the root of log delta, which falls."""

        def gap(value: float) -> float:
            found = self.delta(value)
            return math.log(found / delta) if found > 0.0 else -1.0

        epsilon = max(0.0, self._guess)
        low, high, step = epsilon, epsilon, 0.02 * epsilon + 1e-9
        while gap(low) <= 0.0:
            if low == 0.0:
                return 0.0
            low, step = max(0.0, low - step), 2.0 * step
        step = 0.02 * epsilon + 1e-9
        while gap(high) > 0.0:
            high, step = high + step, 2.0 * step
            if not high < 1e15:
                raise NotConverged("No epsilon reaches this delta.")
        return float(optimize.brentq(gap, low, high, xtol=1e-12 * high, rtol=1e-12))


@lru_cache(maxsize=64)
def _window(composition: Composition, tail: float, epsilon: float, delta: float) -> float:
    """The largest loss such that runs whose every loss stays below about that never reach epsilon."""
    if epsilon <= 0.0:
        raise NotConverged("No loss is small against an epsilon of zero.")
    grids = [(points_cut(law, tail), n) for law, n in composition.terms]
    for share in (1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256):
        window = epsilon / share
        for t in np.geomspace(0.5, 64.0, 15) / window:
            K = 0.5 * composition.gaussian * t * (t + 1.0)
            for grid, count in grids:
                calm = grid.weight * (1.0 - large_share(grid, window))
                with np.errstate(over="ignore", invalid="ignore"):
                    exponent = np.where(calm > 1e-300, t * grid.loss, 0.0)
                    K += count * math.log(max(1e-300, float(np.sum(calm * np.exp(exponent)))))
            if K - epsilon * t < math.log(1e-12 * delta):
                return window
    raise NotConverged("No loss is both small against epsilon and rare.")
