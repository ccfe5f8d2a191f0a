"""A schedule of noise: what it may be, what it costs, and that every step draws and charges the noise of its number."""

from __future__ import annotations

import copy
import json
import pickle
from dataclasses import FrozenInstanceError, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import clipwise as cw
from clipwise.accounting import GaussianSteps
from clipwise.mechanisms import Gaussian, ProjectedNorms, Rounds
from tests.core.common import N, data, losses_of, mlp, plan, same, sgd, train, weights
from tests.core.doubles import Constant, Recorder

NOISE = cw.Steps({0: 2.0, 3: 1.0})
MECHANISMS = [Gaussian(), ProjectedNorms(200), Rounds()]
GRID = 1e-3  # what is released is a multiple of about std/1024
NOISES = st.floats(0.6, 5.0)


# The value


@pytest.mark.parametrize(
    ("noise", "reason"),
    [
        ({}, "begins with step 0"),
        ({500: 1.0}, "begins with step 0"),
        ([(0, 1.0)], "begins with step 0"),
        (2.0, "begins with step 0"),
        ({0: 2.0, -1: 1.0}, "step numbers"),
        ({0: 2.0, 0.5: 1.0}, "step numbers"),
        ({0: 2.0, 5.0: 1.0}, "step numbers"),
        ({0: 2.0, True: 1.0}, "step numbers"),
        ({False: 2.0}, "step numbers"),
        ({0: 2.0, np.int64(5): 1.0}, "step numbers"),
        ({0: 2.0, "5": 1.0}, "step numbers"),
        ({0: 2.0, 5: -1.0}, "noise multiplier of step 5"),
        ({0: 2.0, 5: float("nan")}, "noise multiplier of step 5"),
        ({0: float("inf")}, "noise multiplier of step 0"),
        ({0: True}, "noise multiplier of step 0"),
        ({0: None}, "noise multiplier of step 0"),
        ({0: 2.0, 5: 0.0}, "without noise"),
        ({0: 0.0, 5: 2.0}, "without noise"),
    ],
    ids=repr,
)
def test_what_is_no_schedule_is_refused(noise: Any, reason: str) -> None:
    with pytest.raises(cw.InvalidPlan, match=reason):
        cw.Steps(noise)


def test_two_ways_to_write_one_schedule_are_equal() -> None:
    noise = cw.Steps({7: 1, 3: 1.0, 0: 2.0, 9: 1.0})
    assert noise == NOISE and hash(noise) == hash(NOISE) and repr(noise) == "Steps({0: 2.0, 3: 1.0})"
    assert plan(noise_multiplier=noise) == plan(noise_multiplier=NOISE)
    assert pickle.loads(pickle.dumps(NOISE)) == copy.deepcopy(NOISE) == NOISE
    assert cw.Steps({0: 2.0, 4: 1.0}) != NOISE


def test_nobody_can_change_it() -> None:
    given = {0: 2.0, 3: 1.0}
    noise = cw.Steps(given)
    given[0] = 0.01
    assert noise == NOISE
    with pytest.raises(TypeError):
        noise.noise[0] = 0.01  # type: ignore[index]
    with pytest.raises(FrozenInstanceError):
        noise.noise = given  # type: ignore[misc]


def test_one_value_is_that_number() -> None:
    assert plan(noise_multiplier=cw.Steps({0: 1.5})) == plan(noise_multiplier=1.5)
    nothing = plan(noise_multiplier=cw.Steps({0: 0.0, 2: 0.0}))
    assert nothing.noise_multiplier == 0 and not nothing.is_private
    assert plan(noise_multiplier=NOISE).is_private


def test_a_switch_beyond_the_last_step_is_refused() -> None:
    assert plan(steps=4, noise_multiplier=NOISE).event_at(3).noise_multiplier == 1.0
    with pytest.raises(cw.InvalidPlan, match="only 3 steps"):
        plan(steps=3, noise_multiplier=NOISE)
    with pytest.raises(cw.InvalidPlan, match=r"cw\.Steps"):
        plan(noise_multiplier={0: 2.0, 3: 1.0})


def test_a_clip_without_a_bound_is_refused() -> None:
    with pytest.raises(cw.InvalidPlan, match="does not bound"):
        plan(noise_multiplier=NOISE, clip=cw.NoClip())


