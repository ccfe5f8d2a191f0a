"""Nodes after a meeting that may move rows between samples by numbers that are not part of the graph's structure.

A cached layout stays true only while nothing between the meeting and the losses reorders the batch by data: an index,
a scatter, a product with a constant matrix. Most such nodes work on another axis and are safe for good; an index
that is the identity on the batch is checked at every step; for the rest the layouts are probed at every step.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

import torch
from torch import Tensor

from clipwise.engine.graph import Graph
from clipwise.engine.layout import Layout, Scattered

_ALONG_AXIS = ("Gather", "IndexSelect", "IndexAdd", "IndexCopy", "Scatter", "ScatterAdd", "TakeAlongDim")
_MOVED_OPERAND = {"IndexAdd": 1, "IndexCopy": 1, "IndexPut": 1, "Scatter": 1, "ScatterAdd": 1, "MaskedScatter": 1}
_OTHERS = (
    "Index",
    "IndexPut",
    "MaskedScatter",
    "MaskedSelect",
    "Take",
    "Embedding",
    "EmbeddingBag",
    "PackPaddedSequence",
)
_PRODUCTS = {"Mm": (0, 1), "Addmm": (1, 2), "Bmm": (0, 1), "Baddbmm": (1, 2), "Mv": (0, 1), "Addmv": (1, 2)}


class Routing(Enum):
    """Whether a node can move rows between samples without a change of structure."""

    NEVER = 0
    IDENTITY = 1  # not while its leading index is 0, 1, 2, ...: to be looked at in every step
    MAYBE = 2  # layouts must be probed in every step


def _kind(name: str) -> str:
    return name.rstrip("0123456789").removesuffix("Backward").lstrip("_")


def is_index(name: str) -> bool:
    """Whether a node moves rows by an index or a mask."""
    return _kind(name) in _ALONG_AXIS or _kind(name) in _OTHERS


def data_key(graph: Graph, k: int) -> tuple[object, ...] | None:
    """Tells which tensor of data a node works on: two nodes with the same key read the same rows."""
    for attribute in ("_saved_self", "_saved_mat1", "_saved_input", "_saved_indices", "_saved_batch1"):
        tensor = getattr(graph.nodes[k], attribute, None)
        if isinstance(tensor, Tensor):
            return tensor.data_ptr(), tuple(tensor.shape), tensor.stride()
    return None


def may_route(graph: Graph, k: int, has_parameters: Callable[[int], bool]) -> bool:
    """Whether the node is of a kind that must be looked at: it moves a value computed from parameters."""
    kind = _kind(graph.names[k])
    if kind in _PRODUCTS:
        inputs = [graph.edges[k][i][0] for i in _PRODUCTS[kind]]
        return any(i < 0 or not has_parameters(i) for i in inputs)
    return kind in _ALONG_AXIS or kind in _OTHERS


def routing(graph: Graph, k: int, layouts: tuple[Layout | Scattered, ...], is_batch: Callable[[int], bool]) -> Routing:
    """How far a node can be trusted, given the layout of its output."""
    kind, edges = _kind(graph.names[k]), graph.edges[k]
    moved = _MOVED_OPERAND.get(kind)
    if moved is not None and not (moved < len(edges) and edges[moved][0] >= 0 and is_batch(edges[moved][0])):
        return Routing.NEVER  # what it writes is not computed from the batch; what it writes into stays in place
    if len(layouts) != 1 or not isinstance(layouts[0], Layout):
        return Routing.MAYBE
    axis = layouts[0].axis
    if kind in _PRODUCTS:
        return _product(graph, k, kind, axis, is_batch)
    if kind in _ALONG_AXIS:
        rank = len(graph.shape((k, 0)))
        dim = graph.nodes[k]._saved_dim
        dim = dim - (1 << 64) if dim >= 1 << 63 else dim
        return Routing.MAYBE if dim % rank == axis else Routing.NEVER
    if kind == "Index" and axis == 0:
        first = graph.nodes[k]._saved_indices[0]
        if first is None:
            return Routing.NEVER
        if is_identity(graph, k):
            return Routing.IDENTITY
    return Routing.MAYBE


def _product(graph: Graph, k: int, kind: str, axis: int, is_batch: Callable[[int], bool]) -> Routing:
    """A product keeps the axis of the factor that it comes from; that factor must be the batch's."""
    left, right = (graph.edges[k][i][0] for i in _PRODUCTS[kind])
    rank = len(graph.shape((k, 0)))
    if kind in ("Mv", "Addmv") or axis == rank - 2:
        source = left
    elif axis == rank - 1:
        source = right
    else:
        return Routing.NEVER  # stacks of matrices: sample with sample
    return Routing.NEVER if source >= 0 and is_batch(source) else Routing.MAYBE


def is_identity(graph: Graph, k: int) -> bool:
    """Whether the leading index of `x[i, ...]` is 0, 1, 2, ... along the first axis of x."""
    first: Tensor = graph.nodes[k]._saved_indices[0]
    size = graph.nodes[k]._saved_self_sym_sizes[0]
    if first.dtype == torch.bool or first.dim() == 0 or first.shape[0] != size:
        return False
    steps = torch.arange(size, device=first.device).view(-1, *([1] * (first.dim() - 1)))
    return bool((first == steps).all())
