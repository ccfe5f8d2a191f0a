"""Dense models: linear layers in every role, reuse, tying, parametrizations, einsum and matrix products."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from .case import Case, floats, functional, regress, simple


def mlp(bias: bool = True) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8, bias=bias), nn.ReLU(), nn.Linear(8, 4, bias=bias))


class SharedLayer(nn.Module):
    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times
        self.layer = nn.Linear(6, 6)
        self.out = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = torch.tanh(self.layer(x))
        out: Tensor = self.out(x)
        return out


class TiedAutoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.4 * torch.randn(4, 6))
        self.bias = nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(F.linear(x, self.weight, self.bias)), self.weight.t())


class LoRALinear(nn.Module):
    """A frozen weight plus a trainable low-rank product, merged (W + B A) or applied one after the other."""

    def __init__(self, merged: bool) -> None:
        super().__init__()
        self.merged = merged
        self.base = nn.Linear(6, 8).requires_grad_(False)
        self.a = nn.Parameter(torch.randn(2, 6))
        self.b = nn.Parameter(torch.randn(8, 2))

    def forward(self, x: Tensor) -> Tensor:
        if self.merged:
            return F.linear(x, self.base.weight + 0.5 * self.b @ self.a, self.base.bias)
        out: Tensor = self.base(x) + 0.5 * (x @ self.a.t()) @ self.b.t()
        return out


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


class Hyper(nn.Module):
    """A linear layer whose weight another small network makes from a learned code: parameters alone."""

    def __init__(self) -> None:
        super().__init__()
        self.code = nn.Parameter(torch.randn(5))
        self.make = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 24))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.make(self.code).view(4, 6))


class Residual(nn.Module):
    def __init__(self, batch_axis: int = 0) -> None:
        super().__init__()
        self.batch_axis = batch_axis
        self.inner = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x.movedim(0, self.batch_axis)
        for layer in self.inner:
            x = x + F.gelu(layer(x))
        return x.movedim(self.batch_axis, 0)


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(6, 3)
        self.spare = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.used(x)
        return out


def frozen_first() -> nn.Module:
    model = mlp()
    for p in list(model.parameters())[:2]:
        p.requires_grad_(False)
    return model


def dead_relu() -> nn.Module:
    """Most samples have a gradient of zero; some units are dead for all."""
    model = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3), nn.ReLU())
    with torch.no_grad():
        model[0].bias[0] = -100.0
        model[2].bias.fill_(-0.1)
    return model


def shuffled_registration() -> nn.Module:
    class Shuffled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last, self.middle, self.first = nn.Linear(5, 3), nn.Linear(7, 5), nn.Linear(6, 7)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))
            return out

    return Shuffled()


class KeywordCalled(nn.Module):
    """A custom module that is called with keywords and keeps its weight in a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.ParameterDict({"weight": torch.randn(4, 6), "shift": torch.randn(4)})

    def forward(self, *, features: Tensor, gain: float = 1.0) -> Tensor:
        return gain * (features @ self.table["weight"].T) + self.table["shift"]


def keyword_loss(model: nn.Module, x: Tensor) -> Tensor:
    return regress(model(features=x, gain=3.0))


def functional_call_loss(model: nn.Module, x: Tensor) -> Tensor:
    scaled = {name: 2.0 * p for name, p in model.named_parameters()}
    return regress(torch.func.functional_call(model, scaled, (x,)))


def bilinear_loss(model: nn.Module, x: Tensor, z: Tensor) -> Tensor:
    return regress(model(x, z))


def cosine(p: Any, x: Tensor) -> Tensor:
    return 4.0 * F.linear(F.normalize(x, dim=1), F.normalize(p.w, dim=1))


def einsum(name: str, equation: str, w: tuple[int, ...], x: tuple[int, ...], swap: bool = False) -> Case:
    def forward(p: Any, x: Tensor) -> Tensor:
        return torch.tanh(torch.einsum(equation, *((p.w, x) if swap else (x, p.w))))

    return functional(f"einsum_{name}", {"w": w}, forward, x=x, batches=(1, 4, 2, 3))


