"""One step's moments E_P[exp(z L)] at equally spaced points of a line Re z = t."""

from __future__ import annotations

import math
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy import special

from clipwise.accounting._numerics.lattice import WINDOW_WIDTH, Floats, Points

__all__ = ["Complexes", "large_share", "log1p", "log_moment", "split_moment"]

Complexes: TypeAlias = NDArray[np.complex128]

_BLOCK = 64


def log1p(x: Complexes) -> Complexes:
    """log(1 + x) for complex x, accurate near zero.

    >>> complex(log1p(np.array([1e-20 + 0j]))[0])
    (1e-20+0j)
    """
    real, imaginary = x.real, x.imag
    # A zero of the moment is as good as 1e-8: no later product can tell the difference.
    square = np.maximum(2.0 * real + real**2 + imaginary**2, -1.0 + 1e-16)
    return np.asarray(0.5 * np.log1p(square) + 1j * np.arctan2(imaginary, 1.0 + real))


def log_moment(grid: Points, z: Complexes) -> Complexes:
    """The log of E_P[exp(z L)] at equally spaced z of one real part."""
    t = float(z[0].real)
    moment = float(grid.weight @ np.expm1(t * grid.loss))
    (turned,) = _turned(grid.loss, z.imag, [grid.weight * np.exp(t * grid.loss) / (1.0 + moment)])
    return math.log1p(moment) + log1p(turned)


def split_moment(grid: Points, z: Complexes, window: float) -> tuple[Complexes, Complexes]:
    """The log of E_P[exp(z L); small L] and the ratio of the large losses' part to it."""
    t = float(z[0].real)
    large = large_share(grid, window)
    calm, tilt = grid.weight * (1.0 - large), np.exp(t * grid.loss)
    moment = float(calm @ np.expm1(t * grid.loss)) - float(grid.weight @ large)
    jump = grid.weight * large * tilt
    calm_turned, jump_turned = _turned(grid.loss, z.imag, [calm * tilt, jump])
    calm_part = 1.0 + moment + calm_turned
    return log1p(calm_part - 1.0), (float(jump.sum()) + jump_turned) / calm_part


def large_share(grid: Points, window: float) -> Floats:
    """A smooth step from 0 to 1 where the loss passes `window`."""
    return np.asarray(0.5 * special.erfc((window - grid.loss) / (WINDOW_WIDTH * window)))


def _turn(angle: Floats) -> Complexes:
    # exp(ia) - 1 = -2 sin^2(a/2) + 2i sin(a/2) cos(a/2): no cancellation for small angles.
    sine = np.sin(0.5 * angle)
    return np.asarray(2j * sine * np.cos(0.5 * angle) - 2.0 * sine**2)


def _turned(loss: Floats, y: Floats, weights: list[Floats]) -> list[Complexes]:
    """Sums of weight * (exp(i y L) - 1) at equally spaced y, for each of `weights`.

    Sines and cosines are most of the accountant's work, so a block of rows is filled by doubling:
    e(a+b) = e(a) + e(b) + e(a) e(b) for e(a) = exp(ia) - 1, which keeps the accuracy of small angles.
    """
    count, step = len(y), float(y[1] - y[0])
    columns = np.asarray(np.stack(weights, axis=1), dtype=np.complex128)
    block = np.empty((min(_BLOCK, count), len(loss)), dtype=np.complex128)
    ahead = [(size, _turn(size * step * loss)) for size in (1, 2, 4, 8, 16, 32) if size < len(block)]
    sums = []
    for begin in range(0, count, _BLOCK):
        rows = block[: min(_BLOCK, count - begin)]
        rows[0] = _turn(float(y[begin]) * loss)
        for size, turn in ahead:
            more = rows[size : 2 * size]
            less = rows[: len(more)]
            np.multiply(less, 1.0 + turn, out=more)
            more += turn
        sums.append(rows @ columns)
    return list(np.concatenate(sums).T)
