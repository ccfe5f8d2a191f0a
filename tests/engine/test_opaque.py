"""Operations that only autograd knows: differentiated by their own node, exactly; or refused in a sentence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clipwise.clipping import Abadi, Flat
from clipwise.engine import Clipper, clipped_gradients, per_sample_gradients, per_sample_norms
from clipwise.errors import ClipwiseError, NotSeparable, UnsupportedNode
from tests.zoo import named

from .reference import clipped_loop, flat, flat_sum, loop_gradients, norms_of, relative_errors

Losses = Callable[[nn.Module, Tensor], Tensor]


def plain(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).flatten(1).square().sum(1)


def gradient_penalty(model: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).flatten(1).sum(1).sum(), x, create_graph=True)
    return (slope.flatten(1).norm(dim=1) - 1).square() + plain(model, x)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w * w

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return grads[0] * w * w, (grads[0] * x * 2 * w).sum(0)


class Custom(nn.Module):
    """The same weight by a custom function before and after a layer: other paths to it are other uses."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6))
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = Square.apply(torch.tanh(self.layer(Square.apply(x, self.weight))), self.weight)
        return out


class AddedInPlace(nn.Module):
    """Positions added to a view in place, as compact transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(6, 6), nn.Linear(2, 2)
        self.positions = nn.Parameter(torch.randn(1, 3, 2))

    def forward(self, x: Tensor) -> Tensor:
        rows = self.layer(x).view(len(x), 3, 2)
        rows += self.positions
        out: Tensor = self.head(rows)
        return out


class Filter(nn.Module):
    """A filter in the frequency domain; weights as pairs, as parts, or as a state-space kernel."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.pairs = nn.Parameter(torch.randn(4, 2))

    def forward(self, x: Tensor) -> Tensor:
        weight = torch.view_as_complex(self.pairs)
        if self.kind == "parts":
            weight = torch.complex(self.pairs[:, 0].tanh(), self.pairs[:, 1])
        elif self.kind == "state_space":
            times = torch.arange(6, dtype=x.dtype)
            weight = torch.fft.rfft((weight.unsqueeze(1) * times * 0.1).exp().real.sum(0), n=12)
            return torch.fft.irfft(torch.fft.rfft(x, n=12) * weight, n=12)[:, :6]
        elif self.kind == "conjugate":
            weight = weight.conj() + torch.fft.rfft(x).conj() * weight
        return torch.fft.irfft(torch.fft.rfft(x) * weight, n=6)


