"""A run in one file: written such that a crash leaves the old file or the new one, and continued from it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn
from torch.optim import Optimizer

from clipwise.errors import CheckpointError
from clipwise.plan import Plan
from clipwise.private import checkpoint, state
from clipwise.private.digests import Digests, file_of

if TYPE_CHECKING:
    from clipwise.private.train import Private

Run = TypeVar("Run", bound="Private")


def save(private: Private, path: str | os.PathLike[str], extra: Any) -> None:
    """Write model, optimizer and run; an unseeded run counts every step in that file from then on."""
    record = {
        "run": state.capture(private, with_weights=False),
        "model": dict(private._model.state_dict()),
        "optimizer": {"class": type(private._optimizer).__name__, "state": private._optimizer.state_dict()},
        "extra": extra,
    }
    digests = private._seeding.digests if private._seeding.seeded else None

    def write() -> checkpoint.Journal:
        return checkpoint.write(path, record, private._done)

    private._journal = written(path, digests, private._done, private._journal, write)


def written(
    path: str | os.PathLike[str],
    digests: Digests | None,
    done: int,
    counting: checkpoint.Journal | None,
    write: Callable[[], checkpoint.Journal],
) -> checkpoint.Journal | None:
    """Write a checkpoint after `done` steps or rounds, and give the journal that counts from then on.

    `digests` are those of a seeded run, whose replay after a crash is the same release, charged once: nothing counts.
    """
    if digests is not None:  # first: the checkpoint must not be there without what it is compared with
        digests.save(path)
        write().close()
        digests.saved(done)
        return counting
    journal = write()
    file_of(path).unlink(missing_ok=True)  # of a seeded run that lay here before
    if counting is not None and counting.path != journal.path:
        counting.retire(done)
    elif counting is not None:
        counting.close()
    return journal


def resume(
    kind: type[Run],
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer,
    plan: Plan | None,
    options: Mapping[str, Any],
) -> Run:
    """A run of the given kind from a file; model and optimizer are filled."""
    record, _, live = checkpoint.read(path)
    run = state.section(record, "run", path)
    seed = run.get("seed")
    if seed is None and not live:
        raise CheckpointError(
            f"{Path(path)} was replaced by a later checkpoint elsewhere, and the steps made since are counted "
            "there. Resume from the latest one."
        )
    own = run.get("own_batches") is True
    private = kind(plan or state.saved_plan(run), model, optimizer, seed=seed, own_batches=own, **options)
    state.check(private, run)
    state.load_model_and_optimizer(record, path, model, optimizer)
    state.restore(private, run)
    if seed is not None:
        private._seeding.digests.load(path)
    private.extra = record.get("extra")
    if seed is None:
        private._journal = checkpoint.Journal(Path(path))
        _charge_interrupted(private, private._journal.begun())
    return private


def _charge_interrupted(private: Private, begun: int) -> None:
    lost = begun - private._done
    if lost > 0:
        private._ledger.record(replace(private._event.repeated(lost), reason="interrupted"))
        private._done = begun
        private._close_if_done()
