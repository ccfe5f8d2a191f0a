"""The fallback of the exact accountant: losses on a grid, rounded so that delta can only grow.

Each loss is split between its two grid neighbours so that its probability under both data sets is kept (connect the
dots, Doroshenko et al. 2022), which raises delta for every epsilon. The composition is one Fourier transform of the law
*tilted* by exp(t L) at the saddle point, so that round-off is small against delta and not only against one. What is
left of it is bounded and added: by Parseval's identity the transform's error is at most that of its powers, and by
Cauchy's inequality delta's error is at most its product with the norm of delta's weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy import fft, optimize

from clipwise.accounting._numerics.lattice import Floats, points_cut, points_fine
from clipwise.accounting._numerics.laws import Allocation, Composition, Law, gaussian
from clipwise.accounting._numerics.saddle import abscissa, first_guess, period, quick_delta, saddle_table, tail_share
from clipwise.errors import NotConverged

__all__ = ["grid_delta", "grid_epsilon", "rough_delta", "rough_epsilon"]

_TAIL = 1e-5  # share of delta that is counted as lost outright
_CELLS = (1 << 17, 1 << 18, 1 << 20)
_AGREE = 1e-5  # two grids that agree to this share of epsilon need no finer one
_AGREE_DELTA = 1e-4  # the same, of delta
_LAWS = 200
_ROUND_OFF = 4.0 * 2.0**-53  # of a power's error, per factor; long double arithmetic shows less than half of it


@dataclass(frozen=True)
class _Composed:
    """Total losses on a grid, their probabilities, the round-off of each, and the probability lost outright."""

    losses: Floats
    mass: Floats
    round_off: Floats
    lost: float

    def delta(self, epsilon: float) -> float:
        """An upper bound of delta at `epsilon`."""
        above = self.losses > epsilon
        weight = -np.expm1(epsilon - self.losses[above])
        return float(self.mass[above] @ weight) + float(np.linalg.norm(self.round_off[above] * weight)) + self.lost


def grid_epsilon(composition: Composition, delta: float) -> float:
    """An upper bound of epsilon at `delta`."""
    if composition.is_one_epoch:
        return _one_epsilon(composition, delta)
    return _refined(lambda cells, _: _epsilon(composition, delta, cells), _AGREE)


def grid_delta(composition: Composition, epsilon: float, floor: float = 1e-18) -> float:
    """An upper bound of delta at `epsilon`, not below `floor`."""
    if composition.is_one_epoch:
        return _one_delta(composition, epsilon, floor)
    return _refined(lambda cells, known: _delta(composition, epsilon, floor, cells, known), _AGREE_DELTA)


def rough_epsilon(composition: Composition, delta: float) -> float:
    """A quick upper bound of epsilon at `delta`."""
    if composition.is_one_epoch:
        return _one_epsilon(composition, delta)
    return _epsilon(composition, delta, _CELLS[0])


def rough_delta(composition: Composition, epsilon: float) -> float:
    """A quick upper bound of delta at `epsilon`."""
    if composition.is_one_epoch:
        return _one_delta(composition, epsilon, 1e-18)
    return _delta(composition, epsilon, 1e-18, _CELLS[0], 1.0)


def _refined(bound: Callable[[int, float], float], agree: float) -> float:
    """The bound on the first grid that a coarser one agrees with, given the one before; every one is a bound."""
    found = bound(_CELLS[0], 1.0)
    for cells in _CELLS[1:]:
        before, found = found, min(found, bound(cells, found))
        if before - found <= agree * found:
            break
    return found


def _one_epoch(composition: Composition, tail: float) -> _Composed:
    """The losses of an epoch of balls in bins, which need no transform."""
    grid = points_cut(composition.terms[0][0], tail)
    order = np.argsort(grid.loss)
    return _Composed(grid.loss[order], grid.weight[order], np.zeros(len(order)), max(2.0 * tail, grid.lost))


def _one_epsilon(composition: Composition, delta: float) -> float:
    composed = _one_epoch(composition, tail_share(composition, _TAIL * delta))
    if composed.delta(0.0) <= delta:
        return 0.0
    high = float(composed.losses[-1])
    return float(optimize.brentq(lambda epsilon: composed.delta(epsilon) - delta, 0.0, high, xtol=1e-12 * high))


def _one_delta(composition: Composition, epsilon: float, floor: float) -> float:
    found = 1.0
    for _ in range(4):  # what is lost should not count beside delta
        found = min(found, _one_epoch(composition, tail_share(composition, _TAIL * max(floor, found))).delta(epsilon))
    return min(1.0, max(floor, found))


def _epsilon(composition: Composition, delta: float, cells: int) -> float:
    tail = tail_share(composition, _TAIL * delta)
    saddle = saddle_table(composition, tail)
    guess = first_guess(composition, saddle, delta, tail)
    for _ in range(2):
        composed = _composed(composition, tail, guess, delta, cells)
        high = float(composed.losses[-1])

        def gap(epsilon: float) -> float:
            return composed.delta(epsilon) - delta  # noqa: B023

        if gap(0.0) <= 0.0:
            return 0.0
        if gap(high) > 0.0:
            raise NotConverged("The grid ends below epsilon.")
        epsilon = float(optimize.brentq(gap, 0.0, high, xtol=1e-12 * high))
        if abs(epsilon - guess) <= 0.2 * epsilon:
            return epsilon
        guess = epsilon
    return epsilon


def _delta(composition: Composition, epsilon: float, floor: float, cells: int, known: float) -> float:
    size = max(floor, min(known, quick_delta(composition, epsilon)))
    for _ in range(8):
        tail = tail_share(composition, _TAIL * size)
        found = _composed(composition, tail, epsilon, size, cells).delta(epsilon)
        if found > 0.1 * size or size <= floor:
            break
        size = max(floor, found, 1e-6 * size)
    return min(1.0, max(found, floor))


@lru_cache(maxsize=8)
def _composed(composition: Composition, tail: float, epsilon: float, delta: float, cells: int) -> _Composed:
    """The total losses around epsilon."""
    terms = composition.terms
    if composition.gaussian and composition.is_allocated:
        terms = (*terms, (gaussian(math.sqrt(composition.gaussian)), 1))  # there is no other way for these
    elif composition.gaussian:
        raise NotConverged("The grid is for no plain Gaussian steps.")
    if len(terms) > _LAWS:
        raise NotConverged("The grid is for few laws.")
    saddle = saddle_table(composition, tail)
    t = abscissa(saddle, epsilon, delta)
    span = 2.0 * period(saddle, t, epsilon, delta)
    # One step's losses must fit, with room below.
    span = max(span, 1.25 * max(float(points_cut(law, tail).loss.max()) for law, _ in terms))
    step = span / cells
    log_total = np.zeros(cells // 2 + 1, dtype=np.complex128)
    shift, scale, lost, factors = 0, 0.0, 0.0, math.log2(cells)
    for law, count in terms:
        start, tilted, log_moment, gone = _place(law, tail, step, t, cells)
        spectrum = fft.rfft(tilted)
        with np.errstate(divide="ignore"):
            log_total += count * np.log(spectrum)
        shift, scale, lost = shift + count * start, scale + count * log_moment, lost + count * gone
        factors += count
    weights = fft.irfft(np.exp(log_total), cells)
    # The transform knows places only modulo its length; the window runs from a quarter span below epsilon.
    first = math.floor((epsilon - 0.25 * span) / step)
    places = step * (first + np.arange(cells))
    near = places >= min(0.0, epsilon)
    losses = np.asarray(places[near], dtype=np.float64)
    untilt = np.exp(np.minimum(scale - t * losses, 700.0))
    mass = np.maximum(np.roll(weights, (shift - first) % cells)[near], 0.0) * untilt
    return _Composed(losses, mass, _ROUND_OFF * factors * float(np.linalg.norm(weights)) * untilt, lost)


def _place(law: Law | Allocation, tail: float, step: float, t: float, cells: int) -> tuple[int, Floats, float, float]:
    """The first cell, the tilted and normalised probabilities, the log of the norm, and the probability left out."""
    grid = points_fine(law, tail, 200_000)
    # Losses far below zero are rounded up to the window's start, which can only raise delta.
    loss = np.maximum(grid.loss, -0.125 * cells * step)
    place = np.floor(loss / step)
    inside = loss - step * place
    up = np.expm1(-inside) / math.expm1(-step)
    start = int(place.min())
    index = (place - start).astype(np.int64)
    if int(index.max()) + 2 > cells:
        raise NotConverged("One step's losses do not fit on the grid.")
    mass = np.bincount(index, weights=grid.weight * (1.0 - up), minlength=cells)
    mass += np.bincount(index + 1, weights=grid.weight * up, minlength=cells)
    exponent = t * step * (start + np.arange(cells))
    used = mass > 0.0
    moment = float(mass[used] @ np.expm1(exponent[used]))
    tilted = np.where(used, mass * np.exp(np.where(used, exponent, 0.0)), 0.0) / (1.0 + moment)
    return start, tilted, math.log1p(moment), max(2.0 * tail, grid.lost)
