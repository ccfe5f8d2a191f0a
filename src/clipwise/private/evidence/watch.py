"""One forward pass, operation by operation: what comes from the batch, and what it would be with other records.

A dispatch mode sees every kernel. Memory of the batch is marked, and so is all that is computed from it. Marks are kept
by storage: views share them, and a marked value written into a buffer marks the buffer. For every twin each marked
kernel runs a second time on the twin's storages. What leaves the tensors and comes back is followed by `Traffic`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes

from clipwise.engine import IN_PLACE_WRITE, Graph, Origin, backing, memory_of, op_of
from clipwise.private.evidence.modes import Modes
from clipwise.private.evidence.outside import Outside
from clipwise.private.evidence.places import (
    CLASS_WEIGHTS,
    are_row_numbers,
    factors_of,
    is_row_by_row,
    meets_places,
    operands_of,
)
from clipwise.private.evidence.records import Records, same_rows
from clipwise.private.evidence.traffic import BATCH, CARRIED, PLACE, Traffic, tensors_in, users_frame
from clipwise.private.evidence.twin import SameDraws, Twin, alive

_REJECTING = {"_sample_dirichlet", "_standard_gamma", "binomial", "poisson"}  # another record moves the others' draws
_READS_SIZES = {"_pack_padded_sequence"}  # past the tensors
_NAMESPACES = {"aten", "prim", "prims", "profiler", "quantized", "mkldnn", "torchvision", "torchaudio"}
_SWEEP, _LARGE = 64, 1 << 24  # kernels between two looks for storages that are gone; bytes after which one is due
METADATA_ONLY = {
    "empty_like", "full_like", "new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros", "ones_like",
    "rand_like", "randint_like", "randn_like", "zeros_like",
}  # fmt: skip


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
def _is_safe(func: Any) -> bool:
    """Whether a kernel takes any numbers. Solvers may not end on some, and operations that are none of torch's fail."""
    name = _short(func)
    solves = name.startswith(("linalg_", "_linalg_")) and name != "linalg_vector_norm"
    return func.namespace in ("aten", "prim", "prims") and not solves


@cache
def _short(func: Any) -> str:
    return str(func.name()).removeprefix("aten::").partition(".")[0]


