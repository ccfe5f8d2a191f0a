"""Every operation of torch that the engine knows, by the name of its node: one row each.

A row says how the operation's shared operands get their per-sample gradients (`rule`), whether it only moves elements
(`view`), how the batch can enter (`entry`, `data`), whether it keeps samples apart (`routing`), and how a probe passes
it (`passing`). What a row leaves out is not known and treated with caution: no rule, so that a parameter that meets the
batch here is refused; no routing, so that layouts are probed at every step. Names are matched exactly: another number
is another operation, and the function of a user may be named like one of torch.

A new operation is a row here, a function in `rules/` if it needs arithmetic of its own, and a row of the tests
(`tests/engine/test_ops.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import chain, islice

from torch import Tensor
from torch.autograd.graph import GradientEdge

from clipwise.engine import passing, routes, views
from clipwise.engine.graph import Graph, differentiate
from clipwise.engine.node import COMPILED, IN_PLACE_WRITE, RECURRENCE, Node, output_metas
from clipwise.engine.passing import Passing
from clipwise.engine.products import (
    BatchedProduct,
    ImageProduct,
    MatrixProduct,
    Product,
    RecurrentProduct,
    RowProduct,
    StackProduct,
    VectorProduct,
)
from clipwise.engine.routes import Route, writing
from clipwise.engine.rules import Rule, autograd, broadcast, conv, linear, norm, recurrent, table
from clipwise.engine.rules.recurrent import Joined, Pulled
from clipwise.engine.views import Region, View

Gradients = tuple[Tensor | None, ...]


class BatchEntry(Enum):
    """How the batch can enter at an operation through an operand that is not differentiated."""

    OPEN = 0  # through any such operand
    NEVER = 1  # there is none
    INDEX = 2  # as an index, or as one of the values that are joined
    LOOKUP = 3  # the same, and axes of the output are those of the index
    ELEMENTWISE = 4  # by broadcasting: the output is larger than the parameters alone would make it
    ROWWISE = 5  # the same, and every row of an operand is treated alike


def _nothing(node: Node) -> str:
    return ""


def _never(node: Node) -> None:
    return None


@dataclass(frozen=True)
class Op:
    """What is known about some nodes; `names` are separated by spaces."""

    names: str
    rule: Rule | None = None
    view: View | None = None
    entry: BatchEntry = BatchEntry.OPEN
    data: Product | None = None
    routing: Route = routes.unknown
    passing: Passing = passing.finite
    by_index: bool = False  # rows are moved by an index or a mask
    joined: Joined | None = None  # several outputs that receive gradients, as one
    backward: Pulled | None = None  # gives the gradients of inputs, so that autograd need not run the node
    only_input: bool = False  # reads nothing but its input, whatever it makes of it
    refusal: str = ""  # why there is no rule, and what to do
    hides: Callable[[Node], str] = _nothing  # the same of a single node, whose rule cannot serve it
    turning: View | None = None  # what it does to axes, where it is no view by itself
    reorders: Callable[[Node], int | None] = _never  # the axis of samples in an order that is read at every step

    @property
    def is_live(self) -> bool:
        """Whether the rule runs the node's own backward and so needs the graph kept alive."""
        return self.rule in (autograd.by_autograd, autograd.broadcast_by_autograd)

    def turned(self, node: Node, rank: int) -> list[int] | None:
        """For every axis of the output, which one of the input it is; None where axes are not turned."""
        view = self.view or self.turning
        return None if view is None else view.turned(node, rank)

    @property
    def keeps_rows(self) -> bool:
        """Whether every row of an operand is treated alike and kept."""
        return self.entry is BatchEntry.ROWWISE or (self.view is not None and self.view.is_whole)


def _product(names: str, rule: Rule, data: Product, joined: Joined | None = None, backward: Pulled | None = None) -> Op:
    """A product knows its routing by itself."""
    return Op(names, rule, data=data, routing=data.routing, passing=data.passing, joined=joined, backward=backward)


