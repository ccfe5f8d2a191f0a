"""What every rule works with: where the samples lie, and how to sum a gradient down to a broadcast operand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from clipwise.engine.graph import Node
from clipwise.engine.layout import Layout
from clipwise.engine.uses import Dense, Use
from clipwise.errors import NotSeparable, UnsupportedNode


@dataclass(frozen=True)
class Samples:
    """Where the samples lie in a node's output: a regular layout, or a table of positions for scattered rows."""

    batch_size: int
    layout: Layout
    scattered: Tensor | None = None  # the owner of each position
    table: Tensor | None = None  # (B, T) row positions, padded

    @property
    def axis(self) -> int:
        """The axis of the output that holds the samples."""
        return self.layout.axis

    def owners(self, size: int) -> Tensor:
        """The sample of each position along the batch axis, of the given size."""
        shape = [1] * self.axis + [size]
        return self.layout.owners(shape, self.batch_size) if self.scattered is None else self.scattered

    def split(self, tensor: Tensor, axis: int | None = None) -> Tensor:
        """Batch axis first; what is left of its axis stays in place. Padded rows of scattered samples are zero."""
        if self.table is None:
            return self.layout.split(tensor, self.batch_size, axis)
        k = self.axis if axis is None else axis
        rows = tensor.movedim(k, 0)
        padded = torch.cat([rows, rows.new_zeros(1, *rows.shape[1:])])
        return padded[self.table].movedim(1, k + 1)


@dataclass(frozen=True)
class Operand:
    """A shared operand of a node: its position among the node's inputs, its shape, and its edge for autograd."""

    node: Node
    name: str
    position: int
    shape: tuple[int, ...]
    edge: GradientEdge | Tensor


Finish: TypeAlias = Callable[[Tensor], Use]  # gradient of the node's output -> use of the shared operand
Rule: TypeAlias = Callable[[Operand, Samples], Finish]  # reads the saved tensors before backward frees them


def carries_batch(operand: Operand, reason: str) -> NotSeparable:
    """The refusal of an operand that was taken for shared but has the batch axis itself."""
    return NotSeparable(
        f"{operand.name}: {reason}, so the loss of one sample depends on the others. Typical causes: batch "
        "normalization in training mode, a contrastive loss, a statistic over the batch. Use per-sample operations "
        "(LayerNorm, GroupNorm, eval-mode BatchNorm)."
    )


def unsupported(operand: Operand, why: str) -> UnsupportedNode:
    """The refusal of a node that this rule family knows, in a form it does not."""
    return UnsupportedNode(
        f"{operand.name} uses a parameter in a way that has no per-sample rule: {why}. Write it with supported "
        "operations, or freeze the parameter."
    )


def sum_to_operand(gradient: Tensor, samples: Samples, operand: Operand, aligned: Sequence[int]) -> Dense:
    """Sum the output's gradient down to a broadcast operand, sample by sample.

    `aligned` is the operand's shape with one entry per output axis from the right (1 where it is broadcast).
    """
    padded = [1] * (gradient.dim() - len(aligned)) + list(aligned)
    if padded[samples.axis] != 1:
        raise carries_batch(operand, f"an operand of shape {tuple(operand.shape)} carries the batch axis")
    split = samples.split(gradient)
    reduced = [k + 1 for k, size in enumerate(padded) if size == 1 and split.shape[k + 1] != 1]
    return Dense(split.sum(reduced) if reduced else split, operand.shape)
