"""Runs with equal names are seeds of one arm: means, deviations and intervals over the seeds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from clipwise._validate import is_number
from clipwise.calibration import CalibrationResult, Estimate, estimates_of
from clipwise.errors import DataError
from clipwise.plots import Curve, Point
from clipwise.report.describe import clip_norm
from clipwise.report.likeness import differing, same_plan
from clipwise.report.run import Run
from clipwise.report.wording import best_of, epsilon_text

__all__ = ["ArmResults", "arms_of"]


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

    @property
    def point(self) -> Point:
        """The arm's choices and metrics."""
        return Point(self.name, self.clip_norm, self.learning_rate, self.estimates)

    def curve(self, section: str, metric: str) -> Curve | None:
        """`metric` of `section` ("test" or "private") over the steps that every seed recorded; None if none did."""
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
