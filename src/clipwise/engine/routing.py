"""Which nodes after a meeting keep the samples apart, whatever the numbers.

A cached layout stays true only while nothing between the meeting and the losses can bring samples together or reorder
them without a change of the graph's structure. Only kinds of nodes that are known to keep samples apart are trusted;
with any other on the graph the layouts are probed at every step, which is exact and costs a backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum

import torch
from torch import Tensor

from clipwise.engine.graph import Graph, Node
from clipwise.engine.layout import Layout

# Every element stays in its place, or elements keep their order.
_IN_PLACE = frozenset({
    "Abs", "Acos", "Add", "Addcdiv", "Addcmul", "Alias", "Asin", "Atan", "Atan2", "Celu", "Clamp", "ClampMax",
    "ClampMin", "Clone", "Cos", "Cosh", "Div", "Elu", "Erf", "Erfc", "Exp", "Exp2", "Expand", "Expm1", "Fill",
    "Gelu", "Hardsigmoid", "Hardswish", "Hardtanh", "LeakyRelu", "Lerp", "Log", "Log10", "Log1p", "Log2",
    "LogSigmoid", "MaskedFill", "Maximum", "Minimum", "Mish", "Mul", "NanToNum", "NativeDropout", "Neg",
    "Permute", "Pow", "PreluKernel", "Reciprocal", "Relu", "ReshapeAlias", "Rsqrt", "Rsub", "Sigmoid", "Sign",
    "Silu", "Sin", "Sinh", "Softplus", "Softshrink", "Sqrt", "Squeeze", "Sub", "T", "Tan", "Tanh", "Threshold",
    "ToCopy", "Transpose", "Unflatten", "UnsafeView", "Unsqueeze", "View", "Where", "Xlogy",
})  # fmt: skip
_VIEWS = frozenset({
    "Alias", "Clone", "Expand", "Fill", "Permute", "ReshapeAlias", "Squeeze", "T", "ToCopy", "Transpose", "Unflatten",
    "UnsafeView", "Unsqueeze", "View",
})  # fmt: skip
POINTWISE = _IN_PLACE - _VIEWS  # each element of the output is computed from the elements at its place
# Work along `_saved_dim(s)` of their input and keep every other axis apart.
_ALONG_AXIS = frozenset({
    "Amax", "Amin", "Argmax", "Cat", "Cummax", "Cumprod", "Cumsum", "Flip", "Gather", "Glu", "IndexAdd",
    "IndexCopy", "IndexSelect", "Kthvalue", "LinalgVectorNorm", "LogCumsumExp", "LogSoftmax", "Logcumsumexp",
    "Logsumexp", "Max", "Mean", "Median", "Min", "Norm", "Prod", "Roll", "SafeSoftmax", "Scatter", "ScatterAdd",
    "Select", "Slice", "Softmax", "Sort", "Split", "SplitWithSizes", "Std", "Sum", "TakeAlongDim", "Topk",
    "Unbind", "UnsafeSplit", "Var",
})  # fmt: skip
# Samples on the first axis are kept apart by definition.
_BATCHED_FIRST = (
    "AdaptiveAvgPool", "AdaptiveMaxPool", "AvgPool", "Col2Im", "Convolution", "GridSampler", "Im2Col", "MaxPool",
    "NativeGroupNorm", "PixelShuffle", "PixelUnshuffle", "ReflectionPad", "ReplicationPad", "Upsample",
)  # fmt: skip
_LOSSES = frozenset({
    "BinaryCrossEntropy", "BinaryCrossEntropyWithLogits", "HuberLoss", "MseLoss", "NllLoss", "NllLoss2D",
    "SmoothL1Loss",
})  # fmt: skip
_MOVED_OPERAND = {"IndexAdd": 1, "IndexCopy": 1, "IndexPut": 1, "Scatter": 1, "ScatterAdd": 1, "MaskedScatter": 1}
_INDEXED = frozenset({
    "Embedding", "EmbeddingBag", "Gather", "Index", "IndexAdd", "IndexCopy", "IndexPut", "IndexSelect",
    "MaskedScatter",
})  # fmt: skip
_PRODUCTS = {"Mm": (0, 1), "Addmm": (1, 2), "Bmm": (0, 1), "Baddbmm": (1, 2), "Mv": (0, 1), "Addmv": (1, 2)}

LayoutOf = Callable[[int], Layout | None]  # the one layout of a node's output, when it is known


class Routing(Enum):
    """Whether a node can bring samples together, or reorder them, without a change of structure."""

    NEVER = 0
    IDENTITY = 1  # not while its leading index is 0, 1, 2, ...: to be looked at in every step
    MAYBE = 2  # layouts must be probed in every step


def kind_of(name: str) -> str:
    """What a node does: its name without torch's decoration."""
    return name.rstrip("0123456789").removesuffix("Backward").lstrip("_")


