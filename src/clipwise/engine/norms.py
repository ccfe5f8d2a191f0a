"""Which gradients count as zero and which as bad, and norms that no magnitude of the data spoils.

Both decisions are a sample's own: they are the same alone and in any company, whichever way its norm was found.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import cache

import torch
from torch import Tensor

from clipwise.engine.grams import rounded_up
from clipwise.engine.lengths import largest_norm
from clipwise.engine.precision import widened
from clipwise.engine.run import Backward

_USUAL = 1e-15, 1e3  # bounds of a sample's contribution


def working_dtype(losses: Tensor, parameters: Iterable[Tensor]) -> torch.dtype:
    """The precision in which norms are trusted: float64 where everything is, float32 otherwise."""
    double = losses.dtype == torch.float64 and all(p.dtype == torch.float64 for p in parameters)
    return torch.float64 if double else torch.float32


@cache
def negligible_norm(dtype: torch.dtype) -> float:
    """Norms below this are not accurate, since their squares run out of exponents; they are taken for zero."""
    numbers = torch.finfo(widened(dtype))
    return math.sqrt(numbers.tiny / numbers.eps)


def is_usual(bound: float) -> bool:
    """Whether factors for this bound are far from both ends of float32, since norms are neither negligible nor bad."""
    return _USUAL[0] <= bound <= _USUAL[1]


def usable(factors: Tensor, dtype: torch.dtype) -> Tensor:
    """Factors with those left out that `dtype` does not hold, or that may lead a finite row out of it."""
    most = _USUAL[1] / negligible_norm(dtype)
    return factors.masked_fill((factors < torch.finfo(dtype).tiny) | (factors > most), 0)


def bad_samples(norms: Tensor, losses: Tensor, dtype: torch.dtype) -> Tensor:
    """Samples whose loss or gradient is not finite, or whose squared norm is beyond what `dtype` holds."""
    return ~((norms <= largest_norm(dtype)) & torch.isfinite(losses))


def settled(backward: Backward, squared: Mapping[int, Tensor], losses: Tensor) -> dict[int, Tensor]:
    """Squared norms with those that are not finite found again, from gradients and in float64.

    A huge activation whose gradient is zero gives 0 * inf where lengths or Gram matrices are multiplied, and a gradient
    of 1e25 has a square beyond float32. Autograd on the sample alone would find either in order. What these samples add
    to the sum is formed in float64.
    """
    known = {place: values.double() for place, values in squared.items()}
    total = sum(known.values(), torch.zeros_like(losses, dtype=torch.float64))
    doubtful = ~torch.isfinite(total) & torch.isfinite(losses)
    if bool(doubtful.any()):
        backward.take_care(doubtful)
    for sample in doubtful.nonzero().flatten().tolist():
        for place, gradient in backward.gradients(slice(sample, sample + 1)).items():
            known[place][sample] = rounded_up(gradient.double().square().sum(), _terms(backward, place, sample))
    return known


def _terms(backward: Backward, parameter: int, sample: int) -> Tensor:
    """The lengths of all that is added for one sample, added up in float64."""
    uses = [use for edge in backward.plan.roots[parameter] for use in backward.uses.get(edge, [])]
    only = torch.arange(backward.batch_size, device=backward.graph.parameters[parameter].device) == sample
    return torch.stack([use.precise(only).terms().sum() for use in uses]).sum()
