"""What leaves the tensors of a batch as plain numbers and arrays, and what comes back.

Kernels do not see `.tolist()`, `.numpy()` or `len`, and what Python makes of them is plain data. So calls of torch are
looked at as the user makes them: numbers that leave remember their twins, and tensors made of plain data count as the
batch's where that data may be.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from clipwise.engine.origin import memory_of
from clipwise.private.evidence.numbers import is_carried, is_remembering, remembering, twin_of
from clipwise.private.evidence.records import Records
from clipwise.private.evidence.twin import Twin

BATCH, CARRIED = 1, 2  # marks: computed from the batch; of memory that changed outside a watched forward pass

_LEAVING = {"__array__", "__dlpack__", "data_ptr", "numpy", "storage", "tolist", "untyped_storage"}
_SIZES = {"__len__", "numel", "nelement", "size"}
_SHAPE = torch.Tensor.shape
_COMPUTED_WITH = ("number", "Optional[number]", "float", "Optional[float]", "Tensor", "Optional[Tensor]")
_COUNTING = ("arange", "linspace", "eye", "range")  # their numbers are sizes
_NUMBER_LEFT = "a number was taken out of a tensor of the batch"


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors among the arguments or results of a kernel."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)


class Marks(Protocol):
    """What is known of the watched pass."""

    records: Records
    twins: list[Twin]
    number: int
    count: int

    def marks_of(self, tensor: Tensor) -> int: ...
    def mark(self, tensor: Tensor, marks: int) -> None: ...
    def remember(self, tensor: Tensor, memory: int) -> None: ...
    def knows(self, memory: int) -> bool: ...
    def note_node(self, marks: int) -> None: ...


class Traffic:
    """The numbers and arrays of one watched pass. `counted`: the number of samples is private too."""

    def __init__(self, watch: Marks, counted: bool) -> None:
        self.depth = 0  # calls of torch that are under way
        self._watch, self._counted = watch, counted
        self._numbers: list[Any] = []  # among the arguments of the call under way
        self._just_left: list[tuple[Any, list[Any]]] = []  # plain ones, until the next kernel on more than a number
        self._values: set[Any] = set()  # all numbers that left and would have been others
        self._arrays = False  # whole arrays left

    @property
    def busy(self) -> bool:
        """Whether numbers of the batch may be among the arguments of a kernel."""
        return bool(self._numbers or self._just_left or self._values)

    def settle(self) -> None:
        """A kernel has run: plain numbers that left before it are not expected any more."""
        self._just_left.clear()

    # Leaving

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A function of torch as the user called it."""
        self.depth += 1
        try:
            return self._called(func, args, kwargs)
        finally:
            self.depth -= 1

    def _called(self, func: Any, args: Any, kwargs: Any) -> Any:
        name = getattr(func, "__name__", "")
        if name in _LEAVING and args and isinstance(args[0], Tensor):
            self._leaves(args[0], name)
            return func(*args, **kwargs)
        if name == "__deepcopy__":
            return self._copied(func, args, kwargs)
        if name == "item" and args and isinstance(args[0], Tensor):
            return self._item(func, args[0])
        if name in _SIZES or (name == "__get__" and func.__self__ is _SHAPE):
            return self._size(func, args, kwargs, name)
        before, self._numbers = self._numbers, [n for n in _flat((args, kwargs)) if is_remembering(n)]
        try:
            return func(*args, **kwargs)
        finally:
            self._numbers = before

    def _leaves(self, tensor: Tensor, how: str) -> None:
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            if not self._watch.marks_of(tensor):
                return
            self._arrays = True
            for twin in self._watch.twins:
                if not twin.broken and not torch.equal(twin.of(tensor), tensor):
                    twin.left.append((self._watch.count, f"values of the batch left the tensors by {how}"))

    def _item(self, func: Any, tensor: Tensor) -> Any:
        value = func(tensor)
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            if not self._watch.marks_of(tensor) or isinstance(value, (bool, complex)):
                return value
            twins = tuple(value if twin.broken else twin.of(tensor).item() for twin in self._watch.twins)
        return remembering(value, twins, self._watch.number)

    def scalar(self, func: Any, args: Any) -> Any:
        """A number leaves, by whatever method."""
        watch, value = self._watch, func(*args)
        marks = watch.marks_of(args[0])
        watch.note_node(marks)
        if marks:
            others = [value if twin.broken else func(twin.of(args[0])) for twin in watch.twins]
            for twin, other in zip(watch.twins, others, strict=True):
                if other != value:
                    twin.left.append((watch.count, _NUMBER_LEFT))
            if any(other != value for other in others) and not isinstance(value, (bool, complex)):
                self._just_left.append((value, others))
                self._values.add(value)
        return value

    def _copied(self, func: Any, args: Any, kwargs: Any) -> Any:
        out = func(*args, **kwargs)
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            marks = self._watch.marks_of(args[0]) if isinstance(out, Tensor) else 0
            if marks:
                self._watch.mark(out, marks)
                for twin in self._watch.twins:
                    if not twin.broken:
                        twin.pair(out, twin.of(args[0]))
        return out

    def _size(self, func: Any, args: Any, kwargs: Any, name: str) -> Any:
        """The number of samples, which would be one more had another been drawn."""
        value = func(*args, **kwargs)
        tensor, size = args[0], self._watch.records.size
        with torch._C.DisableTorchFunction():
            for twin in self._watch.twins:
                if twin.has_odd and twin.is_odd(tensor):
                    twin.broken = twin.broken or "a shape that follows the records is read"
            if not self._counted:
                return value
            if not tensor.dim() or tensor.shape[0] != size or not self._watch.marks_of(tensor):
                return value
            first = name == "size" and value == size and _is_first(args, kwargs, tensor.dim())
        twins, number = len(self._watch.twins), self._watch.number
        if isinstance(value, torch.Size):
            return torch.Size((remembering(size, (size + 1,) * twins, number), *value[1:]))  # type: ignore[arg-type]
        if name == "__len__" or first:
            return remembering(value, (value + 1,) * twins, number)
        if name in ("numel", "nelement"):
            return remembering(value, (value // size * (size + 1),) * twins, number)
        return value

    # Coming back

    def marks(self, func: Any, args: Any, kwargs: Any, marks: int) -> int:
        """The marks of numbers among the arguments of a kernel, beside those of its tensors."""
        watch = self._watch
        if marks:
            return CARRIED if any(is_carried(number, watch.number) for number in self._numbers) else 0
        if str(func.name()).removeprefix("aten::").startswith(_COUNTING):
            return 0
        known = self._values.union(self._numbers)
        given = zip(func._schema.arguments, args, strict=False)
        named = ((a, kwargs[a.name]) for a in func._schema.arguments if a.name in kwargs)
        for argument, value in (*given, *named):
            number = isinstance(value, (int, float)) and not isinstance(value, bool) and value in known
            if number and str(argument.type) in _COMPUTED_WITH:
                return BATCH
        return 0

    def imported(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A tensor made from Python or NumPy values: of the batch when those may be, else a constant."""
        watch, out = self._watch, func(*args, **kwargs)
        if watch.knows(memory_of(out)):
            watch.note_node(watch.marks_of(out))
            return out
        if out.dim():
            ours = watch.records.opaque or self._arrays or bool(self._values)
        else:
            ours = out.item() in self._values or bool(self._numbers)
        watch.note_node(BATCH if ours else 0)
        if not ours:
            watch.remember(out, memory_of(out))
            return out
        watch.mark(out, BATCH)
        for place, twin in enumerate(watch.twins):
            other = twin.change.applied(out) if out.dim() else torch.full_like(out, self._other(out.item(), place))
            if other is out:
                twin.broken = twin.broken or "a tensor was made from values of the batch that are not tensors"
            else:
                twin.enter(out, other)
        return out

    def other_numbers(self, func: Any, args: Any, kwargs: Any, place: int) -> tuple[Any, Any]:
        """Arguments with what numbers of the batch would be: those computed with, and shifts taken just before."""
        kinds = [(argument.name, str(argument.type)) for argument in func._schema.arguments]

        def other(name: str, kind: str, value: Any) -> Any:
            if isinstance(value, (list, tuple)) and kind.startswith("List[int]") and not name.startswith("dim"):
                return [self._shifted(item, place) for item in value]
            if isinstance(value, bool) or not isinstance(value, (int, float)) or name.startswith("dim"):
                return value
            return self._other(value, place) if kind in _COMPUTED_WITH else self._shifted(value, place)

        positional = [other(*kind, value) for kind, value in zip(kinds, args, strict=False)]
        return positional, {name: other(name, dict(kinds).get(name, ""), value) for name, value in kwargs.items()}

    def _other(self, value: Any, place: int) -> Any:
        remembered = (twin_of(number, place) for number in self._numbers if number == value)
        return next(remembered, self._shifted(value, place))

    def _shifted(self, value: Any, place: int) -> Any:
        for number, twins in self._just_left:
            if value == number:
                return twins[place]
            if value == -number:
                return -twins[place]
        return value


def _is_first(args: Any, kwargs: Any, rank: int) -> bool:
    axis = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    return isinstance(axis, int) and axis % rank == 0


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from _flat(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _flat(item)
    else:
        yield value
