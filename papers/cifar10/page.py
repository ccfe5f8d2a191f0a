"""The page: which form of the experiment it shows, the tables beside the paper's numbers, and the figures."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from clipwise import plots
from clipwise.report import Arm
from papers.cifar10.grid import points
from papers.cifar10.study import LARGE, NOISE_R, NOISE_RATE, RATE, SIGMAS, SMALL, TUNED, arm, noise_arm
from papers.tables import HEADLINES, Claim, bins_table, claims_table, figure, results_table

METRICS = HEADLINES["classification"]
_TABLE = (
    ("accuracy", (None, 0.9717, 0.9661)),
    ("ece", (0.013, 0.009, 0.011)),
    ("mce", (0.548, 0.586, 0.275)),
)
KINDS = ("", "15 epochs")


def claims(kind: str) -> list[Claim]:
    """The paper's numbers, for one of its two readings."""
    arms = (None, SMALL, LARGE)
    return [
        Claim(arm(R, kind), metric, value)
        for metric, values in _TABLE
        for R, value in zip(arms, values, strict=True)
        if value is not None
    ]


def write(arms: Sequence[Arm], rows: Sequence[Any], folder: Path, network: str) -> str:
    """Write README.md, results.json and the figures; returns the tables."""
    by_name = {each.name: each for each in arms}
    sections = [_head(arms, rows, folder, network)]
    tables = []
    for kind in KINDS:
        text, table = _arms(by_name, kind, folder)
        sections.append(text)
        tables.append(table)
    sections += [_noise(by_name, folder), _grid(rows, folder)]
    text, table = _tuned(by_name, folder)
    sections.append(text)
    values = {each.name: {name: value.to_dict() for name, value in each.estimates.items()} for each in arms}
    (folder / "results.json").write_text(json.dumps(values, indent=1) + "\n")
    (folder / "README.md").write_text("\n".join(filter(None, sections)))
    return "\n".join([*tables, table])


def _head(arms: Sequence[Arm], rows: Sequence[Any], folder: Path, network: str) -> str:
    minutes = sum(run.provenance["seconds"] for each in arms for run in each.runs) / 60
    minutes += sum(row.get("seconds", 0.0) for row in rows) / 60
    option = "" if network == "efficientnet_lite0" else f" --network {Path(network).name}"
    findings = folder / "findings.md"
    return f"""# CIFAR-10 with a pre-trained network

Written by `clipwise reproduce cifar10{option}` from `runs/` and `grid.json`, which took {minutes:.0f} minutes of
training on one core in all. ± is the standard deviation over the seeds.

**Which form this is.** The paper fine-tunes all 86 million parameters of ViT-base. Sections 1 to 3 below train a
two-layer head (64 hidden units) on what the frozen {Path(network).name} says of all 50,000 training images; section 4
trains all parameters. Batch size 1,000, noise multiplier 1.3 and delta 1e-5 are the paper's; its clipping norms and
learning rates are not in its text and are chosen here.

{findings.read_text(encoding="utf-8") if findings.is_file() else ""}"""


def _arms(by_name: Mapping[str, Arm], kind: str, folder: Path) -> tuple[str, str]:
    """Accuracy and calibration for one length of training."""
    names = [arm(None, kind), arm(LARGE, kind), arm(SMALL, kind)]
    found = [by_name[name] for name in names if name in by_name]
    if not found:
        return "", ""
    shown = {each.name: each.first.test for each in found}
    mark = "_long" if kind else ""
    tables = f"{results_table(found, METRICS)}\n{claims_table(found, claims(kind))}\n{bins_table(found)}"
    drawn = [
        figure(
            folder, f"training{mark}", plots.training_curves(_curves(found)), "Loss, accuracy and ECE over training"
        ),
        figure(folder, f"reliability{mark}", plots.reliability_diagram(shown), "Reliability diagrams, first seed"),
        figure(folder, f"confidence{mark}", plots.confidence_histogram(shown), "Confidence, first seed"),
        figure(folder, f"true_class{mark}", plots.true_class_histogram(shown), "Probability of the true class"),
    ]
    title = f"## 1{'b' if kind else 'a'}. Accuracy and calibration, {kind or 'one epoch, as in the text of the paper'}"
    why = "The paper's epsilon of 1.96 is that of 15 epochs, not of the single one in its text.\n\n" if kind else ""
    rates = f"The learning rate is {RATE:g} / R, and {RATE / LARGE:g} without privacy: that of R = {LARGE:g}.\n\n"
    return f"{title}\n\n{why}{rates}{tables}\n" + "\n".join(drawn), tables


