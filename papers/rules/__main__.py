"""Other clipping functions on MNIST, at equal privacy: `clipwise reproduce rules`.

The network, noise and learning rate c / R are those of `papers/mnist`, nothing was searched for. R is the sensitivity
of the whole step: the four layers of the layerwise arms have R / 2 each. The claim of the paper's appendix: at a large
clipping norm, global and usual clipping differ little.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from clipwise import plots
from clipwise.report import Arm, Estimate, arms_of
from papers.mnist.__main__ import STUDY as MNIST
from papers.study import Study, Variant, main, runs_of
from papers.tables import TITLES, Finding, against, figure, findings_table, page

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
USUAL = "R = 200"
LITTLE = 0.01
"""Of accuracy."""
REMARKS = (
    "Automatic and Normalize divide by the norm, so that their R is a unit of the learning rate and nothing else. "
    "GlobalScaled(R, Z) with the learning rate c / R makes the steps of Global(Z) with c / Z: longer gradients "
    "than Z are dropped. The arms R = 1 and R = 200 are the runs of `papers/mnist`: Abadi's rule, flat.\n",
    "Normalize diverges with this learning rate. The likely reason: it gives a sample that is fitted already, whose "
    "gradient is nearly zero, as long a step as any other, so that the weights never come to rest; the constant in the "
    "denominator of Automatic (0.01) prevents it.\n",
)


def findings(by_name: Mapping[str, Mapping[str, Estimate]]) -> list[Finding]:
    """The claim of the appendix, for its two kinds of global clipping."""
    if USUAL not in by_name:
        return []
    usual = by_name[USUAL]
    found = []
    for name in (name for name in by_name if name.startswith("Global")):
        ours = by_name[name]
        here = "; ".join(f"{TITLES[m]}: {against(m, ours, usual)}" for m in ("accuracy", "ece"))
        apart = abs(ours["accuracy"].mean - usual["accuracy"].mean)
        found.append(
            Finding(f"{name} differs little in accuracy from the usual clipping at {USUAL}", here, apart < LITTLE)
        )
    return found


def write(arms: Sequence[Arm], folder: Path) -> str:
    """The table of all rules, beside the usual clipping where its runs are there."""
    runs = runs_of(MNIST, folder.parent / MNIST.name / "runs")
    usual = [run for run in runs if run.name in ("R = 1", USUAL)]
    every = [*(arms_of(usual) if usual else ()), *arms]
    shown = {arm.name: arm.first.test for arm in every}
    drawn = figure(folder, "reliability", plots.reliability_diagram(shown), "Reliability diagrams, first seed")
    by_name = {arm.name: arm.estimates for arm in every}
    return page(
        folder, "Other clipping functions on MNIST", every, (), [drawn], [findings_table(findings(by_name)), *REMARKS]
    )


if __name__ == "__main__":
    main(STUDY, write)
