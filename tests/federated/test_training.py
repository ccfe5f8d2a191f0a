"""`clipwise train` with the federated algorithms: users out of records, rounds as steps, kills survived.

The examples of docs/federated.md run.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.supercore.task_identity import TaskIdentity
from safetensors.torch import load_file

import clipwise as cw
from clipwise.accounting import FederatedRounds, account
from clipwise.federated import dirichlet, shards, uniform
from clipwise.federated.flower import DPFedAvg
from clipwise.report.wording import event_row, plan_rows
from clipwise.training import Config, Progress, train
from clipwise.training.run import train as training
from tests.federated.common import federated_plan
from tests.federated.test_flower import StandIn
from tests.training.common import DIGITS

TINY = f"""
{DIGITS}
name = "tiny"
algorithm = "dp-fedavg"
steps = 6
batch_size = 10
clip = {{ rule = "Abadi", R = 0.5 }}
optimizer.learning_rate = 0.2
privacy.noise_multiplier = 1.0
evaluation = {{ every = 2, resamples = 0 }}
federated = {{ users = 50, local_batch_size = 8 }}
"""


@pytest.fixture(autouse=True)
def exact_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other accountants take seconds, and are tested where they are made."""
    monkeypatch.setattr(training, "guarantees_of", lambda events, delta: {"exact": account(events, delta)})


def config(*overrides: str) -> Config:
    return Config.parse(TINY, "tiny.toml", overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("algorithm=dp-fedsgd", "optimizer.learning_rate=1.0"),
        ('federated.split="dirichlet"', "federated.weight_cap=20.0", "federated.total_weight=900.0"),
        ("clip.rule=AdaptiveClip", "clip.floor=0.4", 'federated.server={learning_rate="0.3 / R", momentum=0.9}'),
        ('federated.split="uniform"', 'federated.clip_every="batch"', 'clip={rule="GlobalScaled",R=0.5,Z=2.0}'),
    ],
    ids=["dp-fedavg", "dp-fedsgd", "weights", "adaptive", "global clip after every batch"],
)
def test_a_run_protects_users(overrides: tuple[str, ...], tmp_path: Path) -> None:
    run, folder = train(config(*overrides), output=tmp_path / "run", page=False)
    assert run.ledger is not None
    assert run.ledger.events == (FederatedRounds(cw.Poisson(50, 10), 1.0, 6),)
    assert run.delta == 1e-2 and run.guarantees["exact"].unit == "client"
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [2, 4, 6]
    assert rows[-1]["epsilon"] == pytest.approx(run.guarantees["exact"].epsilon)
    norms = [row["released"]["clipping_norm"] for row in rows if "released" in row]
    assert (len(set(norms)) == 3 and min(norms) >= 0.4) if "clip.rule=AdaptiveClip" in overrides else not norms
    assert not (folder / "checkpoint").exists() and (folder / "model.safetensors").exists()
    assert (
        dict(plan_rows(run.plan, run.choices))["users in a round"] == "Poisson: each of 50 users with probability 10/50"
    )
    assert event_row(run.ledger.events[0])[1:] == ("6 rounds", "1", "Poisson: each of 50 users with probability 10/50")


def test_a_run_without_privacy_learns(tmp_path: Path) -> None:
    overrides = ("privacy={private=false}", "clip={rule='NoClip'}", "steps=10", "batch_size=25")
    run, _ = train(config(*overrides, "federated.local_epochs=3"), output=tmp_path / "run", page=False)
    assert run.ledger is None and run.test.accuracy is not None and run.test.accuracy > 0.6


def test_an_interrupted_run_goes_on(tmp_path: Path) -> None:
    def stop(progress: Progress) -> None:
        if progress.step == 5:
            raise KeyboardInterrupt

    whole, _ = train(config(), output=tmp_path / "whole", page=False)
    with pytest.raises(KeyboardInterrupt):
        train(config(), output=tmp_path / "cut", page=False, watch=stop)
    again, _ = train(config(), output=tmp_path / "cut", page=False, resume=True)
    weights = [load_file(tmp_path / name / "model.safetensors") for name in ("whole", "cut")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert whole.ledger == again.ledger and whole.curves == again.curves


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("algorithm=dp-sgd", "federated.*is for algorithm"),
        ("sampling=shuffled", "own coin"),
        ("max_batch_size=12", "own coin"),
        ("physical_batch_size=12", "one after the other"),
        ('optimizer.learning_rate="1 / R"', "federated.server"),
        ("federated.concentration=1.0", "dirichlet"),
        ("federated.user=3", "did you mean 'users'"),
        ("federated.users=0", "users"),
        ("federated.quantile=0.5", "rule = 'AdaptiveClip'"),
        ('clip={rule="AdaptiveClip",R=0.5,quantile=1.5}', "quantile"),
        ('recalibration={methods=["private-temperature"],noise_multiplier=3.0}', "whole users"),
    ],
)
def test_configurations_that_contradict_are_refused(override: str, message: str) -> None:
    with pytest.raises(cw.InvalidConfig, match=message):
        config(override)


@pytest.mark.parametrize("override", ["federated.local_epochs=2", 'optimizer.name="Adam"', "optimizer.momentum=0.5"])
def test_fedsgd_is_one_gradient(override: str) -> None:
    with pytest.raises(cw.InvalidConfig, match="one gradient"):
        config("algorithm=dp-fedsgd", override)


