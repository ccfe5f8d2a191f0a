"""Updates that clipwise did not make are stopped, or end the run; everything else that loops do is allowed."""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import clipwise as cw
from tests.attacks.misuse.common import STEPS, N, Setting

Program = Callable[[Setting], None]


class Programs(list[Program]):
    """Programs of one kind, each marked where it is written."""

    def program(self, program: Program) -> Program:
        self.append(program)
        return program


STOPPED, ALLOWED = Programs(), Programs()


def stopped(s: Setting, program: Callable[[], Any]) -> None:
    """The program's step is refused before it changes a weight."""
    before = s.weights()
    with pytest.raises(cw.UnaccountedUpdate, match=r"stopped before"):
        program()
    assert torch.equal(before, s.weights())


def a_plain_step_is_stopped(s: Setting, x: Tensor, y: Tensor) -> None:
    s.losses(x, y).mean().backward()
    stopped(s, s.optimizer.step)


# Steps of an optimizer that are not the run's: stopped, and the run can go on


@STOPPED.program
def never_a_private_step(s: Setting) -> None:
    for x, y in s.batches():
        s.optimizer.zero_grad()
        a_plain_step_is_stopped(s, x, y)
        break


@STOPPED.program
def a_loader_of_the_users_own_beside_the_run(s: Setting) -> None:
    for x, y in torch.utils.data.DataLoader(s.records, batch_size=8):
        a_plain_step_is_stopped(s, x, y)
        break


@STOPPED.program
def a_second_step_with_the_same_batch(s: Setting) -> None:
    for x, y in s.batches():
        s.private.step(s.losses(x, y))
        a_plain_step_is_stopped(s, x, y)
        break


@STOPPED.program
def a_second_optimizer_step_without_a_gradient(s: Setting) -> None:
    for x, y in s.batches():
        s.private.step(s.losses(x, y))
        stopped(s, s.optimizer.step)
        break


@STOPPED.program
def another_optimizer_of_the_same_weights(s: Setting) -> None:
    other = torch.optim.Adam([p for p in s.model.parameters() if p.dim() > 1])
    for x, y in s.batches():
        s.losses(x, y).mean().backward()
        stopped(s, other.step)
        break


@STOPPED.program
def a_closure(s: Setting) -> None:
    other = torch.optim.LBFGS(s.model.parameters())

    def closure() -> Tensor:
        other.zero_grad()
        loss = s.losses(s.x, s.y).mean()
        loss.backward()
        return loss

    next(iter(s.batches()))
    stopped(s, lambda: other.step(closure))


@STOPPED.program
def after_the_loop_was_left(s: Setting) -> None:
    x, y = next(iter(s.batches()))
    s.losses(x, y).mean().backward()
    stopped(s, s.optimizer.step)


@STOPPED.program
def within_a_logical_batch(s: Setting) -> None:
    for x, y in s.batches(physical_batch_size=3):
        s.private.backward(s.losses(x, y))
        a_plain_step_is_stopped(s, x, y)
        break


@STOPPED.program
def in_another_thread(s: Setting) -> None:
    failed: list[BaseException] = []

    def work() -> None:
        try:
            s.losses(s.x, s.y).mean().backward()
            s.optimizer.step()
        except cw.UnaccountedUpdate as error:
            failed.append(error)

    before = s.weights()
    for x, y in s.batches():
        s.private.step(s.losses(x, y))
        before = s.weights()
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        break
    assert failed and torch.equal(before, s.weights())


@STOPPED.program
def a_second_step_after_a_release(s: Setting) -> None:
    for x, y in s.batches():
        s.private.backward(s.losses(x, y))
        assert s.private.release()
        s.optimizer.step()
        stopped(s, s.optimizer.step)
        break


@STOPPED.program
def a_gradient_added_to_a_released_one(s: Setting) -> None:
    for x, y in s.batches():
        s.private.backward(s.losses(x, y))
        assert s.private.release()
        a_plain_step_is_stopped(s, x, y)
        break


