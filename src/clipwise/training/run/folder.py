"""The folder of a run while it is being made: whose it is, its metrics, its checkpoint."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from clipwise.errors import ClipwiseError, DataError, InvalidConfig
from clipwise.files import locked, replacing
from clipwise.training.config import TomlText

__all__ = ["Folder"]

OURS = (
    "config.toml",
    "metrics.jsonl",
    "ledger.json",
    "result.json",
    "model.safetensors",
    "report.html",
    "card.md",
    "figures",
    "publishable",
    "checkpoint",
    "checkpoint.digests",
    "data.digest",
    *(f".{name}.part" for name in ("config.toml", "metrics.jsonl", "ledger.json", "result.json", "checkpoint")),
    *(f".{name}.part" for name in ("report.html", "card.md", "checkpoint.digests", "data.digest")),
)
"""Everything that a run writes; `--force` removes these and nothing else."""


class Folder:
    """A run's folder, claimed for one run by `claimed`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoint = path / "checkpoint"
        self.metrics = path / "metrics.jsonl"
        self.seconds = 0.0
        """Training time so far, over all the processes that the run took."""
        self.begun = False
        """Whether a step has been made."""

    @property
    def finished(self) -> bool:
        """Whether a whole run is in it."""
        return (self.path / "result.json").exists()

    def check(self, text: str, *, resume: bool, force: bool) -> None:
        """Refuse, before anything is computed, to lose a run or other files, or to continue another run."""
        if resume:
            self._check_resume(text)
            return
        try:
            found = {item.name for item in self.path.iterdir()}
        except FileNotFoundError:
            return
        except OSError as error:
            raise DataError(f"{self.path} cannot be the folder of a run: {error}.") from error
        if found - set(OURS):
            raise DataError(
                f"{self.path} holds files that are not a run's ({', '.join(sorted(found - set(OURS))[:3])}). Name "
                "another folder with --output."
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
        old = TomlText.read(self.path / "config.toml")
        new = TomlText.parse(text)
        changed = sorted(_differing(old.values, new.values, ()))
        if changed:
            raise InvalidConfig(
                f"{self.path} was begun with another configuration ({', '.join(changed)} differ). Resume it with "
                f"{self.path / 'config.toml'}, or start another run with --output."
            )

    @contextlib.contextmanager
    def claimed(self, text: str, *, resume: bool) -> Iterator[None]:
        """The folder for this process alone; unless a run is resumed, emptied and with its configuration in it.

        Two processes that continue from one checkpoint would each release steps that the other's ledger does not have.
        A model or a plan that is refused before the first step leaves no folder behind.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with locked(self.path, self._taken):
                self.begun = resume
                if not resume:
                    self._clear()
                    self.write("config.toml", text)
                try:
                    yield
                except (ClipwiseError, OSError):
                    if not self.begun:
                        self._discard()
                    raise
        except OSError as error:
            raise DataError(f"the run in {self.path} cannot continue: {error}.") from error

    def _discard(self) -> None:
        """Remove a run that came to nothing, and the folder if nothing else is in it."""
        self._clear()
        if not any(self.path.iterdir()):
            self.path.rmdir()

    def _taken(self) -> None:
        raise DataError(f"another process is training in {self.path}; wait for it, or use --output.")

    def _clear(self) -> None:
        for name in OURS:
            target = self.path / name
            if target.is_dir():
                shutil.rmtree(target)
            else:
                target.unlink(missing_ok=True)

    def write(self, name: str, text: str) -> None:
        """A whole file, or none."""
        with replacing(self.path / name, DataError) as file:
            file.write(text.encode())

    def append(self, row: Mapping[str, Any]) -> None:
        """Add a row to metrics.jsonl."""
        with open(self.metrics, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def rows(self) -> tuple[dict[str, Any], ...]:
        """The rows of metrics.jsonl; one that a crash cut is dropped."""
        found = []
        for line in self.metrics.read_text(encoding="utf-8").splitlines() if self.metrics.exists() else []:
            try:
                found.append(json.loads(line))
            except ValueError:
                break
        return tuple(found)

    def cut_metrics(self, step: int) -> None:
        """Forget rows of steps after the checkpoint that the run continues from: they will be made again."""
        rows = [row for row in self.rows() if row["step"] <= step]
        self.write("metrics.jsonl", "".join(json.dumps(row) + "\n" for row in rows))


def _differing(old: Mapping[str, Any], new: Mapping[str, Any], path: tuple[str, ...]) -> set[str]:
    """Keys whose values differ; where the run is kept does not count."""
    names: set[str] = set()
    for key in {*old, *new} - ({"output"} if not path else set()):
        a, b = old.get(key), new.get(key)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            names |= _differing(a, b, (*path, key))
        elif a != b:
            names.add(".".join((*path, key)))
    return names
