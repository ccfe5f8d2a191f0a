"""Selection, noise, ledger, and rounds that go on whatever some users do.

Runs that are saved and resumed: what must not be forgotten, and who may go on.
"""

from __future__ import annotations

import gc
import logging
import math
import os
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import clipwise as cw
from clipwise.accounting import FederatedRounds
from clipwise.entropy import Entropy
from clipwise.federated import LocalTraining, Reply, Server, Task, apply, clip_update, run, select, shorten
from tests.core.common import refused_elsewhere
from tests.federated.common import federated_plan, flat, loss_fn, make_model, make_users


def make_plan(**changes: Any) -> cw.Plan:
    settings: dict[str, Any] = dict(sampling=cw.Poisson(20, 5), steps=3, clip=cw.Abadi(1.0), noise_multiplier=1.0)
    return federated_plan(**{**settings, **changes})


def zeros_like(model: nn.Module) -> dict[str, Tensor]:
    return {name: torch.zeros_like(p) for name, p in model.named_parameters()}


# Selection


def test_participation_is_independent_coins() -> None:
    """Counts of a round are binomial, and so is how often each user and each pair of users takes part."""
    users, rate, rounds = 30, 0.2, 3_000
    taken = torch.zeros(rounds, users)
    for number in range(rounds):
        taken[number, list(select(range(users), rate, Entropy(5), number))] = 1
    counts = taken.sum(dim=1).long()
    expected = stats.binom(users, rate).pmf(range(users + 1)) * rounds
    seen = torch.bincount(counts, minlength=users + 1).numpy()
    wide = expected > 5
    pooled = [*seen[wide], seen[~wide].sum()], [*expected[wide], expected[~wide].sum()]
    assert stats.chisquare(*pooled).pvalue > 1e-3
    for user in range(users):
        assert stats.binomtest(int(taken[:, user].sum()), rounds, rate).pvalue > 1e-3 / users
    pairs = taken.T @ taken
    for a in range(users):
        for b in range(a):
            assert stats.binomtest(int(pairs[a, b]), rounds, rate**2).pvalue > 1e-3 / users**2


def test_selection_without_seed_is_fresh() -> None:
    assert select(range(200), 0.5, Entropy(), 0) != select(range(200), 0.5, Entropy(), 0)


def test_a_round_with_nobody_is_noise_and_is_charged() -> None:
    plan = make_plan(sampling=cw.Poisson(1_000_000, 1), steps=1)
    model = make_model()
    server = Server(plan, model, seed=0)
    assert server.open([1, 2, 3]).selected == ()
    update = server.close([])
    assert server.ledger.events == (FederatedRounds(plan.sampling, 1.0, 1),)
    assert all(float(t.abs().min()) > 0 for t in update.values())


def test_users_may_come_and_go_but_not_twice() -> None:
    server = Server(make_plan(sampling=cw.FullBatch(20)), make_model())
    assert server.open([4, 9]).selected == (4, 9)
    with pytest.raises(cw.InvalidSampling, match="twice"):
        server.open([4, 9, 4])


@pytest.mark.parametrize(
    "sampling",
    [cw.FixedSize(20, 5), cw.Shuffled(20, 5), cw.BallsInBins(20, 5), cw.Poisson(20, 5, max_batch_size=7)],
    ids=repr,
)
def test_other_samplings_are_refused(sampling: object) -> None:
    with pytest.raises(cw.InvalidSampling, match="fraction_train"):
        make_plan(sampling=sampling)


def test_a_bare_rate_is_refused() -> None:
    with pytest.raises(cw.InvalidPlan, match="A bare rate"):
        make_plan(sampling=0.25)


# Noise


