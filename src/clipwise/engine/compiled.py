"""Regions that `torch.compile` made one node of: does such a node keep the samples apart, whatever the numbers?

AOTAutograd keeps the graph of a region's backward pass. It is read here, operation by operation and without numbers:
along which axis do the samples of a gradient lie? Only operations that are known to keep them apart are passed. With
any other (an index, a sort, a sum over the samples) nothing is proved, and layouts are probed at every step.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from clipwise.engine.graph import Graph
from clipwise.engine.node import COMPILED, Node, at_hand, output_meta, output_metas
from clipwise.errors import UnsupportedNode

_MADE_BY = "torch._functorch._aot_autograd.runtime_wrappers"  # a user's own function may have the same name
_REMEMBERED = 1024  # batch sizes and other shapes of one region

Operand: TypeAlias = tuple[tuple[int, ...], int]  # its shape, and the axis of the samples
Axis: TypeAlias = int | None  # of the samples; None for what does not depend on the gradient
Known: TypeAlias = dict[Any, tuple[Any, Axis | tuple[Axis, ...]]]  # a node of the graph -> its value without numbers

_verdicts: WeakKeyDictionary[type, dict[object, bool]] = WeakKeyDictionary()
_graphs: WeakKeyDictionary[type, Any] = WeakKeyDictionary()


class _Unclear(Exception):
    """Nothing is proved."""


def refuse_donated(graph: Graph) -> None:
    """Refuse compiled regions that overwrite what they saved: only one backward pass through them is right.

    Torch leaves it out where it compiles the backward pass later, for a graph that is kept.
    """
    if COMPILED not in graph.names:
        return
    for node, name in zip(graph.nodes, graph.names, strict=True):
        kind = getattr(type(node), "_forward_cls", None) if name == COMPILED else None
        later = getattr(kind, "compiled_bw", None) is None
        if not later and getattr(getattr(kind, "metadata", None), "bw_donated_idxs", None):
            raise UnsupportedNode(
                f"{name} is a region compiled by torch.compile that may be differentiated only once (donated buffers), "
                "which leaves nothing to check it with. Set torch._functorch.config.donated_buffer = False before "
                "anything is compiled."
            )


def may_hold(graph: Graph, k: int, batch_size: int) -> bool:
    """Whether a compiled region may read the batch by an operand that is not differentiated, as far as sizes show.

    The region is one node: what it made of the batch before it brought its rows together is not on the graph. Only the
    sizes of its output and of what it saved can tell, its parameters apart.
    """
    node = graph.nodes[k]
    if all(child >= 0 for child, _ in graph.edges[k]):
        return False
    sizes = list(graph.shape((k, 0)))
    try:
        if not at_hand(node):
            return True
        own = {parameter.data_ptr() for parameter in graph.parameters}
        held = [*node.saved_tensors, *node._tensors_no_vc_check]
        sizes += [size for tensor in held if tensor.data_ptr() not in own for size in tensor.shape]
        sizes += [size for size in node.symints if isinstance(size, int)]
    except (AttributeError, RuntimeError):  # another version of torch, or saved tensors that were written to
        return True
    return any(size and size % batch_size == 0 for size in sizes)


def keeps_apart(node: Node, axis: int, operands: Sequence[Operand]) -> bool:
    """Whether each operand's gradient at place i of its axis is computed from place i of the output's `axis` only.

    Guarantees: true only if it holds for all numbers, in these shapes.
    """
    kind: Any = getattr(type(node), "_forward_cls", None)
    if getattr(kind, "__module__", "") != _MADE_BY or not at_hand(node) or len(output_metas(node)) != 1:
        return False
    try:
        values = [*node.symints, *node.saved_tensors, *node._tensors_no_vc_check]
        if node.opaque_objects or kind.maybe_subclass_metadata is not None:
            return False
    except (AttributeError, RuntimeError):  # another version of torch, or saved tensors that were written to
        return False
    values.append(_Output(output_meta(node)))
    key = (tuple(map(_form, values)), axis, tuple(operands))
    known = _verdicts.setdefault(kind, {})
    if key not in known:
        if len(known) >= _REMEMBERED:
            known.clear()
        known[key] = _proved(kind, values, axis, operands)
    return known[key]


class _Output:
    """The gradient that arrives, without numbers."""

    def __init__(self, meta: Any) -> None:
        self.shape, self.dtype, self.device = tuple(meta.shape), meta.dtype, meta.device

    def stride(self) -> tuple[int, ...]:
        """As autograd gives it where nobody says otherwise."""
        return tuple(prod(self.shape[k + 1 :]) for k in range(len(self.shape)))


def _form(value: Any) -> object:
    """What determines the shapes of everything that is computed from a value."""
    if isinstance(value, (Tensor, _Output)):
        return tuple(value.shape), value.stride(), value.dtype, value.device
    return value


def _proved(kind: Any, values: Sequence[Any], axis: int, operands: Sequence[Operand]) -> bool:
    try:
        return _read(_graph_of(kind), values, axis) == list(operands)
    except Exception:  # an operation that cannot be run without numbers, another version of torch: all mean no
        return False


def _graph_of(kind: Any) -> Any:
    """The graph of the backward pass: kept since it was traced, or with the compiled code that torch found on disk."""
    found = _graphs.get(kind)
    if found is None:
        info = kind._lazy_backward_info
        found = _graphs[kind] = info.bw_module if hasattr(info, "bw_module") else info.bw_module_fn()
    return found


def _read(module: Any, values: Sequence[Any], axis: int) -> list[Operand]:
    """The shapes of the gradients that the graph gives, and the axes of their samples. The last value is the output."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    known: Known = {}
    given = iter(values)
    with FakeTensorMode(allow_non_fake_inputs=True):
        for node in module.graph.nodes:
            if node.op == "placeholder":
                value = next(given)
                is_gradient = isinstance(value, _Output)
                if is_gradient is not str(node.target).startswith("tangents"):
                    raise _Unclear
                known[node] = _without_numbers(value), axis if is_gradient else None
            elif node.op == "get_attr" and isinstance(constant := getattr(module, node.target), Tensor):
                known[node] = _without_numbers(constant), None
            elif node.op == "call_function":
                known[node] = _called(node, known)
            elif node.op == "output":
                if next(given, None) is not None:
                    raise _Unclear
                return [_operand(result, known) for result in node.args[0] if result is not None]
            else:
                raise _Unclear
    raise _Unclear


