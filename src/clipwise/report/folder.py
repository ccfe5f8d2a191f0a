"""The folder of a run: the name of every file in it, who may read it, how it is written and how it is read.

```
config.toml         the configuration          report.html   the page
metrics.jsonl       curves, a row at a time    card.md       the card
ledger.json         what was released          figures/      the page's figures and their values
result.json         everything else, last      publishable/  a page that may be passed on
model.safetensors   the weights                checkpoint    of a run that is not finished, with its digests
model.json          how the weights are used   data.digest   the digest of the data
charged.json        released before the run    continued     where the run is continued
begun_with.json     where its first weights come from, and digests of the data that these were trained on
```

A folder is a finished run when its result.json is there.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shlex
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clipwise._json import RESTORE, Fields, parse_json, read_json
from clipwise.accounting import Event, Ledger
from clipwise.errors import DataError, LedgerError
from clipwise.files import locked, open_ordinary, private_folder, read_bytes, replacing
from clipwise.private import Spent, spent_in

__all__ = [
    "CARD",
    "COMPARISON",
    "FIGURES",
    "PAGE",
    "RESULT",
    "RunFolder",
    "is_run",
    "plain",
    "runs_below",
    "write_json",
]

CONFIG, METRICS, LEDGER, RESULT, DIGEST = "config.toml", "metrics.jsonl", "ledger.json", "result.json", "data.digest"
MODEL, DESCRIPTION = "model.safetensors", "model.json"
CHARGED, CONTINUED, BEGUN = "charged.json", "continued", "begun_with.json"
CHECKPOINT, PAGE, CARD, FIGURES, LEDGERS = "checkpoint", "report.html", "card.md", "figures", "ledgers"
_DIGESTS = f"{CHECKPOINT}.digests"
_REPLACED = (
    *(CONFIG, METRICS, LEDGER, RESULT, DIGEST, MODEL, DESCRIPTION, CHARGED, CONTINUED, CHECKPOINT, _DIGESTS),
    *(BEGUN, PAGE, CARD),
)
_OURS = {*_REPLACED, *(f".{name}.part" for name in _REPLACED), f".{CHECKPOINT}.lock", FIGURES, LEDGERS, "publishable"}
MOST_ROWS = 2_048
"""Of the curves of a run, in memory."""
_MOST_LINE = 1 << 24
COMPARISON = "clipwise comparison"
"""The format of a result.json that belongs to a page on several runs."""


class RunFolder:
    """A run's folder, while the run is made and afterwards.

    Guarantees: every file that is written here can be read by its owner alone, from its first byte on, and so can the
    folder if it is made here.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.checkpoint = self.path / CHECKPOINT
        self.model = self.path / MODEL
        self.description = self.path / DESCRIPTION
        self.ledger = self.path / LEDGER
        self.config = self.path / CONFIG
        self.continued = self.path / CONTINUED

    @property
    def finished(self) -> bool:
        """Whether a whole run is in it."""
        return (self.path / RESULT).is_file()

    @property
    def interrupted(self) -> bool:
        """Whether a run is in it that was begun, is not finished, and can be resumed."""
        return self.checkpoint.is_file() and not self.finished

    def spent(self) -> Spent:
        """What an interrupted run has released so far, with what was released before it."""
        found = spent_in(self.checkpoint)
        for event in self.charged:
            found.ledger.record(event)
        return found

    def refuse_interrupted(self, what: str) -> None:
        """Refuse to use an interrupted run, saying what it has spent and how it is continued; `what` is needed."""
        if not self.interrupted:
            return
        quoted = shlex.quote(os.fspath(self.path))
        raise DataError(
            f"{self.path} holds an interrupted run, which has no {what} yet. It is finished by clipwise train "
            f"{shlex.quote(os.fspath(self.config))} --output {quoted} --resume. Of its {self.spent().planned:,} steps "
            f"{self.spent().steps:,} are spent, whether it is finished or not: clipwise epsilon --ledger "
            f"{quoted} --delta DELTA says what epsilon that is."
        )

    def files(self) -> tuple[set[str], set[str]]:
        """The names of what is in it: a run's, and others."""
        try:
            found = {item.name for item in self.path.iterdir()}
        except FileNotFoundError:
            return set(), set()
        except OSError as error:
            raise DataError(f"{self.path} cannot be the folder of a run: {error}.") from error
        return found & _OURS, found - _OURS

    # While a run is made

    @contextlib.contextmanager
    def claimed(self, config: str, *, resume: bool) -> Iterator[None]:
        """The folder for this process alone; unless a run is resumed, emptied and with its configuration in it.

        Two processes that continue from one checkpoint would each release steps that the other's ledger does not have.
        """
        try:
            private_folder(self.path)
            with locked(self.path, self._taken):
                if not resume:
                    self.clear()
                    self._write(CONFIG, config)
                yield
        except OSError as error:
            raise DataError(f"the run in {self.path} cannot continue: {error}.") from error

    def _taken(self) -> None:
        raise DataError(f"another process is training in {self.path}; wait for it, or use --output.")

    @property
    def digests(self) -> tuple[str, ...]:
        """Of the records that the run was begun with, and of those that it was continued on, if they are others."""
        path = self.path / DIGEST
        return tuple(_read(path).split("\n")) if path.exists() else ()

    @digests.setter
    def digests(self, digests: Sequence[str]) -> None:
        self._write(DIGEST, "\n".join(digests))

    @property
    def charged(self) -> tuple[Event, ...]:
        """What was released of the records before the run, which is part of its epsilon."""
        path = self.path / CHARGED
        return Ledger.load(path).events if path.exists() else ()

    @charged.setter
    def charged(self, events: Iterable[Event]) -> None:
        Ledger(events).save(self.path / CHARGED)

    @property
    def begun_with(self) -> Any:
        """What is written down of the run's first weights; None: they were new."""
        path = self.path / BEGUN
        return read_json(path) if path.exists() else None

    @begun_with.setter
    def begun_with(self, record: Mapping[str, Any]) -> None:
        write_json(self.path / BEGUN, record)

    def clear(self) -> None:
        """Remove everything that a run writes, and nothing else."""
        for name in _OURS:
            target = self.path / name
            if target.is_dir():
                shutil.rmtree(target)
            else:
                target.unlink(missing_ok=True)

    def discard(self) -> None:
        """Remove a run that came to nothing, and the folder if nothing else is in it."""
        self.clear()
        if not any(self.path.iterdir()):
            self.path.rmdir()

    def append(self, row: Mapping[str, Any]) -> None:
        """Add a row to the curves."""
        handle = os.open(self.path / METRICS, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        with open(handle, "a", encoding="utf-8") as file:
            file.write(_line(row))

    def rows(self) -> tuple[Mapping[str, Any], ...]:
        """The rows of the curves; a last one that was cut by a crash is left out.

        Of more than 2,048 rows every second is kept, or every third, and so on, and the last: no figure shows more, and
        a file of a million rows takes no more memory than that. The file keeps them all.
        """
        every = sum(1 for _ in self._lines()) // MOST_ROWS + 1
        kept = (each for each in self._lines() if each.number % every == 0 or each.is_last)
        return tuple(row for row in (_row(each) for each in kept) if row is not None)

    def cut_rows(self, step: int) -> None:
        """Forget rows of steps after the checkpoint that the run continues from: they will be made again."""
        with replacing(self.path / METRICS, DataError) as file:
            for line in self._lines():
                row = _row(line)
                if row is not None and row["step"] <= step:
                    file.write(line.text.rstrip(b"\n") + b"\n")

    def _lines(self) -> Iterator[_Line]:
        """The lines of the curves, one at a time."""
        path = self.path / METRICS
        if not path.exists():
            return
        try:
            with open(open_ordinary(path), "rb") as file:
                line, number = file.readline(_MOST_LINE), 0
                while line:
                    if len(line) == _MOST_LINE:
                        raise DataError(f"{path}, line {number + 1}, has over {_MOST_LINE >> 20} MiB. {RESTORE}")
                    after = file.readline(_MOST_LINE)
                    yield _Line(f"{path}, line {number + 1}", number, line, not after)
                    line, number = after, number + 1
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error}.") from error

    # A whole run

    def save(
        self,
        result: Mapping[str, Any],
        *,
        curves: Sequence[Mapping[str, Any]],
        ledger: Ledger | None,
        config: str | None,
        digest: str | None,
    ) -> None:
        """Write a run that is finished, its result last."""
        try:
            private_folder(self.path)
        except OSError as error:
            raise DataError(f"the run's folder {self.path} cannot be made: {error}.") from error
        if not (self.path / METRICS).exists() or self.rows() != tuple(curves):  # else they stand there, or more of them
            self._write(METRICS, "".join(map(_line, curves)))
        if ledger is not None:
            ledger.save(self.path / LEDGER)
        if config is not None:
            self._write(CONFIG, config)
        if digest is not None and digest not in self.digests[-1:]:  # a run on changed data has both
            self._write(DIGEST, digest)
        write_json(self.path / RESULT, result)

    def record(self) -> dict[str, Any]:
        """Everything that `save` wrote as one JSON value; a file that was cut is refused."""
        if not self.finished:
            raise DataError(f"{self.path} is not a finished run: it has no {RESULT}.")
        ledger, config = (self.path / name for name in (LEDGER, CONFIG))
        return {
            "result": read_json(self.path / RESULT),
            "ledger": read_json(ledger, LedgerError) if ledger.exists() else None,
            "config": _read(config) if config.exists() else None,
            "fingerprint": self.digests[-1] if self.digests else None,
            "curves": list(self.rows()),
        }

    def _write(self, name: str, text: str) -> None:
        write_text(self.path / name, text)


