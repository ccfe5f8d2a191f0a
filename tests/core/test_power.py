"""A power cut, which loses what was not synced: a written file is the old one or the new one, a charge is soon safe."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import clipwise.files
from clipwise.files import replacing
from clipwise.private import checkpoint

OLD, NEW = b"the old text", b"another text, which is longer"
TORN = 3


@dataclass
class Disk:
    """Remembers, in order, what is asked of a folder. `survivors` are the files that a cut may leave at each moment.

    What is not synced may be there, be there in part, or be missing; changes of the folder's names come in order.
    """

    target: Path
    asked: list[tuple[str, bytes]] = field(default_factory=list)
    _handles: dict[int, str] = field(default_factory=dict)

    def open(self, path: Any, *arguments: Any) -> int:
        handle = os.open(path, *arguments)
        self._handles[handle] = "folder" if Path(path).is_dir() else "part"
        return handle

    def fsync(self, handle: int) -> None:
        kind = self._handles[handle]
        content = Path(f"/proc/self/fd/{handle}").read_bytes() if kind == "part" else b""
        self.asked.append((f"sync {kind}", content))

    def replace(self, source: Any, target: Any) -> None:
        self.asked.append(("replace", Path(source).read_bytes()))
        assert Path(target) == self.target
        os.replace(source, target)

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def survivors(self) -> Iterator[set[bytes]]:
        """What the target may hold after a cut, after each request."""
        named, synced = [OLD], b""
        yield set(named)
        for what, content in self.asked:
            if what == "sync part":
                synced = content
            elif what == "replace":
                named.append(content)
            elif what == "sync folder":
                named = named[-1:]
            whole = {entry for entry in named if entry in (OLD, synced)}
            yield whole | {entry[:TORN] for entry in named if entry not in whole}


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="reads a file through /proc")
def test_a_power_cut_leaves_the_old_file_or_the_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "note"
    path.write_bytes(OLD)
    disk = Disk(path)
    monkeypatch.setattr(clipwise.files, "os", disk)
    with replacing(path) as file:
        file.write(NEW)
    moments = list(disk.survivors())
    assert all(left <= {OLD, NEW} for left in moments), disk.asked
    assert moments[-1] == {NEW}, "once it has returned, the new file survives"
    assert path.read_bytes() == NEW


@given(
    st.lists(st.tuples(st.floats(0.0, 2.0), st.floats(1e-4, 0.2)), min_size=1, max_size=60),
    st.integers(0, 10**12),
)
def test_a_power_cut_costs_only_the_charges_of_twenty_syncs(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[float, float]], begun: int
) -> None:
    """Whatever a sync takes, and whatever time lies between the charges."""
    path = tmp_path_factory.mktemp("power") / "run.ckpt"
    now, safe, waiting, longest = 0.0, begun, list[float](), 0.0
    journal = checkpoint.write(path, {"a": 1}, begun)
    with pytest.MonkeyPatch.context() as patched:

        def sync(handle: int) -> None:
            nonlocal now, safe, longest
            now, safe, longest = now + duration, journal.begun(), duration
            waiting.clear()

        patched.setattr(checkpoint, "time", SimpleNamespace(monotonic=lambda: now))
        patched.setattr(checkpoint.os, "fsync", sync)
        for number, (pause, duration) in enumerate(steps, begun + 1):  # noqa: B007 - `sync` reads it
            now += pause
            waiting.append(now)
            journal.charge(number)
            lost = number - safe
            assert lost == len(waiting)
            assert not waiting or waiting[-1] - waiting[0] < 20 * longest
    journal.close()


def test_a_retired_file_is_past_after_a_power_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else two files of one run would be live: the steps counted in one are unknown to the other."""
    path = tmp_path / "run.ckpt"
    journal = checkpoint.write(path, {"a": 1}, 3)
    synced = list[tuple[int, bool]]()
    monkeypatch.setattr(checkpoint.os, "fsync", lambda handle: synced.append(checkpoint.read(path)[1:]))
    journal.retire(5)
    assert synced == [(5, False)]
