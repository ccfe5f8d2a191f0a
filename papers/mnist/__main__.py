"""MNIST with the CNN of the paper, section 5.3: `clipwise reproduce mnist`.

The paper's claim: with the learning rate 0.15 / R, so that the noise in a step is the same for every R, a large
clipping norm is far better calibrated than a small one, at equal privacy and with little loss of accuracy.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from clipwise import plots
from clipwise.report import Arm
from papers.study import Study, Variant, main
from papers.tables import Claim, bins_table, figure, page

MIX_UP = "R = 1, then 200"
LADDER = (10.0, 50.0)
STUDY = Study(
    folder=Path(__file__).parent,
    variants=(
        Variant("R = 1", ("clip.R=1.0",)),
        Variant("R = 200", ("clip.R=200.0",)),
        Variant(
            MIX_UP,
            ('clip={schedule="MixUp",switch_at=0.95,small={rule="Abadi",R=1.0},large={rule="Abadi",R=200.0}}',),
        ),
        *(Variant(f"R = {R:g}", (f"clip.R={R}",)) for R in LADDER),
        Variant("not private", ("privacy={private=false}", "clip={rule='NoClip'}", "optimizer.learning_rate=0.15")),
    ),
    seeds=5,
    quick=("steps=40", "evaluation.every=20", "evaluation.resamples=0"),
)
CLAIMS = (
    Claim("R = 1", "accuracy", 0.96, unit=0.01),
    Claim("R = 200", "accuracy", 0.95, unit=0.01),
    Claim("not private", "accuracy", 0.99, unit=0.01),
    Claim("R = 1", "ece", 0.023),
    Claim("R = 200", "ece", 0.007),
    Claim("not private", "ece", 0.004),
    Claim("R = 1", "mce", 0.562),
    Claim("R = 200", "mce", 0.334),
    Claim("not private", "mce", 0.493),
)
_SIDE_BY_SIDE = ("R = 1", "R = 200", "not private")


def write(arms: Sequence[Arm], folder: Path) -> str:
    """The figures of the paper's section, and the table beside its numbers."""
    by_name = {arm.name: arm for arm in arms}
    shown = {name: by_name[name].first.test for name in _SIDE_BY_SIDE if name in by_name}
    curves = {
        name: {m: curve for m in ("nll", "accuracy", "ece") if (curve := by_name[name].curve("test", m))}
        for name in (*_SIDE_BY_SIDE, MIX_UP)
        if name in by_name
    }
    figures = [
        figure(folder, "training", plots.training_curves(curves), "Loss, accuracy and ECE over training"),
        figure(folder, "over_R", plots.accuracy_calibration([arm.point for arm in arms]), "Accuracy and ECE over R"),
        figure(folder, "reliability", plots.reliability_diagram(shown), "Reliability diagrams, first seed"),
        figure(folder, "confidence", plots.confidence_histogram(shown), "Confidence, first seed"),
        figure(folder, "true_class", plots.true_class_histogram(shown), "Probability of the true class, first seed"),
    ]
    return page(folder, "MNIST with a CNN", arms, CLAIMS, figures, [bins_table(arms)])


if __name__ == "__main__":
    main(STUDY, write)
