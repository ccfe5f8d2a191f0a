"""Dense models: linear layers in every role, reuse, tying, parametrizations, einsum and matrix products.

Convolutions with every option, and the normalisation layers that go with them.
"""

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


def stack(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(*layers)


class Block(nn.Module):
    """A residual block with group norm, as a small ResNet has it."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.GroupNorm(2, channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(torch.relu(self.norm(self.first(x))))


def resnet() -> nn.Module:
    return stack(
        nn.Conv2d(2, 4, 3, stride=2, padding=1), Block(4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)
    )


def running(norm: nn.Module) -> nn.Module:
    """A batch norm in evaluation mode whose running statistics are not the trivial ones."""
    assert isinstance(norm, (nn.BatchNorm1d, nn.BatchNorm2d))
    assert norm.running_mean is not None and norm.running_var is not None
    norm.running_mean.copy_(torch.randn_like(norm.running_mean))
    norm.running_var.copy_(torch.rand_like(norm.running_var) + 0.5)
    return norm.eval()


class TwoSizes(nn.Module):
    """One convolution applied to the image and to its half-size copy."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        small = torch.nn.functional.avg_pool2d(x, 2)
        return torch.cat([self.conv(x).flatten(1).tanh(), self.conv(small).flatten(1).tanh()], dim=1)


class FoldedFrames(nn.Module):
    """Video: frames are folded into the batch for the convolution and unfolded again."""

    def __init__(self, frames_first: bool) -> None:
        super().__init__()
        self.frames_first = frames_first
        self.conv = nn.Conv2d(2, 3, 3)
        self.norm = nn.GroupNorm(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        if self.frames_first:
            x = x.transpose(0, 1)
        folded = self.norm(self.conv(x.flatten(0, 1))).tanh().unflatten(0, x.shape[:2])
        return folded.transpose(0, 1) if self.frames_first else folded


CASES += [
    simple("conv1d", lambda: stack(nn.Conv1d(2, 4, 3), nn.Tanh(), nn.Conv1d(4, 3, 1)), 2, 8),
    simple("conv1d_dilated", lambda: nn.Conv1d(2, 4, 3, dilation=2, padding=2), 2, 8),
    simple("conv1d_depthwise", lambda: nn.Conv1d(4, 4, 3, padding=2, groups=4), 4, 8, batches=(1, 4, 2, 3)),
    simple("conv2d", lambda: stack(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 3, 3, bias=False)), 2, 6, 6),
    simple("conv2d_stride_padding", lambda: nn.Conv2d(2, 4, (3, 2), stride=(2, 3), padding=(1, 2)), 2, 7, 6),
    simple("conv2d_stride_leaves_rest", lambda: nn.Conv2d(2, 3, 3, stride=2), 2, 6, 6),
    simple("conv2d_dilated", lambda: nn.Conv2d(2, 4, 3, dilation=2, padding=2), 2, 6, 6),
    simple("conv2d_grouped", lambda: nn.Conv2d(4, 6, 3, groups=2, padding=1), 4, 5, 5, batches=(1, 4, 2, 3)),
    simple("conv2d_depthwise", lambda: nn.Conv2d(4, 4, 3, groups=4), 4, 5, 5, batches=(1, 4, 2, 3)),
    simple("conv2d_depth_multiplier", lambda: nn.Conv2d(3, 6, 3, groups=3), 3, 5, 5, batches=(1, 3, 6, 4)),
    simple("conv2d_circular", lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"), 2, 5, 5),
    simple("conv2d_reflect", lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect"), 2, 5, 5),
    simple("conv2d_replicate", lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="replicate"), 2, 5, 5),
    simple("conv2d_same", lambda: nn.Conv2d(2, 3, 3, padding="same"), 2, 5, 5),
    simple("conv2d_same_even_kernel", lambda: nn.Conv2d(2, 3, 4, padding="same", dilation=2), 2, 8, 8),
    simple("conv2d_pointwise", lambda: nn.Conv2d(3, 4, 1), 3, 4, 4, batches=(1, 4, 3, 8)),
    simple("conv2d_patches", lambda: nn.Conv2d(2, 4, 4, stride=4), 2, 8, 8, batches=(1, 4, 2, 3)),
    simple("conv3d", lambda: nn.Conv3d(2, 3, (2, 3, 2), stride=(1, 2, 1), padding=(1, 0, 1)), 2, 3, 5, 4),
    simple("conv3d_grouped_dilated", lambda: nn.Conv3d(4, 4, 2, groups=2, dilation=2), 4, 4, 4, 4),
    simple("conv_transposed_1d", lambda: nn.ConvTranspose1d(3, 4, 3, stride=2, padding=1, output_padding=1), 3, 5),
    simple("conv_transposed_2d", lambda: nn.ConvTranspose2d(3, 4, 3, stride=2, output_padding=1), 3, 4, 4),
    simple("conv_transposed_2d_grouped", lambda: nn.ConvTranspose2d(4, 6, 3, groups=2, dilation=2, padding=1), 4, 4, 4),
    simple("conv_transposed_3d", lambda: nn.ConvTranspose3d(2, 3, 2, stride=2), 2, 2, 3, 2),
    simple("conv_weight_norm", lambda: parametrizations.weight_norm(nn.Conv2d(2, 3, 3)), 2, 5, 5),
    simple("conv_spectral_norm", lambda: parametrizations.spectral_norm(nn.Conv2d(2, 3, 3)).eval(), 2, 5, 5),
    simple("conv_two_sizes", TwoSizes, 2, 6, 6),
    simple("conv_folded_frames", lambda: FoldedFrames(False), 3, 2, 5, 5, batches=(1, 3, 4, 2)),
    simple("conv_folded_frames_first", lambda: FoldedFrames(True), 3, 2, 5, 5, batches=(1, 3, 4, 2)),
    functional(
        "conv_weight_from_parameters",
        {"base": (3, 2, 3, 3), "gain": (3, 1, 1, 1)},
        lambda p, x: torch.nn.functional.conv2d(x, p.base * p.gain.exp()),
        x=(2, 5, 5),
    ),
    functional(
        "conv_shared_input",
        {"w": (3, 2, 3), "b": (3,), "image": (1, 2, 6)},
        lambda p, x: torch.nn.functional.conv1d(p.image, p.w, p.b) * x.unsqueeze(2),
        x=(3,),
    ),
    simple("resnet_group_norm", resnet, 2, 8, 8),
    simple(
        "group_norm", lambda: stack(nn.Conv2d(2, 4, 1), nn.GroupNorm(2, 4), nn.Tanh()), 2, 4, 4, batches=(1, 4, 2, 3)
    ),
    simple("group_norm_2d_input", lambda: stack(nn.Linear(6, 8), nn.GroupNorm(4, 8)), 6),
    simple("instance_norm", lambda: stack(nn.Conv2d(2, 4, 3), nn.InstanceNorm2d(4, affine=True)), 2, 5, 5),
    simple("instance_norm_1d", lambda: stack(nn.Conv1d(2, 4, 3), nn.InstanceNorm1d(4, affine=True)), 2, 8),
    simple("instance_norm_plain", lambda: stack(nn.Conv2d(2, 4, 3), nn.InstanceNorm2d(4)), 2, 5, 5),
    simple("layer_norm", lambda: stack(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)), 4, 6, batches=(1, 4, 8, 3)),
    simple("layer_norm_2d_shape", lambda: stack(nn.Linear(6, 8), nn.LayerNorm((4, 8))), 4, 6, batches=(1, 4, 8, 3)),
    simple("layer_norm_no_bias", lambda: stack(nn.LayerNorm(6, bias=False), nn.Linear(6, 2)), 4, 6),
    simple("layer_norm_rows", lambda: stack(nn.LayerNorm(6), nn.Linear(6, 2)), 6),
    simple("rms_norm", lambda: stack(nn.Linear(6, 8), nn.RMSNorm(8), nn.Linear(8, 3)), 4, 6, batches=(1, 4, 8, 3)),
    simple("rms_norm_2d_shape", lambda: stack(nn.Linear(6, 8), nn.RMSNorm((4, 8))), 4, 6),
    simple("batch_norm_eval", lambda: stack(nn.Conv2d(2, 4, 3), running(nn.BatchNorm2d(4))), 2, 5, 5),
    simple("batch_norm_eval_1d", lambda: stack(nn.Linear(6, 4), running(nn.BatchNorm1d(4)), nn.Linear(4, 2)), 6),
    simple("batch_norm_eval_3d_input", lambda: stack(nn.Conv1d(2, 4, 3), running(nn.BatchNorm1d(4))), 2, 8),
    simple(
        "batch_norm_eval_plain", lambda: stack(nn.Conv2d(2, 4, 3), running(nn.BatchNorm2d(4, affine=False))), 2, 5, 5
    ),
    simple("prelu_one", lambda: stack(nn.Linear(6, 4), nn.PReLU(), nn.Linear(4, 2)), 6),
    simple("prelu_channels", lambda: stack(nn.Conv2d(2, 4, 3), nn.PReLU(4)), 2, 5, 5, batches=(1, 4, 2, 3)),
    simple("prelu_sequences", lambda: stack(nn.Conv1d(2, 4, 3), nn.PReLU(4), nn.PReLU()), 2, 8),
]
