"""Balls in bins: the bound of an epoch against integrals, moments and draws of the pair itself; what is charged when.

The oracles share nothing with the code but the pair: the mean of N(mu e_t, I) over the bins, against N(0, I).
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from scipy import special

from clipwise.accounting import (
    AHEAD,
    INTERRUPTED,
    FederatedRounds,
    GaussianSteps,
    Ledger,
    PrivateCalibration,
    PrivateStatistics,
    account,
    account_delta,
    epsilon,
    max_steps,
    noise_multiplier,
    privacy_curve,
    privacy_panel,
)
from clipwise.accounting._numerics.allocation import _FINENESS, _ratio, allocation_losses, allocation_moments
from clipwise.accounting._numerics.grid import grid_delta, grid_epsilon
from clipwise.accounting._numerics.laws import Allocation, Composition, gaussian
from clipwise.accounting._problem import pose
from clipwise.accounting.accountants.rdp import ORDERS, rdp_epsilon, renyi
from clipwise.correlation import Banded, Tree
from clipwise.errors import AccountingError, LedgerError
from clipwise.sampling import BallsInBins, FullBatch, Poisson, Shuffled

DELTA = 1e-5


# Oracles -----------------------------------------------------------------------------------------------------------


def above(mu: float, strike: Any) -> Any:
    """E[(X - strike)+] of X = exp(mu x - mu^2 / 2)."""
    with np.errstate(divide="ignore", invalid="ignore"):
        z = np.log(np.maximum(strike, 0.0)) / mu
    whole = special.ndtr(0.5 * mu - z) - strike * special.ndtr(-0.5 * mu - z)
    return np.where(strike <= 0.0, 1.0 - strike, whole)


def true_delta(bins: int, used: int, mu: float, eps: float, reverse: bool) -> float:
    """Delta of an epoch by quadrature over all bins but one, whose expectation is known."""
    nodes = np.arange(-8.5, 8.5 + mu, 0.1 if used > 3 else 0.04)
    weights = np.diff(nodes)[0] * np.exp(-0.5 * nodes**2) / math.sqrt(2.0 * math.pi)
    x = np.exp(mu * nodes - 0.5 * mu**2)
    others, weight = np.full(1, float(bins - used)), np.ones(1)
    for _ in range(used - 1):
        others, weight = np.add.outer(others, x).ravel(), np.outer(weight, weights).ravel()
    g = math.exp(eps)
    if reverse:  # (1 - g S)+ = 1 - g S + (g S - 1)+, and (k - X)+ = k - X + (X - k)+
        k = bins / g - others
        return float(weight @ (k - 1.0 + above(mu, k))) * g / bins
    return float(weight @ above(mu, bins * g - others)) / bins


def drawn_deltas(
    parts: list[tuple[int, int, float, int]], epsilons: tuple[float, ...], reverse: bool, size: int
) -> list[tuple[float, float]]:
    """Mean and its standard error of each delta, of draws from the first data set of (bins, used, mu, epochs)."""
    random = np.random.default_rng(5)
    loss = np.zeros(size)
    for bins, used, mu, epochs in parts:
        for _ in range(epochs):
            x = random.standard_normal((size, used))
            if not reverse:
                place = random.integers(bins, size=size)
                inside = np.flatnonzero(place < used)
                x[inside, place[inside]] += mu
            ratio = (np.exp(mu * x - 0.5 * mu**2).sum(axis=1) + bins - used) / bins
            loss += -np.log(ratio) if reverse else np.log(ratio)
    values = [np.maximum(0.0, -np.expm1(np.minimum(0.0, eps - loss))) for eps in epsilons]
    return [(float(each.mean()), float(each.std()) / math.sqrt(size)) for each in values]


def one(bins: int, used: int, mu: float, reverse: bool = False, epochs: int = 1) -> Composition:
    return Composition.of([(Allocation(bins, used, mu, reverse), epochs)])


# One epoch ---------------------------------------------------------------------------------------------------------


EPOCHS = [
    *itertools.product([(2, 2), (3, 3), (2, 1), (5, 3), (40, 2)], [0.3, 1.0, 2.5], [(0.0, 0.1, 0.5, 1.5)]),
    ((4, 4), 1.0, (0.1, 1.0)),
]
"""(bins, used), mu, epsilons"""


def test_the_oracle_knows_the_gaussian_mechanism_and_poisson_sampling() -> None:
    plain = special.ndtr(0.5 - 1.0) - math.e * special.ndtr(-0.5 - 1.0)
    for reverse in (False, True):
        assert true_delta(1, 1, 1.0, 1.0, reverse) == pytest.approx(plain, rel=1e-9)
    step = (GaussianSteps(Poisson(100, 25), 1.0),)
    both = [true_delta(4, 1, 1.0, 0.3, reverse) for reverse in (False, True)]
    assert account_delta(step, 0.3).delta == pytest.approx(max(both), rel=1e-9)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(("place", "mu", "epsilons"), EPOCHS)
def test_the_bound_of_an_epoch_is_never_below_the_truth_and_close(
    place: tuple[int, int], mu: float, epsilons: tuple[float, ...], reverse: bool
) -> None:
    bins, used = place
    for eps in epsilons:
        truth = true_delta(bins, used, mu, eps, reverse)
        bound = grid_delta(one(bins, used, mu, reverse), eps, 1e-18)
        assert bound >= truth * (1 - 1e-9) - 1e-15
        if truth > 1e-9:
            assert bound <= truth * 1.01 + 1e-12


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("epochs", [1, 4])
@pytest.mark.parametrize(("bins", "used", "mu"), [(60, 60, 1.0), (200, 200, 1.6), (60, 25, 1.3)])
def test_draws_of_many_bins_agree_with_the_bound(bins: int, used: int, mu: float, epochs: int, reverse: bool) -> None:
    epsilons = (0.03, 0.2)
    for eps, (found, error) in zip(
        epsilons, drawn_deltas([(bins, used, mu, epochs)], epsilons, reverse, 20_000), strict=True
    ):
        bound = grid_delta(one(bins, used, mu, reverse, epochs), eps)
        assert found - 5 * error <= bound <= found + 5 * error + 1e-3 * found + 1e-4


@pytest.mark.parametrize("reverse", [False, True])
def test_draws_of_a_whole_ledger_agree_with_the_bound(reverse: bool) -> None:
    """Two whole epochs, a part of one, and a plain step: all on one grid."""
    laws = [(Allocation(30, 30, 1.2), 2), (Allocation(30, 7, 1.2), 1), (gaussian(0.5), 1)]
    composed = Composition.of(laws).reversed() if reverse else Composition.of(laws)
    drawn = drawn_deltas([(30, 30, 1.2, 2), (30, 7, 1.2, 1), (1, 1, 0.5, 1)], (0.2, 1.0), reverse, 50_000)
    for eps, (found, error) in zip((0.2, 1.0), drawn, strict=True):
        assert found - 5 * error <= grid_delta(composed, eps) <= found + 5 * error + 2e-3 * found


@pytest.mark.parametrize(("bins", "used", "mu"), [(1, 1, 1.0), (3, 3, 2.0), (235, 235, 0.9), (10**6, 5_000, 1.5)])
def test_a_grid_keeps_every_probability_and_the_mean(bins: int, used: int, mu: float) -> None:
    log_ratio, log_mass, zero, lost = _ratio(bins, used, mu, 1e-12)
    mass = np.exp(log_mass)
    assert 0.0 <= zero <= 1e-12 and 0.0 < lost <= 1e-12
    assert float(mass.sum()) + zero == pytest.approx(1.0, abs=2e-9)
    assert float(mass @ np.exp(log_ratio)) + lost == pytest.approx(1.0, abs=2e-9)
    spread = math.expm1(mu**2) * used / bins**2  # the variance of S
    found = float(mass @ np.expm1(log_ratio) ** 2)
    assert spread * (1 - 1e-6) <= found <= spread * (1 + 8.0 / _FINENESS**2)


@pytest.mark.parametrize(("bins", "mu"), [*itertools.product([2, 17, 300], [0.01, 1.0, 20.0]), (10**9, 1.0)])
def test_no_epoch_is_out_of_reach(bins: int, mu: float) -> None:
    event = GaussianSteps(BallsInBins(bins, 1), 1.0 / mu, bins)
    found = account((event,), 1e-6)
    plain = account((GaussianSteps(FullBatch(1), 1.0 / mu),), 1e-6)
    assert 0.0 <= found.epsilon <= plain.epsilon and found.kind == "upper bound"


def test_a_finer_grid_only_comes_closer(monkeypatch: pytest.MonkeyPatch) -> None:
    law = Allocation(50, 50, 1.0)
    found = []
    for fineness in (12.0, 48.0, 192.0):
        _ratio.cache_clear()
        monkeypatch.setattr("clipwise.accounting._numerics.allocation._FINENESS", fineness)
        found.append(grid_epsilon(Composition.of([(law, 1)]), DELTA))
    _ratio.cache_clear()
    assert found[0] > found[1] > found[2] > 0.999 * found[1]


# Renyi divergences -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("bins", "used", "mu"), [(2, 2, 0.7), (3, 2, 0.7), (4, 4, 1.1)])
def test_moments_are_those_of_all_ways_to_deal_factors_to_bins(bins: int, used: int, mu: float) -> None:
    found = allocation_moments(Allocation(bins, used, mu))
    for order in (1, 2, 3, 5):
        total = 0.0
        for places in itertools.product(range(bins), repeat=order):
            counts = np.bincount(places, minlength=bins)[:used]
            total += math.exp(float(counts @ (counts - 1.0)) * mu**2 / 2.0)
        assert found[order] == pytest.approx(math.log(total / bins**order), abs=1e-10)
    assert found[2] == pytest.approx(math.log1p(math.expm1(mu**2) * used / bins**2), rel=1e-9)


@pytest.mark.parametrize("mu", [0.05, 0.4, 1.0, 2.0, 3.5])
def test_moments_of_a_single_bin_are_those_of_a_gaussian_in_both_directions(mu: float) -> None:
    """E_P[exp((k-1) loss)] = exp(k (k-1) mu^2 / 2), to the last orders that are used."""
    for reverse in (False, True):
        found = allocation_moments(Allocation(1, 1, mu, reverse))
        for order in (2, 3, 8, 20, len(found) - 1):
            assert found[order] == pytest.approx(order * (order - 1) * mu**2 / 2, rel=1e-8, abs=1e-11)


@pytest.mark.parametrize("mu", [0.5, 1.0, 2.0])
def test_high_moments_of_adding_a_record_to_two_bins_are_no_smaller_than_they_are(mu: float) -> None:
    """A sum over a plane. They were followed to 13 deviations only, and those of high orders came out too small."""
    x = np.arange(-75.0, 12.0, 0.1)
    log_value = np.logaddexp.outer(mu * x, mu * x) - 0.5 * mu**2 - math.log(2.0)
    log_mass = np.add.outer(-0.5 * x**2, -0.5 * x**2) + 2.0 * math.log(0.1) - math.log(2.0 * math.pi)
    found = allocation_moments(Allocation(2, 2, mu, reverse=True))
    for order in (2, 5, 12, 25, 40, 64):
        true = special.logsumexp(log_mass - (order - 1) * log_value)
        assert found[order] >= true * (1 - 1e-9)
        if (order - 1) * mu < 40:  # half of it in each bin: within what is followed
            assert found[order] <= true * (1 + 1e-3)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(
    ("bins", "used", "mu"), [(2, 2, 1.0), (50, 50, 1.0), (50, 11, 0.4), (3, 3, 2.5), (900, 900, 0.7)]
)
def test_moments_are_just_below_those_of_the_grid(bins: int, used: int, mu: float, reverse: bool) -> None:
    """Splitting values spreads them, which raises every moment, by little where nothing was cut off."""
    law = Allocation(bins, used, mu, reverse)
    loss, log_weight, _ = allocation_losses(law, 1e-40)
    for order in (2, 3):
        on_grid = special.logsumexp(log_weight + (order - 1) * loss)
        assert on_grid * (1 - 5e-3) - 1e-11 <= allocation_moments(law)[order] <= on_grid * (1 + 1e-9) + 1e-11


def test_whole_orders_bound_those_between() -> None:
    for reverse in (False, True):
        loss, log_weight, _ = allocation_losses(Allocation(20, 20, 1.0, reverse), 1e-40)
        proven = renyi(one(20, 20, 1.0, reverse))
        for order, value in zip(ORDERS, proven, strict=True):
            if 1.05 < order < 6.0:
                true = special.logsumexp(log_weight + (order - 1.0) * loss) / (order - 1.0)
                assert value >= true * (1 - 5e-3)


def test_no_answer_is_above_that_of_renyi_divergences() -> None:
    for bins, mu, epochs in ((10, 1.0, 3), (64, 2.0, 2), (512, 0.5, 100)):
        for reverse in (False, True):
            composed = one(bins, bins, mu, reverse, epochs)
            assert grid_epsilon(composed, DELTA) <= rdp_epsilon(composed, DELTA)


# Answers -----------------------------------------------------------------------------------------------------------


KNOWN = [
    ("CIFAR10", 50_000, 1_000, 1.3, 15, 1e-5, 1.97),
    ("MNIST", 59_904, 256, 1.1, 60, 1e-5, 2.34),
    ("SNLI", 550_144, 32, 0.4, 3, 1 / 550_152, 5.07),
    ("California", 18_432, 256, 1.0, 50, 1 / (1.1 * 18_576), 4.46),
]
"""The paper's runs, with what draws of the pair gave: two digits."""


