"""Estimated norms: what a neighbouring data set changes besides the one record.

Directions of their own for every physical batch were a way around the guarantee: a record that was added in front moved
all others to other places, some of them to the next physical batch, where another estimate clipped them.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import clipwise as cw
from clipwise.mechanisms import ProjectedNorms
from tests.core.common import Recorder

R, DIMENSION = 1.0, 8


def losses(model: nn.Module, batch: tuple[Tensor]) -> Tensor:
    return 1e3 * model(batch[0]).squeeze(1)  # long gradients, all in one direction


def released(records: Tensor, seed: int, physical: int) -> Tensor:
    torch.manual_seed(0)
    model = nn.Linear(DIMENSION, 1, bias=False)
    recorder = Recorder(model.parameters())
    plan = cw.Plan(cw.Poisson(1_000, 100), 1, cw.Abadi(R), noise_multiplier=0.0, mechanism=ProjectedNorms(4))
    private = cw.Private(plan, model, recorder, loss_fn=losses, seed=seed, own_batches=True)
    for part in records.split(physical):
        private.backward(private.losses((part,)))
    private.step()
    return recorder.seen[0][0] * 100  # the sum


@pytest.mark.parametrize("seed", range(3))
def test_a_record_in_front_does_not_change_what_the_others_contribute(seed: int) -> None:
    records = torch.eye(DIMENSION)[:1].repeat(41, 1)
    others = released(records[1:], seed, physical=10)
    moved = (released(records, seed, physical=10) - others).norm()
    (own,) = (released(records[:1], seed, physical=10).norm(),)
    torch.testing.assert_close(moved, own, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("seed", range(3))
def test_the_size_of_physical_batches_changes_nothing(seed: int) -> None:
    records = torch.randn(41, DIMENSION, generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(released(records, seed, 10), released(records, seed, 41), rtol=1e-4, atol=1e-4)
