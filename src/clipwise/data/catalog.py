"""The catalogue: every data set and set of weights that has a name here. Its rows are in `catalog.toml`."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from clipwise.data.convert import CONVERSIONS
from clipwise.data.entries import Entry, File, Form, Supply
from clipwise.data.origins import Address, Debian, Npm, Origin, PyPI
from clipwise.errors import DataError

__all__ = ["CATALOG", "entry"]

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
