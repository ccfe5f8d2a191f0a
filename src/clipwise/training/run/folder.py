"""The folder of a run that is being trained: which run may be made in it, or continued.

A finished run that another one continues gives its weights; the other has a new plan, on one ledger. What the earlier
run released is part of the later one's epsilon. It is continued once: two continuations would each state an epsilon
that the other's steps are not in.
"""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from clipwise.accounting import CHANGED_DATA, EARLIER, Event, as_earlier
from clipwise.data import DataSet
from clipwise.errors import CheckpointError, ClipwiseError, DataError, InvalidConfig
from clipwise.report import SEEDED, Run, RunFolder
from clipwise.training.config import DataChoice, TomlText
from clipwise.training.model import SavedModel, read_weights
from clipwise.training.run.begun import Begun

__all__ = ["Earlier", "Folder", "warned_before"]

_NOT_THERE = (
    "The run that this one continues was not found any more when this one was resumed: what its page warned of, such "
    "as a seed or classes read off the records, is not repeated here."
)
_NOT_RECALIBRATED = (
    "The run that this one continues ({path}) was recalibrated ({method}). That map is not continued, since it was "
    "fitted to other weights: name recalibration.methods to fit another one."
)
_PLACES = {"output", "witness", "witness_every"}


class Folder(RunFolder):
    """A run's folder, claimed for one run by `claimed`."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.seconds = 0.0
        """Training time so far, over all the processes that the run took."""
        self.begun = False
        """Whether a step has been made."""
        self.changed_data = False
        """Whether the run continues on other records than it was begun with."""

    def check(self, text: str, *, resume: bool, force: bool) -> None:
        """Refuse, before anything is computed, to lose a run or other files, or to continue another run."""
        if resume:
            self._check_resume(text)
            return
        found, others = self.files()
        if others:
            raise DataError(
                f"{self.path} holds files that are not a run's ({', '.join(sorted(others)[:3])}). Name another folder "
                "with --output."
            )
        if self.finished and not force:
            raise DataError(
                f"{self.path} holds a finished run. Give this one another name with --set name=..., or another folder "
                "with --output; --force removes the finished one."
            )
        if found and not force:
            raise DataError(
                f"{self.path} holds an interrupted run. Use --resume to continue it, or --force to start again "
                "(what it has spent stays spent)."
            )

    def _check_resume(self, text: str) -> None:
        if self.finished:
            raise DataError(f"{self.path} holds a finished run: there is nothing to resume.")
        if not self.checkpoint.exists():
            raise DataError(
                f"{self.path} holds no checkpoint to resume from. Omit --resume to start a run "
                "(with --force, if a run was cut here before its first checkpoint)."
            )
        old = TomlText.read(self.config)
        new = TomlText.parse(text)
        changed = sorted(_differing({"name": new.values.get("name"), **old.values}, new.values, ()))
        if changed:
            command = shlex.join(["clipwise", "train", str(self.config), "--resume"])
            raise InvalidConfig(
                f"{self.path} was begun with another configuration ({', '.join(changed)} differ). Resume it by "
                f"`{command}`, or start another run with --output."
            )

    @contextlib.contextmanager
    def trained_in(self, config: str, digest: str, *, resume: bool, changed_data: bool) -> Iterator[None]:
        """The folder for a run on records with this digest, which must be those that it was begun with.

        `changed_data` continues on others. A model or a plan that is refused before the first step leaves no folder.
        """
        with self.claimed(config, resume=resume):
            self.begun = resume
            try:
                self._check_data(digest, resume, changed_data)
                yield
            except (ClipwiseError, OSError):
                if not self.begun:
                    self.discard()
                raise

    def _check_data(self, digest: str, resume: bool, changed_data: bool) -> None:
        known = self.digests if resume else ()
        if resume and digest not in known[-1:]:
            if not changed_data:
                raise CheckpointError(
                    f"the data changed: they are not those of the run in {self.path}. Continue with the same data, or "
                    "start another run with --output. A run without a seed can continue with others by --changed-data; "
                    "its ledger and page then say so."
                )
            known = known or ("",)  # nobody knows what it was begun with
        if digest not in known[-1:]:
            self.digests = (*known, digest)
        self.changed_data = len(self.digests) > 1


def _differing(old: Mapping[str, Any], new: Mapping[str, Any], path: tuple[str, ...]) -> set[str]:
    """Keys whose values differ; where the run and its count are kept does not count."""
    names: set[str] = set()
    for key in {*old, *new} - (_PLACES if not path else set()):
        a, b = old.get(key), new.get(key)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            names |= _differing(a, b, (*path, key))
        elif a != b:
            names.add(".".join((*path, key)))
    return names


def warned_before(path: Path, folder: Folder, methods: Collection[str]) -> tuple[str, ...]:
    """What the run at `path` warns of, when the one in `folder` that continues it is resumed.

    Another run may be in its place by now: that it was continued by this one, it says itself.
    """
    mark = RunFolder(path).continued
    if not mark.is_file() or mark.read_text(encoding="utf-8").strip() != str(folder.path.absolute()):
        return (_NOT_THERE,)
    return Earlier.of(path).warnings_for(methods)


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
        made = cls.of(path)
        made._check_free()
        return made

    @classmethod
    def of(cls, path: Path) -> Earlier:
        """The same, whether it is continued or not."""
        folder = RunFolder(path)
        if not folder.finished:
            raise DataError(
                f"continue_from = {os.fspath(path)!r} is not a finished run. An interrupted one is continued by "
                "--resume, with its own configuration."
            )
        run = Run.load(path)
        if run.ledger is None or not run.is_private:
            raise DataError(f"the run in {path} is not private: nothing that begins with its weights would be.")
        if any(event.sampling is not None and event.sampling.keeps_order for event in run.ledger.events):
            raise DataError(
                f"the run in {path} drew shuffled batches or balls in bins, and two sequences of epochs have no joint "
                "epsilon on one ledger. Continue runs with Poisson sampling."
            )
        saved = SavedModel.read(folder, trust_code=True)  # no network is built from it: that is the configuration's
        return cls(folder, run, saved, tuple(map(as_earlier, run.ledger.events)))

    def warnings_for(self, methods: Collection[str]) -> tuple[str, ...]:
        """What its page warns of, which holds for everything that begins with its weights, and what is left behind.

        `methods` are those by which the new run recalibrates.
        """
        seeded = () if self.run.seed is None else (f"The run that this one continues: {SEEDED}",)
        return (*self.run.warnings, *seeded, *self.left_behind(methods))

    def left_behind(self, methods: Collection[str]) -> tuple[str, ...]:
        """What to say of the map that its model applies, where the new run recalibrates by none of `methods`."""
        if self.saved.recalibration is None or methods:
            return ()
        return (_NOT_RECALIBRATED.format(path=self.folder.path, method=self.saved.recalibration[0]),)

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

    def fill(self, model: nn.Module, data: DataSet, choice: DataChoice) -> Begun:
        """Begin with its weights; refused where inputs or classes have another meaning, or where more is not charged.

        The run may have begun with weights that were not: `Begun` says with which.
        """
        begun = Begun.continuing(self.folder)
        begun.check(data, choice)
        mine = (self.saved.classes, self.saved.features, self.saved.schema, self.saved.target_bounds)
        if mine != (data.classes, data.features, data.schema, data.target_bounds):
            raise DataError(
                f"the run in {self.folder.path} was trained on other classes, columns or target bounds than "
                f"{data.name} has: its weights would mean something else."
            )
        read_weights(model, self.folder.model)
        return begun

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
