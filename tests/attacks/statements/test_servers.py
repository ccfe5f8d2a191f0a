"""A federated server that goes on from a saved run: what already stood on its ledger was forgotten."""

from __future__ import annotations

import pytest
from torch import nn

import clipwise as cw
from clipwise.accounting import FederatedRounds
from clipwise.errors import CheckpointError
from clipwise.federated import Server


def test_a_release_that_was_recorded_before_is_not_forgotten() -> None:
    plan = cw.Plan(cw.FullBatch(3), 6, cw.Abadi(1.0), noise_multiplier=4.0, mechanism=cw.mechanisms.Rounds())
    saved = Server(plan, nn.Linear(2, 1)).state_dict()
    server = Server(plan, nn.Linear(2, 1))
    server.ledger.record(FederatedRounds(cw.FullBatch(3), noise_multiplier=0.5, rounds=7))
    with pytest.raises(CheckpointError, match="its own ledger"):
        server.load_state_dict(saved)
    assert server.ledger.steps == 7
