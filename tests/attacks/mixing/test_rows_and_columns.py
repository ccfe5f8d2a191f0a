"""Scores whose rows look like columns at first: a plan made of two samples must not serve rows that are moved later."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clipwise.clipping import Abadi, Flat
from clipwise.engine import Clipper
from clipwise.engine.functions import per_sample_norms
from clipwise.errors import NotSeparable

Program = Callable[[nn.Module, Tensor, Tensor, Tensor], Tensor]


def scores(model: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = model(x).log_softmax(1)
    return out


def nll(values: Tensor, y: Tensor) -> Tensor:
    return F.nll_loss(values, y, reduction="none")


def alone(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Norms of samples that are differentiated one at a time."""
    norms = []
    for i in range(len(x)):
        loss = nll(scores(model, x[i : i + 1]), y[i : i + 1])[0]
        norms.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))]).norm())
    return torch.stack(norms)


READS: dict[str, Program] = {
    "index_select": lambda model, x, y, rows: nll(scores(model, x).index_select(0, rows), y),
    "gather": lambda model, x, y, rows: nll(scores(model, x).gather(0, rows[:, None].expand(-1, 4)), y),
    "slices": lambda model, x, y, rows: nll(torch.cat([scores(model, x)[i : i + 1] for i in rows.tolist()]), y),
    "index": lambda model, x, y, rows: nll(scores(model, x)[rows], y),
    "broadcast index": lambda model, x, y, rows: nll(
        scores(model, x)[torch.arange(len(x)), rows[:, None].expand(-1, len(x))], rows
    ),
}


@pytest.mark.parametrize("name", READS)
def test_rows_of_others_are_refused_after_a_first_batch_that_reads_its_own(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 6, bias=False), nn.Tanh(), nn.Linear(6, 4, bias=False))
    clipper, own, others = Clipper(model.parameters()), torch.arange(2), torch.zeros(2, dtype=torch.long)
    clipper(READS[name](model, torch.randn(2, 3), torch.tensor([1, 3]), own), Flat(Abadi(1.0)))
    with pytest.raises(NotSeparable):
        clipper(READS[name](model, torch.randn(2, 3), torch.tensor([2, 2]), others), Flat(Abadi(1.0)))


HONEST: dict[str, Callable[[Tensor], Tensor]] = {
    "cat": lambda out: torch.cat([out[i : i + 1] for i in range(len(out))]),
    "flip": lambda out: out.flip(0).flip(0),
    "roll": lambda out: out.roll(1, 0).roll(-1, 0),
    "part": lambda out: out[: len(out)],
}


@pytest.mark.parametrize("name", HONEST)
def test_rows_that_come_back_to_their_places_have_their_own_norms(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 4))
    for y in ([0, 3], [0, 0], [2, 1], [0, 1, 3], [1, 1, 0, 2]):
        x, labels = torch.randn(len(y), 3), torch.tensor(y)
        found = per_sample_norms(nll(HONEST[name](scores(model, x)), labels), model.parameters())
        torch.testing.assert_close(found, alone(model, x, labels).to(found.dtype))
