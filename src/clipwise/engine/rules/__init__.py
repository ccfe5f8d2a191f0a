"""One rule per family of graph nodes: how a shared operand's per-sample gradient follows from the saved tensors."""

from __future__ import annotations

from clipwise.engine.rules import autograd, broadcast, conv, grouped, linear, norm, table
from clipwise.engine.rules.base import Finish, Operand, Rule, Samples

__all__ = ["DATA_OPERANDS", "LIVE", "RULES", "Finish", "Operand", "Rule", "Samples"]

RULES: dict[str, Rule] = {
    **autograd.RULES, **broadcast.RULES, **conv.RULES, **grouped.RULES, **linear.RULES, **norm.RULES, **table.RULES,
}  # fmt: skip
# Rules that run the node's own backward and so need the graph kept alive.
LIVE = frozenset(autograd.RULES)
DATA_OPERANDS = linear.DATA_OPERANDS
