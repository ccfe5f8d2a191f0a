"""Two runs of one seed cancelled: their noise was a function of seed, step and place alone.

With clipping norms R and 10 R the difference b - 10 a of what they released was free of noise, for anyone who had both,
without knowing the seed. The same with two learning rates (from the second step on), initialisations, data sets,
optimizers or loss functions. Each test here releases the same step twice and looks for noise in common.

A seeded server gave the same noise to whatever came: two sets of updates cancelled, and a resumed round as well.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import clipwise as cw
from clipwise import federated
from clipwise.entropy import Entropy
from clipwise.federated import LocalTraining, Reply, Server
from clipwise.mechanisms import Rounds
from clipwise.noise import GaussianNoise
from clipwise.private.digests import file_of
from clipwise.report.warnings import joint_of
from tests.report.samples import made_run

N, SIZE, STEPS, MULTIPLIER = 50, 400, 3, 5.0
PLAN = cw.Plan(cw.FullBatch(N), steps=STEPS, clip=cw.Abadi(1.0), noise_multiplier=MULTIPLIER)


def data(seed: int = 0) -> TensorDataset:
    x = torch.randn(N, SIZE, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x / x.norm(dim=1, keepdim=True), x[:, 0])


def model_of(value: float = 0.0) -> nn.Module:
    model = nn.Linear(SIZE, 1, bias=False)
    nn.init.constant_(model.weight, value)
    return model


def absolute(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (model(x).squeeze(1) - y).abs()


def doubled(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return 0.5 * absolute(model, x, y)


class Seen:
    """Keeps every released gradient, before the optimizer's own step."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.released: list[Tensor] = []
        optimizer.register_step_pre_hook(lambda opt, *_: self.released.append(opt.param_groups[0]["params"][0].grad))


def run(
    plan: cw.Plan = PLAN,
    optimizer: Callable[[Any], torch.optim.Optimizer] = lambda p: torch.optim.SGD(p, lr=0.1),
    dataset: Dataset[Any] | None = None,
    value: float = 0.0,
    losses: Callable[..., Tensor] = absolute,
    rates: tuple[float, ...] = (),
) -> tuple[list[Tensor], list[list[float]]]:
    """What a seeded run releases at each step, and the records that it drew (by their target)."""
    model = model_of(value)
    made = optimizer(model.parameters())
    seen, drawn = Seen(made), []
    private = cw.Private(plan, model, made, seed=0)
    for step, (x, y) in enumerate(private.loader(dataset or data())):
        if rates:
            made.param_groups[0]["lr"] = rates[step]
        drawn.append(y.tolist())
        private.step(losses(model, x, y))
    assert private.ledger.steps == STEPS
    return [gradient.flatten() for gradient in seen.released], drawn


def shared(a: Tensor, b: Tensor, std_a: float, std_b: float) -> float:
    """How much noise two releases share: about 0 when independent, 1 when the same up to its size."""
    return float((a / std_a) @ (b / std_b)) / SIZE


STD = MULTIPLIER / N
LIMIT = 5 / math.sqrt(SIZE) + 0.1  # five deviations, and a little for sums that are alike

CHANGES: dict[str, tuple[dict[str, Any], float, int]] = {
    "R": ({"plan": replace(PLAN, clip=cw.Abadi(10.0))}, 10 * STD, 0),
    "noise multiplier": ({"plan": replace(PLAN, noise_multiplier=10.0)}, 2 * STD, 0),
    "nothing": ({}, STD, -1),
    "learning rate": ({"optimizer": lambda p: torch.optim.SGD(p, lr=0.2)}, STD, 0),
    "schedule": ({"rates": (0.1, 0.3, 0.3)}, STD, 1),
    "momentum": ({"optimizer": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.5)}, STD, 0),
    "weight decay": ({"optimizer": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1)}, STD, 0),
    "optimizer": ({"optimizer": lambda p: torch.optim.Adagrad(p, lr=0.1)}, STD, 0),
    "initialisation": ({"value": 0.001}, STD, 0),
    "data": ({"dataset": data(1)}, STD, 0),
    "loss function": ({"losses": doubled}, STD, 0),
}


@pytest.mark.parametrize("what", CHANGES)
def test_no_release_of_one_seed_shares_noise_with_another(what: str) -> None:
    changes, std, first = CHANGES[what]
    (a, _), (b, _) = run(), run(**changes)
    for step in range(STEPS):
        found = shared(a[step], b[step], STD, std)
        if 0 <= first <= step:
            assert abs(found) < LIMIT, f"step {step}: {found:.2f} of the noise is shared"
        else:  # nothing differs yet, so it is the very same release
            assert torch.equal(a[step], b[step])


