"""Memory that was there before a batch was drawn: of the model, of declared constants, of the user's program.

A value is constant by where it comes from, never by its numbers. Memory that a forward pass did not make is constant
when it was there before the first batch, or was made without the batch in a pass that was watched, and holds what it
held then. What the model itself was seen to write without the batch may change. All other memory is of unknown origin,
whatever became of the pass in which it was made.

What memory holds is compared by checksums: a cryptographic hash where there is no more than a row of it. What is longer
is read in rows of 1,024 words of 64 bits. Four sums of each row are
kept, modulo 2^64: of its words and of their upper halves, each times two sequences of odd numbers that are drawn once
for the process. A product modulo 2^64 forgets as many upper bits of its number as the other factor ends in zeros. So
the words alone would not do: two signs of float64 that change cancel. A difference of halves ends in at most 31 zeros.

- One word that changed is always seen: an odd number times a difference is not zero.
- Two words that were exchanged are always seen: the numbers of a sequence differ modulo 2^33.
- Anything else is missed with a chance of at most 2^-64, whatever the data are: 2^-32 for each of two sequences, whose
  numbers have 63 drawn bits, less the 31.

The sums are whole numbers, so their order does not matter. They are compared within a process and written nowhere.
"""

from __future__ import annotations

import copy
import ctypes
import gc
import hashlib
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import compress, islice
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.jit import _state
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.data import Dataset

from clipwise.engine import backing, constant_tensors, memory_of
from clipwise.entropy import Entropy
from clipwise.errors import NotSeparable
from clipwise.private.evidence.held_records import HeldRecords, parts
from clipwise.private.evidence.traffic import CARRIED, tensors_in
from clipwise.private.evidence.twin import pieces
from clipwise.private.evidence.watch import Watch

_PIECE = 1 << 20  # bytes that stay in the cache
_ROW = 1024  # words
_SEQUENCES = 2
_SHORT = 33  # bits
_DEEPEST = 3
_Key: TypeAlias = tuple[str, int]  # a tensor of the model: its name, and which of several it is
_MOST = 100_000  # tensors of the process that are learned, some seconds; what is not known is refused


@dataclass(frozen=True)
class _Held:
    """A storage and what it held when it was last looked at."""

    storage: StorageWeakRef  # its address is not given out again while this is held
    content: object
    count: int | None = None  # of a number without axes
    step: int = 0


@dataclass(frozen=True)
class _Begun:
    """What a run that trains a model knows of memory from before its first batch."""

    model: weakref.ref[nn.Module]
    held: dict[int, _Held]


_BEGUN: dict[int, _Begun] = {}


@dataclass(frozen=True)
class _Change:
    """What a pass left in a tensor of the model: other memory than before, or the same with something else in it."""

    name: str
    tensor: Tensor
    is_saved: bool
    marks: int
    is_out_of_sight: bool  # no kernel wrote it
    was_read: bool  # as a constant, since the model rewrites it


def checksum(storage: torch.UntypedStorage) -> bytes:
    """Of all bytes of a storage, wherever a tensor begins in it.

    >>> same, swapped = torch.arange(9), torch.tensor([0, 2, 1, 3, 4, 5, 6, 7, 8])
    >>> checksum(torch.arange(9).untyped_storage()) == checksum(same.untyped_storage())
    True
    >>> checksum(swapped.untyped_storage()) == checksum(same.untyped_storage())
    False
    """
    size = storage.nbytes()
    if size and not storage.data_ptr():
        raise RuntimeError("a storage without memory")
    found = hashlib.blake2b(size.to_bytes(8, "little"), digest_size=16)
    if size <= 8 * _ROW and storage.device.type == "cpu":
        found.update(ctypes.string_at(storage.data_ptr(), size))
        return found.digest()
    sums = [each for piece in pieces(storage, _PIECE) for rows in _rows(piece) for each in _sums(rows)]
    if sums:
        found.update(torch.cat(sums).cpu().numpy().tobytes())
    return found.digest()


def content(tensor: Tensor) -> object:
    """What a tensor's memory holds, of a sparse one also the places; if it cannot be read, how often it was written."""
    try:
        return tuple(checksum(part.untyped_storage()) for part in parts(tensor))
    except (NotImplementedError, RuntimeError):
        return tensor._version


def _rows(piece: Tensor) -> Iterator[Tensor]:
    """The words of a piece, (rows, words): whole rows, then what is left as a shorter one, filled up with zeros."""
    whole = piece.numel() // (8 * _ROW) * 8 * _ROW
    if whole:
        yield piece[:whole].view(torch.int64).view(-1, _ROW)
    if whole < piece.numel():
        yield F.pad(piece[whole:], (0, -piece.numel() % 8)).view(torch.int64)[None]


def _sums(words: Tensor) -> Iterator[Tensor]:
    """Both halves of the words of each row times each sequence of numbers, (rows,) each."""
    for half, numbers in zip((words, words >> 32), _numbers(words.device)[:, :, : words.shape[1]], strict=True):
        for sequence in numbers:  # a product of whole numbers has no kernel on other devices
            yield torch.mv(half, sequence) if words.is_cpu else (half * sequence).sum(1)


