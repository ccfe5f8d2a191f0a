"""Rules by themselves: operands that must be refused, and nodes that this machine does not make."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clipwise.engine import passing, per_sample_gradients, per_sample_norms
from clipwise.engine.graph import Graph, walk
from clipwise.engine.layout import Layout, pack
from clipwise.engine.ops import op_of
from clipwise.engine.products import ImageProduct, Product, VectorProduct
from clipwise.engine.rules import Operand, Samples
from clipwise.engine.rules.autograd import finite_rows
from clipwise.engine.rules.linear import linear
from clipwise.errors import NotSeparable, UnsupportedNode

from .reference import Times, flat, loop_gradients, norms_of, relative_errors

B = 4
FIRST = Samples(B, Layout(0, exact=True))


def operand_of(out: Tensor, position: int, shape: tuple[int, ...]) -> Operand:
    return Operand(walk(out, {}, []), 0, position, shape)


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


INPUTS: dict[str, tuple[Callable[[], Tensor], str]] = {
    "layer norm": (lambda: F.layer_norm(leaf(B, 3), (3,)), "its input is computed from the batch"),
    "group norm": (lambda: F.group_norm(leaf(B, 4, 2), 2), "its input is computed from the batch"),
    "batch norm": (lambda: F.batch_norm(leaf(B, 3), torch.zeros(3), torch.ones(3)), "its input is computed"),
    "batch norm in training": (lambda: F.batch_norm(leaf(B, 3), None, None, training=True), "training mode"),
    "convolution": (lambda: F.conv1d(leaf(B, 2, 5), torch.ones(3, 2, 2)), "the input of a convolution"),
    "vector": (lambda: torch.mv(leaf(B, 3), torch.ones(3)), "left factor"),
}


@pytest.mark.parametrize("name", INPUTS)
def test_the_side_that_holds_the_samples_is_no_shared_operand(name: str) -> None:
    build, words = INPUTS[name]
    out = build()
    operand = operand_of(out, 0, (B,))
    rule = op_of(operand.name).rule
    assert rule is not None
    with pytest.raises(NotSeparable, match=words):
        rule(operand, FIRST)


def test_a_batch_norm_in_training_has_no_rule_for_its_weight_either() -> None:
    out = F.batch_norm(torch.randn(B, 3), None, None, leaf(3), training=True)
    with pytest.raises(NotSeparable, match="statistics of the whole batch"):
        op_of("NativeBatchNormBackward0").rule(operand_of(out, 1, (3,)), FIRST)  # type: ignore[misc]


def test_images_lie_on_the_first_axis() -> None:
    out = F.conv1d(torch.randn(5, 2, B), leaf(3, 2, 1))
    with pytest.raises(NotSeparable, match="the input of a convolution"):
        op_of("ConvolutionBackward0").rule(operand_of(out, 1, (3, 2, 1)), Samples(B, Layout(2, exact=True)))  # type: ignore[misc]


@pytest.mark.parametrize("shape", [(B, 3), (B, 5, 3), (B, 2, 5, 3)], ids=str)
def test_a_linear_map_as_one_node(shape: tuple[int, ...]) -> None:
    """As other devices than the CPU make it: rows on any leading axes, y = x w^T + b."""
    x, gradient = torch.randn(shape, dtype=torch.float64), torch.randn(*shape[:-1], 2, dtype=torch.float64)
    node: Any = SimpleNamespace(_saved_input=x, _input_metadata=[SimpleNamespace(shape=gradient.shape)])
    graph = Graph([node], ["LinearBackward0"], [((-1, 0),) * 3], {}, [], ())
    weight = linear(Operand(graph, 0, 1, (2, 3)), FIRST)(gradient)
    torch.testing.assert_close(weight.gradients(), torch.einsum("b...m,b...n->bmn", gradient, x))
    bias = linear(Operand(graph, 0, 2, (2,)), FIRST)(gradient)
    torch.testing.assert_close(bias.gradients(), gradient.reshape(B, -1, 2).sum(1))
    with pytest.raises(NotSeparable, match="left factor"):
        linear(Operand(graph, 0, 0, shape), FIRST)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_scattered_rows_are_split_with_zeros_for_padding(axis: int) -> None:
    owners = torch.tensor([2, 0, 2, 2, 0])
    samples = Samples(B, Layout(axis), owners, pack(owners, B))
    shape = [2, 3, 2]
    shape[axis] = 5
    values = torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape)
    found = samples.split(values)
    for sample in range(B):
        own = (owners == sample).nonzero().flatten()
        filled, empty = found[sample].split([len(own), 3 - len(own)], axis)
        assert torch.equal(filled, values.index_select(axis, own)) and not empty.any()
    assert torch.equal(samples.owners(5), owners) and not samples.per_row
    assert torch.equal(samples.split(values.movedim(axis, 0), 0), found.movedim(axis + 1, 1))


def test_whether_there_is_a_row_for_each_sample() -> None:
    for layout, expected in (
        (Layout(0, exact=True), True), (Layout(0), False), (Layout(1, exact=True), False),
    ):  # fmt: skip
        assert Samples(B, layout).per_row is expected


def test_the_axes_of_data_in_a_product() -> None:
    """Those of the operand that is not differentiated; in a stack, also the leading ones."""
    assert Product(0, 1).data_axes(2, True, True) == [0]
    assert Product(0, 1).data_axes(2, False, True) == [1]
    assert Product(0, 1).data_axes(4, True, True) == [0, 1, 2]
    assert Product(0, 1).data_axes(4, False, False) == [0, 1, 3]
    assert VectorProduct(0, 1).data_axes(1, True, right_is_shared=True) == [0]
    assert VectorProduct(0, 1).data_axes(1, False, right_is_shared=False) == []
    assert ImageProduct(0, 1).data_axes(4, True, True) == [0]


def test_which_rows_are_finite() -> None:
    values = torch.tensor([[1.0, torch.nan], [2.0, 3.0], [torch.inf, torch.inf]])
    assert finite_rows(values, 0).tolist() == [False, True, False]
    assert finite_rows(values, 1).tolist() == [False, False]
    assert finite_rows(torch.tensor([1.0, torch.nan]), 0).tolist() == [True, False]


def test_a_single_number_of_a_sample_that_spoils_the_others_is_refused() -> None:
    """Autograd multiplies the NaN by the others' zeros, in some entries only."""
    w = nn.Parameter(torch.randn(2, 3, 3))
    x = torch.rand(B, 3)
    x[1, 0] = torch.nan
    with pytest.raises(UnsupportedNode, match="spoils the gradients of others"):
        per_sample_norms(F.bilinear(x, x, w).square().sum(1), {"w": w})


