"""The autograd graph behind a vector of losses: its nodes, edges and structural signature.

The graph is read, never changed: nothing is written on a node.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from clipwise.engine.node import LEAF, RECURRENCE, Meta, Node, name_of, output_metas, structure_readers
from clipwise.errors import UnsupportedNode

NO_EDGE = (-1, 0)

_AUTOCASTING = ("cpu", "cuda", "mps", "xpu")

Edge: TypeAlias = tuple[int, int]  # (position of the child node, which of its outputs)


@contextmanager
def unrecorded() -> Iterator[None]:
    """No graph of its own, and no autocast, under which norms would be rounded and could read low."""
    casting = [device for device in _AUTOCASTING if torch.is_autocast_enabled(device)]
    with torch.no_grad():
        if not casting:
            yield
            return
        with ExitStack() as stack:
            for device in casting:
                stack.enter_context(torch.autocast(device, enabled=False))
            yield


@dataclass(frozen=True, eq=False)
class Graph:
    """Nodes in breadth-first order from the losses, with their edges towards the leaves.

    `leaf_parameter[k]` is the position in `parameters` of leaf node k; -1 for any other leaf.
    """

    nodes: list[Node]
    names: list[str]
    edges: list[tuple[Edge, ...]]
    leaf_parameter: dict[int, int]
    parameters: Sequence[Tensor]
    signature: tuple[object, ...]

    @cached_property
    def _metas(self) -> dict[int, Sequence[Meta]]:
        return {}

    def meta(self, edge: Edge) -> Meta:
        """What autograd knows about an output of a node, asked for once: torch makes it again at every question."""
        k, output = edge
        metas = self._metas.get(k)
        if metas is None:
            metas = self._metas[k] = output_metas(self.nodes[k])
        return metas[output]

    def shape(self, edge: Edge) -> torch.Size:
        """The shape of the value that flows along an edge."""
        k = edge[0]
        if self.names[k] == LEAF:
            shape: torch.Size = self.nodes[k].variable.shape
            return shape
        return torch.Size(self.meta(edge).shape)

    def gradient_edge(self, edge: Edge) -> GradientEdge | Tensor:
        """What `torch.autograd.grad` takes for this edge, as an input or an output."""
        k, output = edge
        if self.names[k] == RECURRENCE:
            return GradientEdge(self.nodes[k].ends[output - 1], 0)
        return self.nodes[k].variable if self.names[k] == LEAF else GradientEdge(self.nodes[k], output)

    def kernels(self) -> Iterator[tuple[Node, str]]:
        """All nodes of torch with their names, also those that are folded into one."""
        for node, name in zip(self.nodes, self.names, strict=True):
            if name == RECURRENCE:
                yield from ((inner, name_of(inner)) for inner in node.inner)
            else:
                yield node, name

    def computes_in(self, dtype: torch.dtype) -> bool:
        """Whether some value of the graph has this dtype."""
        pairs = zip(self.nodes, self.names, strict=True)
        return any(output.dtype == dtype for node, name in pairs if name != LEAF for output in output_metas(node))

    @cached_property
    def leaves_first(self) -> list[int]:
        """Node positions ordered so that every node comes after all it was computed from."""
        order: list[int] = []
        done = [False] * len(self.nodes)
        stack = [0]
        while stack:
            k = stack.pop()
            if k < 0:  # all below it is done
                order.append(~k)
            elif not done[k]:
                done[k] = True
                stack.append(~k)
                for child, _ in self.edges[k]:
                    if child >= 0 and not done[child]:
                        stack.append(child)
        return order

    @cached_property
    def place(self) -> list[int]:
        """Where each node is in that order."""
        found = [0] * len(self.nodes)
        for place, k in enumerate(self.leaves_first):
            found[k] = place
        return found

    @cached_property
    def readers(self) -> list[list[int]]:
        """The nodes that read each node, once each."""
        found: list[list[int]] = [[] for _ in self.nodes]
        for k, edges in enumerate(self.edges):
            for child, _ in edges:
                if child >= 0 and (not found[child] or found[child][-1] != k):
                    found[child].append(k)
        return found


def refuse_nested(graph: Graph) -> None:
    """Nested and jagged tensors have no axes to look for the batch on."""
    for node, name in zip(graph.nodes, graph.names, strict=True):
        if name != LEAF and any(output.is_nested_tensor for output in output_metas(node)):
            raise UnsupportedNode(
                f"{name} works on a nested (jagged) tensor, whose samples have no common shape. Pad the sequences and "
                "mask the padding (torch.nested.to_padded_tensor), or concatenate the rows of all samples."
            )


def differentiate(
    outputs: Sequence[GradientEdge | Tensor] | Tensor,
    inputs: Sequence[GradientEdge | Tensor],
    cotangents: Sequence[Tensor] | Tensor,
    *,
    keep: bool,
    batched: bool = False,
) -> tuple[Tensor | None, ...]:
    """`torch.autograd.grad` for any mix of tensors and edges; None for an input that nothing reaches."""
    call: Any = torch.autograd.grad
    found: tuple[Tensor | None, ...] = call(
        outputs, inputs, cotangents, retain_graph=keep, allow_unused=True, is_grads_batched=batched
    )
    return found


def walk(losses: Tensor, position: Mapping[int, int], parameters: Sequence[Tensor]) -> Graph:
    """Read the graph of `losses`; `position` maps `id(parameter)` to its place in `parameters`."""
    root = losses.grad_fn
    nodes: list[Node] = [root]
    index: dict[Node | None, int] = {None: NO_EDGE[0], root: 0}
    names: list[str] = []
    edges: list[tuple[Edge, ...]] = []
    leaf_parameter: dict[int, int] = {}
    signature: list[object] = []
    for node in nodes:  # grows while it is walked
        name = name_of(node)
        names.append(name)
        if name == LEAF:
            place = position.get(id(node.variable), -1)
            leaf_parameter[len(edges)] = place
            edges.append(())
            signature.append(leaf_entry(node, place))
            continue
        row: list[Edge] = []
        for child, output in node.next_functions:
            k = index.get(child)
            if k is None:
                k = index[child] = len(nodes)
                nodes.append(child)
            row.append((k, output))
        entry = tuple(row)
        edges.append(entry)
        signature.append(node_entry(node, name, entry))
    return Graph(nodes, names, edges, leaf_parameter, parameters, tuple(signature))


def leaf_entry(node: Node, place: int) -> object:
    """What of a leaf is structure: which parameter it is, and whether a hook may change its gradient."""
    return (place, True) if node.variable._backward_hooks else place


def node_entry(node: Node, name: str, edges: tuple[Edge, ...]) -> object:
    """What of a node is structure."""
    readers = structure_readers(node.__class__)
    return (name, edges, *[read(node) for read in readers]) if readers else (name, edges)


def dense(gradient: Tensor) -> Tensor:
    """Embeddings may have sparse gradients, which would show the rows that a batch touched; noise is added to all."""
    return gradient.to_dense() if gradient.is_sparse else gradient
