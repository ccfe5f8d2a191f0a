"""Regions compiled by torch.compile: trusted where their backward graph proves it, probed or refused elsewhere.

`aot_eager` makes the same autograd node as the default backend, `aot_eager_decomp_partition` traces the same graph as
well; neither needs a C++ compiler.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._functorch.config
import torch.nn.functional as F
from torch import Tensor, nn

from clipwise.clipping import Abadi
from clipwise.engine import check, clipped_gradients, per_sample_norms
from clipwise.engine.cache import ENGINE
from clipwise.engine.compiled import keeps_apart
from clipwise.engine.plan import GraphPlan
from clipwise.engine.probing import AutogradProber
from clipwise.errors import NotSeparable, UnsupportedNode

from .reference import loop_gradients, norms_of

SIZES = [None, pytest.param(True, marks=pytest.mark.slow)]  # dynamic ones take half of the time of this file
pytestmark = pytest.mark.filterwarnings("ignore")  # importing the compiler warns
BACKENDS = ("aot_eager", "aot_eager_decomp_partition")
B, D = 6, 4  # no axis but that of the samples has their number

Function = Callable[..., Any]


@pytest.fixture(autouse=True)
def compiler() -> Iterator[None]:
    """Nothing compiled before, and regions that may be differentiated more than once."""
    torch.manual_seed(0)
    torch.compiler.reset()
    with torch._functorch.config.patch(donated_buffer=False):
        yield


def compiled(function: Function, backend: str = "aot_eager", **options: Any) -> Any:
    return torch.compile(function, backend=backend, **options)


def activation(x: Tensor) -> Tensor:
    return F.gelu(x) * torch.sigmoid(x) + x


def cross_entropy(x: Tensor) -> Tensor:
    return F.cross_entropy(x, torch.arange(len(x)) % x.shape[1], reduction="none")


def attention(x: Tensor) -> Tensor:
    heads = x.unflatten(-1, (2, -1)).transpose(1, 2)
    return F.scaled_dot_product_attention(heads, heads * 2, heads - 1).transpose(1, 2).flatten(2)


FLAT, LONG = (B, D), (B, 5, D)
APART: dict[str, tuple[Function, tuple[int, ...], int, int]] = {  # function, shape, axis of the input and of the output
    "activation": (activation, FLAT, 0, 0),
    "loss": (cross_entropy, FLAT, 0, 0),
    "attention": (attention, LONG, 0, 0),
    "products": (lambda x: torch.softmax(x @ x.mT, -1) @ x, LONG, 0, 0),
    "constant product": (lambda x: torch.tanh(x) @ torch.ones(D, 3), FLAT, 0, 0),
    "samples second": (lambda x: torch.relu(x) * 2, (5, B, D), 1, 1),
    "transposed": (lambda x: x.transpose(0, 1).exp(), LONG, 0, 1),
    "turned": (lambda x: x.t().exp(), FLAT, 0, 1),
    "permuted": (lambda x: x.permute(2, 0, 1).exp(), LONG, 0, 1),
    "gate": (lambda x: F.silu(x[:, :2]) * x[:, 2:], FLAT, 0, 0),
    "chunks": (lambda x: torch.cat([c.exp() for c in x.chunk(2, -1)], -1), FLAT, 0, 0),
    "mean over time": (lambda x: x.exp().mean(1), LONG, 0, 0),
    "first in time": (lambda x: x[:, 0].exp(), LONG, 0, 0),
    "softmax": (lambda x: torch.softmax(x, 1), FLAT, 0, 0),
    "squeezed": (lambda x: x.exp().sum(-1, keepdim=True).squeeze(-1), LONG, 0, 0),
    "flattened": (lambda x: x.exp().flatten(1), LONG, 0, 0),
    "constants for places": (lambda x: x.exp() + torch.arange(float(D)), FLAT, 0, 0),
    "a sum of each": (lambda x: x * x.sum(1, keepdim=True), FLAT, 0, 0),
}
MIXED: dict[str, tuple[Function, tuple[int, ...], int, int]] = {
    "mean of the batch": (lambda x: x - x.mean(0), FLAT, 0, 0),
    "mean of all": (lambda x: x - x.mean(), FLAT, 0, 0),
    "a weight of zero": (lambda x: x + torch.zeros(()) * x.sum(0), FLAT, 0, 0),
    "an index": (lambda x: x[torch.arange(len(x))].exp(), FLAT, 0, 0),
    "an index that is sorted": (lambda x: x[torch.argsort(x[:, 0])], FLAT, 0, 0),
    "flipped": (lambda x: x.flip(0), FLAT, 0, 0),
    "a written row": (lambda x: torch.cat([x[1:].exp(), x[:1]]), FLAT, 0, 0),
    "one row for all": (lambda x: x[0].exp() + torch.zeros(B, D), FLAT, 0, 0),
    "rolled": (lambda x: x.roll(1, 0), FLAT, 0, 0),
    "a part of the batch": (lambda x: torch.cat([x[:3], x[3:].exp()]), FLAT, 0, 0),
    "a product over the batch": (lambda x: torch.eye(B) @ x.exp(), FLAT, 0, 0),
    "attention over the batch": (lambda x: torch.softmax(x @ x.t(), -1) @ x, FLAT, 0, 0),
    "softmax over the batch": (lambda x: torch.softmax(x, 0), FLAT, 0, 0),
    "another axis": (lambda x: x.transpose(0, 1).exp(), LONG, 0, 0),
    "a sum over the batch": (lambda x: x.cumsum(0), FLAT, 0, 0),
    "two outputs": (lambda x: (x.exp(), x.mean(0)), FLAT, 0, 0),
    "square and turned": (lambda x: x.t() * 1.0, (B, B), 0, 0),
    "rows and columns": (lambda x: x + x.t(), (B, B), 0, 0),
    "seen from both sides": (lambda x: x.unsqueeze(0) * x.unsqueeze(1), (B,), 0, 0),
}


def verdict(function: Function, shape: tuple[int, ...], before: int, after: int, **options: Any) -> bool:
    x = torch.randn(shape, requires_grad=True)
    out = compiled(function, **options)(x)
    node = (out[0] if isinstance(out, tuple) else out).grad_fn
    assert node.name() == "CompiledFunctionBackward"
    found = keeps_apart(node, after, [(shape, before)])
    assert found == keeps_apart(node, after, [(shape, before)])  # as it was remembered
    assert not keeps_apart(node, after, [(shape, before), (shape, before)])
    return found


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dynamic", SIZES)
@pytest.mark.parametrize("name", APART)
def test_a_region_that_keeps_samples_apart_is_proved_to(name: str, backend: str, dynamic: bool | None) -> None:
    assert verdict(*APART[name], backend=backend, dynamic=dynamic)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dynamic", SIZES)
@pytest.mark.parametrize("name", MIXED)
def test_a_region_that_may_mix_samples_is_not_trusted(name: str, backend: str, dynamic: bool | None) -> None:
    """Whatever its numbers are now: zero weights, an identity that is multiplied with, an index 0, 1, 2, ..."""
    assert not verdict(*MIXED[name], backend=backend, dynamic=dynamic)


def two_layers() -> dict[str, Tensor]:
    return {"a": nn.Parameter(torch.randn(D, 5)), "b": nn.Parameter(torch.randn(5, 3))}


def last_plan() -> GraphPlan:
    return next(reversed(ENGINE._cache.values())).plan


def agrees_with_the_loop(losses: Tensor, params: dict[str, Tensor]) -> None:
    expected = norms_of(loop_gradients(losses, params))
    torch.testing.assert_close(per_sample_norms(losses, params).double(), expected.double(), rtol=1e-5, atol=0)


def test_trusted_regions_are_not_probed_and_give_the_gradients_of_the_loop() -> None:
    params = two_layers()
    act, loss = compiled(activation), compiled(cross_entropy)
    for size in (6, 6, 7, 9):  # compiled again for another size
        losses = loss(act(torch.randn(size, D) @ params["a"]) @ params["b"])
        agrees_with_the_loop(losses, params)
        assert not last_plan().routed and len(last_plan().regions) == 2


def test_other_code_behind_the_same_node_is_noticed() -> None:
    """The structure of the graph is the same; with the plan of the first function, norms would belong to others."""
    params = two_layers()
    first, second = compiled(activation), compiled(lambda x: activation(x).flip(0))
    for act, routed in ((first, False), (first, False), (second, True), (first, True), (second, True)):
        losses = cross_entropy(act(torch.randn(B, D) @ params["a"]) @ params["b"])
        agrees_with_the_loop(losses, params)
        assert last_plan().routed is routed


def test_a_region_that_begins_to_mix_is_refused_in_that_step() -> None:
    params = two_layers()
    act = compiled(lambda x, weight: activation(x) + weight * x.mean(0))

    def losses(weight: float) -> Tensor:
        return cross_entropy(act(torch.randn(B, D) @ params["a"], torch.tensor(weight)) @ params["b"])

    for _ in range(2):
        clipped_gradients(losses(0.0), params, Abadi(1.0))
    with pytest.raises(NotSeparable):
        clipped_gradients(losses(1.0), params, Abadi(1.0))


class CompiledFunction(torch.autograd.Function):
    """A user's own function with the name that torch gives to compiled regions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * 2