@given(
    noise=st.dictionaries(st.integers(1, 40), NOISES, max_size=5),
    start=NOISES,
    first=st.integers(0, 45),
    count=st.integers(1, 20),
)
def test_stretches_are_the_steps_one_by_one(noise: dict[int, float], start: float, first: int, count: int) -> None:
    schedule = cw.Steps({0: start, **noise})
    each = [schedule.at(step) for step in range(first, first + count)]
    assert list(schedule.stretches(first, first + count)) == [(z, len(list(same))) for z, same in groupby(each)]
    assert all(z == {0: start, **noise}[max(k for k in {0, *noise} if k <= s)] for s, z in enumerate(each, first))


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=repr)
def test_a_plan_with_it_survives_json(mechanism: Any) -> None:
    p = plan(noise_multiplier=NOISE, mechanism=mechanism)
    again = cw.Plan.from_dict(json.loads(json.dumps(p.to_dict())))
    assert again == p and again.noise_multiplier == NOISE and again.to_dict() == p.to_dict()
    edited = json.loads(json.dumps(p.to_dict()))
    edited["noise_multiplier"]["noise"]["items"][0][0] = "0"
    with pytest.raises(cw.InvalidPlan, match="step 0"):
        cw.Plan.from_dict(edited)


@pytest.mark.parametrize(
    "items", [[[0, 2.0], [0, 0.01]], [[[0], 2.0]], [[0]], [0], None, [["0", 2.0]], [[0.0, 2.0]], [[True, 2.0]], []]
)
def test_a_damaged_schedule_is_refused(items: Any) -> None:
    record = plan(noise_multiplier=NOISE).to_dict()
    record["noise_multiplier"]["noise"]["items"] = items
    with pytest.raises(cw.InvalidPlan):
        cw.Plan.from_dict(record)


# What it costs


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=repr)
@pytest.mark.parametrize("accountant", ["exact", "rdp"])
def test_the_order_of_the_stretches_does_not_matter(mechanism: Any, accountant: str) -> None:
    """Two of the events are equal, and still two."""
    apart = plan(steps=9, noise_multiplier=cw.Steps({0: 4.0, 3: 3.0, 6: 4.0}), mechanism=mechanism)
    together = replace(apart, noise_multiplier=cw.Steps({0: 4.0, 6: 3.0}))
    assert apart.events[0] == apart.events[2]
    assert apart.epsilon(1e-4, accountant) == pytest.approx(together.epsilon(1e-4, accountant), rel=1e-9)


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=repr)
def test_it_is_the_composition_of_its_stretches(mechanism: Any) -> None:
    p = plan(noise_multiplier=cw.Steps({0: 4.0, 4: 3.0}), steps=10, mechanism=mechanism)
    stretches = (mechanism.event(p.sampling, 4.0, 4), mechanism.event(p.sampling, 3.0, 6))
    assert p.events == stretches
    one_by_one = cw.Ledger([mechanism.event(p.sampling, 4.0 if step < 4 else 3.0, 1) for step in range(10)])
    assert one_by_one.events == p.events and p.epsilon(1e-3) == one_by_one.epsilon(1e-3)
    low, high = (replace(p, noise_multiplier=z).epsilon(1e-3) for z in (4.0, 3.0))
    assert low < p.epsilon(1e-3) < high


@settings(max_examples=12)
@given(a=NOISES, b=NOISES, switch=st.integers(1, 29), sampling=st.sampled_from([cw.Poisson(200, 10), cw.FullBatch(99)]))
def test_epsilon_lies_between_that_of_its_extremes(a: float, b: float, switch: int, sampling: Any) -> None:
    p = plan(sampling=sampling, steps=30, noise_multiplier=cw.Steps({0: a, switch: b}))
    low, high = (replace(p, noise_multiplier=z).epsilon(1e-4, "rdp") for z in (max(a, b), min(a, b)))
    assert low * (1 - 1e-9) <= p.epsilon(1e-4, "rdp") <= high * (1 + 1e-9)
    both = [GaussianSteps(sampling, a, switch), GaussianSteps(sampling, b, 30 - switch)]
    assert p.epsilon(1e-4, "rdp") == cw.Ledger(both).epsilon(1e-4, "rdp")
    assert replace(p, noise_multiplier=cw.Steps({0: a})).epsilon(1e-4, "rdp") == replace(p, noise_multiplier=a).epsilon(
        1e-4, "rdp"
    )


