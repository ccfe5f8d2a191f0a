"""A small run for all programs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

import clipwise as cw

N, STEPS = 24, 6


class Setting:
    """Model, optimizer, records and run, as a user has them before the loop."""

    def __init__(self, sampling: Any = None, steps: int = STEPS, **options: Any) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(N, 3, generator=generator)
        self.y = torch.randint(2, (N,), generator=generator)
        self.records = TensorDataset(self.x, self.y)
        torch.manual_seed(0)
        self.model: nn.Module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        self.optimizer: Optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.plan = cw.Plan(sampling or cw.Poisson(N, 12), steps, cw.Abadi(1.0), noise_multiplier=1.0)
        self.private = cw.Private(self.plan, self.model, self.optimizer, **options)

    def losses(self, x: Tensor, y: Tensor, model: nn.Module | None = None) -> Tensor:
        return F.cross_entropy((model or self.model)(x), y, reduction="none")

    def batches(self, **options: Any) -> Iterable[Any]:
        return self.private.loader(self.records, **options)

    def weights(self) -> Tensor:
        return torch.cat([p.detach().reshape(-1).clone() for p in self.model.parameters()])
