"""Files that are whole or not there, what is read of them, and locks: also what is left behind when it goes wrong."""

from __future__ import annotations

import errno
import hashlib
import io
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from clipwise import files
from clipwise.errors import ClipwiseError, DataError
from clipwise.files import (
    Lock,
    content_sha256,
    file_sha256,
    in_turn,
    locked,
    open_ordinary,
    private_folder,
    read_bytes,
    replacing,
)
from tests.core.common import refused_elsewhere

pytestmark = pytest.mark.skipif(os.name == "nt", reason="modes, forks and /proc")


@pytest.fixture(autouse=True)
def nothing_stays_open() -> Iterator[None]:
    """Whatever a test does, it leaves no descriptor behind."""
    before = set(os.listdir("/proc/self/fd"))
    yield
    assert set(os.listdir("/proc/self/fd")) <= before


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


# Writing


def test_a_block_that_fails_changes_nothing_and_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "note"
    path.write_bytes(b"old")

    def half() -> None:
        with replacing(path) as file:
            file.write(b"half")
            raise KeyError("on the way")

    with pytest.raises(KeyError, match="on the way"):
        half()
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["note"]


def test_a_half_written_file_of_a_crash_is_in_nobodys_way(tmp_path: Path) -> None:
    (tmp_path / ".note.part").write_bytes(b"half, and longer than the whole")
    with replacing(tmp_path / "note") as file:
        assert os.path.basename(file.name) == ".note.part"
        file.write(b"whole")
    assert (tmp_path / "note").read_bytes() == b"whole" and os.listdir(tmp_path) == ["note"]


def test_a_place_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    for path, said in ((tmp_path, "is a directory; name a file"), (tmp_path / "no" / "note", "cannot be written")):
        with pytest.raises(DataError, match=said), replacing(path, DataError):
            pytest.fail("nothing can be written there")
    assert os.listdir(tmp_path) == []


def test_folders_and_locks_are_their_owners_alone(tmp_path: Path, open_mask: None) -> None:
    folder = private_folder(tmp_path / "a" / "b")
    assert mode(folder) == 0o700
    folder.chmod(0o750)
    assert private_folder(folder) == folder and mode(folder) == 0o750  # as it was
    lock = Lock(folder / "run")
    assert mode(folder / ".run.lock") == 0o600
    lock.release()


# Reading


def test_a_file_is_read_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert files.MOST_BYTES == 256 * 1024**2
    path = tmp_path / "note"
    path.write_bytes(b"0123456789")
    monkeypatch.setattr(files, "MOST_BYTES", 10)
    assert read_bytes(path) == b"0123456789"
    path.write_bytes(b"0123456789a")
    with pytest.raises(DataError, match="note has more than 0 MiB: clipwise does not write such a file"):
        read_bytes(path, DataError)


def test_what_is_not_a_file_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, said in (
        (tmp_path, "cannot be read: .*it is a directory"),
        (tmp_path / "pipe", "cannot be read: .*it is not an ordinary file"),
        (tmp_path / "none", "cannot be read: .*No such file"),
        ("a\0b", "cannot be read: embedded null"),
    ):
        with pytest.raises(ClipwiseError, match=said):
            read_bytes(path)


def test_a_file_is_opened_as_asked(tmp_path: Path) -> None:
    path = tmp_path / "note"
    path.write_bytes(b"old")
    for flags, expected in ((os.O_RDWR, b"new"), (os.O_RDWR | os.O_APPEND, b"newnew")):
        handle = open_ordinary(path, flags)
        os.write(handle, b"new")
        os.close(handle)
        assert path.read_bytes() == expected
    handle = open_ordinary(path)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.write(handle, b"more")
    os.close(handle)


@pytest.mark.parametrize("size", [0, 5, (1 << 20) - 1, 1 << 20, (1 << 20) + 1])
def test_a_digest_is_of_all_that_is_left(tmp_path: Path, size: int) -> None:
    content = bytes(k % 251 for k in range(size))
    (tmp_path / "note").write_bytes(content)
    assert file_sha256(tmp_path / "note") == hashlib.sha256(content).hexdigest()
    rest = io.BytesIO(b"read" + content)
    rest.read(4)
    assert content_sha256(rest) == hashlib.sha256(content).hexdigest()


# Locks


