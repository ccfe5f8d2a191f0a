"""What the graph alone makes suspicious: data that met parameters in a shape that could hold the batch.

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
