"""The reference of every engine test: autograd, one sample at a time."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def loop_gradients(losses: Tensor, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Per-sample gradients (B, *shape) by name; zeros where a sample does not reach a parameter."""
    leaves = list(params.values())
    rows = [torch.autograd.grad(loss, leaves, retain_graph=True, allow_unused=True) for loss in losses.unbind()]
    return {
        name: torch.stack([torch.zeros_like(p) if row[k] is None else row[k] for row in rows])
        if rows
        else p.new_zeros((0, *p.shape))
        for k, (name, p) in enumerate(params.items())
    }


def flat(gradients: Mapping[str, Tensor]) -> Tensor:
    """All per-sample gradients side by side in float64: (B, number of parameters)."""
    return torch.cat([g.detach().double().reshape(g.shape[0], -1) for g in gradients.values()], dim=1)


def norms_of(gradients: Mapping[str, Tensor]) -> Tensor:
    """Norms (B,), accumulated in float64."""
    return flat(gradients).norm(dim=1)
