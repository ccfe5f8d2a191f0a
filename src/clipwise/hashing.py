"""Digests of values: equal for equal content, in every process. Digests of files are in `clipwise.files`.

A digest of a record confirms a guess of the record exactly, so it is as private as the record
(`clipwise.private.digests` says where digests may lie).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset

from clipwise.packing import Packer, tensor_bytes

__all__ = ["SIZE", "digest", "digest_of", "joined", "whole"]

SIZE = 16
"""Bytes of the digest of a record."""

_DEEPEST = 20


def joined(parts: Iterable[bytes]) -> bytes:
    """One digest (SHA-256) of several parts; where one ends and the next begins matters.

    >>> joined([b"ab", b"c"]) == joined([b"a", b"bc"])
    False
    """
    sha = hashlib.sha256()
    for part in parts:
        sha.update(b"%d:" % len(part))
        sha.update(part)
    return sha.digest()


def digest(value: Any) -> str:
    """A fingerprint, in hexadecimal, of nested values and tensors that a checkpoint can hold; others are refused.

    >>> digest({"w": torch.ones(2)}) == digest({"w": torch.ones(2)})
    True
    >>> digest({"w": torch.ones(2)}) == digest({"w": torch.ones(2, 1)})
    False
    """
    packer = Packer()
    structure = packer.pack(value, "value")
    sha = hashlib.sha256(json.dumps([structure, packer.shapes()]).encode())
    for tensor in packer.tensors:
        sha.update(tensor_bytes(tensor))
    return sha.hexdigest()


def digest_of(value: Any) -> bytes | None:
    """A digest of a record, or None for what cannot be looked into.

    >>> digest_of((torch.ones(2), "a")) == digest_of((torch.ones(2), "a")) != digest_of((torch.ones(2), "b"))
    True
    >>> digest_of(iter(())) is None
    True
    """
    sha = hashlib.sha256()
    try:
        _describe(value, sha.update, _DEEPEST)
    except (_Opaque, RuntimeError, TypeError, ValueError, NotImplementedError):  # no record may stop a run here
        return None
    return sha.digest()[:SIZE]


def whole(dataset: Dataset[Any]) -> bytes | None:
    """A digest of all records of a data set that lies in memory as tensors; None for any other, which is read first.

    >>> ones, zeros = TensorDataset(torch.ones(3)), TensorDataset(torch.zeros(3))
    >>> whole(ones) == whole(TensorDataset(torch.ones(3))) != whole(zeros)
    True
    """
    if isinstance(dataset, TensorDataset) and type(dataset).__getitem__ is TensorDataset.__getitem__:
        return digest_of(dataset.tensors)
    if type(dataset) is Subset and (inner := whole(dataset.dataset)) is not None:
        return joined([b"subset", inner, np.asarray(dataset.indices, dtype=np.int64).tobytes()])
    return None


class _Opaque(Exception):
    """Something that cannot be looked into."""


def _describe(item: Any, put: Callable[[bytes], None], depth: int) -> None:
    if not depth:
        raise _Opaque
    if isinstance(item, Tensor):
        flat = item.detach().cpu().contiguous().reshape(-1)
        _leaf(f"{item.dtype} {tuple(item.shape)}", flat.view(torch.uint8).numpy() if flat.numel() else b"", put)
    elif isinstance(item, np.ndarray) and item.dtype != object:
        _leaf(f"{item.dtype} {item.shape}", np.ascontiguousarray(item).tobytes(), put)
    elif isinstance(item, (str, bytes, int, float, complex, np.generic, type(None))):
        _leaf(type(item).__name__, repr(item).encode(), put)
    elif isinstance(item, Mapping):
        _many("mapping", [part for pair in item.items() for part in pair], put, depth)
    elif isinstance(item, (set, frozenset)):
        _leaf("set", b"".join(sorted(_own_digest(part, depth) for part in item)), put)
    elif isinstance(item, (Sequence, np.ndarray)):
        _many(type(item).__name__, item, put, depth)
    elif dataclasses.is_dataclass(item) and not isinstance(item, type):
        _many(type(item).__qualname__, [getattr(item, f.name) for f in dataclasses.fields(item)], put, depth)
    elif callable(getattr(item, "tobytes", None)):  # images
        _leaf(f"{type(item).__qualname__} {getattr(item, 'size', '')} {getattr(item, 'mode', '')}", item.tobytes(), put)
    elif getattr(item, "__dict__", None) and not callable(item):
        _many(type(item).__qualname__, [part for pair in sorted(vars(item).items()) for part in pair], put, depth)
    else:
        raise _Opaque


def _leaf(kind: str, content: Any, put: Callable[[bytes], None]) -> None:
    put(f"{kind} {len(content)}:".encode())
    put(content)


def _many(kind: str, items: Iterable[Any], put: Callable[[bytes], None], depth: int) -> None:
    parts = list(items)
    put(f"{kind} {len(parts)}:".encode())
    for part in parts:
        _describe(part, put, depth - 1)


def _own_digest(item: Any, depth: int) -> bytes:
    sha = hashlib.sha256()
    _describe(item, sha.update, depth - 1)
    return sha.digest()
