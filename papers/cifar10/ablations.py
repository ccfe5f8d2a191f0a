"""Sections of the page on what changes when all else is equal: the noise, and R with the learning rate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from clipwise import plots
from clipwise.report import ArmResults
from papers.cifar10.grid import best, points, whole
from papers.cifar10.study import NOISE_R, NOISE_RATES, SIGMAS, noise_arm
from papers.tables import HEADLINES, figure, results_table, same_draws

METRICS = HEADLINES["classification"]
HIGHEST = 3.0
"""A loss above that of guessing, ln 10, tells nothing more; figures are cut there."""


def curves_of(
    arms: Sequence[ArmResults], section: str = "test", names: Sequence[str] = ("nll", "accuracy", "ece")
) -> Any:
    """`{arm: {metric: curve}}`, as they are drawn."""
    return {each.name: {m: curve for m in names if (curve := each.curve(section, m))} for each in arms}


def noise(by_name: Mapping[str, ArmResults], folder: Path) -> str:
    """Several levels of noise, all else equal."""
    parts, arms = [], []
    for rate in NOISE_RATES:
        found = [by_name[name] for sigma in (None, *SIGMAS) if (name := noise_arm(sigma, rate)) in by_name]
        if not found:
            continue
        arms += found
        curves = {each.name: curves_of([each], "private", ["loss"])[each.name] for each in found}
        curves = {name: {**curve, **curves_of([by_name[name]])[name]} for name, curve in curves.items()}
        drawn = plots.training_curves(curves, ["loss", "nll", "accuracy"])
        for axes in drawn.axes[:2]:
            axes.set_ylim(0, min(axes.get_ylim()[1], HIGHEST))
        caption = f"Training loss, test loss and accuracy for several levels of noise, learning rate {rate:g}"
        parts += [results_table(found, METRICS), figure(folder, f"noise_{rate:g}", drawn, caption)]
    if not parts:
        return ""
    same = "batches and the draws of the noise are the same in all arms, except for its size"
    drawn_by = same if same_draws(arms) else "the initial weights are the same in all arms, batches and noise are not"
    said = f"""## 2. Does the noise matter?

R = {NOISE_R:g}, one epoch, one seed: {drawn_by}.
The learning rate {NOISE_RATES[0]:g} is the paper's; with {NOISE_RATES[1]:g} the head learns something in one epoch,
but without clipping it diverges. Losses above {HIGHEST:g} are not drawn.
"""
    return "\n".join([said, *parts])


def grid(rows: Sequence[Any], folder: Path) -> str:
    """Heat maps, flat beside layerwise."""
    if not whole(rows):
        return ""
    parts = ["## 3. Clipping norm and learning rate, flat and layerwise\n"]
    seeds, steps = len({row["seed"] for row in rows}), rows[0]["steps"]
    parts.append(
        f"Means over {seeds} seeds, {steps} steps, noise multiplier 1.3. R is the sensitivity of the whole gradient; "
        "layerwise clipping gives each of the head's two layers R / sqrt(2), with noise for the joint sensitivity, so "
        "that both styles have the same privacy and the same noise. MCE is over 15 bins; `grid.json` has 10 and 20.\n"
    )
    for style in ("flat", "layerwise"):
        drawn = plots.heat_map(points(rows, style, steps), ["accuracy", "ece", "mce"])
        parts.append(
            figure(folder, f"grid_{style}", drawn, f"Accuracy, ECE and MCE in %, {style} clipping; yellow is better")
        )
    return "\n".join([*parts, _best(rows, steps)])


def _best(rows: Sequence[Any], steps: int) -> str:
    """The best learning rate of each R."""
    lines = ["| clipping | R | best rate | seeds | accuracy | ECE | MCE |\n| --- | --- | --- | --- | --- | --- | --- |"]
    rates = sorted({row["rate"] for row in rows})
    for style in ("flat", "layerwise"):
        for R, point in best(rows, style, steps).items():
            values = " | ".join(f"{100 * point.metrics[m].mean:.2f} %" for m in ("accuracy", "ece", "mce"))
            seeds = point.metrics["accuracy"].seeds
            edge = " (edge of the grid)" if point.learning_rate in (rates[0], rates[-1]) else ""
            lines.append(f"| {style} | {R:g} | {point.learning_rate:g}{edge} | {seeds} | {values} |")
    return "The best learning rate of each R, by accuracy:\n\n" + "\n".join(lines) + "\n"
