"""Work side by side, in processes of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from clipwise.errors import ClipwiseError
from clipwise.experiments import Show, advance, side_by_side, workers
from tests.conftest import HANG


def half(number: int) -> float:
    advance(0.25)
    if number == 3:
        raise ValueError("three cannot be halved")
    return number / 2


@pytest.mark.slow
def test_an_item_that_fails_is_told_and_stops_no_other(capfd: pytest.CaptureFixture[str]) -> None:
    found = []
    with (
        pytest.raises(ClipwiseError, match=r"1 of 4 numbers failed. The first: 3: three cannot be halved"),
        Show("numbers") as show,
    ):
        found.extend(side_by_side(half, [3, 1, 2, 4], 2, show, "numbers"))
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
    with pytest.raises(ClipwiseError, match=r"1 of 5 numbers failed. The first: 2: its process was ended .*-9"):
        found.extend(side_by_side(killed, [1, 2, 3, 4, 5], 2, what="numbers"))
    assert sorted(number for number, _ in found) == [1, 3, 4, 5]


def marked(path: Path) -> None:
    path.touch()
    time.sleep(HANG)


@pytest.mark.slow
def test_nothing_continues_after_ctrl_c(tmp_path: Path) -> None:
    """The signal reaches the whole group, as from a terminal; what waits is not begun."""
    paths = [tmp_path / name for name in "abcd"]
    code = (
        "import signal; from pathlib import Path; from clipwise.experiments import side_by_side\n"
        "from tests.experiments.test_workers import marked\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's background jobs ignore it
        f"list(side_by_side(marked, [Path(p) for p in {[str(p) for p in paths]}], 2))"
    )
    started = subprocess.Popen(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[2], stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    while not (paths[0].exists() and paths[1].exists()):
        assert started.poll() is None
        time.sleep(0.05)
    os.killpg(started.pid, signal.SIGINT)
    _, said = started.communicate(timeout=HANG)
    assert started.returncode == -signal.SIGINT and said.strip().endswith("KeyboardInterrupt")
    assert sorted(tmp_path.iterdir()) == paths[:2]


@pytest.mark.slow
def test_a_worker_ends_with_its_parent(tmp_path: Path) -> None:
    code = (
        "import os, time; from pathlib import Path; from clipwise.experiments import side_by_side\n"
        "from tests.experiments.test_workers import told_of\n"
        f"list(side_by_side(told_of, [Path({str(tmp_path)!r}, str(k)) for k in range(3)], 1))"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parents[2])
    first = tmp_path / "0"
    while not (first.is_file() and first.read_text()):
        assert parent.poll() is None
        time.sleep(0.05)
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + HANG
    while Path("/proc", first.read_text()).exists():
        assert time.monotonic() < deadline, "the worker lives on"
        time.sleep(0.1)
    assert [path.name for path in tmp_path.iterdir()] == ["0"]


def told_of(path: Path) -> None:
    parent = os.getppid()
    path.write_text(str(os.getpid()))
    while os.getppid() == parent:
        time.sleep(0.05)


def test_nothing_to_do_starts_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_Worker", lambda *a, **k: pytest.fail("a worker for nothing"))
    assert list(side_by_side(half, [], 2)) == []
