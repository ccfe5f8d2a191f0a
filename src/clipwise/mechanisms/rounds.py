"""Federated rounds: the weighted sum of what users send."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from clipwise._validate import is_number
from clipwise.accounting import FederatedRounds
from clipwise.clipping import BatchClip, Flat
from clipwise.errors import InvalidPlan, InvalidSampling
from clipwise.mechanisms.base import Mechanism
from clipwise.sampling import FullBatch, Poisson, Sampling

if TYPE_CHECKING:
    from clipwise.plan import Plan

__all__ = ["Rounds"]

_LEAST = 1e-30  # of weights: what is divided by them must stay a float32


@dataclass(frozen=True)
class Rounds(Mechanism):
    """Rounds of users, each of whom sends one update. What is protected is everything of one user.

    The plan's `sampling` counts users: `Poisson(users, expected per round)`, `Poisson(rate=..., batch_size=expected
    per round)` where their number is not public, or `FullBatch(users)` for all in every round. Its `steps` are rounds.
    Its `clip` bounds the norm of a user's update: `Abadi(R)` is the paper's FlatClip, `GlobalScaled(R, Z)` its
    GlobalClip; styles, schedules over rounds and `AdaptiveClip` are possible as well.

    A user's weight is the number of its examples, but at most `weight_cap`: with the default of 1 all users weigh the
    same. `total_weight` is the paper's W, a number that is public and fixed (`users * weight_cap` unless given).

    Guarantees: the noise on the weighted sum has `noise_multiplier` times `weight_cap * R`, which is the most that
    one user can move it, so privacy depends on `sampling`, `steps` and `noise_multiplier` alone.

    >>> from clipwise import Abadi, Plan, Poisson
    >>> plan = Plan(Poisson(1_000, 50), steps=100, clip=Abadi(0.5), noise_multiplier=1.0, mechanism=Rounds())
    >>> plan.denominator, 2 < plan.epsilon(delta=1e-4) < 6
    (50.0, True)
    """

    unit: ClassVar[str] = "client"
    learns_norm: ClassVar[bool] = True

    weight_cap: float = 1.0
    total_weight: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("weight_cap", self.weight_cap), ("total_weight", self.total_weight)):
            if value is not None and not (is_number(value) and _LEAST <= value <= 1 / _LEAST):
                raise InvalidPlan(f"{name} must be a positive number from {_LEAST:g} to {1 / _LEAST:g}, got {value!r}.")

    def event(self, sampling: Sampling, noise_multiplier: float, count: int) -> FederatedRounds:
        """What `count` rounds with this noise put on the ledger."""
        return FederatedRounds(sampling, noise_multiplier, count)

    def check(self, plan: Plan) -> None:
        """Refuse users who are not selected by coins of their own, and clipping that needs the norms of all."""
        _selected(plan.sampling)
        for style in plan.styles:
            if isinstance(style, Flat) and isinstance(style.rule, BatchClip):
                raise InvalidPlan("BatchClip needs the norms of all, and a user knows its own: use another rule.")

    def rate(self, sampling: Sampling) -> float:
        """The probability q with which a user takes part in a round."""
        return _selected(sampling).rate

    def denominator(self, sampling: Sampling) -> float:
        """q * W: the public number that every noisy sum is divided by."""
        scheme = _selected(sampling)
        if self.total_weight is not None:
            return scheme.rate * self.total_weight
        if scheme.sample_size is None:
            return scheme.batch_size * self.weight_cap
        return scheme.rate * (scheme.sample_size * self.weight_cap)


def _selected(sampling: Sampling) -> Poisson | FullBatch:
    if isinstance(sampling, FullBatch) or (isinstance(sampling, Poisson) and not sampling.max_batch_size):
        return sampling
    raise InvalidSampling(
        f"federated rounds need sampling=Poisson(users, expected users per round), every user by its own independent "
        f"coin, or FullBatch(users); got {sampling!r}. A fixed fraction or number of users, such as Flower's "
        "fraction_train, is another mechanism and would be accounted wrongly."
    )