def is_index(name: str) -> bool:
    """Whether a node moves rows by an index or a mask."""
    return kind_of(name) in _INDEXED


def layouts_needed(graph: Graph, k: int, is_batch: Callable[[int], bool]) -> Iterable[int]:
    """The nodes whose layout must be known to tell whether node k keeps samples apart."""
    if kind_of(graph.names[k]) in _IN_PLACE and _same_sizes(graph, k, is_batch):
        return ()
    return (k, *(child for child, _ in graph.edges[k] if child >= 0 and is_batch(child)))


def routing(graph: Graph, k: int, layout_of: LayoutOf, is_batch: Callable[[int], bool]) -> Routing:
    """How far a node can be trusted."""
    kind, edges, node = kind_of(graph.names[k]), graph.edges[k], graph.nodes[k]
    if kind in _IN_PLACE and _same_sizes(graph, k, is_batch):
        return Routing.NEVER
    moved = _MOVED_OPERAND.get(kind)
    if moved is not None and not (moved < len(edges) and edges[moved][0] >= 0 and is_batch(edges[moved][0])):
        return Routing.NEVER  # what it writes is not computed from the batch; what it writes into stays in place
    own = layout_of(k)
    if own is not None and kind in _PRODUCTS:
        return Routing.NEVER if _product(graph, k, kind, own.axis, is_batch) else Routing.MAYBE
    below = [layout_of(child) for child, _ in edges if child >= 0 and is_batch(child)]
    if own is None or any(layout is None for layout in below):
        return _stacked_apart(graph, k, kind, own, below)
    inputs = [layout for layout in below if layout is not None]
    if kind == "Index":
        return _index(graph, k, own)
    if kind in _IN_PLACE:
        safe = _broadcast_beside(graph, k, layout_of, is_batch, own)
    elif kind in _ALONG_AXIS:
        safe = _along_another_axis(node, graph, k, inputs)
    else:
        safe = _known_kind(node, kind, own.axis, len(graph.shape((k, 0))), inputs)
    return Routing.NEVER if safe else Routing.MAYBE


def _same_sizes(graph: Graph, k: int, is_batch: Callable[[int], bool]) -> bool:
    """Whether no operand computed from the batch is broadcast."""
    size = graph.shape((k, 0)).numel()
    return all(graph.shape(e).numel() == size for e in graph.edges[k] if e[0] >= 0 and is_batch(e[0]))


def _broadcast_beside(graph: Graph, k: int, layout_of: LayoutOf, is_batch: Callable[[int], bool], own: Layout) -> bool:
    """Whether operands that are broadcast keep the batch on the axis where the output has it."""
    rank = len(graph.shape((k, 0)))
    for edge in graph.edges[k]:
        if edge[0] >= 0 and is_batch(edge[0]):
            layout = layout_of(edge[0])
            if layout is None or layout.axis + rank - len(graph.shape(edge)) != own.axis:
                return False
    return True