class Split(torch.autograd.Function):
    """Two results of a parameter and data."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, w)
        return x * w, x + w

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return grads[0] * w + grads[1], (grads[0] * x).sum(0) + grads[1].sum(0)


def test_a_function_of_a_user_has_its_gradient_at_the_first_result_only() -> None:
    w, x = nn.Parameter(torch.randn(3, dtype=torch.float64)), torch.randn(B, 3, dtype=torch.float64)
    product, total = Split.apply(x, w)
    losses = product.square().sum(1)
    loop = loop_gradients(losses, {"w": w})
    found = per_sample_gradients(losses, {"w": w}, retain_graph=True)
    assert relative_errors(flat(found), flat(loop), norms_of(loop), torch.float64).max() <= 1e-10
    with pytest.raises(UnsupportedNode, match="SplitBackward has no per-sample rule"):
        per_sample_norms((product + total).square().sum(1), {"w": w})


class Mistaken(Times):
    """A backward that takes the whole batch at once only."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        (x,) = ctx.saved_tensors
        if (grads[0] == 0).any():
            raise RuntimeError("cannot divide by nothing")
        return None, (grads[0] * x).sum(0)


def test_a_backward_that_does_not_take_one_sample_is_refused_with_its_words() -> None:
    w, x = nn.Parameter(torch.randn(3)), torch.rand(B, 3) + 0.5
    with pytest.raises(UnsupportedNode, match=r"one sample at a time \(cannot divide by nothing\)"):
        per_sample_norms(Mistaken.apply(x, w).square().sum(1), {"w": w})


# How a probe passes places that let nothing through: what arrives shows, and only where it would have shown.


def test_a_probe_keeps_what_is_alive() -> None:
    gradient, instead = torch.tensor([0.0, torch.nan, torch.inf, 2.0]), torch.tensor([5.0, 6.0, 7.0, 8.0])
    assert passing.alive(gradient, instead).tolist() == [5, 6, 7, 2]
    assert passing.finite(None, 0, gradient, instead).tolist() == [0, 0, 0, 2]
    assert passing.finite(None, 0, torch.tensor([1.0, -torch.inf]), instead).tolist() == [1, 0]
    for values, dead in (([0.0, 0.0], True), ([0.0, 1.0], False), ([torch.nan, 1.0], True), ([1.0, 1.0], False)):
        assert passing.is_dead(torch.tensor(values)) is dead


