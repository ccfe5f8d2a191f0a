"""A run of `Private` or of a federated server in one file, and what a resumed one is charged.

The file has the run's own state, the model, the optimizer and whatever the caller adds. A crash leaves the old file or
the new one. From the first save on, the file is locked for the run, and an unseeded one counts every step in it before
its noise is drawn; a seeded one makes the steps after the last save again, which is the same release, and keeps digests
of them beside the file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from clipwise._validate import is_count, is_finite, is_number
from clipwise.accounting import CHANGED_DATA, Ledger
from clipwise.errors import CheckpointError, ClipwiseError
from clipwise.plan import Plan
from clipwise.private import checkpoint
from clipwise.private.digests import file_of
from clipwise.private.release import Release

__all__ = ["Saved", "Spent", "Stateful", "check_form", "is_hex", "read", "restored_ledger", "save", "spent_in"]

_INCOMPARABLE = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RuntimeError)
"""What comparing with a value of any kind may raise, such as with a tensor where a number was."""
_KINDS = ("run", "federated")
"""The names under which the state of a run stands in a file."""
_LARGEST = 2.0**63
"""A setting of an optimizer is smaller; torch does not read larger integers."""
_HEX = re.compile("(?:[0-9a-f]{2})*")


class Stateful(Protocol):
    """What is saved of a run besides its model and optimizer."""

    @property
    def kind(self) -> str:
        """The name under which it stands in the file."""
        ...

    @property
    def release(self) -> Release:
        """Ledger, journal and position of the run."""
        ...

    def check(self, saved: Mapping[str, Any]) -> None:
        """Refuse a state that is not of this run. Nothing is changed."""
        ...

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Continue from a state that was checked."""
        ...


def save(
    path: str | os.PathLike[str],
    run: Stateful,
    state: Mapping[str, Any],
    model: nn.Module,
    optimizer: Optimizer | None,
    extra: Any,
) -> None:
    """Write everything; an unseeded run counts every step in that file from then on."""
    release, position = run.release, run.release.position
    lock = release.lock_of(path)
    with release.being_saved() as mark:
        record = {
            run.kind: state,
            "model": dict(model.state_dict()),
            "optimizer": optimizer and {"class": type(optimizer).__name__, "state": optimizer.state_dict()},
            "extra": extra,
            "witness": mark,
        }
        try:
            if position.seeded:  # digests first: the checkpoint must not be there without what it is compared with
                position.digests.save(path)
            journal = checkpoint.write(path, record, position.done, lock)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be written ({error}). What was saved there before stays.") from error
        if position.seeded:
            position.digests.saved(position.done)
        else:
            file_of(path).unlink(missing_ok=True)  # of a seeded run that lay here before
        release.count_in(journal)


