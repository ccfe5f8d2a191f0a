"""One display for all long work: what a terminal sees, what a log gets."""

from __future__ import annotations

import io
import sys
from types import SimpleNamespace

import pytest

from clipwise.progress import BYTES, Bar, Console
from tests.conftest import Terminal


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time in seconds, which stands still; and a terminal that is wide enough."""
    clock = [0.0]
    monkeypatch.setattr("clipwise.progress.time.monotonic", lambda: clock[0])
    monkeypatch.setenv("COLUMNS", "80")
    return clock


def test_a_terminal_sees_one_bar_and_it_is_gone_afterwards(now: list[float]) -> None:
    terminal = Terminal()
    bar = Bar("runs", "runs", console=Console(terminal))
    bar.show(0, 4)
    assert terminal.screen == ["runs [....................]  0/4"]
    now[0] = 3.0
    bar.show(1.5, 4)
    assert terminal.screen == ["runs [#######.............]  1/4  0.5 runs/s  0:05 left"]
    bar.say("failed, seed 3")
    assert terminal.screen == ["failed, seed 3", ""]
    now[0] = 8.0
    bar.show(4, 4)
    assert terminal.screen[1] == "runs [####################]  4/4  0.5 runs/s  0:00 left"
    bar.close()
    assert terminal.screen == ["failed, seed 3", ""] and terminal.getvalue().endswith("\r\033[K")


def test_a_notebook_sees_one_output_that_is_updated(now: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[list[str]] = []

    def display(content: dict[str, str], *, raw: bool, display_id: bool) -> SimpleNamespace:
        output = [content["text/plain"]]
        shown.append(output)
        return SimpleNamespace(update=lambda new, raw: output.append(new["text/plain"]))

    ipython = SimpleNamespace(get_ipython=lambda: SimpleNamespace(kernel=object()))
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=display))
    bar = Bar("runs", "runs")
    for done in (1, 4):
        now[0] = done
        bar.show(done, 4)
        bar.close()
    assert [[text[:26] for text in output] for output in shown] == [
        ["runs [#####...............", "", "runs [####################", ""]
    ]


def test_a_line_never_breaks(now: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    terminal = Terminal()
    Bar("runs", "runs", console=Console(terminal)).show(3, 4, lambda: ["accuracy 90 %"])
    assert len(terminal.screen[0]) == 19


def test_a_log_gets_a_line_for_every_tenth(now: list[float]) -> None:
    log = io.StringIO()
    bar = Bar("shards", "shards", console=Console(log))
    for done in range(1001):
        now[0] = done / 10
        bar.show(done, 1000)
    bar.close()
    lines = log.getvalue().splitlines()
    assert [line.split("  ")[1] for line in lines] == [f"{100 * k}/1000" for k in range(1, 11)]
    assert lines[4] == "shards  500/1000  10 shards/s  0:50 left" and "\r" not in log.getvalue()


def test_shares_that_add_up_to_one_but_for_rounding_count_as_one(now: list[float]) -> None:
    log = io.StringIO()
    Bar("runs", "runs", lines=2, console=Console(log)).show(sum([0.1] * 10), 1)
    assert log.getvalue().startswith("runs  1/1")


def test_notes_that_cost_time_are_asked_for_seldom(now: list[float]) -> None:
    asked = []

    def costly() -> list[str]:
        asked.append(now[0])
        now[0] += 0.1  # an epsilon takes long
        return ["epsilon 1.000"]

    bar = Bar("run", "steps", console=Console(Terminal()))
    for step in range(1, 101):
        now[0] += 0.05
        bar.show(step, 100, costly)
    spent = 0.1 * len(asked)
    assert len(asked) > 1 and spent < 0.1 * now[0] + 0.2  # the last one is always shown
    assert Bar("run", "steps", console=Console(io.StringIO())).show(1, 100, lambda: pytest.fail("not shown")) is None


def test_bytes_are_counted_where_somebody_watches() -> None:
    for stream, counts in ((Terminal(), True), (io.StringIO(), False)):
        console = Console(stream)
        console.say("fetching")
        bar = Bar("  file", BYTES, lines=0, console=console)
        bar.show(500_000, 2_000_000)
        bar.show(2_000_000, 2_000_000)
        console.say("done")
        text = stream.getvalue()
        assert ("25% of 2.0 MB" in text) is counts and ("100% of 2.0 MB" in text) is counts
        assert text.startswith("fetching\n") and text.endswith("done\n")
