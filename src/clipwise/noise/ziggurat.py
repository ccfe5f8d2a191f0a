"""Normal numbers by numpy's float64 ziggurat: the source of short pieces of noise.

Its law, derived from the algorithm:

- Up to r = 3.654 a number is k w with k of 52 bits: within 2^-48 of the exact one, after all roundings.
- Beyond r it is r + a/r with a, b ~ Exp(1) and 2b > (a/r)^2 (Marsaglia, 1964), which is the normal tail exactly. Both
  are the logarithms of 53-bit numbers, at most 53 log 2, so numpy's numbers end at r + sqrt(106 log 2) = 12.226: with
  a noise multiplier of 0.12 one record alone reaches beyond once in 20,000 times.
- So a number beyond 8 is replaced by sqrt(64 + 2 E), kept with the probability 8 / sqrt(64 + 2 E), which is the normal
  law beyond 8. E is that of `polar`, whose tail ends nowhere.
- The release rounds to a grid of std/1024 or a little less. The probability of a point of the grid is that of the
  normal law up to a factor 1 +- 2^-35 within r, 1e-9 at 6 deviations, 1e-6 at 8 and beyond.

What this makes of delta is in `docs/decisions/0012-noise.md`, and a test computes it for the paper's experiments.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from clipwise.noise.polar import exponentials
from clipwise.noise.stream import StreamNormals, check_numpy

__all__ = ["ZigguratNormals"]

_KNOWN = ((566, 1132, 1698), {0: 1.1884051473228406e-15, 9: -4.433226202343878, 63: -1.0835774767948474})
_FAR = 8.0


@lru_cache(maxsize=1)
def _check() -> None:
    check_numpy(*_KNOWN, lambda generator: generator.standard_normal(64))


def _draw(generator: np.random.Generator, numbers: npt.NDArray[Any]) -> None:
    generator.standard_normal(out=numbers)
    if numbers.size and (numbers[numbers.argmax()] > _FAR or numbers[numbers.argmin()] < -_FAR):
        for place in np.flatnonzero(np.abs(numbers) > _FAR):
            numbers[place] = math.copysign(_beyond(generator), numbers[place])


def _beyond(generator: np.random.Generator) -> float:
    drawn = np.empty(1)
    while True:
        exponentials(generator, drawn)
        distance = math.sqrt(_FAR * _FAR + 2.0 * float(drawn[0]))
        if generator.random() * distance < _FAR:
            return distance


class ZigguratNormals(StreamNormals):
    """numpy's float64 ziggurat on SFC64, with a key of 192 bits for every piece of every step.

    Statistically sound, with a tail that ends nowhere; not a cryptographic generator. It is used as `PolarNormals` is.
    """

    def __init__(self) -> None:
        _check()
        super().__init__(lambda: _draw)
