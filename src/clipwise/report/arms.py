"""Runs with equal names are seeds of one arm: what they share, means and intervals over them, and their bins."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean
from typing import Any

import numpy as np

from clipwise._validate import is_number
from clipwise.calibration import Bins, CalibrationResult, Estimate, estimates_of, summarise
from clipwise.errors import DataError
from clipwise.plots import Curve, Point
from clipwise.report.plans import items_of, parts_of
from clipwise.report.run import Run
from clipwise.report.wording import best_of, clip_norm, epsilon_text

__all__ = ["BIN_CHOICES", "ArmResults", "arms_of", "differing", "pooled", "rebinned", "same_data", "same_plan"]


@dataclass(frozen=True)
class ArmResults:
    """The runs of one name: seeds of one experiment."""

    name: str
    runs: tuple[Run, ...]

    @property
    def first(self) -> Run:
        """The run that speaks for what all seeds share: plan, data, whether it is private."""
        return self.runs[0]

    @cached_property
    def dearest(self) -> Run:
        """The run that speaks for the privacy: a seed that was interrupted and resumed may have released more."""
        return max(self.runs, key=lambda run: math.inf if (cost := _epsilon(run)) is None else cost)

    @property
    def clip_norm(self) -> float | None:
        """R, where the plan has a single one."""
        return clip_norm(self.first.plan)

    @property
    def learning_rate(self) -> float | None:
        """The learning rate, where it is one number."""
        rate = self.first.choices.learning_rate
        return float(rate) if is_number(rate) else None

    @property
    def epsilon(self) -> float | None:
        """The largest epsilon of the seeds, by the exact accountant or else the smallest bound; None: not private."""
        return _epsilon(self.dearest)

    @property
    def epsilon_text(self) -> str:
        """Epsilon as tables have it."""
        if not self.first.is_private:
            return "not private" if self.first.is_known else "unknown"
        return epsilon_text(self.dearest.guarantees)

    @cached_property
    def estimates(self) -> dict[str, Estimate]:
        """Every metric on the held-out data."""
        return estimates_of([run.test for run in self.runs])

    @cached_property
    def saved(self) -> tuple[str, dict[str, Estimate]] | None:
        """The recalibration that the saved models predict with, and every metric after it; None: as trained."""
        methods = {run.provenance.get("recalibration") for run in self.runs}
        (method,) = methods if len(methods) == 1 else (None,)
        if not isinstance(method, str) or any(method not in run.recalibrated for run in self.runs):
            return None
        return method, estimates_of([run.recalibrated[method] for run in self.runs])

    @property
    def point(self) -> Point:
        """The arm's choices and metrics."""
        return Point(self.name, self.clip_norm, self.learning_rate, self.estimates)

    def curve(self, section: str, metric: str) -> Curve | None:
        """`metric` of `section` ("test", "released" or "private") over the steps that every seed recorded, if any."""
        tables = [_column(run.curves, section, metric) for run in self.runs]
        steps = sorted(set.intersection(*(set(table) for table in tables)))
        if not steps:
            return None
        values = np.array([[table[step] for step in steps] for table in tables])
        mean = values.mean(axis=0)
        if len(tables) == 1:
            return Curve(tuple(steps), _optional(mean))
        spread = values.std(axis=0, ddof=1)
        return Curve(tuple(steps), _optional(mean), _optional(mean - spread), _optional(mean + spread))

    def metrics_in(self, section: str) -> tuple[str, ...]:
        """The names of the numbers that the curves have in `section`, in order."""
        found: dict[str, None] = {}
        for run in self.runs:
            for row in run.curves:
                found.update(dict.fromkeys(_numbers_in(row.get(section))))
        return tuple(found)


