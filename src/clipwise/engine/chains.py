"""How a shared operand is made from a parameter by views alone, and which part of the parameter it is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor

from clipwise.engine.graph import LEAF, Edge, Graph

# Views keep every element's value: the norm of a gradient is the same before and after them.
_PASSING = {"AliasBackward0", "CloneBackward0", "ToCopyBackward0"}
VIEWS = _PASSING | {
    "PermuteBackward0", "ReshapeAliasBackward0", "SelectBackward0", "SliceBackward0", "SplitBackward0",
    "SplitWithSizesBackward0", "SqueezeBackward0", "SqueezeBackward1", "SqueezeBackward2", "SqueezeBackward3",
    "SqueezeBackward4", "TBackward0", "TransposeBackward0", "UnbindBackward0", "UnflattenBackward0",
    "UnsafeSplitBackward0", "UnsafeViewBackward0", "UnsqueezeBackward0", "ViewBackward0",
}  # fmt: skip
_REGIONS = {"SelectBackward0", "SliceBackward0", "SplitBackward0", "SplitWithSizesBackward0", "UnbindBackward0"}

WHOLE_VIEWS = VIEWS - _REGIONS - {"UnsafeSplitBackward0"}


@dataclass(frozen=True)
class Chain:
    """How a shared operand is made from one parameter by views alone."""

    parameter: int
    transposed: bool  # only meaningful when framed
    framed: bool  # the parameter itself, or its transpose, or a region of it: no other reordering
    region: Edge | None  # the edge that picks a region of the parameter
    direct: bool  # framed and no region: a gradient is moved to the parameter without autograd


def is_simple(graph: Graph, edges: Iterable[Edge], chains: Mapping[Edge, Chain]) -> bool:
    """Whether a parameter's norm follows from its operands' norms, without pulling gradients back through autograd."""
    held = [chains.get(edge) for edge in edges]
    if any(chain is None for chain in held):
        return False
    if len(held) == 1:
        return True
    return all(chain is not None and chain.framed for chain in held) and not overlapping(
        graph, [chain.region for chain in held if chain is not None]
    )


def overlapping(graph: Graph, regions: Sequence[Edge | None]) -> bool:
    """Whether parts of a parameter overlap without being the same, so that its norm is not a sum over parts.

    `p[1]` and `p[1:2]` are the same part in two shapes, and not taken for the same either.
    """
    if all(region is None for region in regions):
        return False
    if any(region is None for region in regions):
        return True
    ranges = sorted({(*interval(graph, region), graph.shape(region)) for region in regions if region is not None})
    axes = {axis for axis, *_ in ranges}
    return len(axes) > 1 or any(a[2] > b[1] for a, b in pairwise(ranges))


def chain_of(graph: Graph, edge: Edge) -> Chain | None:
    """The chain of views from an operand down to one parameter, or None if it is computed in any other way."""
    transposed, framed, region = False, True, None
    while graph.names[edge[0]] != LEAF:
        k = edge[0]
        name, below = graph.names[k], graph.edges[k]
        if name not in VIEWS or len(below) != 1 or below[0][0] < 0:
            return None
        if name == "TBackward0" or (name == "TransposeBackward0" and len(graph.shape(edge)) == 2):
            transposed = not transposed
            framed = framed and region is None
        elif name in _REGIONS and region is None:
            region = edge
            framed = framed and getattr(graph.nodes[k], "_saved_step", 1) == 1
        elif name not in _PASSING:
            framed = False
        edge = below[0]
    parameter = graph.leaf_parameter[edge[0]]
    if parameter < 0:
        return None
    return Chain(parameter, transposed, framed, region, direct=framed and region is None)


def interval(graph: Graph, edge: Edge) -> tuple[int, int, int]:
    """The axis and the half-open range of it that a region edge picks, as it is at this step."""
    (k, output), name = edge, graph.names[edge[0]]
    node, shape = graph.nodes[k], graph.shape(graph.edges[k][0])
    axis = signed(node._saved_dim) % len(shape)
    size = shape[axis]
    if name == "SelectBackward0":
        start = signed(node._saved_index) % size
        return axis, start, start + 1
    if name == "UnbindBackward0":
        return axis, output, output + 1
    if name == "SliceBackward0":
        start, stop = signed(node._saved_start), signed(node._saved_end)
        return (
            axis,
            min(max(start + size if start < 0 else start, 0), size),
            min(stop + size if stop < 0 else stop, size),
        )
    if name == "SplitBackward0":
        step = node._saved_split_size
        return axis, output * step, min((output + 1) * step, size)
    sizes = node._saved_split_sizes
    return axis, sum(sizes[:output]), sum(sizes[: output + 1])


def signed(value: int | None) -> int:
    """torch shows negative integers of a node as unsigned 64-bit ones."""
    value = value or 0
    return value - (1 << 64) if value >= 1 << 63 else value


_RESHAPING = {
    "ReshapeAliasBackward0", "SqueezeBackward0", "SqueezeBackward1", "SqueezeBackward2", "SqueezeBackward3",
    "SqueezeBackward4", "UnflattenBackward0", "UnsafeViewBackward0", "UnsqueezeBackward0", "ViewBackward0",
}  # fmt: skip


def below_view(graph: Graph, edge: Edge, gradient: Tensor) -> Tensor | None:
    """The gradient of a view's input from that of its output, with any leading axes; None for anything else.

    By hand, so that it keeps its precision where autograd would round it to the dtype of the value.
    """
    (k, _), name = edge, graph.names[edge[0]]
    node, shape = graph.nodes[k], graph.shape(graph.edges[k][0])
    leading = gradient.dim() - len(graph.shape(edge))
    if name in _PASSING:
        return gradient
    if name == "TBackward0":
        return gradient.mT
    if name == "TransposeBackward0":
        axes = [leading + signed(dim) % len(shape) for dim in (node._saved_dim0, node._saved_dim1)]
        return gradient.transpose(*axes)
    if name == "PermuteBackward0":
        order = [signed(dim) % len(shape) for dim in node._saved_dims]
        return gradient.permute(*range(leading), *(leading + order.index(axis) for axis in range(len(order))))
    if name in _RESHAPING:
        return gradient.reshape(*gradient.shape[:leading], *shape)
    if name not in _REGIONS or getattr(node, "_saved_step", 1) != 1:
        return None
    axis, start, stop = interval(graph, edge)
    if name in ("SelectBackward0", "UnbindBackward0"):
        gradient = gradient.unsqueeze(leading + axis)
    whole = gradient.new_zeros(*gradient.shape[:leading], *shape)
    whole.narrow(leading + axis, start, stop - start).copy_(gradient)
    return whole