@dataclass(frozen=True)
class Saved:
    """What was read from a file."""

    path: Path
    journal: checkpoint.Journal
    state: dict[str, Any]
    model: dict[str, Any]
    optimizer: dict[str, Any] | None
    extra: Any
    witness: dict[str, Any] | None

    def continue_in(
        self, run: Stateful, model: nn.Module, optimizer: Optimizer | None, *, changed_data: bool = False
    ) -> None:
        """Fill a new run, model and optimizer, and charge what was begun since; nothing is changed by a refusal."""
        if changed_data and self.state["seed"] is not None:
            raise CheckpointError(
                "a seeded run repeats its steps, and on other data that tells the difference. Start again with another "
                "seed."
            )
        try:
            run.check(self.state)
            self._check_model(model)
            self._check_optimizer(optimizer)
            witnessed = run.release.check_witness(self.witness)
        except ClipwiseError:
            raise
        except _INCOMPARABLE as error:
            raise CheckpointError(f"{self.path} does not hold the values of a run: it is damaged ({error}).") from error
        if optimizer is not None and self.optimizer is not None:
            try:
                optimizer.load_state_dict(self.optimizer["state"])
            except (LookupError, TypeError, ValueError, RuntimeError, AttributeError) as error:
                raise CheckpointError(f"{self.path} has a state that the optimizer refuses: {error}.") from error
        model.load_state_dict(self.model)
        run.restore(self.state)
        if self.state["seed"] is not None:
            run.release.position.digests.load(self.path)
        run.release.continue_in(self.journal, witnessed)
        if changed_data:
            run.release.mark(reason=CHANGED_DATA)

    def _check_model(self, model: nn.Module) -> None:
        mine = model.state_dict()
        for name in [*mine, *self.model]:
            forms = [_form(state.get(name)) for state in (mine, self.model)]
            if name not in mine or name not in self.model or forms[0] != forms[1]:
                raise CheckpointError(
                    f"{self.path} does not fit this model, which differs from the saved one at {name!r}: {forms[0]}, "
                    f"saved {forms[1]}."
                )

    def _check_optimizer(self, optimizer: Optimizer | None) -> None:
        saved = self.optimizer
        if optimizer is None or saved is None:
            if optimizer is not None or saved is not None:
                raise CheckpointError(f"{self.path} was saved with{'out' if saved is None else ''} an optimizer.")
            return
        if saved.get("class") != type(optimizer).__name__:
            raise CheckpointError(f"the saved optimizer is {saved.get('class')}, got {type(optimizer).__name__}.")
        mine, theirs = optimizer.state_dict(), saved.get("state")
        if not isinstance(theirs, dict) or set(theirs) != set(mine) or not isinstance(theirs["state"], dict):
            raise CheckpointError(f"{self.path} does not hold the state of its optimizer: it is damaged.")
        groups, sizes = theirs["param_groups"], [len(group["params"]) for group in mine["param_groups"]]
        if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
            raise CheckpointError(f"{self.path} does not hold the groups of its optimizer: it is damaged.")
        if [group.get("params") for group in groups] != [group["params"] for group in mine["param_groups"]]:
            raise CheckpointError(f"the optimizer's groups have sizes {sizes}, the saved ones differ.")
        for ours, group in zip(mine["param_groups"], groups, strict=True):
            for name, value in group.items():
                if name in ours and not _alike(ours[name], value):  # a scheduler adds others
                    raise CheckpointError(f"{self.path} has {name!r} of its optimizer as {type(value).__name__}.")
        for index, values in theirs["state"].items():
            if not is_count(index, least=0) or index >= sum(sizes) or not isinstance(values, dict):
                raise CheckpointError(f"{self.path} does not hold the state of its optimizer: it is damaged.")


def _alike(ours: object, saved: object) -> bool:
    """Whether a setting of an optimizer could stand in the place of another; many are None until they are set."""
    if isinstance(ours, (tuple, list)) and isinstance(saved, (tuple, list)):
        return len(ours) == len(saved) and all(map(_alike, ours, saved))
    if is_number(ours) or is_number(saved):
        return (ours is None or is_number(ours)) and (saved is None or (is_finite(saved) and abs(saved) < _LARGEST))
    return ours is None or saved is None or type(ours) is type(saved)


