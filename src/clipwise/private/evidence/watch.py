"""One forward pass, followed operation by operation: what comes from the batch, and what it would be with other records.

A dispatch mode sees every kernel. Memory of the batch is marked, and so is all that is computed from it; marks are kept by
storage, so views share them and a marked value written into a buffer marks the buffer. For every twin each marked kernel
runs a second time on the twin's storages. A function mode above sees what leaves the tensors (`.item()`, `.tolist()`,
`.numpy()`, `len`), and what comes back.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from clipwise.engine.chains import VIEWS
from clipwise.engine.graph import Graph
from clipwise.engine.origin import Origin, memory_of
from clipwise.private.evidence.numbers import is_carried, remembering, twin_of
from clipwise.private.evidence.records import Records
from clipwise.private.evidence.twin import Twin

BATCH, CARRIED = 1, 2  # marks: computed from the batch; of memory that changed outside a watched forward pass

_COMPUTED_WITH = ("number", "Optional[number]", "float", "Optional[float]", "Tensor", "Optional[Tensor]")
_SWEEP = 64  # kernels between two looks for storages that are gone
_METADATA_ONLY = {
    "empty_like", "full_like", "new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros", "ones_like",
    "rand_like", "randint_like", "randn_like", "zeros_like",
}  # fmt: skip
_IN_PLACE = "torch::autograd::CopySlices"
_LEAVING = {"__array__", "__dlpack__", "data_ptr", "numpy", "storage", "tolist", "untyped_storage"}
_SCALARS = {"item"}
_SIZES = {"__len__", "numel", "nelement", "size"}
_ONLY_VIEWS = VIEWS | {"AsStridedBackward0", "AsStridedBackward1", "ExpandBackward0"}  # no operand but their input


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


@cache
def _written(func: Any) -> tuple[tuple[int, str], ...]:
    """Which arguments a kernel writes into. The running statistics of batch norms are not in its schema."""
    hidden = ("running_mean", "running_var") if "batch_norm" in func.name() else ()
    return tuple(
        (place, argument.name)
        for place, argument in enumerate(func._schema.arguments)
        if (argument.alias_info is not None and argument.alias_info.is_write) or argument.name in hidden
    )


@cache
def _is_random(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


@cache
def _short(func: Any) -> str:
    return str(func.name()).removeprefix("aten::").partition(".")[0]


class _Kernels(TorchDispatchMode):
    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.watch = watch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():
            return self.watch.kernel(func, args, kwargs or {})


class _Calls(TorchFunctionMode):
    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.watch.call(func, args, kwargs or {})


class Watch:
    """The marks and twins of one forward pass. `start` when the batch is handed out, `stop` when the losses are there.

    `familiar` says of memory that this pass did not make whether it is constant; `counted` that the number of samples
    is itself private, as under Poisson sampling.
    """

    def __init__(
        self,
        records: Records,
        twins: Sequence[Twin],
        familiar: Callable[[Tensor], bool],
        counted: bool,
        number: int = 0,
    ) -> None:
        self.records, self.twins, self.number = records, list(twins), number
        self.count = 0
        self.left: list[tuple[int, str]] = []  # values that left the tensors for good, and after which kernel
        self.written: set[int] = set()  # memory from before that a kernel wrote into
        self.made_by: dict[int, int] = {}  # which kernel made a storage
        self._familiar, self._counted = familiar, counted
        self._marks: dict[int, int] = {}
        self._known: set[int] = set()
        self._from_before: set[int] = set()
        self._alive: list[StorageWeakRef] = []  # addresses are not given out again while these are held
        self._nodes: dict[int, int] = {}
        self._inside = -1  # the custom function whose forward pass is running
        self._numbers: list[Any] = []
        self._just_left: list[
            tuple[Any, list[Any]]
        ] = []  # numbers that left, until the next kernel on more than a number
        self._depth = 0  # calls of torch functions that are under way
        self._modes: list[Any] = []
        self._first = 0
        for tensor in records.tensors:
            self._mark(tensor, BATCH)
            for twin in self.twins:
                twin.enter(tensor)

    # The modes

    @property
    def running(self) -> bool:
        """Whether the modes are on this thread."""
        return bool(self._modes)

    def start(self) -> None:
        """Enter the modes."""
        self._first = torch._C._autograd._get_sequence_nr()
        calls, kernels = _Calls(self), _Kernels(self)
        calls.__enter__()
        kernels.__enter__()
        self._modes = [calls, kernels]

    def stop(self) -> None:
        """Leave the modes, also when others were entered above them and not left."""
        if self._modes:
            calls, kernels = self._modes
            self._modes = []
            _remove(kernels, torch._C._len_torch_dispatch_stack, torch._C._get_dispatch_stack_at, _dispatch_pop_push)
            _remove(calls, torch._C._len_torch_function_stack, torch._C._get_function_stack_at, _function_pop_push)

    # Marks

    def _mark(self, tensor: Tensor, marks: int) -> None:
        memory = memory_of(tensor)
        self._marks[memory] = self._marks.get(memory, 0) | marks
        self._remember(tensor, memory)

    def _remember(self, tensor: Tensor, memory: int) -> None:
        if memory not in self._known:
            self._known.add(memory)
            self.made_by[memory] = self.count
            try:
                self._alive.append(StorageWeakRef(tensor.untyped_storage()))
            except (NotImplementedError, RuntimeError):
                self._alive.append(tensor)  # type: ignore[arg-type]

    def marks_of(self, tensor: Tensor) -> int:
        """What a tensor's memory holds; 0 for constants."""
        memory = memory_of(tensor)
        marks = self._marks.get(memory)
        if marks is not None:
            return marks
        if memory not in self._known:
            script = not self._depth and not tensor.dim()  # no call of torch around it: a number inside TorchScript
            if script or self._familiar(tensor):
                self._remember(tensor, memory)
                self._from_before.add(memory)
            else:
                self._mark(tensor, CARRIED)
                return CARRIED
        return 0

    def held_marks(self, memory: int) -> int:
        """The marks of memory that this pass has met; 0 for any other."""
        return self._marks.get(memory, 0)

    def constants_alive(self) -> Iterator[tuple[int, StorageWeakRef]]:
        """Memory that this pass made without the batch and that somebody still holds: caches, tables."""
        for ref in self._alive:
            if isinstance(ref, StorageWeakRef) and self.made_here(ref.cdata) and not ref.expired():
                yield ref.cdata, ref

    def made_here(self, memory: int) -> bool:
        """Whether a kernel of this pass made the memory from constants."""
        return memory in self._known and memory not in self._from_before and not self._marks.get(memory)

    def node_marks(self, graph: Graph) -> list[int]:
        """The marks of every node's own kernel. A node that was not seen being made counts as marked."""
        found = [0] * len(graph.nodes)
        for k in graph.leaves_first:
            if not graph.edges[k] and k in graph.leaf_parameter:
                variable = graph.nodes[k].variable
                found[k] = 0 if graph.leaf_parameter[k] >= 0 else self.marks_of(variable)
                continue
            found[k] = self._marks_of_node(graph, k, found)
        return found

    def _marks_of_node(self, graph: Graph, k: int, found: Sequence[int]) -> int:
        number = graph.nodes[k]._sequence_nr()
        if number < self._first:
            return CARRIED  # computed before the batch was handed out
        if graph.names[k] in _ONLY_VIEWS:
            return max((found[child] for child, _ in graph.edges[k] if child >= 0), default=BATCH)
        if graph.names[k] == _IN_PLACE:  # made after the kernel of the in-place change, whose node came just before
            number -= 1
        return self._nodes.get(number, BATCH)

    def origins(self, graph: Graph) -> list[Origin]:
        """Whether each node's operands come from constants or from the batch."""
        return [Origin.BATCH if marks else Origin.CONSTANT for marks in self.node_marks(graph)]

    # Kernels

    def kernel(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a kernel, and once more for every twin where its arguments come from the batch."""
        self.count += 1
        name = _short(func)
        if name == "lift_fresh":
            return self._imported(func, args, kwargs)
        if name == "_local_scalar_dense":
            return self._scalar(func, args)
        marks = 0
        if name not in _METADATA_ONLY:
            for tensor in tensors_in(args):
                marks |= self.marks_of(tensor)
            if kwargs:
                for tensor in tensors_in(kwargs):
                    marks |= self.marks_of(tensor)
        if self._numbers and marks and any(is_carried(number, self.number) for number in self._numbers):
            marks |= CARRIED
        self._note_node(marks)
        written = [t for t in self._arguments(func, args, kwargs)]
        if not marks:
            out = func(*args, **kwargs)
            for tensor in tensors_in(out):
                self._remember(tensor, memory_of(tensor))
            self.written.update(memory_of(t) for t in written)
            return out
        return self._marked_kernel(func, args, kwargs, marks, written)

    def _arguments(self, func: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
        for place, name in _written(func):
            yield from tensors_in(args[place] if place < len(args) else kwargs.get(name))

    def _marked_kernel(self, func: Any, args: Any, kwargs: Any, marks: int, written: list[Tensor]) -> Any:
        state = torch.get_rng_state() if _is_random(func) else None
        others = []
        for place, twin in enumerate(self.twins):
            if not twin.broken:
                for tensor in written:
                    twin.keep_apart(tensor)
                others.append((twin, self._run_twin(func, args, kwargs, place, written)))
                if state is not None:
                    torch.set_rng_state(state)
        out = func(*args, **kwargs)
        results = list(tensors_in(out))
        for tensor in (*results, *written):
            self._mark(tensor, marks)
        self.written.update(memory_of(t) for t in written)
        if any(tensor.dim() for tensor in results):
            self._just_left.clear()
        for twin, theirs in others:
            if not twin.broken:
                self._pair(twin, func, results, list(tensors_in(theirs)))
        if self.count % _SWEEP == 0:
            for twin in self.twins:
                twin.let_go()
        return out

    def _run_twin(self, func: Any, args: Any, kwargs: Any, place: int, written: list[Tensor]) -> Any:
        twin = self.twins[place]
        looked_up = _short(func) == "embedding"

        def theirs(value: Any) -> Any:
            if isinstance(value, Tensor):
                other = twin.read(value) if looked_up else twin.of(value)
                return value.clone() if other is value and any(value is w for w in written) else other
            return value

        try:
            mapped, named = tree_map(theirs, (args, kwargs))
            if self._numbers or self._just_left:
                mapped, named = self._other_numbers(func, mapped, named, place)
            return func(*mapped, **named)
        except Exception as error:
            twin.broken = f"{_short(func)} does not take the other records ({type(error).__name__})"
            return None

    def _other_numbers(self, func: Any, args: Any, kwargs: Any, place: int) -> tuple[Any, Any]:
        """Arguments with what numbers of the batch would be: those computed with, and shifts taken just before."""
        kinds = [(argument.name, str(argument.type)) for argument in func._schema.arguments]

        def other(name: str, kind: str, value: Any) -> Any:
            if isinstance(value, (list, tuple)) and kind.startswith("List[int]") and not name.startswith("dim"):
                return [self._shifted(item, place) for item in value]
            if isinstance(value, bool) or not isinstance(value, (int, float)) or name.startswith("dim"):
                return value
            if kind in _COMPUTED_WITH:
                value = next((twin_of(n, place) for n in self._numbers if n == value), value)
            return self._shifted(value, place)

        positional = [other(*kind, value) for kind, value in zip(kinds, args, strict=False)]
        return positional, {name: other(name, dict(kinds).get(name, ""), value) for name, value in kwargs.items()}

    def _shifted(self, value: Any, place: int) -> Any:
        for number, twins in self._just_left:
            if value == number:
                return twins[place]
            if value == -number:
                return -twins[place]
        return value

    def _pair(self, twin: Twin, func: Any, ours: list[Tensor], theirs: list[Tensor]) -> None:
        for tensor, other in zip(ours, theirs, strict=True):
            if tensor.layout is not torch.strided or other.layout is not torch.strided:
                twin.broken = f"{_short(func)} gives a sparse tensor"
                return
            if tensor.shape != other.shape:
                twin.broken = f"the shape of {_short(func)} follows the records"
                return
            if memory_of(tensor) not in twin:
                twin.pair(tensor, other)
            if twin.moved is None and tensor.dim() and tensor.shape[0] == self.records.size:
                self._look(twin, func, tensor, other)

    def _look(self, twin: Twin, func: Any, tensor: Tensor, other: Tensor) -> None:
        """Remember the first operation that moved a kept sample's row: where to look, if samples turn out to mix."""
        kept = twin.change.kept.to(tensor.device)
        a, b = tensor.detach()[kept], other.detach()[kept]
        if not bool(((a == b) | ((a != a) & (b != b))).all()):
            twin.moved = _short(func), _where()

    def _note_node(self, marks: int) -> None:
        """Tie marks to the graph node that was made just before its kernel; a custom function has several kernels."""
        number = torch._C._autograd._get_sequence_nr() - 1
        if number not in self._nodes:
            self._nodes[number] = marks
            self._inside = -1 if torch.is_grad_enabled() else number
        elif self._inside == number:
            if torch.is_grad_enabled():
                self._inside = -1
            else:
                self._nodes[number] |= marks

    # Values that leave the tensors, and come back

    def _imported(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A tensor made from Python or NumPy values: of the batch when those can be, else a constant."""
        out = func(*args, **kwargs)
        self._note_node(BATCH if self.left or self.records.opaque else 0)
        if memory_of(out) in self._known:
            return out
        if not (self.records.opaque or self.left) or (out.dim() == 0 and not self.left):
            self._remember(out, memory_of(out))
            return out
        self._mark(out, BATCH)
        for twin in self.twins:
            changed = twin.change.applied(out)
            if changed is out:
                twin.broken = twin.broken or "a tensor was made from values of the batch that are no tensors"
            else:
                twin.enter(out)
        return out

    def _scalar(self, func: Any, args: Any) -> Any:
        value = func(*args)
        self._note_node(self.marks_of(args[0]))
        if self.marks_of(args[0]):
            others = [value if twin.broken else func(twin.of(args[0])) for twin in self.twins]
            for twin, other in zip(self.twins, others, strict=True):
                if other != value:
                    twin.left.append((self.count, "a number was taken out of a tensor of the batch"))
            if others.count(value) < len(others) and not isinstance(value, (bool, complex)):
                self._just_left.append((value, others))
        return value

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A function of torch as the user called it: what leaves the tensors here, kernels do not see."""
        self._depth += 1
        try:
            return self._called(func, args, kwargs)
        finally:
            self._depth -= 1

    def _called(self, func: Any, args: Any, kwargs: Any) -> Any:
        name = getattr(func, "__name__", "")
        if name in _LEAVING and args and isinstance(args[0], Tensor):
            self._leaves(args[0], name)
            return func(*args, **kwargs)
        if name == "__deepcopy__":
            return self._copied(func, args, kwargs)
        if name in _SCALARS and args and isinstance(args[0], Tensor):
            return self._item(func, args[0])
        if self._counted and (name in _SIZES or (name == "__get__" and func.__self__ is _SHAPE)):
            return self._size(func, args, kwargs, name)
        before, self._numbers = self._numbers, [n for n in _flat((args, kwargs)) if hasattr(n, "twins")]
        try:
            return func(*args, **kwargs)
        finally:
            self._numbers = before

    def _leaves(self, tensor: Tensor, how: str) -> None:
        with torch._C.DisableTorchFunction():
            if not self.marks_of(tensor):
                return
            self.left.append((self.count, how))
            for twin in self.twins:
                if not twin.broken and not torch.equal(twin.of(tensor), tensor):
                    twin.left.append((self.count, f"values of the batch left the tensors by {how}"))

    def _item(self, func: Any, tensor: Tensor) -> Any:
        value = func(tensor)
        with torch._C.DisableTorchFunction():
            if not self.marks_of(tensor) or isinstance(value, (bool, complex)):
                return value
            with torch.utils._python_dispatch._disable_current_modes():
                twins = tuple(value if twin.broken else twin.of(tensor).item() for twin in self.twins)
        return remembering(value, twins, self.number)

    def _copied(self, func: Any, args: Any, kwargs: Any) -> Any:
        out = func(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            if isinstance(out, Tensor) and self.marks_of(args[0]):
                self._mark(out, self.marks_of(args[0]))
                for twin in self.twins:
                    if not twin.broken:
                        twin.pair(out, twin.of(args[0]))
        return out

    def _size(self, func: Any, args: Any, kwargs: Any, name: str) -> Any:
        """The number of samples, which would be one more had another been drawn."""
        value = func(*args, **kwargs)
        tensor, size = args[0], self.records.size
        with torch._C.DisableTorchFunction():
            if not tensor.dim() or tensor.shape[0] != size or not self.marks_of(tensor):
                return value
        more = (size + 1,) * len(self.twins)
        if isinstance(value, torch.Size):
            return torch.Size((remembering(size, more, self.number), *value[1:]))
        if name == "__len__" or (name == "size" and value == size and _first_axis(args, kwargs, tensor)):
            return remembering(value, more, self.number)
        if name in ("numel", "nelement"):
            return remembering(value, (value // size * (size + 1),) * len(self.twins), self.number)
        return value


_SHAPE = torch.Tensor.shape


def _first_axis(args: Any, kwargs: Any, tensor: Tensor) -> bool:
    axis = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    with torch._C.DisableTorchFunction():
        return isinstance(axis, int) and axis % tensor.dim() == 0


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from _flat(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _flat(item)
    else:
        yield value


def _where() -> str:
    """The user's line that is being executed: the innermost one outside torch and this package."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if not module.startswith(("torch.", "clipwise.")) and module != "torch":
            return f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def _dispatch_pop_push(push: Any = None) -> Any:
    from torch.utils._python_dispatch import _pop_mode, _push_mode

    return _pop_mode() if push is None else _push_mode(push)


def _function_pop_push(push: Any = None) -> Any:
    from torch.overrides import _pop_mode, _push_mode

    return _pop_mode() if push is None else _push_mode(push)


def _remove(mode: Any, length: Callable[[], int], at: Callable[[int], Any], pop_push: Callable[..., Any]) -> None:
    """Take a mode out of the middle of its stack."""
    if not any(at(i) is mode for i in range(length())):
        return
    above = []
    while (top := pop_push()) is not mode:
        above.append(top)
    for other in reversed(above):
        pop_push(other)
