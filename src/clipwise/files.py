"""Files that are there whole or not at all, who may read them, their digests, and folders that one process works in."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import sys
from collections.abc import Callable, Iterator
from io import BufferedIOBase
from pathlib import Path
from typing import BinaryIO

from clipwise.errors import ClipwiseError

__all__ = ["content_sha256", "file_sha256", "locked", "read_bytes", "replacing"]

_CHUNK = 1 << 20
MOST_BYTES = 1 << 28
"""Of a file that is read whole: 256 MiB, far more than clipwise writes into one."""


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


def read_bytes(path: str | os.PathLike[str], error: type[ClipwiseError] = ClipwiseError) -> bytes:
    """The content of a file of at most 256 MiB; what cannot be read, or is no file, is an `error`."""
    try:
        # Not blocking: a pipe that nobody writes to is refused like all that is no file.
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0))
        with open(handle, "rb") as file:
            ordinary = stat.S_ISREG(os.fstat(handle).st_mode)
            content = file.read(MOST_BYTES + 1) if ordinary else b""
    except (OSError, ValueError) as problem:  # a null byte in a name is a ValueError
        raise error(f"{os.fspath(path)} cannot be read: {problem}.") from problem
    if not ordinary:
        raise error(f"{os.fspath(path)} cannot be read: it is not an ordinary file.")
    if len(content) > MOST_BYTES:
        raise error(f"{os.fspath(path)} has more than {MOST_BYTES >> 20} MiB: clipwise does not write such a file.")
    return content


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
