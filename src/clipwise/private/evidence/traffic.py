"""What leaves the tensors of a batch as plain numbers and arrays, and what comes back.

Kernels do not see `.tolist()`, `.numpy()` or `len`, and what Python makes of them is plain data. So calls of torch are
looked at as the user makes them. Numbers that come back are known again: a floating point number by its value, an
integer where it is used by the very next kernel. Tensors made of plain data count as the batch's where they may be.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping
from types import FrameType, FunctionType
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from clipwise._validate import is_number
from clipwise.engine import memory_of
from clipwise.private.evidence.outside import Outside
from clipwise.private.evidence.records import Records, same
from clipwise.private.evidence.twin import Twin

# Marks: computed from the batch; of memory that changed outside a watched pass; from a sample's place in its batch.
BATCH, CARRIED, PLACE = 1, 2, 4

LEAVING = {"__array__", "__dlpack__", "data_ptr", "numpy", "storage", "tolist", "untyped_storage"}
NUMBERS = {"__bool__", "__complex__", "__float__", "__index__", "__int__"}  # constructors run no kernel for them
_SHARING = LEAVING - {"tolist"}  # what leaves may be written into
_SIZES = {"__len__", "numel", "nelement", "size", "stride"}
_SIZES_OF_ANOTHER = {"expand_as", "reshape_as", "view_as"}
_SHAPES = (torch.Tensor.shape, torch.Tensor.nbytes)
GATHERING = {  # they read the tensors in a list out of sight
    "as_tensor", "asarray", "new", "new_tensor", "sparse_bsc_tensor", "sparse_bsr_tensor", "sparse_compressed_tensor",
    "sparse_coo_tensor", "sparse_csc_tensor", "sparse_csr_tensor", "tensor",
}  # fmt: skip
_OF_ITS_TYPE = {"new", "new_tensor"}  # the tensor itself gives no number
_DEEPEST = 64  # axes of a tensor
_COMPUTED_WITH = ("number", "Optional[number]", "float", "Optional[float]", "Tensor", "Optional[Tensor]")
_COUNTING = ("arange", "linspace", "eye", "range")  # their numbers are sizes
_SCALING = ("mul.", "mul_.", "div.", "div_.")
_COMMON, _EIGHTHS = 4, 8  # whole numbers up to 4 and eighths up to 1 are written in programs anyway
_NUMBER_LEFT = "a number was taken out of a tensor of the batch"


def tensors_in(value: Any, depth: int = 8) -> Iterator[Tensor]:
    """The tensors in a value and in containers of it, such as the arguments or results of a kernel."""
    if isinstance(value, Tensor):
        yield value
    elif depth and isinstance(value, (tuple, list, set)):
        for item in value:
            yield from tensors_in(item, depth - 1)
    elif depth and isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item, depth - 1)


def gathered(func: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
    """The tensors whose numbers such a function reads out of sight."""
    own = func.__name__ in _OF_ITS_TYPE and bool(args) and isinstance(args[0], Tensor)
    for value in (*args[own:], *kwargs.values()):
        yield from tensors_in(_as_lists(value), _DEEPEST)


def _as_lists(value: Any, depth: int = _DEEPEST) -> Any:
    """A sequence of any type as torch reads it."""
    whole = isinstance(value, (Tensor, np.ndarray, str, bytes, torch.UntypedStorage, torch.TypedStorage))
    if whole or not depth or not hasattr(value, "__len__") or not hasattr(value, "__getitem__"):
        return value
    return [_as_lists(item, depth - 1) for item in value]


def users_frame() -> FrameType | None:
    """The frame that is being executed: the innermost one outside torch and this package."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if not module.startswith(("torch.", "clipwise.")) and module != "torch":
            return frame
        frame = frame.f_back
    return None


def _warned_there(func: FunctionType, args: Any, kwargs: Any) -> Any:
    """Call a function of torch that is written in Python; what it warns of is said of the user's line, not of this."""
    with warnings.catch_warnings(record=True) as caught:
        made = func(*args, **kwargs)
    frame = users_frame() if caught else None
    for each in caught:
        if frame is None:
            warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
        else:
            registry = frame.f_globals.setdefault("__warningregistry__", {})
            warnings.warn_explicit(
                each.message, each.category, frame.f_code.co_filename, frame.f_lineno, registry=registry
            )
    return made


