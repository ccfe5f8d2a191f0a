"""The one reader of torch's nodes: what the forward pass saved on them, and what their outputs look like.

None of it is a promised interface of torch. What changes with a version of torch is changed here, and in the table of
operations (`ops.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from operator import attrgetter
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

LEAF = "torch::autograd::AccumulateGrad"
IN_PLACE_WRITE = "torch::autograd::CopySlices"
REENTRANT = "CheckpointFunctionBackward"
COMPILED = "CompiledFunctionBackward"
RECURRENCE = "clipwise::Recurrence"

_SAVED = "_saved_"
_RAW = "_raw_saved_"

Node: TypeAlias = Any  # torch's node classes are generated; there is no useful static type
Reader: TypeAlias = Callable[[Node], object]


class Meta(Protocol):
    """What autograd knows about an output of a node."""

    @property
    def shape(self) -> Sequence[int]: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def is_nested_tensor(self) -> bool: ...


def name_of(node: Node) -> str:
    """The operation, by torch's name for it."""
    name: str = node.name()
    return name.replace("ReshapeAlias", "View")  # one operation, called the second way while a pass is watched


def output_metas(node: Node) -> Sequence[Meta]:
    """All outputs of a node; torch calls them the inputs of its backward."""
    metas: Sequence[Meta] = node._input_metadata
    return metas


def output_meta(node: Node, output: int = 0) -> Meta:
    """One output of a node."""
    meta: Meta = node._input_metadata[output]
    return meta


def output_shapes(nodes: Sequence[Node], edges: Sequence[tuple[int, int]]) -> list[Sequence[int]]:
    """The shapes of many outputs, at every step."""
    return [nodes[k]._input_metadata[output].shape for k, output in edges]


class _Rows(NamedTuple):
    """What is known about the rows of all times."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    is_nested_tensor: bool = False


class Slots(NamedTuple):
    """Which rows of a folded layer belong together (`slots.py`): the slots of its rows."""

    rows: Tensor  # of the products of all times, one below the other
    left: Tensor  # of the values that leave it, one below the other


class Recurrence:
    """The products of all times, and that of what they read, as one node in place of those of torch (`fold.py`).

    Its first output are the rows of the products; the others are the values that leave the chain. Its inputs are what
    the entry reads, bias and weight of the products, and bias and weight of the entry; without biases three of them.
    `left` are the values that leave it before they are padded; `slots` tell which rows belong together, if it is known.
    """

    def __init__(
        self,
        products: Sequence[Node],
        entry: Node,
        parts: Sequence[Node],
        inner: Sequence[Node],
        ends: Sequence[Node],
        left: Sequence[Node],
        slots: Slots | None,
    ) -> None:
        self.products, self.entry, self.parts, self.inner, self.ends = products, entry, parts, inner, ends
        self.left, self.slots = left, slots
        first = output_meta(products[0])
        rows = _Rows((output_meta(entry).shape[0], first.shape[1]), first.dtype)
        self._input_metadata: Sequence[Meta] = [rows, *(output_meta(end) for end in ends)]
        self.next_functions: tuple[Any, ...] = ()

    def _sequence_nr(self) -> int:
        number: int = self.products[-1]._sequence_nr()
        return number


def saved(node: Node, name: str) -> Any:
    """A value that the forward pass saved, by torch's name for it: `saved(node, "mat1")`."""
    return getattr(node, _SAVED + name)


def saved_or(node: Node, name: str, default: Any) -> Any:
    """The same, for nodes that need not have it."""
    return getattr(node, _SAVED + name, default)


def signed(value: int | None) -> int:
    """torch shows negative integers of a node as unsigned 64-bit ones, and none where it means the first."""
    value = value or 0
    return value - (1 << 64) if value >= 1 << 63 else value


def saved_int(node: Node, name: str) -> int:
    """An integer that may be negative: an axis, an index."""
    return signed(getattr(node, _SAVED + name))


def saved_ints(node: Node, name: str) -> list[int]:
    """The same, several."""
    return [signed(value) for value in getattr(node, _SAVED + name)]


