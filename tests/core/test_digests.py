"""What a seeded run remembers of its records and releases, piece by piece."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

import clipwise as cw
from clipwise.hashing import SIZE
from clipwise.private.digests import UNSTEADY, Digests, Looked, file_of

A, B, C = (bytes([k]) * SIZE for k in (1, 2, 3))


def saved(path: Path, digests: Digests, steps: int = 0) -> Digests:
    """Saved, and loaded in another process."""
    digests.save(path)
    digests.saved(steps)
    other = Digests()
    other.load(path)
    return other


# Data


WHOLE: dict[str, tuple[list[bytes | None], bool]] = {
    "the same": ([A, A], True),
    "another": ([A, B], False),
    "none after one": ([A, None], False),
    "never one": ([None, None], True),
    "one after none": ([None, A], True),
}


@pytest.mark.parametrize(("given", "fits"), WHOLE.values(), ids=WHOLE)
def test_a_data_set_stays_the_same(given: list[bytes | None], fits: bool) -> None:
    digests = Digests()
    digests.look_at(given[0])
    assert digests.looked == Looked("not compared" if given[0] is None else "unchanged")
    if fits:
        digests.look_at(given[1])
        assert digests.looked.state == ("not compared" if given[1] is None else "unchanged")
    else:
        with pytest.raises(cw.CheckpointError, match="the data changed"):
            digests.look_at(given[1])
        assert digests.looked == Looked("changed")


def test_records_that_were_drawn_are_not_a_data_set_in_memory() -> None:
    digests = Digests()
    digests.note({0: A})
    digests.look_at(None)
    with pytest.raises(cw.CheckpointError, match="the data changed"):
        digests.look_at(A)


def test_a_record_stays_the_same() -> None:
    digests = Digests()
    digests.note({})
    assert digests.looked == Looked("not compared")
    digests.note({0: A, 1: B})
    digests.note({1: B, 2: C})
    assert digests.looked == Looked("unchanged", 3, 0) and str(digests.looked) == "data unchanged"
    with pytest.raises(cw.CheckpointError, match="a record reads otherwise"):
        digests.note({0: B})
    assert digests.looked.state == "changed"
    digests.note({2: C})
    assert digests.looked.state == "changed", "for ever"


def test_nothing_is_said_of_a_record_that_does_not_read_the_same_twice() -> None:
    digests = Digests()
    digests.note({0: A, 1: UNSTEADY})
    digests.note({0: UNSTEADY})
    digests.note({0: B, 1: C})
    assert digests.looked == Looked("unchanged", 2, 2)


# Releases


def test_other_releases_of_a_step_are_counted_since_the_last_save(tmp_path: Path) -> None:
    digests = Digests()
    assert digests.others(0, A) == digests.others(0, B) == 0, "nothing was saved that could be resumed"
    digests.save(tmp_path / "run")
    digests.saved(0)
    assert [digests.others(0, release) for release in (A, A, B, A, C)] == [0, 0, 1, 1, 2]
    assert digests.others(1, A) == 0
    again = Digests()
    again.load(tmp_path / "run")
    assert again.others(0, A) == 2 and again.others(1, B) == 1


def test_what_was_saved_cannot_be_repeated(tmp_path: Path) -> None:
    digests = Digests()
    digests.save(tmp_path / "run")
    for step in range(4):
        digests.others(step, A)
    later = saved(tmp_path / "run", digests, steps=2)
    for run in (digests, later):
        assert run.others(2, B) == run.others(3, B) == 1
    assert digests.others(1, B) == 0


@pytest.mark.parametrize("how", ["error", "short"])
def test_a_release_that_cannot_be_noted_is_not_made(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digests = Digests()
    digests.save(tmp_path / "run")

    def write(handle: int, data: bytes) -> int:
        if how == "error":
            raise OSError("no space")
        return len(data) - 1

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", write)
        said = r"cannot be noted \(no space\)" if how == "error" else "the disk is full"
        with pytest.raises(cw.CheckpointError, match=said):
            digests.others(0, A)
    assert digests.others(0, B) == 0, "the first one was not made"


# The file


def test_all_is_known_again(tmp_path: Path) -> None:
    digests = Digests()
    digests.note({0: A, 700: B})
    found = saved(tmp_path / "run", digests)
    assert found._records == {0: A, 700: B} and file_of(tmp_path / "run").name == "run.digests"
    in_memory = Digests()
    in_memory.look_at(C)
    with pytest.raises(cw.CheckpointError, match="the data changed"):
        saved(tmp_path / "run", in_memory).look_at(B)


def test_without_a_file_nothing_can_be_said(tmp_path: Path) -> None:
    digests = Digests()
    digests.load(tmp_path / "run")
    digests.note({0: A})
    assert digests.looked == Looked("not compared", 1, 0)
    assert digests.others(0, A) == digests.others(0, B) == 0


def test_an_entry_that_a_crash_cut_is_dropped(tmp_path: Path) -> None:
    digests = Digests()
    digests.note({0: A})
    digests.save(tmp_path / "run")
    digests.others(5, B)
    path = file_of(tmp_path / "run")
    whole = path.read_bytes()
    for cut in (1, SIZE, SIZE + 7):
        path.write_bytes(whole + whole[-cut:])
        found = Digests()
        found.load(tmp_path / "run")
        assert path.read_bytes() == whole and found.others(5, C) == 1
        path.write_bytes(whole)


HEAD: dict[str, Any] = {"format": "clipwise digests", "version": 1, "whole": None, "records": 1}
DAMAGED: dict[str, dict[str, Any]] = {
    "format": {"format": "another"},
    "version": {"version": 2},
    "more records than there are": {"records": 2},
    "no digest": {"whole": "no hex"},
    "negative": {"records": -1},
}


@pytest.mark.parametrize("changes", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_file_is_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    path, entry = file_of(tmp_path / "run"), (7).to_bytes(8, "little") + A
    path.write_bytes(json.dumps(HEAD).encode() + b"\n" + entry)
    digests = Digests()
    digests.load(tmp_path / "run")
    assert digests._records == {7: A}
    path.write_bytes(json.dumps(HEAD | changes).encode() + b"\n" + entry)
    with pytest.raises(cw.CheckpointError, match="is damaged"):
        Digests().load(tmp_path / "run")
