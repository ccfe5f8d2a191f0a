"""Sampling: which samples make a batch. The accountant reads these values, never a bare rate.

The values (`Poisson`, ...) say how batches are drawn; `Draws` draws them. A new kind is one such class and its place in
`SAMPLINGS`, and one definition of how it is accounted (`clipwise/accounting/_schemes.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from fractions import Fraction
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import numpy as np
from numpy.typing import NDArray

from clipwise._validate import is_count, is_number, is_positive
from clipwise.errors import InvalidSampling

if TYPE_CHECKING:
    from clipwise.entropy import Entropy

__all__ = [
    "SAMPLINGS",
    "BallsInBins",
    "CyclicPoisson",
    "Draws",
    "FixedSize",
    "FullBatch",
    "Poisson",
    "Sampling",
    "Shuffled",
    "arguments",
    "made_from",
    "public_size",
    "split",
]

Indices: TypeAlias = NDArray[np.int64]


def _check_size(name: str, value: object) -> None:
    if not is_count(value):
        raise InvalidSampling(f"{name} must be a positive integer, got {value!r}.")


_LEAST = 1e-12
"""Of an expected batch size: the gradient is divided by it. No smaller rate is accounted for."""


def _expected(size: object) -> float:
    """An expected batch size as it is written everywhere: a whole number without a decimal point."""
    if not is_positive(size) or size < _LEAST:
        raise InvalidSampling(
            f"batch_size must be a finite int or float of at least {_LEAST:g}, got {size!r}. It is the expected batch "
            "size: 256, or a fraction such as 12.5."
        )
    return int(size) if size == int(size) else float(size)


def _check_sizes(sample_size: int, batch_size: float) -> None:
    _check_size("sample_size", sample_size)
    if batch_size > sample_size:
        raise InvalidSampling(
            f"batch_size {batch_size} is larger than sample_size {sample_size}: the sampling rate would be over 1."
        )


class _Quotient(float):
    """A rate that follows from two sizes: `dataclasses.replace` may change these, and the rate follows again."""


class _Kind:
    """What is true of a kind of sampling unless it says otherwise."""

    keeps_order: ClassVar[bool] = False
    """Whether a run keeps a random order of its records, or several, so that its steps are not alike."""
    hides_order: ClassVar[bool] = False
    """Whether it claims amplification by that order, which nobody may learn then: it is written to no file."""
    has_random_sizes: ClassVar[bool] = False
    """Whether the number of records in a batch is drawn, and tells something of them."""


@dataclass(frozen=True, repr=False)
class Poisson(_Kind):
    """Each sample joins each batch independently with the same probability, `rate`.

    `batch_size` is the *expected* batch size, and the public denominator of the gradient; as a mean it may be a
    fraction. Either the number of records is public (`sample_size`), and the rate is `batch_size / sample_size`; or the
    rate itself is, and then the data may have any number of records, which is not revealed. That rate must not be
    computed from the records.

    `max_batch_size` caps the batch (truncated Poisson), which is accounted as such. With a public rate it needs
    `largest`, a public number that the data never have more records than.

    >>> Poisson(sample_size=60_000, batch_size=256).rate
    0.004266666666666667
    >>> Poisson(sample_size=1_000, batch_size=12.5).rate
    0.0125
    >>> Poisson(rate=1 / 250, batch_size=256)
    Poisson(rate=0.004, batch_size=256)
    """

    sample_size: int | None = None
    batch_size: float = 0
    max_batch_size: int | None = None
    rate: float = math.nan
    largest: int | None = None

    has_random_sizes: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.sample_size is None and self.rate is math.nan:
            raise InvalidSampling(
                "Poisson needs sample_size=, the public number of records, or rate=, a public probability."
            )
        object.__setattr__(self, "batch_size", _expected(self.batch_size))
        if self.sample_size is None:
            self._check_public_rate()
        else:
            if not (isinstance(self.rate, _Quotient) or self.rate is math.nan):
                raise InvalidSampling(
                    "give sample_size= (the number of records is public) or rate= (the rate is), not both."
                )
            _check_sizes(self.sample_size, self.batch_size)
            object.__setattr__(self, "rate", _Quotient(Fraction(self.batch_size) / self.sample_size))
        for name in ("max_batch_size", "largest"):
            size = getattr(self, name)
            if size is not None:
                _check_size(name, size)
        if self.largest is not None and (self.sample_size is not None or self.max_batch_size is None):
            raise InvalidSampling("largest= goes with rate= and max_batch_size= only: nothing else depends on it.")

    def _check_public_rate(self) -> None:
        rate = self.rate
        if not is_number(rate) or not 0.0 < rate <= 1.0:
            raise InvalidSampling(f"rate must be a number over 0 and at most 1, got {rate!r}.")
        object.__setattr__(self, "rate", float(rate))
        if self.max_batch_size is not None and self.largest is None:
            raise InvalidSampling(
                "max_batch_size= with rate= needs largest=, a public number that the data never have more records "
                "than: how often batches are cut depends on the number of records."
            )

    @property
    def description(self) -> str:
        """How batches are drawn, in words."""
        if self.sample_size is None:
            coins = f"any number of records with probability {self.rate:g}, {self.batch_size} expected"
        else:
            coins = f"{self.sample_size:,} records with probability {self.batch_size}/{self.sample_size:,}"
        return f"Poisson: each of {coins}" + (f", at most {self.max_batch_size} of them" if self.max_batch_size else "")

    @property
    def largest_batch(self) -> int | None:
        """No batch can have more samples; None: there is no limit."""
        return self.sample_size if self.max_batch_size is None else self.max_batch_size

    @property
    def is_cut(self) -> bool:
        """Whether a batch can have more samples than it may keep."""
        most = self.largest if self.sample_size is None else self.sample_size
        return self.max_batch_size is not None and most is not None and self.max_batch_size < most

    def draw(self, draws: Draws, step: int, records: int | None) -> Indices:
        """The batch of a step; `records` is their number where the plan does not say it."""
        count = records if self.sample_size is None else self.sample_size
        if count is None:
            raise InvalidSampling(f"{self!r} does not say how many records there are: the data must.")
        # Independent coins = a binomial count, then a uniform subset of that size; a cap keeps a part.
        most = count if self.max_batch_size is None else self.max_batch_size
        return draws.subset(step, lambda random: min(int(random.binomial(count, self.rate)), most), count)

    def __repr__(self) -> str:
        return f"Poisson({', '.join(f'{name}={value!r}' for name, value in arguments(self).items())})"


@dataclass(frozen=True)
class FullBatch(_Kind):
    """Every sample in every batch: the plain Gaussian mechanism.

    >>> FullBatch(1_279).batch_size
    1279
    """

    sample_size: int

    def __post_init__(self) -> None:
        _check_sizes(self.sample_size, self.sample_size)

    def draw(self, draws: Draws, step: int, records: int | None) -> Indices:
        """The batch of a step: all records."""
        return np.arange(self.sample_size, dtype=np.int64)

    @property
    def description(self) -> str:
        """How batches are drawn, in words."""
        return f"all {self.sample_size:,} records in every step"

    @property
    def batch_size(self) -> int:
        """The batch is the whole data set."""
        return self.sample_size

    @property
    def rate(self) -> float:
        """The probability with which a sample is in a batch."""
        return 1.0

    @property
    def largest_batch(self) -> int:
        """No batch can have more samples."""
        return self.sample_size


@dataclass(frozen=True)
class _KnownSizes(_Kind):
    """Batches of a size that is known before they are drawn, and so whole."""

    sample_size: int
    batch_size: int

    def __post_init__(self) -> None:
        if is_number(self.batch_size) and not isinstance(self.batch_size, int):
            raise InvalidSampling(
                f"batch_size must be a positive integer, got {self.batch_size!r}: a batch of {type(self).__name__} has "
                "exactly so many records. Only the expected batch size of cw.Poisson may be a fraction."
            )
        _check_size("batch_size", self.batch_size)
        _check_sizes(self.sample_size, self.batch_size)

    @property
    def largest_batch(self) -> int:
        """No batch can have more samples."""
        return self.batch_size


@dataclass(frozen=True)
class Shuffled(_KnownSizes):
    """Each epoch is a random order cut into batches, each sample once per epoch. Accounted without amplification.

    With `reshuffle=False` all epochs have the order of the first, so that a sample is in every so many steps exactly.
    The last batch of an epoch may be short; the gradient is still divided by `batch_size`.

    >>> Shuffled(sample_size=10, batch_size=4).batches_per_epoch
    3
    """

    reshuffle: bool = True

    keeps_order = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.reshuffle, bool):
            raise InvalidSampling(f"reshuffle must be True or False, got {self.reshuffle!r}.")

    def draw(self, draws: Draws, step: int, records: int | None) -> Indices:
        """The batch of a step, in the order of its epoch."""
        epoch, position = divmod(step, self.batches_per_epoch)
        start = position * self.batch_size
        return draws.order(epoch if self.reshuffle else 0, self.sample_size)[start : start + self.batch_size]

    @property
    def description(self) -> str:
        """How batches are drawn, in words."""
        order = "" if self.reshuffle else ", in the same order every epoch"
        return f"shuffled batches of {self.batch_size} from {self.sample_size:,} records{order}"

    @property
    def batches_per_epoch(self) -> int:
        """Batches that together hold each sample once."""
        return -(-self.sample_size // self.batch_size)


@dataclass(frozen=True)
class CyclicPoisson(_Kind):
    """Poisson sampling from one of `bands` groups of the records, a group after the other.

    Choquette-Choo et al. (2023) have it for banded noise. The records are dealt to groups once, at random. Step t draws
    from group t modulo `bands`, each record of it with probability `rate`, which is `bands * batch_size / sample_size`.
    So a record is never in two of `bands` consecutive steps. `batch_size` is the expected batch size.

    >>> CyclicPoisson(sample_size=60_000, batch_size=256, bands=8).rate
    0.034133333333333335
    """

    sample_size: int
    batch_size: float
    bands: int

    keeps_order: ClassVar[bool] = True
    has_random_sizes: ClassVar[bool] = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "batch_size", _expected(self.batch_size))
        _check_sizes(self.sample_size, self.batch_size)
        _check_size("bands", self.bands)
        if self.bands * Fraction(self.batch_size) > self.sample_size:
            raise InvalidSampling(
                f"{self.bands} groups of {self.sample_size:,} records are too small for batches of {self.batch_size}: "
                f"there can be at most {int(self.sample_size // self.batch_size)}."
            )

    @property
    def rate(self) -> float:
        """The probability with which a record of the step's own group joins."""
        return float(self.bands * Fraction(self.batch_size) / self.sample_size)

    @property
    def largest_batch(self) -> int:
        """No batch can have more samples than a group has."""
        return -(-self.sample_size // self.bands)

    @property
    def description(self) -> str:
        """How batches are drawn, in words."""
        return (
            f"Poisson in turns: {self.sample_size:,} records in {self.bands} groups, each of a step's group with "
            f"probability {self.bands * self.batch_size}/{self.sample_size:,}"
        )

    def draw(self, draws: Draws, step: int, records: int | None) -> Indices:
        """The batch of a step, from its group."""
        group = draws.order(0, self.sample_size)[step % self.bands :: self.bands]
        chosen = draws.subset(step, lambda random: int(random.binomial(len(group), self.rate)), len(group))
        return np.sort(group[chosen])


@dataclass(frozen=True)
class FixedSize(_KnownSizes):
    """Each batch is a fresh uniform subset of exactly `batch_size` samples. Never accounted as Poisson.

    >>> FixedSize(sample_size=10, batch_size=4)
    FixedSize(sample_size=10, batch_size=4)
    """

    def draw(self, draws: Draws, step: int, records: int | None) -> Indices:
        """The batch of a step: a fresh subset."""
        return draws.subset(step, lambda _: self.batch_size, self.sample_size)

    @property
    def description(self) -> str:
        """How batches are drawn, in words."""
        return f"batches of exactly {self.batch_size} from {self.sample_size:,} records"


@dataclass(frozen=True)
class BallsInBins(_Kind):
    """Each record goes into one batch of every epoch, chosen uniformly, independently of all others and afresh.

    A record is used once an epoch, as with `Shuffled`, and still epsilon is about that of Poisson sampling (Chua et al.
    2024). `batch_size` is the expected batch size; an epoch has enough of them for all records, some empty perhaps.

    Bins that others know would amplify nothing, so they are in memory only, and without a seed an epoch that was
    interrupted is not continued: what is left of it is charged, and the next epoch begins.

    >>> BallsInBins(sample_size=60_000, batch_size=256).batches_per_epoch
    235
    """

    sample_size: int
    batch_size: float

    keeps_order: ClassVar[bool] = True
    hides_order: ClassVar[bool] = True
    has_random_sizes: ClassVar[bool] = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "batch_size", _expected(self.batch_size))
        _check_sizes(self.sample_size, self.batch_size)
        if self.batch_size < 1:
            raise InvalidSampling(
                f"batch_size must be at least 1, got {self.batch_size}: there are bins for all records."
            )

    @property
    def batches_per_epoch(self) -> int:
        """Batches that together hold each record once."""
        return math.ceil(Fraction(self.sample_size) / Fraction(self.batch_size))

    @property
    def largest_batch(self) -> int:
        """No batch can have more samples: all may fall into one."""
        return self.sample_size

    @property
    def description(self) -> str:
        """How batches are drawn, in words."""
        return f"each of {self.sample_size:,} records in one of {self.batches_per_epoch:,} batches of every epoch"

    def draw(self, draws: Draws, step: int, records: int | None) -> Indices:
        """The batch of a step: the records that its epoch has put there."""
        epoch, position = divmod(step, self.batches_per_epoch)
        return draws.bin(epoch, self.sample_size, self.batches_per_epoch, position)


