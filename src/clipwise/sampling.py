"""Sampling: which samples make a batch. The accountant reads these values, never a bare rate."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import TypeAlias

from clipwise.errors import InvalidSampling

__all__ = ["FixedSize", "FullBatch", "Poisson", "Sampling", "Shuffled"]


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


@dataclass(frozen=True)
class Shuffled:
    """Each epoch is a random order cut into batches, each sample once per epoch. Accounted without amplification."""

    sample_size: int
    batch_size: int

    def __post_init__(self) -> None:
        _check_sizes(self.sample_size, self.batch_size)


@dataclass(frozen=True)
class FixedSize:
    """Each batch is a fresh uniform subset of exactly `batch_size` samples. Never accounted as Poisson."""

    sample_size: int
    batch_size: int

    def __post_init__(self) -> None:
        _check_sizes(self.sample_size, self.batch_size)


Sampling: TypeAlias = Poisson | FullBatch | Shuffled | FixedSize
