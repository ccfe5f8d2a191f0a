"""Correlation: how the noise of a step depends on that of the steps before it.

What is released at step t is the clipped sum plus sigma R_t w_t, where w = C^-1 z, z are independent normal numbers
and C is lower triangular: the matrix mechanism. In units of each step's own sensitivity R_t this is C^-1 (C x + sigma
z), so its privacy is that of C x + sigma z, whatever R_t does. Every C here is scaled so that a record that joins one
step moves C x by at most 1. Where it joins several, `clipwise.accounting` says how far, or refuses.

Noise that takes back part of what was added before leaves less in the *sum* of all steps, which is what a model is.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any, ClassVar, Protocol, TypeVar, cast

import numpy as np
import numpy.typing as npt

from clipwise._validate import is_count, is_number, is_positive
from clipwise.errors import InvalidPlan
from clipwise.sampling import CyclicPoisson, Poisson, Sampling, Shuffled

__all__ = ["CORRELATIONS", "Banded", "Correlation", "Independent", "SquareRoot", "Tree"]

Floats = npt.NDArray[np.float64]

_MOST_BANDS = 1_024
_SEARCH = {"maxiter": 500, "maxfun": 2_000}
_MOST_GROWTH = 1e6
"""Noise of one step, over that of independent noise. Beyond 1e12 float64 would round away what is newly drawn."""
_MOST_COLUMNS = 256
"""Of a schedule of learning rates, so many columns of the error are looked at; the others lie between them."""


class Correlation(ABC):
    """A matrix C, as a value of the plan. Steps so many apart, or more, have noise that the accounting can treat alone.

    >>> isinstance(Independent(), Correlation), Banded(8).bands, SquareRoot(4).bands
    (True, 8, 4)
    """

    bands: int
    """Two steps that are this many apart share no row of C."""
    per_epoch: ClassVar[bool] = False
    """Whether the noise begins again with each epoch."""

    @abstractmethod
    def describe(self) -> str:
        """What it does, in one sentence of a report."""

    @abstractmethod
    def left(self, steps: int, sampling: Sampling | None = None) -> Floats:
        """After each step, the deviation of the noise in the sum of all steps so far.

        It is for a noise multiplier and a sensitivity of 1. Only a tree needs the sampling, for where epochs begin.

        >>> Independent().left(4), Banded(2).left(4).round(2)
        (array([1.        , 1.41421356, 1.73205081, 2.        ]), array([1.09, 1.25, 1.5 , 1.67]))
        """

    def error(self, steps: int, workload: Correlation | None = None) -> float:
        """The deviation of the noise in a model, for a noise multiplier and a sensitivity of 1.

        It is the root of the mean square over steps of what the noise adds to the sum of updates so far, with the
        momentum and the learning rates of `workload` (`Banded`), or plain sums.
        """
        raise InvalidPlan(f"{self!r} has no error of its own to compare.")


@dataclass(frozen=True)
class Independent(Correlation):
    """Fresh noise at every step, as in DP-SGD: what a plan has unless it says otherwise.

    >>> import clipwise as cw
    >>> cw.Plan(cw.Poisson(1_000, 50), steps=100, clip=cw.Abadi(1.0)).correlation
    Independent()
    """

    bands = 1

    def describe(self) -> str:
        """What it does, in one sentence."""
        return "Every step has noise of its own."

    def left(self, steps: int, sampling: Sampling | None = None) -> Floats:
        """After each step, the deviation of the noise in the sum of all steps so far."""
        found: Floats = np.sqrt(np.arange(1.0, steps + 1.0))
        return found

    def error(self, steps: int, workload: Correlation | None = None) -> float:
        """The deviation of the noise in a model."""
        return _error(np.ones(1), _as_workload(workload), steps)


class _Toeplitz(Correlation):
    """A band matrix with the same coefficients in every column."""

    @abstractmethod
    def coefficients(self, steps: int) -> Floats:
        """The entries of a column from the diagonal down, of length 1 together."""

    def describe(self) -> str:
        """What it does, in one sentence."""
        return (
            f"Each step takes back part of the noise of the {self.bands - 1} steps before it, so that less of it is "
            "left in the model."
        )

    def left(self, steps: int, sampling: Sampling | None = None) -> Floats:
        """After each step, the deviation of the noise in the sum of all steps so far."""
        return np.sqrt(np.cumsum(np.cumsum(_inverse(self.coefficients(steps), steps)) ** 2))

    def error(self, steps: int, workload: Correlation | None = None) -> float:
        """The deviation of the noise in a model."""
        return _error(self.coefficients(steps), _as_workload(workload or self), steps)


def _check_bands(bands: object) -> None:
    if not is_count(bands) or bands > _MOST_BANDS:
        raise InvalidPlan(f"bands must be an integer from 1 to {_MOST_BANDS:,}, got {bands!r}.")


@dataclass(frozen=True)
class Banded(_Toeplitz):
    """BandMF: the `bands` coefficients that leave the least noise in the model (Choquette-Choo et al., 2023).

    They are found for the length of the run and for plain SGD, or for SGD with this `momentum` and these
    `learning_rates` (one for every step; only their ratios matter). What they are found for changes how much noise is
    left, never the privacy.

    >>> import clipwise as cw
    >>> plan = cw.Plan(cw.CyclicPoisson(60_000, 256, bands=8), 2_344, cw.Abadi(1.0), 1.0, correlation=Banded(8))
    >>> Banded(8).error(2_344) < 0.4 * cw.Independent().error(2_344)
    True
    """

    bands: int
    momentum: float = 0.0
    learning_rates: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        _check_bands(self.bands)
        if not is_number(self.momentum) or not 0.0 <= self.momentum < 1.0:
            raise InvalidPlan(f"momentum must be a number from 0 to 1, 1 excluded, got {self.momentum!r}.")
        if self.learning_rates is not None:
            rates = tuple(self.learning_rates) if isinstance(self.learning_rates, Iterable) else ()
            if not rates or not all(is_positive(rate) for rate in rates):
                raise InvalidPlan("learning_rates are positive finite numbers, one for every step.")
            object.__setattr__(self, "learning_rates", tuple(map(float, rates)))

    def coefficients(self, steps: int) -> Floats:
        """The entries of a column from the diagonal down, of length 1 together."""
        return _best_coefficients(self, steps)

    @classmethod
    def best(cls, plan: Calibrated, epsilon: float, delta: float, momentum: float = 0.0) -> Banded:
        """The number of bands that leaves the least noise in the model at this epsilon; 1 is independent noise.

        More bands take back more noise, but a record may then join fewer steps with more certainty, which costs noise.
        Powers of two are tried, each with the noise that it needs. The plan needs a sampling with a public number of
        records: `Poisson` or `CyclicPoisson` (the answer goes into `CyclicPoisson(..., bands=answer.bands)`), or
        `Shuffled(..., reshuffle=False)`.

        >>> import clipwise as cw
        >>> plan = cw.Plan(cw.Poisson(60_000, 256), 2_344, cw.Abadi(1.0))
        >>> cw.Banded.best(plan, epsilon=8.0, delta=1e-5)
        Banded(bands=64, momentum=0.0, learning_rates=None)
        """
        most = _most_bands(plan)
        found: list[tuple[float, int]] = []
        bands = 1
        while bands <= most:
            one = cls(bands, momentum)
            tried = _with_bands(plan, one).calibrate(epsilon, delta)
            found.append((float(tried.noise_multiplier) * one.error(plan.steps), bands))
            bands *= 2
        return cls(min(found)[1], momentum)


@dataclass(frozen=True)
class SquareRoot(_Toeplitz):
    """BSR: the first `bands` coefficients of 1 / sqrt(1 - x), in closed form (Kalinin and Lampert, 2024).

    C times C is then close to the matrix of prefix sums, whatever the length of the run.

    >>> SquareRoot(3).coefficients(100).round(4)
    array([0.848, 0.424, 0.318])
    """

    bands: int

    def __post_init__(self) -> None:
        _check_bands(self.bands)

    def coefficients(self, steps: int) -> Floats:
        """The entries of a column from the diagonal down, of length 1 together."""
        return _unit(_square_root(self.bands))


@dataclass(frozen=True)
class Tree(Correlation):
    """DP-FTRL: noise on the sums of a binary tree over the steps of an epoch (Kairouz et al., 2021).

    A step's record is in one sum of each height, and a prefix needs one sum of each height at most. Sums are estimated
    from their own noise and that of the sums below them (Honaker, 2015). The tree begins again with each epoch, so a
    record joins each tree once: with `Shuffled` no amplification is needed.

    >>> import clipwise as cw
    >>> cw.Plan(cw.Shuffled(1_000, 50), 100, cw.Abadi(1.0), 4.0, correlation=cw.Tree()).correlation.height(20)
    5
    """

    per_epoch = True
    bands = 0  # of an epoch all steps share sums

    def height(self, length: int) -> int:
        """How many finished sums the first of `length` steps is in: the square of its sensitivity."""
        return length.bit_length()

    def describe(self) -> str:
        """What it does, in one sentence."""
        return "Noise is added to the sums of a binary tree over each epoch, so that few of them meet in the model."

    def left(self, steps: int, sampling: Sampling | None = None) -> Floats:
        """After each step, the deviation of the noise in the sum of all steps so far: that of whole epochs adds up."""
        if not isinstance(sampling, Shuffled):
            raise InvalidPlan(f"a tree begins again with each epoch: give its Shuffled sampling, got {sampling!r}.")
        length = sampling.batches_per_epoch
        variances = [1.0]  # of a finished sum of each height, estimated from those below it
        while len(variances) < self.height(length):
            variances.append(2.0 * variances[-1] / (1.0 + 2.0 * variances[-1]))
        epochs, inside = np.divmod(np.arange(1, steps + 1), length)
        within = sum((inside >> h & 1) * variance for h, variance in enumerate(variances))
        whole = sum((length >> h & 1) * variance for h, variance in enumerate(variances))
        found: Floats = np.sqrt(self.height(length) * (epochs * whole + within))
        return found


CORRELATIONS: Mapping[str, type[Any]] = MappingProxyType(
    {"independent": Independent, "banded": Banded, "square_root": SquareRoot, "tree": Tree}
)
"""All kinds of correlation, by their name on a ledger and in a configuration."""


# Which bands fit a plan


class Calibrated(Protocol):
    """What is asked of a plan (`clipwise.Plan`, which is made of these values and so not known here)."""

    @property
    def sampling(self) -> Sampling: ...
    @property
    def steps(self) -> int: ...
    @property
    def noise_multiplier(self) -> Any: ...
    def calibrate(self: P, epsilon: float, delta: float) -> P: ...


P = TypeVar("P", bound=Calibrated)


def _most_bands(plan: Calibrated) -> int:
    sampling = plan.sampling
    if isinstance(sampling, Shuffled) and not sampling.reshuffle:
        return min(sampling.batches_per_epoch, plan.steps, _MOST_BANDS)
    if isinstance(sampling, (Poisson, CyclicPoisson)) and sampling.sample_size is not None:
        return min(int(sampling.sample_size // sampling.batch_size), plan.steps, _MOST_BANDS)
    raise InvalidPlan(
        "bands can be chosen for Poisson(sample_size, batch_size) and Shuffled(..., reshuffle=False), got "
        f"{sampling!r}."
    )


def _with_bands(plan: P, correlation: Banded) -> P:
    sampling = plan.sampling
    if not isinstance(sampling, Shuffled):
        assert sampling.sample_size is not None
        sampling = CyclicPoisson(sampling.sample_size, sampling.batch_size, correlation.bands)
    return cast(P, replace(cast(Any, plan), sampling=sampling, noise_multiplier=None, correlation=correlation))


# Coefficients


def _unit(coefficients: Floats) -> Floats:
    return coefficients / math.sqrt(float(coefficients @ coefficients))


def _square_root(bands: int) -> Floats:
    k = np.arange(1, bands)
    return np.concatenate([[1.0], np.cumprod((2.0 * k - 1.0) / (2.0 * k))])


def _as_workload(value: Correlation | None) -> Banded:
    return value if isinstance(value, Banded) else Banded(1)


@lru_cache(maxsize=64)
def _best_coefficients(wanted: Banded, steps: int) -> Floats:
    """Gradient descent (L-BFGS) on the logarithm of the error, from the square root's coefficients."""
    from scipy import optimize

    start = _square_root(min(wanted.bands, steps))

    def objective(rest: Floats) -> tuple[float, Floats]:
        column = np.concatenate([[1.0], rest])
        size = float(column @ column)
        with np.errstate(all="ignore"):
            square, slope = _square_error(column, wanted, steps)
        if not math.isfinite(square) or not np.isfinite(slope).all():
            return 1e300, np.zeros_like(rest)
        return math.log(size) + math.log(square), 2.0 * rest / size + slope[1:] / square

    if len(start) > 1:
        found = optimize.minimize(
            objective, start[1:], jac=True, method="L-BFGS-B", bounds=[(0.0, 1.0)] * (len(start) - 1), options=_SEARCH
        )
        start = np.concatenate([[1.0], found.x])
    unit = _unit(np.concatenate([start, np.zeros(wanted.bands - len(start))]))
    if not _growth(unit, steps) <= _MOST_GROWTH:
        raise InvalidPlan(
            f"with these learning_rates the noise of a step would grow to over {_MOST_GROWTH:g} times what it is: "
            "late steps hardly count. Use rates that differ less, fewer bands, or SquareRoot."
        )
    unit.setflags(write=False)
    return unit