Sampling: TypeAlias = Poisson | FullBatch | Shuffled | FixedSize | CyclicPoisson | BallsInBins

SAMPLINGS: Mapping[str, type[Sampling]] = MappingProxyType(
    {
        "poisson": Poisson, "full_batch": FullBatch, "shuffled": Shuffled, "fixed_size": FixedSize,
        "cyclic_poisson": CyclicPoisson, "balls_in_bins": BallsInBins,
    }
)  # fmt: skip
"""All kinds of sampling, by their name on a ledger and, with hyphens, on the command line."""


def public_size(sampling: Sampling) -> float:
    """The public number of records, or what a public rate and its expected batch size say of it.

    >>> public_size(Poisson(60_000, 256)), public_size(Poisson(rate=0.004, batch_size=256))
    (60000, 64000.0)
    """
    return sampling.batch_size / sampling.rate if sampling.sample_size is None else sampling.sample_size


def arguments(sampling: Sampling) -> dict[str, Any]:
    """What makes the sampling once more, as it stands in files: of a public rate no number of records.

    >>> arguments(Poisson(rate=0.004, batch_size=256))
    {'rate': 0.004, 'batch_size': 256}
    >>> arguments(Poisson(60_000, 256))
    {'sample_size': 60000, 'batch_size': 256, 'max_batch_size': None}
    """
    if isinstance(sampling, Poisson) and sampling.sample_size is None:
        cut = {"max_batch_size": sampling.max_batch_size, "largest": sampling.largest}
        return {"rate": sampling.rate, "batch_size": sampling.batch_size, **(cut if sampling.largest else {})}
    named = (f.name for f in fields(sampling) if f.name not in ("rate", "largest"))
    found = {name: getattr(sampling, name) for name in named}
    if found.get("reshuffle") is True:
        del found["reshuffle"]  # so that files read as they did before there was a choice
    return found