@pytest.mark.parametrize(
    ("clip", "expected"),
    [
        (cw.Abadi(0.5), [0.5, 0.5]),
        (cw.GlobalScaled(R=0.5, Z=9.0), [0.5, 0.5]),
        (cw.Layerwise(cw.Abadi(0.5)), [math.sqrt(0.5)] * 2),
        (cw.Layerwise({"0": cw.Abadi(0.1), "1": cw.Abadi(2.0)}, noise="per_layer"), [0.1 * 2**0.5, 2.0 * 2**0.5]),
    ],
    ids=repr,
)
def test_noise_has_the_accounted_size(clip: Any, expected: list[float]) -> None:
    """Its standard deviation on the mean is sigma * w_max * R / (q W)."""
    model = nn.Sequential(nn.Linear(60, 60), nn.Linear(60, 60))
    plan = make_plan(clip=clip, noise_multiplier=1.5, weight_cap=4.0, total_weight=50.0)
    server = Server(plan, model, seed=1)
    server.open(range(20))
    update = server.close([])
    for layer, R in enumerate(expected):
        std = torch.cat([update[f"{layer}.weight"].flatten(), update[f"{layer}.bias"]]).std()
        assert float(std) == pytest.approx(1.5 * 4.0 * R / (0.25 * 50.0), rel=0.06)


def test_schedule_clips_and_noises_with_the_same_norm() -> None:
    clip = cw.MixUp(small=cw.Abadi(0.1), large=cw.Abadi(10.0), switch_at=1)
    plan = make_plan(clip=clip, sampling=cw.FullBatch(1), steps=2)
    model = nn.Linear(100, 100)
    for R, number in ((0.1, 0), (10.0, 1)):
        server = Server(plan, model, seed=1)
        for _ in range(number + 1):
            server.open([0])
            update = server.close([])
        assert float(update["weight"].std()) == pytest.approx(R, rel=0.05)


def test_rounds_have_noise_of_their_own() -> None:
    server = Server(make_plan(), make_model(), seed=2)
    drawn = []
    for _ in range(3):
        server.open(range(20))
        drawn.append(server.close([])["0.weight"])
    assert not torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[1], drawn[2])


def test_adaptive_norm_is_one_release_of_the_planned_noise() -> None:
    """Andrew et al. (2021), Theorem 1: z_update = (z^-2 - (2 sigma_b)^-2)^(-1/2); their joint multiplier is z."""
    clip = cw.AdaptiveClip(R=0.7, share=0.05)
    z_update, sigma_b = clip.split(1.3)
    assert z_update == pytest.approx((1.3**-2 - (2 * sigma_b) ** -2) ** -0.5, rel=1e-12)

    model = nn.Linear(100, 100)
    plan = make_plan(clip=clip, noise_multiplier=1.3, sampling=cw.Poisson(20, 5), steps=400)
    server = Server(plan, model, seed=3)
    server.open(range(20))
    assert float(server.close([])["weight"].std()) == pytest.approx(z_update * 0.7 / 5, rel=0.05)
    assert server.ledger.events == (FederatedRounds(plan.sampling, 1.3, 1),)

    small = nn.Linear(1, 1)
    server = Server(plan, small, seed=3)
    logs = [math.log(0.7)]
    while server.rounds_done < plan.steps:
        server.open(range(20))
        server.close([])
        assert server.last is not None and server.last.bound is not None
        logs.append(math.log(server.last.bound))
    moves = torch.tensor(logs).diff() / -0.2 + 0.5  # the noisy share within: 1/2 without replies
    assert float(moves.std()) == pytest.approx(sigma_b / 5, rel=0.15)
    assert float(moves.mean()) == pytest.approx(0.5, abs=4 * sigma_b / 5 / 20)


