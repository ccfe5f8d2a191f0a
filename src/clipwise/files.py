"""Files that are there whole or not at all, their digests, and folders that one process works in."""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
from collections.abc import Callable, Iterator
from io import BufferedIOBase
from pathlib import Path
from typing import BinaryIO

from clipwise.errors import ClipwiseError

__all__ = ["content_sha256", "file_sha256", "locked", "replacing"]

_CHUNK = 1 << 20


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str], error: type[ClipwiseError] = ClipwiseError) -> Iterator[BinaryIO]:
    """A binary file to write; when the block ends well it takes the place of `path`, otherwise nothing changes.

    A place that cannot be written is reported as an `error`.

    Guarantees: a crash or a power cut at any moment leaves the old file or the new one, never a part, and at most one
    half-written file beside it. One writer at a time.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp(), "note")
    >>> with replacing(path) as file:
    ...     _ = file.write(b"whole")
    >>> path.read_bytes()
    b'whole'
    """
    target = Path(path)
    if target.is_dir():
        raise error(f"{target} is a directory; name a file to write.")
    # One name for all attempts, so that crashes leave at most one half-written file; readable by the owner only.
    temporary = target.with_name(f".{target.name}.part")
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        handle = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o600)
    except OSError as problem:
        raise error(f"{target} cannot be written ({problem}). Name a directory that exists and is yours.") from problem
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    _sync_directory(target.parent)


def _sync_directory(directory: Path) -> None:
    # The rename itself must survive a power cut; not every platform can open a directory.
    with contextlib.suppress(OSError):
        handle = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


@contextlib.contextmanager
def locked(folder: Path, busy: Callable[[], None]) -> Iterator[bool]:
    """One process at a time in a folder; False where folders cannot be locked (Windows, some networks).

    `busy` is called when another process is in it: to give up it raises, else the folder is waited for.
    """
    if sys.platform == "win32":
        yield False
        return
    import fcntl

    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held = True
        except BlockingIOError:
            busy()
            fcntl.flock(handle, fcntl.LOCK_EX)
            held = True
        except OSError:  # a network file system without locks
            held = False
        yield held
    finally:
        os.close(handle)  # a process that dies lets go as well


def content_sha256(file: BufferedIOBase) -> str:
    """SHA-256 of the rest of an open file, in hexadecimal.

    >>> import io
    >>> content_sha256(io.BytesIO(b"whole"))[:8]
    '5d5766cf'
    """
    sha = hashlib.sha256()
    while chunk := file.read(_CHUNK):
        sha.update(chunk)
    return sha.hexdigest()


def file_sha256(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with open(path, "rb") as file:
        return content_sha256(file)
