"""The kernel by every route, in blocks of every size, against one backward pass per row of the Jacobian."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import clipwise as cw
from clipwise.errors import DataError, NotSeparable, UnsupportedNode
from clipwise.ntk import kernels
from tests.ntk.common import MODELS, Opaque, Tied, Transformer, TwoHeads, gap, inputs, plain_jacobian


def plain_kernel(model: nn.Module, x: Tensor) -> Tensor:
    J = torch.cat(list(plain_jacobian(model, x).values()), 1)
    return J @ J.T


@pytest.mark.parametrize("route", ["gram", "jacobian"])
@pytest.mark.parametrize("outputs", [1, 3])
@pytest.mark.parametrize("kind", MODELS)
def test_kernel_is_the_jacobian_product(kind: str, outputs: int, route: kernels.Route) -> None:
    torch.manual_seed(1)
    model, x = MODELS[kind](outputs).double(), inputs(kind, 6)
    H = cw.ntk.kernel(model, x, route=route)
    assert H.shape == (6 * outputs, 6 * outputs) and not H.requires_grad
    assert gap(H, plain_kernel(model, x)) < 1e-10


@pytest.mark.parametrize("kind", MODELS)
def test_layer_kernels_are_those_of_the_layers_and_add_up(kind: str) -> None:
    torch.manual_seed(2)
    model, x = MODELS[kind](2).double(), inputs(kind, 5)
    layers = cw.ntk.layer_kernels(model, x)
    expected: dict[str, Tensor] = {}
    for name, rows in plain_jacobian(model, x).items():
        layer = name.rpartition(".")[0]
        expected[layer] = expected.get(layer, torch.zeros_like(rows @ rows.T)) + rows @ rows.T
    assert layers.keys() == expected.keys()
    assert all(gap(layers[layer], expected[layer]) < 1e-10 for layer in layers)
    assert gap(sum(layers.values()), cw.ntk.kernel(model, x)) < 1e-10


@pytest.mark.parametrize("held", [0, 1 << 30], ids=["computed again", "held"])
@pytest.mark.parametrize("block", [1, 2, 4, 100])
@pytest.mark.parametrize("route", ["gram", "jacobian"])
@pytest.mark.parametrize("kind", MODELS)
def test_blocks_make_no_difference(
    kind: str, route: kernels.Route, block: int, held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "_HELD_BYTES", held)
    torch.manual_seed(3)
    model, x = MODELS[kind](2).double(), inputs(kind, 5)
    assert gap(cw.ntk.kernel(model, x, route=route, block=block), plain_kernel(model, x)) < 1e-10


@pytest.mark.parametrize("model", [Tied(), TwoHeads()], ids=["tied", "two heads"])
def test_parameters_with_several_uses_or_few_outputs(model: nn.Module) -> None:
    torch.manual_seed(4)
    model = model.double()
    x = torch.randint(0, 7, (5, 6)) if isinstance(model, Tied) else torch.randn(5, 3, dtype=torch.float64)
    for route in ("gram", "jacobian"):
        assert gap(cw.ntk.kernel(model, x, route=route, block=3), plain_kernel(model, x)) < 1e-10  # type: ignore[arg-type]


def test_one_sample() -> None:
    model, x = MODELS["cnn"](2).double(), inputs("cnn", 1)
    assert gap(cw.ntk.kernel(model, x), plain_kernel(model, x)) < 1e-10


def test_clipped_kernel_is_the_sum_of_products() -> None:
    torch.manual_seed(5)
    model, x = MODELS["mlp"](3).double(), inputs("mlp", 5)
    groups = {"0": ["0.weight", "0.bias"], "2": ["2.weight", "2.bias"]}
    factors = {group: torch.rand(5, dtype=torch.float64) for group in groups}
    layers = cw.ntk.layer_kernels(model, x)
    expected = sum(layers[group] @ torch.diag(factors[group].repeat_interleave(3)) for group in groups)
    assert gap(cw.ntk.clipped_kernel(model, x, groups, factors, block=2), expected) < 1e-12


def test_inputs_may_be_several_tensors() -> None:
    class TwoInputs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return self.layer(a * b)

    model, a, b = TwoInputs().double(), torch.randn(4, 3).double(), torch.randn(4, 3).double()
    expected = plain_kernel(model.layer, a * b)
    for x in ((a, b), {"a": a, "b": b}):
        for route in ("gram", "jacobian"):
            assert gap(cw.ntk.kernel(model, x, route=route, block=3), expected) < 1e-10  # type: ignore[arg-type]


def test_model_is_left_as_it_was() -> None:
    torch.manual_seed(6)
    model, x = Transformer(2).double(), inputs("transformer", 4)
    model.train()
    model.encoder.dropout.eval()
    modes = [module.training for module in model.modules()]
    before = {name: p.clone() for name, p in model.state_dict().items()}
    first, second = cw.ntk.kernel(model, x), cw.ntk.kernel(model, x)
    assert torch.equal(first, second), "dropout is off"
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_frozen_parameters_do_not_count() -> None:
    model, x = MODELS["mlp"](1).double(), inputs("mlp", 4)
    model[0].requires_grad_(False)
    assert gap(cw.ntk.kernel(model, x), cw.ntk.kernel(model[2], model[1](model[0](x)))) < 1e-12


def test_falls_back_to_torch_func_where_the_engine_has_no_rule() -> None:
    model, x = Opaque().double(), torch.randn(4, 3, dtype=torch.float64)
    with pytest.raises(UnsupportedNode):
        cw.ntk.kernel(model, x, route="gram")
    assert gap(cw.ntk.kernel(model, x), plain_kernel(model, x)) < 1e-10


def test_samples_that_mix_are_refused() -> None:
    class Mixing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) - self.layer(x).mean(0)

    for route in ("gram", "jacobian"):
        with pytest.raises(NotSeparable):
            cw.ntk.kernel(Mixing(), torch.randn(5, 3), route=route)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: cw.ntk.kernel(nn.Linear(2, 1), torch.randn(3, 2), route="fast"), "route"),  # type: ignore[arg-type]
        (lambda: cw.ntk.kernel(nn.Linear(2, 1), torch.randn(3, 2), block=0), "block"),
        (lambda: cw.ntk.kernel(nn.Linear(2, 1).requires_grad_(False), torch.randn(3, 2)), "no trainable parameter"),
        (lambda: cw.ntk.kernel(nn.Linear(2, 1), torch.randn(0, 2)), "samples"),
        (lambda: cw.ntk.kernel(nn.Linear(2, 1), (torch.randn(2, 2), torch.randn(3, 2))), "same number of samples"),
        (lambda: cw.ntk.kernel(nn.Linear(2, 1), []), "x must be"),
        (lambda: cw.ntk.kernel(nn.LSTM(2, 2), torch.randn(3, 2, 2)), "logits"),
        (lambda: cw.ntk.kernel(nn.Sequential(nn.Linear(2, 1), nn.Flatten(0)), torch.randn(3, 4, 2)), "first axis"),
    ],
)
def test_what_makes_no_sense_is_refused(call: object, message: str) -> None:
    with pytest.raises(DataError, match=message):
        call()  # type: ignore[operator]
