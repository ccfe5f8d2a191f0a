"""Checkpoints: one file, written atomically, read without pickle, that also counts the steps begun since.

```
line 1   clipwise checkpoint 1
line 2   begun NNN... live|past        fixed width, rewritten in place before every step of an unseeded run
rest     a zip archive: manifest.json (the structure) and one raw member per tensor
```

The second line is the write-ahead: a step is counted there before its noise is drawn, so a process that dies between
two saves has still paid for every step that it began. `past` marks a file that a later one has replaced elsewhere.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
import weakref
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clipwise.errors import CheckpointError
from clipwise.files import replacing

__all__ = ["Journal", "digest", "read", "write"]

_MAGIC = b"clipwise checkpoint 1\n"
_COUNT_AT = len(_MAGIC)
_SYNC_SHARE = 20
"""Wait this many times a sync's own duration before the next one: syncing then costs at most 5 % of the time."""


def _count_line(begun: int, live: bool) -> bytes:
    return b"begun %020d %s\n" % (begun, b"live" if live else b"past")


def _parse_count(line: bytes, path: Path) -> tuple[int, bool]:
    words = line.split()
    if len(words) == 3 and words[1].isdigit():
        begun, live = int(words[1]), words[2] == b"live"
        if line == _count_line(begun, live):
            return begun, live
    raise CheckpointError(f"{path} does not say how many steps were begun: it is damaged. Use an older copy.")


class Journal:
    """The count of begun steps in a checkpoint, kept up to date in place.

    Guarantees: once `charge(n)` returns, n survives the death of the process at any point. A power cut can cost only
    charges that were made within 20 times the duration of the last disk sync. No other process has a journal of
    the same file, where the file system knows locks; and anyone else who counts in it, here or there, is noticed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()
        try:
            self._handle = os.open(path, os.O_RDWR | getattr(os, "O_BINARY", 0))
        except OSError as error:
            raise CheckpointError(
                f"{path} cannot be written ({error}). Steps are counted in the file they are resumed from: copy it to "
                "a place that can be written."
            ) from error
        self.close = weakref.finalize(self, os.close, self._handle)
        """Release the file; a journal that is dropped closes by itself."""
        self._sync_after = 0.0
        self._lock()
        self._last = self.begun()

    def _lock(self) -> None:
        """Two processes that continue from one file would count their steps over each other's."""
        if not hasattr(os, "lockf"):
            return
        try:
            os.lockf(self._handle, os.F_TLOCK, 0)
        except (BlockingIOError, PermissionError) as error:
            self.close()
            raise CheckpointError(f"another process continues {self.path} already. One run is one process.") from error
        except OSError:
            return  # a file system without locks

    def begun(self) -> int:
        """The steps begun so far, as the file says now."""
        os.lseek(self._handle, _COUNT_AT, os.SEEK_SET)
        return _parse_count(os.read(self._handle, len(_count_line(0, True))), self.path)[0]

    def charge(self, begun: int) -> None:
        """Write down that `begun` steps have been begun, unless another run has counted here meanwhile."""
        if self.begun() != self._last:
            raise CheckpointError(
                f"another run continues {self.path}: it counted steps there that this one did not make. One "
                "checkpoint is continued by one run; begin this one again from its own file."
            )
        self._put(_count_line(begun, True))
        self._last = begun
        start = time.monotonic()
        if start >= self._sync_after:
            os.fsync(self._handle)
            done = time.monotonic()
            self._sync_after = done + _SYNC_SHARE * (done - start)

    def retire(self, begun: int) -> None:
        """Mark the file as past: the run continues elsewhere."""
        self._put(_count_line(begun, False))
        os.fsync(self._handle)
        self.close()

    def _put(self, line: bytes) -> None:
        os.lseek(self._handle, _COUNT_AT, os.SEEK_SET)
        if os.write(self._handle, line) != len(line):
            raise CheckpointError(f"the disk of {self.path} is full: the step cannot be counted, so it is not made.")


