"""What of a run of `Private` is saved, and what must agree before it continues."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer

from clipwise._validate import is_count
from clipwise.correlation import Independent
from clipwise.errors import CheckpointError
from clipwise.hashing import digest
from clipwise.plan import Plan
from clipwise.private.release import Release
from clipwise.private.saving import check_form, is_hex, restored_ledger

__all__ = ["PrivateState"]

VERSION = 2
_FIELDS: dict[str, Callable[[Any], bool]] = {
    "own_batches": lambda own: isinstance(own, bool),
    "parameters": lambda parameters: isinstance(parameters, list),
    "weights": lambda weights: weights is None or isinstance(weights, str),
    "order": lambda order: order is None or is_hex(order),
    "loader": lambda loader: loader is None or _is_loader(loader),
    "generator": lambda state: state is None or _is_generator(state),
}
"""What is saved besides the fields of every run."""
_MEMORY: dict[str, Callable[[Any], bool]] = {"memory": lambda memory: is_count(memory, least=0)}
"""The field of the runs that have a limit of their own."""


def _is_loader(loader: object) -> bool:
    size = loader.get("physical_batch_size", 0) if isinstance(loader, dict) and len(loader) == 1 else 0
    return size is None or is_count(size)


def _is_generator(state: object) -> bool:
    try:
        torch.Generator().set_state(state)  # type: ignore[arg-type]  # it may be anything
    except (TypeError, RuntimeError):
        return False
    return True


@dataclass
class PrivateState:
    """The state of a run, gathered from its parts and put back into them."""

    plan: Plan
    model: nn.Module
    optimizer: Optimizer
    own_batches: bool
    memory: int | None
    release: Release
    expected: str | None = None
    """A digest of the weights that a restored seeded run must continue from, until they were compared."""

    kind: ClassVar[str] = "run"

    @staticmethod
    def plan_of(saved: Mapping[str, Any]) -> Plan:
        """The plan in a saved state."""
        plan = saved.get("plan")
        if not isinstance(plan, Mapping):
            raise CheckpointError("the saved run has no plan.")
        return Plan.from_dict(plan)

    @staticmethod
    def memory_of(saved: Mapping[str, Any]) -> int | None:
        """The memory for gradients of samples in a saved state; what makes no sense is refused with the state."""
        memory = saved.get("memory")
        return memory if is_count(memory, least=0) else None

    def capture(self, *, with_weights: bool = True) -> dict[str, Any]:
        """The state. Only that of a seeded run holds anything that its randomness could be rebuilt from.

        Guarantees: nothing in it is a digest of the data, unless the noise of a seeded run is correlated. Then its past
        noise is there, which was drawn for sums of the data: anyone who guesses these can see whether it fits.
        """
        self.release.check_accounted()
        position = self.release.position
        return {
            "version": VERSION,
            "plan": self.plan.to_dict(),
            "ledger": self.release.ledger.to_json(),
            "own_batches": self.own_batches,
            "parameters": _parameters(self.model),
            "weights": self._weights() if position.seeded and with_weights else None,
            **position.capture(),
            **position.capture_loader(),
            **self._past(self.release.past()),
            **({} if self.memory is None else {"memory": self.memory}),
        }

    def _past(self, value: Any) -> dict[str, Any]:
        """The field of past noise, which only plans with correlated noise have."""
        return {} if self.plan.correlation == Independent() else {"noise": value}

    def _is_past(self, past: object) -> bool:
        """Of an unseeded run there is none: it would be noise that others know, or that is too large for float64."""
        return past is None or (self.release.position.seeded and isinstance(past, Mapping))

    def _norm(self) -> dict[str, Callable[[Any], bool]]:
        """The field of an adaptive norm, which only plans with one have."""
        return {} if self.release.position.bound is None else {"bound": self.release.can_stand_at}

    def check(self, saved: Mapping[str, Any]) -> None:
        """Refuse a state that does not belong to this plan, model and seed. Nothing is changed."""
        memory = _MEMORY if "memory" in saved else {}
        check_form(saved, {**_FIELDS, **self._past(self._is_past), **self._norm(), **memory}, VERSION)
        if saved["plan"] != self.plan.to_dict():
            raise CheckpointError(f"the saved run has another plan: {saved['plan']}, not {self.plan.to_dict()}.")
        if saved["seed"] != self.release.position.entropy.seed:
            kind = "no seed" if saved["seed"] is None else "another seed"
            raise CheckpointError(f"the saved run has {kind}; make Private(..., seed=...) with what it was begun with.")
        kept, hidden = self.plan.sampling.keeps_order, self.plan.sampling.hides_order
        if kept and not hidden and saved["seed"] is None and not saved["order"]:
            raise CheckpointError("the saved run has lost the order of its records, and another one would not be its.")
        if hidden and saved["order"] is not None:
            raise CheckpointError("the saved run has an order of its records, which nobody may know: it was edited.")
        if saved["own_batches"] != self.own_batches:
            raise CheckpointError(
                f"the saved run has own_batches={saved['own_batches']}; make Private(...) with the same."
            )
        if saved["seed"] is not None and saved.get("memory") != self.memory:
            raise CheckpointError(
                f"the saved run has memory={saved.get('memory')} and a seed: with another one it would round "
                "otherwise, and not repeat its steps. Make Private(...) with the same."
            )
        mine, theirs = _parameters(self.model), saved["parameters"]
        if mine != theirs:
            other = next((str(b or a) for a, b in _longest(mine, theirs) if a != b), "")
            raise CheckpointError(f"the model differs from the saved one, first at {other}.")
        self.release.look()
        done = self.release.position.done
        if done or self.release.ledger.events:
            raise CheckpointError(
                f"this Private has made {done} steps already, and they cannot be forgotten. Make a new one "
                "to load a saved run."
            )

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Continue from a state that was checked."""
        self.release.ledger = restored_ledger(saved)
        self.release.position.restore(saved)
        self.release.position.restore_loader(saved)
        self.release.leave_epoch()
        self.release.continue_from(saved.get("noise"))
        self.release.close_if_done()
        # The user may load the weights before or after this: they are compared at the next step.
        self.expected = saved["weights"]

    def check_weights(self) -> None:
        """Refuse to repeat a seeded run from other weights: the same noise on another gradient gives it away."""
        if self._weights() != self.expected:
            raise CheckpointError(
                "the model or the optimizer is not as it was when the seeded run was saved; a replay would use the "
                "same noise on another gradient. Load the model's and the optimizer's state as well."
            )
        self.expected = None

    def _weights(self) -> str:
        return digest({"model": dict(self.model.state_dict()), "optimizer": self.optimizer.state_dict()["state"]})


def _parameters(model: nn.Module) -> list[list[Any]]:
    return [
        [name, list(p.shape), str(p.dtype).removeprefix("torch."), p.requires_grad]
        for name, p in model.named_parameters()
    ]


def _longest(a: list[Any], b: list[Any]) -> list[tuple[Any, Any]]:
    size = max(len(a), len(b))
    return list(zip([*a, *[None] * (size - len(a))], [*b, *[None] * (size - len(b))], strict=True))
