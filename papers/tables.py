"""The table that stands beside the paper's numbers, and the page that holds it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib as mpl

from clipwise import FullBatch
from clipwise.accounting import round_up
from clipwise.calibration import Estimate, metric_named
from clipwise.experiments import CURVES, RESULTS, noise_of
from clipwise.report import ArmResults, Run, describe, write_text
from papers.pages import wrapped
from papers.verdicts import BINS, Claim, Finding, mce

HEADLINES = {"classification": ("accuracy", "nll", "ece", "mce"), "regression": ("mse",)}


def number(metric: str, value: float) -> str:
    """Shares in percent."""
    return f"{100 * value:.2f} %" if metric_named(metric).share else f"{value:.4f}"


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


def epsilon(arm: ArmResults) -> str:
    """Its exact epsilon, rounded up."""
    return "not private" if arm.epsilon is None else f"{round_up(arm.epsilon):.3f}"


def results_table(arms: Sequence[ArmResults], metrics: Sequence[str]) -> str:
    """One line per arm: seeds, epsilon, and every metric with its standard deviation over the seeds."""
    lines = []
    for arm in arms:
        values = [estimate(metric, arm.estimates[metric]) for metric in metrics]
        lines.append([arm.name, str(len(arm.runs)), epsilon(arm), *values])
    return _rows(["arm", "seeds", "exact epsilon", *(metric_named(m).label for m in metrics)], lines)


def claims_table(arms: Sequence[ArmResults], claims: Sequence[Claim]) -> str:
    """The paper's numbers beside ours, and whether they are the same."""
    by_name = {arm.name: arm for arm in arms}
    lines = []
    for claim in claims:
        said = [claim.arm, metric_named(claim.metric).label, claim.printed]
        if claim.arm in by_name:
            arm = by_name[claim.arm]
            ours = arm.estimates[claim.metric]
            lines.append([*said, estimate(claim.metric, ours), str(len(arm.runs)), claim.verdict(ours)])
        else:
            lines.append([*said, "not run", "-", "-"])
    return _rows(["arm", "metric", "paper", "ours", "seeds", "same?"], lines)


def findings_table(findings: Sequence[Finding]) -> str:
    """The claims in words."""
    return _rows(["claim", "here", "seeds", "holds"], [[f.claim, f.here, f.runs, f.verdict] for f in findings])


def setting(run: Run) -> str:
    """What was trained on what, in a sentence from the run itself."""
    data, plan = run.provenance["data"], run.plan
    batch = "all" if isinstance(plan.sampling, FullBatch) else f"an expected batch of {plan.sampling.batch_size}"
    named = re.fullmatch(r"FromFunction\(module='(.*)', function='(.*)', options=\{\}\)", run.provenance["model"])
    network = f"`{named[1]}:{named[2]}`" if named else run.provenance["model"]
    return (
        f"{network} with {run.provenance['parameters']:,} parameters; {plan.steps:,} steps on "
        f"{batch} of {data['records']:,} records, inputs {data['inputs']}; noise multiplier "
        f"{describe(plan.noise_multiplier)}, delta {run.delta:.3g}; measured on {data['held_out']:,} records. "
        f"{data['note']}"
    ).strip()


def bins_table(arms: Sequence[ArmResults]) -> str:
    """MCE for several numbers of bins."""
    lines = [[arm.name, str(len(arm.runs)), *(estimate("mce", mce(arm, bins)) for bins in BINS)] for arm in arms]
    said = (
        "ECE and MCE above are over 15 bins; the paper does not state its number. MCE with other numbers of bins:\n\n"
    )
    return said + _rows(["arm", "seeds", *(f"MCE, {bins} bins" for bins in BINS)], lines)


def times(arms: Sequence[ArmResults]) -> str:
    """How many runs there are and how long they took."""
    minutes = [run.provenance["seconds"] / 60 for arm in arms for run in arm.runs]
    return (
        f"{len(minutes)} runs in `{RESULTS}` and `{CURVES}`: {sum(minutes):.0f} minutes of training in all, one core "
        f"for each run; the median run took {median(minutes):.1f} minutes. {noises(arms)}"
    )


def noises(arms: Sequence[ArmResults]) -> str:
    """Which noise made the runs, in a sentence."""
    found = sorted(filter(None, {noise_of(arm) for arm in arms}))
    return f"Their noise: {' and '.join(found)}." if found else "They have no noise."


def same_draws(arms: Sequence[ArmResults]) -> bool:
    """Whether arms of one seed have the same batches and noise: so it was before an arm drew from its own seed."""
    return all("arm" not in run.provenance for arm in arms for run in arm.runs)


def save(folder: Path, name: str, drawn: Any) -> None:
    """A figure as `figures/name.svg`; equal figures are equal files."""
    path = folder / "figures" / f"{name}.svg"
    path.parent.mkdir(exist_ok=True)
    with mpl.rc_context({"svg.hashsalt": name}):
        drawn.savefig(path, metadata={"Date": None})


def figure(folder: Path, name: str, drawn: Any, caption: str) -> str:
    """Save a figure; the lines of the page that show it, with the caption below."""
    save(folder, name, drawn)
    return f"![{caption}](figures/{name}.svg)\n\n*{caption}.*\n"


def write_page(folder: Path, text: str) -> None:
    """Write `README.md`, its prose in lines of 120 characters; tables, figures and headings stay as they are."""
    write_text(folder / "README.md", wrapped(text))


def page(
    folder: Path,
    title: str,
    arms: Sequence[ArmResults],
    claims: Sequence[Claim],
    figures: Sequence[str],
    remarks: Sequence[str] = (),
    command: str | None = None,
    trained: Sequence[ArmResults] | None = None,
) -> str:
    """Write `README.md` of a recipe; returns the tables. `trained` are its own arms, if not all."""
    metrics = HEADLINES[arms[0].first.task]
    tables = f"{results_table(arms, metrics)}\n{claims_table(arms, claims)}" if claims else results_table(arms, metrics)
    command = command or f"clipwise reproduce {folder.name}"
    head = (
        f"# {title}\n\nWritten by `{command}` from the {times(trained or arms)} ± is the standard deviation over "
        "the seeds.\n\n"
    )
    write_page(folder, "\n".join([head + tables, *remarks, *figures]))
    return tables