def test_the_weights_of_a_probe_are_positive_and_the_same_at_every_call() -> None:
    first = passing.random((50, 20), torch.zeros(1, dtype=torch.float64))
    assert first.dtype == torch.float64 and first.min() >= 0.5 and first.max() < 1.5
    assert torch.equal(first, passing.random((50, 20), torch.zeros(1, dtype=torch.float64)))


ARRIVED = torch.zeros(2, 4, 3)
ARRIVED[1, 2, 0] = 1.0
TOGETHER: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "softmax of rows": (lambda x: x.softmax(2), lambda seen: seen.any(2, keepdim=True)),
    "softmax of columns": (lambda x: x.log_softmax(-2), lambda seen: seen.any(1, keepdim=True)),
    "layer norm": (lambda x: F.layer_norm(x, (3,)), lambda seen: seen.any(2, keepdim=True)),
    "layer norm of two axes": (lambda x: F.layer_norm(x, (4, 3)), lambda seen: seen.any(2, True).any(1, True)),
    "group norm": (lambda x: F.group_norm(x, 2), lambda seen: seen.any(2, True).any(1, True)),
    "batch norm": (lambda x: F.batch_norm(x, torch.zeros(4), torch.ones(4)), lambda seen: seen),
    "batch norm in training": (lambda x: F.batch_norm(x, None, None, training=True), lambda seen: seen & False),
    "element by element": (torch.tanh, lambda seen: seen),
}


@pytest.mark.parametrize("name", TOGETHER)
def test_a_probe_shows_what_comes_together_and_nothing_else(name: str) -> None:
    make, expected = TOGETHER[name]
    node = make(leaf(2, 4, 3)).grad_fn
    passes = op_of(node.name()).passing  # type: ignore[union-attr]
    seen = passes(node, 0, torch.zeros(2, 4, 3), ARRIVED) != 0
    assert torch.equal(seen, expected(ARRIVED != 0).expand(2, 4, 3))
    if name != "element by element":
        assert not passes(node, 1, torch.zeros(2, 4, 3), ARRIVED).any()  # its weight
        assert not passes(node, 0, torch.zeros(4, 3), ARRIVED).any()  # of another shape
    own = torch.full((2, 4, 3), 7.0)
    assert torch.equal(passes(node, 0, own, ARRIVED), own)


def product_of(how: str) -> tuple[Tensor, tuple[int, int], tuple[Tensor, Tensor]]:
    """A product with zeros on both sides, where its factors stand, and what shows of them when all weights are ones."""
    stack = (5,) if how in ("bmm", "baddbmm") else ()
    a, b = torch.zeros(*stack, 2, 3, requires_grad=True), torch.zeros(*stack, 3, 4, requires_grad=True)
    out = {
        "mm": lambda: a @ b, "bmm": lambda: torch.bmm(a, b), "addmm": lambda: torch.addmm(torch.ones(4), a, b),
        "baddbmm": lambda: torch.baddbmm(torch.ones(5, 1, 4), a, b),
    }[how]()  # fmt: skip
    return out, (1, 2) if how in ("addmm", "baddbmm") else (0, 1), (a, b)


@pytest.mark.parametrize("how", ["mm", "bmm", "addmm", "baddbmm"])
def test_a_probe_passes_a_product_by_other_weights(how: str) -> None:
    out, places, (a, b) = product_of(how)
    passes = op_of(out.grad_fn.name()).passing  # type: ignore[union-attr]
    arrived = torch.zeros_like(out)
    arrived[..., 1, 2] = 1.0
    rows, columns = torch.zeros_like(a), torch.zeros_like(b)
    rows[..., 1, :] = columns[..., :, 2] = 1.0
    assert torch.equal(passes(out.grad_fn, places[0], torch.zeros_like(a), arrived) != 0, rows != 0)
    assert torch.equal(passes(out.grad_fn, places[1], torch.zeros_like(b), arrived) != 0, columns != 0)
    own = torch.full_like(a, 3.0)
    assert torch.equal(passes(out.grad_fn, places[0], own, arrived), own)
    spoilt = own.clone()
    spoilt[..., 0, 0] = torch.nan
    assert passes(out.grad_fn, places[0], spoilt, arrived).isfinite().all()


def test_a_probe_does_not_pass_a_vector() -> None:
    out = torch.mv(leaf(2, 3), leaf(3))
    passes = op_of("MvBackward0").passing
    assert not passes(out.grad_fn, 0, torch.zeros(2, 3), torch.ones(2)).any()
    assert not passes(out.grad_fn, 1, torch.zeros(3), torch.ones(2)).any()