def test_adaptive_norm_moves_by_the_share_of_expected_users_that_were_within() -> None:
    """Without noise: 1/2 + (two within - one beyond) / 2 / 5 expected users, whatever the weights."""
    clip = cw.AdaptiveClip(R=0.7, quantile=0.3, learning_rate=0.4)
    sampling, model = cw.Poisson(rate=1.0, batch_size=5), nn.Linear(1, 1, bias=False)
    server = Server(make_plan(clip=clip, sampling=sampling, noise_multiplier=0.0, weight_cap=3.0), model)
    assert server.bound == 0.7
    opened = server.open(range(4))
    assert opened.asks_within and opened.style == cw.Flat(cw.Abadi(0.7))
    replies = [Reply({"weight": torch.full((1, 1), 0.1)}, 2.0, within) for within in (True, False, True, None)]
    update = server.close(enumerate(replies))
    assert float(update["weight"]) == pytest.approx(4 * 2.0 * 0.1 / 15.0, rel=1e-6)
    bound = 0.7 * math.exp(-0.4 * (0.5 + 0.5 / 5 - 0.3))
    assert server.bound == pytest.approx(bound, rel=1e-12) and server.last is not None
    assert server.last.bound == server.bound and server.style == cw.Flat(cw.Abadi(server.bound))
    again = Server(server.plan, model)
    again.load_state_dict(server.state_dict())
    assert again.bound == server.bound == again.open(range(4)).style.sensitivity(1)


@pytest.mark.slow
def test_adaptive_norm_finds_the_quantile() -> None:
    lengths = torch.linspace(0.1, 10.0, 50, dtype=torch.float64)
    model = nn.Linear(1, 1, bias=False).double()
    clip = cw.AdaptiveClip(R=0.1, quantile=0.8, learning_rate=0.3, share=0.05)
    server = Server(make_plan(clip=clip, sampling=cw.FullBatch(50), steps=150, noise_multiplier=0.5), model, seed=0)
    while server.rounds_done < 150:
        R = server.open(range(50)).style.sensitivity(1)
        sent = [
            (k, Reply({"weight": lengths[k : k + 1, None].clamp(max=R)}, 1, bool(lengths[k] <= R))) for k in range(50)
        ]
        server.close(sent)
    assert server.last is not None and server.last.bound == pytest.approx(8.0, rel=0.1)


@pytest.mark.parametrize(
    "change", [dict(R=0.0), dict(quantile=1.0), dict(share=0.0), dict(share=1.0), dict(learning_rate=0.0)], ids=str
)
def test_adaptive_settings_that_make_no_sense_are_refused(change: dict[str, float]) -> None:
    with pytest.raises(cw.InvalidPlan):
        cw.AdaptiveClip(**{"R": 1.0, **change})


# The ledger


def test_the_round_is_on_the_ledger_before_its_noise_is_drawn() -> None:
    seen = []

    class Watch:
        def fill_(self, buffer: Tensor, entropy: Entropy, step: int, piece: int) -> None:
            seen.append(server.ledger.steps)
            raise RuntimeError("no noise today")

    server = Server(make_plan(), make_model(), noise=Watch())
    server.open(range(20))
    with pytest.raises(RuntimeError, match="no noise today"):
        server.close([])
    assert seen == [1] and server.ledger.steps == 1 and server.rounds_done == 1
    with pytest.raises(cw.InvalidSampling, match="no round is open"):
        server.close([])


def test_after_the_last_round_nothing_is_released() -> None:
    plan, model = make_plan(), make_model()
    server = Server(plan, model)
    for _ in range(3):
        server.open(range(20))
        server.close([])
    with pytest.raises(cw.BudgetSpent):
        server.open(range(20))
    assert server.epsilon(1e-3) == plan.epsilon(1e-3) and server.ledger.guarantee(1e-3).unit == "client"


def test_plan_is_calibrated_for_users() -> None:
    plan = make_plan(noise_multiplier=None, sampling=cw.Poisson(1_000, 50), steps=50).calibrate(2.0, 1e-4)
    assert 0.998 * 2.0 < plan.epsilon(1e-4) <= 2.0
    assert plan.epsilon(1e-4) == cw.epsilon(plan.noise_multiplier or 0.0, cw.Poisson(1_000, 50), 50, 1e-4)
    assert plan.epsilon(1e-4, relation="replace_one") > 2.0


