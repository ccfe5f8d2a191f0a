"""The backward pass in stages, where a rule gives the gradients of a node's inputs itself.

Autograd runs down to such a node and stops. The rule has the gradients of what the node was computed from as a
by-product, and autograd starts again from there: the node's own backward, which also computes gradients of weights that
nobody asked for, never runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass

from clipwise.engine.graph import Graph


@dataclass(frozen=True)
class Stages:
    """When each node computed from the batch is reached: how many stops lie before it on the longest way."""

    of: Mapping[int, int]
    stops: frozenset[int]  # nodes that autograd does not run
    joints: Mapping[int, int]  # nodes that are also reached on shorter ways, with their stages: what arrives is held

    @property
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
