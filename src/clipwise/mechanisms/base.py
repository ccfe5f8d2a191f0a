"""What every mechanism says of itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, TypeAlias

from clipwise.accounting import FederatedRounds, GaussianSteps, ProjectedSteps
from clipwise.sampling import Sampling

if TYPE_CHECKING:
    from clipwise.plan import Plan

__all__ = ["Mechanism", "Repeated"]

Repeated: TypeAlias = GaussianSteps | ProjectedSteps | FederatedRounds
"""The event of some steps, or rounds, with the same noise."""


class Mechanism(ABC):
    """A noisy sum, as it is released in every step of a plan.

    >>> from clipwise import FullBatch
    >>> from clipwise.mechanisms import Gaussian
    >>> isinstance(Gaussian(), Mechanism), Gaussian().event(FullBatch(10), 2.0, 3).count
    (True, 3)
    """

    unit: ClassVar[str] = "example"
    """Whose privacy is protected, as on the ledger."""
    learns_norm: ClassVar[bool] = False
    """Whether the clipping norm can follow what was released (`AdaptiveClip`)."""

    @abstractmethod
    def event(self, sampling: Sampling, noise_multiplier: float, count: int) -> Repeated:
        """What `count` steps with this noise put on the ledger."""

    def check(self, plan: Plan) -> None:  # noqa: B027 - most plans are fine for most mechanisms
        """Refuse a plan whose sampling or clipping this mechanism has no proof for."""

    def denominator(self, sampling: Sampling) -> float:
        """The public number that every noisy sum is divided by."""
        return sampling.batch_size