def test_a_function_of_the_same_name_is_probed() -> None:
    params = two_layers()
    out: Tensor = CompiledFunction.apply(torch.randn(B, D) @ params["a"])
    agrees_with_the_loop(cross_entropy(out @ params["b"]), params)
    assert last_plan().routed


def whole(params: dict[str, Tensor]) -> Tensor:
    out: Tensor = compiled(lambda x: activation(x @ params["a"]) @ params["b"])(torch.randn(B, D))
    return cross_entropy(out)


def first(params: dict[str, Tensor]) -> Tensor:
    return cross_entropy(activation(compiled(lambda x: x @ params["a"])(torch.randn(B, D))) @ params["b"])


def last(params: dict[str, Tensor]) -> Tensor:
    return cross_entropy(compiled(lambda x: activation(x) @ params["b"])(torch.randn(B, D) @ params["a"]))


def with_loss(params: dict[str, Tensor]) -> Tensor:
    losses: Tensor = compiled(lambda x: cross_entropy(x @ params["b"]))(activation(torch.randn(B, D) @ params["a"]))
    return losses


@pytest.mark.parametrize("program", [whole, first, last, with_loss])
def test_a_compiled_block_with_parameters_is_refused_before_any_pass(
    program: Callable[[dict[str, Tensor]], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    params = two_layers()
    losses = program(params)

    def none(*args: Any) -> None:
        raise AssertionError("a backward pass was made")

    monkeypatch.setattr(AutogradProber, "__call__", none)
    with pytest.raises(UnsupportedNode, match=r"Compile only functions and modules without parameters"):
        clipped_gradients(losses, params, Abadi(1.0))


HIDDEN: dict[str, Function] = {  # nothing of these regions' outputs is as long as the batch
    "mean": lambda w, x: (x @ w).mean(0),
    "largest": lambda w, x: (x @ w).amax(0),
    "number": lambda w, x: (x @ w).square().sum(),
    "product": lambda w, x: (x @ w).t() @ x,
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("name", HIDDEN)
def test_a_region_that_brings_the_batch_together_inside_is_not_taken_for_a_weight(
    name: str, backend: str, dynamic: bool | None
) -> None:
    """Uncompiled it is refused for the rows that parameters met; compiled those are not on the graph."""
    params = {"w": nn.Parameter(torch.randn(D, D)), "b": nn.Parameter(torch.randn(D, D))}
    x = torch.randn(B, D)
    for function in (HIDDEN[name], compiled(HIDDEN[name], backend=backend, dynamic=dynamic)):
        losses = (x @ params["b"] * function(params["w"], x).sum(0)).sum(1)
        with pytest.raises((NotSeparable, UnsupportedNode)):
            clipped_gradients(losses, params, Abadi(1.0))


def test_a_cached_plan_notices_a_region_that_begins_to_read_the_batch() -> None:
    params = {"w": nn.Parameter(torch.randn(D, D))}
    weight, table = compiled(HIDDEN["mean"]), torch.randn(5, D)
    for _ in range(2):
        x = torch.randn(B, D)
        agrees_with_the_loop((weight(params["w"], table) * x).sum(1), params)
    with pytest.raises(UnsupportedNode):
        clipped_gradients((weight(params["w"], x) * x).sum(1), params, Abadi(1.0))


def test_weights_that_are_computed_in_a_compiled_region_are_shared_as_before() -> None:
    params = {"w": nn.Parameter(torch.randn(D, 5)), "b": nn.Parameter(torch.randn(5, 3))}
    mask = (torch.rand(D, 5) < 0.5).float()
    for weight in (compiled(lambda w: w / w.norm()), compiled(lambda w: w * mask)):
        losses = cross_entropy(activation(torch.randn(7, D) @ weight(params["w"])) @ params["b"])
        agrees_with_the_loop(losses, params)


def test_a_region_that_can_be_differentiated_only_once_is_refused_with_the_setting() -> None:
    params = two_layers()
    with torch._functorch.config.patch(donated_buffer=True):
        losses = cross_entropy(compiled(activation, dynamic=True)(torch.randn(B, D) @ params["a"]) @ params["b"])
        with pytest.raises(UnsupportedNode, match="donated_buffer = False"):
            clipped_gradients(losses, params, Abadi(1.0))


def test_check_finds_compiled_regions_in_order() -> None:
    params = two_layers()
    losses = cross_entropy(compiled(activation)(torch.randn(B, D) @ params["a"]) @ params["b"])
    assert str(check(losses, params))
