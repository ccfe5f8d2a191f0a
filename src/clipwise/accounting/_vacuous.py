"""Settings whose epsilon is too large to protect anyone are refused, with the number."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy import special

from clipwise.accounting._problem import LEAST_NOISE
from clipwise.accounting.accounts import account
from clipwise.accounting.events import Event, GaussianSteps
from clipwise.errors import InvalidPlan
from clipwise.sampling import BallsInBins, public_size

__all__ = ["MOST_EPSILON", "least_epsilon", "refuse_vacuous"]

MOST_EPSILON = 50.0
"""An epsilon over this, at delta = 1/n, promises next to nothing."""


def refuse_vacuous(events: Sequence[Event], what: str, advice: str) -> None:
    """Raise `InvalidPlan` when the epsilon of these events at delta = 1/n is over `MOST_EPSILON`."""
    sizes = [public_size(event.sampling) for event in events if event.sampling is not None]
    delta = min(0.5, 1.0 / min(sizes))
    # The bound from below comes first: it costs nothing where the noise is so small that accountants labour.
    # Less noise than counts as any has no such bound, and the accountant's answer at once.
    steps = [e for e in events if isinstance(e, GaussianSteps) and e.noise_multiplier >= LEAST_NOISE]
    least = max((least_epsilon(event, delta) for event in steps), default=0.0)
    spent, word = (least, "at least ") if least > MOST_EPSILON else (account(events, delta).epsilon, "")
    if spent > MOST_EPSILON:
        number = f"{word}{spent:.4g}" if math.isfinite(spent) else "infinite"
        raise InvalidPlan(
            f"{what}: epsilon is {number} at delta {delta:.2g}, and over {MOST_EPSILON:g} it promises nothing. {advice}"
        )


def least_epsilon(event: GaussianSteps, delta: float) -> float:
    """A proven lower end of epsilon: what a simple test on the largest of all steps' outputs shows.

    With some record, every step's output along its gradient reaches 1/sigma when the record is in the batch; without
    it all T of them are plain noise. For a threshold c, P(max > c) is at least P(in some batch) Phi(1/sigma - c)
    with the record and at most T Phi(-c) without, and delta >= P - e^epsilon Q.

    >>> from clipwise.sampling import FullBatch
    >>> round(least_epsilon(GaussianSteps(FullBatch(100), noise_multiplier=0.01), delta=0.01))
    5232
    """
    mu, steps = 1.0 / event.noise_multiplier, event.steps
    thresholds = np.linspace(0.0, mu + 8.0, 400)
    bins = event.sampling.batches_per_epoch if isinstance(event.sampling, BallsInBins) else None
    rate = 1.0 / bins if bins else event.sampling.batch_size / public_size(event.sampling)
    inside = 1.0 if rate == 1.0 else -math.expm1(steps * math.log1p(-rate))
    seen = inside * special.ndtr(mu - thresholds) - delta
    with np.errstate(divide="ignore", invalid="ignore"):
        bounds = np.log(seen) - (math.log(steps) + special.log_ndtr(-thresholds))
    return max(0.0, float(np.nanmax(bounds)))
