"""Federated MNIST with unlike users, privacy for whole users: `clipwise reproduce federated`.

The paper has no such experiment: its federated algorithms stand in a part of the source that is not printed. The
question is that of its other experiments: what does the clipping norm do to accuracy and calibration, all else equal?
Every private arm has the same noise multiplier, so the same epsilon, and a server's learning rate of 1/R, so the same
noise in the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from clipwise import plots
from clipwise.report import Arm, Curve
from papers.study import Study, Variant, main
from papers.tables import figure, page

STUDY = Study(
    folder=Path(__file__).parent,
    variants=(
        Variant("R = 0.1"),
        Variant("R = 1", ("clip.R=1.0",)),
        Variant("GlobalClip, R = Z = 1", ('clip={rule="GlobalScaled",R=1.0,Z=1.0}',)),
        Variant("adaptive R", ("federated.quantile=0.5",)),
        Variant(
            "DP-FedSGD, R = 0.1",
            (
                "algorithm=dp-fedsgd",
                'federated={users=2000,split="shards",shards_per_user=2,server={learning_rate="1 / R"}}',
                "optimizer.learning_rate=1.0",
            ),
        ),
        Variant(
            "not private",
            ("privacy={private=false}", "clip={rule='NoClip'}", "federated.server={learning_rate=2.0}"),
        ),
    ),
    seeds=3,
    quick=("steps=6", "evaluation.every=3", "batch_size=20"),
)


def write(arms: Sequence[Arm], folder: Path) -> str:
    """Curves over the rounds, reliability diagrams, and the table."""
    curves = {
        arm.name: {m: curve for m in ("accuracy", "ece", "nll") if (curve := arm.curve("test", m))} for arm in arms
    }
    for arm in arms:
        spent = {row["step"]: row["epsilon"] for row in arm.first.curves if row["epsilon"] is not None}
        if spent:
            curves[arm.name]["epsilon"] = Curve(tuple(spent), tuple(spent.values()))
    shown = {arm.name: arm.first.test for arm in arms if arm.name in ("R = 0.1", "R = 1", "not private")}
    figures = [
        figure(
            folder,
            "rounds",
            plots.training_curves(curves),
            "Accuracy, ECE, loss and user-level epsilon over the rounds",
        ),
        figure(folder, "reliability", plots.reliability_diagram(shown), "Reliability diagrams, first seed"),
    ]
    return page(folder, "Federated MNIST with unlike users", arms, (), figures)


if __name__ == "__main__":
    main(STUDY, write)
