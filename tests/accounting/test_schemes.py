"""Relations, sampling schemes, groups, units: what an answer is about."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from scipy import integrate, optimize, stats

from clipwise.accounting import FederatedRounds, GaussianSteps, Ledger, PrivateCalibration, account, account_delta
from clipwise.accounting._numerics.contour import exact_epsilon
from clipwise.accounting._numerics.gaussian import gaussian_epsilon
from clipwise.accounting._numerics.lattice import Floats
from clipwise.accounting._numerics.shuffle import ShuffledRun, shuffled_delta, shuffled_epsilon
from clipwise.accounting._problem import pose
from clipwise.errors import AccountingError
from clipwise.sampling import FixedSize, FullBatch, Poisson, Shuffled

from .common import MNIST, run, within


@pytest.mark.parametrize(
    ("scheme", "sigma", "steps", "delta", "value"),
    [
        (Poisson(50_000, 1_000), 1.3, 750, 1e-5, 3.693),
        (Poisson(60_000, 256), 1.1, 14_040, 1e-5, 4.217),
        (FullBatch(1_279), 35.0, 2_000, 1 / (1.1 * 1_279), 10.774),
    ],
)
def test_replace_one(scheme: Any, sigma: float, steps: int, delta: float, value: float) -> None:
    events = (GaussianSteps(scheme, sigma, steps),)
    replaced = account(events, delta, relation="replace_one")
    assert replaced.epsilon == pytest.approx(value, abs=6e-4) and replaced.relation == "replace_one"
    assert replaced.epsilon > account(events, delta).epsilon
    assert account(events, delta, relation="zero_out").epsilon == account(events, delta).epsilon


@pytest.mark.parametrize(("cap", "value"), [(256, 12.62), (288, 4.68), (304, 3.11), (320, 2.407), (336, 2.3801)])
def test_truncated_poisson(cap: int, value: float) -> None:
    events = (GaussianSteps(Poisson(60_000, 256, cap), 1.1, 14_040),)
    guarantee = account(events, 1e-5)
    assert guarantee.epsilon == pytest.approx(value, rel=4e-4)
    assert f"cut at {cap}" in guarantee.sampling
    assert guarantee.kind == "upper bound" and "an upper bound" in guarantee.statement()
    assert guarantee.relation == "zero_out" and guarantee.lower is None


def test_truncation_depends_on_the_plan() -> None:
    snli = (GaussianSteps(Poisson(550_152, 32, 60), 0.4, 51_576),)
    assert account(snli, 1 / 550_152).epsilon == pytest.approx(8.35, abs=5e-3)
    mnist = (GaussianSteps(Poisson(60_000, 256, 336), 1.1, 14_040),)
    assert account(mnist, 1e-8).epsilon > 1.01 * account(MNIST, 1e-8).epsilon
    assert account(mnist, 1e-5).epsilon < 1.001 * account(MNIST, 1e-5).epsilon


@pytest.mark.parametrize(
    ("scheme", "sigma", "steps", "high", "low"),
    [(Shuffled(50_000, 1_000), 1.3, 750, 16.53, 6.39), (Shuffled(59_904, 256), 1.1, 14_040, 54.05, 10.85)],
)
def test_shuffled_is_an_interval_never_poisson(scheme: Any, sigma: float, steps: int, high: float, low: float) -> None:
    guarantee = account((GaussianSteps(scheme, sigma, steps),), 1e-5)
    assert guarantee.epsilon == pytest.approx(high, abs=6e-3)
    assert guarantee.lower == pytest.approx(low, abs=0.02)
    assert guarantee.kind == "upper bound" and guarantee.relation == "zero_out"
    assert "shuffled" in guarantee.sampling and "at least" in guarantee.statement()
    assert guarantee.lower > account((GaussianSteps(Poisson(50_000, 1_000), 1.3, 750),), 1e-5).epsilon


def test_shuffled_replace_one_doubles_the_reach() -> None:
    events = (GaussianSteps(Shuffled(50_000, 1_000), 1.3, 750),)
    assert account(events, 1e-5, relation="replace_one").epsilon == pytest.approx(42.4, abs=0.05)


def test_shuffled_lower_bound_reproduces_the_published_values() -> None:
    one_epoch = ShuffledRun(1.0 / 0.4, 10_000, 1)
    assert shuffled_delta(one_epoch, 4.0) == pytest.approx(0.226, abs=5e-4)
    assert shuffled_delta(one_epoch, 12.0) == pytest.approx(7.47e-5, rel=2e-3)
    assert shuffled_delta(one_epoch, shuffled_epsilon(one_epoch, 1e-3)) == pytest.approx(1e-3, rel=1e-6)


@pytest.mark.parametrize(("mu", "batches", "epsilon"), [(1.0, 10, 1.0), (0.5, 4, 0.3), (2.0, 20, 2.0)])
def test_shuffled_lower_bound_of_an_epoch_against_an_integral(mu: float, batches: int, epsilon: float) -> None:
    """Of the largest batch sum: the record's batch has mean 2 or 1, the others 0. Bins may only lose a little of it."""

    def density(x: float, mean: float) -> float:
        own, other = stats.norm.cdf((x - mean) * mu), stats.norm.cdf(x * mu)
        first = stats.norm.pdf((x - mean) * mu) * other ** (batches - 1)
        return float(mu * (first + (batches - 1) * stats.norm.pdf(x * mu) * other ** (batches - 2) * own))

    def excess(x: float) -> float:
        return max(0.0, density(x, 2.0) - math.exp(epsilon) * density(x, 1.0))

    true, _ = integrate.quad(excess, -6.0 / mu, 2.0 + 9.0 / mu, limit=400, epsabs=1e-14, epsrel=1e-10)
    assert (1 - 3e-5) * true <= shuffled_delta(ShuffledRun(mu, batches, 1), epsilon) <= true


