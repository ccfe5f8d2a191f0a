"""What the two regression experiments share: the figure of the paper's section 5.5, and how monotone the curves are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from clipwise import plots
from clipwise.report import Arm
from papers.tables import figure, page


def rises(arm: Arm) -> float:
    """How far the mean test loss climbs above its lowest value so far, relative to that value: 0 when it never does."""
    curve = arm.curve("test", "mse")
    assert curve is not None
    lowest, worst = float("inf"), 0.0
    for value in curve.mean:
        if value is not None:
            lowest = min(lowest, value)
            worst = max(worst, value / lowest - 1)
    return worst


def write(title: str, arms: Sequence[Arm], folder: Path) -> str:
    """The curves with one standard deviation to both sides, and the table."""
    curves = {arm.name: {"mse": curve} for arm in arms if (curve := arm.curve("test", "mse"))}
    picture = plots.training_curves(curves)
    picture.axes[0].set_yscale("log")  # the first steps are far above all that follows
    drawn = figure(folder, "training", picture, "Test error over training, mean and deviation")
    said = ["How far the mean test error climbs above its lowest value so far:\n"]
    said += [f"- {arm.name}: {100 * rises(arm):.1f} %" for arm in arms]
    return page(folder, title, arms, (), [drawn], ["\n".join(said) + "\n"])
