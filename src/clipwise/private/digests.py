"""What a seeded run remembers of its data and releases, so that it is not repeated with others unnoticed.

A digest of a record is private data: anyone who has it can confirm a guess of the record exactly. So digests are in no
checkpoint, `state_dict`, ledger, result or message. They lie beside the checkpoint in a file of their own, which its
owner alone can read:

```
line 1     JSON: format, version, digest of a data set that lies in memory, number of records that follow
records    index (8 bytes) and digest (16) of every record that was drawn
releases   step (8 bytes) and digest (16) of what was released since the save before, appended before noise is drawn
```
"""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from clipwise._json import Fields, parse_json
from clipwise.errors import CheckpointError
from clipwise.files import open_ordinary, replacing
from clipwise.hashing import SIZE

__all__ = ["UNSTEADY", "Digests", "Looked", "file_of"]

UNSTEADY = bytes(SIZE)
"""In the place of a digest: the record does not read the same twice, or cannot be looked into."""

_FORMAT, _VERSION = "clipwise digests", 1
_HEAD = ("format", "version", "whole", "records")
_ENTRY = 8 + SIZE


def file_of(checkpoint: str | os.PathLike[str]) -> Path:
    """Where the digests of a run lie whose checkpoint this is."""
    path = Path(checkpoint)
    return path.with_name(f"{path.name}.digests")


@dataclass(frozen=True)
class Looked:
    """Whether the data of a run stayed the same, as far as they were looked at.

    `records` is how many were looked at, and `unsteady` how many of these do not read the same twice, so that nothing
    can be said of them. Both are counts of private records: **not covered by epsilon**.
    """

    state: Literal["unchanged", "changed", "not compared"]
    records: int = 0
    unsteady: int = 0

    def __str__(self) -> str:
        return f"data {self.state}"


class Digests:
    """The digests of one seeded run.

    Guarantees: a record that was drawn before and reads otherwise now is an error before anything is computed from it.
    """

    def __init__(self) -> None:
        self._whole: bytes | None = None
        self._records: dict[int, bytes] = {}
        self._released: dict[int, set[bytes]] = {}
        self._state: Literal["unchanged", "changed", "not compared"] = "not compared"
        self._lost = False
        self._handle: int | None = None
        self._close: Callable[[], object] = lambda: None

    @property
    def looked(self) -> Looked:
        """What was seen of the data so far."""
        unsteady = sum(digest == UNSTEADY for digest in self._records.values())
        return Looked("not compared" if self._lost else self._state, len(self._records), unsteady)

    # Data

    def look_at(self, whole: bytes | None) -> None:
        """Batches come from a data set with this digest of all of it; None: from one that is looked at when drawn."""
        before = self._whole is not None, bool(self._records)
        if (whole is None and before[0]) or (whole is not None and (before[1] or self._whole not in (None, whole))):
            self._refuse()
        self._whole = whole
        if whole is not None:
            self._state = "unchanged"

    def note(self, found: Mapping[int, bytes]) -> None:
        """Records were read, with these digests."""
        for index, digest in found.items():
            known = self._records.setdefault(index, digest)
            if digest == UNSTEADY:
                self._records[index] = UNSTEADY
            elif known not in (digest, UNSTEADY):
                self._refuse()
        if found and self._state == "not compared":
            self._state = "unchanged"

    def _refuse(self) -> None:
        self._state = "changed"
        raise CheckpointError(
            "the data changed: a record reads otherwise than when the seeded run first drew it. Releases of one seed "
            "on other data tell the difference. Continue with the same data, or start again with another seed."
        )

    # Releases

    def others(self, step: int, release: bytes) -> int:
        """Note what is about to be released at `step`; how many other releases were made there since the last save."""
        if self._handle is None:  # nothing was saved that could be resumed
            return 0
        known = self._released.setdefault(step, set())
        if release not in known:
            try:
                written = os.write(self._handle, _entry(step, release))
            except OSError as error:
                raise CheckpointError(f"the step cannot be noted ({error}), so it is not made.") from error
            if written != _ENTRY:
                raise CheckpointError("the disk is full: the step cannot be noted, so it is not made.")
            known.add(release)
        return len(known) - 1

    # The file

    def save(self, checkpoint: str | os.PathLike[str]) -> None:
        """Write the file of this checkpoint, which is about to be written."""
        released = [(step, each) for step, several in self._released.items() for each in several]
        head = {
            "format": _FORMAT,
            "version": _VERSION,
            "whole": None if self._whole is None else self._whole.hex(),
            "records": len(self._records),
        }
        with replacing(file_of(checkpoint), CheckpointError) as file:
            file.write(json.dumps(head).encode() + b"\n")
            file.write(b"".join(_entry(*each) for each in [*self._records.items(), *released]))
        self._append_to(file_of(checkpoint))

    def saved(self, steps: int) -> None:
        """The checkpoint was written, with `steps` steps made: what was released before cannot be repeated any more."""
        self._released = {step: several for step, several in self._released.items() if step >= steps}

    def load(self, checkpoint: str | os.PathLike[str]) -> None:
        """Continue from the file of this checkpoint. Without one nothing can be said of the data."""
        path = file_of(checkpoint)
        try:
            with open(open_ordinary(path), "rb") as file:
                head, _, body = file.read().partition(b"\n")
            fields = Fields(parse_json(head, "its first line"), "its first line", _HEAD)
            if (fields.value["format"], fields.value["version"]) != (_FORMAT, _VERSION):
                raise ValueError("another format or version")
            count, entries = fields.count("records"), list(_entries(body))
            if count > len(entries):
                raise ValueError("records are missing")
            self._whole = None if fields.is_null("whole") else bytes.fromhex(fields.text("whole"))
        except FileNotFoundError:
            self._lost = True
            return
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{path} is damaged ({error}). Start again with another seed; or remove the file, and changed records "
                "go unnoticed."
            ) from error
        self._records = dict(entries[:count])
        for step, release in entries[count:]:
            self._released.setdefault(step, set()).add(release)
        with open(path, "r+b") as file:  # a crash may have cut the last entry
            file.truncate(len(head) + 1 + _ENTRY * len(entries))
        self._append_to(path)

    def _append_to(self, path: Path) -> None:
        self._close()
        self._handle = os.open(path, os.O_WRONLY | os.O_APPEND | getattr(os, "O_BINARY", 0))
        self._close = weakref.finalize(self, os.close, self._handle)


def _entry(number: int, digest: bytes) -> bytes:
    return number.to_bytes(8, "little") + digest


def _entries(body: bytes) -> Iterable[tuple[int, bytes]]:
    for at in range(0, len(body) - _ENTRY + 1, _ENTRY):
        yield int.from_bytes(body[at : at + 8], "little"), body[at + 8 : at + _ENTRY]
