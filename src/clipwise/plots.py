"""Figures. Each is drawn from values that are also saved; nothing is computed here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from scipy import special

from clipwise.errors import MissingExtra

if TYPE_CHECKING:
    from clipwise.accounting import PrivacyCurve

__all__ = ["privacy_curves"]


def _figure(width: float, height: float) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtra("Figures need matplotlib: pip install 'clipwise[plots]'.") from error
    return Figure(figsize=(width, height), layout="constrained")


def privacy_curves(curve: PrivacyCurve, delta: float | None = None) -> Any:
    """Two panels: delta(epsilon) with `delta` marked, and the best membership attack at each false positive rate.

    Both show the exact curve and the tight mu-GDP one that bounds it, the left also the central limit theorem's
    approximation. Returns a matplotlib figure, which has `savefig`.
    """
    figure = _figure(9.0, 3.8)
    left, right = figure.subplots(1, 2)
    inside = curve.delta > 0.0
    left.semilogy(curve.epsilon[inside], curve.delta[inside], color="C0", label="exact")
    for mu, style, label in ((curve.mu, "--", "tight"), (curve.clt_mu, ":", "CLT, no bound")):
        left.semilogy(
            curve.epsilon, _gaussian_deltas(mu, curve.epsilon), style, color="C1", label=f"GDP {mu:.3f} ({label})"
        )
    left.set_ylim(curve.min_delta / 3.0, 1.0)
    if delta is not None:
        left.axhline(delta, color="0.6", linewidth=0.8)
    left.set_xlabel("epsilon")
    left.set_ylabel("delta")
    left.set_title("Privacy profile")
    left.legend()

    rates = np.geomspace(1e-6, 1.0, 200)
    right.loglog(rates, np.clip(1.0 - curve.trade_off(rates), 1e-12, 1.0), color="C0", label="exact")
    normal = special.ndtr(special.ndtri(rates) + curve.mu)
    right.loglog(rates, normal, "--", color="C1", label=f"GDP {curve.mu:.3f} (tight)")
    right.loglog(rates, rates, color="0.6", linewidth=0.8, label="guessing")
    right.set_xlabel("false positive rate")
    right.set_ylabel("largest true positive rate")
    right.set_title("Best membership attack")
    right.legend()
    figure.suptitle(f"{curve.sampling}, relation {curve.relation}", fontsize="small")
    return figure


def _gaussian_deltas(mu: float, epsilon: Any) -> Any:
    first = special.log_ndtr(-epsilon / mu + 0.5 * mu)
    second = epsilon + special.log_ndtr(-epsilon / mu - 0.5 * mu)
    return np.maximum(np.exp(first) - np.exp(second), 1e-300)