class _Packer:
    """Python values as JSON with tags, tensors put aside; anything else is refused by its place."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self._known: dict[tuple[object, ...], int] = {}

    def pack(self, value: Any, place: str) -> Any:
        if value is None or isinstance(value, (bool, int, str)):
            return value
        if isinstance(value, float):
            return value if math.isfinite(value) else {"$float": repr(value)}
        if isinstance(value, Tensor):
            return {"$tensor": self._tensor(value, place)}
        if isinstance(value, (list, tuple)):
            items = [self.pack(item, f"{place}[{i}]") for i, item in enumerate(value)]
            return items if isinstance(value, list) else {"$tuple": items}
        if isinstance(value, Mapping):
            pairs = [[self.pack(k, place), self.pack(v, f"{place}[{k!r}]")] for k, v in value.items()]
            return {"$dict": pairs}
        raise CheckpointError(
            f"{place} is a {type(value).__name__}, which cannot be saved without pickle. Numbers, strings, tensors, "
            "lists, tuples and dictionaries can."
        )

    def _tensor(self, tensor: Tensor, place: str) -> int:
        if tensor.layout is not torch.strided or tensor.is_meta:
            raise CheckpointError(f"{place} is a {tensor.layout} tensor on {tensor.device}; only dense ones are saved.")
        # Tied weights stand in a state_dict twice; their bytes are written once.
        key = (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        known = self._known.get(key)
        if known is None or tensor.numel() == 0:
            known = self._known[key] = len(self.tensors)
            self.tensors.append(tensor.detach())
        return known

    def shapes(self) -> list[dict[str, Any]]:
        return [{"dtype": str(t.dtype).removeprefix("torch."), "shape": list(t.shape)} for t in self.tensors]


def _bytes(tensor: Tensor) -> bytes:
    flat = tensor.to("cpu").contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def _tensor(data: bytes, spec: Mapping[str, Any]) -> Tensor:
    dtype = getattr(torch, str(spec["dtype"]), None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"the checkpoint has a tensor of unknown type {spec['dtype']!r}.")
    shape = [int(n) for n in spec["shape"]]
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)


def _unpack(value: Any, tensors: list[Tensor]) -> Any:
    if isinstance(value, list):
        return [_unpack(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    ((tag, content),) = value.items()
    if tag == "$dict":
        return {_unpack(k, tensors): _unpack(v, tensors) for k, v in content}
    if tag == "$tuple":
        return tuple(_unpack(item, tensors) for item in content)
    if tag == "$tensor":
        return tensors[content]
    if tag == "$float":
        return float(content)
    raise CheckpointError(f"the checkpoint holds an unknown kind of value {tag!r}.")


def digest(value: Any) -> str:
    """A fingerprint of nested values and tensors.

    >>> digest({"w": torch.ones(2)}) == digest({"w": torch.ones(2)})
    True
    >>> digest({"w": torch.ones(2)}) == digest({"w": torch.ones(2, 1)})
    False
    """
    packer = _Packer()
    structure = packer.pack(value, "value")
    sha = hashlib.sha256(json.dumps([structure, packer.shapes()]).encode())
    for tensor in packer.tensors:
        sha.update(_bytes(tensor))
    return sha.hexdigest()


def write(path: str | os.PathLike[str], value: Mapping[str, Any], begun: int) -> Journal:
    """Write a checkpoint so that a crash leaves the old file or the new one; its journal stands at `begun`."""
    target = Path(path)
    packer = _Packer()
    structure = packer.pack(value, "checkpoint")
    manifest = json.dumps({"value": structure, "tensors": packer.shapes()}, allow_nan=False)
    with replacing(target, CheckpointError) as file:
        file.write(_MAGIC + _count_line(begun, True))
        with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
            archive.writestr("manifest.json", manifest)
            for i, tensor in enumerate(packer.tensors):
                archive.writestr(f"tensors/{i}", _bytes(tensor))
    return Journal(target)


def read(path: str | os.PathLike[str]) -> tuple[dict[str, Any], int, bool]:
    """What `write` wrote, the number of steps begun since, and whether the run did not continue elsewhere."""
    source = Path(path)
    try:
        with open(source, "rb") as file:
            if file.read(len(_MAGIC)) != _MAGIC:
                raise CheckpointError(f"{source} is not a clipwise checkpoint of version 1.")
            begun, live = _parse_count(file.readline(), source)
            with zipfile.ZipFile(file) as archive:
                manifest = json.loads(archive.read("manifest.json"))
                specs = manifest["tensors"]
                tensors = [_tensor(archive.read(f"tensors/{i}"), spec) for i, spec in enumerate(specs)]
            value = _unpack(manifest["value"], tensors)
    except CheckpointError:
        raise
    except (OSError, zipfile.BadZipFile, KeyError, IndexError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{source} cannot be read: it is missing, cut or damaged ({error}).") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{source} does not hold a run.")
    return value, begun, live
