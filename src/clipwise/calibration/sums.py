"""What an evaluation keeps of the samples it has seen: sums by group, bin and class, and some of the confidences."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from clipwise.calibration import estimators as est
from clipwise.calibration.bins import FINE_BINS, bin_of, equal_edges
from clipwise.calibration.estimators import grid_shares
from clipwise.calibration.inputs import SampleScores

__all__ = ["COLUMNS", "ClassSums", "Kept", "TopSums"]

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

COLUMNS = ("count", "accuracy", "confidence", "nll", "brier")
"""The columns of `TopSums.totals`."""

CELLS = 1 << 14
COARSE_CELLS = 1 << 9
_CLASSWISE_NUMBERS = 1 << 22
_CLASSWISE_GROUPS = 50


class TopSums:
    """Sums that need a sample's confidence, whether it is right, and its losses. The first axis is the group."""

    def __init__(self, bins: int, groups: int) -> None:
        self.edges, self.fine_edges = equal_edges(bins), equal_edges(FINE_BINS)
        self.totals = np.zeros((groups, len(COLUMNS)))
        self.moments = np.zeros((groups, bins, est.MOMENTS))
        self.fine = np.zeros((FINE_BINS, est.MOMENTS))
        self.true_class = np.zeros(bins, dtype=np.int64)
        self.cells = np.zeros((1, CELLS))
        self.group_cells = np.zeros((groups, COARSE_CELLS))
        self.chance_cells = np.zeros((1, COARSE_CELLS))

    def add(self, rows: SampleScores, group: Integers) -> None:
        confidence, correct = rows.confidence_B.numpy(), rows.correct_B.numpy().astype(np.float64)
        gap = confidence - correct
        one, *_, chance = moments = est.sample_moments(confidence, correct)
        for column, values in enumerate((one, correct, confidence, rows.nll_B.numpy(), rows.brier_B.numpy())):
            _add(self.totals[:, column], group, values)
        place, fine_place = bin_of(confidence, self.edges), bin_of(confidence, self.fine_edges)
        for column, values in enumerate(moments):
            np.add.at(self.moments[:, :, column], (group, place), values)
            _add(self.fine[:, column], fine_place, values)
        self.true_class += np.bincount(bin_of(rows.true_B.numpy(), self.edges), minlength=len(self.true_class))
        self._spread(self.cells, np.zeros_like(group), confidence, gap)
        self._spread(self.group_cells, group, confidence, gap)
        self._spread(self.chance_cells, np.zeros_like(group), confidence, chance)

    @staticmethod
    def _spread(cells: Floats, group: Integers, confidence: Floats, values: Floats) -> None:
        left, right, share = grid_shares(confidence, cells.shape[1])
        np.add.at(cells, (group, left), values * (1.0 - share))
        np.add.at(cells, (group, right), values * share)


def _add(target: Floats, index: NDArray[np.integer], values: Floats) -> None:
    target += np.bincount(index, weights=values, minlength=len(target))


