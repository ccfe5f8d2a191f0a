"""The first steps are checked on a few samples: what that must not let through."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import clipwise as cw
from tests.core.common import classified

from .test_second_look import losses_of, mlp

N, LARGE = 96, 16
Loss = Callable[[nn.Module, Any], Tensor]


def mean_of_the_batch(model: nn.Module, batch: Any) -> Tensor:
    return losses_of(model, (batch[0] - batch[0].mean(0), batch[1]))


def divided_by_its_size(model: nn.Module, batch: Any) -> Tensor:
    return losses_of(model, batch) * (32 / len(batch[0]))


def places(model: nn.Module, batch: Any) -> Tensor:
    return losses_of(model, batch) * torch.arange(1.0, 1 + len(batch[0]))


def mean_of_a_large_batch(model: nn.Module, batch: Any) -> Tensor:
    return (mean_of_the_batch if len(batch[0]) > LARGE else losses_of)(model, batch)


def rare_classes_count_more(model: nn.Module, batch: Any) -> Tensor:
    counts = torch.bincount(batch[1], minlength=3).clamp(min=1)
    return losses_of(model, batch) * (counts.max() / counts)[batch[1]]


def mixup(model: nn.Module, batch: Any) -> Tensor:
    order = torch.randperm(len(batch[0]))
    return losses_of(model, (0.7 * batch[0] + 0.3 * batch[0][order], batch[1]))


def by_class() -> TensorDataset:
    """Records in the order of their classes, as from a folder for each."""
    return TensorDataset(classified(N, seed=1).tensors[0], torch.arange(3).repeat_interleave(N // 3))


def run(
    loss: Loss,
    physical: int | None,
    sampling: Any = None,
    records: Dataset[Any] | None = None,
    seed: int = 3,
) -> tuple[cw.Private, int]:
    """The run, and the steps that were released before a refusal."""
    torch.manual_seed(0)
    model = mlp()
    plan = cw.Plan(sampling=sampling or cw.Poisson(N, N // 2), steps=20, clip=cw.Abadi(1.0), noise_multiplier=1.0)
    private = cw.Private(plan, model, torch.optim.SGD(model.parameters(), lr=0.1), seed=seed)
    try:
        for batch in private.loader(records or classified(N, seed=1), physical_batch_size=physical):
            private.step(loss(model, batch))
    except cw.NotSeparable:
        pass
    return private, private.ledger.steps


@pytest.mark.parametrize("physical", [16, 64])
@pytest.mark.parametrize("loss", [mean_of_the_batch, divided_by_its_size, places])
def test_samples_that_mix_among_few_are_refused_before_anything_is_released(loss: Loss, physical: int) -> None:
    assert run(loss, physical)[1] == 0


@pytest.mark.parametrize("physical", [None, 4, 8, 32])
@pytest.mark.parametrize("sampling", [cw.Poisson(N, 48), cw.FixedSize(N, 48), cw.FullBatch(N)], ids=repr)
def test_the_few_are_not_all_of_one_class_where_the_records_are_in_order(sampling: Any, physical: int | None) -> None:
    """Among records of one class a weight for each class in the batch shows nothing."""
    assert run(rare_classes_count_more, physical, sampling, by_class())[1] == 0


@pytest.mark.parametrize(("physical", "seed"), [(4, 14), (4, 31), (8, 36)])
def test_small_physical_batches_are_checked_too(physical: int, seed: int) -> None:
    """Two or three samples are often their own partners by chance."""
    assert run(mixup, physical, seed=seed)[1] == 0


def test_samples_that_mix_in_large_batches_only_are_found_within_a_dozen_steps() -> None:
    assert run(mean_of_a_large_batch, None)[1] == 0
    assert 3 <= run(mean_of_a_large_batch, 64)[1] <= 14


@pytest.mark.parametrize("physical", [16, 64])
def test_an_honest_loop_is_checked_on_few_samples_and_on_a_whole_batch(physical: int) -> None:
    private, steps = run(losses_of, physical)
    assert steps == 20 and private.checked.steps[:3] == (0, 1, 2) and 6 <= private.checked.steps[3] <= 14
    assert not private.checked.unclear
