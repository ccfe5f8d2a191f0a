"""Small models of three kinds with one and several outputs, and the tangent kernel by plain autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Transformer(nn.Module):
    """Embedding, position embedding as a direct parameter, one encoder layer, a head."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.position = nn.Parameter(0.5 * torch.randn(1, 5, 8))
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.head = nn.Linear(8, outputs)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.encoder(self.embedding(tokens) + self.position)
        return self.head(hidden.mean(1))


class Tied(nn.Module):
    """A table used for input and output, and a weight-normed layer: parameters with no single use."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.mix = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = torch.tanh(self.mix(self.embedding(tokens))).mean(1)
        return hidden @ self.embedding.weight.T


class TwoHeads(nn.Module):
    """Outputs that do not share all weights: each head is reached by one output only."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(3, 4)
        self.one, self.two = nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.trunk(x))
        return torch.cat([self.one(hidden), self.two(hidden.square())], 1)


class Opaque(nn.Module):
    """A network with an operation for which the engine has no rule."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.head = nn.Parameter(torch.randn(3)), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(torch.logaddexp2(x, self.scale)))


def mlp(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, outputs))


def cnn(outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, stride=2),
        nn.Tanh(),
        nn.MaxPool2d(2, 1),
        nn.Conv2d(4, 3, 2),
        nn.Flatten(),
        nn.Linear(3, outputs),
    )


MODELS: dict[str, Callable[[int], nn.Module]] = {"mlp": mlp, "cnn": cnn, "transformer": Transformer}


def inputs(kind: str, n: int) -> Tensor:
    if kind == "mlp":
        return torch.randn(n, 4, dtype=torch.float64)
    if kind == "cnn":
        return torch.randn(n, 1, 8, 8, dtype=torch.float64)
    return torch.randint(0, 11, (n, 5))


def squared_error(outputs: Tensor, y: Tensor) -> Tensor:
    return (outputs - y).square().sum(1)


def cross_entropy(outputs: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(outputs, y, reduction="none")


def huber_sine(outputs: Tensor, y: Tensor) -> Tensor:
    """A loss that nobody uses, not convex."""
    return (F.smooth_l1_loss(outputs, y, reduction="none") + 0.3 * torch.sin(3 * outputs)).sum(1)


def problem(kind: str, outputs: int, loss: str, n: int = 6, seed: int = 0) -> tuple[nn.Module, Any, Tensor, Tensor]:
    """model, loss_fn, x, y in float64."""
    torch.manual_seed(seed)
    model, x = MODELS[kind](outputs).double(), inputs(kind, n)
    if loss == "cross_entropy":
        return model, cross_entropy, x, torch.randint(0, outputs, (n,))
    y = 2 * torch.randn(n, outputs, dtype=torch.float64)
    return model, squared_error if loss == "mse" else huber_sine, x, y


def plain_jacobian(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """df_ik/dp by one backward pass per number, {name: (nK, p)}: slow and beyond doubt."""
    training = model.training
    model.eval()
    outputs = model(x).flatten(1)
    weights = dict(model.named_parameters())
    rows: dict[str, list[Tensor]] = {name: [] for name in weights}
    for output in outputs.flatten():
        found = torch.autograd.grad(output, list(weights.values()), retain_graph=True, materialize_grads=True)
        for name, part in zip(weights, found, strict=True):
            rows[name].append(part.flatten())
    model.train(training)
    return {name: torch.stack(parts) for name, parts in rows.items()}


def gap(a: Tensor, b: Tensor) -> float:
    """The largest difference relative to the largest entry."""
    return float((a - b).abs().max() / b.abs().max())
