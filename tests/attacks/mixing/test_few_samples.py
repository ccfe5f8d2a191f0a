"""The first steps are checked on a few samples: what that must not let through."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

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


def run(loss: Loss, physical: int | None) -> tuple[cw.Private, int]:
    """The run, and the steps that were released before a refusal."""
    torch.manual_seed(0)
    model = mlp()
    plan = cw.Plan(sampling=cw.Poisson(N, N // 2), steps=20, clip=cw.Abadi(1.0), noise_multiplier=1.0)
    private = cw.Private(plan, model, torch.optim.SGD(model.parameters(), lr=0.1), seed=3)
    try:
        for batch in private.loader(classified(N, seed=1), physical_batch_size=physical):
            private.step(loss(model, batch))
    except cw.NotSeparable:
        pass
    return private, private.ledger.steps


@pytest.mark.parametrize("physical", [16, 64])
@pytest.mark.parametrize("loss", [mean_of_the_batch, divided_by_its_size, places])
def test_samples_that_mix_among_few_are_refused_before_anything_is_released(loss: Loss, physical: int) -> None:
    assert run(loss, physical)[1] == 0


def test_samples_that_mix_in_large_batches_only_are_found_within_a_dozen_steps() -> None:
    assert run(mean_of_a_large_batch, None)[1] == 0
    assert 3 <= run(mean_of_a_large_batch, 64)[1] <= 14


@pytest.mark.parametrize("physical", [16, 64])
def test_an_honest_loop_is_checked_on_few_samples_and_on_a_whole_batch(physical: int) -> None:
    private, steps = run(losses_of, physical)
    assert steps == 20 and private.checked.steps[:3] == (0, 1, 2) and 6 <= private.checked.steps[3] <= 14
    assert not private.checked.unclear
