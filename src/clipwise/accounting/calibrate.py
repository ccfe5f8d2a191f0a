"""Calibration: the noise for a target epsilon."""

from __future__ import annotations

import math
from collections.abc import Callable

from scipy import optimize

from clipwise.accounting.accountant import account
from clipwise.accounting.events import GaussianSteps
from clipwise.accounting.problem import Accountant, Relation, check_delta
from clipwise.errors import AccountingError
from clipwise.sampling import Sampling

__all__ = ["noise_multiplier"]

_LIMITS = (1e-2, 1e6)
_TIGHT = 2e-4


def noise_multiplier(
    epsilon: float,
    delta: float,
    sampling: Sampling,
    steps: int,
    accountant: Accountant = "exact",
    relation: Relation = "add_remove",
) -> float:
    """The smallest noise multiplier whose accounted epsilon is at most the target, and within 0.1 % of it."""
    _check_target(epsilon)
    check_delta(delta)

    def spent(sigma: float) -> float:
        return account((GaussianSteps(sampling, sigma, steps),), delta, accountant, relation).epsilon

    return _smallest(spent, epsilon)


def _check_target(epsilon: object) -> None:
    if not isinstance(epsilon, (int, float)) or isinstance(epsilon, bool) or not 0 < epsilon < math.inf:
        raise AccountingError(f"The target epsilon must be a finite number > 0, got {epsilon!r}.")


def _smallest(spent: Callable[[float], float], target: float) -> float:
    """The smallest argument with spent(argument) <= target, from the safe side; `spent` falls."""
    goal = target * (1.0 - _TIGHT)

    def gap(log_sigma: float) -> float:
        return math.log(max(spent(math.exp(log_sigma)), 1e-300) / goal)

    low = high = 0.0
    while gap(low) <= 0.0:
        low -= 0.7
        if low < math.log(_LIMITS[0]):
            return _LIMITS[0]
    while gap(high) > 0.0:
        high += 0.7
        if high > math.log(_LIMITS[1]):
            raise AccountingError(f"No noise multiplier up to {_LIMITS[1]:g} reaches epsilon {target:g}.")
    root = float(optimize.brentq(gap, low, high, xtol=1e-7, rtol=1e-7))
    while spent(math.exp(root)) > target:
        root += 1e-6
    return math.exp(root)
