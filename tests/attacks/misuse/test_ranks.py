"""One of several ranks would claim the whole epsilon: refused. A process group of one is a single process."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

import clipwise as cw
from clipwise.federated import Server
from clipwise.mechanisms import Rounds
from tests.attacks.misuse.common import STEPS, N, Setting
from tests.conftest import HANG

OTHER_RANK = textwrap.dedent(
    """
    import sys
    from torch import distributed

    distributed.init_process_group("gloo", sys.argv[1], rank=1, world_size=2)
    distributed.barrier()
    """
)


@pytest.fixture(autouse=True)
def _no_group_is_left_for_other_tests() -> Iterator[None]:
    yield
    if distributed.is_initialized():
        distributed.destroy_process_group()


def train(s: Setting) -> None:
    for x, y in s.batches():
        s.private.step(s.losses(x, y))


def serve() -> None:
    plan = cw.Plan(cw.Poisson(N, 2), steps=1, clip=cw.Abadi(1.0), noise_multiplier=1.0, mechanism=Rounds())
    Server(plan, nn.Linear(2, 1))


def test_a_rank_among_several_is_refused_and_nothing_is_released(tmp_path: Path) -> None:
    store = f"file://{tmp_path / 'store'}"
    s = Setting(cw.FullBatch(N))  # made before there were ranks
    other = subprocess.Popen([sys.executable, "-c", OTHER_RANK, store], stderr=subprocess.PIPE, text=True)
    try:
        distributed.init_process_group("gloo", store, rank=0, world_size=2, timeout=timedelta(seconds=HANG))
        for attempt in (lambda: Setting(seed=1), lambda: Setting(own_batches=True), lambda: train(s), serve):
            with pytest.raises(cw.InvalidPlan, match=r"has 2 ranks.*process_group=\) is not supported yet"):
                attempt()
        assert s.private.ledger.steps == 0
        distributed.barrier()
        assert other.wait(HANG) == 0, other.communicate()[1]
    finally:
        other.kill()
        other.communicate()
    distributed.destroy_process_group()
    train(s)
    assert s.private.ledger.steps == STEPS


def test_a_process_group_of_one_is_a_single_process_but_wrappers_are_refused() -> None:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    s = Setting(cw.FullBatch(N))
    train(s)
    assert s.private.ledger.steps == STEPS
    wrapped = DistributedDataParallel(s.model)
    for model in (wrapped, nn.Sequential(wrapped)):
        with pytest.raises(cw.InvalidPlan, match=r"DistributedDataParallel.*bare model \(model\.module\)"):
            cw.Private(s.plan, model, torch.optim.SGD(model.parameters(), lr=0.1))


class FSDPModule(nn.Module):
    """What `fully_shard` mixes into a model's class, by name."""


class Sharded(FSDPModule, nn.Linear):
    pass


def test_sharded_models_are_refused() -> None:
    model = Sharded(3, 2)
    with pytest.raises(cw.InvalidPlan, match=r"FSDPModule.*bare model"):
        cw.Private(Setting().plan, model, torch.optim.SGD(model.parameters(), lr=0.1))