@pytest.mark.parametrize("users", [20, 19, 3])
@pytest.mark.parametrize("clip", [cw.Abadi(1.0), cw.AdaptiveClip(1.0, 0.5)])
def test_with_a_public_rate_any_number_of_users_runs_the_same_rounds(users: int, clip: Any) -> None:
    plan = make_plan(sampling=cw.Poisson(rate=0.25, batch_size=5), clip=clip, weight_cap=2.0)
    assert plan.sampling.sample_size is None and plan.denominator == 10.0 and plan.batch_size == 5
    assert (plan.denominator, plan.batch_size) == (make_plan(weight_cap=2.0).denominator, make_plan().batch_size)
    model = make_model()
    server = Server(plan, model, seed=1)
    assert server.rate == 0.25
    work = LocalTraining(loss_fn, partial(torch.optim.SGD, lr=0.1))
    assert len(list(run(server, model, make_users(users), work))) == 3
    guarantee = server.ledger.guarantee(1e-3)
    assert guarantee.relation == "add_remove" and "adding or removing one client" in guarantee.statement()
    assert make_plan().epsilon(1e-3) == plan.epsilon(1e-3)
    with pytest.raises(cw.AccountingError, match="rate="):
        make_plan().epsilon(1e-3, relation="add_remove")


@pytest.mark.parametrize(
    "change",
    [
        dict(steps=0), dict(steps=2.0), dict(weight_cap=0.0), dict(weight_cap=math.inf), dict(total_weight=-1.0),
        dict(total_weight=1e-300), dict(noise_multiplier=-1.0), dict(clip=cw.NoClip()),
        dict(clip=cw.BatchClip(1.0), noise_multiplier=0.0),
    ],
    ids=str,
)  # fmt: skip
def test_plans_that_make_no_sense_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(cw.InvalidPlan):
        make_plan(**change)


def test_a_server_needs_noise_and_a_model_without_gathered_statistics() -> None:
    with pytest.raises(cw.InvalidPlan, match="calibrate"):
        Server(make_plan(noise_multiplier=None), make_model())
    with pytest.raises(cw.InvalidPlan, match="GroupNorm"):
        Server(make_plan(), nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    with pytest.raises(cw.InvalidPlan, match="no trainable"):
        Server(make_plan(), nn.Linear(1, 1).requires_grad_(False))
    for norm in (nn.BatchNorm1d(2).eval(), nn.BatchNorm1d(2, track_running_stats=False)):
        assert Server(make_plan(), nn.Sequential(nn.Linear(2, 2), norm)).parameters[-1] == "1.bias"
    for nothing in (None, "plan", 3.0):
        with pytest.raises(cw.InvalidPlan, match="plan must be a clipwise"):
            Server(nothing, make_model())  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_updates_are_added_up_in_at_least_float32(dtype: torch.dtype) -> None:
    model = nn.Linear(1, 1, bias=False).to(dtype)
    server = Server(make_plan(sampling=cw.FullBatch(2), noise_multiplier=0.0), model)
    server.open([0, 1])
    update = server.close([(k, Reply({"weight": torch.full((1, 1), 0.3, dtype=dtype)}, 1)) for k in range(2)])
    assert update["weight"].dtype == torch.promote_types(dtype, torch.float32)
    apply(model, update)
    assert model.weight.dtype == dtype


def test_a_seeded_run_begins_with_the_values_that_the_model_has_when_its_server_is_made() -> None:
    released = []
    for later in (0.0, 1.0):
        model = make_model()
        server = Server(make_plan(), model, seed=3)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(later)
        server.open(range(20))
        released.append(server.close([])["0.weight"])
    assert torch.equal(*released)


def test_a_saved_run_goes_on_as_if_not_interrupted() -> None:
    plan = make_plan(clip=cw.AdaptiveClip(R=0.1), steps=4)
    users = make_users(20)
    work = LocalTraining(loss_fn, partial(torch.optim.SGD, lr=0.1), seed=1)
    whole, parts = make_model(), make_model()
    list(run(Server(plan, whole, seed=1), whole, users, work))

    first = Server(plan, parts, seed=1)
    rounds = run(first, parts, users, work)
    next(rounds), next(rounds)
    saved = first.state_dict()
    second = Server(plan, parts, seed=1)
    second.load_state_dict(saved)
    assert [report.number for report in run(second, parts, users, work)] == [2, 3]
    assert torch.equal(flat(whole), flat(parts)) and second.ledger.steps == 4
    with pytest.raises(cw.CheckpointError, match="another plan"):
        Server(make_plan(), parts, seed=1).load_state_dict(saved)
    with pytest.raises(cw.CheckpointError, match="another seed"):
        Server(plan, parts).load_state_dict(saved)
    with pytest.raises(cw.CheckpointError, match="4 rounds already"):
        second.load_state_dict(saved)


@pytest.mark.parametrize("seed", [None, 1])
def test_rounds_after_the_last_save_stay_charged(seed: int | None, tmp_path: Path) -> None:
    """A process dies after round 4 of 5, saved after round 2."""
    plan, users = make_plan(steps=5, clip=cw.AdaptiveClip(R=0.1)), make_users(20)
    work = LocalTraining(loss_fn, partial(torch.optim.SGD, lr=0.1), seed=1)

    def begin() -> tuple[nn.Module, torch.optim.Optimizer, Server]:
        model = make_model()
        return model, torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9), Server(plan, model, seed=seed)

    model, optimizer, server = begin()
    for report in run(server, model, users, work, optimizer):
        if report.number == 1:
            server.save(tmp_path / "run", model, optimizer, extra={"note": "after two"})
        if report.number == 3:
            break
    if seed is not None:
        whole, with_momentum, uninterrupted = begin()
        list(run(uninterrupted, whole, users, work, with_momentum))

    model, optimizer, server = begin()
    assert server.resume(tmp_path / "run", model, optimizer) == {"note": "after two"}
    done = [report.number for report in run(server, model, users, work, optimizer)]
    counts = {event.reason: event.count for event in server.ledger.events}
    assert server.epsilon(1e-3) == plan.epsilon(1e-3)
    if seed is None:
        assert done == [4] and counts == {"federated": 1, "interrupted": 2} and server.ledger.steps == 5
    else:
        assert done == [2, 3, 4] and counts == {"federated": 5}
        assert torch.equal(flat(model), flat(whole))


