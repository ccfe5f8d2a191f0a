"""What torch.compile gives beside the engine: `python -m benchmarks.compiled` prints the numbers of decision 0024.

Regions without parameters: a step with compiled activations whose backward graph is read, beside the same step probed
every time and the step without torch.compile. The engine itself: one step traced with make_fx, its two branches that
follow the data taken out, and compiled. All are timed in turn, in one thread; medians.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch._functorch.config
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import clipwise as cw
from clipwise.engine import clip, routes, uses

_WARM, _STEPS = 8, 40


def _medians(steps: dict[str, Callable[[], object]]) -> dict[str, float]:
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(_WARM + _STEPS):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            taken[name].append(time.perf_counter() - start)
    return {name: median(times[_WARM:]) for name, times in taken.items()}


def _print(title: str, found: dict[str, float]) -> None:
    first = next(iter(found.values()))
    print(title, *(f"  {name}: {1e3 * t:.2f} ms, {t / first:.2f} x" for name, t in found.items()), sep="\n")


def activation(x: Tensor) -> Tensor:
    """Several operations, element by element."""
    return F.gelu(x) * torch.sigmoid(x) + torch.tanh(x) * 0.5


class Net(nn.Module):
    """Four layers on sequences, with an activation that may be compiled."""

    def __init__(self, width: int, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.head, self.act = nn.Linear(width, 10), act

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        for layer in self.layers:
            x = self.act(layer(x))
        out: Tensor = self.head(x.mean(1))
        return out


def regions(size: int, width: int) -> None:
    """Compiled activations: not compiled, read, probed at every step."""
    torch._functorch.config.donated_buffer = False
    act, reads = torch.compile(activation), routes.keeps_apart

    def step(model: nn.Module, proves: Callable[..., bool]) -> Callable[[], object]:
        def run() -> object:
            routes.keeps_apart = proves
            losses = F.cross_entropy(model(torch.randn(size, 16, width)), torch.randint(10, (size,)), reduction="none")
            return cw.clipped_gradients(losses, dict(model.named_parameters()), cw.Abadi(1.0))

        return run

    steps = {
        "not compiled": step(Net(width, activation), reads),
        "compiled, read": step(Net(width, act), reads),
        "compiled, probed at every step": step(Net(width, act), lambda *_: False),
    }
    _print(f"activations, batch {size}, width {width}", _medians(steps))
    routes.keeps_apart = reads


def traced(size: int, width: int) -> None:
    """A step of the engine on a fixed MLP: as it is, traced without its branches, and compiled."""
    model = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 5))
    x, y = torch.randn(size, width), torch.randint(5, (size,))
    clipper, style = clip.Clipper(dict(model.named_parameters())), cw.Flat(cw.Abadi(1.0))

    def engine(x: Tensor, y: Tensor) -> list[Tensor]:
        losses = F.cross_entropy(model(x), y, reduction="none")
        return list(clipper(losses, style, way="bookkeeping").gradients.values())

    def plain() -> object:
        return torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))

    for _ in range(3):
        engine(x, y)
    asks, few = clip._all_clear, uses._FEW
    clip._all_clear, uses._FEW = lambda *_: True, 1 << 30
    graph: Any = make_fx(engine)(x, y)
    clip._all_clear, uses._FEW = asks, few
    with torch.no_grad():
        compiled = torch.compile(graph)
        steps: dict[str, Callable[[], object]] = {
            "a plain step": torch.enable_grad()(plain),
            "engine": torch.enable_grad()(lambda: engine(x, y)),
            "traced": lambda: graph(x, y),
            "traced and compiled": lambda: compiled(x, y),
        }
        _print(f"MLP, batch {size}, width {width}", _medians(steps))
        x[0] = torch.nan
        print("  sums are finite beside a NaN sample:", all(bool(g.isfinite().all()) for g in graph(x, y)))


def main() -> None:
    """Measure and print."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    for size, width in ((16, 128), (64, 256)):
        regions(size, width)
    for size, width in ((16, 64), (64, 256), (128, 1024)):
        traced(size, width)


if __name__ == "__main__":
    main()
