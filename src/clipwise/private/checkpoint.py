"""Checkpoints: one file, written atomically, read without pickle, that also counts the steps begun since.

```
line 1   clipwise checkpoint 2
line 2   begun NNN... live|past XXXXXXXX   fixed width with a checksum, rewritten in place before every step
rest     a zip archive: manifest.json (the structure) and one raw member per tensor
```

The second line is the write-ahead of a run without a seed: a step is counted there before its noise is drawn, so a
process that dies between two saves has still paid for every step that it began. `past` marks a file that a later one
has replaced.
"""

from __future__ import annotations

import errno
import json
import os
import time
import weakref
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from clipwise._json import parse_json
from clipwise.errors import CheckpointError
from clipwise.files import Lock, open_ordinary, replacing
from clipwise.packing import Packer, tensor_bytes, tensor_from, unpacked

__all__ = ["Journal", "read", "write"]

_MAGIC = b"clipwise checkpoint 2\n"
_COUNT_AT = len(_MAGIC)
_SYNC_SHARE = 20
"""Wait this many times a sync's own duration before the next one: syncing then costs at most 5 % of the time."""
_DAMAGED = (
    OSError, EOFError, zipfile.BadZipFile, ArithmeticError, AttributeError, LookupError, TypeError, ValueError,
    RuntimeError,
)  # fmt: skip
"""What zipfile, json and torch raise about bytes that are not as they were written."""


def _count_line(begun: int, live: bool) -> bytes:
    words = b"begun %020d %s" % (begun, b"live" if live else b"past")
    return b"%s %08x\n" % (words, zlib.crc32(words))


def _unsummed(begun: int, live: bool) -> bytes:
    """As version 1 has it."""
    return _count_line(begun, live)[:-10] + b"\n"


_FORMS: dict[bytes, Callable[[int, bool], bytes]] = {b"clipwise checkpoint 1\n": _unsummed, _MAGIC: _count_line}
"""The second line, by the first. Files of version 1 are continued in their own form, and saved in the newer one."""


def _form(first: bytes, path: Path) -> Callable[[int, bool], bytes]:
    if first in _FORMS:
        return _FORMS[first]
    if first.startswith(_MAGIC[:-2]):
        raise CheckpointError(
            f"{path} was written by another version of clipwise, and this one reads up to {_MAGIC.decode().strip()!r}. "
            "Finish the run with the clipwise that wrote it."
        )
    raise CheckpointError(f"{path} is not a clipwise checkpoint.")


def _parse_count(line: bytes, form: Callable[[int, bool], bytes], path: Path) -> tuple[int, bool]:
    words = line.split()
    if len(words) > 2 and words[1].isdigit():
        begun, live = int(words[1]), words[2] == b"live"
        if line == form(begun, live):
            return begun, live
    raise CheckpointError(
        f"{path} does not say how many steps were begun: it is damaged, and the run cannot be continued. An older copy "
        "of it would not know the steps made since: they are spent. Begin another run, and add up what both spend."
    )


