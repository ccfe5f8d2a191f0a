"""Where the records of a data set lie in memory, found by what the data set refers to.

Python's garbage collector says what an object refers to, whatever its class (attributes, `__slots__`, containers, data
frames). Of functions, what they enclose and the globals that they name. Nothing of the objects is called but `len`, and
only `shape` is read.

- A tensor or an array is of records when its first axis is at least as long as the data set.
- Everything in a container with at least as many entries is, but no objects that most of its entries share.
- So are tensors of one kind that have together as many rows as the data set, or are as many.
- A data set inside is looked at in the same way, with its own length.
"""

from __future__ import annotations

import gc
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any, TypeAlias
from weakref import CallableProxyType, ProxyType

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

Interval: TypeAlias = tuple[int, int]  # addresses: the first, and the one after the last
_MOST = 20_000_000  # references that are followed: some seconds
_AT_A_TIME = 4096
_OF_ALL = (FunctionType, nn.Module)  # what records may refer to that is not of one record
_FRAMEWORK = ("builtins", "typing", "torch.", "numpy.", "clipwise.")
_CONTAINERS = (list, tuple, dict, set, frozenset, deque)
_PLAIN = frozenset(
    {int, float, complex, bool, str, bytes, type(None), type, ModuleType, BuiltinFunctionType, CodeType}
    | {ProxyType, CallableProxyType, torch.dtype, torch.device, torch.layout}
)
_Array: TypeAlias = Tensor | np.ndarray


class HeldRecords:
    """The memory of the records of a data set. `others` are objects that are not looked into, such as the model."""

    def __init__(self, dataset: Any = None, others: Iterable[object] = ()) -> None:
        walk = _Walk(others)
        if dataset is not None:
            walk.run(dataset)
        self.is_whole = walk.left > 0
        """Whether all that the data set refers to was looked at."""
        found = merged(walk.intervals)
        self._starts, self._ends = [start for start, _ in found], [end for _, end in found]

    def __len__(self) -> int:
        """How many pieces of memory there are."""
        return len(self._starts)

    def meets(self, tensor: Tensor) -> bool:
        """Whether a tensor reads any of it.

        >>> x = torch.ones(4, 3)
        >>> held = HeldRecords(torch.utils.data.TensorDataset(x))
        >>> held.meets(x[3]), held.meets(torch.ones(4, 3))
        (True, False)
        """
        try:
            return bool(self._starts) and any(self._meets(part) for part in parts(tensor))
        except (NotImplementedError, RuntimeError):  # without an address
            return False

    def _meets(self, tensor: Tensor) -> bool:
        start = tensor.data_ptr()
        if not start:
            return False
        place = bisect_left(self._starts, start + _extent(tensor))
        return place > 0 and start < self._ends[place - 1]


def parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """The tensors with the numbers and the places of a sparse one; any other is its only part."""
    if tensor.layout is torch.sparse_coo:
        return tensor._values(), tensor._indices()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.values(), tensor.crow_indices(), tensor.col_indices()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.values(), tensor.ccol_indices(), tensor.row_indices()
    return (tensor,) if tensor.layout is torch.strided else (tensor.values(),)


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """The same addresses as intervals that do not overlap, in order."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


class _Walk:
    """Through everything that a data set refers to, data set by data set."""

    def __init__(self, others: Iterable[object]) -> None:
        self.intervals: set[Interval] = set()
        self.left = _MOST
        self._others = {id(other): other for other in others}
        self._owned: dict[int, Any] = dict(self._others)  # what was looked into as records
        self._data_sets: list[tuple[Any, int]] = []
        self._known: set[int] = set()

    def run(self, dataset: Any) -> None:
        """From this data set on."""
        self._add(dataset)
        for found, length in self._data_sets:  # which grows
            self._look_into(found, length)

    def _add(self, dataset: Any) -> None:
        if id(dataset) not in self._known:
            self._known.add(id(dataset))
            self._data_sets.append((dataset, max(1, _length(dataset))))

    def _look_into(self, dataset: Any, length: int) -> None:
        seen, level = {**self._others, id(dataset): dataset}, [dataset, _of_classes(dataset)]
        short: list[_Array] = []
        sized: list[Any] = []
        inner = _attributes(dataset).get("dataset")
        if _length(inner):
            self._add(inner)
        while level and self.left > 0:
            found = {id(each): each for value in level for each in self._referents(value) if id(each) not in seen}
            seen.update(found)
            level = []
            for each in found.values():
                rows = _rows(each)
                if _is_array(each):
                    self._take(each) if rows >= length else short.append(each)
                elif _is_data_set(each, length):
                    self._add(each)
                elif rows >= length:
                    self._own(each, rows)
                else:
                    level.append(_opened(each))
                    sized += [] if rows else [each]
        for array in _together(short, _kind, _rows, length):
            self._take(array)
        for part in _together(filter(_length, sized), type, _length, length):
            self._add(part)

    def _referents(self, value: Any) -> Iterator[Any]:
        """What an object refers to: of an instance its attributes, not the mapping that holds them."""
        found = _of_function(value) if isinstance(value, FunctionType) else gc.get_referents(value)
        self.left -= len(found)
        own = None if isinstance(value, _CONTAINERS) else _attributes(value)
        for each in found:
            if own and each is own:
                yield from filter(_is_followed, own.values())
            elif _is_followed(each):
                yield each

    def _own(self, records: Any, count: int) -> None:
        """Take everything below a container of so many records."""
        if self._owned.setdefault(id(records), records) is not records:
            return
        level, most = [_opened(records)], max(1, count // 2)
        while level and self.left > 0:
            found = list(self._referents_of_all(level))
            times = Counter(map(id, found))
            fresh = {id(each): each for each in found if id(each) not in self._owned}
            self._owned.update(fresh)
            level = []
            for place, each in fresh.items():
                if _is_array(each):
                    self._take(each)
                elif isinstance(each, _CONTAINERS) or (times[place] <= most and not isinstance(each, _OF_ALL)):
                    level.append(_opened(each))

    def _referents_of_all(self, values: list[Any]) -> Iterator[Any]:
        for start in range(0, len(values), _AT_A_TIME):
            found = gc.get_referents(*values[start : start + _AT_A_TIME])
            self.left -= len(found)
            yield from filter(_is_followed, found)
            if self.left <= 0:
                return

    def _take(self, array: _Array) -> None:
        try:
            self.intervals.update(_memory(array))
        except (NotImplementedError, RuntimeError):  # there is none
            return


def _is_followed(value: Any) -> bool:
    return type(value) not in _PLAIN and not isinstance(value, (type, ModuleType))


def _is_array(value: Any) -> bool:
    return isinstance(value, Tensor) or (isinstance(value, np.ndarray) and not value.dtype.hasobject)


def _is_data_set(value: Any, length: int) -> bool:
    """By its class, or because it has as many entries and is neither a container nor a table."""
    if isinstance(value, Dataset):
        return _length(value) > 0
    return not _rows(value) and hasattr(type(value), "__getitem__") and _length(value) >= length


def _opened(value: Any) -> Any:
    """Something whose entries the garbage collector knows."""
    return value.tolist() if isinstance(value, np.ndarray) else value


def _length(value: Any) -> int:
    if not hasattr(type(value), "__len__") or isinstance(value, nn.Module):
        return 0
    try:
        return len(value)
    except Exception:  # whatever the objects of others do not answer
        return 0


def _rows(value: Any) -> int:
    """The entries of a container, or along the first axis of whatever has a shape."""
    if isinstance(value, _CONTAINERS):
        return len(value)
    try:
        shape = value.shape
        return int(shape[0]) if isinstance(shape, tuple) and shape else 0
    except Exception:  # whatever the objects of others do not answer
        return 0


def _kind(array: _Array) -> Hashable:
    return array.dtype, tuple(array.shape[1:]), bool(array.shape)


def _together(
    values: Iterable[Any], kind: Callable[[Any], Hashable], size: Callable[[Any], int], length: int
) -> Iterator[Any]:
    """Values of one kind that are, or have, as many as there are records."""
    groups: dict[Hashable, list[Any]] = {}
    for value in values:
        groups.setdefault(kind(value), []).append(value)
    for group in groups.values():
        if len(group) > 1 and (len(group) >= length or sum(map(size, group)) == length):
            yield from group


def _attributes(value: Any) -> dict[str, Any]:
    try:
        found = value.__dict__
    except Exception:  # slots, or whatever the objects of others do not answer
        return {}
    return found if isinstance(found, dict) else {}


def _of_classes(dataset: Any) -> list[Any]:
    """What the user's own classes of a data set hold: their attributes and functions."""
    kinds = [kind for kind in type(dataset).__mro__ if not kind.__module__.startswith(_FRAMEWORK)]
    return [each for kind in kinds for each in vars(kind).values()]


def _of_function(function: FunctionType) -> list[Any]:
    """What a function encloses, its defaults, and the globals that it names, but no functions among them."""
    known = function.__globals__
    named = [known[name] for name in function.__code__.co_names if name in known and not callable(known[name])]
    is_own = not str(function.__module__).startswith(_FRAMEWORK)
    held = [function.__closure__, function.__defaults__, function.__kwdefaults__, function.__dict__]
    return held + named if is_own else held


def _memory(array: _Array) -> Iterator[Interval]:
    """The whole storage of a tensor; of an array what lies between its first and its last number."""
    if isinstance(array, np.ndarray):
        steps = [(size - 1) * stride for size, stride in zip(array.shape, array.strides, strict=True)]
        start = array.__array_interface__["data"][0]
        if array.size:
            yield start + sum(min(0, s) for s in steps), start + sum(max(0, s) for s in steps) + array.itemsize
        return
    for part in parts(array):
        storage = part.untyped_storage()
        start, size = storage.data_ptr(), storage.nbytes()
        if start and size:
            yield start, start + size


def _extent(tensor: Tensor) -> int:
    """Bytes from the first number of a tensor to its last."""
    if tensor.is_nested:
        return tensor.untyped_storage().nbytes()
    if not tensor.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()
