"""From the gradients of shared operands to those of the parameters that they are computed from, by autograd.

Linear in what is pulled back: gradients of single samples for norms, or their weighted sum.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from clipwise.engine.chains import Chain, below_view
from clipwise.engine.graph import Edge, Graph, differentiate
from clipwise.engine.node import LEAF, output_meta
from clipwise.engine.precision import HALF, widened
from clipwise.errors import UnsupportedNode


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
    k, output = edge
    if graph.names[k] == LEAF:
        return widened(graph.nodes[k].variable.dtype)
    return output_meta(graph.nodes[k], output).dtype


def gains_of(
    graph: Graph,
    chains: Mapping[Edge, Chain],
    roots: Mapping[int, Sequence[Edge]],
    like: Mapping[Edge, Tensor],
    parameters: Sequence[int],
) -> Tensor:
    """How much longer random gradients of each operand are at each parameter, (parameters, operands).

    A gradient that is much shorter there nearly cancelled on the way, as along a weight that is normalised. Operands of
    one parameter are tried apart, others together: one pass for all.
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
                gains[row, column] = pulled[row][colour[edge]].norm() / values[colour[edge]].abs().norm()
    return gains


def accumulate(sums: dict[int, Tensor], parameter: int, part: Tensor) -> None:
    """Add to the sum of a parameter."""
    held = sums.get(parameter)
    sums[parameter] = part if held is None else held + part
