"""Huge terms of one sample's gradient that nearly cancel: the float32 sum of them stays within the bound.

The norm that is meant is short, and a factor for it lets the last digits of the terms through, once for every addition.
Another order of the same additions gives another sum: up to 280 R for a layer that was used twice, by book-keeping, and
511 R for an embedding by plain autograd with the factors as cotangents. Plans are made on ordinary records before, so
no comparison with autograd refuses the batch.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clipwise.clipping import Abadi
from clipwise.engine import clipped_gradients
from clipwise.engine.cost import Way

WIDTH = 16
MAGNITUDES = [(1e4, 1e-5), (1e6, 0.0), (1e6, 1e-6), (1e6, 1e-4), (1e6, 1e-2), (1e6, 1.0), (1e10, 1e-9), (1e25, 0.0)]
"""Of the terms, and of what is left of them."""
Losses = Callable[[Tensor, Tensor], Tensor]  # the gradient of sample i is a sum of the terms c_i, (B, T, WIDTH)


def halves(c: Tensor) -> tuple[Tensor, Tensor]:
    half, other = c.tensor_split(2, 1)
    return half, other


def product(w: Tensor, c: Tensor) -> Tensor:
    """A matrix that meets the same row at every position."""
    x = torch.linspace(-1, 1, w.shape[1]).expand(*c.shape[:2], -1)
    return (F.linear(x, w) * c).flatten(1).sum(1)


def image(w: Tensor, c: Tensor) -> Tensor:
    side = int(c.shape[1] ** 0.5)
    seen = torch.linspace(-1, 1, w.shape[1]).view(1, -1, 1, 1).expand(len(c), -1, side + 2, side + 2)
    return (F.conv2d(seen, w).flatten(2).mT * c[:, : side**2]).flatten(1).sum(1)


def table(w: Tensor, c: Tensor) -> Tensor:
    return (F.embedding(torch.ones(c.shape[:2], dtype=torch.long), w) * c).flatten(1).sum(1)


def tied(w: Tensor, c: Tensor) -> Tensor:
    """The first half by a table, the second by a product: rows of the same matrix."""
    first, second = halves(c)
    onto_row = F.one_hot(torch.ones(second.shape[:2], dtype=torch.long), len(w)).float()
    return table(w, first) + ((second @ w.t()) * onto_row).flatten(1).sum(1)


def both(one: Losses, other: Losses) -> Losses:
    """The terms by two uses of the same tensor."""

    def added(w: Tensor, c: Tensor) -> Tensor:
        first, second = halves(c)
        return one(w, first) + other(w, second)

    return added


def twice(losses: Losses) -> Losses:
    return both(losses, losses)


def shifted(w: Tensor, c: Tensor) -> Tensor:
    return ((w + 0.5) * c).flatten(1).sum(1)


def computed(w: Tensor, c: Tensor) -> Tensor:
    x = torch.linspace(-1, 1, w.shape[1]).expand(*c.shape[:2], -1)
    return (F.linear(x, w.tanh()) * c).flatten(1).sum(1)


def part(losses: Losses) -> Losses:
    """The first rows alone: another node of the graph at every use."""

    def some(w: Tensor, c: Tensor) -> Tensor:
        return losses(w[: len(w) // 2], c)

    return some


def turned(w: Tensor, c: Tensor) -> Tensor:
    """The same as `product`, with the matrix on the left."""
    x = torch.linspace(-1, 1, w.shape[1]).unsqueeze(1).expand(-1, c.shape[0] * c.shape[1])
    return ((w @ x).t().view_as(c) * c).flatten(1).sum(1)


CASES: dict[str, tuple[tuple[int, ...], Losses]] = {
    "product": ((WIDTH, WIDTH), product),
    "wide product": ((WIDTH, 1024), product),  # norms from Gram matrices
    "product, used twice": ((WIDTH, WIDTH), twice(product)),
    "bias": ((WIDTH,), shifted),
    "bias, used twice": ((WIDTH,), twice(shifted)),
    "table": ((4, WIDTH), table),
    "table, used twice": ((4, WIDTH), twice(table)),
    "table and product": ((4, WIDTH), tied),
    "image": ((WIDTH, 4, 3, 3), image),
    "image, wide": ((WIDTH, 64, 3, 3), image),  # gradients are formed again for the sum
    "computed": ((WIDTH, WIDTH), computed),
    "part of a product, used twice": ((2 * WIDTH, WIDTH), twice(part(product))),
    "part of a product, used from either side": ((2 * WIDTH, WIDTH), both(part(product), part(turned))),
    "part of a bias, used twice": ((2 * WIDTH,), twice(part(shifted))),
    "part of a table, used twice": ((8, WIDTH), twice(part(table))),
    "part of a table, and of a product": ((8, WIDTH), part(tied)),
    "part of an image, used twice": ((2 * WIDTH, 4, 3, 3), twice(part(image))),
}


def pairs(count: int, magnitude: float, generator: torch.Generator) -> Tensor:
    terms = torch.randn(count, WIDTH, generator=generator) * magnitude
    terms[count // 2 :] = -terms[: count // 2]
    return terms


def runs(count: int, magnitude: float, generator: torch.Generator) -> Tensor:
    """First all of one sign."""
    terms = magnitude * (0.5 + torch.rand(count, WIDTH, generator=generator))
    terms[count // 2 :] = -terms[: count // 2]
    return terms


def lost(count: int, magnitude: float, generator: torch.Generator) -> Tensor:
    """A huge number, many that are lost beside it or not by how it is scaled, their sum, and the huge one again."""
    power = 2.0 ** torch.tensor(magnitude).log2().floor()
    terms = torch.full((count, WIDTH), 0.49 * float(power) * 2.0**-23)
    terms[0] = (1 + 0.9 * torch.rand(WIDTH, generator=generator)) * power
    terms[count // 2] = -terms[1] * max(count - 3, 0)
    terms[-1] = -terms[0]
    return terms


def contribution(w: nn.Parameter, losses: Losses, terms: Tensor, way: Way) -> float:
    """The length of what one sample adds to the sum, beside one that adds nothing."""
    found = clipped_gradients(losses(w, torch.stack([terms, torch.zeros_like(terms)])), [w], Abadi(1.0), way=way)
    (total,) = found.gradients.values()
    return float(total.double().norm())


@pytest.mark.parametrize("way", ["bookkeeping", "second_backward"])
@pytest.mark.parametrize("name", CASES)
def test_a_sample_whose_terms_cancel_stays_within_its_bound(name: str, way: Way) -> None:
    shape, losses = CASES[name]
    worst = 0.0
    for count in (4, 64, 1024):
        torch.manual_seed(0)
        w = nn.Parameter(torch.randn(shape))
        for _ in range(2):
            contribution(w, losses, torch.randn(count, WIDTH), way)
        for terms in (pairs, runs, lost):
            for magnitude, rest in MAGNITUDES:
                generator = torch.Generator().manual_seed(count)
                made = terms(count, magnitude, generator)
                made[-1] += magnitude * rest * torch.randn(WIDTH, generator=generator)
                worst = max(worst, contribution(w, losses, made, way))
    assert worst <= 1 + 1e-4
