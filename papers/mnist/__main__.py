"""MNIST with the CNN of the paper, section 5.3: `clipwise reproduce mnist`.

The paper's claim: with the learning rate 0.15 / R, so that the noise in a step is the same for every R, a large
clipping norm is far better calibrated than a small one, at equal privacy and with little loss of accuracy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path

from clipwise import plots
from clipwise.report import Arm, Curve
from papers.study import Study, Variant, main
from papers.tables import Claim, Finding, against, bins_table, figure, findings_table, number, page, setting, smaller

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
_FEW = "a handful of samples decides it, and the paper's bins are not known"
_PLAIN = "SGD without momentum at the rate 0.15; the paper does not tell its own"
CLAIMS = (
    Claim("R = 1", "accuracy", 0.96, "a little better; the paper's appendix has 96.6 % for TensorFlow", unit=0.01),
    Claim("R = 200", "accuracy", 0.95, unit=0.01),
    Claim("not private", "accuracy", 0.99, _PLAIN, unit=0.01),
    Claim("R = 1", "ece", 0.023),
    Claim("R = 200", "ece", 0.007),
    Claim("not private", "ece", 0.004, _PLAIN),
    Claim("R = 1", "mce", 0.562, _FEW),
    Claim("R = 200", "mce", 0.334, _FEW),
    Claim("not private", "mce", 0.493, _FEW),
)
CHOSEN = (
    "The learning rate 0.15 / R, R = 1 and R = 200 are the paper's; the R between, the mix-up arm and the learning "
    "rate 0.15 without privacy are chosen here. Batches are drawn by Poisson sampling, as the accounting assumes."
)
_SIDE_BY_SIDE = ("R = 1", "R = 200", "not private")


def findings(by_name: dict[str, Arm]) -> list[Finding]:
    """The claims of the section in words."""
    if not {"R = 1", "R = 200"} <= set(by_name):
        return []
    small, large = by_name["R = 1"].estimates, by_name["R = 200"].estimates

    def both(metric: str) -> str:
        return against(metric, large, small)

    found = [
        Finding(
            "R = 200 is nearly as accurate as R = 1", both("accuracy"),
            large["accuracy"].mean > small["accuracy"].mean - 0.03,
        ),
        Finding("R = 200 has less than half the ECE", both("ece"), large["ece"].mean < small["ece"].mean / 2),
        Finding("R = 200 has the smaller MCE", both("mce"), smaller(large["mce"], small["mce"])),
        Finding("R = 200 has the smaller loss (NLL)", both("nll"), smaller(large["nll"], small["nll"])),
    ]  # fmt: skip
    ladder = [by_name[name] for name in ("R = 1", *(f"R = {R:g}" for R in LADDER), "R = 200") if name in by_name]
    if len(ladder) > 2:
        said = "; ".join(
            f"{arm.name}: {number('accuracy', arm.estimates['accuracy'].mean)}, "
            f"{number('ece', arm.estimates['ece'].mean)}"
            for arm in ladder
        )
        falls = {
            m: all(b.estimates[m].mean <= a.estimates[m].mean for a, b in pairwise(ladder)) for m in ("accuracy", "ece")
        }
        verdict = all(falls.values()) or ("for ECE; accuracy does not fall with every step" if falls["ece"] else False)
        found.append(Finding("accuracy and ECE fall together as R grows", f"accuracy, ECE: {said}", verdict))
    return found


def _late(curve: Curve) -> Curve:
    """The second half, where the arms can be told apart."""
    keep = [k for k, step in enumerate(curve.step) if step >= curve.step[-1] / 2]
    return replace(
        curve,
        **{f.name: tuple(values[k] for k in keep) for f in fields(curve) if (values := getattr(curve, f.name))},
    )


def write(arms: Sequence[Arm], folder: Path) -> str:
    """The figures of the paper's section, and the table beside its numbers."""
    by_name = {arm.name: arm for arm in arms}
    shown = {name: by_name[name].first.test for name in _SIDE_BY_SIDE if name in by_name}
    curves = {
        name: {m: curve for m in ("nll", "accuracy", "ece") if (curve := by_name[name].curve("test", m))}
        for name in (*_SIDE_BY_SIDE, MIX_UP)
        if name in by_name
    }
    late = {name: {m: _late(curve) for m, curve in each.items()} for name, each in curves.items()}
    figures = [
        figure(folder, "training", plots.training_curves(curves), "Loss, accuracy and ECE over training"),
        figure(folder, "training_late", plots.training_curves(late), "The second half of it"),
        figure(folder, "over_R", plots.accuracy_calibration([arm.point for arm in arms]), "Accuracy and ECE over R"),
        figure(folder, "reliability", plots.reliability_diagram(shown), "Reliability diagrams, first seed"),
        figure(folder, "confidence", plots.confidence_histogram(shown), "Confidence, first seed"),
        figure(folder, "true_class", plots.true_class_histogram(shown), "Probability of the true class, first seed"),
    ]
    said = f"{setting(arms[0].first)} {CHOSEN}\n"
    remarks = [findings_table(findings(by_name)), said, bins_table(arms)]
    return page(folder, "MNIST with a CNN", arms, CLAIMS, figures, remarks)


if __name__ == "__main__":
    main(STUDY, write)
