"""Tiny problems in float64, and per-sample gradients by a plain loop."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clipwise.entropy import Entropy

N = 24


def data(n: int = N, seed: int = 0, features: int = 3) -> TensorDataset:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, features, generator=g, dtype=torch.float64)
    return TensorDataset(x, x.sum(1) + 0.1 * torch.randn(n, generator=g, dtype=torch.float64))


def network(seed: int = 0, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Dropout(dropout), nn.Linear(4, 1)).double()


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return (model(x).squeeze(1) - y).square()


def gradients_of_each(model: nn.Module, batch: Any) -> list[Tensor]:
    """One flat gradient per sample, one backward pass each."""
    found = []
    for i in range(len(batch[0])):
        loss = loss_fn(model, [column[i : i + 1] for column in batch]).sum()
        found.append(torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, list(model.parameters()))]))
    return found


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def put(model: nn.Module, weights: Tensor) -> None:
    torch.nn.utils.vector_to_parameters(weights, list(model.parameters()))


class Remembered:
    """A source of normal numbers that can be asked again what it gave for a step."""

    def __init__(self) -> None:
        self._given: dict[tuple[int | None, int], Tensor] = {}

    def fill_(self, buffer: Tensor, entropy: Entropy, step: int, piece: int) -> None:
        assert piece == 0, "a tiny model fits one piece"
        key = (entropy.seed, step)
        if key in self._given:
            assert entropy.seed is not None and entropy.seed >> 32, "only directions are drawn again"
        else:
            generator = torch.Generator().manual_seed(len(self._given))
            self._given[key] = torch.randn(buffer.numel(), generator=generator, dtype=torch.float64)
        buffer.copy_(self._given[key])

    def noise(self, seed: int, step: int) -> Tensor:
        return self._given[seed, step]

    def direction(self, batch: int, number: int) -> Tensor:
        """Of the logical batches that drew directions, in their order: each has an entropy of its own."""
        own = list(dict.fromkeys(seed for seed, _ in self._given if seed is not None and seed >> 32))
        return self._given[own[batch], number]
