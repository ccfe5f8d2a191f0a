"""What of a run is saved, and what must agree before it continues."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from clipwise.accounting import Ledger
from clipwise.errors import CheckpointError
from clipwise.hashing import digest
from clipwise.plan import Plan
from clipwise.sampling import Shuffled

if TYPE_CHECKING:
    from clipwise.private.train import Private

VERSION = 2
_KEYS = {
    "version", "plan", "ledger", "steps", "seed", "label", "order", "parameters", "loader", "generator", "weights",
    "own_batches",
}  # fmt: skip


def capture(private: Private, *, with_weights: bool = True) -> dict[str, Any]:
    """The state of a run. Only a seeded one holds anything that its randomness could be rebuilt from.

    Guarantees: nothing in it is a digest of the data.
    """
    private._check_accounted()
    seeding = private._seeding
    seeded, label = seeding.seeded, seeding.begin()
    order = seeding.order if isinstance(private.plan.sampling, Shuffled) else None
    return {
        "version": VERSION,
        "plan": private.plan.to_dict(),
        "ledger": private.ledger.to_json(),
        "steps": private.steps_done,
        "seed": seeding.entropy.seed,
        "own_batches": private._own_batches,
        "label": label.hex() if seeded else None,
        "order": None if order is None else order.hex(),
        "parameters": _parameters(private._model),
        "loader": seeding.physical,
        "generator": torch.get_rng_state() if seeded else None,
        "weights": _weights(private._model, private._optimizer) if seeded and with_weights else None,
    }


def check(private: Private, saved: Mapping[str, Any]) -> None:
    """Refuse a state that does not belong to this plan, model and seed. Nothing is changed."""
    if not isinstance(saved, Mapping) or set(saved) != _KEYS:
        found = sorted(map(str, saved)) if isinstance(saved, Mapping) else type(saved).__name__
        raise CheckpointError(f"a saved run has the keys {sorted(_KEYS)}, got {found}.")
    if saved["version"] != VERSION:
        raise CheckpointError(f"the saved run has version {saved['version']!r}, this clipwise reads {VERSION}.")
    if saved["plan"] != private.plan.to_dict():
        raise CheckpointError(f"the saved run has another plan: {saved['plan']}, not {private.plan.to_dict()}.")
    if saved["seed"] != private._seeding.entropy.seed:
        kind = "no seed" if saved["seed"] is None else "another seed"
        raise CheckpointError(f"the saved run has {kind}; make Private(..., seed=...) with what it was begun with.")
    if saved["own_batches"] != private._own_batches:
        raise CheckpointError(f"the saved run has own_batches={saved['own_batches']}; make Private(...) with the same.")
    mine, theirs = _parameters(private._model), saved["parameters"]
    if mine != theirs:
        other = next((str(b or a) for a, b in _longest(mine, theirs) if a != b), "")
        raise CheckpointError(f"the model differs from the saved one, first at {other}.")
    if private.steps_done or private.ledger.events:
        raise CheckpointError(
            f"this Private has made {private.steps_done} steps already, and they cannot be forgotten. Make a new one "
            "to load a saved run."
        )


def restore(private: Private, saved: Mapping[str, Any]) -> None:
    """Go on from a captured state."""
    check(private, saved)
    ledger = Ledger.from_json(saved["ledger"])
    if ledger.steps < saved["steps"]:
        raise CheckpointError(f"the ledger has {ledger.steps} steps, but {saved['steps']} were made: it was edited.")
    seeding = private._seeding
    if saved["order"] is not None:
        seeding.order = bytes.fromhex(saved["order"])
    seeding.start = None if saved["label"] is None else bytes.fromhex(saved["label"])
    seeding.physical = saved["loader"]
    private._ledger = ledger
    private._done = saved["steps"]
    if saved["generator"] is not None:
        torch.set_rng_state(saved["generator"])
    private._close_if_done()
    # The user may load the weights before or after this: they are compared at the next step.
    private._expected_weights = saved["weights"]


def check_weights(expected: str, model: nn.Module, optimizer: Optimizer) -> None:
    """Refuse to repeat a seeded run from other weights: the same noise on another gradient gives it away."""
    if _weights(model, optimizer) != expected:
        raise CheckpointError(
            "the model or the optimizer is not as it was when the seeded run was saved; a replay would use the same "
            "noise on another gradient. Load the model's and the optimizer's state as well."
        )


def saved_plan(run: Mapping[str, Any]) -> Plan:
    """The plan in a saved run."""
    plan = run.get("plan")
    if not isinstance(plan, Mapping):
        raise CheckpointError("the saved run has no plan.")
    return Plan.from_dict(plan)


def section(record: Mapping[str, Any], name: str, path: str | os.PathLike[str]) -> dict[str, Any]:
    """A part of a checkpoint."""
    found = record.get(name)
    if not isinstance(found, dict):
        raise CheckpointError(f"{os.fspath(path)} has no {name!r}: it was not written by Private.save.")
    return found


def load_model_and_optimizer(
    record: Mapping[str, Any], path: str | os.PathLike[str], model: nn.Module, optimizer: Optimizer
) -> None:
    """Fill model and optimizer; whatever does not fit is refused before anything is changed."""
    weights, saved = section(record, "model", path), section(record, "optimizer", path)
    mine = model.state_dict()
    for name in [*mine, *weights]:
        ours, theirs = mine.get(name), weights.get(name)
        shapes = [getattr(value, "shape", None) for value in (ours, theirs)]
        if name not in mine or name not in weights or shapes[0] != shapes[1]:
            raise CheckpointError(f"the model differs from the saved one at {name!r}: {shapes[0]}, saved {shapes[1]}.")
    if saved["class"] != type(optimizer).__name__:
        raise CheckpointError(f"the saved optimizer is {saved['class']}, got {type(optimizer).__name__}.")
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    if [len(group["params"]) for group in saved["state"]["param_groups"]] != sizes:
        raise CheckpointError(f"the optimizer's groups have sizes {sizes}, the saved ones differ.")
    model.load_state_dict(weights)
    optimizer.load_state_dict(saved["state"])


def _parameters(model: nn.Module) -> list[list[Any]]:
    return [
        [name, list(p.shape), str(p.dtype).removeprefix("torch."), p.requires_grad]
        for name, p in model.named_parameters()
    ]


def _weights(model: nn.Module, optimizer: Optimizer) -> str:
    return digest({"model": dict(model.state_dict()), "optimizer": optimizer.state_dict()["state"]})


def _longest(a: list[Any], b: list[Any]) -> list[tuple[Any, Any]]:
    size = max(len(a), len(b))
    return list(zip([*a, *[None] * (size - len(a))], [*b, *[None] * (size - len(b))], strict=True))
