"""Operations that keep every element's value: the norm of a gradient is the same before and after them.

Each kind of view moves a gradient from its output to its input by hand, so that it keeps its precision where autograd
would round it to the dtype of the value.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from clipwise.engine.graph import Edge, Graph
from clipwise.engine.node import Node, saved, saved_int, saved_ints, saved_or


class View(ABC):
    """A kind of view."""

    is_whole = True  # every element of the input is in the output
    keeps_order = False  # whatever the shapes, elements stay in the order of memory

    @abstractmethod
    def below(self, graph: Graph, edge: Edge, gradient: Tensor, leading: int) -> Tensor | None:
        """The gradient of the input from that of the output, after `leading` other axes; None: not by hand."""

    def transposes(self, graph: Graph, edge: Edge) -> bool:
        """Whether it is the transpose of a matrix."""
        return False

    def turned(self, node: Node, rank: int) -> list[int] | None:
        """For every axis of the output, which one of the input it is; None where axes are not turned."""
        return None


class Same(View):
    """Nothing is moved: an alias, a copy, a cast."""

    def below(self, graph: Graph, edge: Edge, gradient: Tensor, leading: int) -> Tensor:
        return gradient


class Transposed(View):
    """`x.t()`."""

    def below(self, graph: Graph, edge: Edge, gradient: Tensor, leading: int) -> Tensor:
        return gradient.mT

    def transposes(self, graph: Graph, edge: Edge) -> bool:
        return True

    def turned(self, node: Node, rank: int) -> list[int]:
        return list(reversed(range(rank)))


class Swapped(View):
    """`x.transpose(a, b)`."""

    def below(self, graph: Graph, edge: Edge, gradient: Tensor, leading: int) -> Tensor:
        node, rank = graph.nodes[edge[0]], len(graph.shape(edge))
        return gradient.transpose(*(leading + saved_int(node, name) % rank for name in ("dim0", "dim1")))

    def transposes(self, graph: Graph, edge: Edge) -> bool:
        return len(graph.shape(edge)) == 2

    def turned(self, node: Node, rank: int) -> list[int]:
        a, b = (saved_int(node, name) % max(rank, 1) for name in ("dim0", "dim1"))
        return [{a: b, b: a}.get(axis, axis) for axis in range(rank)]


class Permuted(View):
    """`x.permute(...)`."""

    def below(self, graph: Graph, edge: Edge, gradient: Tensor, leading: int) -> Tensor:
        order = self.turned(graph.nodes[edge[0]], len(graph.shape(edge)))
        return gradient.permute(*range(leading), *(leading + order.index(axis) for axis in range(len(order))))

    def turned(self, node: Node, rank: int) -> list[int]:
        return [axis % rank for axis in saved_ints(node, "dims")]


class Squeezed(View):
    """Axes of one entry are put in or taken out."""

    def below(self, graph: Graph, edge: Edge, gradient: Tensor, leading: int) -> Tensor:
        return gradient.reshape(*gradient.shape[:leading], *graph.shape(graph.edges[edge[0]][0]))


class Reshaped(Squeezed):
    """Any other shape for the same elements."""

    keeps_order = True


@dataclass(frozen=True)
class Region(View):
    """A range of one axis; `picks` says which, from the node, the number of its output and the size of the axis."""

    picks: Callable[[Node, int, int], tuple[int, int]]
    drops_axis: bool = False
    is_whole = False

    def is_dense(self, node: Node) -> bool:
        """Whether nothing inside the range is left out."""
        return bool(saved_or(node, "step", 1) == 1)

    def interval(self, graph: Graph, edge: Edge) -> tuple[int, int, int]:
        """The axis and the half-open range of it, as it is at this step."""
        k, output = edge
        node, shape = graph.nodes[k], graph.shape(graph.edges[k][0])
        axis = saved_int(node, "dim") % len(shape)
        return axis, *self.picks(node, output, shape[axis])

    def below(self, graph: Graph, edge: Edge, gradient: Tensor, leading: int) -> Tensor | None:
        if not self.is_dense(graph.nodes[edge[0]]):
            return None
        axis, start, stop = self.interval(graph, edge)
        if self.drops_axis:
            gradient = gradient.unsqueeze(leading + axis)
        whole = gradient.new_zeros(*gradient.shape[:leading], *graph.shape(graph.edges[edge[0]][0]))
        whole.narrow(leading + axis, start, stop - start).copy_(gradient)
        return whole


class Copied(View):
    """Pieces that are copies."""

    is_whole = False

    def below(self, graph: Graph, edge: Edge, gradient: Tensor, leading: int) -> None:
        return None


def selected(node: Node, output: int, size: int) -> tuple[int, int]:
    """`x[i]`."""
    start = saved_int(node, "index") % size
    return start, start + 1


def unbound(node: Node, output: int, size: int) -> tuple[int, int]:
    """`x.unbind()`."""
    return output, output + 1


def sliced(node: Node, output: int, size: int) -> tuple[int, int]:
    """`x[a:b]`."""
    start, stop = saved_int(node, "start"), saved_int(node, "end")
    return min(max(start + size if start < 0 else start, 0), size), min(stop + size if stop < 0 else stop, size)


def split(node: Node, output: int, size: int) -> tuple[int, int]:
    """`x.split(n)`, `x.chunk(n)`."""
    step = saved(node, "split_size")
    return output * step, min((output + 1) * step, size)


def split_with_sizes(node: Node, output: int, size: int) -> tuple[int, int]:
    """`x.split([a, b, ...])`."""
    sizes = saved(node, "split_sizes")
    return sum(sizes[:output]), sum(sizes[: output + 1])
