"""Records that are joined by an id: the twin must have others with the id of a sample that stays."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import clipwise as cw

from .test_second_look import Body, mlp, private_of

N = 1024


def users() -> TensorDataset:
    """Hardly any id comes twice in a batch: what joins records by it leaves them as they are."""
    g = torch.Generator().manual_seed(1)
    x, y = torch.randn(N, 6, generator=g), torch.randint(0, 3, (N,), generator=g)
    return TensorDataset(x, y, torch.randint(1, 100_000, (N,), generator=g))


def same(batch: Any) -> Tensor:
    return (batch[2][:, None] == batch[2][None]).float()


def pooled(model: nn.Module, batch: Any, step: int) -> Tensor:
    x = same(batch) @ batch[0] / same(batch).sum(1, keepdim=True)
    return F.cross_entropy(model(x), batch[1], reduction="none")


def first_of_the_user(model: nn.Module, batch: Any, step: int) -> Tensor:
    return F.cross_entropy(model(batch[0][same(batch).argmax(1)]), batch[1], reduction="none")


def last_of_the_user(model: nn.Module, batch: Any, step: int) -> Tensor:
    last = len(batch[0]) - 1 - same(batch).flip(1).argmax(1)
    return F.cross_entropy(model(batch[0][last]), batch[1], reduction="none")


def by_its_own_id(model: nn.Module, batch: Any, step: int) -> Tensor:
    x = batch[0] + torch.sin(batch[2].float())[:, None]
    return F.cross_entropy(model(x), batch[1], reduction="none")


def train(body: Body, size: int, seed: int) -> cw.Private:
    model = mlp()
    private = private_of(model, 1, cw.FixedSize(N, size), seed)
    for batch in private.loader(users()):
        private.step(body(model, batch, 0))
    return private


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("body", [pooled, first_of_the_user, last_of_the_user])
def test_records_joined_by_an_id_are_seen_at_the_first_step(body: Body, seed: int) -> None:
    with pytest.raises(cw.NotSeparable, match="samples mix"):
        train(body, 16, seed)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("seed", range(6))
def test_so_are_they_in_the_smallest_batches(size: int, seed: int) -> None:
    with pytest.raises(cw.NotSeparable, match="samples mix"):
        train(pooled, size, seed)


@pytest.mark.parametrize("size", [2, 3, 16])
def test_an_id_of_its_own_is_honest(size: int) -> None:
    assert train(by_its_own_id, size, 0).checked.steps == (0,)
