"""What the theory says, in pictures: the cost of a run, spectra of kernels, losses along flows, the monitor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy import special

from clipwise.errors import DataError
from clipwise.plots.style import GAP, MUTED, NEUTRAL, arm_legend, figure, look, mark_arm, percent_axis, styled, wrapped

if TYPE_CHECKING:
    from clipwise.accounting import PrivacyCurve
if TYPE_CHECKING:
    from clipwise.ntk import GradientFlow, NTKMonitor, NTKRecord

__all__ = ["correlated_noise", "loss_flows", "ntk_monitor", "privacy_curves", "spectra"]


@styled
def privacy_curves(curve: PrivacyCurve, delta: float | None = None, *, titled: bool = True) -> Any:
    """Two panels: delta(epsilon) with `delta` marked, and the best membership attack at each false positive rate.

    Both show the exact curve and the tight mu-GDP one that bounds it, the left also the central limit theorem's
    approximation. With `titled`, what they are about stands above. Returns a matplotlib figure, which has `savefig`.
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
    if titled:
        drawn.suptitle(wrapped(curve.about, 100), fontsize="small")
    return drawn


@styled
def correlated_noise(left: Mapping[str, Sequence[float]], column: Sequence[float] = ()) -> Any:
    """What the noise of the steps adds up to, `{label: deviation after each step}`, the run's own first.

    With `column`, the coefficients of C, a second panel shows them beside those of its inverse: how much of the noise
    of the steps before is in a step. Returns the matplotlib figure.
    """
    if not left:
        raise DataError("there is nothing to draw: give the noise that is left after each step.")
    drawn = figure(9.0, 3.4)
    panels = list(drawn.subplots(1, 2 if len(column) else 1, squeeze=False).flat)
    for place, (label, values) in enumerate(left.items()):
        every = max(1, len(values) // 6)
        panels[0].plot(range(1, len(values) + 1), values, markevery=every, label=label, **look(place).line)
    panels[0].set(title="Noise in the sum of all steps so far", xlabel="step", ylabel="deviation, in units of R")
    panels[0].set_ylim(bottom=0.0)
    panels[0].legend()
    if len(column):
        inverse = np.zeros(len(column))
        inverse[0] = 1.0 / column[0]
        for lag in range(1, len(column)):
            inverse[lag] = -float(np.dot(column[1 : lag + 1], inverse[lag - 1 :: -1][:lag])) / column[0]
        for place, label, shown in ((3, "C: what is charged", column), (4, "inverse: what is added", inverse)):
            panels[1].plot(range(len(column)), shown, label=label, **look(place).line)
        panels[1].axhline(0.0, color=GAP, linewidth=0.8)
        panels[1].set(title="Coefficients", xlabel="steps apart")
        panels[1].xaxis.get_major_locator().set_params(integer=True)
        panels[1].legend()
    return drawn


def _gaussian_deltas(mu: float, epsilon: Any) -> Any:
    first = special.log_ndtr(-epsilon / mu + 0.5 * mu)
    second = epsilon + special.log_ndtr(-epsilon / mu - 0.5 * mu)
    return np.maximum(np.exp(first) - np.exp(second), 1e-300)


def _both_directions(axes: Any, linear: float, ticks: int) -> None:
    """A scale that is logarithmic above and below zero, linear up to `linear`, with zero marked."""
    # A power of ten, so that no tick falls into the linear piece and onto the zero.
    axes.set_yscale("symlog", linthresh=10.0 ** np.floor(np.log10(max(linear, 1e-300))))
    axes.yaxis.get_major_locator().set_params(numticks=ticks)
    axes.axhline(0.0, color=GAP, linewidth=0.8)


def _shade(axes: Any, below: bool) -> None:
    """Mark the side of zero that theory would rather not see."""
    low, high = axes.get_ylim()
    axes.axhspan(
        min(low, 0.0) if below else 0.0, 0.0 if below else max(high, 0.0), color="#D55E00", alpha=0.08, linewidth=0
    )
    axes.set_ylim(low, high)


@styled
def spectra(eigenvalues: Mapping[str, Sequence[float]], title: str = "Eigenvalues") -> Any:
    """Eigenvalues from the largest to the smallest, one line per matrix; what is below zero is shaded.

    The scale is logarithmic in both directions, with a linear piece around zero. Returns the matplotlib figure.
    """
    if not eigenvalues or not all(len(values) for values in eigenvalues.values()):
        raise DataError("there is no spectrum to draw.")
    drawn = figure(6.2, 3.6)
    axes = drawn.subplots()
    ordered = [np.sort(np.asarray(values, dtype=float))[::-1] for values in eigenvalues.values()]
    largest = max(float(np.abs(values).max()) for values in ordered)
    for place, values in enumerate(ordered):
        (line,) = axes.plot(
            np.arange(1, len(values) + 1), values, markevery=max(1, len(values) // 12), **look(place).line
        )
        mark_arm(line, place)
    _both_directions(axes, largest * 1e-5, ticks=9)
    if min(float(values[-1]) for values in ordered) < 0:
        _shade(axes, below=True)
    axes.set_xlabel("rank")
    axes.set_ylabel("eigenvalue")
    axes.set_title(title)
    arm_legend(drawn, list(eigenvalues))
    return drawn


@styled
def loss_flows(flows: Mapping[str, GradientFlow], title: str = "Loss along the flow", *, linear: bool = False) -> Any:
    """The loss over time, and its rate dL/dt below; the loss rises where the rate is above zero.

    `linear` has the loss on a linear scale. Returns the matplotlib figure.
    """
    if not flows:
        raise DataError("there is no flow to draw.")
    drawn = figure(6.2, 4.8)
    top, bottom = drawn.subplots(2, 1, sharex=True, height_ratios=[3, 2])
    for place, flow in enumerate(flows.values()):
        t, loss, rate = (values.numpy() for values in (flow.t, flow.loss, flow.loss_rate))
        style = look(place)
        (line,) = top.plot(t, loss, markevery=max(1, len(t) // 8), **style.line)
        mark_arm(line, place)
        (line,) = bottom.plot(t, rate, markevery=max(1, len(t) // 8), **style.line)
        mark_arm(line, place)
    if not linear:
        top.set_yscale("log")
    rates = np.concatenate([np.abs(flow.loss_rate.numpy()) for flow in flows.values()])
    _both_directions(bottom, float(rates.max()) * 1e-2, ticks=5)
    if any(float(flow.loss_rate.max()) > 0 for flow in flows.values()):
        _shade(bottom, below=False)
    top.set_title(title)
    top.set_ylabel("loss L")
    bottom.set_ylabel("dL/dt")
    bottom.set_xlabel("time t")
    arm_legend(drawn, list(flows))
    return drawn


@styled
def ntk_monitor(monitors: Mapping[str, NTKMonitor]) -> Any:
    """What monitors recorded, one line per run: loss, its rate, alignment, fraction clipped, least quadratic form.

    The figure says below whether epsilon covers what it shows. Returns the matplotlib figure.
    """
    if not monitors:
        raise DataError("there is no monitor to draw.")
    drawn = figure(9.6, 5.2)
    panels: dict[str, Callable[[NTKRecord], float]] = {
        "Loss on the probe set": lambda r: r.loss,
        "Rate dL/dt": lambda r: r.loss_rate,
        "Rate relative to no clipping": lambda r: r.loss_rate / r.unclipped_rate if r.unclipped_rate else np.nan,
        "Alignment with the gradient": lambda r: r.alignment,
        "Fraction clipped": lambda r: r.fraction_clipped,
        "Least quadratic form": lambda r: r.min_quadratic,
    }
    grid = list(drawn.subplots(2, 3).flat)
    for axes, (name, read) in zip(grid, panels.items(), strict=True):
        for place, monitor in enumerate(monitors.values()):
            values = [read(record) for record in monitor.records]
            steps = [record.step for record in monitor.records]
            (line,) = axes.plot(steps, values, markevery=max(1, len(steps) // 6), **look(place).line)
            mark_arm(line, place)
        axes.set_title(name)
        axes.set_xlabel("step")
    for axes in (grid[1], grid[5]):
        largest = max(float(np.abs(line.get_ydata()).max()) for line in axes.lines)
        _both_directions(axes, largest * 1e-3, ticks=5)
    percent_axis(grid[4].yaxis)
    notes = list(dict.fromkeys(monitor.note for monitor in monitors.values()))
    drawn.suptitle("; ".join(notes), fontsize="small", color=MUTED, x=0.01, ha="left")
    arm_legend(drawn, list(monitors))
    return drawn
