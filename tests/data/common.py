"""A world without a network, in which the files of `small` can be fetched all the same."""

from __future__ import annotations

import gzip
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.error import URLError

import pytest

from clipwise.data import origins
from clipwise.progress import Console
from tests.data.small import BASE, FIRST, SECOND


class Quiet(Console):
    """A console that remembers what it was told."""

    def __init__(self) -> None:
        self.told = io.StringIO()
        super().__init__(self.told)

    @property
    def lines(self) -> list[str]:
        return self.told.getvalue().splitlines()


class Web:
    """What answers at an address: content, or an error that is raised. Nothing else is reached."""

    def __init__(self) -> None:
        self.pages: dict[str, bytes | Exception] = {}
        self.asked: list[str] = []

    def serve(self) -> None:
        self.pages = {f"{BASE}/first": FIRST, f"{BASE}/second.gz": gzip.compress(SECOND, mtime=0)}

    def open(self, request: origins.Request, timeout: float) -> io.BytesIO:
        url = request.full_url
        self.asked.append(url)
        page = self.pages.get(url, URLError("no network"))
        if isinstance(page, Exception):
            raise page
        return io.BytesIO(page)


class Clients:
    """Stands for pip, npm and apt: what the client does with the folder it is run in, by the name of the client."""

    def __init__(self) -> None:
        self.commands: list[list[str]] = []
        self.act: Callable[[Path], None] | None = None

    def run(self, command: Sequence[str], folder: Path, console: object) -> None:
        self.commands.append(list(command))
        if self.act is None:
            raise origins.Unavailable("the registry was not reached")
        self.act(folder)


def package(name: str, content: bytes) -> Callable[[Path], None]:
    """A client that brings this file."""

    def act(folder: Path) -> None:
        (folder / name).write_bytes(content)

    return act


def left_in(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the entry in an empty cache."""
    monkeypatch.setenv("CLIPWISE_DATA", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("CLIPWISE_OFFLINE", raising=False)
    return tmp_path / "cache" / "small"


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch) -> Web:
    web = Web()
    monkeypatch.setattr(origins, "urlopen", web.open)
    return web


@pytest.fixture
def clients(monkeypatch: pytest.MonkeyPatch) -> Clients:
    clients = Clients()
    monkeypatch.setattr(origins, "_run", clients.run)
    return clients
