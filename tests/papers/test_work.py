"""Work in processes of its own, and caches that are filled shard by shard."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from papers import work
from papers.work import Bar, advance, cache_folder, fill, side_by_side

from clipwise.errors import DataError


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def half(number: int) -> float:
    advance(0.25)
    if number == 3:
        raise ValueError("three cannot be halved")
    return number / 2


def test_an_item_that_fails_is_told_and_stops_no_other(capfd: pytest.CaptureFixture[str]) -> None:
    found = []
    with pytest.raises(SystemExit, match=r"1 of 4 numbers failed. The first: 3: three cannot be halved"):
        found.extend(side_by_side("numbers", half, [3, 1, 2, 4], 2))
    assert sorted(found) == [(1, 0.5), (2, 1.0), (4, 2.0)]
    said = capfd.readouterr().err
    assert "failed, 3: three cannot be halved" in said and "numbers: 4 of 4" in said


def test_nothing_to_do_starts_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "ProcessPoolExecutor", lambda *a, **k: pytest.fail("a pool for nothing"))
    assert list(side_by_side("numbers", half, [], 2)) == []


def test_a_terminal_sees_a_bar_and_a_log_a_line_for_every_tenth(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("COLUMNS", "80")
    bar = Bar("runs", 4)
    bar.show(0)
    bar.show(1.5)
    bar.clear()
    assert "[" + "#" * 11 + "." * 19 + "] runs: 1 of 4, 0:00 left" in terminal.getvalue()
    assert terminal.getvalue().endswith("\r\033[K")
    monkeypatch.setenv("COLUMNS", "20")
    bar.show(3)
    assert len(terminal.getvalue().split("\r\033[K")[-1]) == 19, "the line would break"
    log = io.StringIO()
    monkeypatch.setattr("sys.stderr", log)
    bar = Bar("shards", 1000)
    for done in range(1001):
        bar.show(done)
    assert [line.split(",")[0] for line in log.getvalue().splitlines()] == [
        f"shards: {100 * k} of 1000" for k in range(1, 11)
    ]


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
