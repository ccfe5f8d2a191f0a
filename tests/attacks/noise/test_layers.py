"""numpy's two ziggurats, layer by layer: that its tables make the densities which the derivations take for granted.

`noise/polar.py` and `noise/ziggurat.py` account for steps and roundings. A table with an error would bend the density
itself, in all numbers of a layer alike. So the compiled code is asked: how wide every layer is, where its sure part
ends, and what it keeps of the rest.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import mpmath
import numpy as np
import pytest

from tests.attacks.noise.test_tail import EXPONENTIAL_R, ONES, Fed, R

LAYERS, TAIL = 256, 1 << 62  # the tail, and a wedge that rejects, ask for more words; these end it


class Ziggurat:
    """One of numpy's ziggurats, as the bits of a word mean it: place k of `bits` bits in layer i."""

    def __init__(self, method: str, bits: int, shift: int, layer: int, begin: float, density: Callable[..., Any]):
        self.method, self.bits, self.shift, self.layer = method, bits, shift, layer
        self.begin, self.density = begin, density

    def ask(self, i: int, k: int, uniform: int = TAIL) -> tuple[float, int]:
        """The number, and how many words it took."""
        fed = Fed(k << self.shift | i << self.layer, uniform << 11 & ONES)
        found = float(getattr(np.random.Generator(fed), self.method)())  # type: ignore[arg-type]
        return found, 2 - len(list(fed.left))

    def width(self, i: int) -> mpmath.mpf:
        return mpmath.mpf(abs(self.ask(i, 1)[0])) * 2**self.bits

    def sure(self, i: int) -> int:
        """The first place that is not kept at once, by bisection."""
        low, high = 0, 1 << self.bits
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if self.ask(i, middle)[1] == 1 else (low, middle)
        return low


EXPONENTIAL = Ziggurat("standard_exponential", 53, 11, 3, EXPONENTIAL_R, lambda x: mpmath.exp(-x))
NORMAL = Ziggurat("standard_normal", 52, 9, 0, R, lambda x: mpmath.exp(-x * x / 2))


@pytest.fixture(params=[EXPONENTIAL, NORMAL], ids=["exponential", "normal"])
def ziggurat(request: pytest.FixtureRequest) -> Ziggurat:
    found: Ziggurat = request.param
    return found


def test_every_layer_has_the_same_area(ziggurat: Ziggurat) -> None:
    """All layers are drawn equally often, so the density is off as much as an area is: 2^-44; 2^-36 is allowed."""
    with mpmath.workdps(40):
        f = ziggurat.density
        begin = mpmath.mpf(ziggurat.begin)
        beyond = (
            f(begin) if ziggurat is EXPONENTIAL else mpmath.sqrt(mpmath.pi / 2) * mpmath.erfc(begin / mpmath.sqrt(2))
        )
        area = begin * f(begin) + beyond
        edges = [mpmath.mpf(0), *(ziggurat.width(i) for i in range(1, LAYERS))]
        assert abs(edges[-1] / begin - 1) < 2.0**-51
        for narrow, wide in itertools.pairwise(edges):
            assert abs(wide * (f(narrow) - f(wide)) / area - 1) < 2.0**-44
        # The base: a rectangle up to `begin`, and the tail in the share that it must have.
        assert abs(ziggurat.width(0) * f(begin) / area - 1) < 2.0**-44
        assert abs((1 - mpmath.mpf(ziggurat.sure(0)) / 2**ziggurat.bits) * area / beyond - 1) < 2.0**-44


def test_a_layer_keeps_all_below_the_next_and_of_the_rest_what_the_density_says(ziggurat: Ziggurat) -> None:
    f = ziggurat.density
    places = 1 << ziggurat.bits
    edges = [0.0, *(float(ziggurat.width(i)) for i in range(1, LAYERS))]
    for i in range(1, LAYERS):
        narrow, wide = edges[i - 1], edges[i]
        if i % 16 == 1 or i > 250:
            assert abs(ziggurat.sure(i) / places * wide - narrow) < 1e-15 * wide
        for share in (0.1, 0.5, 0.9):
            k = int((narrow + share * (wide - narrow)) / wide * places)
            x = mpmath.mpf(k) / places * wide
            kept = float((f(x) - f(wide)) / (f(narrow) - f(wide)))
            for off, count in ((-1e-11, 2), (1e-11, 3)):
                found, words = ziggurat.ask(i, k, math.floor((kept + off) * 2**53))
                assert (words == 2 and math.isclose(abs(found), float(x), rel_tol=1e-15)) == (count == 2)
