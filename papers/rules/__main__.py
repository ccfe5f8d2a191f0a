"""Other clipping functions on MNIST, at equal privacy: `clipwise reproduce rules`.

The network, noise and learning rate c / R are those of `papers/mnist`, nothing was searched for. R is the sensitivity
of the whole step: the four layers of the layerwise arms have R / 2 each. The claim of the paper's appendix: at a large
clipping norm, global and usual clipping differ little.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from clipwise import plots
from clipwise.report import Arm, arms_of
from papers.mnist.__main__ import STUDY as MNIST
from papers.study import Study, Variant, main, runs_of
from papers.tables import figure, page

STUDY = Study(
    folder=Path(__file__).parent,
    variants=(
        Variant("Automatic", ('clip={rule="Automatic",R=1.0}',)),
        Variant("Normalize", ('clip={rule="Normalize",R=1.0}',)),
        Variant("Global, R = 200", ('clip={rule="Global",R=200.0}',)),
        Variant("GlobalScaled, R = 200, Z = 50", ('clip={rule="GlobalScaled",R=200.0,Z=50.0}',)),
        Variant("Layerwise Abadi, R = 1", ('clip={style="Layerwise",rule="Abadi",R=0.5}',)),
        Variant("Layerwise Abadi, R = 200", ('clip={style="Layerwise",rule="Abadi",R=100.0}',)),
    ),
    seeds=3,
    quick=MNIST.quick,
    config=MNIST.folder / "config.toml",
)
REMARKS = (
    "Automatic and Normalize divide by the norm, so that their R is a unit of the learning rate and nothing else. "
    "GlobalScaled(R, Z) with the learning rate c / R makes the steps of Global(Z) with c / Z: longer gradients "
    "than Z are dropped. The arms R = 1 and R = 200 are the runs of `papers/mnist`: Abadi's rule, flat.\n",
)


def write(arms: Sequence[Arm], folder: Path) -> str:
    """The table of all rules, beside the usual clipping where its runs are there."""
    runs = runs_of(MNIST, folder.parent / MNIST.name / "runs")
    usual = [run for run in runs if run.name in ("R = 1", "R = 200")]
    every = [*(arms_of(usual) if usual else ()), *arms]
    shown = {arm.name: arm.first.test for arm in every}
    drawn = figure(folder, "reliability", plots.reliability_diagram(shown), "Reliability diagrams, first seed")
    return page(folder, "Other clipping functions on MNIST", every, (), [drawn], REMARKS)


if __name__ == "__main__":
    main(STUDY, write)