def _view(names: str, view: View) -> Op:
    """A view of the whole keeps elements in order; a part is taken along an axis."""
    routing = routes.in_place if view.is_whole else routes.along_axes
    return Op(names, view=view, entry=BatchEntry.NEVER, routing=routing, only_input=True)


def _pointwise(names: str, rule: Rule | None = None, entry: BatchEntry = BatchEntry.OPEN) -> Op:
    """Each element of the output is computed from the elements at its place."""
    return Op(names, rule, entry=entry, routing=routes.in_place, passing=passing.pointwise)


_STACK = StackProduct(0, 1)

_FUSED = (
    "is a fused recurrent kernel that hides how often its weights are used. Run the forward pass unfused: `with "
    "torch.backends.cudnn.flags(enabled=False): ...`."
)

_COMPILED = (
    "is a region compiled by torch.compile with parameters inside: compiled code does not show where they are used. "
    "Compile only functions and modules without parameters (activations, losses, the core of attention), and call "
    "layers that have parameters without torch.compile."
)

TABLE = (
    # Matrix products: the positions of the two factors among the node's inputs.
    _product("MmBackward0", linear.mm, MatrixProduct(0, 1)),
    _product("BmmBackward0", linear.mm, BatchedProduct(0, 1)),
    _product("AddmmBackward0", linear.addmm, MatrixProduct(1, 2)),
    _product("BaddbmmBackward0", linear.baddbmm, BatchedProduct(1, 2)),
    _product("LinearBackward0", linear.linear, RowProduct(0, 1)),
    _product("MvBackward0", linear.mv, VectorProduct(0, 1)),
    _product("AddmvBackward0", linear.addmv, VectorProduct(1, 2)),
    _product("GroupedMmBackward0", linear.grouped_mm, Product(0, 1)),
    # Convolutions.
    _product("ConvolutionBackward0", conv.convolution, ImageProduct(0, 1)),
    Op("ConvolutionBackwardBackward0", autograd.by_autograd, routing=routes.samples_first),
    # Recurrent layers in one kernel.
    _product("MkldnnRnnLayerBackward0", recurrent.lstm, RecurrentProduct(0, 1), recurrent.STATES,
             recurrent.PULLED_STATES),
    Op("CudnnRnnBackward0 MiopenRnnBackward0", recurrent.stack, data=_STACK, routing=_STACK.routing,
       passing=_STACK.passing, joined=recurrent.STACKED_STATES, backward=recurrent.PULLED_STATES,
       hides=recurrent.hidden_inside, reorders=recurrent.slots_axis),
    # A recurrent cell in one kernel.
    Op("ThnnFusedLstmCellBackward0", recurrent.lstm_cell, routing=routes.samples_first, passing=passing.cell,
       joined=recurrent.CELL_STATES),
    Op("ThnnFusedGruCellBackward0", recurrent.gru_cell, routing=routes.samples_first, passing=passing.cell),
    # A recurrent layer without one, over packed sequences (`fold.py`).
    Op(RECURRENCE, recurrent.steps, entry=BatchEntry.INDEX, joined=recurrent.PACKED_ROWS,
       backward=recurrent.PULLED_ROWS),
    # Normalization.
    Op("NativeLayerNormBackward0", norm.layer_norm, entry=BatchEntry.ROWWISE, routing=routes.layer_norm,
       passing=passing.layer_norm),
    Op("NativeGroupNormBackward0", norm.group_norm, routing=routes.samples_first, passing=passing.group_norm),
    Op("NativeBatchNormBackward0", norm.batch_norm, routing=routes.batch_norm, passing=passing.batch_norm),
    Op("NativeLayerNormBackwardBackward0", autograd.by_autograd),
    # Tables.
    Op("EmbeddingBackward0", table.embedding, entry=BatchEntry.LOOKUP, by_index=True),
    Op("EmbeddingBagBackward0", table.embedding_bag, entry=BatchEntry.INDEX, by_index=True),
    Op("IndexBackward0", table.index, entry=BatchEntry.LOOKUP, routing=routes.index, by_index=True),
    Op("IndexSelectBackward0", table.index_select, entry=BatchEntry.LOOKUP, routing=routes.along_axes, by_index=True),
    Op("GatherBackward0", autograd.by_autograd, entry=BatchEntry.INDEX, routing=routes.along_axes, by_index=True),
    Op("TakeBackward0", autograd.by_autograd, entry=BatchEntry.INDEX),
    # Values written into others: the position of what is written.
    Op("IndexAddBackward0", autograd.by_autograd, routing=writing(1, routes.along_axes), by_index=True),
    Op("IndexCopyBackward0", autograd.by_autograd, routing=writing(1, routes.along_axes), by_index=True),
    Op("IndexPutBackward0", autograd.by_autograd, routing=writing(1), by_index=True),
    Op("MaskedScatterBackward0", autograd.by_autograd, routing=writing(1), by_index=True),
    Op("ScatterAddBackward0", autograd.by_autograd, routing=writing(1, routes.along_axes)),
    Op("ScatterBackward0", autograd.by_autograd, routing=writing(1, routes.along_axes)),
    Op("ScatterBackward1", routing=writing(1, routes.along_axes)),
    Op(IN_PLACE_WRITE, autograd.by_autograd),
    # Values joined, padded, repeated, moved along.
    Op("CatBackward0", autograd.by_autograd, entry=BatchEntry.INDEX, routing=routes.along_axes),
    Op("StackBackward0", autograd.by_autograd, entry=BatchEntry.INDEX, routing=routes.stack),
    Op("ConstantPadNdBackward0", autograd.by_autograd, routing=routes.padding),
    Op("RollBackward0", autograd.by_autograd, routing=routes.along_axes),
    Op("RepeatBackward0", broadcast.repeat, entry=BatchEntry.ROWWISE, routing=routes.repeat),
    Op("ExpandBackward0", broadcast.expand, entry=BatchEntry.ROWWISE, routing=routes.in_place, only_input=True),
    # Views.
    _view("AliasBackward0 CloneBackward0 ToCopyBackward0", views.Same()),
    _view("TBackward0", views.Transposed()),
    _view("TransposeBackward0", views.Swapped()),
    _view("PermuteBackward0", views.Permuted()),
    _view("SqueezeBackward0 SqueezeBackward1 SqueezeBackward2 SqueezeBackward3 SqueezeBackward4 UnsqueezeBackward0",
          views.Squeezed()),
    _view("UnsafeViewBackward0 ViewBackward0", views.Reshaped()),
    _view("SelectBackward0", Region(views.selected, drops_axis=True)),
    _view("UnbindBackward0", Region(views.unbound, drops_axis=True)),
    _view("SliceBackward0", Region(views.sliced)),
    _view("SplitBackward0", Region(views.split)),
    _view("SplitWithSizesBackward0", Region(views.split_with_sizes)),
    _view("UnsafeSplitBackward0", views.Copied()),
    Op("AsStridedBackward0 AsStridedBackward1", only_input=True),
    Op("FillBackward0 FillBackward1 FillBackward2 FillBackward3", routing=routes.in_place),
    Op("SqueezeBackward5 UnsqueezeBackward1", routing=routes.in_place),
    Op("TBackward1", routing=routes.in_place, turning=views.Transposed()),
    Op("TransposeBackward1", routing=routes.in_place, turning=views.Swapped()),
    # Element by element, with several operands that may be broadcast.
    _pointwise("AddBackward0", broadcast.add, BatchEntry.ROWWISE),
    _pointwise("SubBackward0", broadcast.sub, BatchEntry.ROWWISE),
    _pointwise("RsubBackward0", broadcast.rsub, BatchEntry.ELEMENTWISE),
    _pointwise("MulBackward0", broadcast.mul, BatchEntry.ROWWISE),
    _pointwise("DivBackward0", broadcast.div, BatchEntry.ROWWISE),
    _pointwise("WhereBackward0", broadcast.where, BatchEntry.ROWWISE),
    _pointwise("MaskedFillBackward1", broadcast.masked_fill, BatchEntry.ELEMENTWISE),
    _pointwise("PreluKernelBackward0", broadcast.prelu),
    _pointwise("LerpBackward0 LerpBackward1", broadcast.lerp),
    _pointwise("AddcmulBackward0", broadcast.addcmul),
    _pointwise("PowBackward1", broadcast.power),
    _pointwise("MaximumBackward0", broadcast.maximum),
    _pointwise("MinimumBackward0", broadcast.minimum),
    _pointwise("AddcdivBackward0", autograd.broadcast_by_autograd),
    _pointwise("Atan2Backward0", autograd.broadcast_by_autograd),
    _pointwise("ClampBackward0 ClampMaxBackward1 ClampMinBackward1", autograd.broadcast_by_autograd),
    _pointwise("CopysignBackward0", autograd.broadcast_by_autograd),
    _pointwise("XlogyBackward0", autograd.broadcast_by_autograd),
    Op("FmaxBackward0 FminBackward0", autograd.broadcast_by_autograd),
    Op("HypotBackward0", autograd.broadcast_by_autograd),
    Op("LogaddexpBackward0", autograd.broadcast_by_autograd),
    Op("RemainderBackward1", autograd.broadcast_by_autograd),
    # Element by element, with one operand.
    _pointwise("MaskedFillBackward0 RsubBackward1", entry=BatchEntry.ELEMENTWISE),
    _pointwise(
        "EluBackward0 ExpBackward0 GeluBackward0 HardswishBackward0 LeakyReluBackward0 LogBackward0 MishBackward0 "
        "NegBackward0 PowBackward0 ReluBackward0 RsqrtBackward0 SigmoidBackward0 SiluBackward0 SoftplusBackward0 "
        "SqrtBackward0 TanhBackward0", entry=BatchEntry.ROWWISE,
    ),
    _pointwise(
        "AbsBackward0 AcosBackward0 AddBackward1 AsinBackward0 AtanBackward0 CeluBackward0 CeluBackward1 "
        "ClampBackward1 ClampMaxBackward0 ClampMinBackward0 CosBackward0 CoshBackward0 DivBackward1 DivBackward2 "
        "DivBackward3 EluBackward1 ErfBackward0 ErfcBackward0 Exp2Backward0 Expm1Backward0 HardsigmoidBackward0 "
        "HardtanhBackward0 LeakyReluBackward1 Log10Backward0 Log1PBackward0 Log2Backward0 LogSigmoidBackward0 "
        "MulBackward1 NanToNumBackward0 NativeDropoutBackward0 PowBackward2 ReciprocalBackward0 SignBackward0 "
        "SinBackward0 SinhBackward0 SoftshrinkBackward0 SubBackward1 TanBackward0 ThresholdBackward0 "
        "ThresholdBackward1 XlogyBackward1 XlogyBackward2"
    ),
    # Along some axes: reductions, scans, sorting.
    Op("LogSoftmaxBackward0 SafeSoftmaxBackward0 SoftmaxBackward0", routing=routes.along_axes, passing=passing.softmax),
    Op(
        "AmaxBackward0 AminBackward0 CummaxBackward0 CumprodBackward0 CumsumBackward0 FlipBackward0 GluBackward0 "
        "KthvalueBackward0 LinalgVectorNormBackward0 LogcumsumexpBackward0 LogsumexpBackward0 MaxBackward0 "
        "MaxBackward1 MeanBackward0 MeanBackward1 MedianBackward0 MedianBackward1 MinBackward0 MinBackward1 "
        "NormBackward0 NormBackward1 NormBackward2 NormBackward3 ProdBackward0 ProdBackward1 SortBackward0 "
        "SortBackward1 StdBackward0 SumBackward0 SumBackward1 TopkBackward0 VarBackward0", routing=routes.along_axes,
    ),
    # Attention.
    Op(
        "ScaledDotProductCudnnAttentionBackward0 ScaledDotProductEfficientAttentionBackward0 "
        "ScaledDotProductFlashAttentionBackward0 ScaledDotProductFlashAttentionForCpuBackward0 "
        "ScaledDotProductFusedAttentionOverrideableBackward0", routing=routes.attention,
    ),
    # Samples on the first axis, each worked on by itself: pooling, resizing, patches, and their second derivatives.
    Op(
        "AdaptiveAvgPool2DBackward0 AdaptiveAvgPool3DBackward0 AdaptiveMaxPool2DBackward0 AdaptiveMaxPool3DBackward0 "
        "AvgPool2DBackward0 AvgPool3DBackward0 Col2ImBackward0 ConvolutionBackward1 "
        "ConvolutionBackwardOverrideableBackward0 ConvolutionOverrideableBackward0 GridSampler2DBackward0 "
        "GridSampler2DCpuFallbackBackward0 GridSampler3DBackward0 Im2ColBackward0 MaxPool2DBackward0 "
        "MaxPool2DWithIndicesBackward0 MaxPool3DWithIndicesBackward0 PixelShuffleBackward0 PixelUnshuffleBackward0 "
        "ReflectionPad1DBackward0 ReflectionPad2DBackward0 ReflectionPad3DBackward0 ReplicationPad1DBackward0 "
        "ReplicationPad2DBackward0 ReplicationPad3DBackward0 UpsampleBicubic2DAaBackward0 UpsampleBicubic2DBackward0 "
        "UpsampleBilinear2DAaBackward0 UpsampleBilinear2DBackward0 UpsampleLanczos2DAaBackward0 "
        "UpsampleLinear1DBackward0 UpsampleNearest1DBackward0 UpsampleNearest2DBackward0 UpsampleNearest3DBackward0 "
        "UpsampleNearestExact1DBackward0 UpsampleNearestExact2DBackward0 UpsampleNearestExact3DBackward0 "
        "UpsampleTrilinear3DBackward0", routing=routes.samples_first,
    ),
    Op(
        "AdaptiveAvgPool2DBackwardBackward0 AdaptiveAvgPool3DBackwardBackward0 AdaptiveMaxPool2DBackwardBackward0 "
        "AdaptiveMaxPool3DBackwardBackward0 AvgPool2DBackwardBackward0 AvgPool3DBackwardBackward0 "
        "GridSampler2DBackwardBackward0 GridSampler2DCpuFallbackBackwardBackward0 GridSampler3DBackwardBackward0 "
        "MaxPool2DBackwardBackward0 MaxPool2DWithIndicesBackwardBackward0 MaxPool3DWithIndicesBackwardBackward0 "
        "ReflectionPad1DBackwardBackward0 ReflectionPad2DBackwardBackward0 ReflectionPad3DBackwardBackward0 "
        "ReplicationPad1DBackwardBackward0 ReplicationPad2DBackwardBackward0 ReplicationPad3DBackwardBackward0 "
        "UpsampleBicubic2DAaBackwardBackward0 UpsampleBicubic2DBackwardBackward0 UpsampleBilinear2DAaBackwardBackward0 "
        "UpsampleBilinear2DBackwardBackward0 UpsampleLanczos2DAaBackwardBackward0 UpsampleLinear1DBackwardBackward0 "
        "UpsampleNearest1DBackwardBackward0 UpsampleNearest2DBackwardBackward0 UpsampleNearest3DBackwardBackward0 "
        "UpsampleNearestExact1DBackwardBackward0 UpsampleNearestExact2DBackwardBackward0 "
        "UpsampleNearestExact3DBackwardBackward0 UpsampleTrilinear3DBackwardBackward0", routing=routes.samples_first,
    ),
    # Losses.
    Op(
        "BinaryCrossEntropyBackward0 BinaryCrossEntropyWithLogitsBackward0 HuberLossBackward0 MseLossBackward0 "
        "SmoothL1LossBackward0", routing=routes.loss,
    ),
    Op("NllLoss2DBackward0 NllLossBackward0", routing=routes.class_loss),
    # Others that their own backward serves.
    Op("CdistBackward0 TrilinearBackward0", autograd.by_autograd),
    # A region without parameters may keep the samples apart. With parameters it is refused.
    Op(COMPILED, routing=routes.compiled, refusal=_COMPILED),
    # Refused, with a way out.
    Op("CudnnRnnBackwardBackward0", refusal=_FUSED),
)  # fmt: skip

