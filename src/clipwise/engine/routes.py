"""Which operations after a meeting keep the samples apart, whatever the numbers.

A cached layout stays true only while nothing between the meeting and the losses can bring samples together or reorder
them without a change of the graph's structure. Only operations that are known to keep samples apart are trusted; with
any other on the graph the layouts are probed at every step, which is exact and costs a backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import Enum
from functools import wraps
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from clipwise.engine.compiled import keeps_apart
from clipwise.engine.graph import Edge, Graph
from clipwise.engine.layout import Layout
from clipwise.engine.node import Node, saved, saved_axes, saved_int


class Routing(Enum):
    """Whether a node can bring samples together, or reorder them, without a change of structure."""

    NEVER = 0
    IDENTITY = 1  # not while its leading index is 0, 1, 2, ...: to be looked at in every step
    COMPILED = 2  # not while the code behind it is such: to be looked at in every step
    MAYBE = 3  # layouts must be probed in every step


class Site(NamedTuple):
    """A node after a meeting, and what is known about the samples around it."""

    graph: Graph
    k: int
    layout_of: Callable[[Edge], Layout | None]  # the one layout of an output of a node, when it is known
    is_batch: Callable[[int], bool]  # whether a node is computed from the batch

    @property
    def node(self) -> Node:
        """The node itself."""
        return self.graph.nodes[self.k]

    @property
    def own(self) -> Layout | None:
        """The layout of its output."""
        return self.layout_of((self.k, 0))

    @property
    def rank(self) -> int:
        """The number of axes of its output."""
        return len(self.graph.shape((self.k, 0)))

    @property
    def inputs(self) -> list[Edge]:
        """Its operands that are computed from the batch."""
        return [edge for edge in self.graph.edges[self.k] if self.is_from_batch(edge[0])]

    def is_from_batch(self, child: int) -> bool:
        """Whether an operand is computed from the batch."""
        return child >= 0 and self.is_batch(child)


Route: TypeAlias = Callable[[Site], Routing]


def unknown(site: Site) -> Routing:
    """Nothing is known of the operation."""
    return Routing.MAYBE


def _where_known(keeps: Callable[[Site, Layout, list[Layout]], bool]) -> Route:
    """A route for nodes whose own layout and those of all inputs are known: does it keep the samples apart?"""

    @wraps(keeps)
    def route(site: Site) -> Routing:
        own, below = site.own, [site.layout_of(edge) for edge in site.inputs]
        inputs = [layout for layout in below if layout is not None]
        known = own is not None and len(inputs) == len(below)
        return Routing.NEVER if known and own is not None and keeps(site, own, inputs) else Routing.MAYBE

    return route


# Every element stays in its place, or elements keep their order.


def keeps_sizes(site: Site) -> bool:
    """Whether no operand computed from the batch is broadcast."""
    size = site.graph.shape((site.k, 0)).numel()
    return all(site.graph.shape(edge).numel() == size for edge in site.inputs)


@_where_known
def _beside(site: Site, own: Layout, inputs: list[Layout]) -> bool:
    """Operands that are broadcast keep the batch on the axis where the output has it."""
    ranks = [len(site.graph.shape(edge)) for edge in site.inputs]
    return all(layout.axis + site.rank - rank == own.axis for layout, rank in zip(inputs, ranks, strict=True))


def in_place(site: Site) -> Routing:
    """Each element of the output is computed from the elements at its place, or elements keep their order."""
    return Routing.NEVER if keeps_sizes(site) else _beside(site)


# Work along some axes, and keep every other apart.


@_where_known
def along_axes(site: Site, own: Layout, inputs: list[Layout]) -> bool:
    """The axes that the node saved are not those of the batch."""
    saved_ones = saved_axes(site.node)
    if saved_ones is None:
        return False  # a reduction of everything
    rank = max(len(site.graph.shape(edge)) for edge in site.graph.edges[site.k] if edge[0] >= 0)
    axes = {axis % max(rank, 1) for axis in saved_ones}
    return bool(axes) and not axes.intersection(layout.axis for layout in inputs)


@_where_known
def samples_first(site: Site, own: Layout, inputs: list[Layout]) -> bool:
    """Samples on the first axis are kept apart by definition."""
    return own.axis == 0 and all(layout.axis == 0 for layout in inputs)


@_where_known
def recurrent(site: Site, own: Layout, inputs: list[Layout]) -> bool:
    """Samples on the axis after that of times, which states do not have."""
    ranks = [len(site.graph.shape(edge)) for edge in site.inputs]
    return own.axis == 1 and all(layout.axis == rank - 2 for layout, rank in zip(inputs, ranks, strict=True))


@_where_known
def stacked(site: Site, own: Layout, inputs: list[Layout]) -> bool:
    """Samples on the axis that the kernel takes for theirs, in states on the second; packed rows have no such axis."""
    rows, axis = site.graph.edges[site.k][0], 0 if saved(site.node, "batch_first") else 1
    each = zip(site.inputs, inputs, strict=True)
    return site.rank == 3 and own.axis == axis and all(i.axis == (axis if edge == rows else 1) for edge, i in each)


@_where_known
def attention(site: Site, own: Layout, inputs: list[Layout]) -> bool:
    """Rows meet rows of the same leading axes only."""
    return own.axis < site.rank - 2


@_where_known
def batch_norm(site: Site, own: Layout, inputs: list[Layout]) -> bool:
    """With fixed statistics."""
    return own.axis == 0 and not saved(site.node, "training")


@_where_known
def layer_norm(site: Site, own: Layout, inputs: list[Layout]) -> bool:
    """Statistics over the trailing axes."""
    return own.axis < site.rank - len(saved(site.node, "normalized_shape"))


@_where_known
def padding(site: Site, own: Layout, inputs: list[Layout]) -> bool:
    """The trailing axes are padded."""
    return own.axis < site.rank - len(saved(site.node, "pad")) // 2


@_where_known
def repeat(site: Site, own: Layout, inputs: list[Layout]) -> bool:
    """Another axis than that of the batch is repeated."""
    return bool(saved(site.node, "repeats")[own.axis] == 1)


@_where_known
def stack(site: Site, own: Layout, inputs: list[Layout]) -> bool:
    """Values of whole batches stacked on a new axis keep their order."""
    return saved_int(site.node, "dim") % site.rank != own.axis


@_where_known
def loss(site: Site, own: Layout, inputs: list[Layout]) -> bool:
    """Element by element, unless it is reduced."""
    return bool(saved(site.node, "reduction") == 0)


@_where_known
def class_loss(site: Site, own: Layout, inputs: list[Layout]) -> bool:
    """The loss of a class: the second axis of the input is that of the classes, and the output does not have it."""
    axis = own.axis + (own.axis > 0)
    return bool(saved(site.node, "reduction") == 0) and all(layout == replace(own, axis=axis) for layout in inputs)


# Compiled regions.


class CompiledRegion(NamedTuple):
    """A compiled region that keeps the samples apart, and the axes that they lie along."""

    k: int
    axis: int
    operands: tuple[int, ...]

    def holds(self, graph: Graph) -> bool:
        """Whether the code that was run in this step keeps them apart."""
        edges = [edge for edge in graph.edges[self.k] if edge[0] >= 0]
        shapes = [tuple(graph.shape(edge)) for edge in edges]
        if len(shapes) != len(self.operands):
            return False
        return keeps_apart(graph.nodes[self.k], self.axis, list(zip(shapes, self.operands, strict=True)))


def region(site: Site) -> CompiledRegion | None:
    """The region of a node, if all its operands are computed from the batch and their layouts are known and alike."""
    edges = [edge for edge in site.graph.edges[site.k] if edge[0] >= 0]
    layouts = [site.layout_of(edge) for edge in edges]
    own, known = site.own, [layout for layout in layouts if layout is not None]
    if own is None or own.rest is not None or len(known) < len(edges) or site.inputs != edges:
        return None
    if any(replace(layout, axis=own.axis) != own for layout in known):
        return None
    return CompiledRegion(site.k, own.axis, tuple(layout.axis for layout in known))


def compiled(site: Site) -> Routing:
    """A region compiled by torch, of which no more is known than the graph of its backward pass says."""
    found = region(site)
    return Routing.COMPILED if found is not None and found.holds(site.graph) else Routing.MAYBE


# Indices.


def index(site: Site) -> Routing:
    """`x[i, ...]` on the first axes."""
    if _known_first(site) is not Routing.NEVER:
        return Routing.MAYBE
    given = [index is not None for index in saved(site.node, "indices")]
    if not given[0]:
        return Routing.NEVER
    return Routing.IDENTITY if is_identity(site.graph, site.k) else Routing.MAYBE


@_where_known
def _known_first(site: Site, own: Layout, inputs: list[Layout]) -> bool:
    given = [index is not None for index in saved(site.node, "indices")]
    together = "".join("x" if g else " " for g in given).strip()
    apart = own.axis == 0 and all(layout.axis == 0 for layout in inputs)
    return apart and " " not in together  # separated indices move their axes to the front


def is_identity(graph: Graph, k: int) -> bool:
    """Whether the leading index of `x[i, ...]` is 0, 1, 2, ... along the first axis of x."""
    given = [index for index in saved(graph.nodes[k], "indices") if index is not None]
    first: Tensor = given[0]
    if any(index.dim() > first.dim() for index in given):  # along whose axes it would be repeated
        return False
    size = saved(graph.nodes[k], "self_sym_sizes")[0]
    if first.dtype == torch.bool or first.dim() == 0 or first.shape[0] != size:
        return False
    steps = torch.arange(size, device=first.device).view(-1, *([1] * (first.dim() - 1)))
    return bool((first == steps).all())


def writing(operand: int, otherwise: Route = unknown) -> Route:
    """What is written into stays in its place; what is written moves, and only counts if the batch is in it."""

    def route(site: Site) -> Routing:
        edges: Sequence[Edge] = site.graph.edges[site.k]
        moved = operand < len(edges) and site.is_from_batch(edges[operand][0])
        return otherwise(site) if moved else Routing.NEVER

    return route
