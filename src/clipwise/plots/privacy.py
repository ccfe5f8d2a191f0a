"""What a run costs: delta against epsilon, and the best attack on it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from scipy import special

from clipwise.plots.style import NEUTRAL, figure, look, styled

if TYPE_CHECKING:
    from clipwise.accounting import PrivacyCurve

__all__ = ["privacy_curves"]


@styled
def privacy_curves(curve: PrivacyCurve, delta: float | None = None) -> Any:
    """Two panels: delta(epsilon) with `delta` marked, and the best membership attack at each false positive rate.

    Both show the exact curve and the tight mu-GDP one that bounds it, the left also the central limit theorem's
    approximation. Returns a matplotlib figure, which has `savefig`.
    """
    drawn = figure(9.0, 3.8)
    left, right = drawn.subplots(1, 2)
    exact, normal = look(0).colour, look(1).colour
    inside = curve.delta > 0.0
    left.semilogy(curve.epsilon[inside], curve.delta[inside], color=exact, label="exact")
    for mu, style, label in ((curve.mu, "--", "tight"), (curve.clt_mu, ":", "CLT, no bound")):
        left.semilogy(
            curve.epsilon, _gaussian_deltas(mu, curve.epsilon), style, color=normal, label=f"GDP {mu:.3f} ({label})"
        )
    left.set_ylim(curve.min_delta / 3.0, 1.0)
    if delta is not None:
        left.axhline(delta, color=NEUTRAL, linewidth=0.8)
    left.set_xlabel("epsilon")
    left.set_ylabel("delta")
    left.set_title("Privacy profile")
    left.legend()

    rates = np.geomspace(1e-6, 1.0, 200)
    right.loglog(rates, np.clip(1.0 - curve.trade_off(rates), 1e-12, 1.0), color=exact, label="exact")
    bound = special.ndtr(special.ndtri(rates) + curve.mu)
    right.loglog(rates, bound, "--", color=normal, label=f"GDP {curve.mu:.3f} (tight)")
    right.loglog(rates, rates, color=NEUTRAL, linewidth=0.8, label="guessing")
    right.set_xlabel("false positive rate")
    right.set_ylabel("largest true positive rate")
    right.set_title("Best membership attack")
    right.legend()
    drawn.suptitle(f"{curve.sampling}, relation {curve.relation}", fontsize="small")
    return drawn


def _gaussian_deltas(mu: float, epsilon: Any) -> Any:
    first = special.log_ndtr(-epsilon / mu + 0.5 * mu)
    second = epsilon + special.log_ndtr(-epsilon / mu - 0.5 * mu)
    return np.maximum(np.exp(first) - np.exp(second), 1e-300)