def test_saved_files_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    model, plan = make_model(), make_plan()
    server = Server(plan, model)
    server.save(tmp_path / "first", model)
    server.save(tmp_path / "second", model)
    with pytest.raises(cw.CheckpointError, match="replaced by a later"):
        Server(plan, model).resume(tmp_path / "first", model)
    with pytest.raises(cw.CheckpointError, match="without an optimizer"):
        Server(plan, model).resume(tmp_path / "second", model, torch.optim.SGD(model.parameters(), lr=1.0))
    with pytest.raises(cw.CheckpointError, match="does not fit this model"):
        Server(plan, model).resume(tmp_path / "second", nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    private = cw.Private(cw.Plan(cw.FullBatch(2), 1, cw.Abadi(1.0), 1.0), model, optimizer)
    private.save(tmp_path / "other")
    with pytest.raises(cw.CheckpointError, match="has no 'federated'"):
        Server(plan, model).resume(tmp_path / "other", model)


def test_a_saved_state_that_is_not_of_this_run_is_refused() -> None:
    model, fixed, adaptive = make_model(), make_plan(), make_plan(clip=cw.AdaptiveClip(R=0.1))
    saved = Server(adaptive, model).state_dict()
    assert saved["version"] == 3 and saved["bound"] == 0.1
    for bound in (0.0, -1.0, math.inf, "0.1", None):
        with pytest.raises(cw.CheckpointError):
            Server(adaptive, model).load_state_dict({**saved, "bound": bound})
    with pytest.raises(cw.CheckpointError, match="whether its norm adapts"):
        Server(fixed, model).load_state_dict({**Server(fixed, model).state_dict(), "bound": 0.1})
    for version in (2, 4):
        with pytest.raises(cw.CheckpointError, match="version"):
            Server(adaptive, model).load_state_dict({**saved, "version": version})


def test_no_ledger_is_lost_by_a_resume() -> None:
    """One that was given, though it is empty, and one on which something was recorded."""
    model, plan = make_model(), make_plan()
    saved = Server(plan, model).state_dict()
    given, used = Server(plan, model, ledger=cw.Ledger()), Server(plan, model)
    used.ledger.record(FederatedRounds(cw.Poisson(20, 5), 1.0, 1, "earlier"))
    for server in (given, used):
        with pytest.raises(cw.CheckpointError, match="its own ledger"):
            server.load_state_dict(saved)


def test_an_update_leaves_no_gradients_behind() -> None:
    model = make_model()
    apply(
        model,
        {name: torch.ones_like(p) for name, p in model.named_parameters()},
        torch.optim.SGD(model.parameters(), 1.0),
    )
    assert all(p.grad is None for p in model.parameters())
    torch.testing.assert_close(flat(model), flat(make_model()) + 1)


def test_the_servers_optimizer_must_know_the_parameters() -> None:
    model = make_model()
    with pytest.raises(cw.InvalidPlan, match="lacks parameters of the model"):
        apply(model, zeros_like(model), torch.optim.SGD(list(model.parameters())[:2], lr=1.0))


# Users that misbehave

GOOD = 0.25


class Unreadable(dict[str, Tensor]):
    """An update that fails when it is looked at."""

    def __getitem__(self, name: str) -> Tensor:
        raise MemoryError(name)


def misbehave(how: str, task: Task) -> Any:
    good = {name: torch.full_like(t, GOOD) for name, t in task.weights.items()}
    bad = dict(good)
    if how == "raises":
        raise OSError("disk on fire")
    if how == "nan":
        bad["weight"] = torch.full((1, 1), math.nan)
    elif how == "infinite":
        bad["weight"] = torch.full((1, 1), math.inf)
    elif how == "shape":
        bad["weight"] = torch.ones(2, 3)
    elif how == "missing":
        del bad["bias"]
    elif how == "huge":
        bad["weight"] = torch.full((1, 1), 1e30)
    elif how == "nothing":
        return None
    elif how == "no data":
        bad["weight"] = torch.ones(1, 1, device="meta")
    elif how == "unreadable":
        return Reply(Unreadable(good), 1.0)
    return Reply(bad, {"weight": -3.0, "heavy": 1e9}.get(how, 1.0))


EXPECTED = {
    "raises": "disk on fire", "nan": "not finite", "infinite": "not finite", "shape": r"shape \(2, 3\)",
    "missing": "missing \\['bias'\\]", "nothing": "NoneType", "weight": "the weight must be",
    "no data": "cannot be read: NotImplementedError", "unreadable": "cannot be read: MemoryError",
}  # fmt: skip


@pytest.mark.parametrize("how", [*EXPECTED, "huge", "heavy"])
def test_the_round_goes_on_without_a_bad_user(how: str, caplog: pytest.LogCaptureFixture) -> None:
    """Four users, one of them bad: the other three count as they do without it, and the log says what happened."""
    plan = make_plan(sampling=cw.FullBatch(4), clip=cw.Abadi(1.0), noise_multiplier=0.0, steps=2, weight_cap=1.0)
    model = nn.Linear(1, 1)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}

    def work(bench: nn.Module, dataset: Dataset[Any], task: Task) -> Any:
        return misbehave(how if task.user == 2 else "good", task)

    server = Server(plan, model)
    users = [TensorDataset(torch.zeros(1, 1))] * 4
    with caplog.at_level(logging.WARNING, "clipwise.federated"):
        reports = list(run(server, model, users, work))
    moved = {name: float((p - before[name]).detach()) / 2 for name, p in model.named_parameters()}
    if how in EXPECTED:
        assert all(r.used == 3 and len(r.problems) == 1 and r.problems[0][0] == 2 for r in reports)
        assert all(re.search(EXPECTED[how], r.problems[0][1]) for r in reports)
        assert "continues without user 2" in caplog.text
        assert moved == pytest.approx({"weight": 3 * GOOD / 4, "bias": 3 * GOOD / 4}, rel=1e-5)
    elif how == "huge":
        assert all(r.used == 4 and r.shortened == 1 for r in reports) and "was shortened to 1" in caplog.text
        assert moved == pytest.approx({"weight": (3 * GOOD + 1) / 4, "bias": 3 * GOOD / 4}, rel=1e-5)
    else:
        assert moved == pytest.approx({"weight": GOOD, "bias": GOOD}, rel=1e-5)  # as heavy as the others
    assert server.ledger.steps == 2


