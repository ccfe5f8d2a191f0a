"""How each kind of sampling is accounted: one definition each, found by `scheme_of`.

A new kind of sampling is its class in `clipwise.sampling` (how batches are drawn), one definition here (what a batch
tells) and its place in both registries. What a definition does not say is refused.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeAlias, TypeVar

from clipwise.accounting._numerics.laws import (
    Allocation,
    Law,
    fixed_size,
    gaussian,
    poisson,
    truncated_poisson,
    truncated_up_to,
)
from clipwise.accounting._numerics.shuffle import ShuffledRun
from clipwise.accounting.guarantee import Relation
from clipwise.correlation import Correlation, Independent
from clipwise.errors import AccountingError
from clipwise.sampling import BallsInBins, CyclicPoisson, FixedSize, FullBatch, Poisson, Sampling, Shuffled

__all__ = ["OF_A_RATE", "SCHEMES", "Laws", "Scheme", "Unsampled", "check_correlation", "scheme_of", "uses"]

OF_A_RATE: tuple[Relation, ...] = ("add_remove", "zero_out", "replace_one")
"""The relations where nothing of the mechanism depends on the number of records: all, the default first."""
_LARGEST_MU = 20.0
"""Beyond, a record is as good as seen in whatever step it is, and its likelihood ratio leaves double precision."""
_OF_A_NUMBER: tuple[Relation, ...] = ("zero_out", "replace_one")

Laws: TypeAlias = list[tuple[Law | Allocation, int]]
"""Pairs of output distributions, and how many steps (of balls in bins: epochs) have each."""

S = TypeVar("S")


@dataclass(frozen=True)
class Unsampled:
    """An event without its sampling; `first` says that it begins a run, and so an epoch."""

    mu: float
    count: int
    replace: bool
    group: int
    first: bool

    @property
    def reach(self) -> float:
        """How far the records of a group move the sum, in deviations of the noise."""
        return self.group * self.mu * (2.0 if self.replace else 1.0)


class Scheme(ABC, Generic[S]):
    """What accounting knows of one kind of sampling. A number of records that is public is the usual case."""

    interval: ClassVar[bool] = False
    """Whether only an interval is known, from `lower` to `upper`."""

    def relations(self, sampling: S) -> tuple[Relation, ...]:
        """The relations that hold, the default first."""
        return _OF_A_NUMBER

    def is_tight(self, sampling: S) -> bool:
        """Whether `upper` is reached by some data; else an answer is an upper bound at best."""
        return not self.interval

    @abstractmethod
    def describe(self, sampling: S) -> str:
        """What a guarantee says that it assumes."""

    @abstractmethod
    def upper(self, sampling: S, steps: Unsampled) -> Laws:
        """Laws that dominate the steps, for any data."""

    def lower(self, sampling: S, steps: Unsampled) -> Laws:
        """Laws that some data reach; none where `upper` is not reached, since to see less proves no more."""
        laws = self.upper(sampling, steps)
        return laws if self.is_tight(sampling) else []

    def shuffled_run(self, sampling: S, steps: Unsampled) -> ShuffledRun | None:
        """What proves a lower end besides `lower`."""
        return None

    def unproven(self, sampling: S) -> str | None:
        """What estimated norms have no proof for here, and what to do; None: they have one."""
        return f"{type(sampling).__name__}: use cw.Poisson"

    def against(self, sampling: S, correlation: Correlation) -> str | None:
        """Why `upper` does not hold for noise that is correlated so, and what to do; None: it does."""
        return (
            f"with {type(sampling).__name__} a record may be in adjacent steps, whose noise is correlated: use "
            "CyclicPoisson(sample_size, batch_size, bands), or Shuffled(..., reshuffle=False)"
        )


class _AllRecords(Scheme[Any]):
    """Calibration statistics: sums over all records, whatever their number."""

    def relations(self, sampling: Any) -> tuple[Relation, ...]:
        return OF_A_RATE

    def describe(self, sampling: Any) -> str:
        return "statistics over all records"

    def upper(self, sampling: Any, steps: Unsampled) -> Laws:
        return [(gaussian(steps.reach), steps.count)]


class _FullBatch(Scheme[FullBatch]):
    def describe(self, sampling: FullBatch) -> str:
        return "every record in every step"

    def upper(self, sampling: FullBatch, steps: Unsampled) -> Laws:
        return [(gaussian(steps.reach), steps.count)]

    def unproven(self, sampling: FullBatch) -> str | None:
        return None


class _Poisson(Scheme[Poisson]):
    def relations(self, sampling: Poisson) -> tuple[Relation, ...]:
        return OF_A_RATE if sampling.sample_size is None else _OF_A_NUMBER

    def is_tight(self, sampling: Poisson) -> bool:
        # Of batches that are cut the law assumes the worst of every record that takes another's place.
        return not sampling.is_cut

    def describe(self, sampling: Poisson) -> str:
        cut = "" if sampling.max_batch_size is None else f", batches cut at {sampling.max_batch_size}"
        of = "" if sampling.largest is None else f" of at most {sampling.largest} records"
        public = "rate" if sampling.sample_size is not None else "the public rate"
        return f"Poisson sampling at {public} {sampling.rate:.6g}{cut}{of}"

    def upper(self, sampling: Poisson, steps: Unsampled) -> Laws:
        if not sampling.is_cut:
            return [(poisson(sampling.rate, steps.mu, steps.replace, steps.group), steps.count)]
        _refuse_group(steps, "truncated Poisson sampling")
        return [(self._truncated(sampling, steps), steps.count)]

    def _truncated(self, sampling: Poisson, steps: Unsampled) -> Law:
        cap = sampling.max_batch_size
        assert cap is not None
        if sampling.sample_size is not None:
            return truncated_poisson(sampling.sample_size, sampling.rate, cap, steps.mu, steps.replace)
        assert sampling.largest is not None
        return truncated_up_to(sampling.largest, sampling.rate, cap, steps.mu, steps.replace)

    def unproven(self, sampling: Poisson) -> str | None:
        # A record that takes the place of another: the estimates for both of them would matter.
        return None if sampling.max_batch_size is None else "batches that are cut: leave max_batch_size out"


class _CyclicPoisson(Scheme[CyclicPoisson]):
    """A record is in one group, so in every so many steps at the most, and there with the probability `rate`.

    With noise that is correlated over fewer steps the columns of C for these steps share no row, so that what a record
    moves in one of them is as if it had been alone: ceil(steps / bands) steps of Poisson sampling (Choquette-Choo et
    al., 2023, theorem 4). Noise that begins again in between has shorter columns, and no others.
    """

    def is_tight(self, sampling: CyclicPoisson) -> bool:
        return False  # the last columns are cut off by the end of the run

    def describe(self, sampling: CyclicPoisson) -> str:
        return f"Poisson sampling at rate {sampling.rate:.6g} from {sampling.bands} groups in turns"

    def upper(self, sampling: CyclicPoisson, steps: Unsampled) -> Laws:
        _refuse_group(steps, "groups in turns")
        return [(poisson(sampling.rate, steps.mu, steps.replace), -(-steps.count // sampling.bands))]

    def against(self, sampling: CyclicPoisson, correlation: Correlation) -> str | None:
        if correlation.per_epoch:
            return "a tree begins again with each epoch, and CyclicPoisson has none: use Shuffled"
        if correlation.bands > sampling.bands:
            return f"its {sampling.bands} groups are too few for {correlation.bands} bands"
        return None


class _Shuffled(Scheme[Shuffled]):
    interval = True

    def describe(self, sampling: Shuffled) -> str:
        order = "shuffled" if sampling.reshuffle else "once shuffled"
        return f"{order} batches of {sampling.batch_size} from {sampling.sample_size}, without amplification"

    def against(self, sampling: Shuffled, correlation: Correlation) -> str | None:
        if correlation.per_epoch:
            return None  # a record is once in every tree
        if sampling.reshuffle:
            return (
                "a record may be in the last step of an epoch and in the first of the next, whose noise is correlated: "
                "use Shuffled(..., reshuffle=False)"
            )
        if correlation.bands > sampling.batches_per_epoch:
            return f"the {sampling.batches_per_epoch} steps of an epoch are too few for {correlation.bands} bands"
        return None

    def upper(self, sampling: Shuffled, steps: Unsampled) -> Laws:
        _refuse_group(steps, "shuffled and fixed-size batches")
        return [(gaussian(steps.reach), uses(sampling, steps.count, steps.first))]

    def lower(self, sampling: Shuffled, steps: Unsampled) -> Laws:
        _refuse_group(steps, "shuffled and fixed-size batches")
        return []

    def shuffled_run(self, sampling: Shuffled, steps: Unsampled) -> ShuffledRun | None:
        longest = sampling.batches_per_epoch
        # Only whole epochs: an unfinished one, or the rest of one that a later event may begin in, is left out,
        # and anyone who sees less of the output learns at most as much, so the bound stays below the truth. An order
        # that is kept is fresh in one epoch only.
        whole = (steps.count if steps.first else steps.count - longest + 1) // longest
        whole = whole if sampling.reshuffle else min(whole, 1)
        return ShuffledRun(steps.mu, longest, whole) if whole > 0 else None

    def unproven(self, sampling: Shuffled) -> str | None:
        return None


class _FixedSize(Scheme[FixedSize]):
    interval = True

    def relations(self, sampling: FixedSize) -> tuple[Relation, ...]:
        return ("replace_one",)

    def describe(self, sampling: FixedSize) -> str:
        return f"fresh subsets of exactly {sampling.batch_size} from {sampling.sample_size}"

    def upper(self, sampling: FixedSize, steps: Unsampled) -> Laws:
        _refuse_group(steps, "shuffled and fixed-size batches")
        return [(fixed_size(sampling.batch_size / sampling.sample_size, steps.mu), steps.count)]

    def lower(self, sampling: FixedSize, steps: Unsampled) -> Laws:
        rate = sampling.batch_size / sampling.sample_size
        if rate == 1.0:
            return self.upper(sampling, steps)
        # Reached by data where every other record pushes the other way, so that the filled-up place counts double.
        _refuse_group(steps, "shuffled and fixed-size batches")
        return [(poisson(rate, 2.0 * steps.mu, replace=False), steps.count)]

    def unproven(self, sampling: FixedSize) -> str | None:
        return "batches of a fixed size: use cw.Poisson"


class _BallsInBins(Scheme[BallsInBins]):
    """A whole epoch has one law: `_numerics/allocation.py`. Epochs are independent, given all that was seen before.

    Of an epoch that was not finished, the steps that were made are a part of it. An event that may begin within an
    epoch is worse: what was released before can show that the record is among the steps that are left, so that the
    first of them is charged as if it were sure to have it, and all others as if an epoch began there. That covers every
    place where it may begin: what is left of an epoch is at worst one plain step, and later epochs have fewer steps.

    Of a replaced record no more is proven than that it is in one step of an epoch.
    """

    def is_tight(self, sampling: BallsInBins) -> bool:
        return False  # spread over a grid; and where in an epoch an event begins is not known

    def describe(self, sampling: BallsInBins) -> str:
        return f"each of {sampling.sample_size} records in one of {sampling.batches_per_epoch} batches of every epoch"

    def upper(self, sampling: BallsInBins, steps: Unsampled) -> Laws:
        _refuse_group(steps, "balls in bins")
        bins = sampling.batches_per_epoch
        if steps.replace or bins == 1 or steps.mu > _LARGEST_MU:
            return [(gaussian(steps.reach), _epochs(steps.count, bins, steps.first))]
        left = steps.count if steps.first else steps.count - 1
        laws: Laws = [] if steps.first else [(gaussian(steps.mu), 1)]
        if left >= bins:
            laws.append((Allocation(bins, bins, steps.mu), left // bins))
        if left % bins:
            laws.append((Allocation(bins, left % bins, steps.mu), 1))
        return laws

    def against(self, sampling: BallsInBins, correlation: Correlation) -> str | None:
        return "for balls in bins there is no proof with noise that is correlated over steps: use CyclicPoisson"


SCHEMES: dict[type[Any], Scheme[Any]] = {
    type(None): _AllRecords(),
    Poisson: _Poisson(),
    FullBatch: _FullBatch(),
    Shuffled: _Shuffled(),
    FixedSize: _FixedSize(),
    CyclicPoisson: _CyclicPoisson(),
    BallsInBins: _BallsInBins(),
}


def scheme_of(sampling: Sampling | None) -> Scheme[Any]:
    """How this sampling is accounted; None: all records, whatever their number."""
    return next(SCHEMES[kind] for kind in type(sampling).__mro__ if kind in SCHEMES)


def uses(sampling: Shuffled, steps: int, first: bool) -> int:
    """In how many of the steps a record can be: once an epoch, and only the first event surely begins with one."""
    if not sampling.reshuffle:
        return -(-steps // sampling.batches_per_epoch)  # exactly an epoch apart, whatever the first step is
    return _epochs(steps, sampling.sample_size // sampling.batch_size, first)


def _epochs(steps: int, batches: int, first: bool) -> int:
    """How many epochs the steps belong to at most."""
    return -(-steps // batches) if first else -(-(steps - 1) // batches) + 1


def check_correlation(sampling: Sampling, correlation: Correlation) -> None:
    """Refuse noise that is correlated over steps in which one record may be, unless that is accounted for."""
    if correlation == Independent() or correlation.bands == 1:
        return
    reason = scheme_of(sampling).against(sampling, correlation)
    if reason is not None:
        raise AccountingError(f"{correlation!r} is not accounted for: {reason}.")


def _refuse_group(steps: Unsampled, scheme: str) -> None:
    if steps.group > 1:
        raise AccountingError(f"Group privacy is not available for {scheme}; use plain Poisson or full batches.")
