"""Numbers as the page and the card print them."""

from __future__ import annotations

import math
from collections.abc import Mapping

from clipwise._show import number
from clipwise.accounting import Guarantee
from clipwise.calibration import Estimate, metric_named

__all__ = ["best_of", "deviation_text", "epsilon_text", "interval_text", "points", "value_text"]


def points(share: float, digits: int = 1) -> str:
    """A difference of shares in percentage points, with its sign.

    >>> points(-0.0241)
    '−2.4'
    """
    text = f"{100 * share:+.{digits}f}"
    return text.replace("-", "−") if float(text) else text[1:]


def value_text(metric: str, estimate: Estimate) -> str:
    """The mean as it is printed, in per cent where the metric is a share."""
    return metric_named(metric).text(estimate.mean)


def deviation_text(metric: str, estimate: Estimate) -> str:
    """The deviation over the seeds to the precision of the mean, or nothing.

    >>> deviation_text("brier", Estimate(0.063, 0.00077)), deviation_text("ece", Estimate(0.0296, 0.0016))
    ('0.001', '0.16')
    """
    spread = estimate.deviation
    if spread is None:
        return ""
    if metric_named(metric).share:
        return f"{100 * spread:.2f}"
    return f"{spread:.4f}" if spread < 0.0005 else number(spread) if spread >= 0.001 else "0.001"


def interval_text(metric: str, estimate: Estimate) -> str:
    """The interval as it is printed, or nothing.

    >>> interval_text("ece", Estimate(0.034, 0.001, 0.033, 0.035, 5))
    '3.30 – 3.50'
    """
    if estimate.low is None or estimate.high is None:
        return ""
    return metric_named(metric).span(estimate.low, estimate.high)


def best_of(guarantees: Mapping[str, Guarantee]) -> Guarantee | None:
    """The one to put forward: the exact one, else the smallest bound; never an approximation, nor an infinite one."""
    bounds = {name: g for name, g in guarantees.items() if g.is_bound and math.isfinite(g.epsilon)}
    return bounds.get("exact") or min(bounds.values(), key=lambda g: g.epsilon, default=None)


def epsilon_text(guarantees: Mapping[str, Guarantee]) -> str:
    """The epsilon to put forward.

    >>> epsilon_text({"gdp": Guarantee(1.4, 1e-5, "approximation", "gdp", "zero_out", "Poisson")})
    'unknown'
    """
    best = best_of(guarantees)
    return "unknown" if best is None else best.printed
