"""Small federations in float64, and the algorithm as a plain loop to compare with."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import clipwise as cw
from clipwise.entropy import Entropy
from clipwise.mechanisms import Rounds

SEED = 11
ClipFn = Callable[[Tensor], Tensor]


def federated_plan(sampling: Any, steps: int, clip: Any, noise_multiplier: float | None, **weights: Any) -> cw.Plan:
    return cw.Plan(sampling, steps, clip, noise_multiplier, mechanism=Rounds(**weights))


def make_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def make_users(count: int, seed: int = 1) -> list[TensorDataset]:
    """Users of different sizes, some with a single example."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [1 + (3 * k) % 7 for k in range(count)]
    return [
        TensorDataset(
            torch.randn(n, 3, generator=generator, dtype=torch.float64),
            torch.randint(0, 2, (n,), generator=generator),
        )
        for n in sizes
    ]


def loss_fn(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def put(model: nn.Module, vector: Tensor) -> None:
    nn.utils.vector_to_parameters(vector, model.parameters())


def order(number: int, user: int, epoch: int, size: int) -> list[int]:
    """The order of the examples that seeded clients take."""
    return Entropy(SEED).generator("local order", number, user, epoch).permutation(size).tolist()


def flat_clip(R: float) -> ClipFn:
    return lambda d: d * min(1.0, R / max(float(d.norm()), 1e-300))


def global_clip(R: float, Z: float) -> ClipFn:
    return lambda d: torch.zeros_like(d) if float(d.norm()) > Z else d * (R / Z)


def user_update_fedavg(
    model: nn.Module,
    user: int,
    data: TensorDataset,
    number: int,
    clip: ClipFn,
    *,
    lr: float,
    epochs: int,
    batch_size: int,
    every_batch: bool,
) -> Tensor:
    """UserUpdateFedAvg of the paper, with the clipping at the end of training or, as printed, after every batch."""
    start, local = flat(model), copy.deepcopy(model)
    x, y = data.tensors
    for epoch in range(epochs):
        indices = order(number, user, epoch, len(data))
        while indices:
            batch, indices = indices[:batch_size], indices[batch_size:]
            loss = loss_fn(local, (x[batch], y[batch])).mean()
            gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(local.parameters()))])
            put(local, flat(local) - lr * gradient)
            if every_batch:
                put(local, start + clip(flat(local) - start))
    moved = flat(local) - start
    return moved if every_batch else clip(moved)


def user_update_fedsgd(
    model: nn.Module, user: int, data: TensorDataset, number: int, clip: ClipFn, *, lr: float, batch_size: int
) -> Tensor:
    """UserUpdateFedSGD of the paper."""
    x, y = data.tensors
    batch = sorted(order(number, user, 0, len(data))[:batch_size])
    loss = loss_fn(model, (x[batch], y[batch])).mean()
    return clip(-lr * torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))]))


def main_loop(
    model: nn.Module,
    users: list[TensorDataset],
    selections: list[list[int]],
    update: Callable[[nn.Module, int, TensorDataset, int], Tensor],
    *,
    q: float,
    W: float,
    w_max: float,
) -> None:
    """The main loop of the paper with the capped weights, without noise."""
    for number, selected in enumerate(selections):
        total = torch.zeros_like(flat(model))
        for k in selected:
            total += min(len(users[k]), w_max) * update(model, k, users[k], number)
        put(model, flat(model) + total / (q * W))
