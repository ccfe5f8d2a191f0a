"""Convolutions with every option, and the normalisation layers that go with them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from .case import Case, functional, simple


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


CASES: list[Case] = [
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