def test_a_lock_is_held_until_it_is_released_or_lost(tmp_path: Path) -> None:
    path = tmp_path / "run"
    lock = Lock(path)
    assert lock.is_held and not lock.is_lost and (tmp_path / ".run.lock").exists()
    assert lock.is_of(path) and lock.is_of(tmp_path / "." / "run") and not lock.is_of(tmp_path / "other")
    lock.release()
    assert not lock.is_held and not lock.is_lost and os.listdir(tmp_path) == []
    lock.release()  # nothing happens
    lock = Lock(path)
    (tmp_path / ".run.lock").unlink()
    assert lock.is_lost and not lock.is_held
    (tmp_path / ".run.lock").write_text("another's")
    assert lock.is_lost and not lock.is_held
    lock.release()
    assert os.listdir(tmp_path) == [".run.lock"]  # which it leaves


def test_of_two_locks_in_one_process_the_later_takes_over(tmp_path: Path) -> None:
    first, other = Lock(tmp_path / "run"), Lock(tmp_path / "other")
    second = Lock(tmp_path / "run")
    assert not first.is_held and second.is_held and other.is_held
    first.release()
    assert second.is_held
    assert "another process continues" in refused_elsewhere(lambda: Lock(tmp_path / "run"))
    for lock in (second, other):
        lock.release()
    assert os.listdir(tmp_path) == []


def test_a_lock_that_cannot_be_had_leaves_nothing_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="the lock beside it cannot be made"):
        Lock(tmp_path / "no" / "run", DataError)
    for problem, said in (
        (BlockingIOError(errno.EWOULDBLOCK, "locked"), "another process continues"),
        (OSError(errno.ENOLCK, "No locks"), "cannot be locked"),
    ):

        def refused(handle: int, problem: OSError = problem) -> None:
            raise problem

        monkeypatch.setattr(files, "_lock", refused)
        with pytest.raises(DataError, match=said):
            Lock(tmp_path / "run", DataError)


def test_a_lock_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others hold it twice, and once its file is gone when it is had."""
    real, slept, tried = files._lock, list[float](), list[int]()

    def busy(handle: int) -> None:
        tried.append(handle)
        if len(tried) <= 2:
            raise BlockingIOError(errno.EWOULDBLOCK, "locked")
        if len(tried) == 3:
            (tmp_path / ".run.lock").unlink()
        real(handle)

    monkeypatch.setattr(files, "_lock", busy)
    monkeypatch.setattr(files, "time", SimpleNamespace(sleep=slept.append))
    with in_turn(tmp_path / "run") as lock:
        assert lock.is_held and len(tried) == 4 and len(slept) == 2 and all(0 < each < 1 for each in slept)
    assert not lock.is_held and os.listdir(tmp_path) == []


def test_after_an_error_the_next_is_at_its_turn(tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(KeyError), in_turn(tmp_path / "run"):
            raise KeyError
    assert refused_elsewhere(lambda: Lock(tmp_path / "run").release()) == ""


def test_a_folder_is_for_one_process_at_a_time(tmp_path: Path) -> None:
    def give_up() -> None:
        raise ClipwiseError("somebody is in it")

    def enter() -> None:
        with locked(tmp_path, give_up) as held:
            assert held is True

    assert refused_elsewhere(enter) == ""
    with locked(tmp_path, give_up) as held:
        assert held is True and "somebody is in it" in refused_elsewhere(enter)
    assert refused_elsewhere(enter) == ""


def test_a_folder_that_is_busy_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    other = os.open(tmp_path, os.O_RDONLY)
    files._lock(other)

    def busy() -> None:
        asked.append("busy")
        os.close(other)  # the other process is done

    with locked(tmp_path, busy) as held:
        assert held is True and asked == ["busy"]
        assert "in it" in refused_elsewhere(lambda: enter_or_fail(tmp_path))


def enter_or_fail(folder: Path) -> None:
    def fail() -> None:
        raise ClipwiseError("somebody is in it")

    with locked(folder, fail):
        pass


def test_where_folders_cannot_be_locked_that_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(handle: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(files, "_lock", no_locks)
    with locked(tmp_path, lambda: pytest.fail("nobody is in it")) as held:
        assert held is False
    monkeypatch.setattr(files, "sys", SimpleNamespace(platform="win32"))
    with locked(tmp_path / "not even there", lambda: pytest.fail("nobody is in it")) as held:
        assert held is False
