"""The records of a batch, and other records to put in their place."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from inspect import isroutine
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn


class Again(Protocol):
    """Makes a batch once more, of other records in place of those that are not kept."""

    def scaled(self, kept: list[bool], scale: float) -> Any:
        """With the numbers of the others scaled: the same structure."""
        ...

    def replaced(self, kept: list[bool], longest: bool) -> Any:
        """With the longest or the shortest of some records in place of the others."""
        ...


_DEEPEST = 6
_FEW_ROWS = 16
_LARGER = 4.0  # how much larger than the largest record another one may be
_SMALLER = 0.25  # of the smallest one: equal records would not move the mean of those that share an id
_EXTREME = 1e6
_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
_PLAIN = (type(None), bool, type)
_READABLE = (str, bytes, int, float, complex, np.ndarray, np.generic)


@dataclass(frozen=True)
class Records:
    """What a batch of `size` samples is made of: its tensors, and whether there is anything else that may hold data."""

    size: int
    tensors: tuple[Tensor, ...]
    opaque: bool
    hidden: bool  # an object that cannot be looked into
    arrays: tuple[Tensor, ...] = ()  # copies of its arrays
    numbers: tuple[Any, ...] = ()  # plain ones, of Python and of NumPy

    @classmethod
    def of(cls, batch: Any, size: int) -> Records:
        """Look into tensors, mappings, sequences and objects; strings, arrays and numbers are opaque."""
        found = list(_leaves(batch, _DEEPEST))
        tensors = tuple(leaf for leaf in found if isinstance(leaf, Tensor))
        others = [leaf for leaf in found if not isinstance(leaf, Tensor)]
        arrays = tuple(torch.from_numpy(leaf.copy()) for leaf in others if _is_array(leaf))
        numbers = tuple(leaf for leaf in others if isinstance(leaf, (int, float, np.number)))
        hidden = any(not isinstance(leaf, _READABLE) for leaf in others)
        return cls(size, tensors, bool(others), hidden, arrays, numbers)

    @property
    def rows(self) -> tuple[Tensor, ...]:
        """The tensors with one row per sample."""
        return tuple(t for t in self.tensors if t.layout is torch.strided and t.dim() and t.shape[0] == self.size)

    def extremes(self) -> tuple[int, int]:
        """The largest and the smallest sample."""
        score = self._magnitudes()
        return int(score.argmax()), int(score.argmin())

    def _magnitudes(self) -> Tensor:
        """How large each sample is: by magnitude, by length, by label, whatever the tensors show."""
        score = torch.zeros(self.size, dtype=torch.float64, device="cpu")
        for tensor in self.rows:
            flat = tensor.detach().cpu().reshape(self.size, -1)
            if not flat.shape[1] or flat.is_complex():
                continue
            flat = flat.double().nan_to_num(0, 0, 0)
            for values in (flat.abs().amax(1), (flat != 0).sum(1).double(), flat.sum(1)):
                spread = values.std(correction=0)
                if bool(spread > 0):
                    score += (values - values.mean()) / spread
        return score

    @property
    def ragged(self) -> bool:
        """Whether some values are not in rows of one per sample: packed graphs, rows of users."""
        rows = {id(tensor) for tensor in self.rows}
        return any(tensor.dim() and id(tensor) not in rows for tensor in self.tensors)

    def has_other_rows(self, draw: int, again: Again) -> bool:
        """Whether the first axis, though as long as the batch, is not the samples': as many steps of time."""
        square = [k for k, t in enumerate(self.tensors) if t.dim() > 1 and t.shape[0] == t.shape[1] == self.size]
        if not square or unreadable(again, self):
            return False
        half = self._half(draw)
        others = Records.of(again.scaled((~half).tolist(), _LARGER), self.size).tensors
        return any(not same(self.tensors[k][~half], others[k][~half]) for k in square)

    def _half(self, draw: int) -> Tensor:
        """A random half of the samples, so that no shift along the batch stays inside it for long."""
        order = torch.randperm(self.size, generator=torch.Generator().manual_seed(draw), device="cpu")
        half = torch.zeros(self.size, dtype=torch.bool, device="cpu")
        half[order[: self.size // 2]] = True
        return half

    def _related(self, replaced: Tensor) -> int:
        """The largest sample that stays, best with replaced ones on both sides: they will share its integers.

        What a program joins by an id is then joined for certain, and so is the first or the last record of an id.
        """
        places = torch.arange(self.size, device="cpu")
        among = ~replaced & (places > places[replaced].min()) & (places < places[replaced].max())
        score = self._magnitudes().where(among if bool(among.any()) else ~replaced, -torch.inf)
        return int(score.argmax())

    def changes(self, number: int, draw: int = 0, rigid: bool = False) -> list[Change]:
        """Other records for a check: all forms at the first one, then two at a time, and a rigid one on demand."""
        if self.size < 2:
            return []
        high, low = self.extremes()
        if high == low:
            high, low = 0, self.size - 1
        half = self._half(draw)
        related = self._related(half)
        some, rest = (f"{int(h.sum())} of {self.size} samples were other records" for h in (half, ~half))
        forms = [
            Change.of(~half, related, some, scale=_LARGER),
            Change.of(half, low, rest, flat=True),
            Change.of(
                torch.arange(self.size, device="cpu") != high,
                low,
                f"sample {high} was another record",
                scale=_SMALLER,
                losses_only=True,
            ),
            Change.of(~half, related, some, scale=_LARGER, rigid=True),
            Change.of(half, low, rest, flat=True, rigid=True),
        ]
        first, second = forms[number % 2], replace(forms[1 + number % 2], losses_only=True)
        chosen = forms[:3] if number == 0 else [first, second]
        if number in (1, 2):
            chosen = [*chosen, self._wild_change(half, math.nan if number == 1 else _EXTREME)]
        if rigid:
            chosen = [*chosen, forms[3 + number % 2]]
        return [change for change in chosen if any(not same(change.applied(t), t) for t in self.rows)]

    def _wild_change(self, half: Tensor, scale: float) -> Change:
        """Half of the samples hold numbers that no record holds: a guard that looks at all samples does something."""
        what = "not numbers (NaN)" if math.isnan(scale) else "a million times as large"
        what = f"{int(half.sum())} of {self.size} samples were {what}"
        change = Change.of(~half, 0, what, scale=scale, losses_only=True, wild=True)
        return replace(change, source=torch.arange(self.size, device="cpu"))

    def ragged_changes(self, draw: int, again: Again) -> list[Change]:
        """The same for values that are not in rows: the records' own numbers are scaled, and collated once more."""
        half = self._half(draw)
        found = []
        for kept, rigid in ((~half, False), (half, False), (~half, True)):
            tensors = Records.of(again.scaled(kept.tolist(), _LARGER), self.size).tensors
            if [t.shape for t in tensors] != [t.shape for t in self.tensors]:
                continue
            others = {id(ours): theirs for ours, theirs in zip(self.tensors, tensors, strict=True)}
            if any(not same(others[id(t)], t) for t in self.tensors):
                what = f"{self.size - int(kept.sum())} of {self.size} samples were other records"
                change = Change.of(kept, 0, what, rigid=rigid)
                found.append(replace(change, others=others))
        return found

    def reads_as(self, batch: Any) -> bool:
        """Whether another batch holds the same tensors."""
        others = Records.of(batch, self.size).tensors
        if len(others) != len(self.tensors):
            return False
        return all(a.shape == b.shape and same(a, b) for a, b in zip(self.tensors, others, strict=True))


def same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one shape hold the same numbers, NaN where NaN is."""
    if a is b or a.layout is not torch.strided:
        return True
    if a.dtype == b.dtype and a.is_floating_point() and torch.equal(a, b):  # in one pass over the memory
        return True
    return bool(((a == b) | ((a != a) & (b != b))).all())


def same_rows(a: Tensor, b: Tensor, rows: Tensor) -> bool:
    """The same for some rows of two tensors; few are compared where they are."""
    if rows.numel() <= _FEW_ROWS:
        return all(same(a[k], b[k]) for k in rows.tolist())
    rows = rows.to(a.device)
    return same(a[rows], b[rows])


def _leaves(value: Any, depth: int) -> Iterator[Any]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (*_PLAIN, nn.Module)) or isroutine(value):
        return
    elif depth and isinstance(value, Mapping):
        for item in value.values():
            yield from _leaves(item, depth - 1)
    elif depth and isinstance(value, (list, tuple, set)):
        for item in value:
            yield from _leaves(item, depth - 1)
    elif depth and (is_dataclass(value) or getattr(value, "__dict__", None) or hasattr(value, "__slots__")):
        for item in _attributes(value):
            yield from _leaves(item, depth - 1)
    else:
        yield value


def _attributes(value: Any) -> Iterator[Any]:
    yield from getattr(value, "__dict__", {}).values()
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                yield getattr(value, name)


@dataclass(frozen=True)
class Change:
    """Sample i becomes a copy of sample `source[i]`; the samples in `kept` stay themselves.

    A `rigid` change keeps the discrete structure of the batch, for programs whose shapes follow the records: integers
    and what is computed from them stay as they are; only where a table is looked up by them are others read. So does a
    wild one, apart from truth values.
    """

    source: Tensor
    kept: Tensor
    scale: float = 1.0  # of floating point values
    flat: bool = False  # integers are zero: an empty record, the first class
    rigid: bool = False
    losses_only: bool = False  # gradients are left to another change
    wild: bool = False  # numbers that no record holds: finite losses that move are mixing, all else says nothing
    what: str = field(default="", compare=False)
    others: Mapping[int, Tensor] | None = field(default=None, compare=False, repr=False)  # by the tensor's identity

    @classmethod
    def of(cls, kept: Tensor, by: int, what: str, **options: Any) -> Change:
        """All samples that are not kept become copies of one record."""
        everybody = torch.arange(kept.numel(), device="cpu")
        return cls(torch.where(kept, everybody, by), everybody[kept], what=what, **options)

    def applied(self, tensor: Tensor) -> Tensor:
        """The tensor with other records; itself where its first axis is not the samples'."""
        if self.others is not None:
            return self.others.get(id(tensor), tensor)
        if tensor.layout is not torch.strided or not tensor.dim() or tensor.shape[0] != self.source.numel():
            return tensor
        other = tensor.detach()[self.source.to(tensor.device)]
        changed = torch.ones(self.source.numel(), dtype=torch.bool, device="cpu")
        changed[self.kept] = False
        changed = changed.to(tensor.device)
        if tensor.is_floating_point() or tensor.is_complex():
            if self.scale != 1:
                other[changed] *= self.scale
        elif self.flat and other.dtype not in _UNSIGNED:  # torch has few kernels for these
            other[changed] = 0
        return other


def some(samples: Sequence[int]) -> str:
    """A few samples by number, as a message names them."""
    few = ", ".join(map(str, samples[:4]))
    return f"sample{'s' if len(samples) != 1 else ''} {few}{' and others' if len(samples) > 4 else ''}"


def unreadable(again: Again, records: Records) -> str:
    """Why the records of a batch cannot be read a second time; empty when they can, and are the same then."""
    try:
        return "" if records.reads_as(again.scaled([True] * records.size, 1.0)) else "they are others the second time"
    except Exception as error:  # whatever a data set and its collate function do not do twice
        return f"{type(error).__name__} the second time"


def scaled(value: Any, scale: float) -> Any:
    """A record with its floating point numbers scaled: another record of the same structure."""
    if isinstance(value, Tensor):
        return value * scale if value.is_floating_point() else value
    if isinstance(value, np.ndarray):
        return value * value.dtype.type(scale) if value.dtype.kind == "f" else value
    if isinstance(value, Mapping):
        return type(value)({key: scaled(item, scale) for key, item in value.items()})  # type: ignore[call-arg]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(scaled(item, scale) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(scaled(item, scale) for item in value)
    if isinstance(value, float):
        return value * scale
    other = copied(value)
    for leaf in _leaves(other, _DEEPEST):
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            leaf.detach().mul_(scale)
        elif isinstance(leaf, np.ndarray) and leaf.dtype.kind == "f":
            leaf *= leaf.dtype.type(scale)
    return other


def copied(value: Any) -> Any:
    """A copy of a record with its own numbers alone, where they are a view of the table of all records."""
    tensors = {id(leaf): leaf.detach().clone() for leaf in _leaves(value, _DEEPEST) if isinstance(leaf, Tensor)}
    return copy.deepcopy(value, tensors)


def magnitude(record: Any) -> tuple[int, float]:
    """How long a record is, and how large: the number of its values that are not zero, and the largest of them."""
    values = [
        torch.as_tensor(leaf).detach().double().flatten() for leaf in _leaves(record, _DEEPEST) if _is_numeric(leaf)
    ]
    texts = sum(len(leaf) for leaf in _leaves(record, _DEEPEST) if isinstance(leaf, (str, bytes)))
    flat = torch.cat([*values, torch.zeros(1, dtype=torch.float64, device="cpu")])
    return texts + int((flat != 0).sum()), float(flat.abs().max())


def _is_numeric(leaf: Any) -> bool:
    return isinstance(leaf, (Tensor, int, float)) or _is_array(leaf)


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biuf" and leaf.dtype.isnative
