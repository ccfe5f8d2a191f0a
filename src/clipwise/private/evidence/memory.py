"""Memory that was there before a batch was drawn: of the model, of declared constants, of the user's program.

A value is constant by where it comes from, never by its numbers. Memory that a forward pass did not make is constant
when it was there before the first batch and holds what it held then, or what the model itself wrote without the batch.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.data import Dataset

from clipwise.engine import backing, constant_tensors, memory_of
from clipwise.errors import NotSeparable
from clipwise.private.evidence.traffic import BATCH, CARRIED, tensors_in
from clipwise.private.evidence.watch import Watch

_DEEPEST = 3
_MOST = 100_000  # records of a list whose memory is known again


@dataclass
class _Held:
    """A storage, what it held when it was last looked at, and what it is called."""

    storage: StorageWeakRef
    sum: int
    name: str
    count: int | None = None  # of an integer without axes
    step: int = 0


def checksum(tensor: Tensor) -> int:
    """The sum of all 64-bit words of a tensor's memory, modulo 2^64."""
    storage = tensor.untyped_storage()
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
    words = flat.numel() // 8 * 8
    head = int(flat[:words].view(torch.int64).sum()) if words else 0
    return head ^ int(flat[words:].to(torch.int64).sum()) << 32


def held_by(model: nn.Module) -> Iterator[tuple[str, Tensor, bool]]:
    """Every tensor of a model with its name, and whether it is saved with it (parameters and buffers)."""
    for prefix, module in model.named_modules():
        dot = f"{prefix}." if prefix else ""
        for kind in (module._parameters, module._buffers):
            for name, tensor in kind.items():
                if tensor is not None:
                    yield dot + name, tensor, True
        for name, value in vars(module).items():
            if name not in ("_parameters", "_buffers", "_modules"):
                for tensor in tensors_in(value, _DEEPEST):
                    yield dot + name, tensor, False


