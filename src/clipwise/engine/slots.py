"""Which rows of a folded layer belong together, proven from its nodes (`fold.py`).

A packed sequence keeps a slot: row j of every time is computed from row j of the times before it. Nobody is believed
here: all nodes of the chain are followed, at every step. Where each of them keeps the slots of its rows, the gradient
of a row is made of the gradients of rows of the same slot alone that leave the chain. So they have the same owner.

A value of the chain has at least as many rows as its slots: what is broadcast only grows. So it is enough to compare
sizes where rows are multiplied, cut, joined or leave.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from clipwise.engine.graph import Edge, Graph
from clipwise.engine.node import Slots, saved, saved_int
from clipwise.engine.ops import JOINED, PART, PARTS, PRODUCTS

Runs: TypeAlias = tuple[tuple[int, int], ...]  # of slots: the first, and one more than the last


class _Moved(Exception):
    """It is not proven that rows keep their slots. Never leaves this module."""


def slots_of(
    graph: Graph, nodes: Iterable[int], times: Sequence[tuple[int, int, int]], left: Sequence[int]
) -> Slots | None:
    """The slots of a chain of `nodes` in the order in which they were computed; None where they are not proven.

    `times` are product, part of what is read, and number of rows of each time. What leaves the chain is `left`.
    """
    runs: dict[int, Runs] = {}
    products = {product: size for product, _, size in times}
    known: dict[int, Runs] = {part: ((0, size),) for _, part, size in times}
    try:
        for k in nodes:
            if k in products:
                runs[k] = _multiplied(graph, k, products[k], runs)
            else:
                runs[k] = known.get(k) or _kept(graph, k, runs)
        for k in left:
            _demand_rows(graph, k, runs[k])
    except _Moved:
        return None
    return Slots(_numbers(((0, size),) for *_, size in times), _numbers(runs[k] for k in left))


def _multiplied(graph: Graph, k: int, size: int, runs: Mapping[int, Runs]) -> Runs:
    """A product by rows, each of which has the slot of its number: that of what is multiplied, and of all readers."""
    expected = ((0, size),)
    child = graph.edges[k][PRODUCTS[graph.names[k]][1]][0]
    if child >= 0 and runs.get(child) != expected:
        raise _Moved
    return expected


def _kept(graph: Graph, k: int, runs: Mapping[int, Runs]) -> Runs:
    """What lies between products: parts, joined rows, and what works element by element."""
    name, edges = graph.names[k], graph.edges[k]
    if name == JOINED:
        return _joined(graph, k, runs)
    if name in PARTS:
        return _part(graph, k, _of(edges[0], runs))
    found = None
    for edge in edges:
        if edge[0] >= 0:
            own = _of(edge, runs)
            if found is not None and own != found:
                raise _Moved
            found = own
    if found is None:
        raise _Moved
    return found


def _of(edge: Edge, runs: Mapping[int, Runs]) -> Runs:
    own = runs.get(edge[0])
    if own is None:
        raise _Moved
    return own


def _part(graph: Graph, k: int, own: Runs) -> Runs:
    """Columns of all rows, or some rows that follow each other."""
    node = graph.nodes[k]
    axis = saved_int(node, "dim")
    if axis == 1 and graph.names[k] != PART:
        return own
    sizes = saved(node, "self_sym_sizes")
    if len(sizes) != 2 or axis not in (0, 1) or sizes[0] != _count(own):
        raise _Moved
    if axis == 1:
        return own
    if graph.names[k] != PART or len(own) != 1 or saved_int(node, "step") != 1:
        raise _Moved
    start = saved_int(node, "start")
    first, rows = own[0][0] + start, graph.shape((k, 0))[0]
    if start < 0 or first + rows > own[0][1]:
        raise _Moved
    return ((first, first + rows),)


def _joined(graph: Graph, k: int, runs: Mapping[int, Runs]) -> Runs:
    """Rows below each other. A first state that nothing is learned from may follow: the slots after those before it."""
    edges = graph.edges[k]
    own = [_of(edge, runs) for edge in edges if edge[0] >= 0]
    found = tuple(run for part in own for run in part)
    if len(own) < len(edges):
        if len(edges) != 2 or edges[0][0] < 0 or len(found) != 1:
            raise _Moved
        _demand_rows(graph, edges[0][0], found)
        first, last = found[0]
        found = ((first, first + graph.shape((k, 0))[0]),)
        if found[0][1] <= last:
            raise _Moved
    _demand_rows(graph, k, found)
    return _merged(found)


def _demand_rows(graph: Graph, k: int, own: Runs) -> None:
    """A table of as many rows as there are slots."""
    shape = graph.shape((k, 0))
    if len(shape) != 2 or shape[0] != _count(own):
        raise _Moved


def _count(own: Runs) -> int:
    return sum(last - first for first, last in own)


def _merged(own: Runs) -> Runs:
    """Runs that follow each other as one."""
    found = [own[0]]
    for first, last in own[1:]:
        if first == found[-1][1]:
            found[-1] = (found[-1][0], last)
        else:
            found.append((first, last))
    return tuple(found)


def _numbers(each: Iterable[Runs]) -> Tensor:
    runs = [run for own in each for run in own]
    return torch.cat([torch.arange(first, last, device="cpu") for first, last in runs])