def test_the_attack_finds_noise_that_is_shared() -> None:
    """The same attack on the noise as it was: a function of seed, step and place."""
    drawn = GaussianNoise([torch.zeros(SIZE)], Entropy(0)).directions([torch.zeros(SIZE)], Entropy(0), 0)[0].double()
    sums = data().tensors[0].sum(0).double()
    a, b = (sums + MULTIPLIER * drawn) / N, (10 * sums + 10 * MULTIPLIER * drawn) / N
    assert shared(a, b, STD, 10 * STD) > 0.8 and float((10 * a - b).abs().max()) < 1e-12


def test_one_record_that_differs_is_enough() -> None:
    """The difference of the two runs was that record's gradient, without noise."""
    changed = data()
    changed.tensors[0][7] *= -1
    (a, _), (b, _) = run(), run(dataset=changed)
    assert all(abs(shared(x, y, STD, STD)) < LIMIT for x, y in zip(a, b, strict=True))


class Read(Dataset[Any]):
    """The same records one by one, as from files: nothing is known of them before they are drawn."""

    def __init__(self, records: TensorDataset) -> None:
        self._records = records

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> Any:
        return self._records[index]


def test_records_that_are_read_one_by_one_are_in_the_label_too() -> None:
    changed = data()
    changed.tensors[0][7] *= -1
    (a, _), (b, _) = run(dataset=Read(data())), run(dataset=Read(changed))
    assert all(abs(shared(x, y, STD, STD)) < LIMIT for x, y in zip(a, b, strict=True))


POISSON = replace(PLAN, sampling=cw.Poisson(N, 25))
COINS = {
    "R": {"plan": replace(POISSON, clip=cw.Abadi(10.0))},
    "learning rate": {"plan": POISSON, "optimizer": lambda p: torch.optim.SGD(p, lr=0.2)},
    "initialisation": {"plan": POISSON, "value": 0.001},
    "optimizer": {"plan": POISSON, "optimizer": lambda p: torch.optim.Adagrad(p, lr=0.1)},
    "noise multiplier": {"plan": replace(POISSON, noise_multiplier=10.0)},
}


@pytest.mark.parametrize("what", COINS)
def test_coins_are_not_shared_either(what: str) -> None:
    """Joint amplification needs coins that are independent."""
    drawn, others = run(POISSON)[1], run(**COINS[what])[1]  # type: ignore[arg-type]
    assert all(one != other for one, other in zip(drawn, others, strict=True))
    assert drawn == run(POISSON)[1]


def test_coins_on_other_data_are_not_shared() -> None:
    positions = []
    for seed in (0, 1):
        dataset = data(seed)
        order = {float(y): k for k, y in enumerate(dataset.tensors[1])}
        positions.append([[order[y] for y in batch] for batch in run(POISSON, dataset=dataset)[1]])
    assert all(one != other for one, other in zip(*positions, strict=True))


def test_the_very_same_run_repeats_to_the_bit() -> None:
    (a, drawn), (b, again) = run(POISSON), run(POISSON)
    assert drawn == again and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_a_private_temperature_cannot_be_asked_twice_with_one_seed() -> None:
    """Same seed, one label changed: the two first answers differed by that record's part, without noise."""
    logits, labels = torch.randn(200, 2, generator=torch.Generator().manual_seed(0)), torch.zeros(200, dtype=torch.long)
    other = labels.clone()
    other[5] = 1
    answers: list[list[float]] = []
    from clipwise.calibration import private_scaling

    class Spy(GaussianNoise):
        def release(self, *args: Any, **options: Any) -> list[Tensor]:
            found = super().release(*args, **options)
            answers[-1].append(float(found[0]))
            return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(private_scaling, "GaussianNoise", Spy)
        for y in (labels, other, labels):
            answers.append([])
            cw.calibration.PrivateTemperatureScaling(noise_multiplier=20.0, seed=1).fit(logits, y, cw.Ledger())
    assert answers[0] == answers[2]
    assert abs(answers[0][0] - answers[1][0]) > 2.0  # noise of deviation 57, not a difference of at most 1


# Pages


def test_runs_of_one_seed_get_no_joint_epsilon() -> None:
    def pair(**changes: Any) -> Any:
        runs = [made_run("R = 1", 1.0, seed=3), made_run("R = 10", 10.0, seed=3)]
        return [replace(each, provenance={**each.provenance, **changes}) for each in runs]

    apart = joint_of(pair(arm=None))
    assert apart is not None and apart.guarantee is None and apart.shared == ("R = 1", "R = 10")
    derived = joint_of([made_run("R = 1", 1.0, seed=3), made_run("R = 10", 10.0, seed=3)])
    assert derived is not None and derived.guarantee is not None and derived.guarantee.epsilon > 1.563


