"""The folder of a run that is being trained: which run may be made in it, or continued."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from clipwise.errors import CheckpointError, ClipwiseError, DataError, InvalidConfig
from clipwise.report import RunFolder
from clipwise.training.config import TomlText

__all__ = ["Folder"]

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
            raise DataError(f"{self.path} holds a finished run. Use --force to replace it, or --output for another.")
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
        changed = sorted(_differing(old.values, new.values, ()))
        if changed:
            raise InvalidConfig(
                f"{self.path} was begun with another configuration ({', '.join(changed)} differ). Resume it with "
                f"{self.config}, or start another run with --output."
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