def test_a_switch_in_the_middle_of_an_epoch_never_costs_less() -> None:
    """A record can be in the second stretch once more than that has whole epochs."""
    p = plan(sampling=cw.Shuffled(100, 10), steps=24, noise_multiplier=cw.Steps({0: 50.0, 9: 5.0}))
    # Of the 15 steps from step 9 on a record may be in three: step 9, one of 10 to 19, one of 20 to 23.
    assert p.epsilon(1e-4) >= cw.Ledger([GaussianSteps(cw.FullBatch(100), 5.0, 3)]).epsilon(1e-4)


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=repr)
def test_calibrate_scales_the_whole_schedule(mechanism: Any) -> None:
    shape = plan(sampling=cw.FullBatch(200), noise_multiplier=cw.Steps({0: 3.0, 2: 1.0, 4: 2.0}), mechanism=mechanism)
    found = shape.calibrate(2.0, 1e-4)
    assert 0.998 * 2.0 < found.epsilon(1e-4) <= 2.0
    assert isinstance(found.noise_multiplier, cw.Steps)
    values = found.noise_multiplier.noise
    assert list(values) == [0, 2, 4]
    assert values[0] / values[2] == pytest.approx(3.0, rel=1e-12)
    assert values[4] / values[2] == pytest.approx(2.0, rel=1e-12)
    seven_times = replace(shape, noise_multiplier=cw.Steps({0: 21.0, 2: 7.0, 4: 14.0})).calibrate(2.0, 1e-4)
    assert seven_times.noise_multiplier.at(2) == pytest.approx(values[2], rel=1e-3)  # type: ignore[union-attr]


# The run: what is drawn is what is charged


def drawn(private: cw.Private, recorder: Recorder, losses: Any = None) -> list[float]:
    """The noise multipliers of the steps made so far, read off gradients of losses that are zero."""
    return [float(seen[0].flatten()[0]) * private.plan.denominator for seen in recorder.seen]


def charged(ledger: cw.Ledger) -> list[float]:
    return [event.noise_multiplier for event in ledger.events for _ in range(event.count)]


@pytest.mark.parametrize("physical", [None, 1, 3])
@pytest.mark.parametrize("style", [cw.Abadi(1.0), cw.MixUp(cw.Abadi(1.0), cw.Abadi(1.0), switch_at=2)], ids=repr)
def test_every_step_draws_the_noise_that_it_is_charged(physical: int | None, style: Any) -> None:
    """Empty batches and physical batches on both sides of the switch included."""
    model, recorder = mlp(), None
    recorder = Recorder(model.parameters())
    p = plan(noise_multiplier=cw.Steps({0: 2.0, 3: 1.0, 5: 4.0}), steps=8, clip=style, sampling=cw.Poisson(N, 2))
    private = cw.Private(p, model, recorder, seed=1, noise=Constant(1.0))
    sizes: list[int] = []
    for x, y in private.loader(data(), physical_batch_size=physical):
        sizes.append(len(x))
        private.step(losses_of(model, x, y) * 0)
    assert drawn(private, recorder) == pytest.approx([2.0] * 3 + [1.0] * 2 + [4.0] * 3, rel=GRID)
    assert charged(private.ledger) == [2.0] * 3 + [1.0] * 2 + [4.0] * 3
    assert private.ledger.events == p.events
    if physical is None:
        assert len(sizes) < 8  # some steps had an empty batch


def test_release_and_own_batches_draw_what_they_charge() -> None:
    model = mlp()
    recorder = Recorder(model.parameters())
    p = plan(noise_multiplier=NOISE, sampling=cw.FullBatch(N), steps=5)
    private = cw.Private(p, model, recorder, own_batches=True, noise=Constant(1.0))
    x, y = data().tensors
    seen = []
    for step in range(5):
        for part in (slice(0, 15), slice(15, N)):
            private.backward(losses_of(model, x[part], y[part]) * 0)
        if step % 2:
            private.step()
            continue
        assert private.release()
        seen.append(float(next(model.parameters()).grad.flatten()[0]) * N)  # type: ignore[union-attr]
        recorder.zero_grad()
    assert seen == pytest.approx([2.0, 2.0, 1.0], rel=GRID)
    assert drawn(private, recorder) == pytest.approx([2.0, 1.0], rel=GRID)
    assert charged(private.ledger) == [2.0, 2.0, 2.0, 1.0, 1.0]
    assert all(event.own_batches for event in private.ledger.events)  # type: ignore[union-attr]
    with pytest.raises(cw.BudgetSpent):
        private.backward(losses_of(model, x, y))


