"""A second count of a run's steps, kept where it is not put back together with the run's own folder.

An older copy of a folder looks like a run that was interrupted earlier: nothing in it can tell. The witness can, if it
is on other storage. It is one small file of JSON, replaced as a whole: the run's name, how many steps may have been
begun, and how often the run was saved.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from clipwise._json import Fields, read_json
from clipwise._validate import is_count
from clipwise.errors import CheckpointError, InvalidPlan
from clipwise.files import Lock, replacing
from clipwise.hashing import digest

__all__ = ["Testimony", "Witness"]

_FORMAT, _VERSION = "clipwise witness", 1


@dataclass(frozen=True)
class Witness:
    """A file on other storage that knows how far a run is, so that an older copy of its folder is not continued.

    Steps are charged there ahead, `every` at a time: a run that dies has up to `every - 1` steps on its ledger that it
    never made ("charged ahead"), and a resumed one leaves these out. A save brings the two together again, and
    `every=1` charges nothing in vain. Give it to `Private(...)` or `clipwise.federated.Server(...)` as
    `witness=Witness(path)`, or as a plain path. The file belongs to one run: remove it when that run is over.

    Guarantees: no step is released that is not charged at the witness, and none at all once it cannot be read or
    written. A checkpoint older than the run's last save is refused; a run without a seed that is resumed has every
    step on its ledger that the witness knows of.

    >>> Witness("other-disk/run.witness").every
    100
    """

    path: str | os.PathLike[str]
    every: int = 100

    def __post_init__(self) -> None:
        if not isinstance(self.path, (str, os.PathLike)):
            raise InvalidPlan(f"a witness is the path of a file on other storage, got {self.path!r}.")
        if not is_count(self.every):
            raise InvalidPlan(f"every must be a positive integer, the steps charged ahead, got {self.every!r}.")

    @classmethod
    def of(cls, witness: Witness | str | os.PathLike[str] | None) -> Witness | None:
        """A plain path is a witness too."""
        return witness if witness is None or isinstance(witness, Witness) else cls(witness)


@dataclass(frozen=True)
class _Account:
    """What the file says."""

    run: str
    """A random name: a witness of one run says nothing of another."""
    holder: str
    """A random name of the process that counts: two that continue copies of one run differ here."""
    begun: int
    """Steps that may have been begun."""
    saves: int
    """Saves that were begun, by number from 1."""
    settled: int
    """The last save that is known to have come to its end: no older one may be continued."""


def _body(account: _Account) -> dict[str, Any]:
    body = {"format": _FORMAT, "version": _VERSION, **asdict(account)}
    return {**body, "checksum": digest(body)}


_NAMES = frozenset(_body(_Account("", "", 0, 0, 0)))


class Testimony:
    """The witness of one run, while it runs."""

    def __init__(self, witness: Witness, planned: int) -> None:
        self.path = Path(os.path.realpath(witness.path))  # not the link to it, which would be replaced by a file here
        self._every, self._planned = witness.every, planned
        self._account: _Account | None = None
        self._lock: Lock | None = None
        self._seen: tuple[int, ...] = ()

    # A run begins, or continues

    def begin(self, done: int) -> None:
        """A new run, of which this many steps are made; refused where another run's steps are counted."""
        if self._account is not None:
            return
        lock = Lock(self.path, CheckpointError)
        if self.path.exists() and self._read().begun:
            raise CheckpointError(
                f"the witness {self.path} counts the steps of another run. Name another file, or remove it if that run "
                "is over: it can then not be resumed any more."
            )
        self._lock = lock
        self._write(_Account(secrets.token_hex(16), secrets.token_hex(8), done, 0, 0))

    def take_up(self, mark: Mapping[str, Any]) -> int:
        """Continue the run that was saved with this mark; how many steps of it may have been begun."""
        lock = Lock(self.path, CheckpointError)
        known = self._read()
        if mark.get("run") != known.run:
            raise CheckpointError(
                f"the witness {self.path} is that of another run. Give the one that this run was begun with."
            )
        if not known.settled <= mark["saves"] <= known.saves:
            raise CheckpointError(
                f"this checkpoint is that of save {mark['saves']}, but the witness {self.path} knows of save "
                f"{known.settled}: an older copy was put back. What was released since is not on its ledger. Continue "
                "from the latest checkpoint, or begin another run and add up what both spend."
            )
        self._lock = lock
        self._write(replace(known, holder=secrets.token_hex(8), settled=mark["saves"]))
        return known.begun

    # The run

    def charge(self, begun: int) -> None:
        """`begun` steps are begun: charged here already, or now with those after it."""
        self.begin(begun - 1)
        account = self._known()
        if begun > account.begun:
            self._write(replace(account, begun=min(begun - 1 + self._every, self._planned)))

    def saving(self, done: int) -> dict[str, Any]:
        """A save begins; the mark that its file gets."""
        self.begin(done)
        account = self._known()
        account = replace(account, saves=account.saves + 1)
        self._write(account)
        return {"path": str(self.path), "every": self._every, "run": account.run, "saves": account.saves}

    def saved(self, done: int) -> None:
        """The save has ended, and `done` steps are made: those charged ahead of it are not begun yet."""
        account = self._known()
        self._write(replace(account, begun=done, settled=account.saves))

    # The file

    def _known(self) -> _Account:
        """What this run wrote last, which must be there still."""
        assert self._account is not None and self._lock is not None
        if self._seen == self._look() and self._lock.is_held:
            return self._account
        if not self._lock.is_held or self._read() != self._account:
            raise CheckpointError(
                f"the witness {self.path} was changed by others: another run counts there, or it was put back. The "
                "step is not made, and this run has ended."
            )
        self._seen = self._look()
        return self._account

    def _look(self) -> tuple[int, ...]:
        """What changes when the file does."""
        try:
            found = os.stat(self.path)
        except OSError as error:
            raise self._unreadable(error) from error
        return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns

    def _read(self) -> _Account:
        try:
            found = Fields(read_json(self.path), str(self.path), _NAMES)
            names = [found.text(name) for name in ("run", "holder")]
            account = _Account(names[0], names[1], *(found.count(name) for name in ("begun", "saves", "settled")))
            if found.value != _body(account):
                raise ValueError("another format or version, or a checksum that does not fit")
        except (OSError, ValueError) as error:
            raise self._unreadable(error) from error
        return account

    def _write(self, account: _Account) -> None:
        try:
            with replacing(self.path, CheckpointError) as file:
                file.write(json.dumps(_body(account), indent=1).encode() + b"\n")
        except OSError as error:
            raise CheckpointError(
                f"the witness {self.path} cannot be written ({error}), so no step is made that it does not know of."
            ) from error
        self._seen = self._look()
        self._account = account

    def _unreadable(self, error: Exception) -> CheckpointError:
        return CheckpointError(
            f"the witness {self.path} cannot be read ({error}), so nobody knows what was released. Make it available "
            "again, and resume."
        )
