"""What stands in a test for something of a user's own: rules, models, sources of noise, an optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from clipwise.entropy import Entropy
from clipwise.noise import DefaultNormals, Normals


class UpToR:
    """A rule of a user's own, whose clipped gradients are at most R long."""

    R: float
    sensitivity = property(lambda self: self.R)


@dataclass(frozen=True)
class Own(UpToR):
    """`R/(1 + ||g||)`."""

    R: float

    def __call__(self, norms: Tensor) -> Tensor:
        return self.R / (1 + norms)


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).tanh()).sum(1, keepdim=True)


class Remembering(nn.Module):
    """A layer, and a buffer that `forward` may read or write."""

    kept: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.register_buffer("kept", torch.zeros(6))


class Constant(Normals):
    """A source whose every number is `value`, to read standard deviations off exactly."""

    def __init__(self, value: float = 1.0) -> None:
        self.value = value
        self.steps: list[int] = []

    def fill_(self, buffer: Tensor, entropy: Any, step: int, piece: int) -> None:
        if piece == 0:
            self.steps.append(step)
        buffer.fill_(self.value)


class Unlabelled(Normals):
    """The same numbers for every label of a seed, to compare sums that differ in their rounding."""

    def fill_(self, buffer: Tensor, entropy: Entropy, step: int, piece: int) -> None:
        DefaultNormals().fill_(buffer, Entropy(entropy.seed), step, piece)


class Recorder(torch.optim.Optimizer):
    """An optimizer that moves nothing and remembers the gradients it was given."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})
        self.seen: list[list[Tensor]] = []

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.seen.append([p.grad.clone() for g in self.param_groups for p in g["params"] if p.grad is not None])