PRODUCTS = [
    functional("matmul_vector_parameter", {"w": (6,)}, lambda p, x: torch.tanh(x @ p.w), x=(4, 6)),
    functional("matmul_vector_2d", {"w": (6,)}, lambda p, x: torch.tanh(x @ p.w).unsqueeze(1)),
    functional("matmul_left_operand", {"w": (5, 6)}, lambda p, x: (p.w @ x.T).T.tanh(), batches=(1, 5, 6, 3)),
    functional("matmul_left_batched", {"w": (5, 4)}, lambda p, x: (p.w @ x).tanh(), x=(4, 6)),
    functional("matmul_heads", {"w": (2, 6, 3)}, lambda p, x: (x.unsqueeze(1) @ p.w).tanh(), x=(4, 6)),
    functional(
        "bmm_shared_heads",
        {"w": (2, 6, 3)},
        lambda p, x: torch.bmm(x.transpose(0, 1), p.w).transpose(0, 1).tanh(),
        x=(2, 6),
        batches=(1, 2, 6, 3),
    ),
    functional("bmm_expanded", {"w": (6, 3)}, lambda p, x: torch.bmm(x, p.w.expand(x.shape[0], 6, 3)).tanh(), x=(4, 6)),
    functional(
        "baddbmm_shared",
        {"w": (2, 6, 3), "b": (2, 1, 3)},
        lambda p, x: torch.baddbmm(p.b, x.transpose(0, 1), p.w).transpose(0, 1).tanh(),
        x=(2, 6),
        batches=(1, 2, 4, 3),
    ),
    functional("addmm_scaled", {"w": (6, 3), "b": (3,)}, lambda p, x: torch.addmm(p.b, x, p.w, beta=0.5, alpha=2.0)),
    functional("mv_parameter", {"w": (6,)}, lambda p, x: torch.mv(x, p.w).unsqueeze(1).tanh()),
    functional("tensordot", {"w": (4, 6, 3)}, lambda p, x: torch.tensordot(x, p.w, dims=2).tanh(), x=(4, 6)),
    functional("outer_of_parameters", {"u": (3,), "v": (6,)}, lambda p, x: F.linear(x, torch.outer(p.u, p.v)).tanh()),
    functional("kronecker_weight", {"u": (2, 3), "v": (2, 2)}, lambda p, x: F.linear(x, torch.kron(p.u, p.v)).tanh()),
    functional("matrix_exponential", {"w": (6, 6)}, lambda p, x: x @ torch.matrix_exp(0.1 * (p.w - p.w.T))),
    functional("quadratic_form", {"w": (6, 6)}, lambda p, x: torch.einsum("bi,ij,bj->b", x, p.w, x).unsqueeze(1)),
    einsum("btd_do", "btd,do->bto", (6, 3), (4, 6)),
    einsum("bthd_hde", "bthd,hde->bthe", (2, 3, 4), (4, 2, 3)),
    einsum("bhtd_hd", "bhtd,hd->bht", (2, 3), (2, 4, 3)),
    einsum("btd_d", "btd,d->bt", (6,), (4, 6)),
    einsum("mixing_tokens", "ts,bsd->btd", (4, 4), (4, 6), swap=True),
    einsum("elementwise", "bd,d->bd", (6,), (6,)),
    einsum("outer", "bd,e->bde", (3,), (4,)),
    einsum("contract_all", "btd,td->b", (4, 6), (4, 6)),
]

CASES = [
    simple("mlp", mlp, 6, batches=(1, 4, 6, 8, 3)),
    simple("mlp_no_bias", lambda: mlp(bias=False), 6),
    simple("mlp_on_sequences", lambda: mlp(), 4, 6, batches=(1, 4, 2, 8, 3)),
    simple("mlp_on_grids", lambda: mlp(), 2, 3, 6, batches=(1, 2, 3, 6)),
    simple("linear_only", lambda: nn.Linear(4, 4), 4),
    simple("residual_sequence_first", lambda: Residual(batch_axis=1), 4, 8, batches=(1, 4, 8, 3)),
    simple("residual_batch_in_the_middle", lambda: Residual(batch_axis=1), 4, 2, 8, batches=(1, 4, 2, 3)),
    simple("residual_batch_third", lambda: Residual(batch_axis=2), 4, 2, 8, batches=(1, 4, 2, 3)),
    simple("shared_layer_twice", lambda: SharedLayer(2), 6),
    simple("deep_recurrent_reuse", lambda: SharedLayer(12), 6),
    simple("tied_autoencoder", TiedAutoencoder, 6, batches=(1, 4, 6, 3)),
    simple("tied_autoencoder_sequences", TiedAutoencoder, 4, 6, batches=(1, 4, 6, 3)),
    simple("dead_relu", dead_relu, 6, batches=(1, 4, 3, 8, 16)),
    simple("frozen_first_layer", frozen_first, 6),
    simple("unused_parameter", Unused, 6),
    simple("shuffled_registration", shuffled_registration, 6),
    Case("keyword_called", KeywordCalled, {"x": floats(6)}, keyword_loss),
    Case("functional_call", mlp, {"x": floats(6)}, functional_call_loss),
    Case("bilinear", lambda: nn.Bilinear(6, 4, 3), {"x": floats(6), "z": floats(4)}, bilinear_loss),
    Case("bilinear_sequences", lambda: nn.Bilinear(6, 4, 3), {"x": floats(3, 6), "z": floats(3, 4)}, bilinear_loss),
    simple("weight_norm", lambda: parametrizations.weight_norm(nn.Linear(6, 4)), 6),
    simple("spectral_norm", lambda: parametrizations.spectral_norm(nn.Linear(6, 4)).eval(), 6),
    simple("orthogonal", lambda: parametrizations.orthogonal(nn.Linear(6, 6)), 6),
    simple("orthogonal_cayley", lambda: parametrizations.orthogonal(nn.Linear(6, 6), orthogonal_map="cayley"), 6),
    simple("lora_by_hand", lambda: LoRALinear(merged=False), 6),
    simple("lora_merged", lambda: LoRALinear(merged=True), 6),
    simple("hypernetwork", Hyper, 6),
    functional("cosine_classifier", {"w": (4, 6)}, cosine),
    simple("checkpointed", Checkpointed, 6),
    *PRODUCTS,
]
