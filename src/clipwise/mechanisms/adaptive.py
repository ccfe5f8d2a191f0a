"""A clipping norm that follows a quantile of the users' update norms, learnt privately (Andrew et al., 2021)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from clipwise._validate import is_number, is_positive
from clipwise.clipping import Abadi, Flat
from clipwise.errors import InvalidPlan

__all__ = ["AdaptiveClip"]

_WIDEST = 1e6


@dataclass(frozen=True)
class AdaptiveClip:
    """`Abadi` with a norm that starts at `R` and moves until a `quantile` of the updates is no longer than it.

    Every selected user says in one bit whether the update was within the norm. The noisy share of those moves it:
    R <- R * exp(-learning_rate * (share within - quantile)).

    The bits are released beside the sum, so they cost privacy. `share` is the part of the round's budget, measured by
    1/noise_multiplier^2, that goes to them; updates get the rest, as slightly more noise. The default fits the
    authors' advice of noise of standard deviation (expected users)/20 for 100 expected users and noise multiplier 1.

    Guarantees: bits and updates of a round together are one Gaussian mechanism of the plan's noise multiplier.

    >>> clip = AdaptiveClip(R=1.0, share=0.01)
    >>> [round(x, 4) for x in clip.split(1.0)]
    [1.005, 5.0]
    """

    R: float
    quantile: float = 0.5
    learning_rate: float = 0.2
    share: float = 0.01

    def __post_init__(self) -> None:
        Abadi(self.R)  # the same numbers are possible
        for name in ("quantile", "share"):
            if not is_number(getattr(self, name)) or not 0 < getattr(self, name) < 1:
                raise InvalidPlan(f"AdaptiveClip({name}=...) must lie between 0 and 1, got {getattr(self, name)!r}.")
        if not is_positive(self.learning_rate):
            raise InvalidPlan(
                f"AdaptiveClip(learning_rate=...) must be a positive finite number, got {self.learning_rate!r}."
            )

    def at(self, step: int, steps: int) -> Flat:
        """The clipping of the first round. That of later ones follows what was released: see `style`."""
        return self.style(self.R)

    def style(self, bound: float) -> Flat:
        """The clipping of a round in which the norm is `bound`."""
        return Flat(Abadi(bound))

    def split(self, noise_multiplier: float) -> tuple[float, float]:
        """Noise multiplier of the updates, and standard deviation of the noise on the sum of bits.

        A user moves the sum of (bit - 1/2) by 1/2. In units of its own noise, updates move by 1/z and bits by
        1/(2 s), jointly by the root of 1/z^2 + 1/(2 s)^2, which is 1/noise_multiplier.
        """
        return noise_multiplier / math.sqrt(1 - self.share), noise_multiplier / (2 * math.sqrt(self.share))

    def move(self, bound: float, within: float) -> float:
        """The norm of the next round, given the noisy share of updates that were within this round's."""
        moved = math.log(bound) - self.learning_rate * (within - self.quantile)
        widest = math.log(_WIDEST)
        return math.exp(min(max(moved, math.log(self.R) - widest), math.log(self.R) + widest))
