"""One rule per family of operations: how a shared operand's per-sample gradient follows from the saved tensors."""

from __future__ import annotations

from clipwise.engine.rules.base import Finish, Operand, Rule, Samples

__all__ = ["Finish", "Operand", "Rule", "Samples"]
