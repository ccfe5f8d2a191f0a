"""A federated run in one file: model, server's optimizer, ledger, and a count of the rounds begun since."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from clipwise.accounting import Ledger
from clipwise.errors import CheckpointError
from clipwise.private import checkpoint

if TYPE_CHECKING:
    from clipwise.federated.server import Server

__all__ = ["capture", "check", "read", "restore", "write"]

_VERSION = 3
_KEYS = {"version", "plan", "rounds", "bound", "ledger", "seed", "label"}


def capture(server: Server) -> dict[str, Any]:
    """The state of a run. Only a seeded one holds anything that its randomness could be rebuilt from."""
    return {
        "version": _VERSION,
        "plan": server.plan.to_dict(),
        "rounds": server.rounds_done,
        "bound": server.bound,
        "ledger": server.ledger.to_json(),
        "seed": server._entropy.seed,
        "label": server._start.hex(),
    }


def check(server: Server, saved: Mapping[str, Any]) -> None:
    """Refuse a state that is not that of a new server's plan and seed."""
    if not isinstance(saved, Mapping) or set(saved) != _KEYS or saved["version"] != _VERSION:
        raise CheckpointError(f"a saved federated run has the keys {sorted(_KEYS)} and version {_VERSION}.")
    if server.rounds_done:
        raise CheckpointError(f"this server has made {server.rounds_done} rounds already; continue in a new one.")
    if server._continues:
        raise CheckpointError(
            "a saved run has its own ledger, which contains what it was begun with. Resume in a server without "
            "ledger=..., and record on server.ledger what else was released since."
        )
    mine = (server.plan.to_dict(), server._entropy.seed)
    if mine != (saved["plan"], saved["seed"]):
        what = "plan" if mine[0] != saved["plan"] else "seed"
        raise CheckpointError(f"the run was begun with another {what}: expected {mine[0]}, saved is {saved['plan']}.")


def restore(server: Server, saved: Mapping[str, Any]) -> None:
    """Put a state that was checked into the server."""
    server._ledger = Ledger.from_json(saved["ledger"])
    server._done, server._bound = saved["rounds"], saved["bound"]
    server._start = bytes.fromhex(saved["label"])


def write(
    path: str | os.PathLike[str], server: Server, model: nn.Module, optimizer: Optimizer | None, extra: Any
) -> checkpoint.Journal:
    """Write everything such that a crash leaves the old file or the new one."""
    record = {
        "federated": capture(server),
        "model": dict(model.state_dict()),
        "optimizer": None if optimizer is None else optimizer.state_dict(),
        "extra": extra,
    }
    return checkpoint.write(path, record, server.rounds_done)


def read(
    path: str | os.PathLike[str], server: Server, model: nn.Module, optimizer: Optimizer | None
) -> tuple[Any, checkpoint.Journal | None]:
    """Fill server, model and optimizer from what `write` wrote, and charge rounds begun since.

    Gives back `extra` and, for an unseeded run, the journal in which the coming rounds are to be counted.
    """
    record, _, live = checkpoint.read(path)
    if set(record) != {"federated", "model", "optimizer", "extra"}:
        raise CheckpointError(f"{Path(path)} does not hold a federated run.")
    if (record["optimizer"] is None) != (optimizer is None):
        raise CheckpointError(f"{Path(path)} was saved with{'' if optimizer is None else 'out'} a server's optimizer.")
    check(server, record["federated"])
    seeded = record["federated"]["seed"] is not None
    if not seeded and not live:
        raise CheckpointError(
            f"{Path(path)} was replaced by a later checkpoint elsewhere, and the rounds made since are counted there. "
            "Resume from the latest one."
        )
    try:
        model.load_state_dict(record["model"])
        if optimizer is not None:
            optimizer.load_state_dict(record["optimizer"])
    except (RuntimeError, ValueError, KeyError) as error:
        raise CheckpointError(f"{Path(path)} does not fit this model or optimizer: {error}") from error
    # A seeded run makes the rounds begun since again, which is the same release.
    journal = None if seeded else checkpoint.Journal(Path(path))
    restore(server, record["federated"])
    if seeded:
        server._digests.load(path)
    if journal is not None:
        _charge_interrupted(server, journal.begun())  # read under the lock: no other process counts on
    return record["extra"], journal


def _charge_interrupted(server: Server, begun: int) -> None:
    lost = begun - server.rounds_done
    if lost > 0:
        for event in server.plan.events_of(server.rounds_done, begun):
            server._ledger.record(replace(event, reason="interrupted"))
        server._done = begun
