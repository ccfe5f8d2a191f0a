"""The records of a batch, and other records to put in their place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

_DEEPEST = 6
_PLAIN = (type(None), bool, type)


@dataclass(frozen=True)
class Records:
    """What a batch of `size` samples is made of: its tensors, and whether there is anything else that may hold data."""

    size: int
    tensors: tuple[Tensor, ...]
    opaque: bool

    @classmethod
    def of(cls, batch: Any, size: int) -> Records:
        """Look into tensors, mappings, sequences and objects; strings, arrays and numbers are opaque."""
        found = list(_leaves(batch, _DEEPEST))
        tensors = tuple(leaf for leaf in found if isinstance(leaf, Tensor))
        return cls(size, tensors, any(not isinstance(leaf, Tensor) for leaf in found))

    @property
    def rows(self) -> tuple[Tensor, ...]:
        """The tensors with one row per sample."""
        return tuple(t for t in self.tensors if t.layout is torch.strided and t.dim() and t.shape[0] == self.size)

    def extremes(self) -> tuple[int, int]:
        """The largest and the smallest sample: by magnitude, by length, by label, whatever the tensors show."""
        score = torch.zeros(self.size, dtype=torch.float64)
        for tensor in self.rows:
            flat = tensor.detach().cpu().reshape(self.size, -1)
            if not flat.shape[1] or flat.is_complex():
                continue
            flat = flat.double().nan_to_num(0, 0, 0)
            for values in (flat.abs().amax(1), (flat != 0).sum(1).double(), flat.sum(1)):
                spread = values.std(correction=0)
                if bool(spread > 0):
                    score += (values - values.mean()) / spread
        return int(score.argmax()), int(score.argmin())

    def changes(self, number: int, rigid: bool = False) -> list[Change]:
        """Other records for a check: all forms at the first one, one form at a time afterwards, and a rigid one."""
        if self.size < 2:
            return []
        high, low = self.extremes()
        if high == low:
            high, low = 0, self.size - 1
        middle = next((i for i in _rotated(self.size, number) if i not in (high, low)), low)
        forms = [
            Change.but_one(self.size, middle, high),
            Change.of_one(self.size, high, low),
            Change.but_one(self.size, middle if middle != low else high, low),
            Change.but_one(self.size, middle, high, rigid=True),
        ]
        chosen = forms if number == 0 else [forms[number % 3]] + ([forms[3]] if rigid else [])
        return [change for change in chosen if any(not _same(change.applied(t), t) for t in self.rows)]


def _same(a: Tensor, b: Tensor) -> bool:
    return a is b or bool(((a == b) | ((a != a) & (b != b))).all())


def _rotated(size: int, number: int) -> Iterator[int]:
    start = (size // 2 + 7919 * number) % size
    return ((start + i) % size for i in range(size))


def _leaves(value: Any, depth: int) -> Iterator[Any]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (*_PLAIN, nn.Module)) or callable(value):
        return
    elif depth and isinstance(value, Mapping):
        for item in value.values():
            yield from _leaves(item, depth - 1)
    elif depth and isinstance(value, (list, tuple, set)):
        for item in value:
            yield from _leaves(item, depth - 1)
    elif depth and (is_dataclass(value) or (hasattr(value, "__dict__") and vars(value))):
        for item in vars(value).values():
            yield from _leaves(item, depth - 1)
    else:
        yield value


@dataclass(frozen=True)
class Change:
    """Sample i becomes a copy of sample `source[i]`; the samples in `kept` stay themselves.

    A `rigid` change keeps the discrete structure of the batch, for programs whose shapes follow the records: integers and
    what is computed from them stay as they are; only where a table is looked up by them are others read.
    """

    source: Tensor
    kept: Tensor
    rigid: bool = False
    what: str = field(default="", compare=False)

    @classmethod
    def of_one(cls, size: int, sample: int, by: int) -> Change:
        """Only one sample is another record."""
        everybody = torch.arange(size)
        source = torch.where(everybody == sample, by, everybody)
        return cls(source, everybody[everybody != sample], what=f"sample {sample} was another record")

    @classmethod
    def but_one(cls, size: int, sample: int, by: int, rigid: bool = False) -> Change:
        """Everybody else is a copy of one record."""
        everybody = torch.arange(size)
        source = torch.where(everybody == sample, everybody, by)
        if by == sample:
            source = (everybody + 1) % size
            source[sample] = sample
        return cls(source, torch.tensor([sample]), rigid, f"all samples but {sample} were other records")

    def applied(self, tensor: Tensor) -> Tensor:
        """The tensor with other records; itself where its first axis is not the samples'."""
        if tensor.layout is not torch.strided or not tensor.dim() or tensor.shape[0] != self.source.numel():
            return tensor
        return tensor.detach().index_select(0, self.source.to(tensor.device))


def some(samples: Sequence[int]) -> str:
    """A few samples by number, as a message names them."""
    few = ", ".join(map(str, samples[:4]))
    return f"sample{'s' if len(samples) != 1 else ''} {few}{' and others' if len(samples) > 4 else ''}"