@pytest.mark.parametrize(
    ("length", "shortened"), [(2.0, 0), (2.0 * (1 + 1e-4), 0), (2.0004, 1), (math.nextafter(2.0 * (1 + 1e-4), 3.0), 1)]
)
def test_an_update_is_called_too_long_beyond_rounding_only(
    length: float, shortened: int, caplog: pytest.LogCaptureFixture
) -> None:
    """It is brought to the bound either way. Of several groups one suffices."""
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)).double()
    plan = make_plan(sampling=cw.FullBatch(3), clip=cw.Layerwise(cw.Abadi(2.0)), noise_multiplier=0.0)
    server = Server(plan, model)
    server.open(range(3))
    one, long = (torch.full((1, 1), value, dtype=torch.float64) for value in (1.0, -length))
    with caplog.at_level(logging.WARNING, "clipwise.federated"):
        update = server.close([(k, Reply({"0.weight": one, "1.weight": long}, 1)) for k in range(3)])
    assert server.last is not None and server.last.shortened == 3 * shortened and server.last.used == 3
    assert caplog.text.count("and was shortened to 2; its client does not clip") == 3 * shortened
    assert float(update["0.weight"]) == 1.0 and float(update["1.weight"]) == pytest.approx(-2.0, rel=1e-15)


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (Reply([("weight", torch.ones(1, 1))], 1), "expected a Reply"),  # type: ignore[arg-type]
        (Reply({"weight": torch.ones(1, 1), "more": torch.ones(1)}, 1), r"missing \[\], unknown \['more'\]"),
        (Reply({"weight": torch.ones(1, 1, dtype=torch.int64)}, 1), "dense tensor of real numbers, got torch.int64"),
        (Reply({"weight": torch.ones(1, 1).to_sparse()}, 1), "dense tensor of real numbers"),
        (Reply({"weight": [[1.0]]}, 1), "dense tensor of real numbers, got list"),  # type: ignore[dict-item]
        (Reply({"weight": torch.tensor([[math.nan]])}, 1), "not finite"),
        (Reply({"weight": torch.ones(1, 1)}, math.inf), "the weight must be"),
        (Reply({"weight": torch.ones(1, 1)}, math.nan), "the weight must be"),
        (Reply({"weight": torch.ones(1, 1)}, True), "the weight must be"),
        (Reply({"weight": torch.ones(1, 1)}, 10**400), "the weight must be"),
        (Reply({"weight": torch.ones(1, 1)}, "1"), "the weight must be"),  # type: ignore[arg-type]
        (Reply({"weight": torch.ones(1, 1)}, 1, within=1), "within must be True, False or None, got int"),  # type: ignore[arg-type]
        (Reply({"weight": torch.ones(1, 1)}, 0, within=True), None),
        (Reply({"weight": torch.ones(1, 1).half()}, 1, within=False), None),
    ],
    ids=str,
)
def test_what_the_server_lets_through(reply: Reply, reason: str | None) -> None:
    server = Server(make_plan(sampling=cw.FullBatch(1), noise_multiplier=0.0), nn.Linear(1, 1, bias=False))
    server.open([8])
    update = server.close([(8, reply)])
    assert server.last is not None and server.last.used == (reason is None) and server.last.selected == 1
    if reason is None:
        assert server.last.problems == () and float(update["weight"]) == reply.weight
    else:
        ((user, said),) = server.last.problems
        assert user == 8 and re.search(reason, said) and float(update["weight"]) == 0


