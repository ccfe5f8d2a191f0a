"""Bins of the confidence: the first is [0, 1/M], the others ((m-1)/M, m/M]. What they count, and how sure that is."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy import special, stats

from clipwise._json import Fields
from clipwise._validate import is_count, is_finite
from clipwise.errors import DataError

__all__ = ["FINE_BINS", "Bins", "bin_of", "equal_edges", "summarise"]

Floats = NDArray[np.float64]
MaybeFloats = tuple[float | None, ...]

FINE_BINS = 60
"""Of the bins that a result keeps to be merged."""


@dataclass(frozen=True)
class Bins:
    """Counts, mean confidence and accuracy of bins ((m-1)/M, m/M]; `None` stands where a bin is empty.

    `accuracy_low` to `accuracy_high` is where the bin's true accuracy lies (Wilson's score interval, Wilson 1927).
    `consistent_low` to `consistent_high` is where its measured accuracy would lie if the model were calibrated: the
    consistency bar of Bröcker & Smith (2007) given the bin's size and mean confidence, from binomial quantiles. Both
    hold for one bin at the probability `level`, not for all bins together.

    >>> bins = Bins(edges=(0.0, 0.5, 1.0), count=(0, 4), confidence=(None, 0.9), accuracy=(None, 0.5))
    >>> round(bins.ece, 6), round(bins.mce, 6)
    (0.4, 0.4)
    """

    edges: tuple[float, ...]
    count: tuple[int, ...]
    confidence: MaybeFloats
    accuracy: MaybeFloats
    accuracy_low: MaybeFloats = ()
    accuracy_high: MaybeFloats = ()
    consistent_low: MaybeFloats = ()
    consistent_high: MaybeFloats = ()
    level: float = 0.95

    def __post_init__(self) -> None:
        bands = ("accuracy_low", "accuracy_high", "consistent_low", "consistent_high")
        for name in ("edges", "count", "confidence", "accuracy", *bands):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        sizes = {len(getattr(self, name)) for name in ("count", "confidence", "accuracy")}
        sizes |= {len(getattr(self, name)) for name in bands if getattr(self, name)}
        if sizes != {len(self.edges) - 1}:
            raise DataError(
                f"Bins need M + 1 edges and M of everything else, got {len(self.edges)} edges and {sorted(sizes)}."
            )

    def __len__(self) -> int:
        return len(self.count)

    @property
    def gap(self) -> MaybeFloats:
        """Confidence minus accuracy of each bin: positive where the model is too sure of itself."""
        pairs = zip(self.confidence, self.accuracy, strict=True)
        return tuple(None if c is None or a is None else c - a for c, a in pairs)

    def mean(self, name: Literal["confidence", "accuracy"]) -> float:
        """The mean over all samples."""
        weighted = zip(self.count, getattr(self, name), strict=True)
        return math.fsum(n * share for n, share in weighted if share is not None) / sum(self.count)

    @property
    def ece(self) -> float:
        """Expected calibration error over these bins: the mean of `|gap|`, weighted by the bins' counts."""
        weighted = zip(self.count, self.gap, strict=True)
        return math.fsum(n * abs(g) for n, g in weighted if g is not None) / sum(self.count)

    @property
    def mce(self) -> float:
        """Maximum calibration error over these bins: the largest `|gap|`."""
        return max(abs(g) for g in self.gap if g is not None)

    def merged(self, bins: int) -> Bins:
        """The same samples in fewer bins of equal width, whose number must divide the present one.

        >>> fine = summarise([0.0, 0.25, 0.5, 0.75, 1.0], [0, 0, 2, 2], [0.0, 0.0, 1.4, 1.8], [0.0, 0.0, 1.0, 2.0])
        >>> fine.merged(2).count, fine.merged(2).accuracy
        ((0, 4), (None, 0.75))
        """
        if not is_count(bins) or len(self) % bins:
            raise DataError(f"{len(self)} bins can be merged into a number that divides {len(self)}, got {bins!r}.")
        count = np.array(self.count, dtype=np.int64)
        sums = [np.nan_to_num(np.array(s, dtype=np.float64)) * count for s in (self.confidence, self.accuracy)]
        step = len(self) // bins
        n, confidence, correct = (a.reshape(bins, step).sum(axis=1) for a in (count, *sums))
        return summarise(self.edges[::step], n, confidence, correct, self.level)

    def to_dict(self) -> dict[str, Any]:
        """The bins as a JSON object."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Bins:
        """Read what `to_dict` wrote; unknown and missing fields are refused."""
        given = Fields(record, "Bins", [f.name for f in fields(cls)])
        edges = given.many("edges", is_finite, "numbers")
        count = given.many("count", lambda n: is_count(n, 0) and n <= _MOST, "counts")
        if not edges or sorted(edges) != edges:
            given.fail("edges", "numbers in increasing order")
        if not 0 < sum(count) <= _MOST:
            given.fail("count", "the counts of some samples")
        shares = {name: given.many(name, _is_share, "shares or null") for name in _SHARES}
        for name in ("confidence", "accuracy"):
            if [share is None for share in shares[name]] != [not n for n in count]:
                given.fail(name, "null where a bin is empty, and nowhere else")
        return cls(edges=edges, count=count, **shares, level=given.number("level", 0.0, 1.0))  # type: ignore[arg-type]


_MOST = 10**15
_SHARES = ("confidence", "accuracy", "accuracy_low", "accuracy_high", "consistent_low", "consistent_high")


def _is_share(value: object) -> bool:
    return value is None or (is_finite(value) and 0.0 <= value <= 1.0)


def equal_edges(bins: int) -> Floats:
    """0, 1/M, ..., 1, each rounded correctly, so that m/M is the same number whatever M it came from.

    >>> equal_edges(4).tolist()
    [0.0, 0.25, 0.5, 0.75, 1.0]
    """
    if not is_count(bins) or bins > 10_000:
        raise DataError(f"bins must be an integer from 1 to 10,000, got {bins!r}.")
    edges: Floats = np.arange(bins + 1) / bins
    return edges


def bin_of(values: Floats, edges: Floats) -> NDArray[np.intp]:
    """The index of the bin that holds each value, right-closed; what is not above the first edge is in the first bin.

    >>> bin_of(np.array([0.0, 0.25, 0.26, 1.0]), equal_edges(4)).tolist()
    [0, 0, 1, 3]
    """
    return np.searchsorted(edges[1:-1], values, side="left")


def summarise(edges: Any, count: Any, confidence_sum: Any, correct_sum: Any, level: float = 0.95) -> Bins:
    """Bins with their bands, from sums over the samples in them."""
    count_M = np.asarray(count, dtype=np.int64)
    filled = count_M > 0
    n = np.where(filled, count_M, 1)
    confidence = np.clip(np.asarray(confidence_sum, dtype=np.float64) / n, 0.0, 1.0)
    accuracy = np.asarray(correct_sum, dtype=np.float64) / n
    low, high = _wilson(accuracy, n, level)
    tail = 0.5 * (1.0 - level)
    consistent = [stats.binom.ppf(q, n, confidence) / n for q in (tail, 1.0 - tail)]

    def maybe(values: Floats) -> MaybeFloats:
        return tuple(float(v) if full else None for v, full in zip(values, filled, strict=True))

    return Bins(
        edges=tuple(float(edge) for edge in edges),
        count=tuple(int(c) for c in count_M),
        confidence=maybe(confidence),
        accuracy=maybe(accuracy),
        accuracy_low=maybe(low),
        accuracy_high=maybe(high),
        consistent_low=maybe(consistent[0]),
        consistent_high=maybe(consistent[1]),
        level=level,
    )


def _wilson(share: Floats, n: NDArray[np.int64], level: float) -> tuple[Floats, Floats]:
    z2 = special.ndtri(0.5 * (1.0 + level)) ** 2
    centre = (share + 0.5 * z2 / n) / (1.0 + z2 / n)
    half = np.sqrt(z2 * (share * (1.0 - share) + 0.25 * z2 / n) / n) / (1.0 + z2 / n)
    return np.clip(centre - half, 0.0, 1.0), np.clip(centre + half, 0.0, 1.0)
