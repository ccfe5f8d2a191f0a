"""A physical batch that is in the sum only in part, or without a note of it, is never counted: the sum is dropped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import clipwise as cw
from clipwise.engine import Outer
from clipwise.private.batch import Batch
from clipwise.private.evidence import Checks
from tests.attacks.misuse.common import N, Setting

Break = Callable[[pytest.MonkeyPatch], None]


def in_the_middle(patch: pytest.MonkeyPatch) -> None:
    """After the last layer's weight was added, before the first one's."""
    real, calls = Outer.add_weighted, 0

    def interrupted(use: Outer, factors: Tensor, total: Tensor) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise KeyboardInterrupt
        real(use, factors, total)

    patch.setattr(Outer, "add_weighted", interrupted)


def stops(owner: type, name: str) -> Break:
    """Before this is done, when all was added."""

    def interrupted(*args: Any, **named: Any) -> None:
        raise KeyboardInterrupt

    return lambda patch: patch.setattr(owner, name, interrupted)


BREAKS = {"middle": in_the_middle, "evidence": stops(Checks, "accept"), "note": stops(Batch, "add")}


@pytest.mark.parametrize("broken", BREAKS.values(), ids=BREAKS)
def test_the_same_batch_is_not_added_twice(broken: Break, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop that catches the error and tries again would move the sum by 2 R for every sample of the batch."""
    s = Setting(cw.Poisson(N, 12), own_batches=True)
    first, second = (s.records[:6], s.records[6:12])
    s.private.backward(s.losses(*first))
    with monkeypatch.context() as patch:
        broken(patch)
        with pytest.raises(KeyboardInterrupt):
            s.private.backward(s.losses(*second))
    for use in (lambda: s.private.backward(s.losses(*second)), s.private.step, s.private.release):
        break_again(s)
        with pytest.raises(cw.InvalidLosses, match=r"interrupted the addition.*dropped.*given again from the first"):
            use()
        assert s.private._batch.sums is None and s.private.ledger.steps == 0
    for part in (first, second):
        s.private.backward(s.losses(*part))
    assert s.private._batch.sums is not None
    alone = cw.clipped_gradients(s.losses(*s.records[:12]), dict(s.model.named_parameters()), s.private.style)
    for total, expected in zip(s.private._batch.sums, alone.gradients.values(), strict=True):
        torch.testing.assert_close(total, expected)
    assert s.private.step() and s.private.ledger.steps == 1


def break_again(s: Setting) -> None:
    """Leave a torn sum, as an interrupt did."""
    if s.private._batch.total is None:
        s.private.backward(s.losses(*s.records[:6]))
    assert s.private._batch.total is not None
    s.private._batch.total.begin()


def test_a_loop_over_the_loader_has_to_begin_again(monkeypatch: pytest.MonkeyPatch) -> None:
    s = Setting(cw.FullBatch(N))
    batches = iter(s.private.loader(s.records, physical_batch_size=N // 2))
    s.private.step(s.losses(*next(batches)))
    batch = next(batches)
    with monkeypatch.context() as patch:
        in_the_middle(patch)
        with pytest.raises(KeyboardInterrupt):
            s.private.step(s.losses(*batch))
    with pytest.raises(cw.InvalidLosses, match=r"Start iterating over the loader again"):
        s.private.step(s.losses(*batch))
    with pytest.raises(cw.InvalidSampling, match=r"skipped"):
        s.private.step(s.losses(*batch))
    assert s.private.ledger.steps == 0
    for x, y in s.private.loader(s.records, physical_batch_size=N // 2):
        s.private.step(s.losses(x, y))
    assert s.private.steps_done == s.private.ledger.steps == s.private.plan.steps