def _takes_memory(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a kernel makes no memory of its own: it gives a tensor some that is there, or the content of a file."""
    return _short(func) == "from_file" or any(
        isinstance(value, (torch.UntypedStorage, torch.TypedStorage)) for value in (*args, *kwargs.values())
    )


def _is_foreign(func: Any) -> bool:
    """Whether an operation is none of torch's: what it reads besides its arguments is out of sight."""
    return func.namespace not in _NAMESPACES


class Watch:
    """The marks and twins of one forward pass. `start` when the batch is handed out, `stop` when the losses are there.

    `familiar` says of memory that this pass did not make whether it is constant; `carried` are numbers that left the
    tensors in earlier passes; `before` is `repeatable` of the last one: what comes again was not drawn at random.
    """

    def __init__(
        self,
        records: Records,
        twins: Sequence[Twin],
        familiar: Callable[[Tensor, bool], bool],
        carried: frozenset[float] = frozenset(),
        before: frozenset[int] = frozenset(),
    ) -> None:
        self.records, self.twins = records, list(twins)
        self.count = 0
        self.written: set[int] = set()  # memory from before that a kernel wrote into
        self.made_by: dict[int, int] = {}  # which kernel made a storage
        self.drawn: set[int] = set()  # constants drawn at random, and those made outside torch, which may be
        self.again: set[int] = set()  # of these, what was the same in the last pass
        self.before = before
        self._states: list[int] = []  # of the program's own generators, where a kernel drew from them
        self.foreign: dict[str, None] = {}  # operations that are none of torch's
        self.place = ""  # where samples first met a constant that differs from place to place
        self.outside = Outside()
        self.is_changed_outside = False  # memory without marks was, by something other than torch
        self._familiar = familiar
        self._marks: dict[int, int] = {}
        self._known: set[int] = set()
        self._from_before: set[int] = set()
        self._alive: list[StorageWeakRef] = []  # addresses are not given out again while these are held
        self._nodes: dict[int, int] = {}
        self._inside = -1  # the custom function whose forward pass is running
        self.traffic = Traffic(self, carried)
        self._modes: Modes | None = None
        self._first = 0
        for tensor in records.tensors:
            self.mark(tensor, BATCH)
            for twin in self.twins:
                twin.enter(tensor, twin.change.applied(tensor))

    def start(self) -> None:
        """Enter the modes."""
        self._first = torch._C._autograd._get_sequence_nr()
        self._modes = Modes(self)
        self._modes.enter()

    @property
    def is_on(self) -> bool:
        """Whether the modes are entered."""
        return self._modes is not None

    @property
    def repeatable(self) -> frozenset[int]:
        """Hashes of the tensors made of plain values, and of the states that generators were in."""
        return frozenset((*self.traffic.imports, *self._states))

    def stop(self) -> None:
        """Leave the modes. They hold the pass, and are not held by it: its memory is free once it is let go."""
        if self._modes is not None:
            self._modes.leave()
            self._modes = None

    def forget_twins(self) -> None:
        """Let go of what the values would be, and were: the pass was judged. What comes from the batch stays known."""
        self.twins.clear()
        self.outside = Outside()

    # Marks

    def mark(self, tensor: Tensor, marks: int) -> None:
        """Mark a tensor's memory."""
        memory = memory_of(tensor)
        self._marks[memory] = self._marks.get(memory, 0) | marks
        self.remember(tensor, memory)

    def remember(self, tensor: Tensor, memory: int) -> None:
        """Know memory from now on; its address is not given out again while this pass is held."""
        if memory not in self._known:
            self._known.add(memory)
            self.made_by[memory] = self.count
            try:
                self._alive.append(StorageWeakRef(backing(tensor).untyped_storage()))
            except (NotImplementedError, RuntimeError):
                self._alive.append(tensor)  # type: ignore[arg-type]

    def marks_of(self, tensor: Tensor) -> int:
        """What a tensor's memory holds; 0 for constants."""
        memory = memory_of(tensor)
        marks = self._marks.get(memory)
        if marks is not None:
            return marks
        if memory not in self._known:
            if self._asked(tensor):
                self.remember(tensor, memory)
                self._from_before.add(memory)
            else:
                self.mark(tensor, CARRIED)
                return CARRIED
        return 0

    def _asked(self, tensor: Tensor) -> bool:
        with _disable_current_modes():  # of another run, which is not to see this
            return self._familiar(tensor, not self.traffic.depth)  # inside TorchScript, no call of torch

    def knows(self, memory: int) -> bool:
        """Whether this pass has met the memory."""
        return memory in self._known

    def held_marks(self, memory: int) -> int:
        """The marks of memory that this pass has met; 0 for any other."""
        return self._marks.get(memory, 0)

    def last_written(self, memory: int) -> int:
        """The last kernel that made or wrote memory."""
        return self.made_by.get(memory, 0)

    def constants_alive(self) -> Iterator[Tensor]:
        """Memory that this pass made without the batch and that somebody still holds: caches, tables."""
        for ref in self._alive:
            if isinstance(ref, StorageWeakRef) and self.made_here(ref.cdata) and not ref.expired():
                storage = alive(ref)
                yield torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)

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
        if op_of(graph.names[k]).only_input:
            return max((found[child] for child, _ in graph.edges[k] if child >= 0), default=BATCH)
        if graph.names[k] == IN_PLACE_WRITE:  # made after the kernel of the change, whose node came just before
            number -= 1
        return self._nodes.get(number, BATCH)

    def origins(self, graph: Graph) -> list[Origin]:
        """Whether each node's operands come from constants or from the batch."""
        return [Origin.BATCH if marks else Origin.CONSTANT for marks in self.node_marks(graph)]

    def is_constant(self, tensor: Tensor) -> bool:
        """Whether memory that this pass neither made nor met is constant."""
        with _disable_current_modes():
            return self._familiar(tensor, False)

    # Kernels

    def kernel(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a kernel, and once more for every twin where its arguments come from the batch."""
        self.count += 1
        name = _short(func)
        if _is_foreign(func):
            self.foreign.setdefault(str(func.name()))
        if name == "lift_fresh":
            return self.traffic.imported(func, args, kwargs)
        if name in ("_local_scalar_dense", "item"):  # the latter under inference mode
            return self.traffic.scalar(func, args)
        marks = 0
        if name not in METADATA_ONLY or self._shape_follows_records(args):
            for tensor in tensors_in((args, kwargs)):
                marks |= self.marks_of(tensor)
        marks |= self.traffic.marks(func, args, kwargs, marks)
        written = list(self._arguments(func, args, kwargs))
        marks |= self._written_outside(written)
        if marks:
            self._note_factors(name, args)
            if is_row_by_row(func, name):
                marks |= self._place(name, args)
        self.note_node(marks)
        if not marks:
            drawn = self._drawn_into(args, kwargs) if _is_random(func) else set()
            out = func(*args, **kwargs)
            if _takes_memory(func, args, kwargs):  # what it holds is asked when it is read
                return out
            made = [memory_of(tensor) for tensor in (*tensors_in(out), *written)]
            for tensor in tensors_in(out):
                self.remember(tensor, memory_of(tensor))
            self.written.update(memory_of(t) for t in written)
            self._hold(written)
            drawn.update(made)
            for held in (self.drawn, self.again):
                if held and any(memory_of(t) in held for t in tensors_in(args)):
                    held.update(made)
            return out
        return self._marked_kernel(func, args, kwargs, marks, written)

    def _written_outside(self, written: Sequence[Tensor]) -> int:
        """The marks of memory that a kernel writes into, where something other than torch wrote into it before."""
        found = 0
        for tensor in written:
            memory = memory_of(tensor)
            is_first = memory in self._from_before and memory not in self.written
            with _disable_current_modes():
                may_be = is_first or (not self._marks.get(memory) and self.outside.changed(memory))
            if may_be and not self._asked(tensor):
                found |= self._change(tensor)
        return found

    def _change(self, tensor: Tensor) -> int:
        self.is_changed_outside = True
        self.mark(tensor, CARRIED)
        return CARRIED

    def _hold(self, written: Sequence[Tensor]) -> None:
        for tensor in written:
            if memory_of(tensor) in self._from_before or memory_of(tensor) in self.outside:
                with _disable_current_modes():
                    self.outside.hold(tensor)

    def settle(self) -> None:
        """At the end: memory that something other than torch wrote last is of unknown origin."""
        for tensor in list(self.outside.all_changed()):
            if not self._marks.get(memory_of(tensor)) and not self._asked(tensor):
                self._change(tensor)

    def _drawn_into(self, args: Any, kwargs: Any) -> set[int]:
        """Where random numbers belong: those of a generator that was seeded again are the same in every pass."""
        own = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Generator)]
        if not own or own[0] is torch.default_generator:
            return self.drawn
        self._states.append(hash(own[0].get_state().numpy().tobytes()))
        return self.again if self._states[-1] in self.before else self.drawn

    def _is_written_down(self, tensor: Tensor) -> bool:
        """Whether this pass made a constant of numbers alone."""
        memory = memory_of(tensor)
        return self.made_here(memory) and memory not in self.drawn and memory not in self.again

    def _note_factors(self, name: str, args: Any) -> None:
        """Note constant factors of samples that are made in this pass."""
        made = [tensor for tensor in factors_of(name, args) if self._is_written_down(tensor)]
        if made:
            with _disable_current_modes():
                self.traffic.note_factors(made, name in CLASS_WEIGHTS)

    def _place(self, name: str, args: Any) -> int:
        """The mark of samples that meet a constant with other values for every one of them; numbers among the rest."""
        with _disable_current_modes():
            operands, read = operands_of(name, args)
        fixed = [t for t in read if not self.marks_of(t) and memory_of(t) not in self.drawn]
        ours = [t for t in operands if self.marks_of(t)]
        if are_row_numbers(name, (*ours, *fixed)):
            return 0
        with _disable_current_modes():
            if any(t.dim() and t.shape[0] == self.records.size for t in ours):  # else twins see what becomes of it
                self.traffic.note_constants(t for t in fixed if self._is_written_down(t))
            if not meets_places(ours, fixed, self.twins, self.records.size):
                return 0
        self.place = self.place or _where()
        return PLACE

    def _shape_follows_records(self, args: Any) -> bool:
        return any(twin.has_odd and any(map(twin.is_odd, tensors_in(args))) for twin in self.twins)

    def _arguments(self, func: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
        for place, name in _written(func):
            yield from tensors_in(args[place] if place < len(args) else kwargs.get(name))

    def _marked_kernel(self, func: Any, args: Any, kwargs: Any, marks: int, written: list[Tensor]) -> Any:
        draws = SameDraws(kwargs.get("generator")) if _is_random(func) else None
        name = _short(func)
        others = []
        for place, twin in enumerate(self.twins):
            if not twin.broken:
                if twin.change.wild and not (_is_safe(func) and all(t.is_cpu for t in tensors_in((args, kwargs)))):
                    twin.broken = f"{name} may not take such numbers"
                    continue
                if name in _REJECTING or (name in _READS_SIZES and not twin.change.rigid):
                    twin.broken = f"what {name} does follows the records"
                    continue
                for tensor in written:
                    twin.keep_apart(tensor)
                others.append((twin, self._run_twin(func, args, kwargs, place, written)))
                if draws is not None:
                    draws.rewind()
        out = func(*args, **kwargs)
        results = list(tensors_in(out))
        for tensor in (*results, *written):
            self.mark(tensor, marks)
        for tensor in written:
            self.written.add(memory_of(tensor))
            self.made_by[memory_of(tensor)] = self.count
        if any(tensor.dim() for tensor in results):
            self.traffic.settle()
        for twin, theirs in others:
            if twin.broken:
                continue
            if isinstance(out, (bool, int, float)) and theirs != out:
                twin.left.append((self.count, f"{name} of the batch gave a plain value"))
            self._pair(twin, func, results, list(tensors_in(theirs)))
        if self.count % _SWEEP == 0 or sum(tensor.numel() * tensor.element_size() for tensor in results) > _LARGE:
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
            return [theirs(item) for item in value] if isinstance(value, (list, tuple)) else value

        try:
            mapped, named = [theirs(value) for value in args], {name: theirs(value) for name, value in kwargs.items()}
            if self.traffic.busy:
                mapped, named = self.traffic.other_numbers(func, mapped, named, place)
            return func(*mapped, **named)
        except Exception as error:
            twin.broken = f"{_short(func)} does not take the other records ({type(error).__name__})"
            return None

    def _pair(self, twin: Twin, func: Any, ours: list[Tensor], theirs: list[Tensor]) -> None:
        if len(ours) != len(theirs):
            twin.broken = f"the number of results of {_short(func)} follows the records"
        for tensor, other in zip(ours, theirs, strict=False):
            if tensor.is_quantized or tensor.is_nested:
                twin.broken = f"{_short(func)} gives a {'nested' if tensor.is_nested else 'quantized'} tensor"
                return
            if tensor.layout is not torch.strided or other.layout is not torch.strided:
                twin.broken = f"{_short(func)} gives a sparse tensor"
                return
            if twin.change.wild and twin.strays(tensor, other):
                twin.broken = f"integers or sizes of {_short(func)} follow the records"
                return
            if tensor.shape != other.shape or twin.is_odd(tensor):
                twin.pair_odd(tensor, other)
                continue
            if memory_of(tensor) not in twin:
                twin.pair(tensor, other)
            if twin.moved is None and tensor.dim() and tensor.shape[0] == self.records.size:
                self._look(twin, func, tensor, other)

    def _look(self, twin: Twin, func: Any, tensor: Tensor, other: Tensor) -> None:
        """Remember the first operation that moved a kept sample's row: where to look, if samples mix."""
        with _disable_current_modes():
            moved = not same_rows(tensor.detach(), other.detach(), twin.change.kept)
        if moved:
            twin.moved = _short(func), _where()
            twin.paired = tuple(tensor.shape) == (self.records.size,) * 2

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A function of torch as the user called it."""
        return self.traffic.call(func, args, kwargs)

    def note_node(self, marks: int) -> None:
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


def _where() -> str:
    """The user's line that is being executed: the innermost one outside torch and this package."""
    frame = users_frame()
    return "" if frame is None else f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"
