"""Work in processes of its own, and caches that are filled shard by shard."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from papers import work
from papers.work import advance, cache_folder, fill, side_by_side

from clipwise.errors import DataError


def half(number: int) -> float:
    advance(0.25)
    if number == 3:
        raise ValueError("three cannot be halved")
    return number / 2


@pytest.mark.slow
def test_an_item_that_fails_is_told_and_stops_no_other(capfd: pytest.CaptureFixture[str]) -> None:
    found = []
    with pytest.raises(SystemExit, match=r"1 of 4 numbers failed. The first: 3: three cannot be halved"):
        found.extend(side_by_side("numbers", half, [3, 1, 2, 4], 2))
    assert sorted(found) == [(1, 0.5), (2, 1.0), (4, 2.0)]
    said = capfd.readouterr().err
    assert "failed, 3: three cannot be halved" in said and "numbers  4/4" in said


def killed(number: int) -> int:
    if number == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


@pytest.mark.slow
def test_a_worker_that_is_killed_takes_no_other_item_with_it(capfd: pytest.CaptureFixture[str]) -> None:
    found = []
    with pytest.raises(SystemExit, match=r"1 of 5 numbers failed. The first: 2: its process was ended .*-9"):
        found.extend(side_by_side("numbers", killed, [1, 2, 3, 4, 5], 2))
    assert sorted(number for number, _ in found) == [1, 3, 4, 5]


def marked(path: Path) -> None:
    path.touch()
    time.sleep(60)


@pytest.mark.slow
def test_nothing_goes_on_after_ctrl_c(tmp_path: Path) -> None:
    """The signal reaches the whole group, as from a terminal; what waits is not begun."""
    paths = [tmp_path / name for name in "abcd"]
    code = (
        "import signal; from pathlib import Path; from papers.work import side_by_side, told\n"
        "from tests.papers.test_work import marked\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's background jobs ignore it
        f"with told(): list(side_by_side('files', marked, [Path(p) for p in {[str(p) for p in paths]}], 2))"
    )
    started = subprocess.Popen(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[2], stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    while not (paths[0].exists() and paths[1].exists()):
        assert started.poll() is None
        time.sleep(0.05)
    os.killpg(started.pid, signal.SIGINT)
    _, said = started.communicate(timeout=20)
    assert started.returncode == 1 and said.strip().endswith("stopped; --resume continues.")
    assert sorted(tmp_path.iterdir()) == paths[:2]


@pytest.mark.slow
def test_a_worker_ends_with_its_parent(tmp_path: Path) -> None:
    code = (
        "import os, time; from pathlib import Path; from papers.work import side_by_side\n"
        "from tests.papers.test_work import told_of\n"
        f"list(side_by_side('files', told_of, [Path({str(tmp_path)!r}, str(k)) for k in range(3)], 1))"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parents[2])
    first = tmp_path / "0"
    while not (first.is_file() and first.read_text()):
        assert parent.poll() is None
        time.sleep(0.05)
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 20
    while Path("/proc", first.read_text()).exists():
        assert time.monotonic() < deadline, "the worker lives on"
        time.sleep(0.1)
    assert [path.name for path in tmp_path.iterdir()] == ["0"]


def told_of(path: Path) -> None:
    path.write_text(str(os.getpid()))
    time.sleep(2)


def test_nothing_to_do_starts_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "_Worker", lambda *a, **k: pytest.fail("a worker for nothing"))
    assert list(side_by_side("numbers", half, [], 2)) == []


def slow_shard(folder: Path) -> None:
    def make(k: int, file: io.BufferedIOBase) -> None:
        file.write(b"half of ")
        time.sleep(0.3)
        file.write(b"it")
        with open(folder / "made", "a") as told:
            told.write(f"{k}\n")

    fill("shards", [folder / f"{k}.bin" for k in range(3)], make)


@pytest.mark.slow
def test_two_processes_fill_a_cache_once(tmp_path: Path) -> None:
    list(side_by_side("caches", slow_shard, [tmp_path, tmp_path], 2))
    assert (tmp_path / "made").read_text() == "0\n1\n2\n"
    assert all((tmp_path / f"{k}.bin").read_bytes() == b"half of it" for k in range(3))


def test_shards_are_whole_or_not_there_and_made_once(tmp_path: Path) -> None:
    paths, made = [tmp_path / f"{k}.bin" for k in range(3)], []

    def make(k: int, file: io.BufferedIOBase) -> None:
        file.write(b"half of ")
        if k == 2 and not made.count(2):
            made.append(k)
            raise KeyboardInterrupt
        made.append(k)
        file.write(b"it")

    with pytest.raises(KeyboardInterrupt):
        fill("shards", paths, make)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.bin", "1.bin"]
    fill("shards", paths, make)
    assert made == [0, 1, 2, 2] and all(path.read_bytes() == b"half of it" for path in paths)


def test_a_cache_is_kept_where_it_is_and_begun_where_one_can_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.write_text("no folder")
    monkeypatch.setattr(work, "folders", lambda: [file, tmp_path / "second"])
    made = cache_folder("kind", "name", {"of": 1})
    assert made.parent == tmp_path / "second" / "kind" and made.name.startswith("name-")
    assert cache_folder("kind", "name", {"of": 1}) == made != cache_folder("kind", "name", {"of": 2})
    monkeypatch.setattr(work, "folders", lambda: [file])
    with pytest.raises(DataError, match="cannot be written; let CLIPWISE_DATA"):
        cache_folder("kind", "name", {"of": 1})