def _curves(arms: Sequence[Arm], section: str = "test", names: Sequence[str] = ("nll", "accuracy", "ece")) -> Any:
    return {each.name: {m: curve for m in names if (curve := each.curve(section, m))} for each in arms}


def _noise(by_name: Mapping[str, Arm], folder: Path) -> str:
    """Several levels of noise, all else equal."""
    found = [by_name[name] for sigma in (None, *SIGMAS) if (name := noise_arm(sigma)) in by_name]
    if not found:
        return ""
    curves = _curves(found)
    for each in found:
        curves[each.name] = {**_curves([each], "private", ["loss"])[each.name], **curves[each.name]}
    drawn = plots.training_curves(curves, ["loss", "nll", "accuracy"])
    return f"""## 2. Does the noise matter?

R = {NOISE_R:g} and learning rate {NOISE_RATE:g} as in the paper, one epoch, one seed: batches and the draws of the
noise are the same in all arms, but for the noise's size.

{results_table(found, METRICS)}
{figure(folder, "noise", drawn, "Training loss, test loss and accuracy for several levels of noise")}"""


def _grid(rows: Sequence[Any], folder: Path) -> str:
    """Heat maps, flat beside layerwise."""
    if not rows:
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
        parts.append(figure(folder, f"grid_{style}", drawn, f"Accuracy, ECE and MCE in %, {style} clipping"))
    return "\n".join([*parts, _best(rows, steps)])


def _best(rows: Sequence[Any], steps: int) -> str:
    """The best learning rate of each R."""
    lines = ["| clipping | R | best rate | accuracy | ECE | MCE |\n| --- | --- | --- | --- | --- | --- |"]
    for style in ("flat", "layerwise"):
        made = points(rows, style, steps)
        for R in sorted({point.clip_norm for point in made if point.clip_norm is not None}):
            best = max((p for p in made if p.clip_norm == R), key=lambda p: p.metrics["accuracy"].mean)
            values = " | ".join(f"{100 * best.metrics[m].mean:.2f} %" for m in ("accuracy", "ece", "mce"))
            lines.append(f"| {style} | {R:g} | {best.learning_rate:g} | {values} |")
    return "The best learning rate of each R, by accuracy:\n\n" + "\n".join(lines) + "\n"


def _tuned(by_name: Mapping[str, Arm], folder: Path) -> tuple[str, str]:
    """All parameters."""
    found = [by_name[name] for R in (SMALL, LARGE) if (name := arm(R, TUNED)) in by_name]
    if not found:
        return "", ""
    first = found[0].first
    data = first.provenance["data"]
    tables = f"{results_table(found, METRICS)}\n{bins_table(found)}"
    shown = {each.name: each.first.test for each in found}
    text = f"""## 4. All parameters

Does it carry over from a head to a whole network? {first.provenance["parameters"]:,} parameters, {data["records"]:,}
training and {data["held_out"]:,} test images, {first.plan["steps"]} steps, one seed: `{first.provenance["model"]}`.

{tables}
{figure(folder, "tuned_training", plots.training_curves(_curves(found)), "Fine-tuning: loss, accuracy and ECE")}
{figure(folder, "tuned_reliability", plots.reliability_diagram(shown), "Fine-tuning: reliability diagrams")}"""
    return text, tables
