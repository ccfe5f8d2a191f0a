"""Gaussian DP: exact for full batches, and the central limit theorem's approximation for all else.

The CLT's mu for a composition of nearly equal pairs is mu^2 = sum of E_N[(p/n - q/n)^2] over the steps, with n the
standard normal density; for Poisson sampling at rate q it is q sqrt(T (exp(1/sigma^2) - 1)) (Bu et al. 2020). It errs
both ways.
"""

from __future__ import annotations

import math

import numpy as np

from clipwise.accounting._numerics.gaussian import gaussian_delta, gaussian_epsilon
from clipwise.accounting._numerics.laws import Allocation, Composition, Pair
from clipwise.accounting.accountants.definition import approximation

__all__ = ["GDP", "clt_mu", "gdp_delta", "gdp_epsilon"]


def clt_mu(composition: Composition) -> float:
    """The mu of the central limit theorem; exact when every step is a plain Gaussian one."""
    total = composition.gaussian
    for law, count in composition.terms:
        if isinstance(law, Allocation):  # the variance of a mean, see `_numerics/allocation.py`
            total += count * law.used * math.expm1(min(law.mu**2, 700.0)) / law.bins**2
        else:
            total += count * sum(share * _chi_square(pair) for share, pair in law.parts)
    return math.sqrt(total)


def gdp_epsilon(composition: Composition, delta: float) -> float:
    """The epsilon of mu-GDP at the CLT's mu."""
    return gaussian_epsilon(clt_mu(composition), delta)


def gdp_delta(composition: Composition, epsilon: float) -> float:
    """The delta of mu-GDP at the CLT's mu."""
    mu = clt_mu(composition)
    return gaussian_delta(mu, epsilon) if math.isfinite(mu) else 1.0


def _chi_square(pair: Pair) -> float:
    # E_N[exp(a x - a^2/2) exp(b x - b^2/2)] = exp(a b), and the components' weights add up to zero over both sides.
    weights = np.array([w for w, _ in pair.p] + [-w for w, _ in pair.q])
    means = np.array([m for _, m in pair.p] + [m for _, m in pair.q])
    with np.errstate(over="ignore"):
        return float(weights @ np.expm1(np.outer(means, means)) @ weights)


GDP = approximation("gdp", gdp_epsilon, gdp_delta)
