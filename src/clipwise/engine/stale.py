"""Whether a cached plan still says what is so for a graph of its structure."""

from __future__ import annotations

from clipwise.engine.chains import overlapping
from clipwise.engine.compiled import may_hold
from clipwise.engine.graph import Graph
from clipwise.engine.node import COMPILED, at_hand
from clipwise.engine.owners import StalePlan
from clipwise.engine.plan import GraphPlan, pattern
from clipwise.engine.routes import is_identity


def refuse_stale(graph: Graph, plan: GraphPlan, batch_size: int) -> None:
    """A plan is only used while everything it took from the numbers still holds."""
    if any(pattern(graph, k) != seen for k, seen in plan.entries):
        raise StalePlan
    if not all(is_identity(graph, k) for k in plan.identities):
        raise StalePlan
    if not all(region.holds(graph) for region in plan.regions):
        raise StalePlan
    if any(graph.names[k] == COMPILED and may_hold(graph, k, batch_size) for k in plan.unseen):
        raise StalePlan
    if plan.at_hand and not all(at_hand(graph.nodes[meeting.node]) for meeting in plan.meetings):
        raise StalePlan
    for edges in plan.parted:
        if overlapping(graph, [plan.chains[edge].region for edge in edges]):
            raise StalePlan