def test_shuffled_batches_with_next_to_no_noise_have_no_lower_end() -> None:
    """The two outputs lie a hundred deviations apart: no double tells how likely one is where the other is."""
    apart = ShuffledRun(1.0 / 0.01, 10, 3)
    assert shuffled_epsilon(apart, 1e-5) == 0.0 and shuffled_delta(apart, 0.0) == 0.0
    guarantee = account((GaussianSteps(Shuffled(100, 10), 0.01, 30),), 1e-5)
    assert guarantee.lower == 0.0
    assert guarantee.epsilon == pytest.approx(gaussian_epsilon(100.0 * math.sqrt(3), 1e-5), rel=1e-9)


@pytest.mark.parametrize("relation", [None, "replace_one", "zero_out"])
def test_fixed_size_is_an_interval_of_replacing(relation: Any) -> None:
    guarantee = account((GaussianSteps(FixedSize(50_000, 1_000), 1.3, 750),), 1e-5, relation=relation)
    assert guarantee.relation == "replace_one" and guarantee.kind == "upper bound"
    assert bool(guarantee.warnings) == (relation == "zero_out")
    # The worst data reach a shift of two noise-free sensitivities at the sampling rate: the lower end.
    assert guarantee.lower == pytest.approx(exact_epsilon(run(0.65, 0.02, 750), 1e-5), rel=1e-9)
    assert (
        guarantee.lower
        < guarantee.epsilon
        < account((GaussianSteps(FixedSize(50_000, 1_000), 1.3, 750),), 1e-5, "rdp").epsilon
    )


def delta_of_one_fixed_size_step(rate: float, shift: float, epsilon: Floats) -> Floats:
    """The convex hull of an amplified Gaussian's trade-off function and its inverse, in closed form."""
    inner = np.log1p(np.expm1(np.abs(epsilon)) / rate)
    above = stats.norm.cdf(shift / 2 - inner / shift) - np.exp(inner + stats.norm.logcdf(-shift / 2 - inner / shift))
    return np.asarray(np.where(epsilon >= 0, rate * above, 1 - np.exp(epsilon) * (1 - rate * above)))