class Memory:
    """Answers whether memory from before a forward pass is constant, and notices what the pass wrote into the model."""

    def __init__(self, model: nn.Module, constants: Iterable[Tensor | nn.Module]) -> None:
        self.model, self._constants = model, tuple(constants)
        self.notes: list[str] = []
        self.look_again = False  # something changed while nobody watched: watch the next pass too
        self._held: dict[int, _Held] = {}
        self._made: dict[int, StorageWeakRef] = {}  # by watched passes, without the batch
        self._updating: set[str] = set()  # names that the model itself was seen to rewrite without the batch
        self._records: list[tuple[int, int]] = []  # addresses of the data set's own memory, in order
        self._first, self._consecutive, self._step, self._hidden = True, True, 0, False
        self._declared: set[int] = set()
        self._trained: set[int] = set()
        self._before: dict[str, tuple[int, int]] = {}
        for name, tensor, _ in held_by(model):
            self._learn(tensor, name)

    def add_data(self, dataset: Dataset[Any]) -> None:
        """Memory with a row per record of the data set is private, however it is reached."""
        self._records = _merged(_record_memory(dataset, len(dataset), _DEEPEST))  # type: ignore[arg-type]

    def begin(self, step: int, consecutive: bool, hidden: bool = False) -> None:
        """Before a forward pass: what the model holds now.

        `consecutive`: the pass before was watched as well. `hidden`: the batch has parts that cannot be looked into.
        """
        self._hidden, self.notes = hidden, []
        self._step, self._consecutive, self.look_again = step, consecutive, False
        self._declared = {memory_of(tensor) for tensor in constant_tensors(self._constants)}
        self._trained = {memory_of(p) for p in self.model.parameters() if p.requires_grad}
        self._before = {name: (memory_of(t), _sum(t)) for name, t, _ in held_by(self.model)}

    def familiar(self, tensor: Tensor) -> bool:
        """Whether memory that the forward pass did not make is constant."""
        memory = memory_of(tensor)
        if memory in self._declared or memory in self._trained:
            return True
        if self._records and self.is_record(tensor):
            return False
        held = self._held.get(memory)
        known = held is not None and not held.storage.expired()
        if held is not None and known and self._stayed(held, tensor):
            return True
        made = self._made.get(memory)
        if (self._first and not known and not self._hidden) or (made is not None and not made.expired()):
            self._learn(tensor, f"a tensor of shape {tuple(tensor.shape)} from outside the model")
            return True
        if not tensor.dim() and not tensor.is_floating_point():  # TorchScript makes such out of sight
            self.notes.append("a whole number of unknown origin")
            return True
        if not self._consecutive:
            self.look_again = True
            name = held.name if held is not None else f"a tensor of shape {tuple(tensor.shape)}"
            self.notes.append(f"{name} changed while nobody watched")
            self._learn(tensor, name)
            return True
        return False

    def _stayed(self, held: _Held, tensor: Tensor) -> bool:
        """Whether memory holds what it held, what the model itself writes without the batch, or a count of steps."""
        if held.sum == _sum(tensor) or held.name in self._updating:
            return True
        return held.count is not None and _count(tensor) == held.count + self._step - held.step

    def is_record(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in the data set's own memory."""
        address = tensor.data_ptr() if tensor.layout is torch.strided else 0
        place = bisect(self._records, address, key=lambda ends: ends[0])
        return place > 0 and address < self._records[place - 1][1]

    def _learn(self, tensor: Tensor, name: str) -> None:
        try:
            storage = StorageWeakRef(backing(tensor).untyped_storage())
        except (NotImplementedError, RuntimeError):
            return
        self._held[memory_of(tensor)] = _Held(storage, _sum(tensor), name, _count(tensor), self._step)

    def end(self, watch: Watch) -> None:
        """After a forward pass: refuse what the batch was written into, and learn what the model holds now."""
        self._first = False
        for name, tensor, saved in held_by(self.model):
            memory = memory_of(tensor)
            now = (memory, _sum(tensor))
            before = self._before.get(name)
            if now == before:
                continue
            marks = watch.held_marks(memory)
            if marks & (BATCH | CARRIED):
                if saved and marks & CARRIED:
                    raise NotSeparable(_CARRIED_OVER.format(name=name))
                if saved:
                    _demand_same(name, tensor, watch)
                continue  # an attribute that holds the batch is unknown memory to the next pass
            if memory == (before or now)[0] and memory not in watch.written and not watch.made_here(memory):
                raise NotSeparable(_UNSEEN.format(name=name))
            self._updating.add(name)
            self._learn(tensor, name)
        self._made = dict(watch.constants_alive())


_UNSEEN = (
    "{name!r} was changed during the forward pass by something other than torch (numpy, ctypes): it may hold values of "
    "the private batch, without noise. Update it with torch operations that do not read the batch, or outside training."
)

_CARRIED_OVER = (
    "the forward pass writes memory of unknown origin into {name!r}: it may hold values of earlier batches, which are "
    "saved with the model and used by later steps, without clipping and noise. Typical causes: a statistic of a batch "
    "that is kept until the next step, a queue. If it holds no data of records (a schedule, an average of released "
    "weights), declare it: Private(..., constants=[...])."
)


def _demand_same(name: str, tensor: Tensor, watch: Watch) -> None:
    """Refuse memory of the model that was computed from the batch, unless other records leave it the same."""
    able = [twin for twin in watch.twins if not twin.broken]
    if able and all(torch.equal(twin.of(tensor), tensor) for twin in able):
        return
    raise NotSeparable(
        f"the forward pass writes values computed from the batch into {name!r}, shape {tuple(tensor.shape)}: they are "
        "saved with the model and used by later steps, without clipping and noise. Typical causes: running statistics "
        "(BatchNorm, observers of quantization), codebooks with moving averages, memory banks, queues, initialization "
        "by the first batch. Put that part in eval mode, initialize it from public data, or learn it by gradients."
    )


def _count(tensor: Tensor) -> int | None:
    """The value of a whole number without axes: a counter, perhaps."""
    if tensor.dim() or tensor.is_complex():
        return None
    value = float(tensor.detach())
    return int(value) if value.is_integer() else None


def _sum(tensor: Tensor) -> int:
    try:
        return checksum(backing(tensor))
    except (NotImplementedError, RuntimeError):
        return tensor._version


def _merged(intervals: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same addresses as intervals that do not overlap, in order."""
    found: list[tuple[int, int]] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def _record_memory(value: Any, length: int, depth: int) -> Iterator[tuple[int, int]]:
    if isinstance(value, Tensor):
        if value.layout is torch.strided and value.dim() and value.shape[0] == length > 1:
            start = value.untyped_storage().data_ptr()
            yield start, start + value.untyped_storage().nbytes()
    elif isinstance(value, np.ndarray):
        if value.ndim and value.shape[0] == length > 1 and value.nbytes:
            yield value.__array_interface__["data"][0], value.__array_interface__["data"][0] + value.nbytes
    elif depth and isinstance(value, (list, tuple)):
        if len(value) == length > 1:
            for tensor in tensors_in(value[:_MOST], _DEEPEST):
                yield from _record_memory(tensor[None].expand(length, *tensor.shape), length, depth)
        elif len(value) <= 64:
            for item in value:
                yield from _record_memory(item, length, depth - 1)
    elif depth and hasattr(value, "__dict__"):
        inner = getattr(value, "dataset", None)
        length = len(inner) if inner is not None and hasattr(inner, "__len__") else length
        for item in vars(value).values():
            yield from _record_memory(item, length, depth - 1)
