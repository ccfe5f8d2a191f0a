"""What the accounting tests share."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import Any

from clipwise.accounting import GaussianSteps
from clipwise.accounting._numerics.laws import Composition, poisson
from clipwise.sampling import Poisson

VECTORS: list[dict[str, Any]] = json.loads(Path(__file__).with_name("vectors.json").read_text())

MNIST = (GaussianSteps(Poisson(60_000, 256), 1.1, 14_040),)
SNLI = (GaussianSteps(Poisson(550_152, 32), 0.4, 51_576),)


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """What is done in here takes at most so much of the processor, however busy the machine is."""
    start = time.process_time()
    yield
    assert time.process_time() - start < seconds


def run(sigma: float, rate: float, steps: int) -> Composition:
    """The remove direction of a Poisson run at any rate."""
    return Composition.of([(poisson(rate, 1.0 / sigma, replace=False), steps)])


def scheme(rate: float) -> Poisson:
    """A Poisson scheme with this very rate."""
    exact = Fraction(rate).limit_denominator(10**8)
    assert float(exact) == rate or abs(float(exact) / rate - 1) < 1e-12
    return Poisson(exact.denominator, exact.numerator)