class Joined(nn.Module):
    """A parameter beside a value that is computed from it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([x * self.weight, self.weight.expand(len(x), 6)], 1).tanh()


def conv() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.Tanh(), nn.Conv2d(3, 1, 3))


def layer_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 1))


EXACT: dict[str, tuple[Callable[[], nn.Module], Losses, tuple[int, ...]]] = {
    "custom_function": (Custom, plain, (6,)),
    "added_in_place": (AddedInPlace, plain, (6,)),
    "complex_pairs": (lambda: Filter("pairs"), plain, (6,)),
    "complex_parts": (lambda: Filter("parts"), plain, (6,)),
    "complex_conjugate": (lambda: Filter("conjugate"), plain, (6,)),
    "state_space": (lambda: Filter("state_space"), plain, (6,)),
    "joined": (Joined, plain, (6,)),
    "gradient_penalty_conv": (conv, gradient_penalty, (2, 6, 6)),
    "gradient_penalty_layer_norm": (layer_norm, gradient_penalty, (6,)),
}


@pytest.mark.parametrize("name", EXACT)
def test_agrees_with_the_loop(name: str) -> None:
    build, losses_of, shape = EXACT[name]
    torch.manual_seed(0)
    model = build().double()
    params = named(model)
    for batch in (4, 1, 3, 4):
        losses = losses_of(model, torch.randn(batch, *shape, dtype=torch.float64))
        loop = loop_gradients(losses, params)
        got = per_sample_gradients(losses, params, retain_graph=True)
        assert relative_errors(flat(got), flat(loop), norms_of(loop), torch.float64).max() <= 1e-10
        expected = flat(clipped_loop(loop, Flat(Abadi(0.1)))).sum(0)
        for way in ("bookkeeping", "second_backward"):
            clipped = clipped_gradients(losses, params, Abadi(0.1), retain_graph=True, way=way)  # type: ignore[arg-type]
            torch.testing.assert_close(flat_sum(clipped.gradients), expected, rtol=1e-9, atol=1e-12)


def sparse_weight() -> tuple[Tensor, dict[str, Tensor]]:
    weight = nn.Parameter(torch.eye(4).to_sparse())
    return torch.sparse.mm(weight, torch.randn(4, 5)).T.square().sum(1), {"weight": weight}


def on_nested(layout: torch.layout) -> tuple[Tensor, dict[str, Tensor]]:
    model, x = nn.Linear(4, 3), torch.randn(5, 4)
    nested = torch.nested.nested_tensor([x[:2], x[2:]], layout=layout)
    return torch.stack([part.square().sum() for part in model(nested).unbind()]), named(model)  # type: ignore[return-value]


def repeated() -> tuple[Tensor, dict[str, Tensor]]:
    model = nn.Linear(4, 1)
    return model(torch.randn(5, 4)).square().squeeze(1).repeat(2), named(model)  # type: ignore[return-value]


REFUSED: dict[str, tuple[Callable[[], tuple[Tensor, Any]], type[ClipwiseError], str]] = {
    "sparse_weight": (sparse_weight, UnsupportedNode, "to_dense"),
    "nested": (lambda: on_nested(torch.strided), UnsupportedNode, "nested"),
    "jagged": (lambda: on_nested(torch.jagged), UnsupportedNode, "nested"),
    "losses_given_twice": (repeated, NotSeparable, "repeated"),
}


@pytest.mark.filterwarnings("ignore")  # nested tensors are a prototype
@pytest.mark.parametrize("name", REFUSED)
def test_is_refused_in_a_sentence(name: str) -> None:
    build, error, word = REFUSED[name]
    torch.manual_seed(0)
    losses, params = build()
    with pytest.raises(error, match=word):
        clipped_gradients(losses, params, Abadi(1.0))


def test_instance_norm_is_not_called_a_batch_norm() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(2, 3, 3), nn.InstanceNorm1d(3, affine=True))
    h = model(torch.randn(4, 2, 8)).flatten(1)
    with pytest.raises(NotSeparable) as refusal:
        per_sample_norms((h - h.mean(0)).square().sum(1), named(model))
    assert "BatchNorm in training mode" not in str(refusal.value)


@pytest.mark.parametrize("depth", [1, 2])
def test_one_undefined_gradient_on_the_first_step_is_not_mixing(depth: int) -> None:
    """The square root of zero: a finite loss whose gradient is NaN."""
    torch.manual_seed(0)
    layers = [layer for _ in range(depth) for layer in (nn.Linear(4, 4, bias=False), nn.Tanh())]
    model, x = nn.Sequential(*layers), torch.randn(5, 3, 4)
    x[1] = 0
    losses = model(x).square().sum(2).sqrt().sum(1)
    clipped = clipped_gradients(losses, named(model), Abadi(1.0))
    rest = [0, 2, 3, 4]
    good = loop_gradients(model(x[rest]).square().sum(2).sqrt().sum(1), named(model))
    assert clipped.bad.tolist() == [False, True, False, False, False]
    expected = flat(clipped_loop(good, Flat(Abadi(1.0)))).sum(0)
    torch.testing.assert_close(flat_sum(clipped.gradients), expected, rtol=1e-4, atol=1e-5)


def tables(depth: int) -> tuple[nn.Module, Losses]:
    """Blocks with a table of relative positions each, as vision transformers have."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.map, self.table = nn.Linear(4, 4), nn.Parameter(torch.randn(9, 1))
            self.register_buffer("index", (torch.arange(5)[:, None] - torch.arange(5)[None] + 4).flatten())

        def forward(self, x: Tensor) -> Tensor:
            bias = self.table[self.index].view(5, 5)  # type: ignore[index]
            return x + torch.softmax(x @ self.map(x).mT + bias, -1) @ x

    return nn.Sequential(*(Block() for _ in range(depth))), plain


def test_the_first_call_makes_no_more_backward_passes_for_deeper_models(monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[int] = []
    original = torch.autograd.grad

    def counted(*args: Any, **kwargs: Any) -> Any:
        passes[-1] += 1
        return original(*args, **kwargs)

    monkeypatch.setattr(torch.autograd, "grad", counted)
    for depth in (1, 2, 4, 8):
        torch.manual_seed(0)
        model, losses_of = tables(depth)
        passes.append(0)
        per_sample_norms(losses_of(model, torch.randn(3, 5, 4)), named(model))
    assert len(set(passes)) == 1, passes


class Gated(nn.Module):
    """Residual branches behind gates and layers that start at zero, as in diffusion models."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.convs = nn.Conv2d(2, 4, 3, padding=1), nn.ModuleList()
        for _ in range(3):
            last = nn.Conv2d(4, 4, 3, padding=1)
            nn.init.zeros_(last.weight)
            self.convs.append(nn.Sequential(nn.GroupNorm(2, 4), nn.SiLU(), nn.Conv2d(4, 4, 3, padding=1), last))
        self.gates = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block, gate in zip(self.convs, self.gates, strict=True):
            x = x + block(x) * gate
        return F.adaptive_avg_pool2d(x, 1)


def test_gates_that_open_need_no_second_plan() -> None:
    """Layouts behind closed gates are known from the first step on."""
    torch.manual_seed(0)
    model = Gated().double()
    clipper = Clipper(named(model))
    for _ in range(4):
        losses = plain(model, torch.randn(4, 2, 6, 6, dtype=torch.float64))
        loop = loop_gradients(losses, named(model))
        clipped = clipper(losses, Abadi(0.1))
        expected = flat(clipped_loop(loop, Flat(Abadi(0.1)))).sum(0)
        torch.testing.assert_close(flat_sum(clipped.gradients), expected, rtol=1e-9, atol=1e-12)
        with torch.no_grad():
            for p in model.parameters():
                p += 0.1 * torch.randn_like(p)
    assert clipper.planning.plans == 1
