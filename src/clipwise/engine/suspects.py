"""What is refused, in words, and what the graph alone makes suspicious.

Suspicious are data that met parameters in a shape that could hold the batch.

A table of positions looks the same as a batch whose samples mix, as long as it is only broadcast; a reduction or a
product of it does not. With evidence of where values come from, nothing is suspected.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from clipwise.engine.graph import Graph
from clipwise.engine.node import Node, output_meta, saved_int, saved_or
from clipwise.engine.ops import BatchEntry, Op, op_of
from clipwise.engine.products import Product
from clipwise.engine.rules import norm
from clipwise.errors import NotSeparable


class Suspects:
    """Follows suspicious values through a graph."""

    def __init__(self, graph: Graph, reaches: Sequence[frozenset[int]], batch_size: int) -> None:
        self.graph, self.reaches, self.batch_size = graph, reaches, batch_size

    def mixed(self, doubtful: set[int], is_shared: Callable[[int], bool]) -> int | None:
        """A suspicious node whose rows are brought together by what follows; None if there is none."""
        suspects = {k for k in doubtful if self._may_hold_the_batch(k)}
        for k in self.graph.leaves_first:
            below = [child for child, _ in self.graph.edges[k]]
            if not suspects.intersection(below):
                continue
            if not self._keeps_rows(k, suspects):
                return next(child for child in below if child in suspects)
            if is_shared(k):
                suspects.add(k)
        return None

    def _op(self, k: int) -> Op:
        return op_of(self.graph.names[k])

    def _may_hold_the_batch(self, k: int) -> bool:
        return any(self.graph.shape((k, 0))[axis] % self.batch_size == 0 for axis in self._data_axes(k))

    def _data_axes(self, k: int) -> list[int]:
        """The output axes of a product or a look-up that come from the operand that is not differentiated."""
        op = self._op(k)
        if op.entry is BatchEntry.LOOKUP:
            return _index_axes(self.graph.nodes[k])
        if op.data is None or self._keeps_its_shape(k, op.data):
            return []
        left, right = (self.graph.edges[k][position][0] for position in (op.data.first, op.data.second))
        left_is_data = left < 0 or not self.reaches[left]
        return op.data.data_axes(len(self.graph.shape((k, 0))), left_is_data, right_is_shared=right >= 0)

    def _keeps_its_shape(self, k: int, data: Product) -> bool:
        """Whether a product only turns a parameter, as orthogonal parametrizations do: its rows are not the batch's."""
        own = [edge for edge in (self.graph.edges[k][data.first], self.graph.edges[k][data.second]) if edge[0] >= 0]
        shape = self.graph.shape((k, 0))
        turned = any(self.reaches[edge[0]] and self.graph.shape(edge) == shape for edge in own)
        return turned and self.batch_size not in shape

    def _keeps_rows(self, k: int, suspects: set[int]) -> bool:
        """Whether a node treats each row of its suspicious operand alike: no reduction, no product over rows."""
        op = self._op(k)
        if op.data is None:
            return op.keeps_rows
        children = [child for child, _ in self.graph.edges[k]]
        left = children.pop(op.data.first)
        return left in suspects and not suspects.intersection(children)


def _index_axes(node: Node) -> list[int]:
    """The axis of a look-up's output that is its index's, if the index has one: a matrix of them is of positions."""
    indices = saved_or(node, "indices", None)
    if indices is None:  # of `index_select`
        return [saved_int(node, "dim") % len(output_meta(node).shape)]
    if isinstance(indices, torch.Tensor):
        indices = [indices]
    places = [place for place, index in enumerate(indices) if index is not None]
    if max((indices[place].dim() for place in places if indices[place].dtype != torch.bool), default=0) != 1:
        return []
    together = places[-1] - places[0] < len(places)
    return [places[0] if together else 0]  # separated indices move their axes to the front


def mixing(graph: Graph, after: str, whose: str) -> NotSeparable:
    """The refusal of samples that mix."""
    cause = ""
    norms = (graph.nodes[k] for k, name in enumerate(graph.names) if op_of(name).rule is norm.batch_norm)
    if any(norm.mixes_samples(node) for node in norms):
        return NotSeparable(
            f"samples mix in a BatchNorm that is in training mode ({whose}): the loss of one sample depends on the "
            "others, so it has no bounded per-sample gradient. Use GroupNorm or LayerNorm (model, replaced = "
            "cw.without_batchnorm(model) gives such a copy), or call .eval() on the BatchNorm."
        )
    if graph.computes_in(torch.float16):
        cause = " The graph computes in float16, where small gradients are lost and nothing is certain: use bfloat16."
    return NotSeparable(
        f"samples mix after {after} ({whose}): the loss of one sample depends on other samples, so it has no bounded "
        "per-sample gradient. Typical causes: a contrastive loss, attention or a statistic over the batch, one loss "
        f"given twice.{cause} A constant table looks the same if its length is a multiple of the batch size: then "
        "take another batch size for the first step."
    )


def no_rule(graph: Graph, k: int, parameters: str) -> str:
    """Why a node that parameters meet the batch at cannot be served, and what to do."""
    name = graph.names[k]
    refusal = op_of(name).refusal or op_of(name).hides(graph.nodes[k])
    if refusal:
        return f"{name} (parameters {parameters}) {refusal}"
    if output_meta(graph.nodes[k]).dtype.is_complex:
        return (
            f"{name} (parameters {parameters}) computes with complex numbers, for which there are no per-sample rules. "
            "Write it with real and imaginary parts."
        )
    return (
        f"{name} has no per-sample rule (parameters {parameters}). Write it with supported operations, freeze these "
        "parameters, or ask for a rule."
    )
