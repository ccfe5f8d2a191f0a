"""Normal numbers in pairs, from a distance and a direction (Box and Muller, 1958): the source of long pieces of noise.

    (x, y) = R (cos t, sin t),    R = sqrt(2 E),  E exponential,  t uniform on the circle

are two independent normal numbers. E is numpy's ziggurat and t is made of 64 bits, all in float64. The law:

- Up to 7.697 a number E is k w with k of 53 bits and w < 2^-49. From there to 12 it is the logarithm of a number of 53
  bits. Where E > 12 it is replaced by 12 + a fresh exponential number, again and again: the exponential law has no
  memory, so this is exact, and the tail ends nowhere. Because of these steps the probability that E lies between a and
  b is off by at most 1.1 (1 + a) exp(-a) 2^-52, and from 7.697 to 12 by exp(-7.697) 2^-52.
- The direction is one of 2^13 points on the circle, turned by an angle h of at most pi / 2^13: by (1 + i tan h) cos h.
  The powers of h that are left out are below 2^-50. Together with all roundings, in the table and here, they move the
  pair by less than R 2^-49; the steps of t are below 2^-60.
- The release rounds x and y to grids of std/1024 or a little less, so a pair of grid points is a cell in the plane, at
  least 2^-11 wide. Moving its border by R 2^-49 changes its probability by a factor of at most 1 +- 2^-36 R. Seen from
  0 it takes up at most 2^-12/R of all directions, in each of which it is an interval of E: so the steps of E change
  its probability by at most 1 +- 2^-38/R, or 2^-27 for the cells at 0, and by 1 +- 2^-36 from 7.697 to 12.

In all, a factor of at most 1 +- 2^-36 (1 + R) beyond R = 1/4, without an end. What this makes of delta is in
`docs/decisions/0012-noise.md`, and a test computes it for the paper's experiments.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from clipwise.noise.stream import StreamNormals, check_numpy

__all__ = ["PolarNormals", "exponentials"]

Array: TypeAlias = npt.NDArray[Any]

_KNOWN = ((979, 1958, 2937), {0: 1.6271691574651305e-16, 57: 11.852912631540821, 63: 1.1132337444697369})
_FAR = 12.0
_BLOCK = 1 << 15

_POINTS = 1 << 13
_WIDEST = math.pi / _POINTS


def _circle() -> Array:
    """The points on the circle of radius sqrt(2), so that E need not be doubled."""
    angles = np.arange(_POINTS // 4) * (2 * _WIDEST)
    quarter = math.sqrt(2) * (np.cos(angles) + 1j * np.sin(angles))
    return np.concatenate([quarter, 1j * quarter, -quarter, -1j * quarter])


# Arrays, since numpy takes longer for a number of Python's.
_CIRCLE, _POINT = _circle(), np.array(_POINTS - 1)
# cos(h)^2 and tan(h) for h = u * _STEP, as polynomials in u. The cosine's h^4 / 3 is spread over its other two terms.
_STEP = _WIDEST * 2.0**-63
_COS_0, _COS_2 = np.array(1 - _WIDEST**4 / 24), np.array((_WIDEST**2 / 3 - 1) * _STEP**2)
_TAN_1, _TAN_3 = np.array(_STEP), np.array(_STEP**3 / 3)


def exponentials(generator: np.random.Generator, out: Array) -> None:
    """Exponential numbers whose tail ends nowhere: numpy's own have at most 44.4, from 53 bits beyond 7.7."""
    generator.standard_exponential(out=out)
    if out[out.argmax()] > _FAR:
        far = np.flatnonzero(out > _FAR)
        fresh = np.empty(len(far))
        exponentials(generator, fresh)
        out[far] = _FAR + fresh


class _Pairs:
    """Room for the steps of a block of pairs; it serves one thread.

    What stays in it after a piece tells no more than the generator, which stays too.
    """

    def __init__(self) -> None:
        self._angle, self._square = (np.empty(_BLOCK) for _ in range(2))
        self._turn, self._odd = (np.empty(_BLOCK, dtype=np.complex128) for _ in range(2))

    def fill(self, generator: np.random.Generator, numbers: Array) -> None:
        """Block for block, so that all stays in the processor's cache. Of an odd block's last pair one is dropped."""
        for start in range(0, numbers.size, 2 * _BLOCK):
            block = numbers[start : start + 2 * _BLOCK]
            if block.size % 2:
                pairs = self._odd[: block.size // 2 + 1]
                self._draw(generator, pairs)
                block[:] = pairs.view(np.float64)[:-1]
            else:
                self._draw(generator, block.view(np.complex128))

    def _draw(self, generator: np.random.Generator, pairs: Array) -> None:
        size = pairs.size
        angle, square, turn = self._angle[:size], self._square[:size], self._turn[:size]
        words = generator.bit_generator.random_raw(size).view(np.int64)
        np.copyto(angle, words)  # of its 64 bits the last 13 are the point's number too: less than a rounding
        np.bitwise_and(words, _POINT, words)
        _CIRCLE.take(words, None, pairs, "clip")
        np.multiply(angle, angle, square)
        tangent = words.view(np.float64)  # arrays that are done with serve again: the less memory, the faster
        np.multiply(square, _TAN_3, tangent)
        np.add(tangent, _TAN_1, tangent)
        np.multiply(tangent, angle, tangent)
        np.multiply(square, _COS_2, square)
        np.add(square, _COS_0, square)
        exponential, radius = angle, turn.real
        exponentials(generator, exponential)
        np.multiply(exponential, square, exponential)
        np.sqrt(exponential, radius)
        np.multiply(tangent, radius, turn.imag)
        np.multiply(pairs, turn, pairs)


@lru_cache(maxsize=1)
def _check() -> None:
    check_numpy(*_KNOWN, lambda generator: generator.standard_exponential(64))


class PolarNormals(StreamNormals):
    """Box-Muller in float64 on numpy's SFC64, with a key of 192 bits for every piece of every step.

    Statistically sound, with a tail that ends nowhere; not a cryptographic generator.

    >>> import torch
    >>> from clipwise.entropy import Entropy
    >>> numbers = torch.empty(1000, dtype=torch.float64)
    >>> PolarNormals().fill_(numbers, Entropy(seed=1), step=0, piece=0)
    >>> bool(abs(numbers.std() - 1) < 0.1)
    True
    """

    def __init__(self) -> None:
        _check()
        super().__init__(lambda: _Pairs().fill)
