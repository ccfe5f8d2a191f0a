"""Fetches that go wrong: damaged, changed, cut, too long, onto a full disk, killed, two at once. Never half a file."""

from __future__ import annotations

import errno
import http.server
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from http.client import IncompleteRead
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from clipwise import files
from clipwise.data import origins, store
from clipwise.data.store import obtain
from clipwise.errors import DataError
from tests.conftest import HANG
from tests.data.common import Clients, Quiet, Web, left_in, package
from tests.data.small import AT_ADDRESS, BASE, FIRST, IN_PACKAGE, SECOND, WHEEL, WHEEL_NAME, entry

ROOT = Path(__file__).resolve().parents[2]


def refused(*sources: Any) -> str:
    with pytest.raises(DataError) as caught:
        obtain(entry(*sources), Quiet())
    return str(caught.value)


@pytest.mark.parametrize(
    ("page", "reason"),
    [
        (FIRST[:-1] + b"!", f"{len(FIRST):,} bytes with SHA-256"),
        (FIRST[:100], "100 bytes with SHA-256"),
        (b"<html>log in to the network</html>", "34 bytes with SHA-256"),
        (FIRST * 1000, "sends more than"),
        (IncompleteRead(b"", 7), "broke off"),
        (TimeoutError("timed out"), "not reached: timed out"),
        (ConnectionResetError(errno.ECONNRESET, "reset by peer"), "not reached"),
    ],
    ids=["changed", "cut", "portal", "endless", "broken off", "time-out", "reset"],
)
def test_a_bad_answer_leaves_nothing(page: Any, reason: str, cache: Path, web: Web, clients: Clients) -> None:
    web.serve()
    web.pages[f"{BASE}/first"] = page
    assert reason in refused()
    assert left_in(cache.parent) == set()


def test_after_a_bad_answer_the_package_is_tried(cache: Path, web: Web, clients: Clients) -> None:
    web.serve()
    web.pages[f"{BASE}/second.gz"] = b"wrong"
    clients.act = package(WHEEL_NAME, WHEEL)
    assert obtain(entry(), Quiet()).read("second") == SECOND


@pytest.mark.parametrize(
    ("content", "reason"),
    [(WHEEL[:-9], "with SHA-256"), (b"", "0 bytes with SHA-256")],
    ids=["cut", "empty"],
)
def test_a_bad_package_leaves_nothing(content: bytes, reason: str, cache: Path, web: Web, clients: Clients) -> None:
    clients.act = package(WHEEL_NAME, content)
    assert reason in refused(IN_PACKAGE)
    assert left_in(cache.parent) == set()


def test_a_package_whose_archive_is_another_build_is_checked_inside(cache: Path, web: Web, clients: Clients) -> None:
    """Debian's archives have no fixed hash; the files in them do."""
    unpinned = origins.Debian("small", len(WHEEL))
    source = store.Supply((unpinned,), {"first": "usr/first", "second": "usr/second"})
    clients.act = package("small_1_all.deb", debian({"./usr/first": FIRST, "./usr/second": b"another"}))
    assert "second in it is not the one that is known" in refused(source)
    clients.act = package("small_1_all.deb", debian({"./usr/first": FIRST}))
    assert "has no member usr/second" in refused(source)
    source_of_gz = store.Supply((unpinned,), {"first": "usr/first", "second": "usr/second.gz"})
    clients.act = package("small_1_all.deb", debian({"./usr/first": FIRST, "./usr/second.gz": b"no gz"}))
    assert "Not a gzipped file" in refused(source_of_gz)
    clients.act = package("small_1_all.deb", b"!<arch>\nrubbish")
    assert "damaged" in refused(source)
    assert left_in(cache.parent) == set()
    clients.act = package("small_1_all.deb", debian({"./usr/first": FIRST, "./usr/second": SECOND}))
    assert obtain(entry(source), Quiet()).source == "apt-get download small"


def debian(members: dict[str, bytes]) -> bytes:
    """A Debian archive: an ar file of a version, control data and a packed tar."""
    import io
    import tarfile

    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:xz") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    parts = {"debian-binary": b"2.0\n", "control.tar.xz": b"odd", "data.tar.xz": stream.getvalue()}
    made = b"!<arch>\n"
    for name, content in parts.items():
        made += f"{name:<16}{0:<12}{0:<6}{0:<6}{'100644':<8}{len(content):<10}`\n".encode() + content
        made += b"\n" * (len(content) % 2)
    return made