OPS = {name: op for op in TABLE for name in op.names.split()}
_UNKNOWN = Op("")

# What a recurrent layer without a fused kernel is made of (`fold.py`).
PRODUCTS = {"AddmmBackward0": (0, 1, 2), "MmBackward0": (None, 0, 1)}  # positions of bias, rows and weight
JOINED, TURNED, PART, VIEW = "CatBackward0", "TBackward0", "SliceBackward0", "ViewBackward0"
PARTS = frozenset((PART, "UnsafeSplitBackward0"))
INSIDE = PARTS | {
    "AddBackward0", "MulBackward0", "ReluBackward0", "RsubBackward1", "SigmoidBackward0", "SubBackward0",
    "TanhBackward0", JOINED,
}  # fmt: skip


def op_of(name: str) -> Op:
    """What is known about a node, by its name."""
    return OPS.get(name, _UNKNOWN)


def rule_of(graph: Graph, k: int) -> Rule | None:
    """The rule of a node; None when there is none."""
    return autograd.by_autograd if autograd.is_opaque(graph, k) else op_of(graph.names[k]).rule


def lacks_rule(graph: Graph, k: int) -> bool:
    """Whether no rule can serve a node."""
    return rule_of(graph, k) is None or bool(op_of(graph.names[k]).hides(graph.nodes[k]))


