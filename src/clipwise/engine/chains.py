"""How a shared operand is made from a parameter: by views alone, of which part of it, or else as autograd says.

Pulling gradients back to parameters is linear in them: those of single samples for norms, or their weighted sum.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from clipwise.engine.graph import Edge, Graph, differentiate
from clipwise.engine.node import LEAF
from clipwise.engine.ops import op_of
from clipwise.engine.precision import HALF, widened
from clipwise.engine.views import Region, Same
from clipwise.errors import UnsupportedNode

_FARTHEST = 1e15  # times longer or shorter a gradient may become between an operand and its parameter


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


def pull_back_batched(
    graph: Graph,
    chains: Mapping[Edge, Chain],
    edges: Sequence[Edge],
    grads: Sequence[Tensor],
    parameters: Sequence[int],
) -> list[Tensor]:
    """Vector-Jacobian products of the shared part of the graph, one per sample: (b, *parameter.shape) each."""
    leaves = [graph.parameters[p] for p in parameters]
    batch = grads[0].shape[0]
    dtype = grads[0].real.dtype if grads[0].is_complex() else grads[0].dtype
    total = [leaf.new_zeros(batch, *leaf.shape, dtype=dtype) for leaf in leaves]
    place = {p: i for i, p in enumerate(parameters)}
    through = []
    for edge, grad in zip(edges, grads, strict=True):
        chain = chains.get(edge)
        if chain is not None and chain.direct and not chain.transposed:
            total[place[chain.parameter]] += grad
        else:
            through.append((edge, grad))
    moved = [_widened(graph, edge, grad) for edge, grad in through]
    for (k, _), grad in moved:
        if graph.names[k] == LEAF:
            total[place[graph.leaf_parameter[k]]] += grad
    through = [(edge, grad) for edge, grad in moved if graph.names[edge[0]] != LEAF]
    if through:
        for part, pulled in zip(total, _vjp(graph, through, leaves), strict=True):
            if pulled is not None:
                part += pulled
    return total


def _vjp(graph: Graph, through: Sequence[tuple[Edge, Tensor]], leaves: Sequence[Tensor]) -> Sequence[Tensor | None]:
    outputs = [graph.gradient_edge(edge) for edge, _ in through]
    grads = [grad for _, grad in through]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # vmap tells where it falls back to a loop
            return differentiate(outputs, leaves, grads, keep=True, batched=True)
    except RuntimeError:  # an operation that vmap cannot batch: one sample after the other
        rows = [differentiate(outputs, leaves, [g[i] for g in grads], keep=True) for i in range(grads[0].shape[0])]
        return [None if column[0] is None else torch.stack(column) for column in zip(*rows, strict=True)]


def _widened(graph: Graph, edge: Edge, grad: Tensor) -> tuple[Edge, Tensor]:
    """A gradient moved below a cast to half precision, where autograd does not round it.

    Rounding the sum over samples is not bounded by one sample's contribution, so it must not happen.
    """
    while _dtype(graph, edge) in HALF:
        moved = below_view(graph, edge, grad)
        if moved is None:
            raise UnsupportedNode(
                f"{graph.names[edge[0]]} computes a weight in half precision, where its clipped gradient would be "
                "rounded beyond its bound. Compute it in float32, outside autocast."
            )
        edge, grad = graph.edges[edge[0]][0], moved
    return edge, grad.to(_dtype(graph, edge))


def pull_back(
    graph: Graph, operands: Mapping[Edge, Tensor], parameters: Sequence[int], sums: dict[int, Tensor]
) -> None:
    """Weighted sums of operands, pulled back to these parameters in one pass and added to `sums`."""
    moved = [_widened(graph, edge, total) for edge, total in operands.items()]
    for (k, _), grad in moved:
        if graph.names[k] == LEAF:  # autograd would round it to the parameter's dtype
            accumulate(sums, graph.leaf_parameter[k], grad)
    outputs = [graph.gradient_edge(edge) for edge, _ in moved if graph.names[edge[0]] != LEAF]
    grads = [grad for (k, _), grad in moved if graph.names[k] != LEAF]
    if not outputs:
        return
    pulled = differentiate(outputs, [graph.parameters[p] for p in parameters], grads, keep=True)
    for parameter, part in zip(parameters, pulled, strict=True):
        if part is not None:
            accumulate(sums, parameter, part)


def _dtype(graph: Graph, edge: Edge) -> torch.dtype:
    if graph.names[edge[0]] == LEAF:
        return widened(graph.nodes[edge[0]].variable.dtype)
    return graph.meta(edge).dtype


def gains_of(
    graph: Graph,
    chains: Mapping[Edge, Chain],
    roots: Mapping[int, Sequence[Edge]],
    like: Mapping[Edge, Tensor],
    parameters: Sequence[int],
) -> Tensor:
    """How much longer random gradients of each operand are at each parameter, (parameters, operands).

    A gradient that is much shorter there nearly cancelled on the way, as along a weight that is normalised. Operands of
    one parameter are tried apart, others together: one pass for all. Gradients that become so much longer or shorter
    that float32 may not hold them on both sides of the way have an infinite gain, which says nothing.
    """
    colour: dict[Edge, int] = {}
    for edge in like:
        met = {colour[other] for p in parameters if edge in roots[p] for other in roots[p] if other in colour}
        colour[edge] = next(number for number in range(len(like)) if number not in met)
    generator, count = torch.Generator().manual_seed(0), 1 + max(colour.values())
    drawn = {edge: grad.new_zeros(count, *grad.shape[1:]) for edge, grad in like.items()}
    for edge, values in drawn.items():
        values[colour[edge]] = torch.randn(values.shape[1:], generator=generator, device="cpu").to(values)
    pulled = pull_back_batched(graph, chains, list(drawn), list(drawn.values()), parameters)
    gains = torch.zeros(len(parameters), len(drawn), device=pulled[0].device, dtype=torch.float64)
    for row, parameter in enumerate(parameters):
        for column, (edge, values) in enumerate(drawn.items()):
            if edge in roots[parameter]:
                length = pulled[row][colour[edge]].norm(dtype=torch.float64)  # whose float32 squares may vanish
                gains[row, column] = length / values[colour[edge]].abs().norm()
    return gains.masked_fill((gains > _FARTHEST) | ((gains > 0) & (gains < 1 / _FARTHEST)), torch.inf)


def accumulate(sums: dict[int, Tensor], parameter: int, part: Tensor) -> None:
    """Add to the sum of a parameter."""
    held = sums.get(parameter)
    sums[parameter] = part if held is None else held + part
