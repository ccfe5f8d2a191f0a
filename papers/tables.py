"""The tables that stand beside the paper's numbers, and the page that holds them.

When a number of the paper is called the same as ours, and when a claim is said to hold, is decided here."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log10
from pathlib import Path
from statistics import median

from clipwise import FullBatch
from clipwise.accounting import round_up
from clipwise.calibration import CalibrationResult, Estimate, difference, metric_named
from clipwise.experiments import CURVES, RESULTS, noise_of
from clipwise.report import ArmResults, Run, describe, write_text
from papers.pages import wrapped

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


BINS = (10, 15, 20)
"""Numbers of bins of MCE: the paper does not state its own."""


@dataclass(frozen=True)
class Claim:
    """A number of the paper: the arm, the metric and its value."""

    arm: str
    metric: str
    value: float
    why: str = ""
    """Ours may differ, and the reason."""
    unit: float = 0.001
    """One of the last digit that the paper prints."""

    @property
    def printed(self) -> str:
        """With the digits that the paper gives."""
        percent = metric_named(self.metric).share
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
    """A claim in words, what was found here, whether it holds, and the runs of each arm that say so."""

    claim: str
    here: str
    holds: bool | str
    seeds: tuple[int, ...]

    @property
    def verdict(self) -> str:
        return self.holds if isinstance(self.holds, str) else "yes" if self.holds else "no"

    @property
    def runs(self) -> str:
        return ", ".join(map(str, self.seeds if len(set(self.seeds)) > 1 else self.seeds[:1]))


def seeds_of(*arms: ArmResults) -> tuple[int, ...]:
    """The number of runs of each arm."""
    return tuple(len(arm.runs) for arm in arms)


def smaller(ours: Estimate, theirs: Estimate) -> bool | str:
    """Is our mean below theirs?

    Not clear when the 95 % interval of the difference holds zero; of single runs, when the intervals that other
    held-out records would give overlap.
    """
    if ours.deviation is None and theirs.deviation is None:
        ends = (ours.low, ours.high, theirs.low, theirs.high)
        if None not in ends and not (ours.high < theirs.low or theirs.high < ours.low):  # type: ignore[operator]
            return "not clear: one seed, and its intervals overlap"
        return ours.mean < theirs.mean
    apart = difference(theirs, ours)
    return apart.change < 0 if apart.is_clear else "not clear: within the spread of the seeds"


def smaller_mce(ours: ArmResults, theirs: ArmResults) -> bool | str:
    """Is our MCE the smaller one, with several numbers of bins?"""
    if seeds_of(ours, theirs) == (1, 1):
        return smaller(ours.estimates["mce"], theirs.estimates["mce"])
    found = {smaller(mce(ours, bins), mce(theirs, bins)) for bins in BINS}
    return found.pop() if len(found) == 1 else "not clear: it depends on the number of bins"


def mce(arm: ArmResults, bins: int) -> Estimate:
    """With this number of bins."""
    return Estimate.over_seeds([calibration_of(run).fine_bins.merged(bins).mce for run in arm.runs])


def calibration_of(run: Run) -> CalibrationResult:
    """What was measured of a classifier."""
    assert isinstance(run.test, CalibrationResult)
    return run.test