def made_from(kind: type[Any], given: Mapping[str, Any]) -> Sampling:
    """The sampling of these very `arguments`; a missing or an unknown one is refused."""
    try:
        made: Sampling = kind(**given)
    except TypeError as error:
        raise InvalidSampling(f"{kind.__name__} cannot be made of {sorted(map(str, given))}: {error}.") from error
    if arguments(made).keys() != given.keys():
        raise InvalidSampling(f"{kind.__name__} has the fields {sorted(arguments(made))}, got {sorted(given)}.")
    return made


class Draws:
    """Draws the batch of each step, as sample indices in increasing order (`Shuffled`: in the order of the epoch).

    Guarantees: the batch of step t depends on `sampling`, the entropy and t alone, never on how many batches were
    drawn before; without a seed, a batch that is drawn again is drawn afresh.

    >>> from clipwise.entropy import Entropy
    >>> Draws(FullBatch(3), Entropy()).batch(0)
    array([0, 1, 2])
    """

    def __init__(self, sampling: Sampling, entropy: Entropy, order_key: bytes | None = None) -> None:
        self.sampling = sampling
        self._entropy = entropy
        # Epochs and groups need a memory. Where amplification is claimed by it (`hides_order`), the key is a secret.
        self.order_key = entropy.take(16, "order") if order_key is None else order_key
        self._epoch: tuple[int, list[Indices]] | None = None

    def batch(self, step: int, records: int | None = None) -> Indices:
        """The indices of the logical batch of step `step` (from 0).

        `records` is their number, which only the data know where the rate is public.
        """
        return self.sampling.draw(self, step, records)

    def subset(self, step: int, size: Callable[[np.random.Generator], int], count: int) -> Indices:
        """A fresh uniform subset of `count` records, whose size may be random as well."""
        random = self._entropy.generator("sampling", step)
        chosen: Indices = random.choice(count, size=size(random), replace=False, shuffle=False)
        chosen.sort()
        return chosen

    def order(self, epoch: int, count: int) -> Indices:
        """The random order of an epoch, the same whenever it is asked for."""
        return self._of_epoch(epoch, "epoch", lambda random: [random.permutation(count)])[0]

    def bin(self, epoch: int, count: int, bins: int, number: int) -> Indices:
        """The records of a bin of an epoch, in increasing order, the same whenever they are asked for."""

        def dealt(random: np.random.Generator) -> list[Indices]:
            chosen = random.integers(bins, size=count)
            order = np.argsort(chosen, kind="stable")
            return [order, chosen[order]]

        order, chosen = self._of_epoch(epoch, "bins", dealt)
        return order[slice(*np.searchsorted(chosen, [number, number + 1]))]

    def _of_epoch(
        self, epoch: int, purpose: str, make: Callable[[np.random.Generator], list[Indices]]
    ) -> list[Indices]:
        if self._epoch is None or self._epoch[0] != epoch:
            from clipwise.entropy import Entropy  # needs torch, which accounting and the command line do without

            key = Entropy(int.from_bytes(self.order_key, "little"))
            made = make(key.generator(purpose, epoch))
            self._epoch = (epoch, [part.astype(np.int64, copy=False) for part in made])
        return self._epoch[1]


def split(indices: Indices, physical_batch_size: int | None) -> list[Indices]:
    """A logical batch cut into physical batches of at most `physical_batch_size` (`None`: one piece).

    >>> split(np.arange(5), 2)
    [array([0, 1]), array([2, 3]), array([4])]
    """
    if physical_batch_size is None:
        return [indices] if len(indices) else []
    return [indices[i : i + physical_batch_size] for i in range(0, len(indices), physical_batch_size)]
