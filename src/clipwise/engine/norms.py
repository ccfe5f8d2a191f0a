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
from clipwise.engine.precision import widened
from clipwise.engine.run import Backward


def working_dtype(losses: Tensor, parameters: Iterable[Tensor]) -> torch.dtype:
    """The precision in which norms are trusted: float64 where everything is, float32 otherwise."""
    double = losses.dtype == torch.float64 and all(p.dtype == torch.float64 for p in parameters)
    return torch.float64 if double else torch.float32


@cache
def negligible_norm(dtype: torch.dtype) -> float:
    """Norms below this are not accurate, since their squares run out of exponents; they are taken for zero."""
    numbers = torch.finfo(widened(dtype))
    return math.sqrt(numbers.tiny / numbers.eps)


@cache
def largest_norm(dtype: torch.dtype) -> float:
    """Beyond this the square of a norm is beyond `dtype`."""
    return math.sqrt(torch.finfo(dtype).max)


def bad_samples(norms: Tensor, losses: Tensor, dtype: torch.dtype) -> Tensor:
    """Samples whose loss or gradient is not finite, or whose squared norm is beyond what `dtype` holds."""
    return ~((norms <= largest_norm(dtype)) & torch.isfinite(losses))


def settled(backward: Backward, squared: Mapping[int, Tensor], losses: Tensor) -> dict[int, Tensor]:
    """Squared norms with those that are not finite found again, from gradients and in float64.

    A huge activation whose gradient is zero gives 0 * inf where lengths or Gram matrices are multiplied, and a gradient
    of 1e25 has a square beyond float32. Autograd on the sample alone would find either in order.
    """
    known = {place: values.double() for place, values in squared.items()}
    total = sum(known.values(), torch.zeros_like(losses, dtype=torch.float64))
    doubtful = (~torch.isfinite(total) & torch.isfinite(losses)).nonzero().flatten().tolist()
    for sample in doubtful:
        for place, gradient in backward.gradients(slice(sample, sample + 1)).items():
            known[place][sample] = rounded_up(gradient.double().square().sum(), _terms(backward, place, sample))
    return known


def _terms(backward: Backward, parameter: int, sample: int) -> Tensor:
    """The lengths of all that is added for one sample, added up in float64."""
    uses = [use for edge in backward.plan.roots[parameter] for use in backward.uses.get(edge, [])]
    only = torch.arange(backward.batch_size, device=backward.graph.parameters[parameter].device) == sample
    return torch.stack([use.precise(only).terms().sum() for use in uses]).sum()