def _inverse(column: Floats, steps: int) -> Floats:
    """The first column of C^-1, which all others are moved copies of: the series of 1 / C."""
    from scipy.signal import lfilter

    impulse = np.zeros(steps)
    impulse[0] = 1.0
    found: Floats = lfilter([1.0], column, impulse)
    return found


def _growth(column: Floats, steps: int) -> float:
    """The deviation of the noise of the last step, w = C^-1 z: the length of C^-1's last row."""
    with np.errstate(all="ignore"):
        return float(np.linalg.norm(_inverse(column, steps)))


def _error(column: Floats, workload: Banded, steps: int) -> float:
    square, _ = _square_error(column, workload, steps)
    return math.sqrt(square / steps) * math.sqrt(float(column @ column))


def _square_error(column: Floats, workload: Banded, steps: int) -> tuple[float, Floats]:
    """The squared Frobenius norm of A C^-1, and its slope in the coefficients of C's columns.

    A[t, i] is the part that step i has in the model after step t: the sum over s from i to t of rate_s momentum^(s-i).
    A column of C^-1 is the series h of 1 / C, moved; with q the series of h / (1 - momentum x), column j of A C^-1 is
    the running sum of rate_s q_(s-j).
    """
    from scipy.signal import lfilter

    q = _inverse(np.convolve(column, [1.0, -workload.momentum]), steps)
    pull = np.zeros(steps)  # the slope in q
    square = 0.0
    rates = workload.learning_rates
    if rates is None:
        running = np.cumsum(q)
        weight = np.arange(steps, 0, -1.0)  # so many columns reach this far
        square = float(weight @ running**2)
        pull = 2.0 * np.cumsum((weight * running)[::-1])[::-1]
    else:
        if len(rates) != steps:
            raise InvalidPlan(f"learning_rates has {len(rates)} entries, but the run has {steps} steps.")
        given = np.asarray(rates) / max(rates)
        first = np.unique(np.linspace(0, steps - 1, min(steps, _MOST_COLUMNS)).round().astype(int))
        share = steps / len(first)
        for j in first:
            running = np.cumsum(given[j:] * q[: steps - j])
            square += share * float(running @ running)
            pull[: steps - j] += 2.0 * share * given[j:] * np.cumsum(running[::-1])[::-1]
    moved = lfilter([1.0], column, q)
    slope = np.array([-float(pull[m:] @ moved[: steps - m]) for m in range(len(column))])
    return square, slope
