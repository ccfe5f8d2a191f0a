"""`clipwise train` with samplers and estimated norms: the loop is the one a user would write, in its folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

import clipwise as cw
from clipwise.accounting import ProjectedSteps
from clipwise.entropy import arm_seed
from clipwise.errors import InvalidConfig, InvalidPlan
from clipwise.report import Run
from clipwise.report.wording import event_row
from clipwise.training import Config, Progress, train
from clipwise.training.algorithms import ProjectedSGD
from clipwise.training.algorithms.dp_sgld import AVERAGE
from clipwise.training.run import train as train_module
from tests.training.common import DIGITS, exact_panel

pytest.importorskip("sklearn")

ROOT = Path(__file__).resolve().parents[2]

COMMON = f"""
{DIGITS}
steps = 12
batch_size = 64
clip = {{ rule = "Abadi", R = 1.0 }}
privacy.noise_multiplier = 4.0
evaluation = {{ every = 4, resamples = 0 }}
"""
SGLD = 'algorithm = "dp-sgld"\nsgld = { prior_std = 0.5, momentum = 0.5, temperature = 2.0, thin = 2 }\n' + COMMON
SGNHT = 'algorithm = "dp-sgnht"\nsgnht = { prior_std = 0.5, momentum = 0.5, thin = 2, inertia = 30 }\n' + COMMON
JL = 'algorithm = "dp-sgd-jl"\nprojections = 40\noptimizer.learning_rate = 0.5\n' + COMMON


@pytest.fixture(autouse=True)
def _one_accountant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_module, "guarantees_of", exact_panel)


def config(text: str, *overrides: str) -> Config:
    return Config.parse(text, "run.toml", overrides)


def trained(folder: Path, text: str, *overrides: str, **options: Any) -> Run:
    return train(config(text, *overrides), output=folder, page=False, **options)[0]


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 10))


def cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="none")


def same_weights(folder: Path, model: nn.Module) -> bool:
    found = load_file(folder / "model.safetensors")
    names = ("hidden1.weight", "hidden1.bias", "output.weight", "output.bias")
    return all(torch.equal(found[name], p) for name, p in zip(names, model.parameters(), strict=True))


def test_dp_sgld_is_the_loop_by_hand_and_the_average_is_measured(tmp_path: Path) -> None:
    run, digits, model = trained(tmp_path / "run", SGLD), cw.data.load("digits"), network()
    rate = 2.0 * cw.sgld.posterior_learning_rate(4.0, 1.0, 64, 1_297, momentum=0.5)
    chain = cw.optim.Langevin(
        cw.Poisson(1_297, 64), 12, cw.Abadi(1.0), rate, 2.0, 0.5, cw.optim.GaussianPrior(0.5), thin=2
    )
    optimizer = cw.optim.LangevinOptimizer(model, chain)
    private = cw.Private(cw.Plan(chain.sampling, 12, chain.clip, 4.0), model, optimizer, seed=arm_seed(3, run.name))
    for batch in private.loader(digits.train):
        private.step(cross_entropy(model, batch))
    assert same_weights(tmp_path / "run", model)
    found = optimizer.posterior.evaluate(model, *digits.test.tensors)
    assert found.samples == 3
    assert run.recalibrated[AVERAGE].nll == pytest.approx(found.average.nll, rel=1e-9)
    assert run.test.nll == pytest.approx(found.point.nll, rel=1e-5)
    assert run.ledger is not None and run.ledger.events == private.ledger.events
    assert run.choices.learning_rate == rate and run.choices.algorithm == "dp-sgld"
    assert str(run.choices.optimizer).endswith("temperature=2.0, momentum=0.5, prior_std=0.5, thin=2)")


def test_dp_sgnht_is_the_loop_by_hand(tmp_path: Path) -> None:
    run, digits, model = trained(tmp_path / "run", SGNHT), cw.data.load("digits"), network()
    rate = cw.sgld.posterior_learning_rate(4.0, 1.0, 64, 1_297, momentum=0.5)
    prior = cw.optim.GaussianPrior(0.5)
    chain = cw.optim.SGNHT(
        cw.Poisson(1_297, 64), 12, cw.Abadi(1.0), rate, momentum=0.5, prior=prior, thin=2, inertia=30
    )
    optimizer = cw.optim.LangevinOptimizer(model, chain)
    private = cw.Private(cw.Plan(chain.sampling, 12, chain.clip, 4.0), model, optimizer, seed=arm_seed(3, run.name))
    for batch in private.loader(digits.train):
        private.step(cross_entropy(model, batch))
    assert same_weights(tmp_path / "run", model) and optimizer.friction != 0.5
    average = optimizer.posterior.evaluate(model, *digits.test.tensors).average
    assert run.recalibrated[AVERAGE].nll == pytest.approx(average.nll, rel=1e-9)
    assert run.ledger is not None and run.ledger.events == private.ledger.events
    assert str(run.choices.optimizer).startswith("SGNHT(") and "inertia=30" in str(run.choices.optimizer)


@pytest.mark.parametrize("name", ["SGD", "Adam"])
def test_dp_sgd_jl_and_dp_adam_jl_are_the_loop_by_hand(tmp_path: Path, name: str) -> None:
    text = JL + f'optimizer.name = "{name}"\n'
    run, digits, model = trained(tmp_path / "run", text, "steps=3"), cw.data.load("digits"), network()
    plan = cw.Plan(cw.Poisson(1_297, 64), 3, cw.Abadi(1.0), 4.0, cw.mechanisms.ProjectedNorms(40))
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.5)
    private = cw.Private(plan, model, optimizer, loss_fn=cross_entropy, seed=arm_seed(3, run.name))
    for batch in private.loader(digits.train):
        private.step(private.losses(batch))
    assert same_weights(tmp_path / "run", model)
    assert run.ledger is not None
    assert run.ledger.events == (ProjectedSteps(cw.Poisson(1_297, 64), 4.0, 40, 3),)
    assert run.plan == plan
    assert run.choices.optimizer == f"{name}(lr=0.5)"
    assert event_row(run.ledger.events[0])[1] == "3 steps, norms from 40 projections"
    assert run.guarantees["exact"].kind == "upper bound"
    assert run.curves[-1]["private"]["loss"] > 0


def test_the_example_of_dp_adam_jl_is_that() -> None:
    example = Config.load(ROOT / "examples" / "dp_adam_jl.toml").algorithm
    twin = Config.load(ROOT / "examples" / "dp_sgd_jl.toml").algorithm
    assert isinstance(example, ProjectedSGD) and isinstance(twin, ProjectedSGD)
    assert example.projections == twin.projections and example.optimizer.name == "Adam" != twin.optimizer.name


@pytest.mark.parametrize(
    ("text", "steps"),
    [(SGLD, 12), (SGNHT, 12), (JL, 4), (JL + 'optimizer.name = "Adam"\n', 4)],
    ids=["dp-sgld", "dp-sgnht", "dp-sgd-jl", "dp-adam-jl"],
)
def test_a_seeded_run_resumes_to_the_same_end(tmp_path: Path, text: str, steps: int) -> None:
    setting = (f"steps={steps}", "checkpoint_every=2")
    whole = trained(tmp_path / "whole", text, *setting)

    def pull_the_plug(progress: Progress) -> None:
        if progress.step == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path / "cut", text, *setting, watch=pull_the_plug)
    again = trained(tmp_path / "cut", text, *setting, resume=True)
    assert again.test == whole.test and again.recalibrated == whole.recalibrated
    assert again.ledger == whole.ledger


@pytest.mark.slow
def test_noise_for_a_target_epsilon(tmp_path: Path) -> None:
    target = ("privacy={epsilon=4.0, delta=1e-4}", "steps=3")
    for name, text in (
        ("sgld", SGLD.replace("thin = 2", "thin = 1")),
        ("sgnht", SGNHT.replace("thin = 2", "thin = 1")),
        ("jl", JL),
    ):
        run = trained(tmp_path / name, text, *target)
        assert run.ledger is not None and 3.95 < run.ledger.epsilon(1e-4) <= 4.0


@pytest.mark.parametrize(
    ("text", "override", "message"),
    [
        (SGLD, "optimizer.learning_rate=0.1", "noise and temperature decide the learning rate"),
        (SGLD, "sgld.prior=1.0", "did you mean 'prior_std'"),
        (SGLD, "sgld.temperature=0", "over 0"),
        (SGNHT, "optimizer.learning_rate=0.1", r"momentum is in \[sgnht\]"),
        (SGNHT, "sgnht.inertia=0", "over 0"),
        (SGNHT, "sgld.thin=2", "for algorithm = 'dp-sgld' only"),
        (SGLD, "sgld.inertia=2", "has no such key"),
        (SGLD, "projections=10", "dp-sgd-jl"),
        (JL, "sgld.thin=2", "for algorithm = 'dp-sgld' only"),
        (JL, "projections=0", "at least 1"),
        (JL.replace("projections = 40\n", ""), "seed=1", "'projections' is missing"),
    ],
)
def test_configurations_are_read_strictly(text: str, override: str, message: str) -> None:
    with pytest.raises(InvalidConfig, match=message):
        config(text, override)


@pytest.mark.parametrize(
    ("text", "override", "error", "message"),
    [
        (SGLD, "privacy={private=false}", InvalidConfig, "samples with its noise"),
        (SGNHT, "privacy={private=false}", InvalidConfig, "dp-sgnht samples with its noise"),
        (SGNHT, "privacy={noise_multiplier={0=4.0, 6=5.0}}", InvalidConfig, "dp-sgnht has one temperature"),
        (SGLD, "privacy.noise_multiplier=0.02", InvalidPlan, "epsilon is at least"),
        (SGLD, f"data.source={ROOT}/examples/own_code.py:waves", InvalidConfig, "clipwise.optim in a loop"),
        (SGLD, "clip={schedule='MixUp', switch_at=0.5, small={rule='Abadi', R=1.0}, large={rule='Abadi', R=2.0}}",
         InvalidPlan, "schedule"),
        (JL, "privacy.noise_multiplier=0.005", InvalidPlan, "Use more projections"),
        (JL, "clip={style='Layerwise', rule='Abadi', R=1.0}", InvalidPlan, "over all parameters together"),
        (JL, "max_batch_size=100", InvalidPlan, "batches that are cut"),
    ],
)  # fmt: skip
def test_what_cannot_be_run_leaves_no_folder(
    tmp_path: Path, text: str, override: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        trained(tmp_path / "run", text, override)
    assert not (tmp_path / "run").exists()
