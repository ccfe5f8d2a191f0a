"""Calibration: the noise, the steps, the batch size or the batch cap that a privacy target allows."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable
from dataclasses import replace

from clipwise._validate import is_positive
from clipwise.accounting._numerics.saddle import quick_epsilon
from clipwise.accounting._problem import LEAST_NOISE, check_delta, pose
from clipwise.accounting.accountants import accountant_named
from clipwise.accounting.accounts import account
from clipwise.accounting.accounts import epsilon as epsilon_of
from clipwise.accounting.events import Event, GaussianSteps
from clipwise.accounting.relation import Relation
from clipwise.errors import AccountingError
from clipwise.sampling import FixedSize, Poisson, Sampling

__all__ = ["free_cap", "max_batch_size", "max_steps", "noise_multiplier", "noise_scale"]

_LIMITS = (LEAST_NOISE, 1e7)  # of the noise multiplier, the least one of a schedule
_TIGHT = 5e-4  # share of the target that may be left unused
_MOST_STEPS = 10**9


def noise_multiplier(
    epsilon: float,
    delta: float,
    sampling: Sampling,
    steps: int,
    accountant: str = "exact",
    *,
    relation: Relation | None = None,
) -> float:
    """The noise multiplier whose accounted epsilon is at most the target, and within 0.1 % of it.

    A target so large that the least noise that counts, 0.01, meets it is answered by that noise.

    >>> from clipwise.sampling import Poisson
    >>> sigma = noise_multiplier(8.0, 1e-5, Poisson(50_000, 2_000), steps=2_250)
    >>> 1.3458 < sigma < 1.347
    True
    """
    return noise_scale((GaussianSteps(sampling, 1.0, steps),), epsilon, delta, accountant, relation=relation)


def noise_scale(
    events: Iterable[Event],
    epsilon: float,
    delta: float,
    accountant: str = "exact",
    *,
    relation: Relation | None = None,
    fixed: Iterable[Event] = (),
) -> float:
    """The factor for every event's noise multiplier that meets the target: a schedule keeps its shape.

    `fixed` are further events of the same run, whose noise is decided already.

    >>> from clipwise.sampling import Poisson
    >>> shape = [GaussianSteps(Poisson(1_000, 10), 1.2, 50), GaussianSteps(Poisson(1_000, 10), 0.8, 50)]
    >>> 0.5 < noise_scale(shape, epsilon=3.0, delta=1e-5) < 1.5
    True
    """
    target = _check_target(epsilon)
    delta = check_delta(delta)
    shape, rest = tuple(events), tuple(fixed)
    if not shape or any(event.noise_multiplier <= 0.0 for event in shape):
        raise AccountingError("Noise can be calibrated only for events that have some; got none or noise 0.")

    least = min(event.noise_multiplier for event in shape)

    def scaled(noise: float) -> tuple[Event, ...]:
        """The run whose least noise multiplier is `noise`."""
        return (*(event.changed(noise_multiplier=noise * (event.noise_multiplier / least)) for event in shape), *rest)

    def bound(noise: float) -> float:
        return max((quick_epsilon(c, delta) for c in pose(scaled(noise), relation).upper), default=math.inf)

    def spent(by: str) -> Callable[[float], float]:
        return lambda noise: account(scaled(noise), delta, by, relation=relation).epsilon

    start = 1.0
    with contextlib.suppress(AccountingError):  # not every event has so quick a bound
        start = _smallest_noise(bound, target, start, tight=0.1)
    if accountant_named(accountant).slow:
        start = _smallest_noise(spent("exact"), target, start)
    return _smallest_noise(spent(accountant), target, start) / least


def max_steps(
    epsilon: float,
    delta: float,
    sampling: Sampling,
    *,
    noise_multiplier: float,
    accountant: str = "exact",
    relation: Relation | None = None,
) -> int:
    """The largest number of steps, up to 10^9, whose epsilon is at most the target (0 when not even one fits).

    >>> from clipwise.sampling import Poisson
    >>> max_steps(2.0, 1e-6, Poisson(1_000, 100), noise_multiplier=3.0)
    155
    """
    within = _within(epsilon, delta, relation)
    return _largest_integer(lambda steps, by: within(noise_multiplier, sampling, steps, by), accountant, _MOST_STEPS)


def max_batch_size(
    epsilon: float,
    delta: float,
    sampling: Sampling,
    *,
    noise_multiplier: float,
    steps: int,
    accountant: str = "exact",
    relation: Relation | None = None,
) -> int:
    """The largest whole batch size (expected, for Poisson) with at most the target epsilon, else as in `sampling`.

    >>> from clipwise.sampling import Poisson
    >>> max_batch_size(2.0, 1e-6, Poisson(1_000, 1), steps=155, noise_multiplier=3.0)
    100
    """
    within = _within(epsilon, delta, relation)
    if not isinstance(sampling, (Poisson, FixedSize)):
        raise AccountingError("The batch size can be solved for Poisson and fixed-size sampling only.")
    if sampling.sample_size is None:
        raise AccountingError("At a public rate epsilon does not depend on batch_size: there is nothing to solve for.")

    def fits(batch_size: int, by: str) -> bool:
        scheme: Poisson | FixedSize = replace(sampling, batch_size=batch_size)
        return within(noise_multiplier, scheme, steps, by)

    return _largest_integer(fits, accountant, sampling.sample_size)


def free_cap(
    sampling: Poisson,
    *,
    noise_multiplier: float,
    steps: int,
    delta: float,
    tolerance: float = 1e-3,
    relation: Relation | None = None,
) -> int:
    """The smallest `max_batch_size` that raises epsilon by less than `tolerance` of it.

    With a public rate the sampling says how many records there are at most: `max_batch_size` and `largest` of it.

    >>> from clipwise.sampling import Poisson
    >>> free_cap(Poisson(60_000, 256), noise_multiplier=1.1, steps=14_040, delta=1e-5)
    330
    """
    delta = check_delta(delta)

    most = sampling.largest if sampling.sample_size is None else sampling.sample_size
    if most is None:
        raise AccountingError(
            "With rate= the smallest cap depends on how many records there are at most: give largest=, and it again as "
            "max_batch_size=."
        )

    def spent(cap: int) -> float:
        scheme = replace(sampling, max_batch_size=cap)
        return epsilon_of(noise_multiplier, scheme, steps, delta, relation=relation)

    limit = spent(most) * (1.0 + tolerance)
    expected = math.floor(sampling.batch_size)
    low, high = expected, min(most, 2 * expected + 40)
    while high < most and spent(high) > limit:
        low, high = high, min(most, 2 * high)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if spent(middle) <= limit else (middle, high)
    return high


def _within(epsilon: float, delta: float, relation: Relation | None) -> Callable[[float, Sampling, int, str], bool]:
    """Whether a run (noise, sampling, steps) meets the target by the epsilon of an accountant."""
    target, delta = _check_target(epsilon), check_delta(delta)

    def within(noise_multiplier: float, sampling: Sampling, steps: int, by: str) -> bool:
        return epsilon_of(noise_multiplier, sampling, steps, delta, by, relation=relation) <= target

    return within


def _check_target(epsilon: object) -> float:
    if not is_positive(epsilon):
        raise AccountingError(f"The target epsilon must be a finite number > 0, got {epsilon!r}.")
    return float(epsilon)


def _smallest_noise(spent: Callable[[float], float], target: float, start: float, tight: float = _TIGHT) -> float:
    """An argument with spent(argument) in (1 - tight, 1] times the target; `spent` falls, and `start` is near."""
    points: dict[float, float] = {}

    def gap(log_sigma: float) -> float:
        if log_sigma not in points:
            points[log_sigma] = math.log(max(spent(math.exp(log_sigma)), 1e-300) / target)
        return points[log_sigma]

    low = high = math.log(start)
    floor = math.log(_LIMITS[0]) + 1e-9  # below, epsilon counts as infinite
    # Epsilon falls about as fast as the noise rises, or faster.
    step = min(0.7, max(4.0 * tight, 1.1 * abs(gap(low))))
    while gap(low) <= 0.0:
        if low <= floor:
            return math.exp(low)
        high, low, step = low, max(floor, low - step), 2.0 * step
    ceiling = math.log(_LIMITS[1])
    while gap(high) > 0.0:
        if high >= ceiling:
            raise AccountingError(f"No noise multiplier up to {_LIMITS[1]:g} reaches epsilon {target:g}.")
        low, high, step = high, min(ceiling, high + step), 2.0 * step
    for attempt in range(100):
        if gap(high) >= -tight or high - low < 1e-12:
            break
        # A secant aimed slightly at the safe side, with bisection in between where the curve has a step.
        share = gap(low) / (gap(low) - gap(high))
        guess = low + (high - low) * min(0.95, max(0.05, share + 0.2 * tight / (gap(low) - gap(high))))
        middle = guess if attempt % 3 < 2 else 0.5 * (low + high)
        low, high = (low, middle) if gap(middle) <= 0.0 else (middle, high)
    return math.exp(high)


def _largest_integer(fits: Callable[[int, str], bool], accountant: str, most: int) -> int:
    """The largest value up to `most` that fits; the search starts where the quick Renyi bound says it surely fits."""
    start = _gallop(lambda value: fits(value, "rdp"), 0, most)
    return _gallop(lambda value: fits(value, accountant), start if start and fits(start, accountant) else 0, most)


def _gallop(fits: Callable[[int], bool], low: int, most: int) -> int:
    high = max(1, low + low // 8 + 1)
    while high <= most and fits(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
