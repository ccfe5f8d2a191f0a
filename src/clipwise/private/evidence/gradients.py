"""Gradients of some samples' losses, with the true records and with others; and what the backward pass reads.

A sum of gradients hides small ones behind large ones. So every sample is weighted by its gradient's length, as the
engine will clip it, and every parameter is compared by itself. A group of parameters may be clipped alone, and there
the lengths may differ as they do not together. Parameters in which they differ widely get a pass of their own.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Hashable, Iterator, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes

from clipwise.engine import (
    Graph,
    Origin,
    backing,
    differentiate,
    lengths_beforehand,
    memory_of,
    negligible_norm,
    working_dtype,
)
from clipwise.private.evidence.modes import Modes
from clipwise.private.evidence.traffic import CARRIED, GATHERING, LEAVING, NUMBERS, gathered, tensors_in
from clipwise.private.evidence.watch import METADATA_ONLY, Watch

_WIDE = 1e3  # between the lengths of two samples that one pass compares
_ROUNDING = 8  # units in the last place of a gradient's length: shorter parts count as zero where a group is clipped


class Known:
    """Gradients with the true numbers for some samples, random weights each: those that were asked for last."""

    def __init__(self, losses: Tensor, graph: Graph, watch: Watch) -> None:
        self.losses, self._graph, self._watch = losses, graph, watch
        self.places = sorted({place for place in graph.leaf_parameter.values() if place >= 0})
        # tensors would make it a call of torch, and what hooks call inside one is not seen
        self._edges = [get_gradient_edge(t) for t in (losses, *(graph.parameters[place] for place in self.places))]
        self.reads = ""
        """What the backward pass read that is of unknown origin, once it was run."""
        self._was_read = False
        self._lengths: Tensor | None = None
        self._has_lengths = False
        self._asked: object = None
        self._found: list[Tensor | None] = []

    def passes(self, kept: Tensor) -> list[Tensor]:
        """What the kept samples' losses are weighted with: usually one pass does for all parameters."""
        kept = kept.to(self.losses.device)
        drawn = self._drawn(kept.numel())
        lengths = self._lengths_of(kept)
        if lengths is None:
            return [self._cotangent(kept, drawn)]
        dtype = working_dtype(self.losses, self._graph.parameters)
        whole = lengths.square().sum(0).sqrt().clamp(min=negligible_norm(dtype))
        least = _ROUNDING * torch.finfo(dtype).eps * whole
        left, scales = list(range(len(lengths))), [whole]
        while left:
            counts, ratios = lengths[left] > least, lengths[left] / scales[-1]
            widest = torch.where(counts, ratios, 0).amax(1) / torch.where(counts, ratios, math.inf).amin(1)
            left = [k for k, wide in zip(left, widest.tolist(), strict=True) if wide > _WIDE]
            if left:
                scales.append(torch.maximum(lengths[left[0]], least))
                left = left[1:]
        return [self._cotangent(kept, drawn / scale) for scale in scales]

    def plain(self, kept: Tensor) -> Tensor:
        """The same whatever the lengths are."""
        return self._cotangent(kept, self._drawn(kept.numel()))

    def _drawn(self, number: int) -> Tensor:
        generator = torch.Generator().manual_seed(number)
        drawn = torch.randn(number, generator=generator, dtype=torch.float64, device="cpu")
        return drawn.to(self.losses.device)

    def _cotangent(self, kept: Tensor, weights: Tensor) -> Tensor:
        cotangent = torch.zeros_like(self.losses)
        cotangent[kept.to(self.losses.device)] = weights.to(self.losses.dtype)
        return cotangent

    def _lengths_of(self, kept: Tensor) -> Tensor | None:
        """Of the kept samples' gradients, (parameters, samples)."""
        if not self._has_lengths:
            self._has_lengths = True
            found = None
            if not self._graph.computes_in(torch.float16):  # where any weight would change what underflows
                found = lengths_beforehand(self.losses, self._graph.parameters, _Seen(self._watch))
            if found:  # some beyond all bounds are the longest that are not
                longest = math.sqrt(torch.finfo(self.losses.dtype).max)
                self._lengths = torch.stack(list(found.values())).nan_to_num(longest, longest)
        return None if self._lengths is None else self._lengths[:, kept]

    def of(self, cotangent: Tensor, *asked: object) -> list[Tensor | None]:
        """With the true numbers. `asked` is what makes the cotangent another one."""
        if asked != self._asked:
            self._found = []  # let go first
            self._asked, self._found = asked, self._read(cotangent)
        return self._found

    def now(self, cotangent: Tensor) -> list[Tensor | None]:
        """With the numbers that are there now."""
        root, *leaves = self._edges
        return list(differentiate([root], leaves, [cotangent], keep=True))

    def look_at_reads(self) -> None:
        """Run a backward pass for what it reads, where none was run for gradients."""
        if not self._was_read:
            try:
                self._read(torch.ones_like(self.losses))
            except RuntimeError:  # the engine meets it, and says it
                return

    def _read(self, cotangent: Tensor) -> list[Tensor | None]:
        if self._was_read:
            return self.now(cotangent)
        self._was_read = True
        reads = _Reads(self._watch, cotangent)
        modes = Modes(reads)
        modes.enter()
        try:
            found = self.now(cotangent)
        finally:
            modes.leave()
        self.reads = reads.unknown_in(found)
        return found


