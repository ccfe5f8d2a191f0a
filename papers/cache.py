"""Caches that are filled shard by shard: what a frozen network makes of the data is computed once."""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO
from zipfile import BadZipFile

from torch import nn

from clipwise.data import folders
from clipwise.errors import DataError
from clipwise.files import file_sha256, locked, replacing
from clipwise.hashing import digest
from clipwise.progress import Bar, duration


def cache_folder(kind: str, name: str, made_of: Any) -> Path:
    """A folder of the cache for what is computed from `made_of`: a hash of it ends the folder's name.

    It is the one that is there, else one in the first data folder that can be written.
    """
    key = hashlib.sha256(json.dumps(made_of).encode()).hexdigest()
    places = [base / kind / f"{name}-{key[:16]}" for base in folders()]
    for folder in [place for place in places if place.is_dir()] or places:
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            return folder
    raise DataError(f"{' and '.join(map(str, folders()))} cannot be written; let CLIPWISE_DATA name a folder that can.")


def digest_of_weights(model: nn.Module) -> str:
    """What tells the weights of a network from all others."""
    return digest(dict(model.state_dict()))


def digests_of_files(folder: Path) -> dict[str, str]:
    """The files that weights were fetched as, by name; where they came from does not count."""
    parts = sorted(path for path in folder.iterdir() if path.is_file() and path.name != "origin.json")
    return {path.name: file_sha256(path) for path in parts}


@contextmanager
def kept(path: Path) -> Iterator[None]:
    """Around the reading of a file of the cache: one that is damaged is reported, with what to do."""
    try:
        yield
    except (OSError, ValueError, EOFError, KeyError, TypeError, BadZipFile) as error:
        raise DataError(f"{path} is damaged ({error}); remove it to have it made again.") from error


def fill(what: str, paths: Sequence[Path], make: Callable[[int, BinaryIO], None]) -> None:
    """Write the shards of a folder that are missing, each whole or not at all: `make(k, file)` writes the k-th.

    Of several processes one writes, and the others wait for it.
    """

    def busy() -> None:
        print(f"{what}: waiting for another process that makes them", file=sys.stderr, flush=True)

    if not all(path.is_file() for path in paths):
        with locked(paths[0].parent, busy):
            _fill(what, paths, make)


def _fill(what: str, paths: Sequence[Path], make: Callable[[int, BinaryIO], None]) -> None:
    missing = [k for k, path in enumerate(paths) if not path.is_file()]
    if not missing:
        return
    bar, begun = Bar(what, "shards"), time.monotonic()
    for done, k in enumerate(missing, start=1):
        with replacing(paths[k], DataError) as file:
            make(k, file)
        bar.show(done, len(missing))
    bar.close()
    print(f"{what}: {len(missing)} in {duration(time.monotonic() - begun)}", file=sys.stderr, flush=True)
