"""Sampling: which samples make a batch. The accountant reads these values, never a bare rate.

The values (`Poisson`, ...) say how batches are drawn; `Draws` draws them.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from clipwise.errors import InvalidSampling
from clipwise.noise import Entropy

__all__ = ["Draws", "FixedSize", "FullBatch", "Poisson", "Sampling", "Shuffled", "split"]

Indices: TypeAlias = NDArray[np.int64]


def _check_sizes(sample_size: object, batch_size: object) -> None:
    for name, value in (("sample_size", sample_size), ("batch_size", batch_size)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise InvalidSampling(f"{name} must be a positive integer, got {value!r}.")
    assert isinstance(sample_size, int) and isinstance(batch_size, int)
    if batch_size > sample_size:
        raise InvalidSampling(
            f"batch_size {batch_size} is larger than sample_size {sample_size}: the sampling rate would be over 1."
        )


@dataclass(frozen=True)
class Poisson:
    """Each sample joins each batch independently with probability `batch_size / sample_size`.

    `batch_size` is the *expected* batch size, and the public denominator of the gradient. `max_batch_size` caps the
    batch (truncated Poisson), which is accounted as such.

    >>> Poisson(sample_size=60_000, batch_size=256).rate
    0.004266666666666667
    """

    sample_size: int
    batch_size: int
    max_batch_size: int | None = None

    def __post_init__(self) -> None:
        _check_sizes(self.sample_size, self.batch_size)
        cap = self.max_batch_size
        if cap is not None and (not isinstance(cap, int) or isinstance(cap, bool) or cap < 1):
            raise InvalidSampling(f"max_batch_size must be a positive integer or None, got {cap!r}.")

    @property
    def rate(self) -> float:
        """The probability with which a sample joins a batch."""
        return float(Fraction(self.batch_size, self.sample_size))

    @property
    def largest_batch(self) -> int:
        """No batch can have more samples."""
        return self.sample_size if self.max_batch_size is None else self.max_batch_size


@dataclass(frozen=True)
class FullBatch:
    """Every sample in every batch: the plain Gaussian mechanism.

    >>> FullBatch(1_279).batch_size
    1279
    """

    sample_size: int

    def __post_init__(self) -> None:
        _check_sizes(self.sample_size, self.sample_size)

    @property
    def batch_size(self) -> int:
        """The batch is the whole data set."""
        return self.sample_size

    @property
    def largest_batch(self) -> int:
        """No batch can have more samples."""
        return self.sample_size


@dataclass(frozen=True)
class Shuffled:
    """Each epoch is a random order cut into batches, each sample once per epoch. Accounted without amplification.

    The last batch of an epoch may be short; the gradient is divided by `batch_size` all the same.

    >>> Shuffled(sample_size=10, batch_size=4).batches_per_epoch
    3
    """

    sample_size: int
    batch_size: int

    def __post_init__(self) -> None:
        _check_sizes(self.sample_size, self.batch_size)

    @property
    def batches_per_epoch(self) -> int:
        """Batches that together hold each sample once."""
        return -(-self.sample_size // self.batch_size)

    @property
    def largest_batch(self) -> int:
        """No batch can have more samples."""
        return self.batch_size


@dataclass(frozen=True)
class FixedSize:
    """Each batch is a fresh uniform subset of exactly `batch_size` samples. Never accounted as Poisson.

    >>> FixedSize(sample_size=10, batch_size=4)
    FixedSize(sample_size=10, batch_size=4)
    """

    sample_size: int
    batch_size: int

    def __post_init__(self) -> None:
        _check_sizes(self.sample_size, self.batch_size)

    @property
    def largest_batch(self) -> int:
        """No batch can have more samples."""
        return self.batch_size


Sampling: TypeAlias = Poisson | FullBatch | Shuffled | FixedSize


class Draws:
    """Draws the batch of each step, as sample indices in increasing order (`Shuffled`: in the order of the epoch).

    Guarantees: the batch of step t depends on `sampling`, the entropy and t alone, never on how many batches were
    drawn before; without a seed, a batch that is drawn again is drawn afresh.

    >>> Draws(FullBatch(3), Entropy()).batch(0)
    array([0, 1, 2])
    """

    def __init__(self, sampling: Sampling, entropy: Entropy, order_key: bytes | None = None) -> None:
        self.sampling = sampling
        self._entropy = entropy
        # Only Shuffled needs a memory: the epoch's order. It claims no amplification, so the key is no secret.
        self.order_key = entropy.take(16, "order") if order_key is None else order_key
        self._epoch: tuple[int, Indices] | None = None

    def batch(self, step: int) -> Indices:
        """The indices of the logical batch of step `step` (from 0)."""
        sampling = self.sampling
        if isinstance(sampling, FullBatch):
            return np.arange(sampling.sample_size, dtype=np.int64)
        if isinstance(sampling, Shuffled):
            return self._shuffled(sampling, step)
        random = self._entropy.generator("sampling", step)
        if isinstance(sampling, Poisson):
            # Independent coins = a binomial count, then a uniform subset of that size; a cap keeps a part.
            size = int(random.binomial(sampling.sample_size, sampling.rate))
            if sampling.max_batch_size is not None:
                size = min(size, sampling.max_batch_size)
        else:
            size = sampling.batch_size
        chosen: Indices = random.choice(sampling.sample_size, size=size, replace=False, shuffle=False)
        chosen.sort()
        return chosen

    def _shuffled(self, sampling: Shuffled, step: int) -> Indices:
        epoch, position = divmod(step, sampling.batches_per_epoch)
        if self._epoch is None or self._epoch[0] != epoch:
            key = Entropy(int.from_bytes(self.order_key, "little"))
            order = key.generator("epoch", epoch).permutation(sampling.sample_size)
            self._epoch = (epoch, order.astype(np.int64, copy=False))
        start = position * sampling.batch_size
        return self._epoch[1][start : start + sampling.batch_size]


def split(indices: Indices, physical_batch_size: int | None) -> list[Indices]:
    """A logical batch cut into physical batches of at most `physical_batch_size` (`None`: one piece).

    >>> split(np.arange(5), 2)
    [array([0, 1]), array([2, 3]), array([4])]
    """
    if physical_batch_size is None:
        return [indices] if len(indices) else []
    return [indices[i : i + physical_batch_size] for i in range(0, len(indices), physical_batch_size)]