@dataclass(frozen=True)
class _Line:
    """A line of the curves, its name in a message, and its number from 0."""

    where: str
    number: int
    text: bytes
    is_last: bool


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(plain(row), allow_nan=False) + "\n"


def _row(line: _Line) -> Mapping[str, Any] | None:
    """The row of a line; None for a last one that was cut."""
    try:
        found = parse_json(line.text, line.where)
    except DataError:
        if line.is_last:
            return None
        raise
    return check_row(found, line.where)


def check_row(row: Any, where: str) -> Mapping[str, Any]:
    """A row of the curves as `Run.curves` has them, or an error that says where it stands."""
    fields = Fields(row, where)
    fields.number("step", 0.0)
    for name in ("test", "released", "private"):
        if fields.value.get(name) is not None:
            section = fields.object(name)
            if "epsilon" in section.value:  # it stands beside them, and a figure would show this one
                section.fail("epsilon", f"beside {name}, not in it")
            if name == "private" and section.value.get("layers") is not None:
                section.objects("layers")
    return fields.value


def is_run(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder holds a run's own result.json, and not that of a page on several."""
    path = Path(folder) / RESULT
    if not path.exists():
        return False
    try:
        body = read_json(path)
    except DataError:
        return True  # a damaged one: `Run.load` says what is wrong with it
    return not isinstance(body, dict) or body.get("format") != COMPARISON


def runs_below(folder: str | os.PathLike[str]) -> list[Path]:
    """The folder itself if it is a run, else those in it, at whatever depth."""
    path = Path(folder)
    if is_run(path):
        return [path]
    return [
        each for each in sorted(found.parent for found in path.glob(f"**/{RESULT}") if found.is_file()) if is_run(each)
    ]


def plain(value: Any) -> Any:
    """As JSON has it: lists, objects, numbers; a number that is not finite becomes null."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if value is None or isinstance(value, (str, int)):
        return value
    if hasattr(value, "tolist"):  # arrays and scalars of NumPy and torch
        return plain(value.tolist())
    raise DataError(f"{value!r} cannot be saved with a run: use numbers, strings, lists and dictionaries.")


def write_text(path: Path, text: str) -> None:
    """A whole file, or the old one and an error that says why."""
    try:
        with replacing(path, DataError) as file:
            file.write(text.encode())
    except OSError as error:  # a full disk, a quota
        raise DataError(f"{path} cannot be written: {error}.") from error


def write_json(path: Path, value: Any) -> None:
    """A whole file of JSON; a number that is not finite is null there."""
    write_text(path, json.dumps(plain(value), indent=1, allow_nan=False) + "\n")


def _read(path: Path) -> str:
    try:
        return read_bytes(path, DataError).decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not text in UTF-8: {error}. {RESTORE}") from error
