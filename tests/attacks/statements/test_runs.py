"""What a run states against what its ledger and its plan say."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import clipwise as cw
from clipwise.accounting import FederatedRounds
from clipwise.errors import CheckpointError, DataError, LedgerError
from clipwise.federated import Server
from clipwise.report import Choices, Run


def test_a_run_made_half_way_keeps_the_ledger_of_that_moment(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(3, 1), torch.randn(20, 3)
    plan = cw.Plan(cw.FullBatch(20), 5, cw.Abadi(1.0), noise_multiplier=5.0)
    private = cw.Private(plan, model, torch.optim.SGD(model.parameters(), lr=0.1), own_batches=True)
    test = cw.calibration.evaluate_regression(torch.zeros(5), torch.ones(5))
    for step in range(5):
        private.step(model(x).squeeze(1).square())
        run = Run.of(private, test, delta=1e-5)
        if step == 1:
            early = run
        run.save(tmp_path / "latest")  # the folder of one run follows it
    read = Run.load(early.save(tmp_path / "early"))
    assert read.ledger is not None and read.ledger.steps == 2
    assert read.guarantees["exact"].epsilon >= read.ledger.epsilon(1e-5)
    with pytest.raises(LedgerError, match="finished run"):
        early.ledger.record(private.ledger.events[0])  # type: ignore[union-attr]
    last = Run.load(tmp_path / "latest").ledger
    assert last is not None and last.steps == 5


@pytest.mark.parametrize("name", ["noise_multiplier", "steps", "mechanism", "sampling", "optimizer"])
def test_a_further_choice_does_not_take_the_place_of_the_plan(name: str) -> None:
    with pytest.raises(DataError, match=name):
        Choices(further={name: 9.0})


def test_a_release_that_was_recorded_before_is_not_forgotten() -> None:
    """A federated server that goes on from a saved run forgot what stood on its ledger."""
    plan = cw.Plan(cw.FullBatch(3), 6, cw.Abadi(1.0), noise_multiplier=4.0, mechanism=cw.mechanisms.Rounds())
    saved = Server(plan, nn.Linear(2, 1)).state_dict()
    server = Server(plan, nn.Linear(2, 1))
    server.ledger.record(FederatedRounds(cw.FullBatch(3), noise_multiplier=0.5, rounds=7))
    with pytest.raises(CheckpointError, match="its own ledger"):
        server.load_state_dict(saved)
    assert server.ledger.steps == 7
