"""Caches that are filled shard by shard."""

from __future__ import annotations

import io
import time
from pathlib import Path

import pytest
from papers import cache
from papers.cache import cache_folder, fill

from clipwise.errors import DataError
from clipwise.experiments import side_by_side


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
    list(side_by_side(slow_shard, [tmp_path, tmp_path], 2))
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
    monkeypatch.setattr(cache, "folders", lambda: [file, tmp_path / "second"])
    made = cache_folder("kind", "name", {"of": 1})
    assert made.parent == tmp_path / "second" / "kind" and made.name.startswith("name-")
    assert cache_folder("kind", "name", {"of": 1}) == made != cache_folder("kind", "name", {"of": 2})
    monkeypatch.setattr(cache, "folders", lambda: [file])
    with pytest.raises(DataError, match="cannot be written; let CLIPWISE_DATA"):
        cache_folder("kind", "name", {"of": 1})