def arms_of(runs: Iterable[Run]) -> tuple[ArmResults, ...]:
    """Group runs by name, in the order of their first appearance; arms that cannot be compared are refused."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.name, []).append(run)
    if not groups:
        raise DataError("there is no run to report on; give at least one.")
    arms = tuple(ArmResults(name, tuple(group)) for name, group in groups.items())
    tasks = {run.task for arm in arms for run in arm.runs}
    if len(tasks) > 1:
        raise DataError("runs of classification and of regression cannot be compared; report on them apart.")
    for arm in arms:
        _check_seeds(arm)
    return arms


def _check_seeds(arm: ArmResults) -> None:
    """Runs of one name must differ only in their seed."""
    first = arm.first
    for run in arm.runs[1:]:
        if not same_plan(run, first):
            raise DataError(
                f"two runs are named {arm.name!r} but have different plans, so they are not seeds of one arm. "
                "Give them different names."
            )
        if run.is_private != first.is_private:
            raise DataError(f"of the runs named {arm.name!r} some are private and some are not. Give them other names.")
        if isinstance(run.test, CalibrationResult) and isinstance(first.test, CalibrationResult):
            same = run.test.bins.edges == first.test.bins.edges and run.test.count == first.test.count
        else:
            same = run.test.count == first.test.count
        if not same:
            raise DataError(f"the runs named {arm.name!r} were judged on different data or in different bins.")
        others = [what for what in differing([first, run]) if what in ("data", "model")]
        if others:
            raise DataError(
                f"two runs are named {arm.name!r} but differ in their {' and '.join(others)}, so they are not seeds of "
                "one arm. Give them different names."
            )


def _epsilon(run: Run) -> float | None:
    if not run.is_private:
        return None
    best = best_of(run.guarantees)
    return None if best is None else best.epsilon


def _numbers_in(record: Any, prefix: str = "") -> dict[str, float]:
    """The numbers of a row by name, nested ones as "ntk smallest"; layers have a separate table."""
    found: dict[str, float] = {}
    for key, value in (record or {}).items():
        if isinstance(value, Mapping) and key != "layers":
            found.update(_numbers_in(value, f"{prefix}{key} "))
        elif is_number(value):
            found[f"{prefix}{key}"] = float(value)
    return found


def _column(rows: Sequence[Mapping[str, Any]], section: str, metric: str) -> dict[float, float]:
    numbers = [(float(row["step"]), _numbers_in(row.get(section))) for row in rows]
    return {step: each[metric] for step, each in numbers if metric in each}


def _optional(values: Any) -> tuple[float | None, ...]:
    return tuple(float(v) if math.isfinite(v) else None for v in values)


_RATE = re.compile(r"\blr=[^,)]*")


def same_data(runs: Sequence[Run]) -> bool:
    """Whether, as far as the runs tell, all were judged on the same held-out records."""
    return "data" not in differing(runs)


def differing(runs: Sequence[Run]) -> list[str]:
    """In what runs differ beside R, the learning rate and the seed; what a run does not say is not a difference.

    >>> import clipwise as cw
    >>> test = cw.calibration.RegressionResult(count=9, mse=1.0, rmse=1.0, r2=0.0)
    >>> plans = [cw.Plan(cw.FullBatch(10), n, cw.Abadi(float(n)), 1.0) for n in (5, 6)]
    >>> differing([Run("a", test, plan) for plan in plans])
    ['steps']
    """
    facts = [_facts(run) for run in runs]
    names = dict.fromkeys(name for each in facts for name in each)
    return [name for name in names if len({repr(each[name]) for each in facts if each.get(name) is not None}) > 1]


def _facts(run: Run) -> dict[str, Any]:
    data = run.provenance.get("data")
    known = data if isinstance(data, Mapping) else {"name": data}
    chosen = {**items_of(run.plan), **run.choices.to_dict()}
    plan = {name.replace("_", " "): _form(value) for name, value in chosen.items() if name != "learning_rate"}
    if run.choices.optimizer is not None:
        plan["optimizer"] = _RATE.sub("lr", run.choices.optimizer)
    return {
        "data": None if not data else (known.get("name"), run.fingerprint, run.test.count),
        "model": run.provenance.get("model"),
        **plan,
        "clip": _form(run.plan.clip, without="R"),
    }


def same_plan(one: Run, other: Run) -> bool:
    """Whether two runs were planned alike, the learning rate included."""
    return _planned(one) == _planned(other)


def _planned(run: Run) -> tuple[Any, ...]:
    return _form(items_of(run.plan)), _form(run.choices.to_dict()), run.delta


def _form(value: Any, without: str = "") -> Any:
    """A value and one that was written down in the same form; one rule for all parameters is so also without `Flat`.

    >>> from clipwise import Abadi, Flat
    >>> _form(Flat(Abadi(0.5))) == _form(Abadi(0.5)), _form(Abadi(0.5), without="R")
    (True, ('Abadi', {}))
    """
    if isinstance(value, Mapping):
        return {key: _form(item) for key, item in value.items()}
    parts = parts_of(value)
    if parts is None:
        return value
    kind, values = parts
    if kind == "Flat" and "rule" in values:
        return _form(values["rule"], without)
    return kind, {name: _form(item) for name, item in values.items() if name != without}


BIN_CHOICES = (5, 10, 15, 30)
"""Numbers of bins that a reader may choose from; all divide the 60 fine ones of a result."""


def pooled(results: Sequence[CalibrationResult]) -> CalibrationResult:
    """One result that stands for several seeds judged on the same data.

    Metrics are means over the seeds. A bin's count is the mean count (rounded up) and not the sum, because the seeds
    see the same samples: summing would make the band of its accuracy too narrow.
    """
    first = results[0]
    if len(results) == 1:
        return first
    means: dict[str, Any] = {name: fmean(result.metrics[name] for result in results) for name in first.metrics}
    return replace(
        first,
        **means,
        bins=_pooled_bins([result.bins for result in results]),
        fine_bins=_pooled_bins([result.fine_bins for result in results]),
        true_class_histogram=tuple(np.sum([result.true_class_histogram for result in results], axis=0).tolist()),
        intervals=None,
        resamples=0,
    )


def rebinned(results: Sequence[CalibrationResult], bins: int) -> CalibrationResult:
    """The pooled result with this number of bins, and the mean over the seeds of the errors in those."""
    merged = [replace(result, bins=_merged(result, bins)) for result in results]
    ece, mce = (fmean(getattr(result.bins, name) for result in merged) for name in ("ece", "mce"))
    return replace(pooled(merged), ece=ece, mce=mce)


def _merged(result: CalibrationResult, bins: int) -> Bins:
    return result.bins if bins == len(result.bins) else result.fine_bins.merged(bins)


def _pooled_bins(bins: Sequence[Bins]) -> Bins:
    counts = np.array([each.count for each in bins])
    total = counts.sum(axis=0)
    weights = counts / np.where(total > 0, total, 1)
    mean = -(-total // len(bins))
    sums = []
    for name in ("confidence", "accuracy"):
        values = np.nan_to_num(np.array([getattr(each, name) for each in bins], dtype=np.float64))
        sums.append((values * weights).sum(axis=0) * mean)
    return summarise(bins[0].edges, mean, sums[0], sums[1], bins[0].level)
