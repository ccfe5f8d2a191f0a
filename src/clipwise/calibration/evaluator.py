"""The evaluation of a classifier: all at once, or batch by batch in bounded memory with the same answer.

That of a regression has errors, and whether Gaussian intervals hold the truth as often as they say.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import special

from clipwise.calibration.bins import equal_edges, summarise
from clipwise.calibration.estimators import (
    GROUPS,
    Groups,
    at_chance,
    binned_errors,
    calibrated_moments,
    normal_gaps,
    pivotal,
    smooth_errors,
    weights,
)
from clipwise.calibration.inputs import ArrayLike, Scores, check_resamples, check_share, vector
from clipwise.calibration.metrics import metric_named, metrics_of
from clipwise.calibration.sums import COLUMNS, ClassSums, Kept, TopSums
from clipwise.calibration.values import CalibrationResult, RegressionResult
from clipwise.errors import DataError

__all__ = ["Evaluator", "evaluate", "evaluate_regression"]

Floats = NDArray[np.float64]

KEEP = 2_000_000
_COLUMNS_AT_ONCE = 1 << 12


def evaluate(
    probabilities: ArrayLike | None = None,
    labels: ArrayLike | None = None,
    *,
    logits: ArrayLike | None = None,
    classes: Sequence[str] | None = None,
    bins: int = 15,
    resamples: int = 0,
    level: float = 0.95,
    seed: int = 0,
) -> CalibrationResult:
    """Accuracy, losses and calibration errors of class probabilities, or of `logits` when named so.

    Scores have the shape (samples, classes): tensors and arrays of any floating-point type, computed in float64. Labels
    are class indices, or names with `classes`, the names of the columns in their order. `resamples=1000` adds bootstrap
    intervals for every metric. `docs/calibration.md` explains what each number means.

    >>> import torch
    >>> result = evaluate(torch.tensor([[0.9, 0.1], [0.1, 0.9], [0.2, 0.8], [0.9, 0.1]]), torch.tensor([0, 1, 1, 1]))
    >>> result.accuracy, round(result.ece, 4), round(result.brier, 4)
    (0.75, 0.225, 0.435)
    >>> evaluate([[0.9, 0.1], [0.4, 0.6]], ["cat", "cat"], classes=["cat", "dog"]).accuracy
    0.5
    """
    evaluator = Evaluator(classes=classes, bins=bins, resamples=resamples, level=level, seed=seed)
    evaluator.update(probabilities, labels, logits=logits)
    return evaluator.result()


class Evaluator:
    """`evaluate` for data that come in batches: `update` with each, then `result`, at any time and as often as wanted.

    Guarantees: memory is bounded however many samples come (11 bytes for each of the first two million, then no more),
    and the answer does not depend, except for rounding, on how they were cut into batches. Adaptive ECE needs the
    confidences themselves: past two million it is computed from a uniform sample of them, and the result's notes say
    so. An update that is refused changes nothing.

    >>> import torch
    >>> evaluator = Evaluator(bins=10)
    >>> for _ in range(3):
    ...     evaluator.update(logits=torch.tensor([[2.0, 0.0], [0.0, 1.0]]), labels=torch.tensor([0, 0]))
    >>> evaluator.result().count, evaluator.result().accuracy
    (6, 0.5)
    """

    def __init__(
        self,
        *,
        classes: Sequence[str] | None = None,
        bins: int = 15,
        resamples: int = 0,
        level: float = 0.95,
        seed: int = 0,
    ) -> None:
        check_resamples(resamples, seed)
        self._names = classes
        self._bins = len(equal_edges(bins)) - 1
        self._resamples, self._level, self._seed = resamples, check_share("level", level), seed
        groups = GROUPS if resamples else 1
        self._top, self._kept = TopSums(bins, groups), Kept(KEEP, seed)
        self._groups = Groups(seed)
        self._classes: ClassSums | None = None
        self._class_count = 0

    def update(
        self,
        probabilities: ArrayLike | None = None,
        labels: ArrayLike | None = None,
        *,
        logits: ArrayLike | None = None,
    ) -> None:
        """Add a batch; arguments as for `evaluate`."""
        batch = Scores(probabilities, logits, labels, self._names)
        if self._classes is None:
            self._class_count = batch.classes
            self._classes = ClassSums(batch.classes, self._bins, len(self._top.totals))
        elif batch.classes != self._class_count:
            raise DataError(f"This batch has {batch.classes} classes, the ones before had {self._class_count}.")
        for rows in batch:
            group = self._groups.take(len(rows.label_B)) if self._resamples else np.zeros(len(rows.label_B), np.int64)
            self._top.add(rows, group)
            self._classes.add(rows, group)
            self._kept.add(rows.confidence_B.numpy(), rows.correct_B.numpy(), group)

    def result(self) -> CalibrationResult:
        """Everything about the samples so far."""
        if self._classes is None:
            raise DataError("Nothing was evaluated yet: call update with a batch first.")
        top, count = self._top, self._kept.seen
        sums = _Sums.of(top, self._classes, self._kept, self._bins)
        whole = {name: float(values[0]) for name, values in _metrics(sums, *_ones(sums)).items()}
        whole["smooth_ece"] = float(smooth_errors(top.cells / count)[0])
        moments, adaptive = top.moments.sum(axis=0).T, sums.adaptive.sum(axis=0).T
        note = f"Adaptive ECE is from a uniform sample of {self._kept.limit:,} of the {count:,} samples."
        return CalibrationResult(
            count=count,
            classes=self._class_count,
            **{metric.name: whole[metric.name] for metric in metrics_of("classification") if metric.name in whole},
            bins=summarise(top.edges, moments[0], moments[1], moments[2], self._level),
            adaptive_bins=summarise(sums.adaptive_edges, adaptive[0], adaptive[1], adaptive[2], self._level),
            fine_bins=summarise(top.fine_edges, top.fine[:, 0], top.fine[:, 1], top.fine[:, 2], self._level),
            true_class_histogram=tuple(int(c) for c in top.true_class),
            intervals=self._intervals(sums, whole) if self._resamples else None,
            level=self._level,
            resamples=self._resamples,
            notes=() if self._kept.complete else (note,),
        )

    def _intervals(self, sums: _Sums, whole: dict[str, float]) -> dict[str, tuple[float, float]]:
        weight, class_weight = (
            weights(len(group_sums), self._resamples, self._seed) for group_sums in (sums.totals, sums.class_counts)
        )
        replicates = _metrics(sums, weight, class_weight) | {"smooth_ece": _coarse_smooth(sums, weight)}
        # The truth of the bootstrap's world is the plug-in value, also for an estimate that corrects it.
        world = whole | {"debiased_ece": whole["ece"], "debiased_rmsce": whole["rmsce"]}
        world["smooth_ece"] = float(_coarse_smooth(sums, _ones(sums)[0])[0])
        found = {
            m.name: pivotal(whole[m.name], world[m.name], replicates[m.name], self._level, m.bounds)
            for m in metrics_of("classification")
            if m.name in whole
        }
        for name, errors in self._by_chance(sums).items():
            if name in found and at_chance(whole[name], errors, self._level):
                found[name] = (0.0, found[name][1])  # where the bootstrap fails: at the boundary of perfect calibration
        return found

    def _by_chance(self, sums: _Sums) -> dict[str, Floats]:
        """The calibration errors of resamples in which the model is calibrated."""
        random, count = np.random.default_rng([self._seed, 4]), sums.totals[:, 0].sum()
        moments, adaptive = (
            calibrated_moments(m.sum(axis=0), random, self._resamples) for m in (sums.moments, sums.adaptive)
        )
        found = binned_errors(moments) | {"adaptive_ece": binned_errors(adaptive)["ece"]}
        cells = normal_gaps(self._top.chance_cells[0], random, self._resamples)
        found["smooth_ece"] = smooth_errors(cells / count, halvings=12)
        gaps = np.zeros(self._resamples)
        for part in _parts(sums.class_chance):
            gaps += np.abs(normal_gaps(part, random, self._resamples)).sum(axis=1)
        return found | {"classwise_ece": gaps / count / sums.classes}


@dataclass(frozen=True)
class _Sums:
    """Sums by group, without the groups that no sample is in."""

    totals: Floats
    moments: Floats
    cells: Floats
    adaptive_edges: Floats
    adaptive: Floats
    class_counts: Floats
    class_gaps: Floats
    class_chance: Floats
    classes: int

    @classmethod
    def of(cls, top: TopSums, by_class: ClassSums, kept: Kept, bins: int) -> _Sums:
        edges, adaptive = kept.moments(bins, len(top.totals))
        used, class_used = top.totals[:, 0] > 0, by_class.counts > 0
        return cls(
            totals=top.totals[used],
            moments=top.moments[used],
            cells=top.group_cells[used],
            adaptive_edges=edges,
            adaptive=adaptive[used],
            class_counts=by_class.counts[class_used],
            class_gaps=by_class.gaps()[class_used],
            class_chance=by_class.chance(),
            classes=by_class.classes,
        )


def _ones(sums: _Sums) -> tuple[Floats, Floats]:
    """The weights that take every group once."""
    return np.ones((1, len(sums.totals))), np.ones((1, len(sums.class_counts)))


def _parts(columns: Floats) -> Iterator[Floats]:
    """Some columns at a time, so that the resamples of many need little memory."""
    for first in range(0, columns.shape[-1], _COLUMNS_AT_ONCE):
        yield columns[..., first : first + _COLUMNS_AT_ONCE]


def _coarse_smooth(sums: _Sums, weight_RG: Floats) -> Floats:
    """The smooth ECE for each row of weights, on the coarser grid that is kept for every group."""
    return smooth_errors(weight_RG @ sums.cells / (weight_RG @ sums.totals[:, :1]), halvings=12)


def _metrics(sums: _Sums, weight_RG: Floats, class_weight_RG: Floats) -> dict[str, Floats]:
    """Every metric but the smooth ECE, for each row of weights."""
    with np.errstate(invalid="ignore"):  # an infinite loss that is not drawn is 0 * inf; `pivotal` sees it
        totals = weight_RG @ sums.totals
    found = {name: totals[:, column] / totals[:, 0] for column, name in enumerate(COLUMNS)}

    def binned(moments_GM4: Floats) -> dict[str, Floats]:
        flat = weight_RG @ moments_GM4.reshape(len(moments_GM4), -1)
        return binned_errors(flat.reshape(len(weight_RG), *moments_GM4.shape[1:]))

    found |= binned(sums.moments)
    found["adaptive_ece"] = binned(sums.adaptive)["ece"]
    gaps = np.zeros(len(class_weight_RG))
    for part in _parts(sums.class_gaps):
        gaps += np.abs(class_weight_RG @ part).sum(axis=1)
    found["classwise_ece"] = gaps / (class_weight_RG @ sums.class_counts) / sums.classes
    return found


def evaluate_regression(
    predictions: ArrayLike,
    targets: ArrayLike,
    *,
    std: ArrayLike | float | None = None,
    levels: Sequence[float] = (0.5, 0.8, 0.9, 0.95),
    resamples: int = 0,
    level: float = 0.95,
    seed: int = 0,
) -> RegressionResult:
    """Mean squared error and R^2; with `std` also the Gaussian NLL and the share of targets in prediction +- z * std.

    `std` is the predicted standard deviation, one number or one per sample; `levels` are the nominal probabilities of
    the central intervals. `resamples=1000` adds bootstrap intervals, whose probability is `level`.

    >>> result = evaluate_regression([1.0, 2.0, 3.0], [1.5, 2.0, 2.0], std=0.5, levels=[0.5, 0.9])
    >>> round(result.mse, 4), result.coverage
    (0.4167, {0.5: 0.3333333333333333, 0.9: 0.6666666666666666})
    """
    check_resamples(resamples, seed)
    check_share("level", level)
    target_B = vector("targets", targets)
    error_B = vector("predictions", predictions, len(target_B)) - target_B
    columns = {"error": error_B**2, "target": target_B - target_B.mean(), "square": (target_B - target_B.mean()) ** 2}
    nominal = [check_share("a level of coverage", share) for share in levels]
    if std is not None:
        columns |= _interval_columns(error_B, vector("std", std, len(target_B)), nominal)
    names, values_BX = list(columns), np.stack([np.ones_like(error_B), *columns.values()], axis=1)
    whole = {
        name: float(value[0])
        for name, value in _regression_metrics(names, values_BX.sum(axis=0, keepdims=True)).items()
    }
    varied = bool(np.ptp(target_B) > 0)
    if not varied:
        whole.pop("r2")
    return RegressionResult(
        count=len(target_B),
        mse=whole["mse"],
        rmse=whole["rmse"],
        r2=whole.get("r2"),
        nll=whole.get("nll"),
        coverage={share: whole[_name(share)] for share in nominal if std is not None},
        intervals=_intervals(names, values_BX, whole, resamples, level, seed) if resamples else None,
        level=level,
        resamples=resamples,
    )


def _name(share: float) -> str:
    return f"coverage {share:g}"


def _interval_columns(error_B: Floats, std_B: Floats, levels: Sequence[float]) -> dict[str, Floats]:
    if not (std_B > 0).all():
        raise DataError(f"std must be positive, got {float(std_B.min()):g}.")
    score_B = np.abs(error_B) / std_B
    nll_B = 0.5 * score_B**2 + np.log(std_B) + 0.5 * math.log(2.0 * math.pi)
    inside = {_name(share): (score_B <= special.ndtri(0.5 * (1.0 + share))).astype(np.float64) for share in levels}
    return {"nll": nll_B, **inside}


def _regression_metrics(names: Sequence[str], sums_RX: Floats) -> dict[str, Floats]:
    """The metrics from sums over samples; the first column counts them."""
    mean = dict(zip(names, sums_RX[:, 1:].T / sums_RX[:, 0], strict=True))
    spread = mean.pop("square") - mean.pop("target") ** 2
    mse = mean.pop("error")
    r2 = 1.0 - np.divide(mse, spread, out=np.full_like(mse, np.inf), where=spread > 0)
    return {"mse": mse, "rmse": np.sqrt(mse), "r2": r2, **mean}


def _intervals(
    names: Sequence[str], values_BX: Floats, whole: dict[str, float], resamples: int, level: float, seed: int
) -> dict[str, tuple[float, float]]:
    group_B = Groups(seed).take(len(values_BX))
    sums_GX = np.stack([np.bincount(group_B, weights=column, minlength=GROUPS) for column in values_BX.T], axis=1)
    sums_GX = sums_GX[sums_GX[:, 0] > 0]
    replicates = _regression_metrics(names, weights(len(sums_GX), resamples, seed) @ sums_GX)
    return {
        name: pivotal(value, value, replicates[name], level, metric_named(name, "regression").bounds)
        for name, value in whole.items()
    }