def test_one_bad_number_of_many_is_enough() -> None:
    server = Server(make_plan(sampling=cw.FullBatch(1), noise_multiplier=0.0), nn.Linear(3, 1, bias=False))
    server.open([0])
    update = server.close([(0, Reply({"weight": torch.tensor([[0.1, math.inf, 0.1]])}, 1))])
    assert not update["weight"].any() and server.last is not None and "not finite" in server.last.problems[0][1]


@pytest.mark.parametrize("clipped_by", [clip_update, shorten])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_an_update_that_is_not_finite_becomes_zero(value: float, clipped_by: Any) -> None:
    """All of it, also in the layers that are."""
    update = {"0.weight": torch.tensor([1.0, value]), "1.weight": torch.ones(2)}
    for style in (cw.Flat(cw.Abadi(1.0)), cw.Layerwise(cw.Abadi(1.0)), cw.Flat(cw.NoClip())):
        assert not any(part.any() for part in clipped_by(update, style).values())
    empty = {"0.weight": torch.zeros(0), "1.weight": torch.tensor([3.0, 4.0])}
    found = clipped_by(empty, cw.Layerwise(cw.Abadi(1.0)))
    assert found["1.weight"].tolist() == pytest.approx([0.6, 0.8]) and not found["0.weight"].numel()


