"""The experiment on correlated noise: what it says it compares is what is trained."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

import clipwise as cw
from clipwise.calibration import Estimate
from clipwise.report import ArmResults
from papers.correlated.__main__ import (
    BEST,
    DATA,
    EPSILONS,
    NORMS,
    SETTINGS,
    STUDY,
    compared_table,
    noise_left,
    of_noise,
)


def test_the_best_bands_are_those_that_are_found() -> None:
    config = STUDY.trials[0].config()
    usual = cw.Plan(cw.Poisson(60_000, int(config.batches.batch_size or 0)), 1_170, cw.Abadi(1.0))
    assert {epsilon: cw.Banded.best(usual, epsilon, 1e-5).bands for epsilon in EPSILONS} == BEST


def test_an_arm_has_the_data_the_norm_and_the_noise_of_its_name() -> None:
    assert len(STUDY.arms) == sum(len(NORMS) * len(at.noises) for at in SETTINGS) == 28
    for trial in STUDY.trials[: len(STUDY.arms)]:
        config, name = trial.config(), trial.arm.name
        sampling = config.batches.scheme(60_000)
        plan = config.algorithm.plan(cw.Plan(sampling, config.batches.count(sampling), config.clip))
        assert name.startswith(f"{'MNIST' if 'fashion' not in repr(config.data) else 'Fashion-MNIST'}, epsilon ")
        assert f"epsilon {config.privacy.epsilon:g}, R = {config.clip.sensitivity():g}, " in name
        said = {"Independent": "independent", "Tree": "tree"}.get(type(plan.correlation).__name__)
        assert name.endswith(said or f", {plan.correlation.bands} bands")
        assert plan.steps == 1_170
    assert set(DATA) == {"MNIST", "Fashion-MNIST"}


def test_noise_that_is_left_is_that_of_the_plan() -> None:
    plan = cw.Plan(cw.Poisson(100, 10), 25, cw.Abadi(1.0), 2.0)
    assert noise_left(plan) == pytest.approx(10.0)


def arm(name: str, seeds: int, **values: float) -> ArmResults:
    found = {m: Estimate.over_seeds([value * (1 + k / 1_000) for k in range(seeds)]) for m, value in values.items()}
    return cast("ArmResults", SimpleNamespace(name=name, runs=[0] * seeds, estimates=found))


def table_of(seeds: int, **values: float) -> str:
    at = SETTINGS[0]
    usual = arm(at.name(NORMS[0], "independent"), 2, accuracy=0.9, nll=0.3, ece=0.04)
    other = arm(at.name(NORMS[0], "64 bands"), seeds, **values)
    return compared_table("Noise", of_noise({each.name: each for each in (usual, other)}))


def test_a_difference_is_better_worse_or_not_clear() -> None:
    text = table_of(2, accuracy=0.95, nll=0.5, ece=0.0401)
    (row,) = (line for line in text.splitlines() if line.startswith("| MNIST, epsilon 8, R = 1 | 64 bands |"))
    accuracy, nll, ece = row.split(" | ")[2:5]
    assert accuracy.startswith("+5.00 (") and accuracy.endswith("): better")
    assert nll.startswith("+0.200 (") and nll.endswith("): worse")
    assert ece.startswith("+0.01 (") and ece.endswith("): not clear")
    assert "Of 1 pairs: accuracy is better in 1; NLL is worse in 1; ECE is not clear in 1." in text


def test_one_seed_decides_nothing() -> None:
    text = table_of(1, accuracy=0.95, nll=0.1, ece=0.01)
    assert "| +4.95: one seed | -0.200: one seed | -3.00: one seed | 1 |" in text