def begin(seed: int | None, p: cw.Plan) -> tuple[torch.nn.Module, Recorder, cw.Private]:
    model = mlp()
    recorder = Recorder(model.parameters())
    return model, recorder, cw.Private(p, model, recorder, seed=seed, noise=Constant(1.0))


def go(private: cw.Private, model: torch.nn.Module, steps: int) -> None:
    end = private.steps_done + steps
    for x, y in private.loader(data()):
        private.step(losses_of(model, x, y) * 0)
        if private.steps_done >= end:
            return


@pytest.mark.parametrize("saved", range(1, 6))
@pytest.mark.parametrize("lost", [0, 1, 2, 3])
def test_interrupted_steps_are_charged_with_the_noise_of_their_numbers(saved: int, lost: int, tmp_path: Path) -> None:
    """Saved before, at or after the switch at 3, and dead some steps later."""
    p = plan(noise_multiplier=NOISE, steps=9, sampling=cw.FullBatch(N))
    model, _, private = begin(None, p)
    go(private, model, saved)
    private.save(tmp_path / "run")
    if lost:
        go(private, model, lost)
    model = mlp()
    recorder = Recorder(model.parameters())
    again = cw.Private.resume(tmp_path / "run", model, recorder, noise=Constant(1.0))
    numbers = range(saved, saved + lost)
    interrupted = [e for e in again.ledger.events if e.reason == "interrupted"]
    assert [(e.noise_multiplier, e.count) for e in interrupted] == [
        (z, len(list(each))) for z, each in groupby(NOISE.at(step) for step in numbers)
    ]
    go(again, model, 9)
    assert charged(again.ledger) == [NOISE.at(step) for step in range(9)]
    assert drawn(again, recorder) == pytest.approx([NOISE.at(step) for step in range(saved + lost, 9)], rel=GRID)


@pytest.mark.parametrize("stop", range(1, 6))
def test_a_seeded_run_resumes_bit_for_bit_across_the_switch(stop: int, tmp_path: Path) -> None:
    p = plan(noise_multiplier=NOISE)
    model = mlp()
    train(cw.Private(p, model, sgd(model), seed=2), model, data())
    expected = weights(model)
    model = mlp()
    private = cw.Private(p, model, sgd(model), seed=2)
    go_on = iter(private.loader(data()))
    while private.steps_done < stop:
        x, y = next(go_on)
        private.step(losses_of(model, x, y))
    private.save(tmp_path / "run")
    model = mlp(seed=9)
    resumed = cw.Private.resume(tmp_path / "run", model, sgd(model))
    train(resumed, model, data())
    assert same(expected, weights(model)) and resumed.ledger.events == p.events


def test_a_repeated_step_with_other_sums_is_charged_with_its_own_noise(tmp_path: Path) -> None:
    p = plan(noise_multiplier=NOISE, sampling=cw.FullBatch(N))
    x, y = data().tensors

    def step(private: cw.Private, model: torch.nn.Module, scale: float) -> None:
        private.step(losses_of(model, x, y) * scale)

    model = mlp()
    private = cw.Private(p, model, sgd(model), seed=2, own_batches=True)
    for _ in range(2):
        step(private, model, 1.0)
    private.save(tmp_path / "run")
    for _ in range(2):
        step(private, model, 1.0)
    model = mlp()
    again = cw.Private.resume(tmp_path / "run", model, sgd(model))
    step(again, model, 1.0)
    step(again, model, 0.5)  # step 3, with other sums than before
    assert [(e.reason, e.noise_multiplier, e.count) for e in again.ledger.events] == [
        ("training", 2.0, 3),
        ("training", 1.0, 1),
        ("repeated", 1.0, 1),
    ]


