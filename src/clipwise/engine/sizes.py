"""Do the samples lie where a plan saw them, with the sizes of this step?

A plan is trusted while every operation after a meeting keeps the samples apart. Operations are judged by their axes.
Views lead from the axes of one shape to those of another, and where they lead depends on the sizes, which may change
from step to step. So the sample of every element is followed from the losses to the meetings, in these sizes: it is
`number of the element // stride % B`.

Values form *families* whose elements are the same in the same order: before and after a view, or an operation element
by element. They have one stride, and as many elements. What axes decide lies between families.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import NamedTuple

from clipwise.engine.graph import Edge, Graph
from clipwise.engine.layout import Layout
from clipwise.engine.node import COMPILED, output_meta, output_shapes, saved_axes
from clipwise.engine.ops import op_of
from clipwise.engine.products import MatrixProduct
from clipwise.engine.routes import Site, along_axes, in_place, keeps_sizes

_REMEMBERED = 8  # sizes that were found to hold

Shape = Sequence[int]


def pattern(graph: Graph, k: int) -> tuple[bool, ...]:
    """Which axes of a node's output are longer than one: what tells (1, T, D) from (B, T, D)."""
    return tuple([size > 1 for size in output_meta(graph.nodes[k]).shape])


def stride_of(layout: Layout, shape: Shape, batch_size: int) -> int:
    """How many elements in a row are one sample's, as a layout says; 0 where it does not fit the shape."""
    if layout.axis >= len(shape):
        return 0
    size, below = shape[layout.axis], prod(shape[layout.axis + 1 :])
    if layout.exact:
        return below if size == batch_size else 0
    if layout.inner is None:
        return below * (size // batch_size) if size % batch_size == 0 else 0
    return below * layout.inner if size % (batch_size * layout.inner) == 0 else 0


def layout_with(stride: int, shape: Shape, batch_size: int) -> Layout | None:
    """The layout of a shape whose elements have this stride; None where some axis alone does not hold the batch."""
    below = prod(shape)
    for axis, size in enumerate(shape):
        before, below = below, below // max(size, 1)
        if below <= stride < before:
            inner = stride // below
            if stride % below or size % (batch_size * inner):
                return None
            if size == batch_size:
                return Layout(axis, exact=True)
            rest = size // batch_size
            usual = inner in (1, rest)
            return Layout(axis, None if inner == rest else inner, rest=None if usual else rest)
    return None


class Place(NamedTuple):
    """Where the samples of a value lie, in a shape of so many axes."""

    layout: Layout
    rank: int


class Measured(NamedTuple):
    """A value with the sizes of a step."""

    stride: int
    numel: int
    length: int  # of the axis of samples


class Sizes:
    """What must hold of the shapes of a step, for samples to lie where the plan says."""

    def __init__(
        self,
        places: Mapping[Edge, Place] | None = None,
        families: Iterable[Sequence[Edge]] = (),
        links: Iterable[tuple[Edge, Edge]] = (),
    ) -> None:
        places = places or {}
        number = {edge: i for i, edge in enumerate(places)}
        self._edges, self._places = tuple(places), tuple(places.values())
        self._families = tuple(tuple(number[edge] for edge in family) for family in families)
        self._links = tuple((number[a], number[b]) for a, b in links)
        self._held: list[tuple[int, list[Shape]]] = []

    def hold(self, graph: Graph, batch_size: int) -> bool:
        """Whether every value has its layout, views keep the stride, and operations the length of the samples' axis.

        Guarantees: where it is true, and every operation is trusted for its layouts, no sample's loss depends on an
        element of a value that another sample has.
        """
        if batch_size == 1 or not self._places:
            return True
        now = batch_size, output_shapes(graph.nodes, self._edges)
        if now in self._held:
            return True
        if not self._check(now[1], batch_size):
            return False
        self._held.insert(0, now)
        del self._held[_REMEMBERED:]
        return True

    def _check(self, shapes: Sequence[Shape], batch_size: int) -> bool:
        measured: list[Measured] = []
        for (layout, rank), shape in zip(self._places, shapes, strict=True):
            stride = stride_of(layout, shape, batch_size)
            if not stride or len(shape) != rank:
                return False
            measured.append(Measured(stride, prod(shape), shape[layout.axis]))
        for first, *others in self._families:
            stride, numel, _ = measured[first]
            for other in others:
                if measured[other].stride != stride or measured[other].numel != numel:
                    return False
        return all(measured[a].length == measured[b].length for a, b in self._links)


class _Open(Exception):
    """Where the samples lie is not known, or known in two ways."""


class _Families:
    """Values that have their elements in the same order, and the stride of each family."""

    def __init__(self) -> None:
        self._above: dict[Edge, Edge] = {}
        self.strides: dict[Edge, int] = {}

    def head(self, edge: Edge) -> Edge:
        """The one value that stands for the whole family."""
        while edge in self._above:
            edge = self._above[edge]
        return edge

    def join(self, edge: Edge, other: Edge) -> None:
        """Two values are of one family."""
        a, b = self.head(edge), self.head(other)
        if a != b:
            self._above[b] = a


class SizesOf:
    """Finds what must hold of the shapes of one graph."""

    def __init__(
        self, graph: Graph, batch_size: int, layout_of: Callable[[Edge], Layout | None], is_batch: Callable[[int], bool]
    ) -> None:
        self._graph, self._batch_size, self._layout_of, self._is_batch = graph, batch_size, layout_of, is_batch
        self._families = _Families()
        self._places: dict[Edge, Place] = {}
        self._links: list[tuple[Edge, Edge]] = []

    def find(self, after: Iterable[int], met: Iterable[int]) -> Sizes | None:
        """For nodes that are trusted `after` meetings, and meetings that were seen; None where nothing is proved."""
        if self._batch_size == 1:
            return Sizes()
        nodes = set(after)
        outputs = self._outputs()
        sites = [self._site(k) for k in reversed(self._graph.leaves_first) if k in nodes]
        try:
            for site in filter(_in_order, sites):
                for edge in site.inputs:
                    self._families.join((site.k, 0), edge)
            self._settle((0, 0), Layout(0, exact=True))  # the losses
            for edge in ((k, output) for k in outputs for output in outputs[k]):
                layout = self._layout_of(edge)
                if layout is not None:
                    self._settle(edge, layout)
            for site in sites:  # from the losses down: what reads a value is known before it
                if not _in_order(site):
                    self._pass(site, outputs[site.k])
            for edge in ((0, 0), *((k, output) for k in met for output in outputs[k])):
                self._place(edge)
        except _Open:
            return None
        found = Sizes(self._places, self._members(), self._links)
        return found if found.hold(self._graph, self._batch_size) else None

    def _site(self, k: int) -> Site:
        return Site(self._graph, k, self._layout_of, self._is_batch)

    def _outputs(self) -> dict[int, list[int]]:
        """The outputs of nodes computed from the batch that others read."""
        found: dict[int, dict[int, None]] = {0: {0: None}}
        for edges in self._graph.edges:
            for k, output in edges:
                if k >= 0 and self._is_batch(k):
                    found.setdefault(k, {})[output] = None
        return {k: list(outputs) for k, outputs in found.items()}

    def _settle(self, edge: Edge, layout: Layout) -> None:
        """What a layout says of a value, its family says too."""
        stride = stride_of(layout, self._graph.shape(edge), self._batch_size)
        if not stride or self._families.strides.setdefault(self._families.head(edge), stride) != stride:
            raise _Open

    def _known(self, edge: Edge) -> Layout | None:
        layout, stride = self._layout_of(edge), self._families.strides.get(self._families.head(edge))
        if layout is None and stride is not None:
            layout = layout_with(stride, self._graph.shape(edge), self._batch_size)
            if layout is None:
                raise _Open
        return layout

    def _place(self, edge: Edge) -> Layout:
        """The layout of a value, which it must have at every step."""
        layout = self._known(edge)
        if layout is None:
            raise _Open
        self._places[edge] = Place(layout, len(self._graph.shape(edge)))
        return layout

    def _pass(self, site: Site, outputs: Sequence[int]) -> None:
        """An operation between families: samples lie on an axis of as many entries before and after it, alike."""
        for output in outputs:
            own = self._place((site.k, output))
            for edge in site.inputs:
                axis = _axis_below(site, edge, own.axis)
                if self._known(edge) is None and axis is not None:
                    self._settle(edge, replace(own, axis=axis))
                below = self._place(edge)
                if axis not in (None, below.axis) or replace(below, axis=own.axis) != own:
                    raise _Open
                self._links.append((edge, (site.k, output)))

    def _members(self) -> Iterator[list[Edge]]:
        """The values of each family whose shapes are looked at, where there are several."""
        found: dict[Edge, list[Edge]] = {}
        for edge in self._places:
            found.setdefault(self._families.head(edge), []).append(edge)
        return (edges for edges in found.values() if len(edges) > 1)


def _in_order(site: Site) -> bool:
    """Whether the output has the elements of every input in their order."""
    op = op_of(site.graph.names[site.k])
    return op.routing is in_place and keeps_sizes(site) and op.turned(site.node, site.rank) is None


def _axis_below(site: Site, edge: Edge, axis: int) -> int | None:
    """The axis of an input that becomes an axis of the output; None where the operation itself must tell."""
    name, rank = site.graph.names[site.k], len(site.graph.shape(edge))
    op = op_of(name)
    turned = op.turned(site.node, site.rank)
    if turned is not None:
        return turned[axis]
    if name == COMPILED or op.joined is not None:
        return None
    if rank == site.rank or isinstance(op.data, MatrixProduct):
        return axis
    if op.routing is in_place:
        return axis + rank - site.rank
    worked_along = saved_axes(site.node) if op.routing is along_axes else None
    if worked_along is None:
        return None
    left = sorted(set(range(rank)).difference(along % rank for along in worked_along))
    return left[axis] if len(left) == site.rank else None
