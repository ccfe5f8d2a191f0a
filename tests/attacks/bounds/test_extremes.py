"""A huge input whose output gradient is tiny, or the other way round: the gradient is ordinary, its factors are not.

A clipping factor is made for the gradient. Times the longer row alone it was infinite, for every rule that lengthens
short gradients, and the release showed that the record was there. Times a row of a few units of the smallest number it
was rounded to other units: up to 1.96 R.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import clipwise as cw
from clipwise.clipping import Abadi, Automatic, Global, GlobalScaled, Normalize, Rule, Style
from clipwise.engine import clipped_gradients
from clipwise.engine.cost import Way

Losses = Callable[[Mapping[str, Tensor], Tensor, Tensor], Tensor]  # of (B, T, n) inputs and (B, T, m) output gradients
Case = tuple[Mapping[str, tuple[int, ...]], Losses, int]  # shapes of parameters, losses, positions
SIZES = [(3e38, 1.4e-45), (1e37, 2e-45), (1e30, 1e-40), (2e19, 1e-33), (1e18, 1e-30), (1e30, 1e-2), (3e38, 0.0)]
FURTHER = [(3e38, 1e-43), (1e33, 1.4e-45), (1e25, 1e-37), (1e20, 1e-30), (3e38, 3e38), (1e20, 1.0), (1e-20, 1e-20)]
BOUNDS = 1e-4, 1.0, 100.0
RULES: dict[str, Callable[[float], Rule]] = {
    "abadi": Abadi,
    "automatic": Automatic,
    "normalize": Normalize,
    "global": Global,
    "global, scaled": lambda bound: GlobalScaled(bound, 1e-6),
}
FEW = [Abadi(1e-4), Normalize(1e-4), Normalize(100.0), Automatic(1.0)]


def summed(found: Tensor) -> Tensor:
    return found.flatten(1).sum(1)


def linear(p: Mapping[str, Tensor], x: Tensor, c: Tensor) -> Tensor:
    return summed(F.linear(x, p["w"], p.get("b")) * c)


def rows(p: Mapping[str, Tensor], x: Tensor, c: Tensor) -> Tensor:
    return linear(p, x[:, 0], c[:, 0])


def turned(p: Mapping[str, Tensor], x: Tensor, c: Tensor) -> Tensor:
    """The matrix on the left."""
    return summed((p["w"] @ x.mT).mT * c)


def twice(losses: Losses) -> Losses:
    return lambda p, x, c: losses(p, x, c) + losses(p, x[:, :1], c[:, :1])


def either(p: Mapping[str, Tensor], x: Tensor, c: Tensor) -> Tensor:
    return linear(p, x, c) + turned(p, x, c)


def half(losses: Losses) -> Losses:
    """Half of the rows of a matrix."""
    return lambda p, x, c: losses({"w": p["w"][: c.shape[2]]}, x, c)


def beside(losses: Losses) -> Losses:
    """The first sample has a short gradient in another layer as well."""
    return lambda p, x, c: losses(p, x, c) + (p["v"] * 1e-12 * torch.eye(len(x), 3, dtype=x.dtype)[:, :1]).sum(1)


def table(p: Mapping[str, Tensor], x: Tensor, c: Tensor) -> Tensor:
    index = torch.arange(x.shape[1]).remainder(3).expand(len(x), -1)
    return summed(F.embedding(index, p["w"]) * x[:, :, :1] * c[:, :, :1])


def table_and_product(p: Mapping[str, Tensor], x: Tensor, c: Tensor) -> Tensor:
    return table(p, x, c) + linear(p, x, c)


def image(p: Mapping[str, Tensor], x: Tensor, c: Tensor) -> Tensor:
    """Channels, on squares of pixels; outputs have gradients at every pixel."""
    side = int(x.shape[1] ** 0.5)
    pixels = x.mT.unflatten(2, (side, side))
    out = F.conv2d(pixels, p["w"], p.get("b"), padding=(p["w"].shape[2] - 1) // 2).flatten(2)
    return summed(out * c.mT[:, :, : out.shape[2]])


def channels(p: Mapping[str, Tensor], x: Tensor, c: Tensor) -> Tensor:
    return summed(F.conv1d(x.mT, p["w"], groups=x.shape[2], padding=1) * c.mT[:, : x.shape[2]])


def layer_norm(p: Mapping[str, Tensor], x: Tensor, c: Tensor) -> Tensor:
    return summed(F.layer_norm(x, x.shape[2:], p["w"], p["b"]) * c)


def group_norm(p: Mapping[str, Tensor], x: Tensor, c: Tensor) -> Tensor:
    return summed(F.group_norm(x.mT, 2, p["w"], p["b"]) * c.mT)


def scale(p: Mapping[str, Tensor], x: Tensor, c: Tensor) -> Tensor:
    return summed(p["w"] * x * c)


def experts(p: Mapping[str, Tensor], x: Tensor, c: Tensor) -> Tensor:
    """Every sample at every expert: a stack of matrices."""
    return summed(torch.einsum("btn,emn->bem", x, p["w"]) * c[:, :1])


def halved(losses: Losses) -> Losses:
    """In bfloat16, whose largest number is that of float32."""
    return lambda p, x, c: losses({k: v.bfloat16() for k, v in p.items()}, x.bfloat16(), c.bfloat16()).float()


def made(change: Callable[[Tensor], Tensor], losses: Losses = linear) -> Losses:
    """A weight that is computed from a parameter."""
    return lambda p, x, c: losses({"w": change(p["w"])}, x, c)


def weight_normed(w: Tensor) -> Tensor:
    return w / w.norm(dim=1, keepdim=True)


CASES: dict[str, Case] = {
    "rows": ({"w": (8, 6)}, rows, 1),
    "rows, other way round": ({"w": (6, 8)}, rows, 1),
    "rows of a wide layer": ({"w": (256, 512)}, rows, 1),
    "rows, and a bias": ({"w": (8, 6), "b": (8,)}, rows, 1),
    "rows beside another layer": ({"w": (8, 6), "v": (3,)}, beside(rows), 1),
    "rows onto one number": ({"w": (1, 6)}, rows, 1),
    "rows of one number": ({"w": (6, 1)}, rows, 1),
    "one position": ({"w": (8, 6)}, linear, 1),
    "two positions": ({"w": (8, 6)}, linear, 2),
    "many positions": ({"w": (8, 6)}, linear, 16),
    "many positions onto one number": ({"w": (1, 6)}, linear, 16),
    "matrix on the left": ({"w": (8, 6)}, turned, 4),
    "rows, used twice": ({"w": (8, 6)}, twice(rows), 1),
    "positions, used twice": ({"w": (8, 6)}, twice(linear), 4),
    "one number, used twice": ({"w": (6, 1)}, twice(linear), 16),
    "part of a product": ({"w": (16, 6)}, half(linear), 4),
    "part of a product, used twice": ({"w": (16, 6)}, twice(half(rows)), 1),
    "part of a product, from either side": ({"w": (16, 6)}, half(either), 2),
    "table": ({"w": (4, 6)}, table, 4),
    "table, used twice": ({"w": (4, 6)}, twice(table), 4),
    "table and product": ({"w": (4, 6)}, table_and_product, 4),
    "image": ({"w": (8, 6, 3, 3), "b": (8,)}, image, 16),
    "image of one pixel": ({"w": (8, 6, 1, 1)}, image, 1),
    "image, wide": ({"w": (64, 64, 3, 3)}, image, 4),
    "image, one pixel, wide": ({"w": (128, 64, 3, 3)}, image, 1),
    "channels": ({"w": (6, 1, 3)}, channels, 8),
    "layer norm": ({"w": (6,), "b": (6,)}, layer_norm, 4),
    "group norm": ({"w": (6,), "b": (6,)}, group_norm, 4),
    "scale": ({"w": (6,)}, scale, 4),
    "experts": ({"w": (3, 8, 6)}, experts, 1),
    "bfloat16": ({"w": (8, 6)}, halved(rows), 1),
    "bfloat16, positions": ({"w": (8, 6)}, halved(linear), 4),
    "computed": ({"w": (8, 6)}, made(torch.tanh), 4),
    "computed, rows": ({"w": (8, 6)}, made(torch.tanh, rows), 1),
    "computed, normed": ({"w": (8, 6)}, made(weight_normed, rows), 1),
    "computed, much shorter": ({"w": (8, 6)}, made(lambda w: (w - 85).exp(), rows), 1),
    "computed, much longer": ({"w": (8, 6)}, made(lambda w: (w + 80).exp(), rows), 1),
}  # fmt: skip


DOUBLE_SIZES = [
    (1e300, 1e-320), (1e250, 1e-260), (1e155, 1e-165), (1e140, 1e-160), (1e120, 1.5e-162), (1e200, 0.0), (1e308, 1e308),
]  # fmt: skip
DOUBLES = [name for name in CASES if "bfloat16" not in name and name != "image, one pixel, wide"]


def data(case: Case, dtype: torch.dtype) -> tuple[dict[str, nn.Parameter], int, int]:
    shapes, losses, _ = case
    torch.manual_seed(0)
    params = {name: nn.Parameter(0.1 * torch.randn(shape, dtype=dtype)) for name, shape in shapes.items()}
    shape = shapes["w"]
    if len(shape) == 1 or losses is channels:
        return params, shape[0], shape[0]
    m, n = (shape[0], shape[1]) if len(shape) != 3 else (shape[1], shape[2])
    if losses is experts:
        return params, n, m
    return params, n, m // 2 if m == 16 else m


def contribution(
    losses: Losses, params: Mapping[str, nn.Parameter], style: Rule | Style, way: Way, x: Tensor, c: Tensor
) -> tuple[list[bool], Tensor]:
    found = clipped_gradients(losses(params, x, c), dict(params), style, way=way)
    return found.bad.tolist(), torch.cat([total.double().flatten() for total in found.gradients.values()])


def longest(
    case: Case, sizes: Sequence[tuple[float, float]], rules: Sequence[Rule], way: Way, dtype: torch.dtype
) -> float:
    """The length of what one sample adds to the sum, beside one that adds nothing, in units of its bound."""
    (params, n, m), losses, generator = data(case, dtype), case[1], torch.Generator().manual_seed(0)

    def drawn(samples: int, width: int) -> Tensor:
        return torch.randn(samples, case[2], width, generator=generator, dtype=dtype).clamp(-1, 1)

    x, c = drawn(2, n), drawn(2, m)
    for _ in range(2):  # the plan is made, and compared, with ordinary records
        contribution(losses, params, Abadi(1.0), way, x, c)
    worst = 0.0
    for size, other in [pair for each in sizes for pair in (each, each[::-1])]:
        inputs, outputs = torch.cat([drawn(1, n) * size, x[:1]]), torch.cat([drawn(1, m) * other, 0 * c[:1]])
        for rule in rules:
            total = contribution(losses, params, rule, way, inputs, outputs)[1]
            assert torch.isfinite(total).all(), (size, other, rule)
            worst = max(worst, float(total.norm()) / rule.sensitivity)
    return worst


@pytest.mark.parametrize("way", ["bookkeeping", "second_backward"])
@pytest.mark.parametrize("name", CASES)
def test_an_extreme_record_stays_within_its_bound(name: str, way: Way) -> None:
    assert longest(CASES[name], SIZES, FEW, way, torch.float32) <= 1 + 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("way", ["bookkeeping", "second_backward"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", CASES)
def test_an_extreme_record_stays_within_every_bound(name: str, rule: str, way: Way) -> None:
    for sizes in (SIZES, FURTHER):  # fewer steps than until the next comparison with autograd
        rules = [RULES[rule](bound) for bound in BOUNDS]
        assert longest(CASES[name], sizes, rules, way, torch.float32) <= 1 + 1e-5


@pytest.mark.parametrize("way", ["bookkeeping", "second_backward"])
@pytest.mark.parametrize("name", DOUBLES)
def test_an_extreme_record_stays_within_its_bound_in_float64(name: str, way: Way) -> None:
    assert longest(CASES[name], DOUBLE_SIZES, [Normalize(1e-4), Normalize(100.0)], way, torch.float64) <= 1 + 1e-5


@pytest.mark.parametrize("bound", [1.2e-38, 1e-30, 1e-20, 1e6, 1e12])
@pytest.mark.parametrize("rule", ["abadi", "normalize"])
def test_bounds_at_the_ends_of_float32_hold(rule: str, bound: float) -> None:
    """A row is rounded in subnormal numbers by a tiny bound, and a huge one makes factors that are infinite."""
    sizes = [(1.0, 1.0), (1e10, 1e-10), (1e15, 1e-20), (1e18, 1e-18), (1e18, 1.0), (1e10, 1e-24), *SIZES]
    for name in ("rows", "rows, and a bias", "many positions", "positions, used twice", "image"):
        assert longest(CASES[name], sizes, [RULES[rule](bound)], "bookkeeping", torch.float32) <= 1 + 1e-4


@pytest.mark.parametrize("way", ["bookkeeping", "second_backward"])
def test_what_an_extreme_record_adds_is_its_own(way: Way) -> None:
    """Among ordinary records, beside NaN, and in any place: the others' part does not move, nor does its own."""
    for name in ("rows, and a bias", "many positions", "rows, used twice", "image"):
        case = CASES[name]
        (params, n, m), generator = data(case, torch.float32), torch.Generator().manual_seed(0)
        x, c = (torch.randn(4, case[2], width, generator=generator) for width in (n, m))
        for size, other in SIZES:
            far, near = torch.full_like(x[:1], size), torch.full_like(c[:1], other)
            for rule in (Abadi(1e-4), Normalize(1.0)):
                bad, without = contribution(case[1], params, rule, way, x, c)
                assert not any(bad)
                alone = contribution(case[1], params, rule, way, torch.cat([far, x[:1]]), torch.cat([near, 0 * c[:1]]))
                for spoiled in (False, True):
                    last = x[:1] * (torch.nan if spoiled else 1)
                    some, total = contribution(
                        case[1], params, rule, way, torch.cat([x, far, last]), torch.cat([c, near, 0 * c[:1]])
                    )
                    assert some == [False] * 4 + [alone[0][0], spoiled]
                    assert float((total - without - alone[1]).norm()) <= 1e-5 * rule.sensitivity * 5


@pytest.mark.parametrize("rule", [Normalize(1.0), Automatic(1.0)])
def test_a_run_with_an_extreme_record_goes_on(rule: Rule) -> None:
    """Its weights are finite, as without the record: what is released does not show that it was there."""
    torch.manual_seed(0)
    model, x, c = nn.Linear(32, 64, bias=False), torch.randn(64, 32), torch.randn(64, 64)
    nn.init.zeros_(model.weight)
    x[5], c[5] = 3e38, 1.4e-45
    plan = cw.Plan(sampling=cw.Poisson(sample_size=64, batch_size=32), steps=6, clip=rule, noise_multiplier=1.0)
    private = cw.Private(plan, model, torch.optim.SGD(model.parameters(), lr=1e-30))
    met = 0
    for inputs, gradients in private.loader(TensorDataset(x, c)):
        private.step((model(inputs) * gradients).sum(1))
        met += int((inputs > 1e30).any())
        assert torch.isfinite(model.weight).all()
    assert met
