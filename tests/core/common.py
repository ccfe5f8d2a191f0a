"""Small models, data and plans for the tests of the training step."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import clipwise as cw

N = 40


def data(n: int = N, seed: int = 0) -> TensorDataset:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 3, generator=g)
    return TensorDataset(x, x.sum(1) + 0.1 * torch.randn(n, generator=g))


def classified(n: int, seed: int) -> TensorDataset:
    """Points of six numbers, each of one of three classes."""
    torch.manual_seed(seed)
    return TensorDataset(torch.randn(n, 6), torch.randint(3, (n,)))


def layer() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 2)


def squares(model: nn.Module, x: Tensor) -> Tensor:
    """A loss that each row of `x` has by itself."""
    out: Tensor = model(x).square().sum(1)
    return out


def mlp(dropout: float = 0.0, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Dropout(dropout), nn.Linear(4, 1))


def losses_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (model(x).squeeze(1) - y).square()


def sgd(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), **{"lr": 0.1, **options})


def plan(**changes: Any) -> cw.Plan:
    fields = {"sampling": cw.Poisson(N, 10), "steps": 6, "clip": cw.Abadi(1.0), "noise_multiplier": 1.0, **changes}
    return cw.Plan(**fields)


def train(private: cw.Private, model: nn.Module, dataset: TensorDataset, **options: Any) -> int:
    """Run to the end; the number of completed steps that `step` reported."""
    return sum(private.step(losses_of(model, x, y)) for x, y in private.loader(dataset, **options))


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def loop_sum(model: nn.Module, x: Tensor, y: Tensor, rule: cw.Abadi) -> list[Tensor]:
    """The clipped sum, one sample at a time."""
    params = list(model.parameters())
    total = [torch.zeros_like(p) for p in params]
    for i in range(len(x)):
        grads = torch.autograd.grad(losses_of(model, x[i : i + 1], y[i : i + 1]).sum(), params)
        norm = torch.sqrt(sum((g.double().square().sum() for g in grads), torch.zeros((), dtype=torch.float64)))
        for t, g in zip(total, grads, strict=True):
            t += float(rule(norm)) * g
    return total


def elsewhere(work: Callable[[], str]) -> str:
    """What a function answers in a forked process; an error if it fails there."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.write(writer, work().encode())
            code = 0
        finally:
            os._exit(code)
    os.close(writer)
    with open(reader, encoding="utf-8") as answer:
        text = answer.read()
    if os.waitpid(child, 0)[1]:
        raise RuntimeError("a forked process ended with an error")
    return text


def refused_elsewhere(work: Callable[[], object]) -> str:
    """Do something in another process; what it was refused with."""

    def refusal() -> str:
        try:
            work()
        except cw.ClipwiseError as error:
            return str(error)
        return ""

    return elsewhere(refusal)