@STOPPED.program
def a_gradient_put_in_place_of_a_released_one(s: Setting) -> None:
    for x, y in s.batches():
        s.private.backward(s.losses(x, y))
        assert s.private.release()
        s.optimizer.zero_grad()
        a_plain_step_is_stopped(s, x, y)
        break


@STOPPED.program
def a_closure_after_a_release(s: Setting) -> None:
    def closure() -> Tensor:
        s.optimizer.zero_grad()
        loss = s.losses(s.x, s.y).mean()
        loss.backward()
        return loss

    for x, y in s.batches():
        s.private.backward(s.losses(x, y))
        assert s.private.release()
        stopped(s, lambda: s.optimizer.step(closure))
        stopped(s, lambda: s.optimizer.step(closure=closure))
        break


@STOPPED.program
def a_release_of_another_run_that_has_a_part_of_the_weights(s: Setting) -> None:
    head = s.model[2]  # type: ignore[index]
    other = cw.Private(s.plan, head, torch.optim.SGD(head.parameters(), lr=0.1), own_batches=True)
    for x, y in s.batches():
        s.losses(x, y).mean().backward()
        head.zero_grad()
        stopped(s, s.optimizer.step)  # the other run has had no data
        other.backward(head(torch.ones(N, 4)).square().sum(1))
        assert other.release()
        stopped(s, s.optimizer.step)
        break


@pytest.mark.parametrize("program", STOPPED, ids=lambda p: p.__name__)
def test_a_step_of_the_users_own_is_stopped_and_the_run_goes_on(program: Program) -> None:
    s = Setting(cw.FullBatch(N))
    program(s)
    s.optimizer.zero_grad()
    for x, y in s.batches():
        s.private.step(s.losses(x, y))
    assert s.private.ledger.steps == STEPS and s.private.ledger.events == s.plan.events
    assert s.private.epsilon(1e-5) == s.plan.epsilon(1e-5)


# Gradients from elsewhere: the weights may hold them, so the run ends


def by_hand(s: Setting, x: Tensor, y: Tensor) -> None:
    s.losses(x, y).mean().backward()
    for p in s.model.parameters():
        assert p.grad is not None
        p.data -= 0.1 * p.grad


def zeroed_by_hand(s: Setting, x: Tensor, y: Tensor) -> None:
    by_hand(s, x, y)
    for p in s.model.parameters():
        assert p.grad is not None
        p.grad.zero_()


def before_the_step(s: Setting, x: Tensor, y: Tensor) -> None:
    by_hand(s, x, y)
    s.private.step(s.losses(x, y))


def after_the_step(s: Setting, x: Tensor, y: Tensor) -> None:
    s.private.step(s.losses(x, y))
    by_hand(s, x, y)


def assigned(s: Setting, x: Tensor, y: Tensor) -> None:
    parameters = list(s.model.parameters())
    for p, g in zip(parameters, torch.autograd.grad(s.losses(x, y).mean(), parameters), strict=True):
        p.grad = g
        p.data -= 0.1 * g


def one_parameter_only(s: Setting, x: Tensor, y: Tensor) -> None:
    s.private.step(s.losses(x, y))
    s.losses(x, y).mean().backward(inputs=[s.model[2].bias])  # type: ignore[index, union-attr]


BY_HAND = [by_hand, zeroed_by_hand, before_the_step, after_the_step, assigned, one_parameter_only]


@pytest.mark.parametrize("body", BY_HAND, ids=lambda p: p.__name__)
@pytest.mark.parametrize("steps", [1, STEPS])
def test_updates_by_hand_end_the_run(body: Callable[[Setting, Tensor, Tensor], None], steps: int) -> None:
    s = Setting(cw.FullBatch(N), steps)

    def train() -> None:
        for x, y in s.batches():
            body(s, x, y)

    with pytest.raises(cw.UnaccountedUpdate, match=r"has a gradient that clipwise did not write"):
        train()
    refused_from_now_on(s)


