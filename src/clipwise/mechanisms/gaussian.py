"""DP-SGD's own: the sum of clipped gradients with Gaussian noise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from clipwise.accounting import GaussianSteps
from clipwise.mechanisms.base import Mechanism
from clipwise.sampling import Sampling

__all__ = ["Gaussian"]


@dataclass(frozen=True)
class Gaussian(Mechanism):
    """The sum of the clipped gradients of a batch, with Gaussian noise: what a plan releases unless it says otherwise.

    >>> from clipwise import Abadi, Plan, Poisson
    >>> Plan(Poisson(1_000, 50), steps=100, clip=Abadi(1.0)).mechanism
    Gaussian()
    """

    learns_norm: ClassVar[bool] = True

    def event(self, sampling: Sampling, noise_multiplier: float, count: int) -> GaussianSteps:
        """What `count` steps with this noise put on the ledger."""
        return GaussianSteps(sampling, noise_multiplier, count)
