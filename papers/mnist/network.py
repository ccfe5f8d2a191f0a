"""The convolutional network of the paper's appendix C.1, which is that of the tutorials of the DP libraries."""

import torch
from torch import nn
from torch.nn.utils import convert_conv2d_weight_memory_format


def layers() -> nn.Module:
    """28 x 28 grey images to 10 logits: two convolutions, two linear layers, 26,010 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 8, 2, padding=3),
        nn.ReLU(),
        nn.MaxPool2d(2, 1),
        nn.Conv2d(16, 32, 4, 2),
        nn.ReLU(),
        nn.MaxPool2d(2, 1),
        nn.Flatten(),
        nn.Linear(512, 32),
        nn.ReLU(),
        nn.Linear(32, 10),
    )


def network() -> nn.Module:
    """The same channels last, which takes a third less time on a CPU."""
    return convert_conv2d_weight_memory_format(layers(), torch.channels_last)