def test_a_run_with_another_schedule_is_refused(tmp_path: Path) -> None:
    p = plan(noise_multiplier=NOISE)
    model, _, private = begin(3, p)
    go(private, model, 2)
    saved = private.state_dict()
    for other in (cw.Steps({0: 2.0, 4: 1.0}), cw.Steps({0: 2.0, 3: 1.1}), 2.0):
        with pytest.raises(cw.CheckpointError, match="another plan"):
            begin(3, replace(p, noise_multiplier=other))[2].load_state_dict(saved)
    begin(3, p)[2].load_state_dict(saved)
    private.save(tmp_path / "run")
    model = mlp()
    with pytest.raises(cw.CheckpointError, match="another plan"):
        cw.Private.resume(tmp_path / "run", model, sgd(model), plan=replace(p, noise_multiplier=2.0))


def test_other_schedules_of_a_seed_share_no_noise() -> None:
    first = {}
    for switch in (3, 4):
        model = mlp()
        recorder = Recorder(model.parameters())
        private = cw.Private(plan(noise_multiplier=cw.Steps({0: 2.0, switch: 1.0})), model, recorder, seed=5)
        for x, y in private.loader(data()):
            private.step(losses_of(model, x, y) * 0)
            break
        first[switch] = recorder.seen[0][0]
    assert not torch.equal(first[3], first[4])


# Elsewhere


def test_estimated_norms_draw_what_they_charge() -> None:
    p = plan(noise_multiplier=cw.Steps({0: 60.0, 2: 30.0}), steps=4, mechanism=ProjectedNorms(200))
    model = mlp()
    recorder = Recorder(model.parameters())
    private = cw.Private(p, model, recorder, loss_fn=lambda m, b: losses_of(m, *b) * 0, seed=0, noise=Constant(1.0))
    for batch in private.loader(data()):
        private.step(private.losses(batch))
    assert drawn(private, recorder) == pytest.approx([60.0, 60.0, 30.0, 30.0], rel=GRID)
    assert private.ledger.events == p.events
    vacuous = replace(p, noise_multiplier=cw.Steps({0: 60.0, 2: 0.02}))
    with pytest.raises(cw.InvalidPlan, match=r"Steps\(\{0: 60.0, 2: 0.02\}\): epsilon is"):
        cw.Private(vacuous, model, recorder, loss_fn=lambda m, b: losses_of(m, *b))


@pytest.mark.parametrize("clip", [cw.Abadi(1.0), cw.AdaptiveClip(1.0)], ids=["fixed", "adaptive"])
@pytest.mark.parametrize("lost", [0, 2])
def test_rounds_draw_what_they_charge(clip: Any, lost: int, tmp_path: Path) -> None:
    p = plan(noise_multiplier=NOISE, clip=clip, sampling=cw.FullBatch(4), mechanism=Rounds(weight_cap=3.0))
    model = torch.nn.Linear(2, 1, bias=False)
    server = cw.federated.Server(p, model, noise=Constant(1.0))
    seen = []

    def round_of(server: cw.federated.Server) -> None:
        bound = server.style.sensitivity(1)
        server.open(range(4))
        update = server.close([])["weight"].flatten()[0]
        seen.append(float(update) * p.denominator / 3.0 / bound)

    for _ in range(2):
        round_of(server)
    server.save(tmp_path / "run", model)
    for _ in range(lost):
        round_of(server)
    del seen[2:]
    server = cw.federated.Server(p, model, noise=Constant(1.0))
    server.resume(tmp_path / "run", model)
    while server.rounds_done < p.steps:
        round_of(server)
    expected = [NOISE.at(k) if clip == cw.Abadi(1.0) else clip.split(NOISE.at(k))[0] for k in range(6)]
    assert seen == pytest.approx(expected[:2] + expected[2 + lost :], rel=GRID)
    assert charged(server.ledger) == [NOISE.at(k) for k in range(6)]


def test_a_chain_has_one_temperature() -> None:
    """Its noise is that of its temperature, and cannot be given."""
    with pytest.raises(TypeError):
        cw.optim.Langevin(cw.FullBatch(10), 6, cw.Abadi(1.0), 0.01, noise_multiplier=NOISE)  # type: ignore[call-arg]
