"""The evidence of a forward pass serves the losses that were judged with it, and no others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import clipwise as cw
from tests.attacks.misuse.common import N, Setting


def standardised(losses: Tensor) -> Tensor:
    weights = losses.detach()
    return losses * ((weights - weights.mean()) / weights.std())


def fails_once(s: Setting, losses: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """The losses are judged; then there is no memory for their gradients."""

    def no_memory(*args: Any, **named: Any) -> None:
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patch:
        patch.setattr(s.private, "_clip", no_memory)
        with pytest.raises(torch.OutOfMemoryError):
            s.private.backward(losses)


def others(losses: Tensor, mixed: Tensor) -> Tensor:
    return mixed


def in_place(losses: Tensor, mixed: Tensor) -> Tensor:
    return losses.mul_(mixed.detach())


def all_the_first(losses: Tensor, mixed: Tensor) -> Tensor:
    """One record N times, without a new version."""
    return losses.as_strided_((losses.numel(),), (0,))


@pytest.mark.parametrize("second", [others, in_place, all_the_first])
def test_other_losses_of_a_judged_pass_are_refused(
    second: Callable[[Tensor, Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twins are let go of when they were judged: without them these would pass, and move the sum by N R."""
    s = Setting(cw.FullBatch(N))
    batches = iter(s.private.loader(s.records))
    losses = s.losses(*next(batches))
    mixed = standardised(losses)
    fails_once(s, losses, monkeypatch)
    with pytest.raises(cw.NotSeparable, match=r"other losses of the same forward pass were given before"):
        s.private.step(second(losses, mixed))
    assert s.private.ledger.steps == 0


def test_the_same_losses_are_given_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error leaves everything as it was: what was seen counts, and counts once."""
    s = Setting(cw.FullBatch(N))
    for x, y in s.private.loader(s.records):
        losses = s.losses(x, y)
        if s.private.steps_done == 0:
            fails_once(s, losses, monkeypatch)
        s.private.step(losses)
    assert s.private.checked.steps == (0, 1, 2) and not s.private.checked.unclear


def test_losses_after_an_error_that_were_not_seen_do_not_count_as_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    s = Setting(cw.FullBatch(N))
    x, y = next(batches := iter(s.private.loader(s.records)))
    fails_once(s, s.losses(x, y), monkeypatch)
    s.private.step(s.losses(x, y))
    assert s.private.checked.steps == () and "after an error" in str(s.private.checked)
    del batches
