"""When a number of the paper is called the same as ours, and when a claim is said to hold."""

from __future__ import annotations

from dataclasses import dataclass
from math import log10

from clipwise.calibration import CalibrationResult, Estimate, difference, metric_named
from clipwise.report import ArmResults, Run

BINS = (10, 15, 20)
"""Numbers of bins of MCE: the paper does not state its own."""


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
