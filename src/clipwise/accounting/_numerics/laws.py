"""One step as a pair of output distributions, in units of the noise's standard deviation.

A step's worst case is a pair of Gaussian mixtures with unit variance (Zhu, Dong, Wang 2022): with rate q and
mu = 1/sigma, removing a record compares P = (1-q) N(0,1) + q N(mu,1) with Q = N(0,1). The accountants need nothing
else.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, TypeAlias

from scipy import stats

from clipwise.errors import NotConverged

__all__ = [
    "Allocation",
    "Composition",
    "Law",
    "Mixture",
    "Pair",
    "fixed_size",
    "gaussian",
    "mixed",
    "poisson",
    "truncated_poisson",
    "truncated_up_to",
]

Mixture: TypeAlias = tuple[tuple[float, float], ...]
"""(weight, mean) of each unit-variance Gaussian component; the weights sum to one."""

_ZERO: Mixture = ((1.0, 0.0),)
_IMPOSSIBLE = 1e-34


@dataclass(frozen=True)
class Pair:
    """Output distributions on two neighbouring data sets.

    `symmetrised` means the pair whose trade-off function is the convex hull of this one and its inverse (the
    subsampling operator C_p of Dong, Roth, Su 2022).
    """

    p: Mixture
    q: Mixture = _ZERO
    symmetrised: bool = False

    def reversed(self) -> Pair:
        """The pair with the roles of the two data sets exchanged."""
        return self if self.symmetrised else Pair(self.q, self.p)

    def mirrored(self) -> Pair:
        """The reversed pair of outputs with the other sign: two Gaussians are their own."""
        if self.shift is not None:
            return self
        turned = self.reversed()
        p, q = (tuple((weight, -mean) for weight, mean in side) for side in (turned.p, turned.q))
        return Pair(p, q, self.symmetrised)

    def scaled(self, factor: float) -> Pair:
        """The pair with all means `factor` times as far out."""
        p, q = (tuple((weight, factor * mean) for weight, mean in side) for side in (self.p, self.q))
        return Pair(p, q, self.symmetrised)

    @property
    def gap(self) -> float:
        """The largest distance of neighbouring means on one side."""
        sides = (sorted(mean for _, mean in side) for side in (self.p, self.q))
        return max((b - a for side in sides for a, b in itertools.pairwise(side)), default=0.0)

    @property
    def reach(self) -> float:
        """The largest distance of any two means: whatever is revealed, N(0, 1) against N(reach, 1) is worse."""
        means = [mean for side in (self.p, self.q) for _, mean in side]
        return max(means) - min(means)

    @property
    def shift(self) -> float | None:
        """The distance of the means when both sides are single Gaussians, else None."""
        if len(self.p) == len(self.q) == 1:
            return abs(self.p[0][1] - self.q[0][1])
        return None


@dataclass(frozen=True)
class Law:
    """The loss of one step: with each part's probability, the loss of that part's pair (which part is revealed)."""

    parts: tuple[tuple[float, Pair], ...]

    def reversed(self) -> Law:
        """The law with the roles of the two data sets exchanged."""
        return Law(tuple((weight, pair.reversed()) for weight, pair in self.parts))

    @property
    def reach(self) -> float:
        """Whatever is revealed, N(0, 1) against N(reach, 1) is worse."""
        return max(pair.reach for _, pair in self.parts)

    @property
    def is_symmetric(self) -> bool:
        """Whether exchanging the data sets changes nothing but the sign of outputs."""
        return all(pair == pair.mirrored() for _, pair in self.parts)


@dataclass(frozen=True)
class Allocation:
    """The first `used` of `bins` steps, one of which has the record, each with the same probability, at mean `mu`.

    `reverse` exchanges the two data sets. `_numerics/allocation.py` says what is known of it.
    """

    bins: int
    used: int
    mu: float
    reverse: bool = False

    is_symmetric: ClassVar[bool] = False

    def reversed(self) -> Allocation:
        """The law with the roles of the two data sets exchanged."""
        return replace(self, reverse=not self.reverse)

    @property
    def reach(self) -> float:
        """Whatever is revealed, even the step of the record, N(0, 1) against N(reach, 1) is worse."""
        return self.mu

    @property
    def largest_loss(self) -> float:
        """No output has a larger loss: the record may be in a step that was not made."""
        return -math.log1p(-self.used / self.bins) if self.reverse and self.used < self.bins else math.inf


@dataclass(frozen=True)
class Composition:
    """Independent steps: plain Gaussian ones through the sum of squared shifts, all others as (law, count)."""

    gaussian: float
    terms: tuple[tuple[Law | Allocation, int], ...]

    @classmethod
    def of(cls, steps: Sequence[tuple[Law | Allocation, int]]) -> Composition:
        """Merge equal laws wherever they stand; the order of independent steps does not matter."""
        gaussian_part: list[float] = []
        counts: dict[Law | Allocation, int] = {}
        for law, count in steps:
            shift = law.parts[0][1].shift if isinstance(law, Law) and len(law.parts) == 1 else None
            if shift is not None:
                gaussian_part.append(count * shift**2)
            else:
                counts[law] = counts.get(law, 0) + count
        return cls(math.fsum(gaussian_part), tuple(sorted(counts.items(), key=repr)))

    def reversed(self) -> Composition:
        """The composition with the roles of the two data sets exchanged."""
        return Composition(self.gaussian, tuple((law.reversed(), count) for law, count in self.terms))

    @property
    def unamplified(self) -> float:
        """The sum of squared shifts, were every step a plain Gaussian one of its reach: an upper bound for all laws."""
        return self.gaussian + sum(count * law.reach**2 for law, count in self.terms)

    @property
    def single(self) -> Law | None:
        """The law when there is one step only."""
        if self.gaussian == 0.0 and len(self.terms) == 1 and self.terms[0][1] == 1:
            law = self.terms[0][0]
            return law if isinstance(law, Law) else None
        return None

    @property
    def is_symmetric(self) -> bool:
        """Whether both directions cost the same."""
        return all(law.is_symmetric for law, _ in self.terms)

    @property
    def is_allocated(self) -> bool:
        """Whether there are epochs of balls in bins, whose losses are known on a grid only."""
        return any(isinstance(law, Allocation) for law, _ in self.terms)

    @property
    def is_one_epoch(self) -> bool:
        """Whether there is one epoch of balls in bins, or a part of one, and nothing else."""
        return self.gaussian == 0.0 and self.is_allocated and len(self.terms) == 1 and self.terms[0][1] == 1

    @property
    def laws(self) -> tuple[tuple[Law, int], ...]:
        """The terms, for what needs the pairs of all of them."""
        found = tuple((law, count) for law, count in self.terms if isinstance(law, Law))
        if len(found) < len(self.terms):
            raise NotConverged("An epoch of balls in bins is no pair of Gaussian mixtures of one output.")
        return found

    @property
    def empty(self) -> bool:
        """Whether nothing was released."""
        return self.gaussian == 0.0 and not self.terms


def gaussian(shift: float) -> Law:
    """The plain Gaussian mechanism: N(shift, 1) against N(0, 1)."""
    return Law(((1.0, Pair(((1.0, shift),))),))


def mixed(law: Law, parts: tuple[tuple[float, float], ...]) -> Law:
    """With each share's probability the law with its means times the factor, and which one it is, is revealed.

    >>> [round(pair.reach, 2) for _, pair in mixed(gaussian(1.0), ((0.5, 0.9), (0.5, 1.2))).parts]
    [0.9, 1.2]
    """
    ((_, pair),) = law.parts
    return Law(tuple((share, pair.scaled(factor)) for share, factor in parts))


def _binomial(rate: float, mu: float, group: int) -> Mixture:
    if rate == 1.0:
        return ((1.0, group * mu),)
    if group == 1:
        return ((1.0 - rate, 0.0), (rate, mu))
    weights = stats.binom.pmf(range(group + 1), group, rate)
    # What is left out happens with less than 1e-20 in 10^10 steps, far below any delta that can be asked for.
    return tuple((float(weight), k * mu) for k, weight in enumerate(weights) if weight > _IMPOSSIBLE)


def poisson(rate: float, mu: float, replace: bool, group: int = 1) -> Law:
    """Poisson sampling: remove direction of add/remove, or replacing, of `group` records."""
    p = _binomial(rate, mu, group)
    q = tuple((weight, -mean) for weight, mean in p) if replace else _ZERO
    return Law(((1.0, Pair(p, q)),))


def truncated_poisson(sample_size: int, rate: float, cap: int, mu: float, replace: bool) -> Law:
    """Poisson batches cut to `cap` records (arXiv 2508.15089).

    When the batch is cut, another record takes the place of the missing one: sensitivity two, both directions.
    """
    plain = poisson(rate, mu, replace)
    cut = float(stats.binom.sf(cap - 1, sample_size - 1, rate))
    if cut == 0.0:
        return plain
    inside = float(stats.binom.sf(cap, sample_size, rate)) * cap / cut / sample_size
    doubled = poisson(min(1.0, inside), 2.0 * mu, replace=True)
    if cut == 1.0:
        return doubled
    return Law(((1.0 - cut, plain.parts[0][1]), (cut, doubled.parts[0][1])))


def truncated_up_to(largest: int, rate: float, cap: int, mu: float, replace: bool) -> Law:
    """Poisson batches cut to `cap` records, of data with at most `largest` records.

    Guarantees: dominates `truncated_poisson` for every number of records up to `largest`. The chance that the others
    alone fill a batch grows with their number; given that, a record is in it with less than its rate, and a pair with
    the full rate and twice the reach is worse than the plain one, so that the largest chance is the worst.
    """
    plain = poisson(rate, mu, replace)
    cut = float(stats.binom.sf(cap - 1, largest - 1, rate))
    if cut == 0.0:
        return plain
    doubled = poisson(rate, 2.0 * mu, replace=True)
    if cut == 1.0:
        return doubled
    return Law(((1.0 - cut, plain.parts[0][1]), (cut, doubled.parts[0][1])))


def fixed_size(rate: float, mu: float) -> Law:
    """A fresh subset of fixed size, one record replaced: shift 2 mu with probability `rate`, symmetrised.

    Guarantees: an upper bound for any data (Dong, Roth, Su 2022, theorem 9, on the Gaussian mechanism's trade-off
    function, whose sensitivity for replacing is two).
    """
    if rate == 1.0:
        return gaussian(2.0 * mu)
    return Law(((1.0, Pair(((1.0 - rate, 0.0), (rate, 2.0 * mu)), symmetrised=True)),))
