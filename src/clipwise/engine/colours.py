"""The colours of samples: numbers that show whose an element of a gradient is.

A colour probe back-propagates the cotangent `v`, one colour per sample, beside the cotangent of ones. Back-propagation
is linear and scaling by a power of two is exact in floating point, so an element of a gradient that belongs to sample
i alone is scaled by exactly v_i, and one that mixes samples is scaled by a weighted mean of their colours.

That mean must not be the colour of another sample, as (-2 + 4) / 2 = 1 would be. Colours are signed powers of four:
the mean of two or of three is never another one. Whatever the weights are, they are chosen without knowledge of the
colours, which are drawn again for every probe, at least two for each sample. Only a refusal can depend on the draw.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

NARROW = range(4)  # exponents of four; few for float16, which overflows soon
WIDE = range(-4, 12)

_FEWEST = 2  # colourings: weights may be such that one in thirty draws of a single one shows nothing


@dataclass(frozen=True)
class Colours:
    """Colourings (B,) that together tell every sample from every other."""

    each: Sequence[Tensor]
    exponents: range = WIDE

    @cached_property
    def _whose(self) -> Tensor:
        """The sample with each number that the digits of colours can have; -1 where there is none."""
        numbers = self._numbers(self.each)
        table = numbers.new_full(((2 * len(self.exponents)) ** len(self.each),), -1)
        table[numbers] = torch.arange(len(numbers), device=numbers.device)
        return table

    def samples(self, ratios: Sequence[Tensor]) -> Tensor:
        """The sample whose colours are nearest to these ratios; -1 where nobody has such."""
        return self._whose[self._numbers(ratios)]

    def _numbers(self, ratios: Sequence[Tensor]) -> Tensor:
        """Colours are the digits of a number."""
        number = torch.zeros(ratios[0].shape, dtype=torch.long, device=ratios[0].device)
        for ratio in reversed(ratios):
            power = torch.frexp(ratio).exponent.long().sub_(1).div_(2, rounding_mode="floor")
            digit = power.sub_(self.exponents.start).clamp_(0, len(self.exponents) - 1).mul_(2).add_(ratio < 0)
            number.mul_(2 * len(self.exponents)).add_(digit)
        return number


def drawn(batch_size: int, like: Tensor, exponents: range = WIDE) -> Colours:
    """New colours for a batch, from the system's entropy: no seed tells them, and they change no seeded run."""
    palette = [sign * 4.0**k for k in exponents for sign in (1, -1)]
    count = _FEWEST
    while len(palette) ** count < batch_size:
        count += 1
    generator = torch.Generator(device="cpu")
    generator.seed()
    numbers = torch.randperm(len(palette) ** count, generator=generator, device="cpu")[:batch_size]
    colours = torch.tensor(palette, dtype=like.dtype, device="cpu")
    digits = [colours[numbers // len(palette) ** place % len(palette)] for place in range(count)]
    return Colours(torch.stack(digits).to(like.device).unbind(), exponents)
