"""The twin of a forward pass: what every value computed from the batch would be, had other records been drawn.

A twin keeps a second storage for every storage that the batch reached. Afterwards the contents can be exchanged, so
that the very graph of the user's losses is differentiated as if those records had been drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from clipwise.engine import memory_of
from clipwise.private.evidence.records import Change, same, same_rows

_PIECE = 1 << 20  # bytes that are exchanged at once
Found = TypeVar("Found")


class Twin:
    """The storages of one changed batch, by the storages of the true one."""

    def __init__(self, change: Change) -> None:
        self.change = change
        self.broken = ""  # why this twin can tell nothing more
        self.left: list[tuple[int, str]] = []  # values that left the tensors, and would have been others
        self.moved: tuple[str, str] | None = (
            None  # the first operation after which a kept sample's row moved, and where
        )
        self.paired = False  # that operation gave a value for every pair of samples
        self._storages: dict[int, tuple[StorageWeakRef, torch.UntypedStorage]] = {}
        self._looked_up: set[int] = set()  # numbers of records that a rigid twin looks up, and keeps otherwise
        self._odd: dict[int, dict[_Geometry, Tensor]] = {}  # what has another shape with other records, by storage

    def __contains__(self, memory: int) -> bool:
        return memory in self._storages or memory in self._odd

    @property
    def nbytes(self) -> int:
        """Memory of its own."""
        return sum(theirs.nbytes() for _, theirs in self._storages.values())

    @property
    def has_odd(self) -> bool:
        """Whether some values have another shape with other records."""
        return bool(self._odd)

    def is_odd(self, tensor: Tensor) -> bool:
        """Whether a tensor has another shape with other records."""
        return memory_of(tensor) in self._odd

    def pair_odd(self, tensor: Tensor, other: Tensor) -> None:
        """A tensor whose shape follows the records; its views are followed one by one."""
        self._odd.setdefault(memory_of(tensor), {})[_geometry(tensor)] = other

    def of(self, tensor: Tensor) -> Tensor:
        """The tensor as it would be; itself where the batch never reached it."""
        return self.read(tensor) if self._follows(tensor) else tensor

    def _follows(self, tensor: Tensor) -> bool:
        if _is_real(tensor):
            return True
        return tensor.dtype is torch.bool if self.change.wild else not self.change.rigid

    def read(self, tensor: Tensor) -> Tensor:
        """The same where a rigid twin looks records up by their numbers."""
        odd = self._odd.get(memory_of(tensor))
        if odd is not None:
            return odd[_geometry(tensor)]
        held = self._storages.get(memory_of(tensor))
        return tensor if held is None else _view(held[1], tensor)

    def mapped(self, value: Any) -> Any:
        """The same for all tensors in a list."""
        if isinstance(value, Tensor):
            return self.of(value)
        return [self.mapped(item) for item in value] if isinstance(value, (list, tuple)) else value

    def enter(self, tensor: Tensor, other: Tensor) -> None:
        """A tensor of the batch, and what it would be."""
        self._set(tensor, other)
        if self.change.rigid and not _is_real(tensor):
            self._looked_up.add(memory_of(tensor))

    def pair(self, tensor: Tensor, other: Tensor) -> None:
        """`other`, of the same sizes, becomes what `tensor` would be. A rigid twin keeps integers as they are."""
        if self._follows(tensor):
            self._set(tensor, other)

    def _set(self, tensor: Tensor, other: Tensor) -> None:
        storage = tensor.untyped_storage()
        theirs = other.untyped_storage()
        held = self._storages.get(storage._cdata)
        same = (
            held is None
            and other.stride() == tensor.stride()
            and other.storage_offset() == tensor.storage_offset()
            and theirs.nbytes() == storage.nbytes()
            and theirs._cdata != storage._cdata
        )
        if not same:
            theirs = storage.clone() if held is None else held[1]
            try:
                _view(theirs, tensor).copy_(other)
            except RuntimeError:  # rows that share their memory cannot be others
                if not torch.equal(tensor, other):
                    self.broken = "a tensor of the batch is expanded"
                return
        self._storages[storage._cdata] = (StorageWeakRef(storage), theirs)

    def keep_apart(self, tensor: Tensor) -> None:
        """Give memory that is about to be written a twin of its own."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._storages and self._follows(tensor):
            self._storages[storage._cdata] = (StorageWeakRef(storage), storage.clone())

    def strays(self, tensor: Tensor, other: Tensor) -> bool:
        """Whether a wild twin cannot go on: other sizes, or other integers of a sample that stays, which it keeps."""
        if tensor.shape != other.shape:
            return True
        if _is_real(tensor) or tensor.dtype is torch.bool:
            return False
        rows = tensor.dim() and tensor.shape[0] == self.change.source.numel()
        return not (same_rows(tensor, other, self.change.kept) if rows else same(tensor, other))

    def let_go(self) -> None:
        """Free the twins of storages that are gone."""
        self._storages = {key: held for key, held in self._storages.items() if not held[0].expired()}

    def forget(self) -> None:
        """Let go of all numbers. From here on it can tell nothing more, also not that nothing moved."""
        self._storages, self._odd = {}, {}
        self.broken = self.broken or "its numbers were let go"

    def exchanged(self, compute: Callable[[], Found]) -> Found:
        """What is computed with the twin's numbers in the true storages.

        Guarantees: without memory for it, and after an interrupt at any line, all numbers are where they were.
        """
        held = [
            (alive(ref), theirs)
            for memory, (ref, theirs) in self._storages.items()
            if not ref.expired() and memory not in self._looked_up
        ]
        exchange = _Exchange(held)
        try:
            try:
                exchange.put()
                return compute()
            finally:
                exchange.put_back()
        finally:  # an interrupt may have come while numbers were put back
            exchange.put_back()


