"""Estimated norms: forward mode measures, backward mode sums, and both must be of one and the same gradient.

Whatever moved only one of the two was a way around the clipping: the norm that was measured was up to a hundred times
smaller than that of the gradient which was released.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import clipwise as cw
from clipwise.errors import InvalidLosses
from clipwise.mechanisms import ProjectedNorms

B, R = 16, 0.01
Batch = tuple[Tensor, Tensor]


def batch() -> Batch:
    made = torch.Generator().manual_seed(0)
    return torch.randn(B, 5, generator=made), torch.randn(B, generator=made)


def squares(model: nn.Module, batch: Batch) -> Tensor:
    return (model(batch[0]).squeeze(1) - batch[1]).square()


def run_of(loss_fn: Callable[[nn.Module, Batch], Tensor]) -> tuple[cw.Private, nn.Sequential]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
    plan = cw.Plan(cw.FullBatch(B), 3, cw.Abadi(R), 20.0, mechanism=ProjectedNorms(200))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    return cw.Private(plan, model, optimizer, loss_fn=loss_fn, seed=0, own_batches=True), model


def length_of_sum(private: cw.Private) -> float:
    assert private._batch.sums is not None
    return float(torch.cat([each.flatten() for each in private._batch.sums]).norm())


def refuses(private: cw.Private, losses: Tensor) -> None:
    with pytest.raises(InvalidLosses):
        private.backward(losses)
    assert private._batch.sums is None and not private.ledger.events


def frozen_target(model: nn.Module, batch: Batch) -> Tensor:
    """Forward mode goes through no_grad, so that the two cancel; the gradient has only one of them."""
    with torch.no_grad():
        target = model(batch[0]).squeeze(1)
    return (model(batch[0]).squeeze(1) - 0.99 * target - batch[1]).square()


def hooked_values(model: nn.Module, batch: Batch) -> Tensor:
    assert isinstance(model, nn.Sequential)
    hidden = model[1](model[0](batch[0]))
    if hidden.requires_grad:
        hidden.register_hook(lambda gradient: 100 * gradient)
    return (model[2](hidden).squeeze(1) - batch[1]).square()


def of_the_grad_mode(model: nn.Module, batch: Batch) -> Tensor:
    losses = squares(model, batch)
    return 100 * losses - 99 * losses.detach() if torch.is_grad_enabled() else losses


@pytest.mark.parametrize("loss_fn", [frozen_target, hooked_values, of_the_grad_mode])
def test_a_function_whose_two_derivatives_differ_is_refused(loss_fn: Callable[[nn.Module, Batch], Tensor]) -> None:
    private, _ = run_of(loss_fn)
    refuses(private, private.losses(batch()))


def test_a_target_that_is_detached_is_fine() -> None:
    def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
        target = model(batch[0]).squeeze(1).detach()
        return (model(batch[0]).squeeze(1) - 0.99 * target - batch[1]).square()

    private, _ = run_of(loss_fn)
    private.backward(private.losses(batch()))
    assert length_of_sum(private) < 1.3 * B * R


def scaled_in_place(losses: Tensor, model: nn.Sequential) -> None:
    losses.mul_(100.0)


def hooked(losses: Tensor, model: nn.Sequential) -> None:
    losses.register_hook(lambda gradient: 100 * gradient)


def cut_off(losses: Tensor, model: nn.Sequential) -> None:
    losses.detach_()


def other_weights(losses: Tensor, model: nn.Sequential) -> None:
    model[2].weight.data.mul_(100.0)


def hooked_weights(losses: Tensor, model: nn.Sequential) -> None:
    model[0].weight.register_hook(lambda gradient: 100 * gradient)


@pytest.mark.parametrize("change", [scaled_in_place, hooked, cut_off, other_weights, hooked_weights])
def test_what_changes_after_the_estimate_is_refused(change: Callable[[Tensor, nn.Sequential], None]) -> None:
    private, model = run_of(squares)
    losses = private.losses(batch())
    change(losses, model)
    refuses(private, losses)


@pytest.mark.parametrize("size", [1, 2, B])
def test_honest_losses_pass(size: int) -> None:
    for seed in range(10):
        private, _ = run_of(squares)
        torch.manual_seed(seed)
        private.backward(private.losses((10 * torch.randn(size, 5), torch.randn(size))))
