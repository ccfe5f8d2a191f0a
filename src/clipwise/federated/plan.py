"""The plan of a federated run: who takes part, how updates are bounded, how much noise, for how many rounds."""

from __future__ import annotations

from dataclasses import dataclass, replace

from clipwise._validate import is_count, is_number
from clipwise.accounting import FederatedRounds, Relation, account, noise_scale
from clipwise.clipping import BatchClip, Clip, Flat, Rule, Style
from clipwise.errors import InvalidPlan, InvalidSampling
from clipwise.federated.adaptive import AdaptiveClip
from clipwise.plan import Plan
from clipwise.sampling import FullBatch, Poisson

__all__ = ["FederatedPlan"]

_LEAST = 1e-30  # of weights: what is divided by them must stay a float32


@dataclass(frozen=True)
class FederatedPlan:
    """How rounds select users, bound their updates and add noise. What is protected is everything of one user.

    `sampling` counts users: `Poisson(users, expected per round)`, `Poisson(rate=..., batch_size=expected per round)`
    where their number is not public, or `FullBatch(users)` for all in every round. `clip`
    bounds the norm of a user's update: `Abadi(R)` is the paper's FlatClip, `GlobalScaled(R, Z)` its GlobalClip;
    styles, schedules over rounds and `AdaptiveClip` are possible as well. A user's weight is the number of its
    examples, but at most `weight_cap`: with the default of 1 all users weigh the same. `total_weight` is the
    paper's W, a number that is public and fixed (`users * weight_cap` unless given).

    Guarantees: the noise on the weighted sum has `noise_multiplier` times `weight_cap * R`, which is the most that
    one user can move it, so privacy depends on `sampling`, `rounds` and `noise_multiplier` alone.

    >>> from clipwise import Abadi, Poisson
    >>> plan = FederatedPlan(sampling=Poisson(1_000, 50), rounds=100, clip=Abadi(0.5), noise_multiplier=1.0)
    >>> plan.rate, plan.denominator, 2 < plan.epsilon(delta=1e-4) < 6
    (0.05, 50.0, True)
    """

    sampling: Poisson | FullBatch
    rounds: int
    clip: Clip | Rule | AdaptiveClip
    noise_multiplier: float | None = None
    weight_cap: float = 1.0
    total_weight: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.sampling, (Poisson, FullBatch)) or getattr(self.sampling, "max_batch_size", None):
            raise InvalidSampling(
                f"federated rounds need sampling=Poisson(users, expected users per round), every user by its own "
                f"independent coin, or FullBatch(users); got {self.sampling!r}. A fixed fraction or number of users, "
                "such as Flower's fraction_train, is another mechanism and would be accounted wrongly."
            )
        if not is_count(self.rounds):
            raise InvalidPlan(f"rounds must be a positive integer, got {self.rounds!r}.")
        for name, value in (("weight_cap", self.weight_cap), ("total_weight", self.total_weight)):
            if value is not None and not (is_number(value) and _LEAST <= value <= 1 / _LEAST):
                raise InvalidPlan(f"{name} must be a positive number from {_LEAST:g} to {1 / _LEAST:g}, got {value!r}.")
        core = self._core()  # clipping and noise are checked as in any plan
        for style in (core.style(0), core.style(self.rounds - 1)):
            if isinstance(style, Flat) and isinstance(style.rule, BatchClip):
                raise InvalidPlan("BatchClip needs the norms of all, and a user knows its own: use another rule.")
        if not isinstance(self.clip, AdaptiveClip):
            object.__setattr__(self, "clip", core.clip)

    def _core(self) -> Plan:
        clip = self.clip.style(self.clip.R) if isinstance(self.clip, AdaptiveClip) else self.clip
        return Plan(sampling=self.sampling, steps=self.rounds, clip=clip, noise_multiplier=self.noise_multiplier)

    @property
    def users(self) -> int | None:
        """How many users there are; None: the rate is public, and their number is not."""
        return self.sampling.sample_size

    @property
    def rate(self) -> float:
        """The probability q with which a user takes part in a round."""
        return self.sampling.rate if isinstance(self.sampling, Poisson) else 1.0

    @property
    def denominator(self) -> float:
        """q * W: the public number that every noisy sum is divided by."""
        if self.total_weight is not None:
            return self.rate * self.total_weight
        if self.users is None:
            return self.sampling.batch_size * self.weight_cap
        return self.rate * (self.users * self.weight_cap)

    @property
    def expected(self) -> float:
        """The public number of users that take part in a round, on average."""
        return self.sampling.batch_size if self.users is None else self.rate * self.users

    @property
    def is_private(self) -> bool:
        """Whether updates are bounded and there will be noise."""
        return self._core().is_private

    def style(self, number: int, bound: float | None = None) -> Style:
        """The clipping style of round `number` (from 0); an adaptive norm stands at `bound` (None: at its start)."""
        if isinstance(self.clip, AdaptiveClip):
            return self.clip.style(self.clip.R if bound is None else bound)
        return self._core().style(number)

    def calibrate(
        self, epsilon: float, delta: float, accountant: str = "exact", *, relation: Relation | None = None
    ) -> FederatedPlan:
        """The same plan with the smallest noise that keeps the whole run within (epsilon, delta) for every user.

        >>> from clipwise import Abadi, Poisson
        >>> plan = FederatedPlan(sampling=Poisson(1_000, 50), rounds=100, clip=Abadi(0.5))
        >>> 0.8 < plan.calibrate(epsilon=4.0, delta=1e-4).noise_multiplier < 1.2
        True
        """
        if self.noise_multiplier == 0 or not self.is_private:
            raise InvalidPlan(f"there is no noise that makes {self.clip!r} with {self.noise_multiplier!r} private.")
        shape = (FederatedRounds(self.sampling, 1.0, self.rounds),)
        return replace(self, noise_multiplier=noise_scale(shape, epsilon, delta, accountant, relation=relation))

    def epsilon(self, delta: float, accountant: str = "exact", *, relation: Relation | None = None) -> float:
        """The epsilon that the whole run will have spent at this `delta`, for every user."""
        return account(self.events(), delta, accountant, relation=relation).epsilon

    def events(self) -> tuple[FederatedRounds, ...]:
        """What the whole run will have put on its ledger."""
        if self.noise_multiplier is None:
            raise InvalidPlan(
                "the plan has no noise yet: plan = plan.calibrate(epsilon=..., delta=...), or give noise_multiplier."
            )
        return (FederatedRounds(self.sampling, self.noise_multiplier, self.rounds),)