def test_two_shuffled_runs_cost_what_both_cost() -> None:
    """As one sequence of epochs they cost what one of them costs: 4.378, where the truth is 6.104."""
    event = cw.GaussianSteps(cw.Shuffled(10_000, 100), 1.0, 50)
    runs = [made_run(seed=seed, ledger=cw.Ledger([event])) for seed in (0, 1)]
    alone = cw.Ledger([event]).epsilon(1e-5)
    found = joint_of(runs)
    assert found is not None and found.guarantee is not None
    assert found.guarantee.epsilon == pytest.approx(2 * alone) and 8.75 < found.guarantee.epsilon < 8.76
    assert found.guarantee.delta == pytest.approx(2e-5) and found.guarantee.relation == "zero_out"
    mixed = joint_of([*runs, made_run("Poisson", seed=2)])
    assert mixed is not None and mixed.guarantee is not None
    assert mixed.guarantee.epsilon > found.guarantee.epsilon and mixed.guarantee.delta == pytest.approx(3e-5)


WEIGHTS, USERS, USER_NOISE = 400, 4, 50.0
USER_STD = USER_NOISE / USERS


def server_of(clip: cw.Abadi | cw.AdaptiveClip, value: float = 0.0) -> Server:
    model = nn.Linear(WEIGHTS, 1, bias=False)
    nn.init.constant_(model.weight, value)
    return Server(cw.Plan(cw.FullBatch(USERS), 3, clip, USER_NOISE, Rounds()), model, seed=0)


def closed(server: Server, moved: float = 0.0) -> Tensor:
    """One round, in which user 2 may send another update."""
    server.open(range(USERS))
    updates = [torch.full((1, WEIGHTS), 0.01) for _ in range(USERS)]
    updates[2][0, 7] += moved
    replies = [(k, Reply({"weight": u}, 1, within=True if server.bound else None)) for k, u in enumerate(updates)]
    return server.close(replies)["weight"].flatten()


@pytest.mark.parametrize("clip", [cw.Abadi(1.0), cw.AdaptiveClip(R=1.0)], ids=["fixed", "adaptive"])
def test_other_updates_get_other_noise(clip: cw.Abadi | cw.AdaptiveClip) -> None:
    a, b, again = closed(server_of(clip)), closed(server_of(clip), moved=0.1), closed(server_of(clip))
    assert torch.equal(a, again)
    assert abs(float((a / USER_STD) @ (b / USER_STD)) / WEIGHTS) < 5 / math.sqrt(WEIGHTS)
    assert float((a - b).norm()) > USER_STD  # before: 0.1 / 4 at place 7, and nothing elsewhere


@pytest.mark.parametrize("other", [server_of(cw.Abadi(10.0)), server_of(cw.Abadi(1.0), 0.5)], ids=["R", "start"])
def test_other_runs_of_one_seed_share_no_noise(other: Server) -> None:
    a, b = closed(server_of(cw.Abadi(1.0))), closed(other)
    assert abs(float(a @ b / (a.norm() * b.norm()))) < 5 / math.sqrt(WEIGHTS)


def test_a_round_that_is_repeated_with_other_updates_is_charged_again(tmp_path: Path) -> None:
    server, model = server_of(cw.Abadi(1.0)), nn.Linear(WEIGHTS, 1, bias=False)
    closed(server)
    server.save(tmp_path / "run_rounds", model)
    expected = closed(server)
    for moved, charged in ((0.0, 2), (0.1, 3)):
        again = server_of(cw.Abadi(1.0))
        again.resume(tmp_path / "run_rounds", model)
        assert torch.equal(closed(again, moved), expected) == (moved == 0.0)
        assert again.ledger.steps == charged
    assert file_of(tmp_path / "run_rounds").stat().st_mode & 0o777 == 0o600


def test_a_changed_record_of_a_user_is_noticed(tmp_path: Path) -> None:
    def users(changed: bool = False) -> list[TensorDataset]:
        x = torch.randn(USERS, 5, 2, generator=torch.Generator().manual_seed(0))
        x[3, 4, 0] += 0.001 * changed
        return [TensorDataset(each) for each in x]

    plan = cw.Plan(cw.FullBatch(USERS), 3, cw.Abadi(1.0), 1.0, Rounds())
    work = LocalTraining(
        lambda m, batch: m(batch[0])[:, 0].square(), functools.partial(torch.optim.SGD, lr=0.1), seed=0
    )
    model = nn.Linear(2, 1)
    server = Server(plan, model, seed=0)
    rounds = federated.run(server, model, users(), work)
    server.save(tmp_path / "run_rounds", model)
    next(rounds)
    again = Server(plan, model, seed=0)
    again.resume(tmp_path / "run_rounds", model)
    with pytest.raises(cw.CheckpointError, match="the data changed"):
        federated.run(again, model, users(changed=True), work)
    for _ in federated.run(again, model, users(), work):
        pass
    assert again.ledger.steps == 3 and again.looked.state == "unchanged"
