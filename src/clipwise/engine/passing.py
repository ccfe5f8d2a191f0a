"""How a probe passes places that let no gradient through, one function per family of operations.

An element-wise operation hands its output's gradient on as it came, a product by zero weights uses others. Each
function gives the gradient of one input for the probe, from the gradient that the node's backward gave and the one that
arrived at its output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from clipwise.engine.layout import all_finite
from clipwise.engine.node import Node, saved, saved_int

Passing: TypeAlias = Callable[[Node, int, Tensor, Tensor], Tensor]  # node, position of the input, gradient, arrived


def finite(node: Node, position: int, gradient: Tensor, arrived: Tensor) -> Tensor:
    """The gradient itself, without what is not finite."""
    return gradient if all_finite(gradient) else gradient.nan_to_num(0, 0, 0)


def pointwise(node: Node, position: int, gradient: Tensor, arrived: Tensor) -> Tensor:
    """The gradient of an element-wise operation's input, where it is of use, else the output's as it came."""
    try:
        instead = arrived.sum_to_size(gradient.shape)
    except RuntimeError:
        return gradient.nan_to_num(0, 0, 0)
    return alive(gradient, instead)


def is_dead(gradient: Tensor) -> bool:
    """Whether a gradient shows nothing, or not everything."""
    return not (bool(gradient.any()) and all_finite(gradient))


def alive(gradient: Tensor, instead: Tensor) -> Tensor:
    """A gradient with another one where it is zero or not finite."""
    return torch.where((gradient != 0) & torch.isfinite(gradient), gradient, instead.to(gradient.dtype))


def random(shape: Sequence[int], like: Tensor) -> Tensor:
    """Numbers in [0.5, 1.5), the same at every call: colours must only scale."""
    generator = torch.Generator().manual_seed(0)
    return (torch.rand(*shape, generator=generator, device="cpu") + 0.5).to(like)


def cell(node: Node, position: int, gradient: Tensor, arrived: Tensor) -> Tensor:
    """The gradient of a recurrent cell's input, where it is of use, else that of the next state, once for each gate."""
    if gradient.dim() != arrived.dim():  # of a bias
        return finite(node, position, gradient, arrived)
    return alive(gradient, arrived.repeat(1, gradient.shape[1] // arrived.shape[1]))


# Operations that bring the elements of their input together within some axes, and keep its shape.


def _within(axes_of: Callable[[Node, int], Sequence[int] | None]) -> Passing:
    """What comes together along some axes comes together here too, so that samples which mix there still show."""

    def passing(node: Node, position: int, gradient: Tensor, arrived: Tensor) -> Tensor:
        axes = axes_of(node, gradient.dim()) if position == 0 and gradient.shape == arrived.shape else None
        if axes is None:
            return finite(node, position, gradient, arrived)
        if not axes:
            return alive(gradient, arrived)
        together = (arrived * random(arrived.shape, arrived)).sum(list(axes), keepdim=True)
        return alive(gradient, arrived + together)

    return passing


@_within
def softmax(node: Node, rank: int) -> Sequence[int]:
    """One axis."""
    return [saved_int(node, "dim")]


@_within
def layer_norm(node: Node, rank: int) -> Sequence[int]:
    """The trailing axes."""
    return range(-len(saved(node, "normalized_shape")), 0)


@_within
def group_norm(node: Node, rank: int) -> Sequence[int]:
    """All axes of a sample."""
    return range(1, rank)


@_within
def batch_norm(node: Node, rank: int) -> Sequence[int] | None:
    """None with fixed statistics; not known in training mode."""
    return None if saved(node, "training") else ()
