"""Selection, noise, ledger, and rounds that go on whatever some users do."""

from __future__ import annotations

import gc
import logging
import math
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
from clipwise.federated import LocalTraining, Reply, Server, Task, apply, run, select
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
    [cw.FixedSize(20, 5), cw.Shuffled(20, 5), cw.Poisson(20, 5, max_batch_size=7)],
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
