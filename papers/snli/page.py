"""The page of the SNLI experiment: the figures of section 5.4, the tables, and what holds of the paper's claims."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from clipwise import plots
from clipwise.accounting import account
from clipwise.calibration import CalibrationResult
from clipwise.cli.published import PUBLISHED
from clipwise.report import ArmResults, describe
from papers.figures import figure, histograms
from papers.tables import Claim, Finding, against, bins_table, epsilon, findings_table, number, page, seeds_of, smaller

SMALL, MIX_UP, LARGE, NOT_PRIVATE = "R = 0.1", "R = 0.1, then 20", "R = 20", "not private"
_SMALLER = "a smaller network, a fifth of the pairs"
_OTHER = "another network, other data"
_BINS = "another network; the paper's bins are not known"
CLAIMS = (
    Claim(SMALL, "accuracy", 0.741, _SMALLER),
    Claim(MIX_UP, "accuracy", 0.731, _SMALLER),
    Claim(LARGE, "accuracy", 0.659, _SMALLER),
    Claim(NOT_PRIVATE, "accuracy", 0.854, _SMALLER),
    Claim(MIX_UP, "nll", 1.08, _OTHER, unit=0.01),
    Claim(SMALL, "ece", 0.220, _OTHER),
    Claim(MIX_UP, "ece", 0.176, _OTHER),
    Claim(NOT_PRIVATE, "ece", 0.130, _OTHER),
    Claim(SMALL, "mce", 0.625, _BINS),
    Claim(MIX_UP, "mce", 0.289, _BINS),
    Claim(NOT_PRIVATE, "mce", 0.347, _BINS),
)


def claims(weights: str | None) -> tuple[Claim, ...]:
    """The paper's numbers; why ours differ is known of MiniLM on the subset, not of other weights."""
    return CLAIMS if weights is None else tuple(replace(claim, why="") for claim in CLAIMS)


def write(arms: Sequence[ArmResults], folder: Path, weights: str | None) -> str:
    """The figures of the paper's section, and the tables beside its numbers; `weights` are those of the option."""
    by_name = {arm.name: arm for arm in arms}
    shown = {arm.name: test for arm in arms if isinstance(test := arm.first.test, CalibrationResult)}
    figures = [
        figure(
            folder,
            "training",
            _training(by_name),
            "Test loss, accuracy and ECE over training; the dotted line is the switch of mix-up training",
        ),
        figure(
            folder,
            "calibration",
            [plots.reliability_diagram(shown), *histograms(shown)],
            "First seed: (a) reliability diagrams, (b) confidence, (c) probability of the true class",
        ),
    ]
    other = "The paper's network: `clipwise reproduce snli --weights bert_base`, or a folder with a BERT.\n"
    remarks = [other, _setting(arms), _privacy(arms, weights), *_findings(by_name), bins_table(arms)]
    command = f"clipwise reproduce snli --weights {weights}" if weights else "clipwise reproduce snli"
    tables = page(folder, "SNLI with the last layer of a BERT", arms, claims(weights), figures, remarks, command)
    return "\n".join([tables, *remarks])


def _switch(arm: ArmResults) -> int:
    """The first step with the large R."""
    plan = arm.first.plan
    return plan.clip.switch_step(plan.steps)


def _training(by_name: dict[str, ArmResults]) -> Any:
    curves = {
        name: {m: curve for m in ("nll", "accuracy", "ece") if (curve := arm.curve("test", m))}
        for name, arm in by_name.items()
    }
    drawn = plots.training_curves(curves)
    if MIX_UP in by_name:
        for axes in drawn.axes:
            axes.axvline(_switch(by_name[MIX_UP]), color="0.5", linewidth=0.8, linestyle=":")
    return drawn


def _setting(arms: Sequence[ArmResults]) -> str:
    """What was trained on what, and where this differs from the paper."""
    run = arms[0].first
    data, plan = run.provenance["data"], run.plan
    return (
        f"Trained: the last encoder layer, the pooler and a new head, {run.provenance['parameters']:,} parameters, "
        f"with {run.choices.optimizer}; expected batch {plan.batch_size} of {data['records']:,} pairs, "
        f"{plan.steps:,} steps; noise multiplier {describe(plan.noise_multiplier)} in the private arms; mix-up "
        f"training changes R after 95 % of the steps; measured on {data['held_out']:,} pairs. Data: {data['source']}. "
        f"{data['note']}\n\n"
        "Other differences from the paper: the frozen layers are run once and without dropout, and their outputs "
        "are kept as float16; batches are drawn by Poisson sampling, as the accounting assumes; the state of AdamW is "
        "kept when the clipping norm changes.\n"
    )