def refused_from_now_on(s: Setting) -> None:
    """Nothing is stated, also after the gradient is gone; the ledger says why."""
    s.optimizer.zero_grad()
    made = s.private.steps_done
    for ask in (
        lambda: s.private.epsilon(1e-5),
        s.private.state_dict,
        s.private.close,
        lambda: list(s.batches()),
    ):
        with pytest.raises(cw.UnaccountedUpdate, match="cannot state an epsilon"):
            ask()
    assert s.private.steps_done == made
    guarantee = s.private.ledger.guarantee(1e-5)
    assert guarantee.printed == "infinite" and any("no noise" in text for text in guarantee.warnings)
    assert cw.Ledger.from_json(s.private.ledger.to_json()).epsilon(1e-5) == float("inf")
    *_, last = s.private.ledger.events
    assert last.noise_multiplier == 0 and last.reason == "an update that clipwise did not make" and last.count == 1


ASKED: dict[str, Callable[[cw.Private, Path], Any]] = {
    "epsilon": lambda private, _: private.epsilon(1e-5),
    "state_dict": lambda private, _: private.state_dict(),
    "save": lambda private, path: private.save(path / "run.ckpt"),
    "release": lambda private, _: private.release(),
    "step": lambda private, _: private.step(),
    "close": lambda private, _: private.close(),
}


@pytest.mark.parametrize("ask", ASKED.values(), ids=ASKED)
def test_whatever_is_asked_first_notices(ask: Callable[[cw.Private, Path], Any], tmp_path: Path) -> None:
    s = Setting(cw.FullBatch(N))
    for x, y in s.batches():
        by_hand(s, x, y)
        break
    with pytest.raises(cw.UnaccountedUpdate, match="cannot state an epsilon"):
        ask(s.private, tmp_path)
    assert not (tmp_path / "run.ckpt").exists()
    refused_from_now_on(s)


def test_the_ledger_notices_by_itself() -> None:
    s = Setting(cw.FullBatch(N))
    for x, y in s.batches():
        by_hand(s, x, y)
        break
    assert s.private.ledger.epsilon(1e-5) == float("inf")
    refused_from_now_on(s)


def test_a_new_run_does_not_hide_the_gradient_from_the_old_one() -> None:
    s = Setting(cw.FullBatch(N))
    for x, y in s.batches():
        by_hand(s, x, y)
        break
    again = cw.Private(s.plan, s.model, s.optimizer)
    with pytest.raises(cw.UnaccountedUpdate, match="cannot state an epsilon"):
        s.private.epsilon(1e-5)
    assert again.ledger.events == ()


def test_a_gradient_of_one_parameter_suffices_to_stop_an_update() -> None:
    s = Setting(cw.FullBatch(N))
    s.losses(s.x, s.y).mean().backward(inputs=[s.model[2].bias])  # type: ignore[index, union-attr]
    stopped(s, s.optimizer.step)


def test_own_batches_are_guarded_too() -> None:
    s = Setting(cw.FullBatch(N), own_batches=True)
    s.losses(s.x, s.y).mean().backward()
    stopped(s, s.optimizer.step)
    with pytest.raises(cw.UnaccountedUpdate, match="cannot state an epsilon"):
        s.private.step(s.losses(s.x, s.y))
    assert s.private.steps_done == 0 and s.private.ledger.epsilon(1e-5) == float("inf")


def test_estimated_norms_are_guarded_too() -> None:
    s = Setting()
    s.private.close()
    plan = cw.Plan(cw.FullBatch(N), 3, cw.Abadi(1.0), 5.0, mechanism=cw.mechanisms.ProjectedNorms(60))
    private = cw.Private(plan, s.model, s.optimizer, loss_fn=lambda model, b: s.losses(*b, model=model))
    for k, batch in enumerate(private.loader(s.records)):
        private.step(private.losses(batch))
        if k == 1:
            break
    stopped(s, s.optimizer.step)
    s.losses(s.x, s.y).mean().backward()
    with pytest.raises(cw.UnaccountedUpdate):
        private.epsilon(1e-5)
    assert private.ledger.epsilon(1e-5) == float("inf") and private.ledger.delta(1.0) == 1.0


