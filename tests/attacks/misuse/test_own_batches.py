"""Batches that nobody drew as the plan says are refused, unless they are declared; the declaration goes along.

One of several ranks would claim the whole epsilon: refused. A process group of one is a single process.
"""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

import clipwise as cw
from clipwise import report
from clipwise.accounting import ProjectedSteps
from clipwise.accounting.events import decode, encode
from clipwise.federated import Server
from clipwise.mechanisms import Rounds
from tests.attacks.misuse.common import STEPS, N, Setting
from tests.conftest import HANG

SAMPLINGS = {
    "poisson": cw.Poisson(N, 12),
    "capped": cw.Poisson(N, 12, max_batch_size=20),
    "full": cw.FullBatch(N),
    "shuffled": cw.Shuffled(N, 12),
    "fixed": cw.FixedSize(N, 12),
}
DECLARED = "in batches that the caller drew"


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_own_batches_are_refused_unless_declared(sampling: Any) -> None:
    s = Setting(sampling)
    before = s.weights()
    for x, y in torch.utils.data.DataLoader(s.records, batch_size=12):  # not even shuffled
        for use in (
            lambda x=x, y=y: s.private.step(s.losses(x, y)),
            lambda x=x, y=y: s.private.backward(s.losses(x, y)),
            lambda x=x, y=y: s.private.watch((x, y)).__enter__(),
            s.private.step,
            s.private.release,
        ):
            with pytest.raises(cw.InvalidSampling, match=r"private\.loader.*own_batches=True"):
                use()
    assert s.private.ledger.steps == s.private.steps_done == 0 and torch.equal(before, s.weights())
    for x, y in s.batches():
        s.private.step(s.losses(x, y))
    assert s.private.steps_done == STEPS and DECLARED not in s.private.ledger.guarantee(1e-5).statement()


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_declared_batches_are_taken_and_said_to_be_so(sampling: Any) -> None:
    s = Setting(sampling, own_batches=True)
    with s.private.watch((s.x[:12], s.y[:12])):
        losses = s.losses(s.x[:12], s.y[:12])
    assert s.private.step(losses) and s.private.step()  # an empty batch of one's own
    (event,) = s.private.ledger.events
    assert event == cw.GaussianSteps(sampling, 1.0, 2, own_batches=True)
    drawn = cw.Ledger([cw.GaussianSteps(sampling, 1.0, 2)]).guarantee(1e-5)
    declared = s.private.ledger.guarantee(1e-5)
    assert declared.epsilon == drawn.epsilon and declared.sampling == f"{drawn.sampling}, {DECLARED}"
    assert DECLARED in declared.statement()
    assert any("own_batches=True" in text for text in declared.warnings) and not any(
        "own_batches" in text for text in drawn.warnings
    )
    with pytest.raises(cw.InvalidSampling, match="omit it"):
        s.batches()


def test_more_samples_than_were_declared_are_refused() -> None:
    s = Setting(cw.Shuffled(N, 12), own_batches=True)
    with pytest.raises(cw.InvalidSampling, match="more than"):
        s.private.step(s.losses(s.x, s.y))
    assert s.private.ledger.steps == 0


def test_losses_of_another_batch_than_the_loaders_are_refused() -> None:
    s = Setting(seed=1)
    own = iter(torch.utils.data.DataLoader(s.records, batch_size=N, shuffle=True))
    for (x, y), (u, v) in zip(s.batches(), own, strict=False):
        assert len(x) < N
        with pytest.raises(cw.InvalidLosses, match=rf"has {len(x)} samples but there are {N} losses"):
            s.private.step(s.losses(u, v))
        s.private.step(s.losses(x, y))
        with pytest.raises(cw.InvalidSampling, match="do not belong to a new batch of the loader"):
            s.private.step(s.losses(u[: len(x)], v[: len(x)]))
    assert s.private.ledger.steps == 1


def test_the_ledger_keeps_the_declaration_and_old_ledgers_read_as_before() -> None:
    for event in (
        cw.GaussianSteps(cw.FullBatch(N), 1.0, 2, own_batches=True),
        ProjectedSteps(cw.FullBatch(N), 5.0, 60, 2, own_batches=True),
    ):
        written = cw.Ledger([event, event, event.repeated(1)]).to_json()
        assert cw.Ledger.from_json(written).events == (event.repeated(5),)
        without = {key: value for key, value in encode(event).items() if key != "own_batches"}
        assert decode(without).own_batches is False and decode(without) != event  # type: ignore[union-attr]
        assert "own_batches" not in encode(decode(without))
        assert len(cw.Ledger([event, decode(without)]).events) == 2, "declared and drawn steps are not one event"
        with pytest.raises(cw.LedgerError):
            decode({**without, "own_batches": "yes"})
    estimated = cw.Ledger([ProjectedSteps(cw.FullBatch(N), 5.0, 60, 2, own_batches=True)]).guarantee(1e-5)
    assert DECLARED in estimated.statement()
    with pytest.raises(cw.AccountingError, match="own_batches must be True or False"):
        Setting(own_batches=1)


def test_a_resumed_run_keeps_the_declaration(tmp_path: Path) -> None:
    s = Setting(own_batches=True)
    s.private.save(tmp_path / "run.ckpt")
    saved = s.private.state_dict()
    s.private.step(s.losses(s.x[:9], s.y[:9]))  # after the save: charged as interrupted
    s.private._release._journal.close()  # type: ignore[union-attr]
    again = cw.Private.resume(tmp_path / "run.ckpt", s.model, s.optimizer)
    (event,) = again.ledger.events
    assert event.reason == "interrupted" and event.own_batches  # type: ignore[union-attr]
    assert again.step(s.losses(s.x[:9], s.y[:9]))
    with pytest.raises(cw.CheckpointError, match="own_batches"):
        cw.Private(s.plan, s.model, s.optimizer).load_state_dict(saved)


def test_result_card_and_page_repeat_what_was_declared(tmp_path: Path) -> None:
    s = Setting(own_batches=True)
    for _ in range(STEPS):
        s.private.step(s.losses(s.x[:12], s.y[:12]))
    text = written(s, tmp_path)
    assert DECLARED in text["card.md"] and DECLARED in text["index.html"] and DECLARED in text["result.json"]
    assert "own_batches" in text["ledger.json"] and "own_batches=True" in text["index.html"]


def test_result_card_and_page_of_a_run_that_was_misused_claim_no_epsilon(tmp_path: Path) -> None:
    s = Setting(cw.FullBatch(N))
    for x, y in s.batches():
        s.losses(x, y).mean().backward()
        for p in s.model.parameters():
            p.data -= 0.1 * p.grad  # type: ignore[operator]
        break
    text = written(s, tmp_path)
    assert "Not private" in text["card.md"] and "an update that clipwise did not make" in text["card.md"]
    assert "an update that clipwise did not make" in text["index.html"]
    (panel,) = {record["printed"] for record in json.loads(text["result.json"])["guarantees"].values()}
    assert panel == "infinite"


def written(s: Setting, folder: Path) -> dict[str, str]:
    """The files of a report on the run, as a user makes it."""
    with torch.no_grad():
        test = cw.calibration.evaluate(logits=s.model(s.x), labels=s.y)
    run = report.Run.of(s.private, test, delta=1e-5)
    run.save(folder)
    page = report.write(run, folder)
    names = ("card.md", "result.json", "ledger.json")
    return {**{name: (folder / name).read_text() for name in names}, "index.html": page.read_text()}


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
