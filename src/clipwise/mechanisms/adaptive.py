"""A clipping norm that follows a quantile of the norms it clips, learnt privately (Andrew et al., 2021).

A step, or a round, releases one vector: the sum of what was clipped, and the sum of centred bits, one for each sample
or user. In units of its own noise the first moves by 1/z' for one record and the second by 1/(2 s), jointly by

    sqrt(1/z'^2 + 1/(2 s)^2) = 1/z,

where z is the noise multiplier of the plan. So the pair is one sum of vectors of length at most 1, in units of noise of
multiplier z, which is all that the accounting of a step uses: of every sampling and of every relation. A record that is
blanked, added or removed moves the pair by 1/z at most; one that takes the place of another moves it by 2/z, the bit by
1 instead of 1/2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from clipwise._validate import is_number, is_positive
from clipwise.clipping import Abadi, Flat
from clipwise.errors import InvalidPlan

__all__ = ["AdaptiveClip"]

_WIDEST, _LARGEST = 1e6, 1e30
_USUAL_FLOOR = 0.01


@dataclass(frozen=True)
class AdaptiveClip:
    """`Abadi` with a norm that starts at `R` and moves until a `quantile` of the norms is no longer than it.

    Norms are those of the samples' gradients, or of users' updates in federated rounds. One noisy number of each step,
    the share of norms that were within R, moves the norm of the next one:
    R <- R * exp(-learning_rate * (share within - quantile)). R is never below `floor` (a hundredth of the first R
    unless given), since a norm that shrinks with the gradients makes a model overconfident (docs/clipping.md).

    The share is released beside the sum, so it costs privacy. `share` is the part of a step's budget, measured by
    1/noise_multiplier^2, that goes to it; the sum gets the rest, as slightly more noise. The default fits the authors'
    advice of noise of standard deviation (expected users)/20 for 100 expected users and noise multiplier 1.

    Guarantees: the share and the sum of a step together are one Gaussian mechanism of the plan's noise multiplier. The
    norm of a step depends on what earlier steps released, and on nothing else of the data.

    >>> clip = AdaptiveClip(R=1.0, quantile=0.5, floor=0.1)
    >>> [round(x, 4) for x in clip.split(1.0)]
    [1.005, 5.0]
    >>> round(clip.move(1.0, within=0.9), 4), clip.move(0.1, within=0.9)
    (0.9231, 0.1)
    """

    R: float
    quantile: float = 0.5
    floor: float | None = None
    learning_rate: float = 0.2
    share: float = 0.01

    def __post_init__(self) -> None:
        Abadi(self.R)  # the same numbers are possible
        if self.floor is None:
            object.__setattr__(self, "floor", max(self.R * _USUAL_FLOOR, min(self.R, torch.finfo(torch.float32).tiny)))
        if not is_positive(self.floor) or not torch.finfo(torch.float32).tiny <= self.floor <= self.R:
            raise InvalidPlan(
                f"AdaptiveClip(floor=...) must be a positive number of at most R = {self.R!r}, below which the norm "
                f"never falls, got {self.floor!r}."
            )
        for name in ("quantile", "share"):
            if not is_number(getattr(self, name)) or not 0 < getattr(self, name) < 1:
                raise InvalidPlan(f"AdaptiveClip({name}=...) must lie between 0 and 1, got {getattr(self, name)!r}.")
        if not is_positive(self.learning_rate):
            raise InvalidPlan(
                f"AdaptiveClip(learning_rate=...) must be a positive finite number, got {self.learning_rate!r}."
            )

    @property
    def highest(self) -> float:
        """A million times the first norm, but no number that gradients cannot have: where a norm stops as well."""
        return max(self.R, min(self.R * _WIDEST, _LARGEST))

    @property
    def lowest(self) -> float:
        """The floor."""
        assert self.floor is not None
        return self.floor

    def at(self, step: int, steps: int) -> Flat:
        """The clipping of the first step. That of later ones follows what was released: see `style`."""
        return self.style(self.R)

    def style(self, bound: float) -> Flat:
        """The clipping of a step in which the norm is `bound`."""
        return Flat(Abadi(bound))

    def split(self, noise_multiplier: float) -> tuple[float, float]:
        """Noise multiplier of the sum, and standard deviation of the noise on the sum of centred bits."""
        return noise_multiplier / math.sqrt(1 - self.share), noise_multiplier / (2 * math.sqrt(self.share))

    @staticmethod
    def centred(norms: Tensor, bad: Tensor, bound: float) -> float:
        """The sum of (bit - 1/2): 1/2 for a norm of at most `bound`, -1/2 for a longer one, 0 for what was left out.

        >>> AdaptiveClip.centred(torch.tensor([0.5, 0.7, 3.0, 9.0]), torch.tensor([False, False, False, True]), 1.0)
        0.5
        """
        counted = ~bad & torch.isfinite(norms)
        within = int((counted & (norms <= bound)).sum())
        return within - int(counted.sum()) / 2

    def move(self, bound: float, within: float) -> float:
        """The norm of the next step, given the noisy share of norms that were within this one's."""
        moved = math.log(bound) - self.learning_rate * (within - self.quantile)
        # Compared as logarithms, where nothing overflows; a norm at its limit is the limit itself, to the last bit.
        if moved <= math.log(self.lowest):
            return self.lowest
        return self.highest if moved >= math.log(self.highest) else math.exp(moved)
