"""The seeds of one arm as one result to draw: means of the metrics, bins over all seeds, other numbers of bins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

import numpy as np

from clipwise.calibration import Bins, CalibrationResult, summarise

__all__ = ["BIN_CHOICES", "pooled", "rebinned"]

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
