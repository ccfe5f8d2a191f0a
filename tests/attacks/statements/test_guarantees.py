"""Statements that were not true: of a neighbouring data set, of estimated norms, of what a run reports.

Estimated norms: forward mode measures, backward mode sums, and both must be of one and the same gradient.

Whatever moved only one of the two was a way around the clipping: the norm that was measured was up to a hundred times
smaller than that of the gradient which was released.

Add/remove was claimed where the number of records is part of the mechanism: a neighbour would have run another one.

The divisor of a full batch was n and the rate batch / n, so removing a record moved what the *others* contribute: twice
as far as the accountant assumed, in the first program here. With a public rate nothing depends on n.

Estimated norms: what a neighbouring data set changes besides the one record.

Directions of their own for every physical batch were a way around the guarantee: a record that was added in front moved
all others to other places, some of them to the next physical batch, where another estimate clipped them.

What a run states against what its ledger and its plan say.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import clipwise as cw
from clipwise.accounting import FederatedRounds, GaussianSteps, account
from clipwise.cli.main import main
from clipwise.entropy import Entropy
from clipwise.errors import AccountingError, CheckpointError, DataError, InvalidLosses, InvalidSampling, LedgerError
from clipwise.federated import Server
from clipwise.mechanisms import ProjectedNorms
from clipwise.report import Choices, Run
from clipwise.sampling import Draws
from tests.core.doubles import Recorder

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
    for sampling in (cw.FullBatch(N), cw.Poisson(N, 2), cw.Shuffled(N, 2), cw.FixedSize(N, 2), cw.BallsInBins(N, 2)):
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


LIMIT, DIMENSION = 1.0, 8


def losses(model: nn.Module, batch: tuple[Tensor]) -> Tensor:
    return 1e3 * model(batch[0]).squeeze(1)  # long gradients, all in one direction


def released_by(records: Tensor, seed: int, physical: int) -> Tensor:
    torch.manual_seed(0)
    model = nn.Linear(DIMENSION, 1, bias=False)
    recorder = Recorder(model.parameters())
    plan = cw.Plan(cw.Poisson(1_000, 100), 1, cw.Abadi(LIMIT), noise_multiplier=0.0, mechanism=ProjectedNorms(4))
    private = cw.Private(plan, model, recorder, loss_fn=losses, seed=seed, own_batches=True)
    for part in records.split(physical):
        private.backward(private.losses((part,)))
    private.step()
    return recorder.seen[0][0] * 100  # the sum


@pytest.mark.parametrize("seed", range(3))
def test_a_record_in_front_does_not_change_what_the_others_contribute(seed: int) -> None:
    records = torch.eye(DIMENSION)[:1].repeat(41, 1)
    others = released_by(records[1:], seed, physical=10)
    moved = (released_by(records, seed, physical=10) - others).norm()
    (own,) = (released_by(records[:1], seed, physical=10).norm(),)
    torch.testing.assert_close(moved, own, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("seed", range(3))
def test_the_size_of_physical_batches_changes_nothing(seed: int) -> None:
    records = torch.randn(41, DIMENSION, generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(released_by(records, seed, 10), released_by(records, seed, 41), rtol=1e-4, atol=1e-4)


B, SMALL = 16, 0.01
Batch = tuple[Tensor, Tensor]


def batch() -> Batch:
    made = torch.Generator().manual_seed(0)
    return torch.randn(B, 5, generator=made), torch.randn(B, generator=made)


def squares(model: nn.Module, batch: Batch) -> Tensor:
    return (model(batch[0]).squeeze(1) - batch[1]).square()


def run_of(loss_fn: Callable[[nn.Module, Batch], Tensor]) -> tuple[cw.Private, nn.Sequential]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
    plan = cw.Plan(cw.FullBatch(B), 3, cw.Abadi(SMALL), 20.0, mechanism=ProjectedNorms(200))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    return cw.Private(plan, model, optimizer, loss_fn=loss_fn, seed=0, own_batches=True), model


def length_of_sum(private: cw.Private) -> float:
    assert private._batch.sums is not None
    return float(torch.cat([each.flatten() for each in private._batch.sums]).norm())


def refuses(private: cw.Private, losses: Tensor) -> None:
    with pytest.raises(InvalidLosses):
        private.backward(losses)
    assert private._batch.sums is None and not private.ledger.events


def frozen_target(model: nn.Module, batch: Batch) -> Tensor:
    """Forward mode goes through no_grad, so that the two cancel; the gradient has only one of them."""
    with torch.no_grad():
        target = model(batch[0]).squeeze(1)
    return (model(batch[0]).squeeze(1) - 0.99 * target - batch[1]).square()


def hooked_values(model: nn.Module, batch: Batch) -> Tensor:
    assert isinstance(model, nn.Sequential)
    hidden = model[1](model[0](batch[0]))
    if hidden.requires_grad:
        hidden.register_hook(lambda gradient: 100 * gradient)
    return (model[2](hidden).squeeze(1) - batch[1]).square()


def of_the_grad_mode(model: nn.Module, batch: Batch) -> Tensor:
    losses = squares(model, batch)
    return 100 * losses - 99 * losses.detach() if torch.is_grad_enabled() else losses


@pytest.mark.parametrize("loss_fn", [frozen_target, hooked_values, of_the_grad_mode])
def test_a_function_whose_two_derivatives_differ_is_refused(loss_fn: Callable[[nn.Module, Batch], Tensor]) -> None:
    private, _ = run_of(loss_fn)
    refuses(private, private.losses(batch()))


def test_a_target_that_is_detached_is_fine() -> None:
    def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
        target = model(batch[0]).squeeze(1).detach()
        return (model(batch[0]).squeeze(1) - 0.99 * target - batch[1]).square()

    private, _ = run_of(loss_fn)
    private.backward(private.losses(batch()))
    assert length_of_sum(private) < 1.3 * B * SMALL


def scaled_in_place(losses: Tensor, model: nn.Sequential) -> None:
    losses.mul_(100.0)


def hooked(losses: Tensor, model: nn.Sequential) -> None:
    losses.register_hook(lambda gradient: 100 * gradient)


def cut_off(losses: Tensor, model: nn.Sequential) -> None:
    losses.detach_()


def other_weights(losses: Tensor, model: nn.Sequential) -> None:
    model[2].weight.data.mul_(100.0)


def hooked_weights(losses: Tensor, model: nn.Sequential) -> None:
    model[0].weight.register_hook(lambda gradient: 100 * gradient)


@pytest.mark.parametrize("change", [scaled_in_place, hooked, cut_off, other_weights, hooked_weights])
def test_what_changes_after_the_estimate_is_refused(change: Callable[[Tensor, nn.Sequential], None]) -> None:
    private, model = run_of(squares)
    losses = private.losses(batch())
    change(losses, model)
    refuses(private, losses)


@pytest.mark.parametrize("size", [1, 2, B])
def test_honest_losses_pass(size: int) -> None:
    for seed in range(10):
        private, _ = run_of(squares)
        torch.manual_seed(seed)
        private.backward(private.losses((10 * torch.randn(size, 5), torch.randn(size))))


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
