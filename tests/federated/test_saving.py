"""Runs that are saved and resumed: what must not be forgotten, and who may go on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from torch import nn

import clipwise as cw
from clipwise.accounting import FederatedRounds
from clipwise.federated import Server
from tests.core.common import refused_elsewhere
from tests.federated.common import federated_plan

PLAN = federated_plan(sampling=cw.Poisson(20, 5), steps=3, clip=cw.Abadi(1.0), noise_multiplier=1.0)


def test_a_given_ledger_cannot_be_lost_by_a_resume(tmp_path: Path) -> None:
    """The saved ledger takes its place, which would forget what the given one holds."""
    model = nn.Linear(1, 1)
    server = Server(PLAN, model)
    server.save(tmp_path / "run", model)
    spent = cw.Ledger([FederatedRounds(cw.Poisson(20, 5), 1.0, 7)])
    again = Server(PLAN, model, ledger=spent)
    with pytest.raises(cw.CheckpointError, match="its own ledger"):
        again.resume(tmp_path / "run", model)
    with pytest.raises(cw.CheckpointError, match="its own ledger"):
        again.load_state_dict(server.state_dict())
    assert again.ledger is spent and spent.steps == 7


def test_a_run_begun_with_a_ledger_keeps_it(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    spent = cw.Ledger([FederatedRounds(cw.Poisson(20, 5), 1.0, 7, "earlier")])
    Server(PLAN, model, ledger=spent).save(tmp_path / "run", model)
    again = Server(PLAN, model)
    again.resume(tmp_path / "run", model)
    assert again.ledger.events == spent.events and again.rounds_done == 0


def test_a_file_that_does_not_fit_leaves_the_server_as_it_was(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    server = Server(PLAN, model)
    server.open(range(20))
    server.close([])
    server.save(tmp_path / "run", model)
    again = Server(PLAN, nn.Linear(2, 1))
    with pytest.raises(cw.CheckpointError, match="does not fit"):
        again.resume(tmp_path / "run", nn.Linear(2, 1))
    assert again.rounds_done == 0 and again.ledger.steps == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_two_processes_cannot_go_on_from_one_file(tmp_path: Path) -> None:
    """Each would count its own rounds over the other's, and both release."""
    model = nn.Linear(1, 1)
    server = Server(PLAN, model)
    server.save(tmp_path / "run", model)
    assert "another process" in refused_elsewhere(lambda: Server(PLAN, model).resume(tmp_path / "run", model))