@pytest.mark.parametrize(("n", "size", "sigma", "epochs", "delta", "drawn"), [row[1:] for row in KNOWN])
def test_the_papers_runs_cost_what_draws_say_and_less_than_poisson_and_shuffled_ones(
    n: int, size: int, sigma: float, epochs: int, delta: float, drawn: float
) -> None:
    steps = epochs * (n // size)
    found = account((GaussianSteps(BallsInBins(n, size), sigma, steps),), delta)
    assert found.epsilon == pytest.approx(drawn, rel=0.01)
    assert found.epsilon < epsilon(sigma, Poisson(n, size), steps, delta)
    assert found.epsilon < 0.5 * epsilon(sigma, Shuffled(n, size), steps, delta)
    assert found.kind == "upper bound" and found.lower is None and found.relation == "zero_out"
    assert f"each of {n} records in one of {n // size} batches of every epoch" in found.statement()


def test_one_bin_is_the_plain_mechanism_and_a_replaced_record_is_in_one_step_of_an_epoch() -> None:
    assert epsilon(3.0, BallsInBins(10, 10), 5, DELTA) == epsilon(3.0, FullBatch(10), 5, DELTA)
    whole, part = BallsInBins(100, 10), Shuffled(100, 10)
    for steps in (1, 10, 11, 40):
        replaced = epsilon(3.0, whole, steps, DELTA, relation="replace_one")
        assert replaced == epsilon(3.0, part, steps, DELTA, relation="replace_one")
        assert replaced > epsilon(3.0, whole, steps, DELTA)


def test_epsilon_rises_with_every_step_and_falls_with_noise_and_records() -> None:
    found = [epsilon(1.0, BallsInBins(80, 10), steps, DELTA) for steps in (1, 2, 5, 8, 9, 15, 16, 17)]
    assert all(a < b for a, b in itertools.pairwise(found))
    found = [epsilon(sigma, BallsInBins(80, 10), 12, DELTA) for sigma in (0.04, 0.1, 1.0, 10.0)]
    assert all(a > b for a, b in itertools.pairwise(found))
    found = [epsilon(1.0, BallsInBins(n, 10), 2 * math.ceil(n / 10), DELTA) for n in (10, 20, 50, 400)]
    assert all(a > b for a, b in itertools.pairwise(found))
    found = [account_delta((GaussianSteps(BallsInBins(80, 10), 1.0, 12),), e).delta for e in (0.0, 0.5, 4.0)]
    assert all(a > b for a, b in itertools.pairwise(found))


def test_epsilon_and_delta_are_inverse_to_each_other() -> None:
    for steps in (3, 8, 20):
        events = (GaussianSteps(BallsInBins(80, 10), 1.5, steps),)
        for delta in (1e-3, 1e-12):
            assert account_delta(events, account(events, delta).epsilon).delta == pytest.approx(delta, rel=5e-3)


def test_noise_steps_panel_and_curve_are_found() -> None:
    sampling = BallsInBins(200, 25)
    sigma = noise_multiplier(3.0, DELTA, sampling, steps=16)
    assert 2.997 <= epsilon(sigma, sampling, 16, DELTA) <= 3.0
    assert max_steps(3.0, DELTA, sampling, noise_multiplier=sigma * 1.001) == 16
    events = (GaussianSteps(sampling, sigma, 16),)
    panel = privacy_panel(events, DELTA)
    assert {"exact", "rdp", "gdp", "edgeworth"} == set(panel)
    assert panel["exact"].epsilon <= panel["rdp"].epsilon and panel["gdp"].printed.startswith("~")
    assert panel["edgeworth"].epsilon == pytest.approx(panel["exact"].epsilon, rel=0.06)
    curve = privacy_curve(events, min_delta=1e-6, count=4)
    assert curve.kind == "upper bound" and np.all(np.diff(curve.delta) < 0.0)
    with pytest.raises(AccountingError, match="BallsInBins sampling; ask exact"):
        account(events, DELTA, "pld")


# What is charged when ----------------------------------------------------------------------------------------------


BINS = BallsInBins(40, 10)  # four batches an epoch
PIECES = 4


def test_an_event_within_an_epoch_is_covered_wherever_it_begins() -> None:
    """What was seen can show that the record is in what is left of the epoch: then no batch before counts."""
    before = GaussianSteps(BINS, 50.0, 1)
    for steps in (1, 3, 6):
        charged = account((before, GaussianSteps(BINS, 1.0, steps)), DELTA).epsilon
        for left in range(PIECES):
            tail, rest = min(left, steps), max(0, steps - left)
            laws = [(Allocation(left, tail, 1.0), 1)] if left > 1 and tail else [(gaussian(1.0), 1)] * min(1, tail)
            laws += [(Allocation(PIECES, PIECES, 1.0), rest // PIECES)] if rest >= PIECES else []
            laws += [(Allocation(PIECES, rest % PIECES, 1.0), 1)] if rest % PIECES else []
            composed = Composition.of(laws)
            for one_way in (composed, composed.reversed()):
                true = (
                    grid_epsilon(one_way, DELTA)
                    if one_way.terms
                    else account((GaussianSteps(FullBatch(1), 1.0, round(one_way.gaussian)),), DELTA).epsilon
                )
                assert charged >= true


@pytest.mark.parametrize("split", [1, 4, 6])
def test_splitting_a_run_changes_nothing_and_interruptions_belong_to_it(split: int) -> None:
    whole = GaussianSteps(BINS, 1.0, 8)
    expected = account((whole,), DELTA).epsilon
    parts = (whole.repeated(split), whole.repeated(8 - split))
    assert account(parts, DELTA).epsilon == expected
    for reason in (INTERRUPTED, AHEAD):
        charged = (parts[0], parts[1].changed(reason=reason))
        assert account(charged, DELTA).epsilon == account(charged[::-1], DELTA).epsilon == expected
        assert len(Ledger(charged).events) == 2  # a reader sees them
    assert account((parts[0], parts[1].changed(reason="another run")), DELTA).epsilon > expected
    assert account((parts[0], parts[1].changed(noise_multiplier=1.001)), DELTA).epsilon > expected
    again = (parts[0], parts[0].on_the_same_batch(1).changed(reason="repeated"), parts[1])
    assert account(again, DELTA).epsilon > account((whole, PrivateStatistics(1.0)), DELTA).epsilon


def test_changed_data_are_still_warned_of_after_an_interruption() -> None:
    events = (
        GaussianSteps(BINS, 1.0, 3),
        GaussianSteps(BINS, 1.0, 1, reason=INTERRUPTED),
        GaussianSteps(BINS, 1.0, 4, reason="changed data"),
    )
    for given in (events, events[1:]):
        assert any("Records were changed" in text for text in account(given, DELTA).warnings)


def test_statistics_before_a_run_do_not_hide_where_its_epochs_begin() -> None:
    run = GaussianSteps(BINS, 1.0, 8)
    assert pose((PrivateStatistics(2.0), run)).upper == pose((run, PrivateStatistics(2.0))).upper
    after = pose((GaussianSteps(Poisson(40, 10), 2.0), run)).upper[0]
    assert after.gaussian == 1.0  # one plain step more


def test_too_many_kinds_of_epochs_are_charged_as_plain_steps() -> None:
    events = tuple(GaussianSteps(BINS, 5.0 + 0.01 * i, 5) for i in range(30))
    (composed, _) = pose(events).upper
    assert len(composed.terms) == 16 and composed.gaussian > 29 / 5.3**2


def test_what_is_not_proven_is_refused() -> None:
    event = GaussianSteps(BINS, 1.0, 8)
    with pytest.raises(AccountingError, match="add_remove"):
        account((event,), DELTA, relation="add_remove")
    with pytest.raises(AccountingError, match="Group privacy is not available for balls in bins"):
        account((event,), DELTA, group=2)
    with pytest.raises(AccountingError, match="own_batches=True: nothing shows"):
        event.changed(own_batches=True)
    for correlation in (Banded(2), Tree()):
        with pytest.raises(AccountingError, match="no proof"):
            event.changed(correlation=correlation)


def test_a_ledger_reads_it_again_and_no_second_run_is_charged(tmp_path: Any) -> None:
    ledger = Ledger([GaussianSteps(BINS, 1.0, 6), PrivateCalibration(4.0)])
    assert Ledger.from_json(ledger.to_json()) == ledger
    assert '"kind": "balls_in_bins",\n    "sample_size": 40,\n    "batch_size": 10' in ledger.to_json()
    Ledger().save(tmp_path / "ledger")
    Ledger.charge(tmp_path / "ledger", [GaussianSteps(BINS, 2.0, 6, reason="a")], DELTA)
    for second in (BINS, Shuffled(40, 10)):
        with pytest.raises(LedgerError, match="one sequence of epochs"):
            Ledger.charge(tmp_path / "ledger", [GaussianSteps(second, 2.0, 6, reason="b")], DELTA)
    Ledger.charge(tmp_path / "ledger", [GaussianSteps(Poisson(40, 10), 2.0, 6)], DELTA)
    rounds = (FederatedRounds(BINS, 2.0, 8),)
    assert account(rounds, DELTA).epsilon == epsilon(2.0, BINS, 8, DELTA)
