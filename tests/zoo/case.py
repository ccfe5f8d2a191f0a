"""What a zoo case is: an unmodified model, how to draw its data, and its per-sample losses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Draw = Callable[[int, torch.Generator], Tensor]
Data = dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class Case:
    """One model of the zoo.

    `data` maps argument names to samplers of tensors whose first axis is the batch, so that samples can be taken out
    or changed one by one. `loss(model, **data)` gives the losses, shape (B,). `batches` begins with 1 and goes on with
    sizes that equal or divide other dimensions of the model, and sizes that do not.
    """

    name: str
    build: Callable[[], nn.Module]
    data: Mapping[str, Draw]
    loss: Callable[..., Tensor]
    batches: tuple[int, ...] = (1, 4, 3, 8)
    tags: frozenset[str] = frozenset()
    tolerance32: float = 1e-5

    def model(self, seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Module:
        """A fresh model with seeded weights, in evaluation mode unless `build` chose otherwise."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            return self.build().to(dtype)

    def draw(self, batch: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Data:
        """A batch of data; floating point tensors get `dtype`."""
        generator = torch.Generator().manual_seed(1000 * batch + seed)
        drawn = {name: draw(batch, generator) for name, draw in self.data.items()}
        return {name: value.to(dtype) if value.is_floating_point() else value for name, value in drawn.items()}

    def losses(self, model: nn.Module, batch: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
        """Losses of a drawn batch."""
        losses: Tensor = self.loss(model, **self.draw(batch, seed, dtype))
        return losses


@cache
def shared_model(case: Case, dtype: torch.dtype) -> nn.Module:
    """One model object per case and precision, reused by all tests of a module (and so is its cached plan)."""
    return case.model(dtype=dtype)


def named(model: nn.Module) -> dict[str, nn.Parameter]:
    """The trainable parameters by name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def floats(*shape: int) -> Draw:
    """Standard normal tensors (B, *shape)."""
    return lambda batch, g: torch.randn(batch, *shape, generator=g, dtype=torch.float64)


def ids(high: int, *shape: int, low: int = 0) -> Draw:
    """Integers low..high-1 of shape (B, *shape)."""
    return lambda batch, g: torch.randint(low, high, (batch, *shape), generator=g)


def mask(length: int) -> Draw:
    """0/1 masks (B, length): a random non-empty prefix of ones, as tokenizers give them."""

    def draw(batch: int, g: torch.Generator) -> Tensor:
        lengths = torch.randint(1, length + 1, (batch, 1), generator=g)
        return (torch.arange(length) < lengths).long()

    return draw


def class_loss(logits: Tensor, y: Tensor) -> Tensor:
    """Cross entropy per sample; logits (B, C)."""
    return F.cross_entropy(logits, y, reduction="none")


def token_loss(logits: Tensor, y: Tensor) -> Tensor:
    """Mean cross entropy over the tokens of each sample; logits (B, T, V), labels (B, T)."""
    return F.cross_entropy(logits.transpose(1, 2), y, reduction="none").mean(1)


def regress(out: Tensor) -> Tensor:
    """Mean squared distance of each sample's output from a fixed pattern; out (B, ...)."""
    flat = out.flatten(1) if out.dim() > 1 else out.unsqueeze(1)
    target = torch.sin(torch.arange(flat.shape[1], dtype=torch.float64)).to(flat.dtype)
    return (flat - target).square().mean(1)


def apply_x(model: nn.Module, x: Tensor) -> Tensor:
    """The loss of models called as `model(x)`."""
    return regress(model(x))


def under_autocast(case: Case) -> Case:
    """The same case with its forward pass in bfloat16 where autocast says so; its own rounding sets the tolerance."""

    def loss(model: nn.Module, **data: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            losses: Tensor = case.loss(model, **data)
        return losses.float()

    tags = case.tags | {"autocast"}
    return replace(case, name=f"autocast_{case.name}", loss=loss, tags=tags, tolerance32=0.05)


class Functional(nn.Module):
    """Bare parameters with a forward function, for models written in functional style.

    >>> m = Functional({"w": (3,)}, lambda p, x: x * p.w)
    >>> m(torch.ones(2, 3)).shape
    torch.Size([2, 3])
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], function: Callable[..., Tensor]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(0.5 * torch.randn(shape) + 0.1))
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.function(self, *args, **kwargs)


def functional(
    name: str,
    shapes: Mapping[str, tuple[int, ...]],
    function: Callable[..., Tensor],
    *,
    x: tuple[int, ...] = (6,),
    **options: Any,
) -> Case:
    """A case of bare parameters and a function `function(parameters, x)`."""
    return Case(name, lambda: Functional(shapes, function), {"x": floats(*x)}, apply_x, **options)


def simple(name: str, build: Callable[[], nn.Module], *shape: int, **options: Any) -> Case:
    """A case of a module called as `model(x)` with x of shape (B, *shape)."""
    return Case(name, lambda: build().eval(), {"x": floats(*shape)}, apply_x, **options)
