"""A recurrent layer over packed sequences that is many nodes of torch, folded to one (`fold.py`).

And what rules of nodes with several outputs say about them, for whatever kind of node.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from clipwise.engine.grams import same_memory
from clipwise.engine.layout import Layout
from clipwise.engine.node import Node, output_meta, saved
from clipwise.engine.rules.base import Finish, Operand, Samples, carries_batch, unsupported
from clipwise.engine.uses import Dense, Outer, Use, accurate


class Joined(Protocol):
    """Several outputs of a node that receive gradients, as one."""

    def join(self, node: Node, gradients: Sequence[Tensor | None]) -> Tensor | None:
        """Their gradients as one; None where nothing reached any."""
        ...

    def layout(self, node: Node, joined: Layout, output: int) -> Layout | None:
        """The layout of one output, where it follows from that of all."""
        ...


class PackedRows:
    """The products of all times of a folded layer, one below the other, and beside them the rows that it reads."""

    def join(self, node: Node, gradients: Sequence[Tensor | None]) -> Tensor | None:
        """The gradients of all rows; None where nothing reached any. Where both sides are the same, one of them."""
        known = next((gradient for gradient in gradients if gradient is not None), None)
        if known is None:
            return None
        shapes = [torch.Size(output_meta(product).shape) for product in node.products] * 2
        parts = [known.new_zeros(s) if g is None else g for g, s in zip(gradients, shapes, strict=True)]
        states, read = parts[: len(node.products)], parts[len(node.products) :]
        rows = torch.cat(states)
        same = all(same_memory(a, b) for a, b in zip(states, read, strict=True))
        return rows if same else torch.cat([rows, torch.cat(read)], 1)

    def layout(self, node: Node, joined: Layout, output: int) -> Layout | None:
        """The values that leave the layer have other rows."""
        return None


PACKED_ROWS = PackedRows()


class Pulled(Protocol):
    """The gradients of some inputs of a node, from those of its outputs."""

    positions: tuple[int, ...]  # negative ones count from the end

    def __call__(self, node: Node, samples: Samples, joined: Tensor) -> dict[int, Tensor]:
        """By position among the inputs of the node."""
        ...


class PulledRows:
    """The gradients of the rows that a folded layer reads, from those of its products."""

    positions: tuple[int, ...] = (0,)

    def __call__(self, node: Node, samples: Samples, joined: Tensor) -> dict[int, Tensor]:
        """Those of the product of all rows that are read are on the right."""
        weight: Tensor = saved(node.entry, "mat2")
        return {0: joined[:, -weight.shape[1] :] @ weight.t()}


PULLED_ROWS = PulledRows()


def steps(operand: Operand, samples: Samples) -> Finish:
    """Z_t = H_t V^T + d and Y = X W^T + b, of which Y_t is read at time t: products with the rows of all times."""
    node, position = operand.node, operand.position
    kinds = 2 if len(operand.graph.edges[operand.k]) == 5 else 1  # bias and weight, or weight
    if samples.axis != 0:
        raise carries_batch(operand, "samples lie along the columns of a product of rows")
    if position == 0:
        raise unsupported(operand, "only weights and biases of a recurrent layer over packed sequences have a rule")
    of_entry, of_weight = position > kinds, position % kinds == 0
    width, name = output_meta(node).shape[1], "mat1" if kinds == 2 else "self"

    def rows() -> Tensor:
        products = [node.entry] if of_entry else node.products
        return samples.split(torch.cat([accurate(saved(product, name)) for product in products]))

    read = rows() if of_weight else None

    def finish(gradient: Tensor) -> Use:
        left: Tensor = samples.once("left", lambda: samples.split(accurate(gradient)))
        if left.shape[-1] > width:
            left = left[..., width:] if of_entry else left[..., :width]
        if read is None:
            return Dense(left.sum(1), operand.shape)
        return Outer(left, read, operand.shape)

    return finish
