"""What a second look found: frozen parts trained by hand, batches that nobody gave, one checkpoint continued twice."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import clipwise as cw
from tests.attacks.misuse.common import Setting


def test_a_frozen_part_is_not_trained_beside_the_run() -> None:
    """The head first, in private; then the body by hand, on the same records."""
    s = Setting()
    body, head = s.model[0], s.model[2]  # type: ignore[index]
    body.requires_grad_(False)
    private = cw.Private(s.plan, s.model, torch.optim.SGD(head.parameters(), lr=0.1))
    s.private.close()
    for x, y in private.loader(s.records):
        private.step(s.losses(x, y))
        break
    body.requires_grad_(True)
    by_hand = torch.optim.Adam(body.parameters())
    before = s.weights()
    s.losses(s.x, s.y).mean().backward()
    with pytest.raises(cw.UnaccountedUpdate, match=r"Adam\.step\(\) was called on parameters of a private run"):
        by_hand.step()
    assert torch.equal(before, s.weights())


def test_two_runs_train_the_parts_of_one_model() -> None:
    s = Setting()
    s.private.close()
    body, head = s.model[0], s.model[2]  # type: ignore[index]
    body.requires_grad_(False)
    first = cw.Private(s.plan, s.model, torch.optim.SGD(head.parameters(), lr=0.1))
    for x, y in first.loader(s.records):
        first.step(s.losses(x, y))
    body.requires_grad_(True)
    head.requires_grad_(False)
    second = cw.Private(s.plan, s.model, torch.optim.SGD(body.parameters(), lr=0.1))
    for x, y in second.loader(s.records):
        second.step(s.losses(x, y))
    assert first.ledger.steps == second.ledger.steps == s.plan.steps


def test_batches_that_nobody_gave_do_not_end_in_epsilon_zero() -> None:
    """A copy of the model learns from the private batches, and no gradient is ever on the run's own parameters."""
    s = Setting()
    student = copy.deepcopy(s.model)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.5)
    for x, y in s.batches():
        optimizer.zero_grad()
        F.cross_entropy(student(x), y).backward()
        optimizer.step()
    with pytest.raises(cw.UnaccountedUpdate, match=r"losses of none were given to private\.step"):
        s.private.epsilon(1e-5)


def test_looking_at_a_batch_before_training_is_allowed() -> None:
    s = Setting()
    next(iter(s.batches()))
    assert s.private.epsilon(1e-5) == 0.0
    for x, y in s.batches():
        s.private.step(s.losses(x, y))
    assert s.private.epsilon(1e-5) > 0.0


def test_the_step_after_the_last_release_is_guarded_too() -> None:
    s = Setting(cw.FullBatch(24), steps=1, own_batches=True)
    s.private.backward(s.losses(s.x, s.y))
    assert s.private.release()
    (1000 * s.losses(s.x, s.y).mean()).backward()
    with pytest.raises(cw.UnaccountedUpdate, match=r"not what private\.release\(\) wrote"):
        s.optimizer.step()


def test_after_the_last_release_and_its_step_the_model_is_the_users() -> None:
    s = Setting(cw.FullBatch(24), steps=1, own_batches=True)
    s.private.backward(s.losses(s.x, s.y))
    assert s.private.release()
    for _ in range(2):  # the released step, and one on public data
        s.optimizer.step()
        s.optimizer.zero_grad()
        s.losses(s.x, s.y).mean().backward()


def resumed(path: Path) -> tuple[cw.Private, Setting, nn.Module]:
    s = Setting()
    s.private.close()
    return cw.Private.resume(path, s.model, s.optimizer), s, s.model


def step_once(private: cw.Private, s: Setting) -> None:
    for x, y in private.loader(s.records):
        private.step(s.losses(x, y))
        return


@pytest.mark.parametrize("copied", [False, True])
def test_one_checkpoint_is_continued_once(copied: bool, tmp_path: Path) -> None:
    """Also in one process, and after the file was read, which drops the lock of the system."""
    s = Setting()
    step_once(s.private, s)
    s.private.save(tmp_path / "run")
    if copied:
        shutil.copy(tmp_path / "run", tmp_path / "backup")
    first, a, _ = resumed(tmp_path / "run")
    step_once(first, a)
    before = s.weights()
    with pytest.raises(cw.CheckpointError, match="another run continues"):
        step_once(s.private, s)
    assert torch.equal(before, s.weights())
    step_once(first, a)
    assert first.ledger.steps == 3
