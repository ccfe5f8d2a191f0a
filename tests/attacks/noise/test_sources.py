"""Noise that depends on more than its label: another source, or another thread, within one release of one seed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import clipwise as cw
from clipwise.entropy import Entropy
from clipwise.errors import ClipwiseError
from clipwise.noise import DefaultNormals, GaussianNoise, Normals
from clipwise.noise.polar import PolarNormals
from clipwise.noise.ziggurat import ZigguratNormals
from tests.conftest import HANG

SIZE, MULTIPLIER = 400, 5.0
PLAN = cw.Plan(cw.FullBatch(20), steps=2, clip=cw.Abadi(1.0), noise_multiplier=MULTIPLIER)


class Flipped(DefaultNormals):
    """A source of one's own: as good as the default, and its opposite."""

    def fill_(self, buffer: Tensor, entropy: Entropy, step: int, piece: int) -> None:
        super().fill_(buffer, entropy, step, piece)
        buffer.neg_()


def made(path: Path, first: Normals | None, second: Normals | None) -> tuple[Tensor, Tensor, cw.Private]:
    """The first step of a seeded run, and the same after a resume with another source: two releases of one sum."""

    def fresh() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(SIZE, 1, bias=False)
        nn.init.zeros_(model.weight)
        return model, torch.optim.SGD(model.parameters(), lr=1.0)

    def step(private: cw.Private, model: nn.Module) -> Tensor:
        x = torch.randn(20, SIZE, generator=torch.Generator().manual_seed(0))
        assert private.step(model(x).squeeze(1))
        return -next(model.parameters()).detach().flatten()

    model, optimizer = fresh()
    private = cw.Private(PLAN, model, optimizer, seed=0, noise=first, own_batches=True)
    private.save(path)
    one = step(private, model)
    private.close()
    model, optimizer = fresh()
    private = cw.Private.resume(path, model, optimizer, noise=second)
    return one, step(private, model), private


@pytest.mark.parametrize(
    ("first", "second"),
    [(None, Flipped), (Flipped, None), (ZigguratNormals, PolarNormals)],
    ids=["to one's own", "from one's own", "ziggurat and pairs"],
)
def test_a_step_that_is_repeated_with_other_noise_is_charged_again(
    first: Callable[[], Normals] | None, second: Callable[[], Normals] | None, tmp_path: Path
) -> None:
    """Its sums are the same, so it counted as the same release. The mean of the two had no noise, or half of it."""
    one, two, private = made(tmp_path / "run", first and first(), second and second())
    assert not torch.equal(one, two)
    assert private.ledger.steps == 2 and private.ledger.events[-1].reason == "repeated"
    assert 0.5 < float((one + two).std()) / (np.sqrt(2) * MULTIPLIER / 20) < 1.5


@pytest.mark.parametrize("source", [None, Flipped])
def test_a_step_that_is_repeated_with_the_same_source_is_the_same_release(
    source: Callable[[], Normals] | None, tmp_path: Path
) -> None:
    one, two, private = made(tmp_path / "run", source and source(), source and source())
    assert torch.equal(one, two) and private.ledger.steps == 1


def test_two_releases_at_once_share_no_noise() -> None:
    """Both wrote to the same buffers, so one got the other's noise, or its sums; here the worst of orders."""
    drawn, go_on = threading.Event(), threading.Event()

    class Slow(DefaultNormals):
        def fill_(self, buffer: Tensor, entropy: Entropy, step: int, piece: int) -> None:
            super().fill_(buffer, entropy, step, piece)
            if step == 0:
                drawn.set()
                go_on.wait(HANG)

    noise = GaussianNoise([torch.zeros(SIZE)], Entropy(), Slow())
    first: list[Tensor] = []
    thread = threading.Thread(target=lambda: first.extend(noise.release([torch.zeros(SIZE)], [1.0], 1.0, 0)))
    thread.start()
    try:
        assert drawn.wait(HANG)
        with pytest.raises(ClipwiseError, match="another thread"):
            noise.release([torch.full((SIZE,), 1e6)], [1.0], 1.0, 1)
    finally:
        go_on.set()
        thread.join()
    assert float(first[0].abs().max()) < 10
    noise.release([torch.zeros(SIZE)], [1.0], 1.0, 1)
