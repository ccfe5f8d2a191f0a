"""Files that are there whole or not at all, who may read them, their digests, and what one process works on."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from io import BufferedIOBase
from pathlib import Path
from typing import BinaryIO

from clipwise.errors import ClipwiseError

__all__ = [
    "Lock",
    "content_sha256",
    "file_sha256",
    "in_turn",
    "locked",
    "open_ordinary",
    "private_folder",
    "read_bytes",
    "replacing",
]

_CHUNK = 1 << 20
MOST_BYTES = 1 << 28
"""Of a file that is read whole: 256 MiB, far more than clipwise writes into one."""


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str], error: type[ClipwiseError] = ClipwiseError) -> Iterator[BinaryIO]:
    """A binary file to write; when the block ends well it takes the place of `path`, otherwise nothing changes.

    A place that cannot be written is reported as an `error`. The file's `name` is where it is until then, for a library
    that writes by name.

    Guarantees: its owner alone can read it, from its first byte on. A crash or a power cut at any moment leaves the old
    file or the new one, never a part, and at most one half-written file beside it. One writer at a time.

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
        file = open(temporary, "xb", opener=_private)  # noqa: SIM115 - closed below
    except OSError as problem:
        raise error(f"{target} cannot be written ({problem}). Name a directory that exists and is yours.") from problem
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    _sync_directory(target.parent)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def private_folder(path: str | os.PathLike[str]) -> Path:
    """A folder, made with those above it if it is not there, which its owner alone can enter.

    Guarantees: a folder that this makes has the mode 0700 from the start. One that is there is left as it is.
    """
    folder = Path(path)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def open_ordinary(path: str | os.PathLike[str], flags: int = os.O_RDONLY) -> int:
    """A descriptor of a file; an OSError for anything else, such as a pipe that would be waited for."""
    handle = os.open(path, flags | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0))
    mode = os.fstat(handle).st_mode
    if stat.S_ISREG(mode):
        return handle
    os.close(handle)
    raise OSError(errno.EINVAL, "it is a directory" if stat.S_ISDIR(mode) else "it is not an ordinary file")


def read_bytes(path: str | os.PathLike[str], error: type[ClipwiseError] = ClipwiseError) -> bytes:
    """The content of a file of at most 256 MiB; what cannot be read, or is not a file, is an `error`."""
    try:
        with open(open_ordinary(path), "rb") as file:
            content = file.read(MOST_BYTES + 1)
    except (OSError, ValueError) as problem:  # a null byte in a name is a ValueError
        raise error(f"{os.fspath(path)} cannot be read: {problem}.") from problem
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


# Locks

_LOCKS: weakref.WeakValueDictionary[Path, Lock] = weakref.WeakValueDictionary()
"""The locks of this process, by their files."""
_TURN = threading.Lock()
"""Of the threads of this process, the one that is at its turn."""
_LOOK_AGAIN = 0.01  # seconds


class Lock:
    """The right to continue what is at `path`, until `release`, the last reference to this, or the process's end.

    It is held on an empty file beside it, `.NAME.lock`, because `path` is replaced whenever it is written, and is a
    lock of that open file (`flock`): reading `path`, or closing it, releases nothing. The file goes with the lock; one
    that a killed process left holds nothing. Of two locks in one process the later one takes over from the earlier,
    which `is_held` no longer. Raises `error` if another process holds it (with `wait` it is waited for), and where
    nothing can be locked.

    Guarantees: at no time do two processes, or two objects of one, hold the lock of a path. A forked child holds none
    of its parent's, and cannot release them.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp(), "run")
    >>> first = Lock(path)
    >>> second = Lock(path)
    >>> first.is_held, second.is_held
    (False, True)
    """

    def __init__(
        self, path: str | os.PathLike[str], error: type[ClipwiseError] = ClipwiseError, *, wait: bool = False
    ) -> None:
        self.path = _place(path)
        self._file = self.path.with_name(f".{self.path.name}.lock")
        if (earlier := _LOCKS.get(self._file)) is not None:
            earlier.release()
        self._handle = self._claim(error, wait)
        self.release: weakref.finalize[[int, Path], Lock] = weakref.finalize(self, _let_go, self._handle, self._file)
        """Let others continue; nothing happens the second time."""
        _LOCKS[self._file] = self

    @property
    def is_held(self) -> bool:
        """Whether this object still has the right."""
        return self.release.alive and not self.is_lost

    @property
    def is_lost(self) -> bool:
        """Whether others moved or removed its file, as a cleaner of old files may: then nothing is held by it."""
        return self.release.alive and not _is_at(self._handle, self._file)

    def is_of(self, path: str | os.PathLike[str]) -> bool:
        """Whether it is the lock of this path."""
        return self.path == _place(path)

    def _claim(self, error: type[ClipwiseError], wait: bool) -> int:
        while True:
            try:
                handle = os.open(self._file, os.O_RDWR | os.O_CREAT, 0o600)
            except OSError as problem:
                raise error(
                    f"{self.path} cannot be written: the lock beside it cannot be made ({problem}). Name a directory "
                    "that exists and is yours."
                ) from problem
            try:
                _lock(handle)
                if _is_at(handle, self._file):  # and not one that its holder has just removed
                    return handle
            except BlockingIOError as problem:
                os.close(handle)
                if not wait:
                    raise error(f"another process continues {self.path}. One run is one process.") from problem
                time.sleep(_LOOK_AGAIN)
                continue
            except OSError as problem:
                os.close(handle)
                raise error(
                    f"{self.path} cannot be locked ({problem}), so another process could continue it unnoticed. Keep "
                    "it on a file system with locks, such as a local disk."
                ) from problem
            os.close(handle)

    def _forget(self) -> None:
        """In a forked child: the lock is the parent's, and stays."""
        self.release.detach()
        os.close(self._handle)


@contextlib.contextmanager
def in_turn(path: str | os.PathLike[str], error: type[ClipwiseError] = ClipwiseError) -> Iterator[Lock]:
    """The lock of `path` for this block, which other processes, and other threads of this one, wait for.

    >>> import tempfile
    >>> with in_turn(Path(tempfile.mkdtemp(), "ledger")) as lock:
    ...     lock.is_held
    True
    """
    with _TURN:
        lock = Lock(path, error, wait=True)
        try:
            yield lock
        finally:
            lock.release()


def _place(path: str | os.PathLike[str]) -> Path:
    """One name for one file; a link at the end is replaced like a file."""
    return Path(os.path.realpath(Path(path).parent), Path(path).name)


def _let_go(handle: int, file: Path) -> None:
    with contextlib.suppress(OSError):  # on Windows an open file cannot be removed: it stays, and holds nothing
        if _is_at(handle, file):
            os.unlink(file)
    os.close(handle)


def _is_at(handle: int, file: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), os.stat(file))
    except FileNotFoundError:
        return False


def _forget_locks() -> None:
    global _TURN
    _TURN = threading.Lock()  # a thread that was at its turn is not in the child, and would never end it
    for lock in list(_LOCKS.values()):
        lock._forget()
    _LOCKS.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_locks)


def _lock(handle: int) -> None:
    """Lock an open file; a BlockingIOError if it is locked, another OSError where there are no locks."""
    if sys.platform == "win32":
        import msvcrt

        try:
            msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
        except PermissionError as error:
            raise BlockingIOError(errno.EWOULDBLOCK, "locked") from error
        return
    try:
        import fcntl
    except ImportError as error:
        raise OSError(errno.ENOSYS, "this platform has no locks") from error
    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


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
            _lock(handle)
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
