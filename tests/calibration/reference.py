"""Calibration metrics written out by hand, sample by sample, and data whose true calibration error is known."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray
from scipy import integrate

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


def bin_number(value: float, bins: int) -> int:
    """From 0; right-closed, with 0 in the first. An edge is the float64 that is nearest to m/M."""
    for m in range(bins):
        if value <= float(Fraction(m + 1, bins)):
            return m
    return bins - 1


def top(probabilities: Floats, labels: Integers) -> list[tuple[float, bool]]:
    """(confidence, right) of each sample; of equal probabilities the first class is predicted."""
    pairs = []
    for row, label in zip(probabilities.tolist(), labels.tolist(), strict=True):
        predicted = row.index(max(row))
        pairs.append((row[predicted], predicted == label))
    return pairs


def binned(pairs: Sequence[tuple[float, bool]], bins: int) -> list[list[tuple[float, bool]]]:
    found: list[list[tuple[float, bool]]] = [[] for _ in range(bins)]
    for confidence, right in pairs:
        found[bin_number(confidence, bins)].append((confidence, right))
    return found


def gap(samples: Sequence[tuple[float, bool]]) -> float:
    """Mean confidence minus accuracy."""
    return math.fsum(c - r for c, r in samples) / len(samples)


def reference(probabilities: Floats, labels: Integers, bins: int) -> dict[str, float]:
    pairs = top(probabilities, labels)
    n, classes = probabilities.shape
    filled = [samples for samples in binned(pairs, bins) if samples]
    nll, brier = 0.0, 0.0
    for row, label in zip(probabilities.tolist(), labels.tolist(), strict=True):
        nll += math.inf if row[label] == 0 else -math.log(row[label])
        brier += math.fsum((p - (k == label)) ** 2 for k, p in enumerate(row))
    by_class = 0.0
    for k in range(classes):
        one_against_rest = [
            (row[k], label == k) for row, label in zip(probabilities.tolist(), labels.tolist(), strict=True)
        ]
        by_class += sum(abs(gap(s)) * len(s) / n for s in binned(one_against_rest, bins) if s)
    return {
        "accuracy": sum(right for _, right in pairs) / n,
        "confidence": math.fsum(c for c, _ in pairs) / n,
        "nll": nll / n,
        "brier": brier / n,
        "ece": math.fsum(abs(gap(s)) * len(s) / n for s in filled),
        "mce": max(abs(gap(s)) for s in filled),
        "classwise_ece": by_class / classes,
    }


def smooth_reference(confidence: Floats, right: NDArray[np.bool_], width: float) -> float:
    """smECE_s by quadrature: the integral of |mean gap spread by a Gaussian, reflected at 0 and 1|."""
    gaps = confidence - right

    def density(t: float) -> float:
        images = np.concatenate([2 * k + sign * confidence for k in range(-3, 4) for sign in (1, -1)])
        kernel = np.exp(-0.5 * ((t - images) / width) ** 2).reshape(-1, len(confidence)).sum(axis=0)
        return abs(float(gaps @ kernel)) / (len(gaps) * width * math.sqrt(2 * math.pi))

    grid = np.linspace(0.0, 1.0, 4001)
    return float(integrate.simpson([density(t) for t in grid], x=grid))


def softmax(logits: Floats) -> Floats:
    shifted = np.exp(logits - logits.max(axis=1, keepdims=True))
    return shifted / shifted.sum(axis=1, keepdims=True)


def draw_labels(random: np.random.Generator, probabilities: Floats) -> Integers:
    """Labels that have these probabilities."""
    below = probabilities.cumsum(axis=1) < random.random((len(probabilities), 1))
    return np.minimum(below.sum(axis=1), probabilities.shape[1] - 1)


def samples(seed: int, n: int = 400, classes: int = 5, sharpness: float = 1.5) -> tuple[Floats, Integers]:
    """Probabilities of a model that is too sure (sharpness over 1), and labels."""
    random = np.random.default_rng(seed)
    logits = 2.0 * random.standard_normal((n, classes))
    return softmax(sharpness * logits), draw_labels(random, softmax(logits))


@dataclass(frozen=True)
class Known:
    """Two classes; the confidence c is uniform on [0.5, 1], and the accuracy there is c - bend * (c - 0.5)."""

    bend: float

    def draw(self, seed: int, n: int) -> tuple[Floats, Integers]:
        random = np.random.default_rng(seed)
        confidence = 0.5 + 0.5 * random.random(n)
        right = random.random(n) < confidence - self.bend * (confidence - 0.5)
        predicted = random.integers(0, 2, n)
        probabilities = np.where(np.arange(2) == predicted[:, None], confidence[:, None], 1 - confidence[:, None])
        return probabilities, np.where(right, predicted, 1 - predicted)

    @property
    def ece(self) -> float:
        """E |c - accuracy(c)|; the gap never changes sign, so bins do not change it."""
        return self.bend * 0.25

    def rmsce(self, bins: int) -> float:
        """The root mean square over bins of the true mean gap; bins of the confidence in [0, 1]."""
        edges = np.clip(np.arange(bins + 1) / bins, 0.5, 1.0)
        share = np.diff(edges) / 0.5
        middle = 0.5 * (edges[1:] + edges[:-1])
        return float(np.sqrt(np.sum(share * (self.bend * (middle - 0.5)) ** 2)))
