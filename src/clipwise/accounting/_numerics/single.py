"""One step alone, in closed form: the loss is monotone in the output, so a threshold decides."""

from __future__ import annotations

import math

import numpy as np
from scipy import optimize, special

from clipwise.accounting._numerics.lattice import log_density_ratio
from clipwise.accounting._numerics.laws import Law, Mixture, Pair

__all__ = ["single_delta", "single_epsilon"]


def single_delta(law: Law, epsilon: float) -> float:
    """P(L > eps) - e^eps Q(L > eps) for the loss L of one step, epsilon >= 0."""
    return sum(share * _pair_delta(pair, epsilon) for share, pair in law.parts)


def _pair_delta(pair: Pair, epsilon: float) -> float:
    side = 1.0 if _mean(pair.p) >= _mean(pair.q) else -1.0
    threshold = _threshold(pair, epsilon, side)
    if math.isinf(threshold):
        return 0.0
    log_p, log_q = _log_tail(pair.p, threshold, side), _log_tail(pair.q, threshold, side)
    return math.exp(log_p) * -math.expm1(min(0.0, epsilon + log_q - log_p))


def single_epsilon(law: Law, delta: float) -> float:
    """The epsilon of one step at `delta`."""

    def gap(epsilon: float) -> float:
        return single_delta(law, epsilon) - delta

    if gap(0.0) <= 0.0:
        return 0.0
    high = 1.0
    while gap(high) > 0.0:
        high *= 2.0
    return float(optimize.brentq(gap, 0.0, high, xtol=1e-14, rtol=1e-13))


def _mean(mixture: Mixture) -> float:
    return sum(weight * mean for weight, mean in mixture)


def _log_tail(mixture: Mixture, threshold: float, side: float) -> float:
    logs = [math.log(weight) + float(special.log_ndtr(side * (mean - threshold))) for weight, mean in mixture]
    top = max(logs)
    return top + math.log(sum(math.exp(value - top) for value in logs))


def _threshold(pair: Pair, epsilon: float, side: float) -> float:
    """The output where the loss is epsilon; infinite when no output reaches it."""

    def gap(x: float) -> float:
        point = np.array([x])
        return float((log_density_ratio(pair.p, point) - log_density_ratio(pair.q, point))[0]) - epsilon

    far = side * 60.0 + max((mean for m in (pair.p, pair.q) for _, mean in m), key=lambda mean: side * mean)
    if gap(far) <= 0.0:
        return math.inf
    near, step = far, 60.0
    while gap(near) > 0.0:
        near, step = near - side * step, 2.0 * step
    return float(optimize.brentq(gap, near, far, xtol=1e-14, rtol=1e-14))
