"""Epsilon, delta and noise of one run, in one call each."""

from __future__ import annotations

from clipwise.accounting.accountant import account, account_delta
from clipwise.accounting.events import GaussianSteps
from clipwise.accounting.problem import Accountant, Relation
from clipwise.sampling import Sampling

__all__ = ["delta", "epsilon"]


def epsilon(
    noise_multiplier: float,
    sampling: Sampling,
    steps: int,
    delta: float,
    accountant: Accountant = "exact",
    relation: Relation = "add_remove",
) -> float:
    """The epsilon of `steps` steps at `delta` (the upper end where only an interval is known).

    >>> from clipwise.sampling import Poisson
    >>> 2.3 < epsilon(1.1, Poisson(60_000, 256), steps=14_040, delta=1e-5) < 2.6
    True
    """
    if steps == 0:
        return account((), delta, accountant, relation).epsilon
    return account((GaussianSteps(sampling, noise_multiplier, steps),), delta, accountant, relation).epsilon


def delta(
    noise_multiplier: float,
    sampling: Sampling,
    steps: int,
    epsilon: float,
    accountant: Accountant = "exact",
    relation: Relation = "add_remove",
) -> float:
    """The delta of `steps` steps at `epsilon`.

    >>> from clipwise.sampling import Poisson
    >>> delta(1.1, Poisson(60_000, 256), steps=14_040, epsilon=3.0) < 1e-5
    True
    """
    if steps == 0:
        return account_delta((), epsilon, accountant, relation).delta
    return account_delta((GaussianSteps(sampling, noise_multiplier, steps),), epsilon, accountant, relation).delta
