"""Noise that is correlated over steps: records nearer to each other than was charged, and noise that is known.

A loader that was made before `load_state_dict` dealt the records to other groups than the saved run had; a batch that
was gathered before it was released as a step of the saved run. A `DataLoader(shuffle=True, drop_last=True)` of one's
own has shorter epochs than the tree: a record was twice in one tree, and moved 3.92 where 3 was charged.

A step that a seeded run made a third time counted as if it followed the second one: 2 + 1 of 2 + 2 participations.

Learning rates that all but end the run early made a matrix whose inverse grows without bound: after 400 steps the noise
was 1e32 times its deviation, float64 rounded all fresh noise away, and each step's noise followed from those before.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import clipwise as cw
from clipwise.accounting.events import decode, encode
from clipwise.correlation import Correlation
from clipwise.entropy import Entropy
from clipwise.errors import AccountingError, CheckpointError, InvalidPlan, LedgerError
from clipwise.noise import GaussianNoise, chain_of
from clipwise.sampling import Sampling
from tests.core.common import data, losses_of, mlp, plan, sgd

CYCLIC, ORDERED, SHUFFLED = cw.CyclicPoisson(40, 10, 4), cw.Shuffled(40, 10, reshuffle=False), cw.Shuffled(40, 10)
PLANS = {
    "banded": plan(sampling=CYCLIC, steps=8, correlation=cw.Banded(4)),
    "square root": plan(sampling=ORDERED, steps=8, correlation=cw.SquareRoot(4)),
    "tree": plan(sampling=SHUFFLED, steps=8, correlation=cw.Tree()),
}
each_plan = pytest.mark.parametrize("planned", PLANS.values(), ids=PLANS)


def begun(planned: cw.Plan, **options: Any) -> tuple[cw.Private, torch.nn.Module]:
    model = mlp()
    return cw.Private(planned, model, sgd(model), **options), model


def run(private: cw.Private, model: torch.nn.Module, until: int, scale: float = 1.0) -> None:
    for x, y in private.loader(data()):
        private.step(scale * losses_of(model, x, y))
        if private.steps_done >= until:
            break


def begun_until(planned: cw.Plan, until: int, **options: Any) -> cw.Private:
    private, model = begun(planned, **options)
    run(private, model, until)
    return private


# Records nearer to each other than was charged -----------------------------------------------------------------------


@each_plan
def test_a_loader_made_before_a_run_is_loaded_has_the_order_of_the_run(planned: cw.Plan) -> None:
    first, model = begun(planned)
    run(first, model, until=3)
    again, _ = begun(planned)
    loader = again.loader(data())
    again.load_state_dict(first.state_dict())
    next(iter(loader))
    order = first._position.draws().order(0, 40).tolist()
    drawn = {int(i) for i in again._batch.offered.indices}  # type: ignore[union-attr]
    if planned.sampling == CYCLIC:  # all records of group 3: the rate is 1
        assert drawn == set(order[3::4])
    else:
        assert drawn == set(order[30:40])


@each_plan
def test_a_batch_of_before_is_not_released_as_a_step_of_the_loaded_run(planned: cw.Plan) -> None:
    first, model = begun(planned)
    run(first, model, until=2)
    again, other = begun(planned)
    batches = iter(again.loader(data()))
    x, y = next(batches)
    with pytest.raises(CheckpointError, match="has had batches already"):
        again.load_state_dict(first.state_dict())
    again.backward(losses_of(other, x, y))
    with pytest.raises(CheckpointError, match="has had batches already"):
        again.load_state_dict(first.state_dict())
    assert again.steps_done == 0 and again.ledger.steps == 0


def test_batches_of_ones_own_that_were_gathered_before_are_not_released_either() -> None:
    planned = plan(sampling=SHUFFLED, steps=8)
    first, again = begun(planned, own_batches=True)[0], begun(planned, own_batches=True)
    first.step()
    x, y = data()[:10]
    again[0].backward(losses_of(again[1], x, y))
    with pytest.raises(CheckpointError, match="has had batches already"):
        again[0].load_state_dict(first.state_dict())


@each_plan
@pytest.mark.parametrize("order", [None, ""])
def test_a_saved_run_without_its_order_is_not_given_another(planned: cw.Plan, order: str | None) -> None:
    first = begun_until(planned, 3)
    with pytest.raises(CheckpointError, match="lost the order of its records"):
        begun(planned)[0].load_state_dict({**first.state_dict(), "order": order})


@each_plan
def test_batches_of_ones_own_are_refused(planned: cw.Plan) -> None:
    with pytest.raises(AccountingError, match=r"own_batches=True.*private\.loader"):
        begun(planned, own_batches=True)
    (event,) = planned.events
    with pytest.raises(LedgerError, match="own_batches=True"):
        decode({**encode(event), "own_batches": True})


@pytest.mark.parametrize("sampling", [CYCLIC, ORDERED, SHUFFLED])
def test_a_step_that_is_made_a_third_time_is_not_counted_as_a_later_one(sampling: Sampling, tmp_path: Path) -> None:
    private, model = begun(plan(sampling=sampling, steps=8), seed=3)
    run(private, model, until=5)
    private.save(tmp_path / "run")
    run(private, model, until=6)

    def again(scale: float) -> cw.Private:
        other = mlp(seed=1)
        resumed = cw.Private.resume(tmp_path / "run", other, sgd(other))
        run(resumed, other, until=6, scale=scale)
        return resumed

    assert [event.count for event in again(0.01).ledger.events] == [6, 1]  # a record was in step 1, and in 5 twice
    thrice = again(0.02).ledger
    assert [event.count for event in thrice.events] == [6, 2]
    # In steps 1 and 5, and in that one twice more: four times for sure, if it is drawn.
    surely = cw.Ledger([cw.GaussianSteps(cw.FullBatch(40), 1.0, 4)]).epsilon(1e-5)
    two = cw.Ledger([cw.GaussianSteps(sampling, 1.0, 6)]).epsilon(1e-5)
    assert two < thrice.epsilon(1e-5) and (sampling is CYCLIC or thrice.epsilon(1e-5) >= surely * (1 - 1e-9))


# Noise that is known -------------------------------------------------------------------------------------------------


def test_noise_does_not_outgrow_what_is_drawn_anew() -> None:
    ending = cw.Banded(8, 0.9, (1.0,) * 10 + (1e-300,) * 390)
    with pytest.raises(InvalidPlan, match="the noise of a step would grow"):
        ending.coefficients(400)
    with pytest.raises(InvalidPlan, match="the noise of a step would grow"):
        begun(plan(sampling=cw.CyclicPoisson(40, 5, 8), steps=400, correlation=ending))
    for kept in (cw.Banded(8, 0.999), cw.Banded(8, 0.0, tuple(0.97**t for t in range(400))), cw.Banded(2, 0.99)):
        impulse = np.linalg.inv(np.tril(np.array([np.roll(row(kept), j) for j in range(40)]).T))
        assert np.abs(impulse).max() < 10


def row(correlation: cw.Banded) -> Any:
    return np.concatenate([correlation.coefficients(400), np.zeros(40 - correlation.bands)])


@each_plan
def test_an_unseeded_run_takes_no_past_noise_from_a_file(planned: cw.Plan) -> None:
    known = begun_until(planned, 3, seed=1).state_dict()["noise"]
    first = begun_until(planned, 3)
    with pytest.raises(CheckpointError, match="no 'noise' that makes sense"):
        begun(planned)[0].load_state_dict({**first.state_dict(), "noise": known})


@each_plan
def test_past_noise_that_is_not_finite_is_refused(planned: cw.Plan) -> None:
    state = begun_until(planned, 3, seed=1).state_dict()
    state["noise"]["kept"][0][0][0] = torch.inf
    with pytest.raises(CheckpointError, match="not finite"):
        begun(planned, seed=1)[0].load_state_dict(state)


def test_one_seed_makes_no_two_things_of_the_same_numbers() -> None:
    """x + z / c and x + z / d tell x: of other coefficients (another scipy finds others) the numbers are others."""

    def released(correlation: Correlation, sampling: Sampling) -> Tensor:
        like = [torch.zeros(1000, dtype=torch.float64)]
        noise = GaussianNoise(like, Entropy(seed=1), None, partial(chain_of, correlation, sampling, 8))
        return noise.release([like[0].clone()], [1.0], 1.0, 0)[0]

    pairs = [(cw.Banded(4), ORDERED), (cw.SquareRoot(4), ORDERED), (cw.Tree(), SHUFFLED), (cw.Independent(), SHUFFLED)]
    made = [*(released(*pair) for pair in pairs), released(cw.Tree(), cw.Shuffled(40, 20))]
    found = np.corrcoef(np.stack([each.numpy() for each in made]))
    assert np.abs(found - np.eye(len(made))).max() < 0.2


# Files ---------------------------------------------------------------------------------------------------------------


def test_learning_rates_of_a_ledger_that_are_none_are_refused() -> None:
    written = encode(PLANS["banded"].events[0])
    for wrong in (5, "fast", [], [0.1, None], {"a": 1}):
        with pytest.raises(LedgerError):
            decode({**written, "correlation": {**written["correlation"], "learning_rates": wrong}})
