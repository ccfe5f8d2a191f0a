"""The guard of a run's parameters, by hand: which gradients are known, and which steps are expected."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn

import clipwise as cw
from clipwise.accounting import Ledger
from clipwise.private.guard import Guard, check_one_process
from tests.core.common import data, mlp, plan, sgd


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))]


def guard_of(tensors: list[nn.Parameter], frozen: tuple[Tensor, ...] = ()) -> Guard:
    guard = Guard()
    guard.bind(["first", "second"], tensors, frozen)
    return guard


# Gradients


def test_gradients_from_before_and_released_ones_are_known() -> None:
    tensors = parameters()
    tensors[1].grad = torch.ones(3)
    guard = guard_of(tensors)
    assert guard.foreign() is None
    tensors[0].grad = torch.ones(2)
    assert guard.foreign() == "first"
    tensors[0].grad = None
    tensors[1].grad = torch.ones(3)  # another object with the same numbers
    assert guard.foreign() == "second"
    guard.write([torch.ones(2), torch.ones(3)])
    assert guard.foreign() is None and guard.is_due
    guard.close()


def test_a_known_gradient_may_be_zeroed_and_not_changed() -> None:
    tensors = parameters()
    guard = guard_of(tensors)
    guard.write([torch.ones(2), torch.ones(3)])
    first, second = (p.grad for p in tensors)
    assert first is not None and second is not None
    first.zero_()
    assert guard.foreign() is None
    second[1:].zero_()
    assert guard.foreign() == "second", "a part of it is left"
    second.zero_()
    assert guard.foreign() is None
    first.add_(torch.tensor([0.0, 1.0]))
    assert guard.foreign() == "first"
    guard.expect_none()
    assert guard.foreign() is None and not guard.is_due
    guard.close()


def test_a_gradient_that_another_run_wrote_is_known_and_one_that_it_found_is_not() -> None:
    tensors = parameters()
    ours, theirs = guard_of(tensors), guard_of(tensors)
    theirs.write([torch.ones(2), torch.ones(3)])
    assert ours.foreign() is None
    theirs.close()
    assert ours.foreign() == "first", "the other run is over"
    again = guard_of(tensors)
    assert again.foreign() is None and ours.foreign() == "first", "it only found them"
    for guard in (ours, again):
        guard.close()


def test_an_update_from_elsewhere_stands_on_the_ledger_once_and_stops_the_run() -> None:
    tensors = parameters()
    guard, ledger = guard_of(tensors), Ledger()
    guard.look(ledger, plan().sampling)
    guard.check()
    assert not ledger.events
    tensors[1].grad = torch.ones(3)
    for _ in range(2):
        guard.look(ledger, plan().sampling)
    assert [(event.noise_multiplier, event.reason) for event in ledger.events] == [  # type: ignore[union-attr]
        (0.0, "an update that clipwise did not make")
    ]
    with pytest.raises(cw.UnaccountedUpdate, match="'second' has a gradient that clipwise did not write"):
        guard.check()
    guard.close()
    closed = guard_of(parameters())
    closed.close()
    closed._tensors[0].grad = torch.ones(2)
    closed.look(ledger, plan().sampling)
    assert closed.seen is None and ledger.steps == 1


def test_after_an_error_the_gradients_are_as_they_were() -> None:
    tensors = parameters()
    guard = guard_of(tensors)
    tensors[0].grad = before = torch.ones(2)

    def fails() -> None:
        with guard.restoring():
            guard.write([torch.zeros(2), torch.zeros(3)])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fails()
    assert tensors[0].grad is before and tensors[1].grad is None and not guard.is_due and guard.foreign() is None
    guard.close()


# Steps


def test_an_optimizer_with_any_parameter_of_the_run_is_held() -> None:
    tensors, frozen, other = parameters(), nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    guard = guard_of(tensors, (frozen,))
    for params in ([{"params": [other]}, {"params": [tensors[1]]}], [frozen], [other, tensors[0]]):
        assert guard.holds(torch.optim.SGD(params, lr=0.1))
    assert not guard.holds(torch.optim.SGD([other], lr=0.1))
    guard.close()


@pytest.mark.parametrize(("gradient", "stopped"), [([0.0, 1.0], True), ([0.0, 0.0], False)])
def test_before_the_first_batch_a_step_needs_a_gradient(gradient: list[float], stopped: bool) -> None:
    tensors = parameters()
    tensors[0].grad = torch.tensor(gradient)
    guard = guard_of(tensors)
    assert guard.has_gradient is stopped
    optimizer = torch.optim.SGD(tensors, lr=0.1)
    if stopped:
        with pytest.raises(cw.UnaccountedUpdate, match=r"SGD.step\(\) was called on parameters of a private run"):
            optimizer.step()
    else:
        optimizer.step()
        guard.begun = True
        with pytest.raises(cw.UnaccountedUpdate):
            optimizer.step()
    assert torch.equal(tensors[0], torch.ones(2))
    guard.close()
    optimizer.step()


def test_a_released_gradient_is_stepped_with_once() -> None:
    tensors = parameters()
    guard, optimizer = guard_of(tensors), torch.optim.SGD(tensors, lr=0.5)
    guard.begun = True
    for last in (False, True):
        guard.write([torch.ones(2), torch.ones(3)])
        guard.is_last = last
        with pytest.raises(cw.UnaccountedUpdate, match=r"optimizer.step\(closure\) would compute"):
            optimizer.step(lambda: 0.0)
        with pytest.raises(cw.UnaccountedUpdate, match=r"optimizer.step\(closure\) would compute"):
            optimizer.step(closure=lambda: 0.0)
        optimizer.step()
        assert not guard.is_due and guard.is_open is not last
        if not last:
            with pytest.raises(cw.UnaccountedUpdate, match="then step once"):
                optimizer.step()
    assert torch.equal(tensors[0], torch.zeros(2))
    optimizer.step()  # the parameters are the caller's again


def test_other_optimizers_end_no_step() -> None:
    tensors, other = parameters(), nn.Parameter(torch.ones(1))
    guard = guard_of(tensors)
    guard.begun = True
    guard.write([torch.ones(2), torch.ones(3)])
    other.grad = torch.ones(1)
    torch.optim.SGD([other], lr=0.1).step()
    assert guard.is_due
    with guard.stepping():
        torch.optim.SGD(tensors, lr=0.1).step()
    assert guard.is_due, "clipwise's own step is not the caller's"
    guard.close()


def test_stepping_may_be_nested() -> None:
    tensors = parameters()
    guard, optimizer = guard_of(tensors), torch.optim.SGD(tensors, lr=0.1)
    guard.begun = True
    with guard.stepping():
        with guard.stepping():
            optimizer.step()
        optimizer.step()
    with pytest.raises(cw.UnaccountedUpdate):
        optimizer.step()
    guard.close()


def test_one_of_several_ranks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    check_one_process()
    for ranks, ready in ((1, True), (2, True), (2, False)):
        monkeypatch.setattr(distributed, "is_initialized", lambda ready=ready: ready)
        monkeypatch.setattr(distributed, "get_world_size", lambda ranks=ranks: ranks)
        if ranks == 2 and ready:
            with pytest.raises(cw.InvalidPlan, match=r"torch.distributed has 2 ranks"):
                check_one_process()
        else:
            check_one_process()


def test_a_run_of_batches_that_were_only_looked_at_says_nothing_of_them() -> None:
    """Only the empty batches before the first of records are steps; those behind it wait for it."""
    sampling, steps = cw.Poisson(40, 1), 12
    lengths: list[int] = []
    for yield_empty in (True, False):
        model = mlp()
        private: Any = cw.Private(plan(sampling=sampling, steps=steps), model, sgd(model), seed=8)
        for x, _ in private.loader(data(), yield_empty=yield_empty):
            if yield_empty:
                lengths.append(len(x))
        if yield_empty:
            assert len(lengths) == steps and 0 in lengths[lengths.index(max(lengths)) :] and private.ledger.steps == 0
    leading = next(k for k, length in enumerate(lengths) if length)
    assert 0 in lengths[leading:] and private.ledger.steps == leading
    if not leading:
        with pytest.raises(cw.UnaccountedUpdate, match="epsilon 0 would say nothing"):
            private.epsilon(1e-5)