class _Seen:
    """What the watched pass shows, as evidence for lengths."""

    key: Hashable = "before the step"
    watched = strict = True

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def origins(self, graph: Graph) -> list[Origin]:
        return self._watch.origins(graph)


class _Reads:
    """Sees every kernel and call of a backward pass. Hooks and custom functions read what the forward pass never met.

    What a kernel reads is made in this pass, met by the forward pass, or constant. What is computed from anything else
    must not reach a gradient; on a log it may be.
    """

    def __init__(self, watch: Watch, cotangent: Tensor) -> None:
        self._watch = watch
        self._first = ""
        self._made: dict[int, StorageWeakRef | Tensor] = {}  # addresses are not given out again while these are held
        self._reached: set[int] = set()  # memory that was computed from unknown memory
        self._numbers: set[float] = set()  # and numbers that were
        self._arrays = False  # numbers of such memory left unseen by kernels: any tensor made of numbers may hold them
        self._make(cotangent)

    def unknown_in(self, gradients: Sequence[Tensor | None]) -> str:
        """The first kernel that read unknown memory, where that reached a gradient."""
        reached = any(gradient is not None and self._is_unknown(gradient) for gradient in gradients)
        return (self._first or "a custom function") if reached else ""

    def kernel(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A kernel, without the calls of torch inside it."""
        name = str(func.name()).removeprefix("aten::").partition(".")[0]
        reached = self._reads_unknown(name, args, kwargs)
        out = func(*args, **kwargs)
        made = list(tensors_in(out))
        for tensor in made:
            self._make(tensor)
        if reached:
            self._reach(name, *made, *_written(func, args, kwargs))
            if isinstance(out, float):
                self._numbers.add(out)
        return out

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A function of torch as a hook calls it: some read numbers without a kernel."""
        out, name = func(*args, **kwargs), getattr(func, "__name__", "")
        if name in GATHERING:
            with torch._C.DisableTorchFunction(), _disable_current_modes():
                if any(map(self._is_unknown, gathered(func, args, kwargs))):
                    self._reach(name, *tensors_in(out))
        elif (name in LEAVING or name in NUMBERS) and args and isinstance(args[0], Tensor):
            with torch._C.DisableTorchFunction(), _disable_current_modes():
                if self._is_unknown(args[0]):
                    self._leave(args[0], name)
        return out

    def _leave(self, tensor: Tensor, name: str) -> None:
        self._first = self._first or f"{name}{_where()}"
        self._arrays = self._arrays or name in LEAVING
        if tensor.is_floating_point() and tensor.layout is torch.strided and not tensor.is_nested:
            self._numbers.update(tensor.flatten().tolist())

    def _reach(self, name: str, *tensors: Tensor) -> None:
        self._first = self._first or f"{name}{_where()}"
        self._reached.update(map(memory_of, tensors))

    def _reads_unknown(self, name: str, args: Any, kwargs: Any) -> bool:
        given = (*args, *kwargs.values())
        if self._numbers and any(isinstance(value, float) and value in self._numbers for value in given):
            return True
        if name == "lift_fresh":  # of Python numbers
            return self._arrays or self._holds_numbers(args[0])
        return name not in METADATA_ONLY and any(map(self._is_unknown, tensors_in(given)))

    def _holds_numbers(self, tensor: Tensor) -> bool:
        """Whether a tensor that was made of Python numbers holds one that was computed from unknown memory."""
        if not self._numbers or not tensor.is_floating_point():
            return False
        numbers = torch.tensor(list(self._numbers), dtype=torch.float64, device="cpu").to(tensor.dtype)
        return not set(numbers.tolist()).isdisjoint(tensor.flatten().tolist())

    def _make(self, tensor: Tensor) -> None:
        memory = memory_of(tensor)
        if memory not in self._made and not self._watch.knows(memory):
            try:
                self._made[memory] = StorageWeakRef(backing(tensor).untyped_storage())
            except (NotImplementedError, RuntimeError):
                self._made[memory] = tensor

    def _is_unknown(self, tensor: Tensor) -> bool:
        memory = memory_of(tensor)
        if memory in self._reached:
            return True
        if self._watch.knows(memory):
            return bool(self._watch.held_marks(memory) & CARRIED)
        return memory not in self._made and not self._watch.is_constant(tensor)


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
    """What a kernel writes into."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from tensors_in(args[place] if place < len(args) else kwargs.get(argument.name))


def _where() -> str:
    """The line of a hook or a custom function, if one is running."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "_engine_run_backward":
        if frame.f_globals.get("__name__", "").partition(".")[0] not in ("torch", "clipwise"):
            return f" ({frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno})"
        frame = frame.f_back
    return ""
