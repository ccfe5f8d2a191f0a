"""Named members out of an archive, in one pass and into memory: nothing of it is ever unpacked onto the disk."""

from __future__ import annotations

import io
import lzma
import tarfile
import zipfile
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import IO

from clipwise.errors import DataError

__all__ = ["read_members"]


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
