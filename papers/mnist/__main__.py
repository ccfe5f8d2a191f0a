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
from clipwise.experiments import Arm, Study
from clipwise.plots import Curve
from clipwise.report import ArmResults
from papers.figures import HISTOGRAMS, figure, histograms
from papers.study import main
from papers.tables import (
    Claim,
    Finding,
    against,
    bins_table,
    findings_table,
    number,
    page,
    seeds_of,
    setting,
    smaller,
    smaller_mce,
)

MIX_UP = "R = 1, then 200"
LADDER = (10.0, 50.0)
STUDY = Study.beside(
    __file__,
    arms=(
        Arm("R = 1", ("clip.R=1.0",)),
        Arm("R = 200", ("clip.R=200.0",)),
        Arm(
            MIX_UP,
            ('clip={schedule="MixUp",switch_at=0.95,small={rule="Abadi",R=1.0},large={rule="Abadi",R=200.0}}',),
            seeds=3,
        ),
        *(Arm(f"R = {R:g}", (f"clip.R={R}",), seeds=3) for R in LADDER),
        Arm("not private", ("privacy={private=false}", "clip={rule='NoClip'}", "optimizer.learning_rate=0.15"), 1),
    ),
    seeds=5,
)
QUICK = ("steps=40", "evaluation.every=20", "evaluation.resamples=0")
_FEW = "a handful of samples decides it, and the paper's bins are not known"
_PLAIN = "SGD without momentum at the rate 0.15; the paper does not state its own"
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
    "rate 0.15 without privacy are chosen here; mix-up changes from R = 1 to R = 200 after 95 % of the steps. The "
    "network is that of appendix C.1. Batches are drawn by Poisson sampling, as the accounting assumes."
)
NEARLY = 0.03
"""As accurate: so many points less at most."""
_SIDE_BY_SIDE = ("R = 1", "R = 200", "not private")


LATE = "The second half of training"
OVER_R = (
    "Accuracy and ECE over R, with 95 % intervals of the mean over the seeds; a dashed level has no single R, and in "
    "the right panel the upper left corner is the best"
)


def findings(by_name: dict[str, ArmResults]) -> list[Finding]:
    """The claims of the section in words."""
    if not {"R = 1", "R = 200"} <= set(by_name):
        return []
    arms = by_name["R = 200"], by_name["R = 1"]
    large, small = (arm.estimates for arm in arms)
    verdicts = (
        ("is nearly as accurate as R = 1", "accuracy", large["accuracy"].mean > small["accuracy"].mean - NEARLY),
        ("has less than half the ECE", "ece", large["ece"].mean < small["ece"].mean / 2),
        ("has the smaller MCE", "mce", smaller_mce(*arms)),
        ("has the smaller loss (NLL)", "nll", smaller(large["nll"], small["nll"])),
    )
    found = [
        Finding(f"R = 200 {what}", against(metric, large, small), holds, seeds_of(*arms))
        for what, metric, holds in verdicts
    ]
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
        claim = "accuracy and ECE fall together as R grows"
        found.append(Finding(claim, f"accuracy, ECE: {said}", verdict, seeds_of(*ladder)))
    return found


def _late(curve: Curve) -> Curve:
    """The second half, where the arms can be told apart."""
    keep = [k for k, step in enumerate(curve.step) if step >= curve.step[-1] / 2]
    return replace(
        curve,
        **{f.name: tuple(values[k] for k in keep) for f in fields(curve) if (values := getattr(curve, f.name))},
    )


def write(arms: Sequence[ArmResults], folder: Path) -> str:
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
        figure(
            folder,
            "training",
            [
                plots.training_curves(curves),
                plots.training_curves(late),
                plots.accuracy_calibration([arm.point for arm in arms]),
            ],
            f"(a) Test loss, accuracy and ECE over training; means and deviations. (b) {LATE}. (c) {OVER_R}",
        ),
        figure(folder, "reliability", plots.reliability_diagram(shown), "Reliability diagrams, first seed"),
        figure(folder, "histograms", histograms(shown), HISTOGRAMS),
    ]
    said = f"{setting(arms[0].first)} {CHOSEN}\n"
    remarks = [findings_table(findings(by_name)), said, bins_table(arms)]
    return page(folder, "MNIST with a CNN", arms, CLAIMS, figures, remarks)


if __name__ == "__main__":
    main(STUDY, QUICK, write)