class Marks(Protocol):
    """What is known of the watched pass."""

    records: Records
    twins: list[Twin]
    count: int
    drawn: set[int]
    outside: Outside
    again: set[int]
    before: frozenset[int]

    def marks_of(self, tensor: Tensor) -> int: ...
    def mark(self, tensor: Tensor, marks: int) -> None: ...
    def remember(self, tensor: Tensor, memory: int) -> None: ...
    def knows(self, memory: int) -> bool: ...
    def made_here(self, memory: int) -> bool: ...
    def last_written(self, memory: int) -> int: ...
    def note_node(self, marks: int) -> None: ...


class Traffic:
    """The numbers and arrays of one watched pass. `carried`: numbers that left in earlier ones."""

    def __init__(self, watch: Marks, carried: frozenset[float]) -> None:
        self.depth = 0  # calls of torch that are under way
        self.imported_any = False  # a tensor was made from values that may be the batch's
        self.numbers: dict[tuple[int, str, str], float] = {}  # that kernels of the batch computed with, in their order
        self.size_used: set[str] = set()  # kernels that computed with the number of samples just after it was read
        self.values: dict[float, list[Any]] = {}  # floating point numbers that left, and what they would have been
        self._watch, self._carried = weakref.proxy(watch), carried  # a cycle would hold the pass's memory
        self._just_left: list[tuple[Any, list[Any]]] = []  # until the next kernel on more than a number
        self._left = 0  # numbers that left
        self.told = False  # one left that would have been another with other records, or may have been
        self._size_read = False
        self.imports: list[int] = []  # hashes of tensors made from Python or NumPy values, in their order
        self._arrays = False  # whole arrays left
        self._shared: list[tuple[Tensor, Tensor, int]] = []  # memory that left, what it held, the last kernel before

    def settle(self) -> None:
        """A kernel has run: integers that left before it are not expected any more."""
        self._just_left.clear()
        self._size_read = False

    # Leaving

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A function of torch as the user called it."""
        self.depth += 1
        try:
            name = getattr(func, "__name__", "")
            if args and isinstance(args[0], Tensor):
                if name in LEAVING:
                    self._leaves(args[0], name)
                elif name in _SIZES or (name == "__get__" and any(func.__self__ is shape for shape in _SHAPES)):
                    self._size(args[0])
                elif name in _SIZES_OF_ANOTHER:
                    for other in tensors_in((args[1:], kwargs)):
                        self._shape_read(other)
                elif name in NUMBERS:
                    return self._number(func, args)
                elif name == "__deepcopy__":
                    return self._copied(func, args, kwargs)
            if name in GATHERING:
                return self._gathered(func, args, kwargs)
            return _warned_there(func, args, kwargs) if isinstance(func, FunctionType) else func(*args, **kwargs)
        finally:
            self.depth -= 1

    def _leaves(self, tensor: Tensor, how: str) -> None:
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            if not self._watch.marks_of(tensor):
                memory = memory_of(tensor)
                if how in _SHARING and self._watch.made_here(memory) and memory not in self._watch.outside:
                    self._watch.outside.hold(tensor)
                return
            self._arrays = True
            self.told = self.told or all(twin.broken for twin in self._watch.twins)
            if how in _SHARING:
                ours = tensor.detach()
                self._shared.append((ours, ours.clone(), self._watch.last_written(memory_of(tensor))))
            for twin in self._watch.twins:
                other = tensor if twin.broken else twin.of(tensor)
                if other is not tensor and not torch.equal(other, tensor):
                    self.told = True
                    twin.left.append((self._watch.count, f"values of the batch left the tensors by {how}"))

    def written_outside(self) -> bool:
        """Whether memory of the batch was changed by something other than torch since it left."""
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            return any(
                self._watch.last_written(memory_of(tensor)) == kernel and not same(tensor, held)
                for tensor, held, kernel in self._shared
            )

    def _gathered(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A tensor made from a list of tensors: the numbers in them are read by no kernel."""
        out = func(*args, **kwargs)
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            marks = 0
            for tensor in gathered(func, args, kwargs):
                marks |= self._watch.marks_of(tensor)
            if marks and not self._watch.marks_of(out):
                self._watch.mark(out, marks)
                for twin in self._watch.twins:
                    self._gather_twin(twin, out, func, args, kwargs)
        return out

    def _gather_twin(self, twin: Twin, out: Tensor, func: Any, args: Any, kwargs: Any) -> None:
        try:
            other = func(*(_exchanged(twin, value) for value in args), **kwargs)
            if not twin.broken:
                twin.enter(out, other)
        except Exception as error:
            twin.broken = twin.broken or f"{func.__name__} does not take the other records ({type(error).__name__})"

    def _number(self, func: Any, args: Any) -> Any:
        """A number leaves by a kernel, unless it is for a constructor such as `torch.Tensor([number])`."""
        before = self._left
        value = func(*args)
        if self._left == before:
            with torch._C.DisableTorchFunction(), _disable_current_modes():
                self.scalar(func, args)
        return value

    def scalar(self, func: Any, args: Any) -> Any:
        """A number leaves, by whatever method."""
        self._left += 1
        watch, value = self._watch, func(*args)
        marks = watch.marks_of(args[0])
        watch.note_node(marks)
        if marks:
            others = [value if twin.broken or twin.change.wild else func(twin.of(args[0])) for twin in watch.twins]
            for twin, other in zip(watch.twins, others, strict=True):
                if other != value:
                    twin.left.append((watch.count, _NUMBER_LEFT))
            able = [other for twin, other in zip(watch.twins, others, strict=True) if not twin.broken]
            self.told = self.told or not able or any(other != value for other in able)
            if any(other != value for other in others) and not isinstance(value, (bool, complex)):
                self._just_left.append((value, others))
                if isinstance(value, float):
                    self.values[value] = others
        return value

    def _copied(self, func: Any, args: Any, kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            marks, out = self._watch.marks_of(args[0]), func(*args, **kwargs)
            if isinstance(out, Tensor) and not marks:
                self._watch.remember(out, memory_of(out))
            elif isinstance(out, Tensor):
                self._watch.mark(out, marks)
                for twin in self._watch.twins:
                    if not twin.broken:
                        twin.pair(out, twin.of(args[0]).clone())
        return out

    def _size(self, tensor: Tensor) -> None:
        """A shape is read: of a value whose shape follows the records, or the number of samples."""
        self._shape_read(tensor)
        with torch._C.DisableTorchFunction():
            first = not tensor.is_nested and tensor.dim() and tensor.shape[0] == self._watch.records.size
            self._size_read = self._size_read or bool(first and self._watch.marks_of(tensor))

    def _shape_read(self, tensor: Any) -> None:
        with torch._C.DisableTorchFunction():
            for twin in self._watch.twins:
                if twin.has_odd and twin.is_odd(tensor):
                    twin.broken = twin.broken or "a shape that follows the records is read"

    # Coming back

    def _is_ours(self, value: Any) -> bool:
        """Whether a number is one that left. One that programs write down anyway tells nothing."""
        return not _is_common(value) and (value in self.values or any(value == number for number, _ in self._just_left))

    def marks(self, func: Any, args: Any, kwargs: Any, marks: int) -> int:
        """The marks of numbers among the arguments of a kernel, beside those of its tensors."""
        name, found = str(func.name()).removeprefix("aten::"), 0
        if name.startswith(_COUNTING):
            return 0
        scales = torch.Tag.pointwise in func.tags and any(t.is_floating_point() for t in tensors_in(args))  # not places
        for argument, value in _given(func, args, kwargs):
            if not is_number(value) or str(argument.type) not in _COMPUTED_WITH:
                continue
            if marks and scales:
                self.numbers[len(self.numbers), name, argument.name] = float(value)
                if self._size_read and value == self._watch.records.size and name.startswith(_SCALING):
                    self.size_used.add(name)
            if self._was_carried(value):
                found |= CARRIED
            if self._is_ours(value):
                found |= BATCH
        return found

    def note_constants(self, tensors: Iterable[Tensor]) -> None:
        """Constants that are one number, which a kernel of the batch computes with."""
        for place, tensor in enumerate(tensors):
            if _has_numbers(tensor):
                flat = tensor.detach().flatten()
                if same(flat[1:], flat[:-1]):
                    self._note_constant(place, flat[0])

    def note_factors(self, tensors: Iterable[Tensor], any_numbers: bool) -> None:
        """The same for constant factors: one number beside zeros, or the largest of any."""
        for place, tensor in enumerate(tensors):
            if _has_numbers(tensor):
                numbers = tensor.detach()[tensor.detach() != 0]
                if numbers.numel() and (any_numbers or same(numbers[1:], numbers[:-1])):
                    self._note_constant(place, numbers.max())

    def _note_constant(self, place: int, number: Tensor) -> None:
        self.numbers[len(self.numbers), "a constant tensor", str(place)] = float(number)

    def imported(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A tensor made from Python or NumPy values: of the batch when those may be, else a constant."""
        watch, out = self._watch, func(*args, **kwargs)
        if watch.knows(memory_of(out)):
            watch.note_node(watch.marks_of(out))
            return out
        value = out.item() if not out.dim() else None
        ours = self._may_be_ours(out) if value is None else self._is_ours(value)
        marks = BATCH * ours | CARRIED * self._was_carried(value)
        watch.note_node(marks)
        if not marks:
            watch.remember(out, memory_of(out))
            watch.outside.hold(out)
            if value is None:
                (watch.again if self.imports[-1] in watch.before else watch.drawn).add(memory_of(out))
            return out
        watch.mark(out, marks)
        self.imported_any = self.imported_any or value is None
        for place, twin in enumerate(watch.twins):
            other = twin.change.applied(out) if value is None else torch.full_like(out, self._other(value, place))
            if other is out or (self._arrays and value is None):
                twin.broken = twin.broken or "a tensor was made from values of the batch that are not tensors"
            else:
                twin.enter(out, other)
        return out

    def _may_be_ours(self, out: Tensor) -> bool:
        """Whether a tensor of plain values counts as the batch's; where that is open it is noted."""
        self.imports.append(hash((out.dtype, tuple(out.shape), tuple(out.flatten().tolist()))))
        if self._watch.records.opaque:
            return True
        self.imported_any = self.imported_any or self._arrays or bool(self.values)
        rows = out.shape[0] == self._watch.records.size
        return (self.imported_any and rows) or any(map(self._is_ours, out.flatten().tolist()))

    def _was_carried(self, value: Any) -> bool:
        return isinstance(value, float) and value in self._carried and not _is_common(value)

    def other_numbers(self, func: Any, args: Any, kwargs: Any, place: int) -> tuple[Any, Any]:
        """Arguments with what numbers of the batch would be: those computed with, and shifts taken just before."""
        kinds = {argument.name: str(argument.type) for argument in func._schema.arguments}

        def other(name: str, value: Any) -> Any:
            kind = kinds.get(name, "")
            if isinstance(value, (list, tuple)) and kind.startswith("List[int]") and not name.startswith("dim"):
                return [self._shifted(item, place, common=name == "shifts") for item in value]
            if not is_number(value) or name.startswith("dim"):
                return value
            return self._other(value, place) if kind in _COMPUTED_WITH else self._shifted(value, place)

        positional = [other(name, value) for name, value in zip(kinds, args, strict=False)]
        return positional, {name: other(name, value) for name, value in kwargs.items()}

    @property
    def busy(self) -> bool:
        """Whether numbers of the batch may be among the arguments of a kernel."""
        return bool(self._just_left or self.values)

    def _other(self, value: Any, place: int) -> Any:
        if _is_common(value):
            return value
        others = self.values.get(value)
        return self._shifted(value, place) if others is None else others[place]

    def _shifted(self, value: Any, place: int, common: bool = False) -> Any:
        if _is_common(value) and not common:
            return value
        for number, twins in self._just_left:
            if value == number:
                return twins[place]
            if value == -number:
                return -twins[place]
        return value


def _exchanged(twin: Twin, value: Any) -> Any:
    """What a function that gathers gets with other records; sizes stay what they are."""
    found = _as_lists(value)
    return twin.mapped(found) if any(True for _ in tensors_in(found, _DEEPEST)) else value


def _is_common(value: Any) -> bool:
    """Whether programs write such a number down by themselves: 0, 1, 2, 0.5, 0.25, ..."""
    if not isinstance(value, (int, float)) or not abs(value) <= _COMMON:
        return False
    return value == int(value) or (abs(value) <= 1 and _EIGHTHS * value == int(_EIGHTHS * value))


def _has_numbers(tensor: Tensor) -> bool:
    plain = tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_complex()
    return plain and tensor.numel() > 0


def _given(func: Any, args: Any, kwargs: Any) -> Iterator[tuple[Any, Any]]:
    """The arguments of a kernel with their places in its schema."""
    yield from zip(func._schema.arguments, args, strict=False)
    for argument in func._schema.arguments:
        if argument.name in kwargs:
            yield argument, kwargs[argument.name]