def _privacy(arms: Sequence[ArmResults], weights: str | None) -> str:
    """Our epsilon beside the paper's, and beside the exact value of the paper's setting."""
    private = [arm for arm in arms if arm.epsilon is not None]
    three, all_steps = (account(PUBLISHED[name].events, PUBLISHED[name].delta) for name in ("snli", "snli-as-run"))
    theirs = (
        f"The paper claims {PUBLISHED['snli'].claim:g}; the exact values for its setting are {three.printed} (the "
        f"51,576 steps of 3 epochs) and {all_steps.printed} (all 54,076 steps), at delta = 1/550,152.\n"
    )
    if not private:
        return theirs
    run = private[0].first
    scope = "It covers the fine-tuning, not what the weights were trained on before."
    if weights is None:
        scope = (
            "It covers the fine-tuning only: MiniLM had seen SNLI before, so it is not a guarantee for SNLI's records."
        )
    dearest = max(private, key=lambda arm: arm.epsilon or 0.0)
    return (
        f"Privacy of every private arm here: epsilon = {epsilon(dearest)} (exact) at delta = {run.delta:g}. It is "
        f"not the paper's, as n, the sampling rate and the number of steps are not. {scope} {theirs}"
    )


def _findings(by_name: dict[str, ArmResults]) -> list[str]:
    """The claims in words, each with what was found here and whether it holds."""
    if not {SMALL, MIX_UP, LARGE} <= set(by_name):
        return []
    small, mixed, large = (by_name[name] for name in (SMALL, MIX_UP, LARGE))
    nll, accuracy, switched = _values(small, "nll"), _values(small, "accuracy"), _values(mixed, "nll")
    before = [value for step, value in switched.items() if step <= _switch(mixed)][-1]
    first, last, after = *_ends(nll), _ends(switched)[1]
    lowest = min(nll.values())
    began, ended = _ends(accuracy)
    grown = [number("accuracy", value) for value in (began, ended)]
    rows = [
        Finding(
            "with R = 0.1 the test loss does not fall, though accuracy grows",
            f"first to last measurement: loss {first:.3f} to {last:.3f}, lowest {lowest:.3f}; accuracy "
            f"{' to '.join(grown)}",
            last >= first and ended > began and ("in the end; it falls at first" if lowest < first else True),
            seeds_of(small),
        ),
        Finding(
            "the switch to R = 20 lowers the test loss (1.79 to 1.08)",
            f"{before:.3f} before it to {after:.3f} at the end; with R = 0.1 throughout {last:.3f}",
            after < min(before, last), seeds_of(mixed, small),
        ),
        Finding(
            "ECE is lower with mix-up than with R = 0.1", against("ece", mixed.estimates, small.estimates),
            smaller(mixed.estimates["ece"], small.estimates["ece"]), seeds_of(mixed, small),
        ),
        Finding(
            "mix-up costs 1 point of accuracy", against("accuracy", mixed.estimates, small.estimates),
            mixed.estimates["accuracy"].mean > small.estimates["accuracy"].mean - 0.02, seeds_of(mixed, small),
        ),
        Finding(
            "R = 20 throughout is less accurate", against("accuracy", large.estimates, mixed.estimates),
            smaller(large.estimates["accuracy"], mixed.estimates["accuracy"]), seeds_of(large, mixed),
        ),
    ]  # fmt: skip
    return [findings_table(rows)]


def _values(arm: ArmResults, metric: str) -> dict[float, float]:
    """A metric of the test pairs by step, mean over the seeds."""
    curve = arm.curve("test", metric)
    assert curve is not None
    return {step: value for step, value in zip(curve.step, curve.mean, strict=True) if value is not None}


def _ends(values: dict[float, float]) -> tuple[float, float]:
    return values[min(values)], values[max(values)]
