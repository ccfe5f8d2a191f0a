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
from clipwise.private.release import Release
from tests.attacks.misuse.common import N, Setting
from tests.interrupts import at_every_line

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


STEPS: list[Callable[..., Any]] = [
    cw.Private.backward,
    cw.Private.step,
    cw.Private._gather,
    cw.Private._write,
    Checks.accept,
]
NOTES: list[Callable[..., Any]] = [Batch.check, Batch.check_whole, Batch.add, Batch.take, Batch.forget]


def expected(s: Setting, records: slice) -> Tensor:
    """The clipped sum of some records."""
    alone = cw.clipped_gradients(s.losses(*s.records[records]), dict(s.model.named_parameters()), s.private.style)
    return torch.cat([part.flatten() for part in alone.gradients.values()])


def give(s: Setting, halves: int, how: Callable[[Tensor], object]) -> None:
    """What a loop does that tries again: all from the first on where it is told so, else the last part alone."""
    part = s.records[6 * halves - 6 : 6 * halves]
    try:
        how(s.losses(*part))
    except cw.InvalidLosses:
        for start in range(halves - 1):
            s.private.backward(s.losses(*s.records[6 * start : 6 * start + 6]))
        how(s.losses(*part))


@pytest.mark.parametrize("halves", [1, 2])
@pytest.mark.parametrize("ended", [False, True], ids=["backward", "step"])
def test_no_sample_is_released_twice_after_an_interrupt_at_any_line(
    halves: int, ended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch that was noted when the interrupt came was added again by a loop that computed its losses again."""
    released: list[Tensor] = []
    write = Release.write

    def noted(release: Release, sums: Any, *others: Any) -> None:
        released.append(torch.cat([part.flatten() for part in sums]))
        write(release, sums, *others)

    monkeypatch.setattr(Release, "write", noted)
    made: list[Setting] = []

    def attempt() -> Callable[[], object]:
        s = Setting(cw.Poisson(N, 12), own_batches=True)
        s.optimizer.param_groups[0]["lr"] = 0.0
        for start in range(halves - 1):
            s.private.backward(s.losses(*s.records[6 * start : 6 * start + 6]))
        made.append(s)
        losses = s.losses(*s.records[6 * halves - 6 : 6 * halves])
        return lambda: (s.private.step if ended else s.private.backward)(losses)

    places = 0
    for where, let_out in at_every_line([*STEPS, *NOTES], attempt):
        s = made.pop()
        assert let_out, where
        if ended:
            give(s, halves if s.private._batch.parts or s.private.steps_done == 0 else 1, s.private.step)
        else:
            give(s, halves, s.private.backward)
            s.private.step()
        assert len(released) in (1, 2) and s.private.ledger.steps == len(released), where
        once = [expected(s, slice(6)), expected(s, slice(6, 12)), expected(s, slice(12))]
        for total in released:
            assert any(torch.allclose(total, each, atol=1e-5) for each in once), where
        released.clear()
        places += 1
    assert places > 25
