"""Add/remove was claimed where the number of records is part of the mechanism: a neighbour would have run another one.

The divisor of a full batch was n and the rate batch / n, so removing a record moved what the *others* contribute: twice
as far as the accountant assumed, in the first program here. With a public rate nothing depends on n.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import clipwise as cw
from clipwise.accounting import GaussianSteps, account
from clipwise.cli.main import main
from clipwise.entropy import Entropy
from clipwise.errors import AccountingError, InvalidSampling
from clipwise.sampling import Draws

R, N = 1.0, 8
EVERYBODY = cw.Poisson(rate=1.0, batch_size=N)


def released(sampling: Any, gradients: Tensor) -> float:
    """What a step subtracts from a weight that is 0, without noise: the mean gradient that noise would be added to."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    plan = cw.Plan(sampling, steps=1, clip=cw.Abadi(R), noise_multiplier=0.0)
    private = cw.Private(plan, model, torch.optim.SGD(model.parameters(), lr=1.0))
    for (x,) in private.loader(TensorDataset(gradients)):
        assert private.step(model(x).squeeze(1))
    return float(-model.weight.detach())


def neighbours() -> tuple[Tensor, Tensor]:
    """Eight records, one of which pulls the other way, and the seven others."""
    everybody = torch.full((N, 1), R)
    everybody[3] = -R
    return everybody, torch.cat([everybody[:3], everybody[4:]])


def test_with_a_public_number_removing_a_record_moves_a_step_twice_as_far_as_was_accounted() -> None:
    more, fewer = neighbours()
    moved = abs(released(cw.FullBatch(N), more) - released(cw.FullBatch(N - 1), fewer))
    assert moved == pytest.approx(2 * R / N)
    for sampling in (cw.FullBatch(N), cw.Poisson(N, 2), cw.Shuffled(N, 2), cw.FixedSize(N, 2)):
        steps = (GaussianSteps(sampling, 2.0, 5),)
        assert account(steps, 1e-2).relation != "add_remove"
        with pytest.raises(AccountingError, match="rate="):
            account(steps, 1e-2, relation="add_remove")
        with pytest.raises(InvalidSampling, match="rate="):  # the neighbour is refused, so nothing is promised of it
            released(sampling, fewer)


def test_with_a_public_rate_it_moves_by_what_is_accounted() -> None:
    more, fewer = neighbours()
    assert abs(released(EVERYBODY, more) - released(EVERYBODY, fewer)) == pytest.approx(R / N)
    assert account((GaussianSteps(EVERYBODY, 2.0, 5),), 1e-2, relation="add_remove").relation == "add_remove"


@pytest.mark.parametrize("sampling", [cw.Poisson(rate=0.1, batch_size=5), cw.Poisson(None, 5, 7, 0.1, 60)])
@pytest.mark.parametrize("records", [50, 49, 1, 0])
def test_data_of_any_size_run_the_very_same_mechanism(sampling: cw.Poisson, records: int) -> None:
    model = nn.Linear(1, 1)
    plan = cw.Plan(sampling, steps=12, clip=cw.Abadi(R), noise_multiplier=1.0)
    private = cw.Private(plan, model, torch.optim.SGD(model.parameters(), lr=0.1))
    sizes = []
    for (x,) in private.loader(TensorDataset(torch.ones(records, 1))):
        assert private.step(model(x).squeeze(1))
        sizes.append(len(x))
    facts = json.loads(private.ledger.to_json())
    expected = json.loads(cw.Ledger([GaussianSteps(sampling, 1.0, 12)]).to_json())
    for mine in (facts, expected):  # all that differs is the mark of the run
        del mine["run"], mine["checksum"]
    assert facts == expected and facts["relation"] == "add_remove"
    assert plan.batch_size == 5 and private.steps_done == 12 and max(sizes, default=0) <= (sampling.largest_batch or 50)


def test_every_record_joins_with_the_public_rate_whatever_the_number_of_the_others() -> None:
    sampling, steps = cw.Poisson(rate=0.1, batch_size=5), 4_000
    for records in (50, 49):
        draws = Draws(sampling, Entropy(1))
        seen = np.zeros(records)
        pairs = 0
        for step in range(steps):
            batch = draws.batch(step, records)
            seen[batch] += 1
            pairs += {0, 1} <= set(batch.tolist())
        assert np.abs(seen / steps - 0.1).max() < 5 * np.sqrt(0.09 / steps)
        assert abs(pairs / steps - 0.01) < 5 * np.sqrt(0.0099 / steps)  # independent coins


def test_the_command_refuses_the_relation_and_names_the_rate(capsys: pytest.CaptureFixture[str]) -> None:
    options = {"noise-multiplier": 2, "batch-size": 10, "steps": 100, "delta": 1e-5, "accountant": "exact"}
    run = ["epsilon", "--json", *(f"--{name}={value}" for name, value in options.items())]
    assert main([*run, "--sample-size", "1000", "--relation", "add-remove"]) == 2
    assert "rate=" in capsys.readouterr().err
    found = []
    for scheme in (["--sample-size", "1000"], ["--rate", "0.01"], ["--rate", "0.01", "--relation", "add-remove"]):
        assert main([*run, *scheme]) == 0
        found.append(json.loads(capsys.readouterr().out)["accountants"]["exact"])
    assert [each["relation"] for each in found] == ["zero_out", "add_remove", "add_remove"]
    assert len({each["epsilon"] for each in found}) == 1
    assert main([*run, "--sample-size", "1000", "--rate", "0.01"]) == 2
    assert main([*run, "--rate", "0.01", "--max-batch-size", "20"]) == 2
    assert "largest=" in capsys.readouterr().err
    assert main([*run, "--rate", "0.01", "--max-batch-size", "20", "--largest", "1100"]) == 0
    assert json.loads(capsys.readouterr().out)["accountants"]["exact"]["kind"] == "upper bound"
