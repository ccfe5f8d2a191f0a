"""The table that stands beside the paper's numbers, and the page that holds it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import hypot, log10
from pathlib import Path
from typing import Any

import matplotlib as mpl

from clipwise.accounting.guarantee import round_up
from clipwise.calibration import CalibrationResult
from clipwise.report import Arm, Estimate, Run

_PERCENT = {"accuracy", "ece", "mce", "adaptive_ece", "debiased_ece", "smooth_ece", "classwise_ece"}
TITLES = {"accuracy": "accuracy", "nll": "NLL", "ece": "ECE", "mce": "MCE", "brier": "Brier", "mse": "MSE"}
HEADLINES = {"classification": ("accuracy", "nll", "ece", "mce"), "regression": ("mse",)}


@dataclass(frozen=True)
class Claim:
    """A number of the paper: the arm, the metric, its value, and why ours may differ."""

    arm: str
    metric: str
    value: float
    why: str = ""
    unit: float = 0.001
    """One of the last digit that the paper prints."""

    @property
    def printed(self) -> str:
        """With the digits that the paper gives."""
        percent = self.metric in _PERCENT
        scale = 100 if percent else 1
        return f"{scale * self.value:.{max(0, -round(log10(scale * self.unit)))}f}{' %' if percent else ''}"

    def verdict(self, ours: Estimate) -> str:
        """Same: within the paper's rounding, or within two standard deviations of ours, where these say something."""
        apart, spread = abs(ours.mean - self.value), 2 * (ours.deviation or 0.0)
        if apart <= self.unit / 2 or apart <= spread <= self.value / 2:
            return "same"
        if apart <= spread:
            return "not clear: the seeds are far apart"
        return f"different{': ' + self.why if self.why else ''}"


@dataclass(frozen=True)
class Finding:
    """A claim of the paper in words, what was found here, and whether it holds."""

    claim: str
    here: str
    holds: bool | str


def number(metric: str, value: float) -> str:
    """Shares in percent."""
    return f"{100 * value:.2f} %" if metric in _PERCENT else f"{value:.4f}"


def estimate(metric: str, value: Estimate) -> str:
    """Mean and deviation over the seeds."""
    if value.deviation is None:
        return number(metric, value.mean)
    return f"{number(metric, value.mean).removesuffix(' %')} ± {number(metric, value.deviation)}"


def against(metric: str, ours: Mapping[str, Estimate], theirs: Mapping[str, Estimate]) -> str:
    """Two arms side by side."""
    return f"{estimate(metric, ours[metric])} against {estimate(metric, theirs[metric])}"


