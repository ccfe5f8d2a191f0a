"""What of a federated run is saved, and what must agree before it continues."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from clipwise._validate import is_positive
from clipwise.errors import CheckpointError
from clipwise.plan import Plan
from clipwise.private import Release, check_form, restored_ledger

__all__ = ["ServerState"]

VERSION = 3
"""3: steps for rounds, the plan as values, and the class of the server's optimizer."""


@dataclass
class ServerState:
    """The state of a federated run."""

    plan: Plan
    release: Release
    continues: bool
    """Whether the ledger was given by the caller."""

    kind: ClassVar[str] = "federated"

    def capture(self) -> dict[str, Any]:
        """The state. Only that of a seeded run holds anything that its randomness could be rebuilt from."""
        return {
            "version": VERSION,
            "plan": self.plan.to_dict(),
            "bound": None,
            "ledger": self.release.ledger.to_json(),
            **self.release.position.capture(),
        }

    def check(self, saved: Mapping[str, Any]) -> None:
        """Refuse a state that is not that of a new server's plan and seed. Nothing is changed."""
        position = self.release.position
        check_form(saved, {"bound": lambda bound: bound is None or is_positive(bound)}, VERSION)
        if position.done:
            raise CheckpointError(f"this server has made {position.done} rounds already; continue in a new one.")
        if self.continues or self.release.ledger.events:
            raise CheckpointError(
                "a saved run has its own ledger, which contains what it was begun with. Resume in a server without "
                "ledger=..., and record on server.ledger what else was released since."
            )
        mine = (self.plan.to_dict(), position.entropy.seed)
        if mine != (saved["plan"], saved["seed"]):
            what = "plan" if mine[0] != saved["plan"] else "seed"
            raise CheckpointError(
                f"the run was begun with another {what}: expected {mine[0]}, saved is {saved['plan']}."
            )
        if (saved["bound"] is None) != (position.bound is None):
            raise CheckpointError("the saved run says otherwise than its plan whether its norm adapts: it is damaged.")
        if saved["bound"] is not None and not self.release.can_stand_at(saved["bound"]):
            raise CheckpointError(f"the plan's norm cannot stand at {saved['bound']!r}: the saved run is damaged.")

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Continue from a state that was checked."""
        self.release.ledger = restored_ledger(saved)
        self.release.position.restore(saved)