@cache
def _numbers(device: torch.device) -> Tensor:
    """What the words of a row are multiplied with, (halves, sequences, words)."""
    return torch.from_numpy(_drawn()).to(device)


@cache
def _drawn() -> np.ndarray:
    while True:
        drawn = np.frombuffer(Entropy().take(2 * _SEQUENCES * _ROW * 8, "content"), dtype=np.int64) | 1
        if len(np.unique(drawn % (1 << _SHORT))) == drawn.size:
            return drawn.reshape(2, _SEQUENCES, _ROW)


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
        self._held: dict[int, _Held] = {}
        self.has_looked = False
        """Whether the process was looked at."""
        self._rewriting: set[_Key] = set()  # what the model itself was seen to rewrite without the batch
        self._foreign: set[_Key] = set()  # and what was seen to hold anything else, once
        self._records = HeldRecords()
        self._step = 0
        self._declared: set[int] = set()
        self._rewritten: set[int] = set()
        self._trained: dict[int, StorageWeakRef] = {}  # at any time: only released gradients changed it
        self._met: set[_Key] = set()  # what the model held when some pass began; a cache may grow between passes
        self._before: dict[_Key, tuple[int, object]] = {}
        self._begun: dict[int, object] = {}  # the same by memory
        self._numbers: set[int] | None = None  # without axes, that were there when a pass began
        self._has_left = False  # a pass was watched to its end
        self._changes: list[_Change] = []
        for _, tensor, _ in self._tensors():
            self._learn(tensor)

    def add_data(self, dataset: Dataset[Any]) -> str:
        """The memory of a data set's records is private, however it is reached. Says if not all of it was found."""
        self._records = HeldRecords(dataset, self.model.modules())
        return "" if self._records.is_whole else "the memory of the data set: it refers to too many objects"

    def look_around(self, step: int) -> None:
        """Before the first batch, once: all memory of the process. What is not there yet may come from a batch.

        A run that is resumed has had its first batch: it knows what the run of this process knew whose model it trains.
        """
        if self.has_looked:
            return
        self.has_looked, self._step = True, step
        known = _BEGUN.get(id(self.model)) if step else None
        if known is not None and known.model() is self.model:
            self._held = {**known.held, **self._held}
        else:
            self._look()
        self._keep()

    def _look(self) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            for tensor in islice(filter(self._is_new, _tensors_of_the_process()), _MOST):
                try:
                    self._learn(tensor)
                except Exception:  # whatever the tensors of others do not answer
                    continue

    def _is_new(self, tensor: Tensor) -> bool:
        """Whether a tensor is to be learned: those of records are not, however many they are."""
        try:
            if self.is_record(tensor):
                return False
            held = self._held.get(memory_of(tensor))
            return held is None or (held.count is not None and self._stayed(held, tensor))
        except Exception:  # whatever the tensors of others do not answer
            return False

    def _keep(self) -> None:
        """For a run of this process that continues this one."""
        place = id(self.model)
        _BEGUN[place] = _Begun(weakref.ref(self.model, lambda _: _BEGUN.pop(place, None)), self._held)

    def apart(self) -> Memory:
        """Another one that begins with what this one knows, for passes that are not of the run."""
        found = copy.copy(self)
        found._held, found._trained = dict(self._held), dict(self._trained)
        found._rewriting, found._foreign, found._met = set(self._rewriting), set(self._foreign), set(self._met)
        return found

    def trains(self, parameters: Iterable[Tensor]) -> None:
        """Parameters that are trained: what they hold was released, also when they are frozen later."""
        for parameter in parameters:
            self._trained.setdefault(memory_of(parameter), StorageWeakRef(parameter.untyped_storage()))

    def begin(self, step: int) -> None:
        """Before a forward pass: what the model holds now."""
        self.look_around(step)
        self._step, self.notes = step, []
        self._declared = {memory_of(tensor) for tensor in constant_tensors(self._constants)}
        self.trains(p for p in self.model.parameters() if p.requires_grad)
        self._before = {key: (memory_of(t), content(t)) for key, t, _ in self._tensors()}
        self._begun = dict(self._before.values())
        self._numbers = _numbers_there() if has_scripts() else None
        own = self._rewriting - self._foreign
        names = {name for name, _ in own} - {name for name, _ in self._foreign}
        self._rewritten = {
            memory
            for key, (memory, _) in self._before.items()
            if key in own or (key[0] in names and key not in self._met)
        }
        self._met.update(self._before)

    def familiar(self, tensor: Tensor, in_script: bool = False) -> bool:
        """Whether memory that the forward pass did not make is constant; `in_script`: a kernel of TorchScript reads it.

        TorchScript holds numbers where Python does not look, and makes some out of sight, which it may give back. Of
        these, what Python did not know when the pass began is noted.
        """
        memory = memory_of(tensor)
        if memory in self._declared or memory in self._trained:
            return True
        if self.is_record(tensor):
            return False
        held = self._held.get(memory)
        if memory in self._rewritten and self._begun[memory] == content(tensor):
            return True
        if held is not None and self._stayed(held, tensor):
            return True
        if tensor.dim() or held is not None:
            return False
        if in_script and tensor.is_floating_point() and not self._has_left:  # nothing can be of an earlier batch
            self._learn(tensor)
            return True
        is_new = self._numbers is not None and memory not in self._numbers
        if is_new or (in_script and not tensor.is_floating_point()):
            self.notes.append("a number of unknown origin in TorchScript")
            return True
        return False

    def _stayed(self, held: _Held, tensor: Tensor) -> bool:
        """Whether memory holds what it held, or a count of steps."""
        if held.content == content(tensor):
            return True
        return held.count is not None and _count(tensor) == held.count + self._step - held.step

    def is_record(self, tensor: Tensor) -> bool:
        """Whether a tensor reads the memory of the data set's records."""
        return self._records.meets(tensor)

    def _tensors(self) -> Iterator[tuple[_Key, Tensor, bool]]:
        """The tensors of the model by name and number, since a list has several, and whether they are saved with it."""
        seen: dict[str, int] = {}
        for name, tensor, is_saved in held_by(self.model):
            seen[name] = number = seen.get(name, -1) + 1
            yield (name, number), tensor, is_saved

    def _learn(self, tensor: Tensor) -> None:
        try:
            storage = StorageWeakRef(backing(tensor).untyped_storage())
        except (NotImplementedError, RuntimeError):
            return
        self._held[memory_of(tensor)] = _Held(storage, content(tensor), _count(tensor), self._step)

    def leave(self, watch: Watch) -> None:
        """At the end of a pass, whatever comes of it: what it made without the batch is constant from then on."""
        self._has_left = True
        self._numbers = None  # what the backward pass makes is not of TorchScript
        watch.settle()
        self._held = {memory: held for memory, held in self._held.items() if not held.storage.expired()}
        for tensor in watch.constants_alive():
            self._learn(tensor)
        for tensor in watch.records.tensors:  # they were there before, where batches are the user's own
            self._held.pop(memory_of(tensor), None)
        self._changes = [self._noted(*found, watch) for found in self._tensors() if self._has_changed(*found)]
        self._keep()

    def _has_changed(self, key: _Key, tensor: Tensor, is_saved: bool) -> bool:
        return (memory_of(tensor), content(tensor)) != self._before.get(key)

    def _noted(self, key: _Key, tensor: Tensor, is_saved: bool, watch: Watch) -> _Change:
        """What became of a tensor of the model. One that the model itself writes without the batch may change again."""
        memory, before = memory_of(tensor), self._before.get(key)
        marks, is_same = watch.held_marks(memory), before is not None and before[0] == memory
        by_kernels = memory in watch.written or watch.made_here(memory)
        if by_kernels and not marks:
            self._rewriting.add(key)
            self._learn(tensor)
        known = by_kernels or (not is_same and not marks and self.familiar(tensor))
        if marks or not known:
            self._foreign.add(key)
        is_out_of_sight = not marks and not known and (is_saved or is_same or before is None)
        was_read = before is not None and before[0] in self._rewritten and watch.knows(before[0])
        return _Change(key[0], tensor, is_saved, marks, is_out_of_sight, was_read)

    def end(self, watch: Watch) -> None:
        """Refuse what the batch was written into, in the pass that was left."""
        for change in self._changes:
            if change.is_out_of_sight:
                raise NotSeparable(_UNSEEN.format(name=change.name))
            if change.marks and (change.was_read or (change.is_saved and change.marks & CARRIED)):
                raise NotSeparable(_CARRIED_OVER.format(name=change.name))
            if change.is_saved and change.marks:
                _demand_same(change.name, change.tensor, watch)


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
    able = [twin for twin in watch.twins if not (twin.broken or twin.change.wild)]
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


def _tensors_of_the_process() -> Iterator[Tensor]:
    """Every tensor that Python knows of."""
    objects, kinds = gc.get_objects(), set(map(id, _with_subclasses(Tensor)))
    return compress(objects, map(kinds.__contains__, map(id, map(type, objects))))


def has_scripts() -> bool:
    """Whether the program has functions in TorchScript."""
    return bool(_state._jit_caching_layer)


def _numbers_there() -> set[int]:
    with torch._C.DisableTorchFunctionSubclass():
        found = [tensor for tensor in _tensors_of_the_process() if _is_number(tensor)]
        return set(map(memory_of, found))


def _is_number(tensor: Tensor) -> bool:
    try:
        return not tensor.dim()
    except Exception:  # whatever the tensors of others do not answer
        return False


def _with_subclasses(kind: type[Tensor]) -> Iterator[type[Tensor]]:
    yield kind
    for subclass in kind.__subclasses__():
        yield from _with_subclasses(subclass)
