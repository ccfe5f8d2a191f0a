"""What the catalogue is made of: an entry is had in one of several forms, each a few files with known contents."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from clipwise.data.origins import Address, Origin

__all__ = ["Entry", "File", "Form", "Supply"]

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
