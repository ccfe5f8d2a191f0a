"""Small networks with their data as values that can be saved: what the statements are shown on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import clipwise as cw

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"tanh": torch.tanh, "sin": torch.sin, "softplus": F.softplus}
LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "squared error": lambda outputs, y: (outputs - y).square(),
    "logistic": lambda outputs, y: F.softplus(-y * outputs),
}
RULES: dict[str, Callable[..., Any]] = {
    "none": cw.NoClip,
    "batch": cw.BatchClip,
    "abadi": cw.Abadi,
    "automatic": cw.Automatic,
    "normalize": cw.Normalize,
    "global": cw.Global,
}


class MLP(nn.Module):
    """Linear layers with an activation between them and one output."""

    def __init__(self, widths: tuple[int, ...], activation: str, bias: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(m, n, bias=bias) for m, n in pairwise(widths))
        self.activation = ACTIVATIONS[activation]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = self.activation(layer(x))
        return self.layers[-1](x).squeeze(1)


class Parallel(nn.Module):
    """The sum of linear layers, each of which sees its own features: linear in the weights, so H never changes."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        super().__init__()
        self.sizes = list(sizes)
        self.layers = nn.ModuleList(nn.Linear(size, 1, bias=False) for size in sizes)

    def forward(self, x: Tensor) -> Tensor:
        parts = x.split(self.sizes, dim=1)
        return sum(layer(part) for layer, part in zip(self.layers, parts, strict=True)).squeeze(1)


@dataclass(frozen=True)
class Architecture:
    """`kind` is "mlp" (with `shape` its widths) or "parallel" (with `shape` the features of each layer)."""

    kind: str
    shape: tuple[int, ...]
    activation: str = "tanh"
    bias: bool = True

    @property
    def features(self) -> int:
        return self.shape[0] if self.kind == "mlp" else sum(self.shape)

    def build(self) -> nn.Module:
        if self.kind == "mlp":
            return MLP(self.shape, self.activation, self.bias).double()
        return Parallel(self.shape).double()

    def __str__(self) -> str:
        if self.kind == "mlp":
            bias = "" if self.bias else ", no biases"
            return f"{'-'.join(map(str, self.shape))} {self.activation} network{bias}"
        return f"sum of {len(self.shape)} linear layers on {'+'.join(map(str, self.shape))} features"


@dataclass(frozen=True)
class Clipping:
    """A rule by name with its numbers, flat or layerwise."""

    rule: str
    numbers: tuple[float, ...] = ()
    layerwise: bool = False

    def value(self) -> Any:
        rule = RULES[self.rule](*self.numbers)
        return cw.Layerwise(rule) if self.layerwise else cw.Flat(rule)

    def __str__(self) -> str:
        numbers = f"({', '.join(f'{x:g}' for x in self.numbers)})" if self.numbers else ""
        return f"{self.rule}{numbers}{', layerwise' if self.layerwise else ', flat'}"


@dataclass(frozen=True)
class Case:
    """A network with weights, data, loss and clipping: everything that a flow needs."""

    architecture: Architecture
    weights: tuple[float, ...]
    x: tuple[tuple[float, ...], ...]
    y: tuple[float, ...]
    loss: str
    clipping: Clipping
    t_end: float

    def model(self, weights: Tensor | None = None) -> nn.Module:
        model = self.architecture.build()
        vector = torch.tensor(self.weights, dtype=torch.float64) if weights is None else weights
        torch.nn.utils.vector_to_parameters(vector, model.parameters())
        return model

    @property
    def data(self) -> tuple[Tensor, Tensor]:
        return torch.tensor(self.x, dtype=torch.float64), torch.tensor(self.y, dtype=torch.float64)

    def arguments(self, weights: Tensor | None = None, clipping: Clipping | None = None) -> tuple[Any, ...]:
        """What `cw.ntk.analyse` and `cw.ntk.gradient_flow` are called with."""
        return self.model(weights), LOSSES[self.loss], *self.data, (clipping or self.clipping).value()

    def flow(self, t_end: float | None = None, clipping: Clipping | None = None, **options: Any) -> cw.ntk.GradientFlow:
        """The flow from the case's weights; by default implicit where it is stiff, as it is close to the end."""
        end = self.t_end if t_end is None else t_end
        return cw.ntk.gradient_flow(*self.arguments(clipping=clipping), end, **{"method": "LSODA", **options})

    def conditioning(self, weights: Tensor | None = None) -> float:
        """The smallest eigenvalue of H over the largest."""
        eigenvalues = torch.linalg.eigvalsh(cw.ntk.kernel(self.model(weights), self.data[0]))
        return float(eigenvalues[0] / eigenvalues[-1])

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Case:
        architecture = values["architecture"] | {"shape": tuple(values["architecture"]["shape"])}
        clipping = values["clipping"] | {"numbers": tuple(values["clipping"]["numbers"])}
        rest = {name: values[name] for name in ("loss", "t_end")}
        return cls(
            Architecture(**architecture), tuple(values["weights"]), tuple(map(tuple, values["x"])), tuple(values["y"]),
            clipping=Clipping(**clipping), **rest,
        )  # fmt: skip


def random_case(
    seed: int, architecture: Architecture, samples: int, clipping: Clipping, t_end: float, *, outliers: bool = True
) -> Case:
    """Normal inputs, weights scaled by fan-in, normal targets; with outliers their cubes: most small, some far off."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    parts = [normal(*p.shape) / (p.shape[1] ** 0.5 if p.dim() > 1 else 1.0) for p in architecture.build().parameters()]
    weights = torch.cat([part.flatten() for part in parts])
    x, y = normal(samples, architecture.features), normal(samples)
    y = y.pow(3) if outliers else y
    data = tuple(map(tuple, x.tolist())), tuple(y.tolist())
    return Case(architecture, tuple(weights.tolist()), *data, "squared error", clipping, t_end)