def test_after_one_success_a_round_in_which_all_fail_goes_on() -> None:
    plan, model = make_plan(sampling=cw.FullBatch(2), noise_multiplier=0.0), nn.Linear(1, 1, bias=False)
    before = model.weight.item()

    def work(bench: nn.Module, dataset: Dataset[Any], task: Task) -> Reply:
        if (task.number, task.user) != (0, 1):
            raise OSError("no power")
        return Reply({"weight": torch.ones(1, 1)}, 1)

    reports = list(run(Server(plan, model), model, [TensorDataset(torch.zeros(1, 1))] * 2, work))
    assert [report.used for report in reports] == [1, 0, 0]
    assert model.weight.item() == pytest.approx(before + 0.5)


def test_replies_of_strangers_and_second_replies_do_not_count() -> None:
    model = nn.Linear(1, 1, bias=False)
    server = Server(make_plan(sampling=cw.FullBatch(2), noise_multiplier=0.0), model)
    server.open([10, 11])
    reply = Reply({"weight": torch.ones(1, 1)}, 1)
    assert float(server.close([(10, reply), (10, reply), (99, reply)])["weight"]) == 0.5
    assert server.last is not None
    assert [user for user, _ in server.last.problems] == [10, 99, 11]


def test_a_mistake_in_the_work_is_raised_before_anything_is_spent() -> None:
    def work(bench: nn.Module, dataset: Dataset[Any], task: Task) -> Reply:
        raise KeyError("labels")

    model = make_model()
    server = Server(make_plan(sampling=cw.FullBatch(20)), model)
    with pytest.raises(cw.ClipwiseError, match="labels"):
        list(run(server, model, make_users(20), work))
    assert server.ledger.steps == 0


def test_runner_needs_the_planned_number_of_users() -> None:
    model = make_model()
    with pytest.raises(cw.InvalidSampling, match="20 users, but there are 3"):
        next(run(Server(make_plan(), model), model, make_users(3), lambda m, d, t: Reply(zeros_like(m), 1)))


def test_rounds_leave_nothing_behind() -> None:
    """Users and rounds cost time, not memory: as many tensors are alive after many rounds as after a few."""
    plan = make_plan(sampling=cw.FullBatch(20), steps=12)
    users, model = make_users(20), make_model()
    work = LocalTraining(loss_fn, partial(torch.optim.Adam, lr=0.1))
    alive = []
    for report in run(Server(plan, model), model, users, work):
        if report.number in (3, 11):
            gc.collect()
            alive.append(sum(type(each) in (torch.Tensor, nn.Parameter) for each in gc.get_objects()))
    assert alive[0] == alive[1]


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


def test_a_large_delta_is_warned_of() -> None:
    server = Server(make_plan(sampling=cw.Poisson(1_000, 100)), make_model())
    with pytest.warns(UserWarning, match=r"delta = 0\.01 is over 1/n = 0\.001"):
        server.epsilon(0.01)
