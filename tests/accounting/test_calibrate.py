"""Calibration hits its target from the safe side; curves are what they say."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from clipwise.accounting import (
    GaussianSteps,
    PrivateCalibration,
    account,
    delta,
    epsilon,
    free_cap,
    max_batch_size,
    max_steps,
    noise_multiplier,
    noise_scale,
    privacy_curve,
    tight_mu,
)
from clipwise.accounting._numerics.gaussian import gaussian_delta
from clipwise.errors import AccountingError
from clipwise.sampling import FixedSize, FullBatch, Poisson, Shuffled

from .common import MNIST

TARGETS = [
    (1.0, 1e-5, Poisson(100_000, 1_000), 1_000, 1.41462),
    (3.0, 1e-6, Poisson(100_000, 1_000), 10_000, 1.70828),
    (8.0, 1e-5, Poisson(100_000, 2_000), 5_000, 1.08939),
    (2.0, 1e-8, Poisson(10_000, 1), 1_000_000, 0.64503),
    (8.0, 1e-5, Poisson(100, 4), 2_250, 1.3458983),
]


@pytest.mark.parametrize(("target", "small", "sampling", "steps", "sigma"), TARGETS)
def test_noise_is_the_known_one(target: float, small: float, sampling: Poisson, steps: int, sigma: float) -> None:
    found = noise_multiplier(target, small, sampling, steps)
    assert sigma * (1 - 1e-5) <= found <= sigma * 1.001


def test_noise_beside_events_that_are_decided() -> None:
    steps, decided = GaussianSteps(Poisson(10_000, 100), 1.0, 500), PrivateCalibration(5.0)
    alone = noise_scale((steps,), 2.0, 1e-5)
    found = noise_scale((steps,), 2.0, 1e-5, fixed=(decided,))
    assert found > alone
    spent = account((GaussianSteps(steps.sampling, found, 500), decided), 1e-5).epsilon
    assert 2.0 * 0.999 < spent <= 2.0


@pytest.mark.parametrize("accountant", ["exact", "rdp", "gdp", "edgeworth"])
@pytest.mark.parametrize("target", [0.1, 2.0, 30.0])
def test_noise_hits_the_target_from_below(accountant: Any, target: float) -> None:
    found = noise_multiplier(target, 1e-5, Poisson(10_000, 100), 500, accountant)
    spent = epsilon(found, Poisson(10_000, 100), 500, 1e-5, accountant)
    assert 0.999 * target <= spent <= target


def test_noise_by_pld() -> None:
    pytest.importorskip("dp_accounting")
    found = noise_multiplier(1.0, 1e-5, FullBatch(100), 10, "pld")
    assert 0.999 <= epsilon(found, FullBatch(100), 10, 1e-5, "pld") <= 1.0


@pytest.mark.slow
@pytest.mark.parametrize(
    "sampling",
    [
        FullBatch(100),
        Shuffled(1_000, 10),
        FixedSize(1_000, 10),
        Poisson(1_000, 10, 30),
        Poisson(rate=0.01, batch_size=10),
        Poisson(rate=0.01, batch_size=10, max_batch_size=30, largest=1_200),
    ],
)
@pytest.mark.parametrize("relation", [None, "replace_one"])
def test_noise_for_every_scheme(sampling: Any, relation: Any) -> None:
    found = noise_multiplier(3.0, 1e-4, sampling, 300, relation=relation)
    assert 0.999 * 3.0 <= epsilon(found, sampling, 300, 1e-4, relation=relation) <= 3.0


def test_a_schedule_keeps_its_shape() -> None:
    shape = (GaussianSteps(Poisson(1_000, 10), 1.2, 200), GaussianSteps(Poisson(1_000, 10), 0.8, 100))
    factor = noise_scale(shape, 3.0, 1e-5)
    scaled = [GaussianSteps(e.sampling, factor * e.noise_multiplier, e.steps) for e in shape]
    assert 0.999 * 3.0 <= account(scaled, 1e-5).epsilon <= 3.0


@pytest.mark.parametrize("unit", [1e-9, 1.0, 1e3, 1e9])
@pytest.mark.parametrize("target", [1.0, 500.0, 3_000.0])
def test_the_scale_of_a_shape_does_not_matter(unit: float, target: float) -> None:
    shape = (GaussianSteps(FullBatch(100), 1.5 * unit, 2), GaussianSteps(FullBatch(100), unit, 1))
    factor = noise_scale(shape, target, 1e-5)
    scaled = [GaussianSteps(e.sampling, factor * e.noise_multiplier, e.steps) for e in shape]
    assert 0.999 * target <= account(scaled, 1e-5).epsilon <= target


def test_a_target_that_the_least_noise_meets() -> None:
    least = noise_multiplier(1e6, 1e-5, FullBatch(100), 1)
    assert least == pytest.approx(0.01) and 0.0 < epsilon(least, FullBatch(100), 1, 1e-5) <= 1e6


def test_published_solutions() -> None:
    # jax_privacy's documentation: sigma(eps=1) = 9.66 and 155 steps at eps = 2, for rate 0.1.
    assert noise_multiplier(1.0, 1e-6, Poisson(1_000, 100), 512) == pytest.approx(9.66, rel=1e-3)
    assert max_steps(2.0, 1e-6, Poisson(1_000, 100), noise_multiplier=3.0) == 155


def test_steps_and_batch_size_are_the_largest() -> None:
    steps = max_steps(2.0, 1e-5, Poisson(60_000, 256), noise_multiplier=1.1)
    assert epsilon(1.1, Poisson(60_000, 256), steps, 1e-5) <= 2.0 < epsilon(1.1, Poisson(60_000, 256), steps + 1, 1e-5)
    size = max_batch_size(2.0, 1e-5, Poisson(60_000, 1), steps=1_000, noise_multiplier=1.1)
    assert epsilon(1.1, Poisson(60_000, size), 1_000, 1e-5) <= 2.0
    assert epsilon(1.1, Poisson(60_000, size + 1), 1_000, 1e-5) > 2.0
    assert max_steps(1e-3, 1e-9, FullBatch(100), noise_multiplier=1.0) == 0
    assert max_batch_size(1e6, 1e-5, Poisson(100, 1), steps=10, noise_multiplier=1.0) == 100
    with pytest.raises(AccountingError, match="batch size"):
        max_batch_size(1.0, 1e-5, FullBatch(100), steps=10, noise_multiplier=1.0)


def test_the_free_cap_is_the_smallest() -> None:
    cap = free_cap(Poisson(60_000, 256), noise_multiplier=1.1, steps=14_040, delta=1e-5)
    plain = account(MNIST, 1e-5).epsilon
    with_cap, below = (epsilon(1.1, Poisson(60_000, 256, c), 14_040, 1e-5) for c in (cap, cap - 1))
    assert with_cap <= plain * 1.001 < below


@pytest.mark.parametrize("target", [0.0, -1.0, float("inf"), 10**400, float("nan"), "2"])
def test_impossible_targets_are_refused(target: Any) -> None:
    with pytest.raises(AccountingError, match="target"):
        noise_multiplier(target, 1e-5, Poisson(100, 1), 10)


def test_noise_that_cannot_be_found_is_said() -> None:
    with pytest.raises(AccountingError, match="No noise multiplier"):
        noise_multiplier(1e-9, 1e-15, FullBatch(100), 10**6)
    with pytest.raises(AccountingError, match="calibrated"):
        noise_scale((GaussianSteps(Poisson(100, 1), 0.0),), 1.0, 1e-5)


def test_delta_and_no_steps() -> None:
    assert delta(1.1, Poisson(60_000, 256), 14_040, 2.3795545188) == pytest.approx(1e-5, rel=1e-6)
    assert epsilon(1.1, Poisson(60_000, 256), 0, 1e-5) == 0.0
    assert delta(1.1, Poisson(60_000, 256), 0, 1.0) == 0.0


def test_the_curve_falls_and_bounds_attacks() -> None:
    curve = privacy_curve(MNIST, count=24)
    assert curve.mu == pytest.approx(0.595, abs=2e-3) and curve.clt_mu == pytest.approx(0.573, abs=1e-3)
    assert np.all(np.diff(curve.epsilon) > 0.0) and np.all(np.diff(curve.delta) < 0.0)
    assert curve.delta[-1] == pytest.approx(1e-10, rel=1e-3)
    # mu-GDP at the tight mu lies above the whole curve.
    assert all(gaussian_delta(curve.mu, e) >= d * (1 - 1e-9) for e, d in zip(curve.epsilon, curve.delta, strict=True))
    rates = np.array([0.0, 1e-4, 0.1, 0.5, 1.0])
    misses = curve.trade_off(rates)
    assert misses[0] > 0.99 and misses[-1] == 0.0 and np.all(np.diff(misses) <= 0.0)
    assert np.all(misses + rates <= 1.0 + 1e-12)
    assert curve.to_dict()["mu"] == curve.mu
    with pytest.raises(AccountingError, match="False positive"):
        curve.trade_off(np.array([1.5]))


def test_tight_mu_of_full_batches_is_exact() -> None:
    assert tight_mu((GaussianSteps(FullBatch(1_279), 35.0, 2_000),)) == pytest.approx(2_000**0.5 / 35.0, rel=1e-6)
    with pytest.raises(AccountingError, match="interval"):
        privacy_curve((GaussianSteps(Shuffled(100, 10), 1.0, 10),))
    with pytest.raises(AccountingError, match="at least one"):
        privacy_curve(())


def test_the_search_reaches_the_end_of_its_bracket() -> None:
    """Steps that double once jumped from 36,000 over the limit and found nothing."""
    sigma = noise_multiplier(1e-5, 1e-10, FullBatch(10), steps=1)
    assert 361_900 < sigma < 362_300
    assert epsilon(sigma, FullBatch(10), 1, 1e-10) <= 1e-5
