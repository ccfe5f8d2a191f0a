"""The place of a sample and the number of samples, by ways that were not looked at."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import clipwise as cw

from .test_second_look import Body, losses_of, mlp, train

Table = dict[str, Body]
LISTED = torch.linspace(0.5, 3.0, 48).tolist()
ARRAY = np.linspace(0.5, 3.0, 48, dtype=np.float32)


def with_x(model: nn.Module, batch: Any, x: Tensor) -> Tensor:
    return losses_of(model, (x, batch[1]))


def places(batch: Any) -> Tensor:
    return torch.linspace(0.5, 3.0, len(batch[0]))


def in_new_columns(model: nn.Module, batch: Any, step: int) -> Tensor:
    z = torch.zeros(len(batch[0]), 6)
    z[:, :3] = batch[0][:, :3]
    z[:, 3:] = places(batch)[:, None]
    return with_x(model, batch, z)


def in_one_new_column(model: nn.Module, batch: Any, step: int) -> Tensor:
    z = torch.zeros(len(batch[0]), 6)
    z[:, :3] = batch[0][:, :3]
    z[:, 5] = places(batch)
    return with_x(model, batch, z)


def seeded(batch: Any, seed: int = 0) -> Tensor:
    return torch.rand(len(batch[0]), 1, generator=torch.Generator().manual_seed(seed)) < 0.5


PLACES: Table = {
    "list": lambda m, b, k: with_x(m, b, b[0] * torch.tensor(LISTED)[: len(b[0]), None]),
    "array": lambda m, b, k: with_x(m, b, b[0] * torch.from_numpy(ARRAY)[: len(b[0]), None]),
    "product": lambda m, b, k: with_x(m, b, (b[0][:, :, None] @ places(b).view(-1, 1, 1))[:, :, 0]),
    "added_product": lambda m, b, k: with_x(
        m, b, torch.baddbmm(torch.zeros(1, 1, 1), b[0][:, :, None], places(b).view(-1, 1, 1))[:, :, 0]
    ),
    "diagonal": lambda m, b, k: with_x(m, b, torch.diag(places(b)) @ b[0]),
    "diagonal_from_the_right": lambda m, b, k: with_x(m, b, (b[0].T @ torch.diag(places(b))).T),
    "diagonal_and_losses": lambda m, b, k: torch.diag(places(b)) @ losses_of(m, b),
    "stack": lambda m, b, k: with_x(m, b, torch.stack([*b[0].T[:5], places(b)], 1)),
    "stack_along_the_last": lambda m, b, k: with_x(m, b, torch.stack([*b[0].T[:5], places(b)], -1)),
    "new_columns": in_new_columns,
    "new_column": in_one_new_column,
    "seeded_generator": lambda m, b, k: with_x(m, b, b[0] * seeded(b)),
}


@pytest.mark.parametrize("body", PLACES.values(), ids=PLACES)
def test_the_place_is_seen_where_it_comes_from_python_or_meets_samples_in_a_product(body: Body) -> None:
    with pytest.raises(cw.NotSeparable, match="place of a sample"):
        train(body)


OWN = torch.Generator().manual_seed(5)


def stacked_rows(model: nn.Module, batch: Any, step: int) -> Tensor:
    z = torch.stack([batch[0], batch[0] + 1], 1).sum(1)
    return with_x(model, batch, z)


NO_PLACES: Table = {
    "constants_of_a_list": lambda m, b, k: with_x(m, b, (b[0] - torch.tensor(LISTED[:6])) / torch.tensor(LISTED[6:12])),
    "a_generator_that_goes_on": lambda m, b, k: with_x(m, b, b[0] * (torch.rand(len(b[0]), 1, generator=OWN) < 0.5)),
    "equal_diagonal": lambda m, b, k: with_x(m, b, (2.0 * torch.eye(len(b[0]))) @ b[0]),
    "diagonal_of_features": lambda m, b, k: with_x(m, b, b[0] @ torch.diag(torch.linspace(0.5, 3.0, 6))),
    "same_column_for_all": lambda m, b, k: with_x(m, b, torch.stack([*b[0].T[:5], torch.ones(len(b[0]))], 1)),
    "stacked_views": stacked_rows,
}


@pytest.mark.parametrize("body", NO_PLACES.values(), ids=NO_PLACES)
def test_constants_along_other_axes_and_random_rows_are_honest(body: Body) -> None:
    assert train(body).checked.steps == (0, 1, 2)


class Attention(nn.Module):
    """Tokens with places in time, one-hot kinds, and as many steps of time as samples in a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds, self.places = nn.Linear(6, 6), nn.Parameter(torch.randn(8, 6))
        self.mix, self.head = nn.MultiheadAttention(6, 1, batch_first=True), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, :, None] * torch.eye(6) + torch.arange(6.0)[:, None] * 0.1
        x = self.kinds(x) + self.places[: x.shape[1]]
        weights = torch.linspace(0.5, 1.5, x.shape[1])
        x = (self.mix(x, x, x, need_weights=False)[0].transpose(0, 1) * weights[:, None, None]).transpose(0, 1)
        out: Tensor = self.head(x.transpose(1, 2) @ weights)
        return out