def _stacked_apart(graph: Graph, k: int, kind: str, own: Layout | None, below: list[Layout | None]) -> Routing:
    """Values of whole batches stacked on a new axis keep their order."""
    apart = kind == "Stack" and own is not None and all(below) and graph.nodes[k]._saved_dim != own.axis
    return Routing.NEVER if apart else Routing.MAYBE


def _index(graph: Graph, k: int, own: Layout) -> Routing:
    given = [index is not None for index in graph.nodes[k]._saved_indices]
    together = "".join("x" if g else " " for g in given).strip()
    if own.axis != 0 or " " in together:  # separated indices move their axes to the front
        return Routing.MAYBE
    if not given[0]:
        return Routing.NEVER
    return Routing.IDENTITY if is_identity(graph, k) else Routing.MAYBE


def _along_another_axis(node: Node, graph: Graph, k: int, inputs: list[Layout]) -> bool:
    """Whether a node works along axes that do not hold the batch."""
    saved = getattr(node, "_saved_dims", None)
    if saved is None:
        saved = getattr(node, "_saved_dim", None)
    if saved is None:
        return False  # a reduction of everything
    rank = max(len(graph.shape(edge)) for edge in graph.edges[k] if edge[0] >= 0)
    dims = [saved] if isinstance(saved, int) else list(saved)
    axes = {(dim - (1 << 64) if dim >= 1 << 63 else dim) % max(rank, 1) for dim in dims}
    return bool(axes) and not axes.intersection(layout.axis for layout in inputs)


def _known_kind(node: Node, kind: str, axis: int, rank: int, inputs: list[Layout]) -> bool:
    """Whether a node of a kind with its own meaning of axes keeps the axis of the batch apart."""
    if kind.startswith("ScaledDotProduct"):
        return axis < rank - 2
    if kind.startswith(_BATCHED_FIRST):
        return axis == 0 and all(layout.axis == 0 for layout in inputs)
    if kind == "NativeBatchNorm":
        return axis == 0 and not node._saved_training
    if kind == "NativeLayerNorm":
        return axis < rank - len(node._saved_normalized_shape)
    if kind == "ConstantPadNd":
        return axis < rank - len(node._saved_pad) // 2
    if kind == "Repeat":
        return bool(node._saved_repeats[axis] == 1)
    if kind == "Stack":
        return bool(node._saved_dim != axis)
    return kind in _LOSSES and node._saved_reduction == 0


def _product(graph: Graph, k: int, kind: str, axis: int, is_batch: Callable[[int], bool]) -> bool:
    """A product keeps the axis of the factor that it comes from: that factor is the batch's, the other is not."""
    left, right = (graph.edges[k][i][0] for i in _PRODUCTS[kind])
    rank = len(graph.shape((k, 0)))
    if kind in ("Bmm", "Baddbmm") and axis == 0:
        return True  # stacks of matrices: sample with sample
    source, other = (right, left) if rank > 1 and axis == rank - 1 else (left, right)
    return source >= 0 and is_batch(source) and not (other >= 0 and is_batch(other))


def data_of(graph: Graph, k: int) -> Tensor | None:
    """The tensor of data that a node works on; None where its rows are all alike, which tell nothing of samples."""
    for attribute in ("_saved_self", "_saved_mat1", "_saved_input", "_saved_indices", "_saved_batch1"):
        tensor = getattr(graph.nodes[k], attribute, None)
        if isinstance(tensor, Tensor):
            return None if bool((tensor == tensor[:1]).all()) else tensor
    return None


def is_identity(graph: Graph, k: int) -> bool:
    """Whether the leading index of `x[i, ...]` is 0, 1, 2, ... along the first axis of x."""
    first: Tensor = graph.nodes[k]._saved_indices[0]
    size = graph.nodes[k]._saved_self_sym_sizes[0]
    if first.dtype == torch.bool or first.dim() == 0 or first.shape[0] != size:
        return False
    steps = torch.arange(size, device=first.device).view(-1, *([1] * (first.dim() - 1)))
    return bool((first == steps).all())
