"""Which operations are trusted to keep samples apart, whatever the numbers; and which must be looked at again."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from clipwise.engine.graph import Graph, walk
from clipwise.engine.layout import Layout
from clipwise.engine.ops import BatchEntry, op_of
from clipwise.engine.origin import Origin
from clipwise.engine.plan import _Entry, _State
from clipwise.engine.routes import Routing, Site

Program: TypeAlias = Callable[..., Tensor]
NEVER, IDENTITY, MAYBE = Routing.NEVER, Routing.IDENTITY, Routing.MAYBE
B = 3
IMAGES = (B, 2, 4, 4)
SHIFTED, ROWS = torch.tensor([1, 2, 0]), torch.arange(B)
EMPTY = torch.zeros(0, dtype=torch.float64, requires_grad=True)
STATISTICS = (torch.zeros(2, dtype=torch.float64), torch.ones(2, dtype=torch.float64))


class Case(NamedTuple):
    """An operation on values that are computed from the batch, whose samples lie on the axes `below`."""

    node: str
    program: Program
    shapes: tuple[tuple[int, ...], ...]
    below: tuple[int | None, ...]  # of each operand; None: not known
    own: int | None  # of the result
    expected: Routing


def sampled(x: Tensor, places: Tensor) -> Tensor:
    return F.grid_sample(x, places, align_corners=False)


def attention(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x)


def case(node: str, program: Program, shape: tuple[int, ...], *axes: tuple[int, int, Routing]) -> list[Case]:
    """One operand, whose samples may lie on several axes: where they lie before and after, and what is expected."""
    return [Case(node, program, (shape,), (below,), own, expected) for below, own, expected in axes]


def pair(node: str, program: Program, *shapes: tuple[int, ...], below: tuple[int | None, ...],
         own: int | None, expected: Routing) -> list[Case]:  # fmt: skip
    return [Case(node, program, shapes, below, own, expected)]


ON_TWO, ON_THREE = (B, B), (B, B, B)
CASES = [
    # Element by element. What keeps its size keeps its places, whatever is known of them.
    *case("TanhBackward0", torch.tanh, (B, 2), (0, 0, NEVER)),
    Case("TanhBackward0", torch.tanh, ((B, 2),), (None,), None, NEVER),
    *pair("MulBackward0", torch.mul, (B, 2), (B, 1), below=(0, 0), own=0, expected=NEVER),
    *pair("MulBackward0", torch.mul, ON_TWO, (B,), below=(0, 0), own=0, expected=MAYBE),
    *pair("MulBackward0", torch.mul, ON_TWO, (B,), below=(1, 0), own=1, expected=NEVER),
    *pair("MulBackward0", torch.mul, (B, 2), (B, 1), below=(0, None), own=0, expected=MAYBE),
    *pair("MulBackward0", torch.mul, (B, 2), (B, 1), below=(0, 0), own=None, expected=MAYBE),
    *case("ExpandBackward0", lambda x: x.expand(B, 2, 2), (B, 1, 2), (0, 0, NEVER)),
    *case("ExpandBackward0", lambda x: x.expand(B, B), (1, B), (1, 1, NEVER), (1, 0, MAYBE)),
    # Along some axes.
    *case("SumBackward1", lambda x: x.sum(1), ON_TWO, (0, 0, NEVER), (1, 0, MAYBE)),
    *case("SumBackward1", lambda x: x.sum(-1), ON_TWO, (0, 0, NEVER), (1, 0, MAYBE)),
    *case("SumBackward1", lambda x: x.sum((0, -1)), ON_THREE, (0, 0, MAYBE), (1, 0, NEVER), (2, 0, MAYBE)),
    *case("CumsumBackward0", lambda x: x.cumsum(-1), (B,), (0, 0, MAYBE)),
    *case("CumsumBackward0", lambda x: x.cumsum(1), ON_TWO, (0, 0, NEVER), (1, 1, MAYBE)),
    *case("FlipBackward0", lambda x: x.flip(0), ON_TWO, (0, 0, MAYBE), (1, 1, NEVER)),
    *case("SoftmaxBackward0", lambda x: x.softmax(1), ON_TWO, (0, 0, NEVER), (1, 1, MAYBE)),
    *case("SumBackward0", lambda x: x.sum(), (B,), (0, 0, MAYBE)),
    *case("SumBackward1", lambda x: x.sum(()), (B,), (0, 0, MAYBE)),
    *pair("CatBackward0", lambda *two: torch.cat(two, 1), (B, 2), (B, 1), below=(0, 0), own=0, expected=NEVER),
    *pair("CatBackward0", lambda *two: torch.cat(two), (B, 2), (B, 2), below=(0, 0), own=0, expected=MAYBE),
    *case("CatBackward0", lambda x: torch.cat([EMPTY, x], -1), ON_TWO, (0, 0, NEVER), (1, 1, MAYBE)),
    *pair("GatherBackward0", lambda x: x.gather(1, SHIFTED.expand(B, B)), ON_TWO, below=(0,), own=0, expected=NEVER),
    *pair("GatherBackward0", lambda x: x.gather(0, SHIFTED.expand(B, B)), ON_TWO, below=(0,), own=0, expected=MAYBE),
    *case("SliceBackward0", lambda x: x[:, 1:], ON_TWO, (0, 0, NEVER), (1, 1, MAYBE)),
    *case("SelectBackward0", lambda x: x.select(-1, 0), ON_TWO, (0, 0, NEVER), (1, 0, MAYBE)),
    # Samples first.
    *case("AvgPool2DBackward0", lambda x: F.avg_pool2d(x, 2), IMAGES, (0, 0, NEVER), (1, 1, MAYBE), (1, 0, MAYBE)),
    *case("AvgPool2DBackward0", lambda x: F.avg_pool2d(x, 2), IMAGES, (0, 1, MAYBE)),
    *pair("GridSampler2DBackward0", sampled, IMAGES, (B, B, B, 2), below=(0, 0), own=0, expected=NEVER),
    *pair("GridSampler2DBackward0", sampled, IMAGES, (B, B, B, 2), below=(0, 1), own=0, expected=MAYBE),
    *case("ConvolutionBackward0", lambda x: F.conv2d(x, x.new_ones(2, 2, 2, 2)), IMAGES, (0, 0, NEVER), (1, 1, MAYBE)),
    *case("NativeGroupNormBackward0", lambda x: F.group_norm(x, 2), IMAGES, (0, 0, NEVER), (2, 2, MAYBE)),
    *case("ScaledDotProductFlashAttentionForCpuBackward0", attention, (B,) * 4,
          (0, 0, NEVER), (1, 1, NEVER), (2, 2, MAYBE), (3, 3, MAYBE)),
    *case("NativeBatchNormBackward0", lambda x: F.batch_norm(x, *STATISTICS), (B, 2), (0, 0, NEVER), (1, 1, MAYBE)),
    *case("NativeBatchNormBackward0", lambda x: F.batch_norm(x, None, None, training=True), ON_TWO, (0, 0, MAYBE)),
    *case("NativeLayerNormBackward0", lambda x: F.layer_norm(x, (B,)), ON_THREE,
          (0, 0, NEVER), (1, 1, NEVER), (2, 2, MAYBE)),
    *case("NativeLayerNormBackward0", lambda x: F.layer_norm(x, (B, B)), ON_THREE,
          (0, 0, NEVER), (1, 1, MAYBE), (2, 2, MAYBE)),
    # Joined, padded, repeated.
    *case("ConstantPadNdBackward0", lambda x: F.pad(x, (1, 1)), ON_THREE, (0, 0, NEVER), (1, 1, NEVER), (2, 2, MAYBE)),
    *case("ConstantPadNdBackward0", lambda x: F.pad(x, (0, 0, 1, 1)), ON_THREE, (0, 0, NEVER), (1, 1, MAYBE)),
    *case("RepeatBackward0", lambda x: x.repeat(1, 2), ON_TWO, (0, 0, NEVER), (1, 1, MAYBE)),
    *case("RepeatBackward0", lambda x: x.repeat(2, 1, 1), ON_TWO, (0, 1, NEVER), (1, 2, NEVER), (0, 0, MAYBE)),
    *pair("StackBackward0", lambda *two: torch.stack(two), (B, 2), (B, 2), below=(0, 0), own=1, expected=NEVER),
    *pair("StackBackward0", lambda *some: torch.stack(some), *[(B, 2)] * B, below=(0,) * B, own=0, expected=MAYBE),
    *pair("StackBackward0", lambda *two: torch.stack(two, -1), (B, 2), (B, 2), below=(0, 0), own=0, expected=NEVER),
    *pair("StackBackward0", lambda *some: torch.stack(some, -1), *[(2, B)] * B, below=(1,) * B, own=2, expected=MAYBE),
    # Losses.
    *pair("MseLossBackward0", lambda x, y: F.mse_loss(x, y, reduction="none"), (B, 2), (B, 2), below=(0, 0), own=0,
          expected=NEVER),
    *[row for reduction in ("mean", "sum") for row in
      case("MseLossBackward0", lambda x, r=reduction: F.mse_loss(x, x.detach() + 1, reduction=r), (B,), (0, 0, MAYBE))],
    # Indices. Only a leading one that counts the rows leaves them where they are.
    *case("IndexBackward0", lambda x: x[ROWS], ON_TWO, (0, 0, IDENTITY), (1, 1, MAYBE)),
    *case("IndexBackward0", lambda x: x[SHIFTED], ON_TWO, (0, 0, MAYBE)),
    *case("IndexBackward0", lambda x: x[ROWS, SHIFTED], ON_TWO, (0, 0, IDENTITY)),
    *case("IndexBackward0", lambda x: x[:, SHIFTED], ON_TWO, (0, 0, NEVER), (1, 1, MAYBE)),
    *case("IndexBackward0", lambda x: x[:, SHIFTED, ROWS], ON_THREE, (0, 0, NEVER)),
    *case("IndexBackward0", lambda x: x[:, :, SHIFTED], ON_THREE, (0, 0, NEVER), (2, 2, MAYBE)),
    *case("IndexBackward0", lambda x: x[ROWS, :, SHIFTED], ON_THREE, (0, 0, MAYBE)),
    *case("IndexBackward0", lambda x: x[:, SHIFTED, :, ROWS], (B,) * 4, (0, 0, MAYBE)),
    *pair("IndexBackward0", lambda x: x[ROWS], ON_TWO, below=(None,), own=0, expected=MAYBE),
    *pair("IndexBackward0", lambda x: x[:, ROWS], ON_TWO, below=(0,), own=None, expected=MAYBE),
    # Products: the rows of the left factor, the columns of the right one, matrix by matrix.
    *case("MmBackward0", lambda x: x @ x.new_ones(B, B), ON_TWO, (0, 0, NEVER), (0, 1, MAYBE)),
    *case("MmBackward0", lambda x: x.new_ones(B, B) @ x, ON_TWO, (1, 1, NEVER), (0, 0, MAYBE)),
    *pair("MmBackward0", torch.mm, ON_TWO, ON_TWO, below=(0, 0), own=0, expected=MAYBE),
    *pair("MmBackward0", torch.mm, ON_TWO, ON_TWO, below=(1, 1), own=1, expected=MAYBE),
    *pair("MmBackward0", lambda x: x @ x.new_ones(B, B), ON_TWO, below=(0,), own=None, expected=MAYBE),
    *case("AddmmBackward0", lambda x: torch.addmm(x.new_ones(B), x, x.new_ones(B, B)), ON_TWO, (0, 0, NEVER)),
    *case("MvBackward0", lambda x: torch.mv(x, x.new_ones(B)), ON_TWO, (0, 0, NEVER)),
    *case("MvBackward0", lambda x: torch.mv(x.new_ones(B, B), x), (B,), (0, 0, MAYBE)),
    *pair("BmmBackward0", torch.bmm, ON_THREE, ON_THREE, below=(0, 0), own=0, expected=NEVER),
    *pair("BmmBackward0", torch.bmm, ON_THREE, ON_THREE, below=(1, 1), own=1, expected=MAYBE),
    *case("BmmBackward0", lambda x: torch.bmm(x, x.new_ones(B, B, B)), ON_THREE, (1, 1, NEVER), (1, 2, MAYBE)),
    *case("BmmBackward0", lambda x: torch.bmm(x.new_ones(B, B, B), x), ON_THREE, (2, 2, NEVER), (1, 1, MAYBE)),
    # Values written into others.
    *case("IndexAddBackward0", lambda x: x.index_add(0, SHIFTED, x.new_ones(B, B)), ON_TWO, (0, 0, NEVER)),
    *case("IndexAddBackward0", lambda x: x.new_ones(B, B).index_add(0, SHIFTED, x), ON_TWO,
          (0, 0, MAYBE), (1, 1, NEVER)),
    *case("IndexCopyBackward0", lambda x: x.new_ones(B, B).index_copy(0, SHIFTED, x), ON_TWO, (0, 0, MAYBE)),
    *case("IndexPutBackward0", lambda x: x.index_put((SHIFTED,), x.new_ones(B, B)), ON_TWO, (0, 0, NEVER)),
    *case("IndexPutBackward0", lambda x: x.new_ones(B, B).index_put((SHIFTED,), x), ON_TWO, (0, 0, MAYBE)),
    *case("MaskedScatterBackward0", lambda x: x.masked_scatter(x > 0, x.new_ones(B, B)), ON_TWO, (0, 0, NEVER)),
    *case("MaskedScatterBackward0", lambda x: x.new_ones(B, B).masked_scatter(x > 0, x), ON_TWO, (0, 0, MAYBE)),
    *case("ScatterAddBackward0", lambda x: x.new_ones(B, B).scatter_add(1, SHIFTED.expand(B, B), x), ON_TWO,
          (0, 0, NEVER), (1, 1, MAYBE)),
    *case("ScatterBackward0", lambda x: x.new_ones(B, B).scatter(1, SHIFTED.expand(B, B), x), ON_TWO,
          (0, 0, NEVER), (1, 1, MAYBE)),
    *case("ScatterBackward1", lambda x: x.scatter(0, SHIFTED.expand(B, B), 1.0), ON_TWO, (0, 0, NEVER)),
    # Nothing is known.
    *case("SpecialI0EBackward0", torch.special.i0e, ON_TWO, (0, 0, MAYBE)),
]  # fmt: skip


def graph_of(case: Case) -> tuple[Graph, list[Tensor], Tensor]:
    """The operands are results themselves, as they are after a meeting."""
    torch.manual_seed(0)
    leaves = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in case.shapes]
    out = case.program(*(leaf.clone() for leaf in leaves))
    return walk(out, {}, []), leaves, out


def test_no_answer_is_another() -> None:
    """Two members of an enum with the same value would be one."""
    for kind in (Routing, BatchEntry, Origin, _State, _Entry):
        assert len(kind) == len(kind.__members__)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.node[:-9]}{case.below}{case.own}")
def test_an_operation_is_trusted_where_it_keeps_samples_apart(case: Case) -> None:
    graph, leaves, out = graph_of(case)
    assert graph.names[0] == case.node
    axes = {0: case.own}
    clones = [k for k, name in enumerate(graph.names) if name == "CloneBackward0"]
    axes.update(zip(clones, case.below, strict=True))
    layouts = {k: Layout(axis) for k, axis in axes.items() if axis is not None}
    site = Site(graph, 0, lambda edge: layouts.get(edge[0]), lambda k: k in axes)
    assert op_of(case.node).routing(site) is case.expected
    if case.expected is not MAYBE and case.own is not None:
        for sample in range(B):
            grads = torch.autograd.grad(out.select(case.own, sample).sum(), leaves, retain_graph=True)
            for grad, axis in zip(grads, case.below, strict=True):
                others = [k for k in range(B) if k != sample]
                assert axis is not None and not grad.index_select(axis, torch.tensor(others)).any()