def saved_axes(node: Node) -> list[int] | None:
    """The axes that a node works along; None where it saved none, as a reduction of everything."""
    found = saved_or(node, "dims", None)
    if found is None:
        found = saved_or(node, "dim", None)
    if found is None:
        return None
    return [signed(axis) for axis in ([found] if isinstance(found, int) else found)]


@cache
def _members(kind: type, prefix: str) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith(prefix))


def saved_tensors(node: Node) -> Iterator[Tensor]:
    """The tensors that a node saved for its backward pass."""
    if isinstance(node, Recurrence):
        for product in (*node.products, node.entry):
            yield from saved_tensors(product)
    for name in _members(node.__class__, _SAVED):
        value = getattr(node, name)
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(item, Tensor):
                yield item


def saved_floats(node: Node) -> list[Tensor]:
    """Those of them that hold floating point numbers."""
    return [tensor for tensor in saved_tensors(node) if tensor.is_floating_point()]


def at_hand(node: Node) -> bool:
    """Whether a node holds the tensors it saved, rather than a way to make them again (checkpointing, offloading)."""
    if isinstance(node, Recurrence):
        return all(map(at_hand, (*node.products, node.entry)))
    for name in _members(node.__class__, _RAW):
        value = getattr(node, name)
        if isinstance(value, (tuple, list)):
            if any(getattr(item, "unpack_hook", item) is not None for item in value):
                return False
        elif getattr(value, "unpack_hook", value) is not None:
            return False
    return True


# What of a node is structure, that a plan depends on, and what is only a size or a scale.


def _padded(values: Sequence[int]) -> tuple[bool, ...]:
    """Which ends of which axes are padded; by how much is a size."""
    return tuple(value != 0 for value in values)


def _repeated(values: Sequence[int]) -> tuple[bool, ...]:
    """Which axes are repeated; how often is a size."""
    return tuple(value != 1 for value in values)


def _number(value: object) -> object:
    """Integers are structure, floats only scale: they are read at every step, and may be annealed."""
    return None if isinstance(value, float) else value


_SIZES = frozenset({
    "C", "H", "HxW", "N", "W", "end", "hidden_size", "index", "input_lengths", "length", "max_k",
    "max_q", "max_seqlen_batch_k", "max_seqlen_batch_q", "output_size", "split_size", "split_sizes", "start",
    "storage_offset", "target_lengths",
})  # fmt: skip
_SCALES = frozenset({
    "alpha", "beta", "delta", "dropout", "dropout_p", "eps", "epsilon", "grad_factor", "initial", "input_scale",
    "lambd", "lower", "margin", "max", "max_val", "maxnorm", "min", "min_val", "negative_slope", "other", "scalar",
    "scalars", "scale", "scales", "scales_d", "scales_h", "scales_w", "self", "threshold", "upper", "value", "weight",
})  # fmt: skip
_SUMMARIES: dict[str, Callable[[Any], object]] = {
    "batch_sizes": bool, "exponent": _number, "normalized_shape": len, "pad": _padded, "repeats": _repeated,
}  # fmt: skip


@cache
def structure_names(kind: type) -> tuple[str, ...]:
    """What of a node is structure: every number, flag, word or list that is not known to be a size or a scale.

    Sizes may change from step to step, and so may numbers that only scale. Tensors also have a raw twin.
    """
    members = set(dir(kind))
    found = []
    for member in sorted(members):
        name = member.removeprefix(_SAVED)
        if name == member or _RAW + name in members or "_sym_" in name or name in _SIZES | _SCALES:
            continue
        if kind.__name__.startswith("AsStrided") or (name == "p" and "Dropout" in kind.__name__):
            continue
        found.append(name)
    return tuple(found)


@cache
def structure_readers(kind: type) -> tuple[Reader, ...]:
    """Functions of a node that read it, in the same order."""
    return tuple(_reader(name) for name in structure_names(kind))


def _reader(name: str) -> Reader:
    read, summary = attrgetter(_SAVED + name), _SUMMARIES.get(name)
    return read if summary is None else lambda node: summary(read(node))
