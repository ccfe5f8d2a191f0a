"""Data and model of your own: the two functions that examples/own_code.toml names."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def waves(records: int = 4_000, noise: float = 0.1) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Inputs and targets to train on, and to test on. Floats are targets of a regression, integers are classes."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(records, 2, generator=generator) * 2 - 1
    y = torch.sin(3 * x[:, 0]) * torch.cos(2 * x[:, 1]) + noise * torch.randn(records, generator=generator)
    held_out = records // 5
    return x[held_out:], y[held_out:], x[:held_out], y[:held_out]


def network(width: int = 32) -> nn.Module:
    """Any module; one output for a regression, one for each class otherwise."""
    return nn.Sequential(nn.Linear(2, width), nn.LayerNorm(width), nn.GELU(), nn.Linear(width, 1))
