"""The backward pass in stages, where a rule gives the gradients of a node's inputs itself.

Autograd runs down to such a node and stops. The rule has the gradients of what the node was computed from as a
by-product, and autograd starts again from there: the node's own backward, which also computes gradients of weights that
nobody asked for, never runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from clipwise.engine.graph import Edge, Graph
from clipwise.engine.ops import Gradients, op_of
from clipwise.engine.rules import Samples


@dataclass(frozen=True)
class Stages:
    """When each node computed from the batch is reached: how many stops lie before it on the longest way."""

    of: Mapping[int, int]
    stops: frozenset[int]  # nodes that autograd does not run
    joints: Mapping[int, int]  # nodes that are also reached on shorter ways, with their stages: what arrives is held

    @cached_property
    def count(self) -> int:
        """How many backward passes there are, each through another part of the graph."""
        return 1 + max(self.of.values())


def stages(graph: Graph, stops: Set[int], is_batch: Callable[[int], bool]) -> Stages:
    """The stages of a graph; backward does not go beyond what is computed from the batch."""
    found, joints = {0: 0}, set[int]()
    for k in reversed(graph.leaves_first):
        if k not in found:
            continue
        below = found[k] + (k in stops)
        for child, _ in graph.edges[k]:
            if child < 0 or not is_batch(child):
                continue
            if found.setdefault(child, below) != below:
                joints.add(child)
                found[child] = max(found[child], below)
    return Stages(found, frozenset(stops), {k: found[k] for k in joints})


def is_stop(graph: Graph, k: int, is_batch: Callable[[int], bool]) -> bool:
    """Whether the rule of a node gives the gradients of all its inputs that are computed from the batch."""
    known = op_of(graph.names[k]).backward
    if known is None:
        return False
    given = {position % len(graph.edges[k]) for position in known.positions}
    return all(at in given for at, (child, _) in enumerate(graph.edges[k]) if child >= 0 and is_batch(child))


def let_nothing_through(gradients: Gradients) -> Gradients:
    """For a node that autograd passes on its way to others."""
    return tuple(None for _ in gradients)


class Handed:
    """Gradients between stages: what stops hand on, and what joints hold until everything has arrived."""

    def __init__(self, graph: Graph, when: Stages) -> None:
        self._graph, self._when = graph, when
        self._held: dict[Edge, Tensor] = {}

    def starts(
        self, losses: Tensor, stage: int, cotangent: Tensor | None = None
    ) -> tuple[list[GradientEdge | Tensor], list[Tensor]]:
        """Where a stage begins, and the gradients there; of the losses they are ones, or those given."""
        if stage == 0:
            return [losses], [torch.ones_like(losses) if cotangent is None else cotangent]
        edges = [edge for edge in self._held if self._when.of.get(edge[0]) == stage]
        return [self._graph.gradient_edge(edge) for edge in edges], [self._held.pop(edge) for edge in edges]

    def hold(self, edge: Edge, part: Tensor | None) -> None:
        """A part of the gradient of a value."""
        held = self._held.get(edge)
        if part is not None:
            self._held[edge] = part if held is None else held + part

    def pull(self, k: int, samples: Samples, gradient: Tensor) -> None:
        """What a stop hands on to the values that it was computed from."""
        known = op_of(self._graph.names[k]).backward
        assert known is not None
        for position, part in known(self._graph.nodes[k], samples, gradient).items():
            self.hold(self._graph.edges[k][position], part)