class ClassSums:
    """Sums of the gap (probability minus 1 for the true class) by group, class and bin of that class's probability.

    A row sums to 1, so at most M of its probabilities lie above the first bin: those are handled one by one, and the
    first bin gets the rest of the column sums.
    """

    def __init__(self, classes: int, bins: int, groups: int) -> None:
        self.classes = classes
        self.groups = min(groups, max(_CLASSWISE_GROUPS, _CLASSWISE_NUMBERS // (classes * bins)))
        self._edges = torch.from_numpy(equal_edges(bins))
        self._gaps = torch.zeros(self.groups, classes, bins, dtype=torch.float64)
        self._columns = torch.zeros(self.groups, classes, dtype=torch.float64)
        self._chance = torch.zeros(1, classes, bins, dtype=torch.float64)
        self.counts = np.zeros(self.groups)

    def add(self, rows: SampleScores, group: Integers) -> None:
        fewer = group % self.groups
        _add(self.counts, fewer, np.ones(len(group)))
        group_B = torch.from_numpy(fewer)
        row, column = (rows.probabilities > self._edges[1]).nonzero(as_tuple=True)
        value = rows.probabilities[row, column]
        place = torch.bucketize(value, self._edges[1:-1])
        _move(self._gaps, group_B[row], column, place, value)
        _scatter(
            self._gaps,
            group_B,
            rows.label_B,
            torch.bucketize(rows.true_B, self._edges[1:-1]),
            -torch.ones_like(rows.true_B),
        )
        if self.groups == 1:
            self._columns += rows.probabilities.sum(dim=0)
            return
        self._columns.index_add_(0, group_B, rows.probabilities)
        self._chance[0, :, 0] += (
            rows.probabilities.sum(dim=0) - torch.linalg.vector_norm(rows.probabilities, dim=0) ** 2
        )
        _move(self._chance, torch.zeros_like(row), column, place, value * (1 - value))

    def gaps(self) -> Floats:
        """Shape (groups, classes * bins)."""
        gaps = self._gaps.clone()
        gaps[:, :, 0] += self._columns
        array: Floats = gaps.flatten(1).numpy()
        return array

    def chance(self) -> Floats:
        """The variance of the gaps if the model were calibrated, shape (classes * bins,); only with several groups."""
        array: Floats = self._chance.flatten().clamp(min=0).numpy()
        return array


def _scatter(target: Tensor, group: Tensor, column: Tensor, place: Tensor, value: Tensor) -> None:
    _, classes, bins = target.shape
    target.view(-1).index_add_(0, (group * classes + column) * bins + place, value)


def _move(target: Tensor, group: Tensor, column: Tensor, place: Tensor, value: Tensor) -> None:
    """Into the bin `place`, out of the first."""
    _scatter(target, group, column, place, value)
    _scatter(target, group, column, torch.zeros_like(place), -value)


class Kept:
    """Confidences, whether they were right, and their groups; past `limit` samples a uniform sample (a reservoir)."""

    def __init__(self, limit: int, seed: int) -> None:
        self.limit = limit
        self.seen = 0
        self._random = np.random.default_rng([seed, 3])
        self._columns: list[NDArray[Any]] = [np.empty(0), np.empty(0, np.bool_), np.empty(0, np.int16)]

    def add(self, confidence: Floats, correct: NDArray[np.bool_], group: Integers) -> None:
        new: tuple[NDArray[Any], ...] = (confidence, correct, group.astype(np.int16))
        fill = min(len(confidence), max(0, self.limit - self.seen))
        self._reserve(self.seen + fill)
        index = np.arange(self.seen, self.seen + len(confidence))
        place = index.copy()
        place[fill:] = self._random.random(len(confidence) - fill) * (index[fill:] + 1)
        chosen = place < self.limit
        for column, values in zip(self._columns, new, strict=True):
            column[place[chosen]] = values[chosen]  # of equal places the last wins, as one by one
        self.seen += len(confidence)

    def _reserve(self, size: int) -> None:
        if size > len(self._columns[0]):
            room = min(self.limit, max(size, 2 * len(self._columns[0])))
            self._columns = [np.concatenate([c, np.empty(room - len(c), c.dtype)]) for c in self._columns]

    @property
    def complete(self) -> bool:
        """Whether every sample is here."""
        return self.seen <= self.limit

    def moments(self, bins: int, groups: int) -> tuple[Floats, Floats]:
        """Edges of bins of equal mass, and the moments (groups, bins, 5) of the kept samples in them."""
        confidence, correct, group = (c[: min(self.seen, self.limit)] for c in self._columns)
        edges = est.adaptive_edges(confidence, bins)
        cell = group.astype(np.int64) * bins + bin_of(confidence, edges)
        values = est.sample_moments(confidence, correct.astype(np.float64))
        sums = [np.bincount(cell, weights=v, minlength=groups * bins) for v in values]
        moments: Floats = np.stack(sums, axis=-1, dtype=np.float64).reshape(groups, bins, est.MOMENTS)
        return edges, moments
