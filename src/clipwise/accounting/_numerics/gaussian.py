"""The plain Gaussian mechanism in closed form: N(mu, 1) against N(0, 1), also called mu-GDP."""

from __future__ import annotations

import math

from scipy import optimize, special

__all__ = ["gaussian_delta", "gaussian_epsilon", "gaussian_mu"]


def gaussian_delta(mu: float, epsilon: float) -> float:
    """Phi(-eps/mu + mu/2) - e^eps Phi(-eps/mu - mu/2) (Balle, Wang 2018), without overflow.

    >>> round(gaussian_delta(1.0, 4.3771780957), 10)
    1e-05
    """
    if mu == 0.0:
        return 0.0
    first = float(special.log_ndtr(-epsilon / mu + 0.5 * mu))
    second = epsilon + float(special.log_ndtr(-epsilon / mu - 0.5 * mu))
    return math.exp(first) * -math.expm1(min(0.0, second - first))


def gaussian_epsilon(mu: float, delta: float) -> float:
    """The epsilon of mu-GDP at `delta`.

    >>> round(gaussian_epsilon(1.0, 1e-5), 8)
    4.3771781
    """
    if gaussian_delta(mu, 0.0) <= delta:
        return 0.0
    # delta(eps) <= Phi(-eps/mu + mu/2), and the normal tail at x is at most exp(-x^2/2); a little more for round-off.
    high = (0.5 * mu * mu + mu * math.sqrt(-2.0 * math.log(delta))) * (1.0 + 1e-9)
    if not math.isfinite(high):
        return math.inf

    def gap(epsilon: float) -> float:
        return math.log(max(gaussian_delta(mu, epsilon), 1e-320) / delta)

    return float(optimize.brentq(gap, 0.0, high, xtol=1e-15 * high, rtol=1e-14))


def gaussian_mu(epsilon: float, delta: float) -> float:
    """The mu whose Gaussian mechanism is exactly (epsilon, delta)-private.

    >>> round(gaussian_mu(4.3771780957, 1e-5), 8)
    1.0
    """

    def gap(log_mu: float) -> float:
        return math.log(max(gaussian_delta(math.exp(log_mu), epsilon), 1e-320) / delta)

    return math.exp(float(optimize.brentq(gap, -40.0, 20.0, xtol=1e-13)))
