"""Rows that several samples read: the mean of their colours must not pass for the colour of another sample."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clipwise.clipping import Abadi, Flat
from clipwise.engine import Clipper
from clipwise.engine.layout import NARROW, WIDE, Colours, Probe, drawn, owners_by_digits
from clipwise.errors import NotSeparable


def losses_of(model: nn.Module, x: Tensor, rows: Tensor, weights: Tensor) -> Tensor:
    """All of one class, so that who reads a row gives it a gradient in proportion to a weight."""
    labels = torch.zeros(len(rows), dtype=torch.long)
    return weights * F.nll_loss(model(x).log_softmax(1)[rows], labels, reduction="none")


READ_BY = [
    [0, 1, 2, 3, 3, 5, 6, 7], [0, 1, 1, 3, 4, 5, 6, 7], [0, 1, 2, 3, 4, 2, 6, 7], [0, 0, 0, 3, 4, 5, 6, 7],
    [0, 1, 2, 2, 4, 4, 6, 6], [7, 6, 5, 4, 3, 2, 1, 1], [3, 3, 3, 3, 3, 3, 3, 3],
]  # fmt: skip
PAIRS = [[a if i == b else i for i in range(8)] for a, b in combinations(range(8), 2)]


@pytest.mark.parametrize("weight", [1.0, 2.0, 4.0, -3.0, -1.0])
@pytest.mark.parametrize("rows", READ_BY + PAIRS, ids=str)
def test_rows_that_several_samples_read_are_refused_at_any_step(rows: list[int], weight: float) -> None:
    torch.manual_seed(0)
    model, clip = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 4)), Flat(Abadi(1.0))
    clipper, weights = Clipper(model.parameters()), torch.tensor([1.0, weight]).repeat(4)
    for _ in range(2):
        clipper(losses_of(model, torch.randn(8, 3), torch.randperm(8), torch.ones(8)), clip)
    with pytest.raises(NotSeparable):
        clipper(losses_of(model, torch.randn(8, 3), torch.tensor(rows), weights), clip)


@pytest.mark.parametrize("exponents", [NARROW, WIDE])
@pytest.mark.parametrize("readers", [2, 3])
def test_equal_parts_of_two_or_three_samples_never_look_like_one(exponents: range, readers: int) -> None:
    """In no draw: all colours of the palette are tried."""
    palette = torch.tensor([sign * 4.0**k for k in exponents for sign in (1, -1)])
    some = torch.cartesian_prod(*[palette] * readers)
    some = some[(some != some[:, :1]).any(1)]
    assert not torch.isin(some.double().mean(1), palette.double()).any()


@pytest.mark.parametrize(("dtype", "exponents"), [(torch.float32, WIDE), (torch.float16, NARROW)])
def test_any_weights_of_two_samples_are_seen_in_nearly_all_draws(dtype: torch.dtype, exponents: range) -> None:
    plain, bad, missed = torch.ones(1, 1, dtype=dtype), torch.zeros(64, dtype=torch.bool), 0
    for weight in (4.0, 0.25, -5 / 3, -2.5, 3.0, 1 / 16) * 100:
        colours = drawn(64, torch.zeros(()), exponents)
        mixed = [((weight * c[0] + c[1]) / (weight + 1)).to(dtype).view(1, 1) for c in colours.each]
        missed += owners_by_digits(Probe(plain, mixed, colours, bad), 0) is not None
    assert missed <= 12  # of 600


@pytest.mark.parametrize(
    ("dtype", "exponents"),
    [(torch.float64, WIDE), (torch.float32, WIDE), (torch.bfloat16, NARROW), (torch.float16, NARROW)],
)
def test_a_small_colour_is_not_lost_beside_a_large_one(dtype: torch.dtype, exponents: range) -> None:
    """One part of the largest beside w - 1 of the least, w a power of four: nearly a third colour."""
    bad, least, most = torch.zeros(3, dtype=torch.bool), 4.0**exponents.start, 4.0 ** (exponents.stop - 1)
    for apart in range(1, len(exponents)):
        w = 4.0**apart
        colours = Colours([torch.tensor([least, most, most / w])], exponents)
        mixed = torch.tensor([[(most + (w - 1) * least) / w]], dtype=dtype)
        assert not Probe(torch.ones(1, 1, dtype=dtype), [mixed], colours, bad).agrees(torch.tensor([2]), 0)


def test_colours_are_others_every_time_and_change_no_seeded_run() -> None:
    torch.manual_seed(0)
    before, one, other = torch.get_rng_state(), drawn(64, torch.zeros(())), drawn(64, torch.zeros(()))
    assert torch.equal(before, torch.get_rng_state())
    assert not any(torch.equal(a, b) for a, b in zip(one.each, other.each, strict=True))
    assert torch.equal(Colours(one.each).samples(one.each), torch.arange(64))