def test_disk_that_fills_up_during_a_download(
    cache: Path, web: Web, clients: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    web.serve()

    class Full:
        def __enter__(self) -> Full:
            return self

        def __exit__(self, *_: object) -> None: ...

        def write(self, chunk: bytes) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    def full_open(path: Path, mode: str) -> Any:
        return Full() if mode == "wb" else open(path, mode)

    monkeypatch.setattr(origins, "open", full_open, raising=False)
    message = refused()
    assert "is full" in message and "CLIPWISE_DATA" in message
    assert not clients.commands, "the package would not fit either"
    assert left_in(cache.parent) == set()


def test_disk_that_fills_up_while_files_are_stored(
    cache: Path, web: Web, clients: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    clients.act = package(WHEEL_NAME, WHEEL)

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    assert "is full" in refused(IN_PACKAGE)
    assert left_in(cache.parent) == set()


def test_disk_that_is_too_small_is_told_before_the_fetch(
    cache: Path, web: Web, clients: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store.shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    assert "1.0 kB left, but about 4.9 kB are needed" in refused()
    assert not web.asked and left_in(cache.parent) == set()


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo 'ERROR: No matching distribution' >&2; exit 1", "failed: ERROR: No matching distribution"),
        ("echo 'OSError: [Errno 28] No space left on device'; exit 1", "is full"),
        ("exit 0", "left no"),
    ],
    ids=["no such package", "full disk", "no file"],
)
def test_what_a_client_says_is_passed_on(script: str, reason: str, tmp_path: Path, cache: Path, web: Web) -> None:
    """A real child process stands for npm."""
    tool = tmp_path / "npm"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    source = store.Supply((origins.Npm("small@1", "0" * 64, 10),), {"first": "first", "second": "second"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        assert reason in refused(source)
    assert left_in(cache.parent) == set()


def test_a_client_that_is_not_installed(cache: Path, web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    source = store.Supply((origins.Npm("small@1", "0" * 64, 10),), {"first": "first", "second": "second"})
    assert "npm is not installed" in refused(source)


class Server(http.server.ThreadingHTTPServer):
    """Serves the two files from this machine; `hold` stops in the middle of the second."""

    hold = threading.Event()
    requests: list[str]


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.server.requests.append(self.path)
        page = FIRST if self.path.endswith("first") else SECOND
        self.send_response(200)
        self.send_header("Content-Length", str(len(page)))
        self.end_headers()
        self.wfile.write(page[: len(page) // 2])
        self.wfile.flush()
        if not self.path.endswith("first"):
            self.server.hold.wait(HANG)
        self.wfile.write(page[len(page) // 2 :])

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server(("127.0.0.1", 0), Handler)
    server.hold, server.requests = threading.Event(), []
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.hold.set()
    server.shutdown()
    thread.join()
    server.server_close()


Start = Callable[[], "subprocess.Popen[str]"]
SCRIPT = """
import sys
from clipwise.data.catalog import Entry, File, Form, Supply
from clipwise.data.origins import Address
from clipwise.data.store import obtain
from tests.data.small import FILES, FIRST, SECOND, sha
base = sys.argv[1]
source = Supply(tuple(Address(f"{base}/{n}", sha(c), len(c)) for n, c in (("first", FIRST), ("second", SECOND))))
found = obtain(Entry("small", "Small", "data", "CC0", (Form(FILES, (source,)),)))
assert found.read("first") == FIRST and found.read("second") == SECOND
"""


@pytest.fixture
def start(server: Server) -> Iterator[Start]:
    """Starts a process that fetches. In the end all of them are over and their pipes closed, however the test went."""
    command = [sys.executable, "-c", SCRIPT, f"http://127.0.0.1:{server.server_address[1]}"]
    environment = {**os.environ, "no_proxy": "*"}
    with ExitStack() as running:

        def begin() -> subprocess.Popen[str]:
            process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
            running.enter_context(process)
            running.callback(process.kill)
            return process

        yield begin


def until(condition: Any) -> None:
    deadline = time.monotonic() + HANG
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.02)


def test_killed_half_way_and_run_again(cache: Path, server: Server, start: Start) -> None:
    process = start()
    until(lambda: "/second" in server.requests)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=HANG)
    assert [p.name for p in cache.iterdir() if not p.name.startswith(".part-")] in ([], ["first"])
    assert not (cache / "second").exists()
    server.hold.set()
    again = start()
    _, errors = again.communicate(timeout=HANG)
    assert again.returncode == 0, errors
    assert left_in(cache) == {"first", "second", "origin.json"}
    assert not [*cache.glob(".part-*")], "what the killed one left is cleared away"


def test_two_at_once_fetch_once(cache: Path, server: Server, start: Start) -> None:
    one = start()
    until(lambda: "/second" in server.requests)
    other = start()
    assert other.stderr is not None
    assert other.stderr.readline().startswith("waiting for another process")
    server.hold.set()
    for process in (one, other):
        _, errors = process.communicate(timeout=HANG)
        assert process.returncode == 0, errors
    assert server.requests == ["/first", "/second"]
    assert left_in(cache) == {"first", "second", "origin.json"}


def test_an_interrupt_leaves_nothing(cache: Path, web: Web, clients: Clients) -> None:
    def interrupted(folder: Path) -> None:
        (folder / "half").write_bytes(b"half")
        raise KeyboardInterrupt

    clients.act = interrupted
    with pytest.raises(KeyboardInterrupt):
        obtain(entry(IN_PACKAGE), Quiet())
    assert left_in(cache.parent) == set()


def test_a_place_that_is_a_file(tmp_path: Path, cache: Path, web: Web) -> None:
    web.serve()
    shutil.rmtree(cache.parent, ignore_errors=True)
    cache.parent.write_text("a file")
    found = obtain(entry(AT_ADDRESS), Quiet())
    assert found.folder.parent != cache.parent, "the user's own cache folder is taken instead"