def test_places_in_time_are_honest_where_there_are_as_many_samples() -> None:
    torch.manual_seed(0)
    private = train(losses_of, model=Attention(), physical_batch_size=6)
    assert private.checked.steps == (0, 1, 2)


class Narrow(nn.Module):
    """As many hidden features as samples, of which some are dead: they look like samples that stay."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(6, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.layer(x).relu() @ torch.diag(torch.tensor([1.0, 2.0, 3.0])))
        return out


@pytest.mark.parametrize("seed", range(4))
def test_dead_features_are_no_samples(seed: int) -> None:
    torch.manual_seed(seed)
    assert train(losses_of, model=Narrow(), physical_batch_size=3).checked.steps == (0, 1, 2)


# The number of samples


def weighted(batch: Any, *weights: float) -> Tensor:
    return torch.tensor(weights) if weights else torch.full((3,), len(batch[0]) / 8)


SIZES: Table = {
    "class_weights": lambda m, b, k: F.cross_entropy(m(b[0]), b[1], weight=weighted(b), reduction="none"),
    "different_class_weights": lambda m, b, k: F.cross_entropy(
        m(b[0]), b[1], weight=torch.arange(1.0, 4.0) * len(b[0]), reduction="none"
    ),
    "product": lambda m, b, k: F.cross_entropy(m(b[0]) @ (torch.eye(3) * len(b[0]) / 8), b[1], reduction="none"),
    "product_with_a_vector": lambda m, b, k: m(b[0]).square() @ weighted(b),
    "linear": lambda m, b, k: F.linear(m(b[0]).square(), weighted(b)[None], torch.zeros(1))[:, 0],
}


@pytest.mark.parametrize("body", SIZES.values(), ids=SIZES)
def test_the_number_of_samples_is_seen_in_class_weights_and_products(body: Body) -> None:
    with pytest.raises(cw.NotSeparable, match="number of samples"):
        train(body)


PUBLIC: Table = {
    "class_weights": lambda m, b, k: F.cross_entropy(
        m(b[0]), b[1], weight=weighted(b, 1.0, 2.0, 3.0), reduction="none"
    ),
    "class_weights_that_are_made": lambda m, b, k: F.cross_entropy(
        m(b[0]), b[1], weight=torch.full((3,), 0.7), reduction="none"
    ),
    "product": lambda m, b, k: F.cross_entropy(m(b[0]) @ (torch.eye(3) * 0.7), b[1], reduction="none"),
    "mean_by_a_product": lambda m, b, k: m(b[0]).square() @ torch.full((3,), 1 / 3),
}


@pytest.mark.parametrize("body", PUBLIC.values(), ids=PUBLIC)
def test_public_class_weights_and_matrices_are_honest(body: Body) -> None:
    assert train(body).checked.steps == (0, 1, 2)
    assert train(body, model=mlp(), physical_batch_size=4).checked.steps == (0, 1, 2)
