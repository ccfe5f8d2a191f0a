"""What every rule works with: where the samples lie, and how to sum a gradient down to a broadcast operand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from clipwise.engine.graph import Graph
from clipwise.engine.layout import Layout
from clipwise.engine.node import LEAF, Node, output_meta
from clipwise.engine.uses import Dense, Use
from clipwise.errors import NotSeparable, UnsupportedNode


class Samples:
    """Where the samples lie in a node's output: a regular layout, or a table of positions for scattered rows.

    `scattered` is the owner of each position, `table` the positions of each sample, (B, T), padded.
    """

    __slots__ = ("_made", "batch_size", "layout", "scattered", "table")

    def __init__(
        self, batch_size: int, layout: Layout, scattered: Tensor | None = None, table: Tensor | None = None
    ) -> None:
        self.batch_size, self.layout, self.scattered, self.table = batch_size, layout, scattered, table
        self._made: dict[str, Any] = {}

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        """What the operands of a node share, made for the first of them."""
        if name not in self._made:
            self._made[name] = make()
        return self._made[name]

    @property
    def axis(self) -> int:
        """The axis of the output that holds the samples."""
        return self.layout.axis

    @property
    def per_row(self) -> bool:
        """Whether the first axis is the batch itself, one entry per sample."""
        return self.layout.exact and self.layout.axis == 0 and self.table is None

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


class Operand(NamedTuple):
    """A shared operand: the node that uses it, its position among the node's inputs, and its shape."""

    graph: Graph
    k: int
    position: int
    shape: tuple[int, ...]

    @property
    def node(self) -> Node:
        """The node of the graph."""
        return self.graph.nodes[self.k]

    @property
    def name(self) -> str:
        """The name of the node."""
        return self.graph.names[self.k]

    @property
    def is_complex(self) -> bool:
        """Whether the operand holds complex numbers."""
        k, output = self.graph.edges[self.k][self.position]
        node = self.graph.nodes[k]
        dtype = node.variable.dtype if self.graph.names[k] == LEAF else output_meta(node, output).dtype
        return bool(dtype.is_complex)


Finish: TypeAlias = Callable[[Tensor], Use]  # gradient of the node's output -> use of the shared operand
Rule: TypeAlias = Callable[[Operand, Samples], Finish]  # reads the saved tensors before backward frees them


def carries_batch(operand: Operand, reason: str) -> NotSeparable:
    """The refusal of an operand that was taken for shared but has the batch axis itself."""
    return NotSeparable(
        f"{operand.name}: {reason}, so the loss of one sample depends on the others. Typical causes: a "
        "contrastive loss, a statistic over the batch, one loss given twice. Use per-sample operations "
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
    if samples.per_row and gradient.shape[1:] == aligned:  # nothing was broadcast but the batch itself
        return Dense(gradient, operand.shape)
    padded = [1] * (gradient.dim() - len(aligned)) + list(aligned)
    if padded[samples.axis] != 1:
        raise carries_batch(operand, f"an operand of shape {tuple(operand.shape)} carries the batch axis")
    split = samples.split(gradient)
    reduced = [k + 1 for k, size in enumerate(padded) if size == 1 and split.shape[k + 1] != 1]
    return Dense(split.sum(reduced) if reduced else split, operand.shape)