_Geometry: TypeAlias = tuple[object, ...]


def _geometry(tensor: Tensor) -> _Geometry:
    return tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.storage_offset()


def _is_real(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def alive(ref: StorageWeakRef) -> torch.UntypedStorage:
    """The storage, which somebody still holds."""
    storage = torch.UntypedStorage._new_with_weak_ptr(ref.cdata)
    assert storage is not None
    return storage


class _Exchange:
    """Exchanges the contents of storages in pieces that stay in the cache.

    Nothing is written before all memory is there. Both sides of a piece are copied before either is written, and the
    writing is noted. So what was broken off is written again, from the copies.
    """

    def __init__(self, storages: Sequence[tuple[torch.UntypedStorage, torch.UntypedStorage]]) -> None:
        if any(ours.nbytes() != theirs.nbytes() for ours, theirs in storages):
            raise RuntimeError("a storage was resized")
        pairs = [
            pair for ours, theirs in storages for pair in zip(pieces(ours, _PIECE), pieces(theirs, _PIECE), strict=True)
        ]
        self._pairs: list[tuple[Tensor, Tensor]] = pairs
        devices = {ours.device for ours, _ in storages}
        self._spare = {device: torch.empty(2, _PIECE, dtype=torch.uint8, device=device) for device in devices}
        self._is_exchanged = [False] * len(pairs)
        self._begun: tuple[int, bool] | None = None  # the piece that is being written, and whether it will be exchanged

    def put(self) -> None:
        """The twin's numbers into the true storages."""
        for k in range(len(self._pairs)):
            self._turn(k, exchanged=True)

    def put_back(self) -> None:
        """All numbers where they were; what is left of it, where it was broken off."""
        self._finish()
        for k, exchanged in enumerate(self._is_exchanged):
            if exchanged:
                self._turn(k, exchanged=False)

    def _turn(self, k: int, *, exchanged: bool) -> None:
        one, other = self._pairs[k]
        spare = self._spare[one.device][:, : one.numel()]
        spare[0].copy_(one)
        spare[1].copy_(other)
        self._begun = (k, exchanged)
        self._finish()

    def _finish(self) -> None:
        """Write the piece that was begun; to do so twice is to do so once."""
        if self._begun is None:
            return
        k, exchanged = self._begun
        one, other = self._pairs[k]
        spare = self._spare[one.device][:, : one.numel()]
        one.copy_(spare[1])
        other.copy_(spare[0])
        self._is_exchanged[k] = exchanged
        self._begun = None


def pieces(storage: torch.UntypedStorage, size: int) -> tuple[Tensor, ...]:
    """The bytes of a storage, so many at a time."""
    flat = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    found: tuple[Tensor, ...] = flat.split(size)
    return found


def _view(storage: torch.UntypedStorage, like: Tensor) -> Tensor:
    view = torch.empty(0, dtype=like.dtype, device=like.device)
    view.set_(storage, like.storage_offset(), like.size(), like.stride())
    if like.is_conj():
        view = torch._conj(view)
    if like.is_neg():
        view = torch._neg_view(view)
    return view


class SameDraws:
    """Where the random numbers of a kernel begin, so that a twin draws the same."""

    def __init__(self, generator: torch.Generator | None) -> None:
        self._generator = generator
        self._state = torch.get_rng_state() if generator is None else generator.get_state()

    def rewind(self) -> None:
        """Draw them again."""
        if self._generator is None:
            torch.set_rng_state(self._state)
        else:
            self._generator.set_state(self._state)
