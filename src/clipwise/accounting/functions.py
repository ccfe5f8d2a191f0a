"""Epsilon and delta of one run, in one call each."""

from __future__ import annotations

from clipwise.accounting._problem import Accountant, Relation
from clipwise.accounting.account import account, account_delta
from clipwise.accounting.events import Event, GaussianSteps
from clipwise.sampling import Sampling

__all__ = ["delta", "epsilon"]


def epsilon(
    noise_multiplier: float,
    sampling: Sampling,
    steps: int,
    delta: float,
    accountant: Accountant = "exact",
    relation: Relation | None = None,
) -> float:
    """The epsilon of `steps` steps at `delta` (the upper end where only an interval is known).

    >>> from clipwise.sampling import Poisson
    >>> 2.3 < epsilon(1.1, Poisson(60_000, 256), steps=14_040, delta=1e-5) < 2.6
    True
    """
    return account(_events(sampling, noise_multiplier, steps), delta, accountant, relation).epsilon


def delta(
    noise_multiplier: float,
    sampling: Sampling,
    steps: int,
    epsilon: float,
    accountant: Accountant = "exact",
    relation: Relation | None = None,
) -> float:
    """The delta of `steps` steps at `epsilon`.

    >>> from clipwise.sampling import Poisson
    >>> delta(1.1, Poisson(60_000, 256), steps=14_040, epsilon=3.0) < 1e-5
    True
    """
    return account_delta(_events(sampling, noise_multiplier, steps), epsilon, accountant, relation).delta


def _events(sampling: Sampling, noise_multiplier: float, steps: int) -> tuple[Event, ...]:
    # No step yet is a state of every run, though no event.
    return () if steps == 0 else (GaussianSteps(sampling, noise_multiplier, steps),)