def test_a_checkpoint_from_before_is_as_good_as_it_was(tmp_path: Path) -> None:
    s = Setting(cw.FullBatch(N))
    for k, (x, y) in enumerate(s.batches()):
        s.private.step(s.losses(x, y))
        if k == 1:
            s.private.save(tmp_path / "run.ckpt")
            by_hand(s, x, y)
            break
    with pytest.raises(cw.UnaccountedUpdate):
        s.private.save(tmp_path / "run.ckpt")
    good = s.private
    del s.private, good
    gc.collect()
    s.optimizer.zero_grad()
    s.private = cw.Private.resume(tmp_path / "run.ckpt", s.model, s.optimizer)
    for x, y in s.batches():
        s.private.step(s.losses(x, y))
    assert s.private.epsilon(1e-5) == s.plan.epsilon(1e-5)


# What is allowed


@ALLOWED.program
def moving_average(s: Setting) -> None:
    average = AveragedModel(s.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for x, y in s.batches():
        s.private.step(s.losses(x, y))
        average.update_parameters(s.model)
        average(s.x)


@ALLOWED.program
def projections_and_loaded_weights(s: Setting) -> None:
    first = s.model[0].weight  # type: ignore[index, union-attr]
    for x, y in s.batches():
        s.private.step(s.losses(x, y))
        with torch.no_grad():
            first /= max(1.0, float(first.norm()))
            s.model[2].bias.data.clamp_(-1, 1)  # type: ignore[index, union-attr, operator]
        s.model.load_state_dict({name: 0.99 * value for name, value in s.model.state_dict().items()})


@ALLOWED.program
def another_model(s: Setting) -> None:
    other = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(other.parameters())
    for x, y in s.batches():
        s.private.step(s.losses(x, y))
        optimizer.zero_grad()
        s.losses(torch.randn(4, 3), torch.zeros(4, dtype=torch.long), other).mean().backward()
        optimizer.step()


@ALLOWED.program
def a_generator_trained_through_the_model(s: Setting) -> None:
    generator = nn.Linear(2, 3)
    optimizer = torch.optim.Adam(generator.parameters())
    for k, (x, y) in enumerate(s.batches()):
        s.private.step(s.losses(x, y))
        loss = -s.model(generator(torch.randn(5, 2)))[:, 1].mean()
        if k % 3 == 0:
            s.model.requires_grad_(False)
            (-s.model(generator(torch.randn(5, 2)))[:, 1].mean()).backward()
            s.model.requires_grad_(True)
        elif k % 3 == 1:
            loss.backward()
            s.optimizer.zero_grad()
        else:
            loss.backward(inputs=list(generator.parameters()))
        optimizer.step()


@ALLOWED.program
def evaluation_and_gradients_of_inputs(s: Setting) -> None:
    for x, y in s.batches():
        s.private.step(s.losses(x, y))
        s.model.eval()
        probe = s.x.clone().requires_grad_()
        torch.autograd.grad(s.losses(probe, s.y).sum(), probe)
        with torch.no_grad():
            s.losses(s.x, s.y)
        s.model.train()


@ALLOWED.program
def zero_grad_everywhere(s: Setting) -> None:
    for k, (x, y) in enumerate(s.batches()):
        s.optimizer.zero_grad(set_to_none=bool(k % 2))
        losses = s.losses(x, y)
        s.model.zero_grad()
        s.private.step(losses)
        s.optimizer.zero_grad(set_to_none=False)


@ALLOWED.program
def physical_batches_and_a_scheduler(s: Setting) -> None:
    scheduler = torch.optim.lr_scheduler.StepLR(s.optimizer, 2)
    for x, y in s.batches(physical_batch_size=5):
        if s.private.step(s.losses(x, y)):
            scheduler.step()


@ALLOWED.program
def released_and_stepped_by_the_caller(s: Setting) -> None:
    for k, (x, y) in enumerate(s.batches(physical_batch_size=5)):
        s.private.backward(s.losses(x, y))
        if s.private.release():
            if k % 2:
                s.optimizer.zero_grad(set_to_none=False)  # throws the release away: charged all the same
            s.optimizer.step()
            if k % 3:
                s.optimizer.zero_grad(set_to_none=bool(k % 2))


@ALLOWED.program
def two_runs_of_one_model(s: Setting) -> None:
    other = cw.Private(s.plan, s.model, s.optimizer)
    batches = iter(other.loader(s.records))
    for k, (x, y) in enumerate(s.batches()):
        s.private.step(s.losses(x, y))
        mine = s.losses(*next(batches))
        if k % 2:
            other.step(mine)
        else:
            other.backward(mine)
            assert other.release()
            s.optimizer.step()
            s.optimizer.zero_grad()
    assert other.epsilon(1e-5) == s.private.epsilon(1e-5)


@ALLOWED.program
def copies_trained_in_the_open(s: Setting) -> None:
    for x, y in s.batches():
        s.private.step(s.losses(x, y))
        twin = copy.deepcopy(s.model)
        optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
        s.losses(torch.randn(4, 3), torch.ones(4, dtype=torch.long), twin).mean().backward()
        optimizer.step()


@ALLOWED.program
def a_step_without_gradients_before_the_first_batch(s: Setting) -> None:
    s.optimizer.step()  # as is done to fill its state, or to please a scheduler
    for x, y in s.batches():
        s.private.step(s.losses(x, y))


@ALLOWED.program
def batches_that_are_only_looked_at(s: Setting) -> None:
    for _ in s.batches():
        pass
    for x, y in s.batches():
        s.private.step(s.losses(x, y))


@ALLOWED.program
def monitored(s: Setting) -> None:
    monitor = cw.ntk.NTKMonitor(
        s.model,
        lambda outputs, y: nn.functional.cross_entropy(outputs, y, reduction="none"),
        s.x[:4],
        s.y[:4],
        s.plan.clip,
    )
    for x, y in s.batches():
        s.private.step(s.losses(x, y))
        monitor.update()


@pytest.mark.parametrize("program", ALLOWED, ids=lambda p: p.__name__)
def test_what_loops_do_besides_is_allowed(program: Program) -> None:
    s = Setting(cw.FullBatch(N))
    program(s)
    assert s.private.ledger.events == s.plan.events
    assert s.private.epsilon(1e-5) == s.plan.epsilon(1e-5)


def plain(s: Setting) -> None:
    """Ordinary training on public data."""
    before = s.weights()
    for _ in range(2):
        s.optimizer.zero_grad()
        s.losses(torch.randn(4, 3), torch.zeros(4, dtype=torch.long)).mean().backward()
        s.optimizer.step()
    assert not torch.equal(before, s.weights())


def test_plain_training_before_and_after_the_run_is_allowed() -> None:
    s = Setting(cw.FullBatch(N))
    s.private.close()
    plain(s)
    s.private = cw.Private(s.plan, s.model, s.optimizer)
    for x, y in s.batches():
        s.private.step(s.losses(x, y))
    plain(s)
    assert s.private.epsilon(1e-5) == s.plan.epsilon(1e-5)


def test_plain_training_after_the_last_own_batch_is_allowed() -> None:
    s = Setting(cw.FullBatch(N), own_batches=True)
    for _ in range(STEPS):
        s.private.step(s.losses(s.x, s.y))
    plain(s)
    assert s.private.epsilon(1e-5) == s.plan.epsilon(1e-5)


def test_a_closed_run_hands_the_model_back_and_makes_no_step() -> None:
    s = Setting(cw.FullBatch(N))
    for x, y in s.batches():
        s.private.step(s.losses(x, y))
        break
    s.private.close()
    spent = s.private.epsilon(1e-5)
    plain(s)
    assert s.private.epsilon(1e-5) == spent == s.private.ledger.epsilon(1e-5)
    with pytest.raises(cw.BudgetSpent, match="closed"):
        list(s.batches())
    with pytest.raises(cw.BudgetSpent, match="closed"):
        s.private.step()


def test_a_run_that_nobody_holds_guards_nothing() -> None:
    s = Setting(cw.FullBatch(N))
    for x, y in s.batches():
        s.private.step(s.losses(x, y))
        break
    gc.disable()
    try:
        del s.private
        plain(s)
    finally:
        gc.enable()


def test_a_finished_run_is_closed_when_it_is_resumed(tmp_path: Path) -> None:
    s = Setting(cw.FullBatch(N))
    for x, y in s.batches():
        s.private.step(s.losses(x, y))
    s.private.save(tmp_path / "run.ckpt")
    del s.private
    s.private = cw.Private.resume(tmp_path / "run.ckpt", s.model, s.optimizer)
    plain(s)
    assert s.private.epsilon(1e-5) == s.plan.epsilon(1e-5)


class InPlace(torch.optim.SGD):
    """Writes on the gradients, and calls the step of its base class."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.mul_(0.5)
        return super().step(closure)


def test_optimizers_may_write_on_a_released_gradient_and_call_their_base() -> None:
    s = Setting(cw.FullBatch(N))
    s.private.close()
    torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1).step()  # the base class has hooks of its own now
    s.optimizer = InPlace(s.model.parameters(), lr=0.1)
    s.private = cw.Private(s.plan, s.model, s.optimizer)
    for k, (x, y) in enumerate(s.batches()):
        if k % 2:
            s.private.step(s.losses(x, y))
        else:
            s.private.backward(s.losses(x, y))
            assert s.private.release()
            s.optimizer.step()
    assert s.private.epsilon(1e-5) == s.plan.epsilon(1e-5)


class Failing(torch.optim.SGD):
    """A step that fails when it is told to, before it changes anything."""

    fails = False

    def step(self, closure: Any = None) -> Any:
        if self.fails:
            raise ZeroDivisionError
        return super().step(closure)


def test_after_a_step_that_failed_only_the_released_gradient_is_stepped_with() -> None:
    """The step counted as under way for ever: any gradient could be stepped with, and epsilon said nothing of it."""
    s = Setting(cw.FullBatch(N))
    s.private.close()
    s.optimizer = Failing(s.model.parameters(), lr=0.1)
    s.private = cw.Private(s.plan, s.model, s.optimizer)
    x, y = next(batches := iter(s.batches()))
    s.private.backward(s.losses(x, y))
    assert s.private.release()
    released = [p.grad for p in s.model.parameters()]
    s.optimizer.fails = True
    with pytest.raises(ZeroDivisionError):
        s.optimizer.step()
    s.optimizer.fails = False
    before = s.weights()
    s.optimizer.zero_grad()
    s.losses(x, y).sum().backward()
    with pytest.raises(cw.UnaccountedUpdate, match=r"is not what private.release\(\) wrote"):
        s.optimizer.step()
    assert torch.equal(s.weights(), before)
    for p, gradient in zip(s.model.parameters(), released, strict=True):
        p.grad = gradient
    s.optimizer.step()
    assert not torch.equal(s.weights(), before)
    with pytest.raises(cw.UnaccountedUpdate, match="then step once"):
        s.optimizer.step()
    assert s.private.ledger.steps == 1
    batches.close()  # type: ignore[attr-defined]


def test_release_and_the_callers_step_equal_step() -> None:
    ended = []
    for released in (True, False):
        s = Setting(seed=4)
        for x, y in s.batches(physical_batch_size=4, yield_empty=True):
            if released:
                s.private.backward(s.losses(x, y))
                if s.private.release():
                    s.optimizer.step()
                    s.optimizer.zero_grad()
            else:
                s.private.step(s.losses(x, y))
        assert s.private.ledger.events == s.plan.events
        ended.append(s.weights())
    assert torch.equal(*ended)


def test_a_release_without_a_batch_is_refused() -> None:
    s = Setting(cw.FullBatch(N))
    for x, y in s.batches(physical_batch_size=10):
        with pytest.raises(cw.InvalidSampling, match="was not given to backward"):
            s.private.release()
        s.private.backward(s.losses(x, y))
        if not s.private.release():
            assert all(p.grad is None for p in s.model.parameters())
            continue
        assert s.private.ledger.steps == 1 and all(p.grad is not None for p in s.model.parameters())
        break