def _operand(result: Any, known: Known) -> Operand:
    value, axis = known[result]
    if not isinstance(axis, int):  # a gradient that does not depend on what arrives is no sample's own
        raise _Unclear
    return tuple(value.shape), axis


def _without_numbers(value: Any) -> Any:
    if not isinstance(value, (Tensor, _Output)):
        return value
    return torch.empty_strided(tuple(value.shape), value.stride(), dtype=value.dtype, device=value.device)


def _called(node: Any, known: Known) -> tuple[Any, Axis | tuple[Axis, ...]]:
    from torch.fx.node import map_arg

    args, kwargs = (map_arg(part, lambda n: known[n][0]) for part in (node.args, node.kwargs))
    value = node.target(*args, **kwargs)
    carrying = [n for n in node.all_input_nodes if known[n][1] is not None]
    if not carrying:
        return value, None
    if any(given in carrying for given in node.kwargs.values()) or not _HARMLESS.issuperset(node.kwargs):
        raise _Unclear  # the rules below read axes by their place
    if node.target is operator.getitem:
        axes = known[node.args[0]][1]
        if not isinstance(axes, tuple):
            raise _Unclear
        return value, axes[node.args[1]]
    if node.target._schema.is_mutable:
        raise _Unclear
    name = node.target._schema.name
    if name in _ONLY_SHAPES:
        return value, None
    found = [known[n] for n in carrying]
    call = _Call(args, value, [(v, a) for v, a in found if isinstance(a, int)], [n in carrying for n in node.args])
    if len(call.carrying) != len(found):
        raise _Unclear
    if torch.Tag.pointwise in node.target.tags:
        return value, _in_place(call)
    return value, _KEEPING[name](call)


class _Call:
    """An operation without numbers: its arguments, its value, and the operands that depend on the gradient."""

    def __init__(self, args: Any, value: Any, carrying: list[tuple[Any, int]], mine: list[bool]) -> None:
        self.args, self.value, self.carrying, self.mine = args, value, carrying, mine

    @property
    def axis(self) -> int:
        """The axis of the one operand that depends on the gradient, which is the first."""
        if len(self.carrying) != 1 or not self.mine[0] or any(self.mine[1:]):
            raise _Unclear
        return self.carrying[0][1]

    @property
    def rank(self) -> int:
        """The number of axes of the first operand."""
        return len(self.args[0].shape)

    def dim(self, place: int, default: int, rank: int | None = None) -> int:
        """An axis among the arguments, counted from the front."""
        given: int = self.args[place] if place < len(self.args) else default
        return given % (rank or self.rank)


def _one(axes: Iterable[int]) -> int:
    found = set(axes)
    if len(found) != 1:
        raise _Unclear
    return found.pop()


def _demand(holds: bool) -> None:
    if not holds:
        raise _Unclear


def _in_place(call: _Call) -> int:
    """Each element is computed from those at its place; an operand may be broadcast, but not along the samples."""
    shape, axes = call.value.shape, []
    for operand, axis in call.carrying:
        moved = axis + len(shape) - operand.dim()
        _demand(operand.shape[axis] == shape[moved])
        axes.append(moved)
    return _one(axes)


def _viewed(call: _Call) -> int:
    """The order of elements is kept: the axis is where as many elements lie before it and along it."""
    before, after, axis = call.args[0].shape, call.value.shape, call.axis
    outer = prod(before[:axis])
    places = [k for k, size in enumerate(after) if size == before[axis] and prod(after[:k]) == outer]
    _demand(call.value.numel() > 0)
    return _one(places)


def _permuted(call: _Call) -> int:
    return [d % call.rank for d in call.args[1]].index(call.axis)


def _swapped(call: _Call) -> int:
    a, b = call.dim(1, 0), call.dim(2, 1)
    return {a: b, b: a}.get(call.axis, call.axis)