class Journal:
    """The count of begun steps in a checkpoint, kept up to date in place by the one run that continues it.

    `lock` is that of the file, if the caller has it already.

    Guarantees: once `charge(n)` returns, n survives the death of the process at any point. A power cut can cost only
    charges that were made within 20 times the duration of the last disk sync. No two journals count in one file, in
    whatever process: the second one is refused, or in the same process takes over, and then the first one's `charge`
    is refused. So is every charge after the file was moved, removed, replaced or counted in by others.
    """

    def __init__(self, path: Path, lock: Lock | None = None) -> None:
        self.path = Path(os.path.realpath(path))
        try:
            self._handle = open_ordinary(self.path, os.O_RDWR)
        except OSError as error:
            raise CheckpointError(
                f"{path} is missing, or cannot be written ({error}). Steps are counted in the file they are resumed "
                "from: move it to a place that can be written."
            ) from error
        self.close = weakref.finalize(self, os.close, self._handle)
        """Release the file; a journal that is dropped closes by itself."""
        self.lock = Lock(self.path, CheckpointError) if lock is None else lock
        self._process = os.getpid()
        self._sync_after = 0.0
        self._check_place()  # another process may have replaced it before it was locked
        self._form = _form(os.read(self._handle, _COUNT_AT), self.path)
        self._last = self.begun()

    def begun(self) -> int:
        """The steps begun so far, as the file says now."""
        return self._count()[0]

    def check(self) -> None:
        """Refuse if others continue the file, or if it is not in its place any more."""
        self.check_held()
        self._check_place()

    def check_held(self) -> None:
        """Refuse if others continue the file."""
        if not self.lock.is_held:
            if os.getpid() != self._process:
                raise CheckpointError(
                    f"this process was forked from the one that continues {self.path}. One run is one process."
                )
            if self.lock.is_lost:
                raise CheckpointError(
                    f"the lock beside {self.path} was moved or removed, so another process could continue the run "
                    "unnoticed. The step is not made: end this run, and resume."
                )
            raise self._taken()

    def charge(self, begun: int) -> None:
        """Write down that `begun` steps have been begun, unless another run has counted here meanwhile."""
        self.check_held()
        try:
            self._check_place()
            if self._count() != (self._last, True):
                raise self._taken()
            self._put(self._form(begun, True))
            self._last = begun
            start = time.monotonic()
            if start >= self._sync_after:
                os.fsync(self._handle)
                done = time.monotonic()
                self._sync_after = done + _SYNC_SHARE * (done - start)
        except OSError as error:
            raise CheckpointError(f"the step cannot be counted in {self.path} ({error}), so it is not made.") from error
        self.check_held()  # a thread that took over meanwhile may have read the count before

    def retire(self, begun: int) -> None:
        """Mark the file as past: the run continues elsewhere."""
        self._put(self._form(begun, False))
        os.fsync(self._handle)
        self.close()

    def _taken(self) -> CheckpointError:
        return CheckpointError(
            f"another run continues {self.path}, and this one has ended: one checkpoint is continued by one run. What "
            "was spent stays spent. Continue with the other run, or begin a new one."
        )

    def _check_place(self) -> None:
        try:
            in_place = os.path.samestat(os.fstat(self._handle), os.stat(self.path))
        except FileNotFoundError:
            in_place = False
        if not in_place:
            raise CheckpointError(
                f"{self.path} was moved, removed or replaced while a run counts its steps in it, so the step cannot be "
                "counted and is not made. Put it back where it was, or end the run."
            )

    def _count(self) -> tuple[int, bool]:
        os.lseek(self._handle, _COUNT_AT, os.SEEK_SET)
        return _parse_count(os.read(self._handle, len(self._form(0, True))), self._form, self.path)

    def _put(self, line: bytes) -> None:
        os.lseek(self._handle, _COUNT_AT, os.SEEK_SET)
        if os.write(self._handle, line) != len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def write(path: str | os.PathLike[str], value: Mapping[str, Any], begun: int, lock: Lock | None = None) -> Journal:
    """Write a checkpoint so that a crash leaves the old file or the new one; its journal stands at `begun`."""
    target = Path(path)
    packer = Packer()
    structure = packer.pack(value, "checkpoint")
    manifest = json.dumps({"value": structure, "tensors": packer.shapes()}, allow_nan=False)
    lock = Lock(target, CheckpointError) if lock is None else lock  # first: one writer at a time
    with replacing(target, CheckpointError) as file:
        file.write(_MAGIC + _count_line(begun, True))
        with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
            archive.writestr("manifest.json", manifest)
            for i, tensor in enumerate(packer.tensors):
                archive.writestr(f"tensors/{i}", tensor_bytes(tensor))
    return Journal(target, lock)


def read(path: str | os.PathLike[str]) -> tuple[dict[str, Any], int, bool]:
    """What `write` wrote, the number of steps begun since, and whether the run did not continue elsewhere."""
    source = Path(path)
    try:
        with open(source, "rb") as file:
            form = _form(file.read(_COUNT_AT), source)
            begun, live = _parse_count(file.readline(len(form(0, True))), form, source)
            with zipfile.ZipFile(file) as archive:
                manifest = parse_json(_member(archive, "manifest.json"), f"{source}, manifest.json", CheckpointError)
                specs = manifest["tensors"]
                tensors = [tensor_from(_member(archive, f"tensors/{i}"), spec) for i, spec in enumerate(specs)]
            value = unpacked(manifest["value"], tensors)
    except CheckpointError:
        raise
    except _DAMAGED as error:
        raise CheckpointError(f"{source} cannot be read: it is missing, cut or damaged ({error}).") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{source} does not hold a run.")
    return value, begun, live


def _member(archive: zipfile.ZipFile, name: str) -> bytes:
    """A member as `write` has them: not compressed, so never larger than the file."""
    info = archive.getinfo(name)
    if info.compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"{name} is compressed")
    assert archive.fp is not None
    if max(info.file_size, info.compress_size) > os.fstat(archive.fp.fileno()).st_size:
        raise ValueError(f"{name} claims more than the file has")
    return archive.read(info)
