"""A finished run that another one continues: its weights, with a new plan, on one ledger.

What the earlier run released is part of the later one's epsilon. It is continued once: two continuations would each
state an epsilon that the other's steps are not in.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from clipwise.accounting import CHANGED_DATA, EARLIER, Event
from clipwise.data import DataSet
from clipwise.errors import CheckpointError, ClipwiseError, DataError
from clipwise.report import Run, RunFolder
from clipwise.sampling import Shuffled
from clipwise.training.model import SavedModel, read_weights
from clipwise.training.run.folder import Folder

__all__ = ["Earlier"]


@dataclass(frozen=True, eq=False)
class Earlier:
    """A finished private run, as another one begins with it.

    Guarantees: every event of its ledger is among `events`, and none of them is said to be of other records than those
    that are trained on. It is marked as continued before the first step, and refused to everybody else from then on.
    """

    folder: RunFolder
    run: Run
    saved: SavedModel
    events: tuple[Event, ...]

    @classmethod
    def read(cls, path: Path) -> Earlier:
        """The run in a folder; refused unless it is finished, private, whole and not continued yet."""
        folder = RunFolder(path)
        if not folder.finished:
            raise DataError(
                f"continue_from = {os.fspath(path)!r} is not a finished run. An interrupted one is continued by "
                "--resume, with its own configuration."
            )
        run = Run.load(path)
        if run.ledger is None or not run.is_private:
            raise DataError(f"the run in {path} is not private: nothing that begins with its weights would be.")
        if any(isinstance(event.sampling, Shuffled) for event in run.ledger.events):
            raise DataError(
                f"the run in {path} drew shuffled batches, and two sequences of epochs have no joint epsilon on one "
                "ledger. Continue runs with Poisson sampling."
            )
        saved = SavedModel.read(folder, trust_code=True)  # no network is built from it: that is the configuration's
        made = cls(folder, run, saved, tuple(map(_earlier, run.ledger.events)))
        made._check_free()
        return made

    def on(self, digest: str, *, changed_data: bool) -> tuple[Event, ...]:
        """Its events, for a run on records with this digest: others than its own have to be asked for."""
        if digest in self.folder.digests[-1:]:
            return self.events
        if not changed_data:
            raise CheckpointError(
                f"the data are not those of the run in {self.folder.path}. Continue it on the same data, or on others "
                "by --changed-data: the ledger and the page then say so, and its epsilon still counts in full."
            )
        return tuple(event.changed(reason=f"{EARLIER}, {CHANGED_DATA}") for event in self.events)

    def fill(self, model: nn.Module, data: DataSet) -> None:
        """Begin with its weights; refused where inputs or classes have another meaning."""
        mine = (self.saved.classes, self.saved.features, self.saved.schema)
        if mine != (data.classes, data.features, data.schema):
            raise DataError(
                f"the run in {self.folder.path} was trained on other classes or columns than {data.name} has: its "
                "weights would mean something else."
            )
        read_weights(model, self.folder.model)

    @contextmanager
    def continued_by(self, folder: Folder) -> Iterator[None]:
        """Mark it as continued; the mark is taken back if no step was made."""
        try:
            handle = os.open(self.folder.continued, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            self._check_free()
            raise
        except OSError as error:
            raise DataError(
                f"{self.folder.path} cannot be marked as continued ({error.strerror}), so nobody would know of it."
            ) from error
        with open(handle, "w", encoding="utf-8") as file:
            file.write(f"{folder.path.absolute()}\n")
            file.flush()
            os.fsync(file.fileno())
        try:
            yield
        except (ClipwiseError, OSError):
            if not folder.begun:
                self.folder.continued.unlink()
            raise

    def _check_free(self) -> None:
        mark = self.folder.continued
        if mark.exists():
            raise DataError(
                f"the run in {self.folder.path} was continued already ({mark} says where). Two continuations of one "
                "run would each leave the other out of their epsilon: continue the later one. What it has spent stays "
                "spent, also where its folder is gone."
            )


def _earlier(event: Event) -> Event:
    """As it stands on the ledger of a later run, whose records need not be disjoint from any of it."""
    reason = f"{EARLIER}, {CHANGED_DATA}" if CHANGED_DATA in event.reason else EARLIER
    return event.changed(reason=reason, **({"disjoint": False} if event.disjoint else {}))
