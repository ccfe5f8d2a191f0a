"""What the graph alone makes suspicious: data that met parameters in a shape that could hold the batch.

A table of positions looks the same as a batch whose samples mix, as long as it is only broadcast; a reduction or a
product of it does not. With evidence of where values come from, nothing is suspected.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from clipwise.engine.chains import WHOLE_VIEWS
from clipwise.engine.graph import Graph, Node
from clipwise.engine.rules import DATA_OPERANDS

_LOOKED_UP = ("EmbeddingBackward0", "IndexBackward0", "IndexSelectBackward0")
ROWWISE = {
    "AddBackward0", "DivBackward0", "EluBackward0", "ExpBackward0", "ExpandBackward0", "GeluBackward0",
    "HardswishBackward0", "LeakyReluBackward0", "LogBackward0", "MishBackward0", "MulBackward0",
    "NativeLayerNormBackward0", "NegBackward0",
    "PowBackward0", "ReluBackward0", "RsqrtBackward0", "SigmoidBackward0", "SiluBackward0", "SoftplusBackward0",
    "SqrtBackward0", "SubBackward0", "TanhBackward0", "WhereBackward0",
}  # fmt: skip


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

    def _may_hold_the_batch(self, k: int) -> bool:
        if self.graph.names[k] in DATA_OPERANDS and self._keeps_its_shape(k):
            return False
        return any(self.graph.shape((k, 0))[axis] % self.batch_size == 0 for axis in self._data_axes(k))

    def _keeps_its_shape(self, k: int) -> bool:
        """Whether a product only turns a parameter, as orthogonal parametrizations do: its rows are not the batch's."""
        first, second = DATA_OPERANDS[self.graph.names[k]]
        own = [edge for edge in (self.graph.edges[k][first], self.graph.edges[k][second]) if edge[0] >= 0]
        shape = self.graph.shape((k, 0))
        turned = any(self.reaches[edge[0]] and self.graph.shape(edge) == shape for edge in own)
        return turned and self.batch_size not in shape

    def _data_axes(self, k: int) -> list[int]:
        """The output axes of a product or a look-up that come from the operand that is not differentiated."""
        if self.graph.names[k] in _LOOKED_UP:
            return [0] if _index_rank(self.graph.nodes[k]) == 1 else []  # a matrix of indices is a table of positions
        if self.graph.names[k] not in DATA_OPERANDS:
            return []
        first, second = DATA_OPERANDS[self.graph.names[k]]
        rank = len(self.graph.shape((k, 0)))
        if self.graph.names[k].startswith(("Mv", "Addmv")):
            return [] if self.graph.edges[k][second][0] < 0 else [0]
        if self.graph.names[k].startswith("Convolution"):
            return [0]
        child = self.graph.edges[k][first][0]
        left_is_data = child < 0 or not self.reaches[child]
        return [*range(rank - 2), rank - 2 if left_is_data else rank - 1]

    def _keeps_rows(self, k: int, suspects: set[int]) -> bool:
        """Whether a node treats each row of its suspicious operand alike: no reduction, no product over rows."""
        name = self.graph.names[k]
        if name in DATA_OPERANDS:
            left = self.graph.edges[k][DATA_OPERANDS[name][0]][0]
            others = [child for i, (child, _) in enumerate(self.graph.edges[k]) if i != DATA_OPERANDS[name][0]]
            return left in suspects and not suspects.intersection(others)
        return name in WHOLE_VIEWS or name in ROWWISE or name == "RepeatBackward0"


def _index_rank(node: Node) -> int:
    """The leading axes of a look-up's output that are its index's."""
    index = getattr(node, "_saved_indices", None)
    if isinstance(index, (tuple, list)):
        given = [i for i in index if i is not None]
        return max((i.dim() for i in given if i.dtype != torch.bool), default=0) if index[:1] == given[:1] else 0
    return index.dim() if isinstance(index, torch.Tensor) else 1