def is_live(graph: Graph, k: int) -> bool:
    """Whether the rule of a node needs the graph kept alive."""
    return op_of(graph.names[k]).is_live or autograd.is_opaque(graph, k)


def outputs_of(graph: Graph, k: int) -> range:
    """The numbers of all outputs of a node; the first of a folded layer are its rows, which nobody else reads."""
    return range(int(graph.names[k] == RECURRENCE), len(output_metas(graph.nodes[k])))


def edges_of(graph: Graph, k: int, whole: bool = False) -> list[GradientEdge | Tensor]:
    """Of the outputs of a node that are asked for their gradients; `whole`: of all that are read by others."""
    if graph.names[k] == RECURRENCE and not whole:
        return [GradientEdge(product, 0) for product in (*graph.nodes[k].products, *graph.nodes[k].parts)]
    several = whole or op_of(graph.names[k]).joined is not None
    return [graph.gradient_edge((k, output)) for output in (outputs_of(graph, k) if several else range(1))]


def gradients_at(
    starts: Sequence[GradientEdge | Tensor],
    cotangents: Sequence[Tensor],
    graph: Graph,
    nodes: Sequence[int],
    *,
    keep: bool,
    whole: Collection[int] = (),
) -> list[Gradients]:
    """The gradients of nodes, each of the outputs that count, of some nodes all; None where nothing arrives."""
    ends = [edges_of(graph, k, k in whole) for k in nodes]
    if not starts:
        return [tuple(None for _ in edges) for edges in ends]
    found = iter(differentiate(starts, list(chain.from_iterable(ends)), cotangents, keep=keep))
    return [tuple(islice(found, len(edges))) for edges in ends]


def as_one(graph: Graph, k: int, gradients: Sequence[Tensor | None]) -> Tensor | None:
    """The gradient of a node, of all its outputs where several count; None where nothing arrives."""
    joined = op_of(graph.names[k]).joined
    return gradients[0] if joined is None else joined.join(graph.nodes[k], gradients)