def _turned(call: _Call) -> int:
    return call.rank - 1 - call.axis


def _with_one_more(call: _Call) -> int:
    return call.axis + (call.dim(1, 0, call.rank + 1) <= call.axis)


def _reduced(call: _Call) -> int:
    """A sum or another reduction along other axes than that of the samples."""
    given = call.args[1] if len(call.args) > 1 else None
    dims = {d % call.rank for d in ([given] if isinstance(given, int) else given or ())}
    _demand(bool(dims) and call.axis not in dims)
    kept = call.value.dim() == call.rank
    return call.axis if kept else call.axis - sum(d < call.axis for d in dims)


def _squeezed(call: _Call) -> int:
    dims = {d % call.rank for d in ([call.args[1]] if isinstance(call.args[1], int) else call.args[1])}
    _demand(call.axis not in dims)
    removed = [d for d in dims if d < call.axis and call.args[0].shape[d] == 1]
    return call.axis - len(removed)


def _softmax(call: _Call) -> int:
    """Along another axis than that of the samples."""
    _demand(call.dim(2, 0) != call.axis)
    return call.axis


def _sliced(place: int) -> Callable[[_Call], int]:
    """A part along another axis than that of the samples, or all of them: of the same length is only the whole."""

    def after(call: _Call) -> int:
        axis = call.axis
        _demand(call.dim(place, 0) != axis or call.value.shape[axis] == call.args[0].shape[axis])
        return axis

    return after


def _selected(call: _Call) -> int:
    dim = call.dim(1, 0)
    _demand(dim != call.axis)
    return call.axis - (dim < call.axis)


def _unselected(call: _Call) -> int:
    return call.axis + (call.dim(2, 0, call.rank + 1) <= call.axis)


def _joined(call: _Call) -> int:
    axis = _one(axis for _, axis in call.carrying)
    dim = call.args[1] if len(call.args) > 1 else 0
    _demand(dim % call.value.dim() != axis)
    return axis


def _written(call: _Call) -> int:
    """A part is written into a whole, along another axis than that of the samples, or all of them."""
    axis = _one(axis for _, axis in call.carrying)
    _demand(call.dim(2, 0) != axis or call.args[1].shape[axis] == call.args[0].shape[axis])
    return axis


def _written_at(call: _Call) -> int:
    """The same at one place of an axis, which the part does not have."""
    dim = call.dim(2, 0)
    axis = _one(axis + (dim <= axis if operand.dim() < call.rank else 0) for operand, axis in call.carrying)
    _demand(dim != axis)
    return axis


def _product(call: _Call) -> int:
    """A matrix product, (.., m, k) and (.., k, n): the samples are not what is summed over."""
    _demand(len(call.carrying) == 1 and sum(call.mine) == 1)
    axis, rank = call.carrying[0][1], call.value.dim()
    _demand(axis != (rank - 1 if call.mine[0] else rank - 2))
    return axis


def _attention(call: _Call) -> tuple[Axis, ...]:
    """Rows meet rows of the same leading axes only."""
    _demand(call.axis < call.rank - 2 and len(call.value) == 3)
    return (call.axis,) * 3


def _nll(call: _Call) -> int:
    """One loss for each row, not reduced."""
    _demand(call.args[4] == 0 and call.rank == 1)
    return call.axis


_HARMLESS = frozenset(
    {"device", "dtype", "implicit", "layout", "memory_format", "non_blocking", "pin_memory", "rounding_mode"}
    | {"alpha", "approximate", "attn_mask", "scale", "value"}
)
_ONLY_SHAPES = frozenset(
    f"aten::{name}"
    for name in ("empty_like", "full_like", "new_empty", "new_full", "new_zeros", "ones_like", "zeros_like")
)
_KEEPING: dict[str, Callable[[_Call], Axis | tuple[Axis, ...]]] = {
    **dict.fromkeys(["aten::_to_copy", "aten::alias", "aten::detach", "aten::expand"], _in_place),
    **dict.fromkeys(
        ["aten::elu_backward", "aten::leaky_relu_backward", "aten::softplus_backward", "aten::hardtanh_backward"],
        _in_place,
    ),
    **dict.fromkeys(["aten::_unsafe_view", "aten::reshape", "aten::view"], _viewed),
    "aten::permute": _permuted,
    "aten::transpose": _swapped,
    "aten::t": _turned,
    "aten::unsqueeze": _with_one_more,
    **dict.fromkeys(["aten::amax", "aten::amin", "aten::mean", "aten::sum"], _reduced),
    "aten::squeeze": _squeezed,
    "aten::slice": _sliced(1),
    "aten::slice_backward": _sliced(2),
    "aten::slice_scatter": _written,
    "aten::select_scatter": _written_at,
    "aten::select": _selected,
    "aten::select_backward": _unselected,
    "aten::cat": _joined,
    "aten::_softmax_backward_data": _softmax,
    "aten::_log_softmax_backward_data": _softmax,
    **dict.fromkeys(["aten::bmm", "aten::mm"], _product),
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": _attention,
    "aten::nll_loss_backward": _nll,
}
