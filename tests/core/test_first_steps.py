"""What the first steps of a run cost: passes and kernels are counted, and memory is let go at once."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import TensorDataset

import clipwise as cw
from clipwise.private.evidence import checks, gradients, verdict
from clipwise.private.evidence.watch import Watch
from clipwise.private.parts import cut

N, SIZE = 32, 4


class Kernels(TorchDispatchMode):
    """Counts the kernels below it."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def deep(layers: int) -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Tanh()) for _ in range(layers)]
    return nn.Sequential(*blocks, nn.Linear(6, 1))


def physical_batches(layers: int = 2) -> Iterator[tuple[cw.Private, nn.Module, Tensor]]:
    """The physical batches of a run with the loader; the caller steps."""
    records = TensorDataset(torch.randn(N, 6, generator=torch.Generator().manual_seed(1)))
    model = deep(layers)
    plan = cw.Plan(sampling=cw.FullBatch(N), steps=4, clip=cw.Abadi(1.0), noise_multiplier=1.0)
    private = cw.Private(plan, model, torch.optim.SGD(model.parameters(), lr=0.1), seed=0)
    for (x,) in private.loader(records, physical_batch_size=SIZE):
        yield private, model, x


def squares(model: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = model(x).square().sum(1)
    return out


@pytest.fixture
def backwards(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for every backward pass."""
    found: list[int] = []
    real = torch.autograd.grad

    def counted(*args: Any, **kwargs: Any) -> Any:
        found.append(1)
        return real(*args, **kwargs)

    monkeypatch.setattr(torch.autograd, "grad", counted)
    return found


def passes_of_the_first_step(layers: int, backwards: list[int]) -> list[int]:
    found = []
    for private, model, x in physical_batches(layers):
        backwards.clear()
        done = private.step(squares(model, x))
        found.append(len(backwards))
        if done:
            return found
    raise AssertionError


def test_backward_passes_do_not_grow_with_depth_and_one_plan_serves_all_sizes(backwards: list[int]) -> None:
    shallow, deeper = (passes_of_the_first_step(layers, backwards) for layers in (2, 12))
    assert shallow == deeper
    first, *watched = shallow[:6]
    assert first <= 12  # two forms, each beside the true batch; twice three probes and the norms, autograd's own sum
    assert watched == [4] * 5  # the true batch and its twin by autograd, and twice the norms
    assert shallow[6:] == [1] * 3


def test_the_kernels_of_a_watched_pass_do_not_grow_from_pass_to_pass() -> None:
    counts: list[tuple[int, int]] = []
    with Kernels() as kernels:  # below the modes of the watched pass
        for private, model, x in physical_batches():
            begun = kernels.count
            losses = squares(model, x)
            middle = kernels.count
            done = private.step(losses)
            counts.append((middle - begun, kernels.count - middle))
            if done:
                break
    assert len(counts) == 9
    whole, usual = counts[2:6], counts[6]  # two forms each, in turn; with the first one more, of losses alone
    assert whole[0][0] > whole[2][0] and whole[1] == whole[3]
    assert whole[0][1] <= whole[2][1] + 40
    assert usual[0] < min(whole)[0] and usual[1] < min(step for _, step in whole)


def test_a_watched_pass_is_let_go_without_the_garbage_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[Watch]] = []
    real = Watch.__init__

    def noted(self: Watch, *args: Any, **kwargs: Any) -> None:
        real(self, *args, **kwargs)
        made.append(weakref.ref(self))

    monkeypatch.setattr(Watch, "__init__", noted)
    gc.collect()
    gc.disable()
    try:
        for private, model, x in physical_batches():
            done = private.step(squares(model, x))
            assert all(ref() is None for ref in made)
            if done:
                break
    finally:
        gc.enable()
    assert len(made) == 6


def test_twins_are_let_go_before_the_engine_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[int] = []
    close = checks.Checks.close

    def closed(self: checks.Checks, *args: Any) -> checks.Seen:
        watch = self._watch
        assert watch is not None
        held.append(len(watch.twins))
        seen = close(self, *args)
        held.append(len(watch.twins))
        return seen

    monkeypatch.setattr(checks.Checks, "close", closed)
    private, model, x = next(batches := physical_batches())
    private.step(squares(model, x))
    batches.close()
    assert held == [3, 0]


def test_gradients_are_compared_beside_one_twin_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twins of which only losses are asked are let go before gradients take memory, and others one after the other."""
    held: list[int] = []
    judge, now = checks.judge, gradients.Known.now
    watched: list[Watch] = []

    def judged(watch: Watch, *given: Any) -> verdict.Findings:
        watched[:] = [watch]
        return judge(watch, *given)

    def counted(known: gradients.Known, cotangent: Tensor) -> list[Tensor | None]:
        held.append(sum(twin.nbytes > 0 for twin in watched[0].twins))
        return now(known, cotangent)

    monkeypatch.setattr(checks, "judge", judged)
    monkeypatch.setattr(gradients.Known, "now", counted)
    for private, model, x in physical_batches():
        if private.step(squares(model, x)):
            break
    assert held == [2, 2, 1, 1] + [1, 1] * 5  # two forms at the first pass, then one


@pytest.mark.parametrize(("size", "whole"), [(4, 4), (5, 3), (8, 2), (15, 1)])
def test_as_many_whole_physical_batches_are_checked_in_each_of_the_first_steps(size: int, whole: int) -> None:
    for step in range(3):
        parts = list(cut(np.arange(200), step, size))
        checked = [part for part in parts if part.is_few]
        assert sum(part.size == size for part in checked) == whole and all(
            part.is_spared for part in parts[len(checked) :]
        )
        assert sum(part.size for part in checked) >= 15
    assert not any(part.few for part in cut(np.arange(200), 3, size))


def test_physical_batches_of_two_or_three_are_all_checked_where_none_is_smaller() -> None:
    for size, step in ((2, 0), (2, 1), (2, 2), (3, 1), (3, 2)):
        assert not any(part.is_spared for part in cut(np.arange(200), step, size))
    assert [part.is_spared for part in cut(np.arange(30), 0, 3)] == [False] * 6 + [True] * 5