@pytest.mark.parametrize(
    ("scheme", "sigma", "steps"),
    [(FixedSize(10, 2), 1.0, 2), (FixedSize(50, 1), 1.3, 3)],
)
def test_a_few_fixed_size_steps_against_a_convolution(scheme: FixedSize, sigma: float, steps: int) -> None:
    """The loss whose delta is the closed form of one step at the points of a grid, and a chord in between."""
    each, top = 4e-3, 14.0
    loss = each * np.arange(-round(top / each), round(top / each) + 1)
    one_step = delta_of_one_fixed_size_step(scheme.batch_size / scheme.sample_size, 2 / sigma, loss)
    slope = np.diff(one_step) / np.diff(np.exp(loss))
    mass = np.append(np.append(0.0, np.diff(slope)), -slope[-1]) * np.exp(loss)
    run_mass = mass
    for _ in range(steps - 1):
        run_mass = np.convolve(run_mass, mass)
    run_loss = each * (np.arange(len(run_mass)) - len(run_mass) // 2)

    def delta(epsilon: float) -> float:
        return float(run_mass @ -np.expm1(np.minimum(0.0, epsilon - run_loss))) + steps * float(one_step[-1])

    truth = optimize.brentq(lambda epsilon: delta(epsilon) - 1e-5, 0.0, top)
    assert account((GaussianSteps(scheme, sigma, steps),), 1e-5).epsilon == pytest.approx(truth, rel=2e-5)


@pytest.mark.parametrize(
    ("scheme", "sigma", "steps", "published"),
    [(FixedSize(50_000, 1_000), 1.3, 750, 4.844), (FixedSize(60_000, 256), 1.1, 14_040, 5.239)],
)
def test_bounds_for_noise_over_twice_the_clipping_norm_do_not_hold(
    scheme: FixedSize, sigma: float, steps: int, published: float
) -> None:
    """dp-accounting's noise multiplier refers to the sensitivity of replacing, 2R; training adds sigma R."""
    dpa = pytest.importorskip("dp_accounting")
    from dp_accounting import rdp

    theirs = rdp.RdpAccountant(neighboring_relation=dpa.NeighboringRelation.REPLACE_ONE)
    theirs.compose(
        dpa.SampledWithoutReplacementDpEvent(scheme.sample_size, scheme.batch_size, dpa.GaussianDpEvent(sigma)), steps
    )
    assert theirs.get_epsilon(1e-5) == pytest.approx(published, abs=1e-3)
    guarantee = account((GaussianSteps(scheme, sigma, steps),), 1e-5, relation="replace_one")
    assert guarantee.lower is not None and guarantee.lower > 1.9 * published
    # Told the truth, half the noise multiplier, it agrees with the interval's upper end.
    told = rdp.RdpAccountant(neighboring_relation=dpa.NeighboringRelation.REPLACE_ONE)
    told.compose(
        dpa.SampledWithoutReplacementDpEvent(scheme.sample_size, scheme.batch_size, dpa.GaussianDpEvent(sigma / 2)),
        steps,
    )
    assert told.get_epsilon(1e-5) > guarantee.epsilon


def test_groups_of_a_thousand_take_no_time() -> None:
    with within(5.0):
        guarantee = account(MNIST, 1e-5, group=1_000)
    assert guarantee.accountant == "exact"
    assert guarantee.epsilon == pytest.approx(124_498.26, rel=1e-6)
    fifty = account(MNIST, 1e-5, group=50)
    assert fifty.epsilon < account(MNIST, 1e-5, "rdp", group=50).epsilon < 1.2 * fifty.epsilon


def test_fixed_size_of_everything_is_a_full_batch() -> None:
    fixed, full = (GaussianSteps(s, 9.0, 50) for s in (FixedSize(100, 100), FullBatch(100)))
    expected = account((full,), 1e-3, relation="replace_one").epsilon
    assert account((fixed,), 1e-3, relation="replace_one").epsilon == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name", ["gdp", "edgeworth", "pld"])
def test_approximations_have_no_formula_for_fixed_size(name: str) -> None:
    if name == "pld":
        pytest.importorskip("dp_accounting")
    with pytest.raises(AccountingError):
        account((GaussianSteps(FixedSize(1_000, 10), 1.0, 10),), 1e-5, name)


def test_groups_of_records() -> None:
    full = (GaussianSteps(FullBatch(100), 10.0, 4),)
    assert account(full, 1e-5, group=3).epsilon == pytest.approx(gaussian_epsilon(0.6, 1e-5), rel=1e-12)
    single, pair, triple = (account(MNIST, 1e-5, group=k).epsilon for k in (1, 2, 3))
    # Better than the general conversion (2 eps, (1 + e^eps) delta), worse than one record.
    apart = account(MNIST, 5e-7).epsilon
    assert (1.0 + math.exp(apart)) * 5e-7 < 1e-5
    assert single < pair < 2.0 * apart and pair < triple
    assert account(MNIST, 1e-5, "rdp", group=2).epsilon > pair
    assert "blanking 2 examples (their contributions" in account(MNIST, 1e-5, group=2).statement()
    with pytest.raises(AccountingError, match="Group"):
        account((GaussianSteps(Poisson(1_000, 10, 20), 1.0, 5),), 1e-5, group=2)


def test_disjoint_calibration_composes_in_parallel() -> None:
    calibration = PrivateCalibration(1.0, disjoint=True)
    assert account((*MNIST, calibration), 1e-5).epsilon == pytest.approx(gaussian_epsilon(1.0, 1e-5), rel=1e-12)
    weak = PrivateCalibration(50.0, disjoint=True)
    assert account((*MNIST, weak), 1e-5).epsilon == account(MNIST, 1e-5).epsilon
    assert account((*MNIST, PrivateCalibration(50.0)), 1e-5).epsilon > account(MNIST, 1e-5).epsilon


def test_a_group_may_lie_in_both_disjoint_parts() -> None:
    """Two records, one trained on and one calibrated with: the cost is at least that of both releases composed."""
    training, calibration = (GaussianSteps(FullBatch(100), 2.0, 1),), PrivateCalibration(2.0, disjoint=True)
    pair = account((*training, calibration), 1e-5, group=2).epsilon
    both = account((*training, PrivateCalibration(2.0)), 1e-5).epsilon
    assert pair >= both


def test_units_do_not_mix() -> None:
    rounds = FederatedRounds(Poisson(1_000, 50), 1.0, 20)
    assert account((rounds,), 1e-4).unit == "client"
    assert "one client" in account((rounds,), 1e-4).statement()
    with pytest.raises(AccountingError, match="mixes"):
        account((*MNIST, rounds), 1e-5)


def test_warnings() -> None:
    assert any("1/60000" in w for w in account(MNIST, 1e-4).warnings)
    assert not account(MNIST, 1e-5).warnings
    loud = account((GaussianSteps(Poisson(1_000, 10), 0.5, 100_000),), 1e-5)
    assert any("epsilon over 50" in w for w in loud.warnings)


def test_a_schedule_is_the_sum_of_its_parts_in_any_order() -> None:
    a, b = GaussianSteps(Poisson(1_000, 10), 1.2, 300), GaussianSteps(Poisson(1_000, 20), 0.9, 100)
    halves = (a.repeated(100), b.repeated(40), a.repeated(200), b.repeated(60))
    whole = account((a, b), 1e-5).epsilon
    assert account(halves, 1e-5).epsilon == account((b, a), 1e-5).epsilon == whole
    assert account((a,), 1e-5).epsilon < whole


def test_delta_of_an_interval_has_a_lower_end() -> None:
    guarantee = account_delta((GaussianSteps(Shuffled(50_000, 1_000), 1.3, 750),), 8.0)
    assert guarantee.lower is not None and 0.0 < guarantee.lower < guarantee.delta <= 1.0


def test_sampling_text_stays_short_for_long_schedules() -> None:
    ledger = Ledger(GaussianSteps(Poisson(10_000, 10 + k), 2.0, 5) for k in range(30))
    assert len(pose(ledger.events).sampling) < 200


def test_a_large_group_that_is_sampled_often_is_accounted() -> None:
    """About half of the records are in each batch: nearly a Gaussian step of half their reach, and somewhat wider."""
    event = GaussianSteps(Poisson(2_000, 1_000), 1_000.0, 10)
    for name in ("exact", "rdp"):
        found = account((event,), 1e-5, name, group=1_000).epsilon
        assert found > gaussian_epsilon(0.5 * 10**0.5, 1e-5) * 0.999
    assert account((event,), 1e-5, group=1_000).epsilon == pytest.approx(
        gaussian_epsilon(0.5 * 10**0.5, 1e-5), rel=1e-2
    )