def _rows(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    table = [header, ["---"] * len(header), *lines]
    return "".join(f"| {' | '.join(line)} |\n" for line in table)


def epsilon(arm: Arm) -> str:
    """Its exact epsilon, rounded up."""
    return "not private" if arm.epsilon is None else f"{round_up(arm.epsilon):.3f}"


def results_table(arms: Sequence[Arm], metrics: Sequence[str]) -> str:
    """One line per arm: seeds, epsilon, and every metric with its standard deviation over the seeds."""
    lines = []
    for arm in arms:
        values = [estimate(metric, arm.estimates[metric]) for metric in metrics]
        lines.append([arm.name, str(len(arm.runs)), epsilon(arm), *values])
    return _rows(["arm", "seeds", "exact epsilon", *(TITLES[m] for m in metrics)], lines)


def claims_table(arms: Sequence[Arm], claims: Sequence[Claim]) -> str:
    """The paper's numbers beside ours, and whether they are the same."""
    by_name = {arm.name: arm for arm in arms}
    lines = []
    for claim in claims:
        said = [claim.arm, TITLES[claim.metric], claim.printed]
        if claim.arm in by_name:
            arm = by_name[claim.arm]
            ours = arm.estimates[claim.metric]
            lines.append([*said, estimate(claim.metric, ours), str(len(arm.runs)), claim.verdict(ours)])
        else:
            lines.append([*said, "not run", "-", "-"])
    return _rows(["arm", "metric", "paper", "ours", "seeds", "same?"], lines)


def smaller(ours: Estimate, theirs: Estimate) -> bool | str:
    """Is our mean below theirs? Not clear when they are within two standard errors of their difference."""
    errors = [each.deviation / each.seeds**0.5 for each in (ours, theirs) if each.deviation is not None]
    if abs(ours.mean - theirs.mean) < 2 * hypot(*errors):
        return "not clear: within the spread of the seeds"
    return ours.mean < theirs.mean


def findings_table(findings: Sequence[Finding]) -> str:
    """The claims in words."""
    lines = [[f.claim, f.here, f.holds if isinstance(f.holds, str) else "yes" if f.holds else "no"] for f in findings]
    return _rows(["claim of the paper", "here", "holds"], lines)


def calibration_of(run: Run) -> CalibrationResult:
    """What was measured of a classifier."""
    assert isinstance(run.test, CalibrationResult)
    return run.test


def setting(run: Run) -> str:
    """What was trained on what, in a sentence from the run itself."""
    data, plan = run.provenance["data"], run.plan
    batch = f"an expected batch of {plan['sampling']['batch_size']}" if "batch_size" in plan["sampling"] else "all"
    named = re.fullmatch(r"FromFunction\(module='(.*)', function='(.*)', options=\{\}\)", run.provenance["model"])
    network = f"`{named[1]}:{named[2]}`" if named else run.provenance["model"]
    return (
        f"{network} with {run.provenance['parameters']:,} parameters; {plan['steps']:,} steps on "
        f"{batch} of {data['records']:,} records, inputs {data['inputs']}; noise multiplier "
        f"{plan['noise_multiplier']:g}; measured on {data['held_out']:,} records. {data['note']}".strip()
    )


def bins_table(arms: Sequence[Arm], bins: Sequence[int] = (10, 15, 20)) -> str:
    """MCE for several numbers of bins: the paper does not state its own."""
    lines = []
    for arm in arms:
        results = [calibration_of(run) for run in arm.runs]
        values = [Estimate.over_seeds([result.fine_bins.merged(count).mce for result in results]) for count in bins]
        lines.append([arm.name, *(estimate("mce", value) for value in values)])
    return _rows(["arm", *(f"MCE, {count} bins" for count in bins)], lines)


def save(folder: Path, name: str, drawn: Any) -> None:
    """A figure as `figures/name.svg`; equal figures are equal files."""
    path = folder / "figures" / f"{name}.svg"
    path.parent.mkdir(exist_ok=True)
    with mpl.rc_context({"svg.hashsalt": name}):
        drawn.savefig(path, metadata={"Date": None})


def figure(folder: Path, name: str, drawn: Any, caption: str) -> str:
    """Save a figure; the line of the page that shows it."""
    save(folder, name, drawn)
    return f"![{caption}](figures/{name}.svg)\n"


def save_results(folder: Path, arms: Sequence[Arm]) -> None:
    """Every metric of every arm as `results.json`."""
    values = {arm.name: {name: value.to_dict() for name, value in arm.estimates.items()} for arm in arms}
    (folder / "results.json").write_text(json.dumps(values, indent=1) + "\n")


def page(
    folder: Path,
    title: str,
    arms: Sequence[Arm],
    claims: Sequence[Claim],
    figures: Sequence[str],
    remarks: Sequence[str] = (),
    command: str | None = None,
) -> str:
    """Write `results.json` and `README.md` of a recipe; returns the tables."""
    metrics = HEADLINES[arms[0].first.task]
    save_results(folder, arms)
    minutes = sum(run.provenance["seconds"] for arm in arms for run in arm.runs) / 60
    tables = f"{results_table(arms, metrics)}\n{claims_table(arms, claims)}" if claims else results_table(arms, metrics)
    command = command or f"clipwise reproduce {folder.name}"
    head = (
        f"# {title}\n\nWritten by `{command}` from the runs in `runs/`, which took "
        f"{minutes:.0f} minutes of training in all. ± is the standard deviation over the seeds.\n\n"
    )
    (folder / "README.md").write_text("\n".join([head + tables, *remarks, *figures]))
    return tables
