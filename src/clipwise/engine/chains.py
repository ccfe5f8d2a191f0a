"""How a shared operand is made from a parameter by views alone, and which part of the parameter it is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor

from clipwise.engine.graph import Edge, Graph
from clipwise.engine.node import LEAF
from clipwise.engine.ops import op_of
from clipwise.engine.views import Region, Same


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
    edges = list(edges)
    held = [chains[edge] for edge in edges if edge in chains]
    if len(held) < len(edges):
        return False
    if len(held) == 1:
        return True
    return all(chain.framed for chain in held) and not overlapping(graph, [chain.region for chain in held])


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
        view = op_of(graph.names[k]).view
        if view is None:
            return None
        if view.transposes(graph, edge):
            transposed = not transposed
            framed = framed and region is None
        elif isinstance(view, Region) and region is None:
            region = edge
            framed = framed and view.is_dense(graph.nodes[k])
        elif not isinstance(view, Same):
            framed = False
        (edge,) = graph.edges[k]
    parameter = graph.leaf_parameter[edge[0]]
    if parameter < 0:
        return None
    return Chain(parameter, transposed, framed, region, direct=framed and region is None)


def interval(graph: Graph, edge: Edge) -> tuple[int, int, int]:
    """The axis and the half-open range of it that a region edge picks, as it is at this step."""
    view = op_of(graph.names[edge[0]]).view
    assert isinstance(view, Region)
    return view.interval(graph, edge)


def below_view(graph: Graph, edge: Edge, gradient: Tensor) -> Tensor | None:
    """The gradient of a view's input from that of its output, with any leading axes; None for anything else."""
    view = op_of(graph.names[edge[0]]).view
    return None if view is None else view.below(graph, edge, gradient, gradient.dim() - len(graph.shape(edge)))