def _form(value: Any) -> tuple[tuple[int, ...], torch.dtype] | None:
    return (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else None


def read(path: str | os.PathLike[str], kind: str) -> Saved:
    """A saved run of this kind, locked before it is read; refused when it continued in another file."""
    journal = checkpoint.Journal(Path(path))
    record, _, live = checkpoint.read(path)
    state, model, optimizer, witness = (record.get(name) for name in (kind, "model", "optimizer", "witness"))
    optional = all(isinstance(part, (dict, type(None))) for part in (optimizer, witness))
    if not isinstance(state, dict) or not isinstance(model, dict) or not optional:
        raise CheckpointError(f"{Path(path)} has no {kind!r}: such a run did not write it.")
    _check_live(path, state, live)
    return Saved(Path(path), journal, state, model, optimizer, record.get("extra"), witness)


def _check_live(path: str | os.PathLike[str], state: Mapping[str, Any], live: bool) -> None:
    if state.get("seed") is None and not live:
        raise CheckpointError(
            f"{Path(path)} was replaced by a later checkpoint elsewhere, and what was made since is counted there. "
            "Resume from the latest one."
        )


@dataclass(frozen=True)
class Spent:
    """What a run that is not finished has released so far, of how many planned steps."""

    ledger: Ledger
    steps: int
    planned: int
    seeded: bool
    """Whether steps after the last checkpoint are made again, so that the ledger does not have them."""


def spent_in(path: str | os.PathLike[str]) -> Spent:
    """What the run in a checkpoint has spent. The run is not continued, and may be running.

    Guarantees: the ledger has every step that a run without a seed has begun, also after the checkpoint was written.
    """
    record, begun, live = checkpoint.read(path)
    state = next((record[kind] for kind in _KINDS if isinstance(record.get(kind), Mapping)), None)
    if state is None or not all(name in state and holds(state[name]) for name, holds in _OF_EVERY_RUN.items()):
        raise CheckpointError(f"{Path(path)} does not hold the ledger of a run: it is damaged.")
    _check_live(path, state, live)
    plan, ledger, done = Plan.from_dict(state["plan"]), restored_ledger(state), state["steps"]
    if state["seed"] is None:
        mark = record.get("witness")
        ahead = mark.get("every") if isinstance(mark, Mapping) else 0  # a witness is charged so many steps ahead
        begun = min(begun + ahead, plan.steps) if is_count(ahead, least=0) else plan.steps
        marks: dict[str, Any] = {"own_batches": True} if state.get("own_batches") else {}
        for event in plan.events_of(done, begun) if begun > done else ():
            ledger.record(replace(event, reason="interrupted", **marks))
    return Spent(ledger, max(done, begun), plan.steps, state["seed"] is not None)


def is_hex(value: object) -> bool:
    """Whether a value is bytes as `bytes.hex` writes them."""
    return isinstance(value, str) and _HEX.fullmatch(value) is not None


_OF_EVERY_RUN: dict[str, Callable[[Any], bool]] = {
    "version": is_count,
    "plan": lambda plan: isinstance(plan, Mapping),
    "ledger": lambda ledger: isinstance(ledger, str),
    "steps": lambda steps: is_count(steps, least=0),
    "seed": lambda seed: seed is None or is_count(seed, least=0),
    "label": lambda label: label is None or is_hex(label),
}
"""What the fields of a saved state may hold, by name."""


def check_form(saved: Mapping[str, Any], further: Mapping[str, Callable[[Any], bool]], version: int) -> None:
    """Refuse a state of another version, with other fields than those of every run and these, or with other values."""
    if isinstance(saved, Mapping) and saved.get("version", version) != version:
        raise CheckpointError(
            f"the saved run has version {saved['version']!r}, this clipwise reads {version}: finish the run with the "
            "clipwise that wrote it."
        )
    fields = {**_OF_EVERY_RUN, **further}
    if not isinstance(saved, Mapping) or set(saved) != set(fields):
        found = sorted(map(str, saved)) if isinstance(saved, Mapping) else type(saved).__name__
        raise CheckpointError(f"a saved run has the keys {sorted(fields)}, got {found}.")
    wrong = [name for name, holds in fields.items() if not holds(saved[name])]
    if wrong:
        raise CheckpointError(f"the saved run has no {wrong[0]!r} that makes sense: it is damaged.")
    restored_ledger(saved)


def restored_ledger(saved: Mapping[str, Any]) -> Ledger:
    """The ledger of a saved state, which has at least the steps that were made."""
    ledger = Ledger.from_json(saved["ledger"])
    if ledger.steps < saved["steps"]:
        raise CheckpointError(f"the ledger has {ledger.steps} steps, but {saved['steps']} were made: it was edited.")
    return ledger
