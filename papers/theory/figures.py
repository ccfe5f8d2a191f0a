"""The figures of the theory page, each drawn from values that are saved beside it."""

from __future__ import annotations

from typing import Any

import torch

import clipwise as cw
from clipwise.plots.style import INK, MUTED, arm_legend, figure, look, styled
from papers.theory.networks import Architecture, Case, Clipping, random_case

NAMES = {"gd": "gradient descent", "heavy_ball": "heavy ball", "nesterov": "Nesterov", "adam": "Adam",
         "adagrad": "AdaGrad", "rmsprop": "RMSprop"}  # fmt: skip


def spectra(samples: int) -> dict[str, list[float]]:
    """Eigenvalues of H, and of the symmetric parts of H C and of the sum of H_r C_r, for one network."""
    case = random_case(1, Architecture("mlp", (4, 32, 1)), samples, Clipping("abadi", (0.5,)), 1.0)
    found = {"H": cw.ntk.kernel(case.model(), case.data[0])}
    for label, layerwise in (("H C, flat, symmetric part", False), ("sum of H_r C_r, layerwise, symmetric part", True)):
        clipping = Clipping("abadi", (0.5,), layerwise)
        found[label] = cw.ntk.analyse(*case.arguments(clipping=clipping)).matrix
    return {label: torch.linalg.eigvalsh((M + M.T) / 2).flip(0).tolist() for label, M in found.items()}


def compared(case: Case, points: int = 401, **options: Any) -> dict[str, cw.ntk.GradientFlow]:
    """The flows of one start under three clippings; under two where there is one layer, for which they are the same."""
    numbers = case.clipping.numbers
    clippings = {"no clipping": Clipping("none"), "flat": Clipping(case.clipping.rule, numbers)}
    if len(case.architecture.shape) > 1:
        clippings["layerwise"] = Clipping(case.clipping.rule, numbers, layerwise=True)
    return {name: case.flow(clipping=clipping, points=points, **options) for name, clipping in clippings.items()}


@styled
def order_figure(rows: list[dict[str, Any]]) -> Any:
    """Distance to the flow against the step, with what the sum of the noise alone amounts to."""
    drawn = figure(6.2, 4.0)
    axes = drawn.subplots()
    for place, row in enumerate(rows):
        axes.loglog(row["eta"], row["error"], **look(place).line)
        if row["noise_multiplier"]:
            axes.loglog(row["eta"], row["noise_sum"], color=INK, linewidth=1.0, linestyle=(0, (1, 2)), zorder=3)
    axes.set_xlabel("step η")
    axes.set_ylabel("|w - w of the flow| at t = 1")
    axes.set_title("DP-GD converges to the flow, whatever the noise")
    arm_legend(drawn, [f"σ = {row['noise_multiplier']:g}: order {row['order']:.2f}" for row in rows])
    return drawn


@styled
def noise_figure(found: dict[str, Any]) -> Any:
    """The loss of DP-GD over time, a panel per step size, beside the flow."""
    etas = list(dict.fromkeys(run["eta"] for run in found["runs"]))
    noises = list(dict.fromkeys(run["noise_multiplier"] for run in found["runs"]))
    drawn = figure(3.1 * len(etas) + 0.3, 3.3)
    panels = drawn.subplots(1, len(etas), sharey=True, squeeze=False)[0]
    for axes, eta in zip(panels, etas, strict=True):
        for run in (run for run in found["runs"] if run["eta"] == eta):
            style = look(noises.index(run["noise_multiplier"]))
            axes.plot(run["t"], run["loss"], color=style.colour, linestyle=style.line["linestyle"], linewidth=1.2)
        axes.plot(found["flow"]["t"], found["flow"]["loss"], color=INK, linewidth=1.0, linestyle=(0, (1, 2)))
        axes.set_title(f"η = 1/{round(1 / eta)}")
        axes.set_xlabel("time t = kη")
    panels[0].set_ylabel("loss")
    panels[-1].text(0.97, 0.95, "dotted: the flow", transform=panels[-1].transAxes, ha="right", va="top", color=MUTED)
    arm_legend(drawn, [f"σ = {noise:g}" for noise in noises])
    return drawn


@styled
def optimizer_figure(found: dict[str, dict[str, cw.ntk.GradientFlow]]) -> Any:
    """Six optimizers: a network under flat clipping, and the instance at which layerwise clipping stops."""
    drawn = figure(8.6, 3.6)
    panels = drawn.subplots(1, 2)
    titles = {"flat": "Flat clipping: to zero", "layerwise": "Layerwise clipping: it may stop"}
    for axes, (style, flows) in zip(panels, found.items(), strict=True):
        for place, flow in enumerate(flows.values()):
            axes.plot(flow.t, flow.loss, markevery=max(1, len(flow.t) // 8), **look(place).line)
        axes.set_yscale("log")
        axes.set_ylim(bottom=max(axes.get_ylim()[0], 1e-12))  # below is what the solver's tolerance leaves
        axes.set_xlabel("time t")
        axes.set_title(titles[style])
    panels[0].set_ylabel("loss")
    arm_legend(drawn, [NAMES[name] for name in found["flat"]])
    return drawn