def test_partitions_hold_every_record_once() -> None:
    labels = torch.arange(10).repeat_interleave(37)[torch.randperm(370, generator=torch.Generator().manual_seed(0))]
    for parts in (uniform(370, 17), shards(labels, 17, 3), dirichlet(labels, 17, 0.3)):
        assert len(parts) == 17 and np.array_equal(np.sort(np.concatenate(parts)), np.arange(370))
    few = [len(labels[torch.from_numpy(part)].unique()) for part in shards(labels, 17, 2)]
    many = [len(labels[torch.from_numpy(part)].unique()) for part in uniform(370, 17)]
    assert max(few) <= 4 and min(many) >= 6
    assert len({len(part) for part in dirichlet(labels, 17, 0.3)}) > 5


@pytest.mark.parametrize("users", [0, 1.5, 101])
def test_users_are_a_number_that_the_records_suffice_for(users: Any) -> None:
    labels = torch.arange(100) % 10
    for deal in (lambda: uniform(100, users), lambda: shards(labels, users), lambda: dirichlet(labels, users)):
        with pytest.raises(cw.InvalidConfig):
            deal()


def test_partitions_differ_by_seed_and_need_enough_records() -> None:
    labels = torch.arange(100) % 10
    assert not np.array_equal(shards(labels, 10, seed=0)[0], shards(labels, 10, seed=1)[0])
    assert np.array_equal(dirichlet(labels, 10, seed=4)[0], dirichlet(labels, 10, seed=4)[0])
    for deal in (lambda *s: uniform(100, 10, *s), lambda *s: shards(labels, 10, 2, *s)):
        assert np.array_equal(deal()[0], deal(0)[0])  # the seed that the documents name
    assert all(map(np.array_equal, shards(labels, 10), shards(labels, 10, shards_per_user=2, seed=0)))
    assert all(map(np.array_equal, dirichlet(labels, 10), dirichlet(labels, 10, concentration=0.5, seed=0)))
    with pytest.raises(cw.InvalidConfig, match="cannot be cut"):
        shards(labels, 60)
    assert [len(part) for part in shards(labels, 50)] == [2] * 50 and len(uniform(100, 100)) == 100
    for wrong in (0.0, -1.0, np.inf, np.nan):
        with pytest.raises(cw.InvalidConfig, match="positive"):
            dirichlet(labels, 3, concentration=wrong)
    with pytest.raises(cw.InvalidConfig, match="positive integers"):
        shards(labels, 3, 0)


def test_a_dirichlet_partition_deals_every_class_by_itself() -> None:
    """With a large concentration users are alike, in every class; with a small one a class has hardly an owner more."""
    labels = torch.arange(4).repeat_interleave(250)
    alike, apart = dirichlet(labels, 5, 1e6), dirichlet(labels, 5, 1e-3)
    for label in range(4):
        counts = [int((labels[torch.from_numpy(part)] == label).sum()) for part in alike]
        assert sum(counts) == 250 and min(counts) >= 48 and max(counts) <= 52
        owners = [int((labels[torch.from_numpy(part)] == label).sum()) for part in apart]
        assert max(owners) >= 245
    assert dirichlet(labels, 1, 0.7)[0].tolist() == list(range(1000))
    with pytest.raises(cw.InvalidConfig, match="positive finite"):
        dirichlet(labels, 3, concentration=float("inf"))
    for users, each in ((2.5, 1), (-5, -1), (True, 1)):
        with pytest.raises(cw.InvalidConfig, match="must be positive integers"):
            shards(labels, users, each)  # type: ignore[arg-type]


PAGE = Path(__file__).parents[2] / "docs" / "federated.md"
HERE, FLOWER = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)


@pytest.mark.slow
def test_the_example_in_one_process_learns(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    exec(HERE, names)
    assert 7.9 < float(capsys.readouterr().out) <= 8.0
    accuracy = (names["model"](names["x"]).argmax(dim=1) == names["y"]).float().mean()
    assert float(accuracy) > 0.75


def test_the_example_on_flower_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_run_id", "_task_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)
    names: dict[str, Any] = {}
    exec(FLOWER, names)
    plan = federated_plan(cw.FullBatch(2), steps=1, clip=cw.Abadi(0.5), noise_multiplier=1.0)
    strategy = DPFedAvg(plan, names["make_model"](), min_available_nodes=0)
    arrays = ArrayRecord(names["make_model"]().state_dict())
    messages = list(strategy.configure_train(1, arrays, ConfigRecord(), StandIn(2).grid))
    replies: list[Message] = [names["train"](message, None) for message in messages]
    before = arrays.to_torch_state_dict()
    after, _ = strategy.aggregate_train(1, replies)
    assert strategy.server.last is not None and strategy.server.last.used == 2
    assert after is not None and not torch.equal(after.to_torch_state_dict()["weight"], before["weight"])


def test_the_table_shows_the_results_of_the_recipe() -> None:
    results = json.loads((PAGE.parents[1] / "papers" / "federated" / "results.json").read_text())["arms"]
    rows = re.findall(
        r"^\| (.+) \| ([\d.]+) % \| ([\d.]+) \| ([\d.]+) % \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE
    )
    shown = {name: tuple(map(float, numbers)) for name, *numbers in rows}
    units = {"accuracy": (100, 2), "nll": (1, 4), "ece": (100, 2)}
    assert shown == {
        name: tuple(round(unit * found[metric]["mean"], digits) for metric, (unit, digits) in units.items())
        for name, found in results.items()
    }
