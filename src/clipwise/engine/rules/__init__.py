"""One rule per family of graph nodes: how a shared operand's per-sample gradient follows from the saved tensors."""

from __future__ import annotations

from clipwise.engine.graph import Graph
from clipwise.engine.rules import autograd, broadcast, conv, grouped, linear, norm, table
from clipwise.engine.rules.base import Finish, Operand, Rule, Samples

__all__ = ["DATA_OPERANDS", "RULES", "Finish", "Operand", "Rule", "Samples", "is_live", "rule_of"]

RULES: dict[str, Rule] = {
    **autograd.RULES, **broadcast.RULES, **conv.RULES, **grouped.RULES, **linear.RULES, **norm.RULES, **table.RULES,
}  # fmt: skip
DATA_OPERANDS = linear.DATA_OPERANDS


def rule_of(graph: Graph, k: int) -> Rule | None:
    """The rule of a node; None when there is none."""
    name = graph.names[k]
    if autograd.is_opaque(graph, k):
        return autograd.by_autograd
    return RULES.get(name)


def is_live(graph: Graph, k: int) -> bool:
    """Whether the rule runs the node's own backward and so needs the graph kept alive."""
    return graph.names[k] in autograd.RULES or autograd.is_opaque(graph, k)
