"""The accounting of estimated norms: a bound, and against the true privacy where that can be computed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from scipy import integrate, stats

import clipwise as cw
from clipwise.accounting import PrivateCalibration, ProjectedSteps, account, account_delta, noise_scale, privacy_curve
from clipwise.accounting._numerics.contour import exact_epsilon
from clipwise.accounting._numerics.gaussian import gaussian_delta
from clipwise.accounting._numerics.laws import Composition, Law, gaussian, mixed, poisson
from clipwise.accounting._numerics.projected import spread
from clipwise.accounting._numerics.single import single_delta
from clipwise.errors import AccountingError


def steps(**changes: Any) -> ProjectedSteps:
    fields: dict[str, Any] = {
        "sampling": cw.Poisson(10_000, 100),
        "noise_multiplier": 2.0,
        "projections": 100,
        "steps": 500,
        **changes,
    }
    return ProjectedSteps(**fields)


def exact_norms(event: ProjectedSteps) -> cw.GaussianSteps:
    return cw.GaussianSteps(event.sampling, event.noise_multiplier, event.steps)


# The law of the factors -----------------------------------------------------------------------------------------


def above(parts: tuple[tuple[float, float], ...], factor: float) -> float:
    return sum(share for share, f in parts if f >= factor)


@pytest.mark.parametrize("records", [1, 2, 7])
@pytest.mark.parametrize("projections", [1, 3, 64, 5_000])
def test_rounded_factors_are_larger_than_the_least_of_several_estimates_makes_them(
    projections: int, records: int
) -> None:
    found = spread(projections, records, 0.1, convex=False, spare=1e-12, widest=1e15)
    assert sum(share for share, _ in found.parts) == pytest.approx(1.0, abs=1e-12)
    law = stats.chi2(projections)
    for x in law.ppf(np.linspace(0.001, 0.999, 40)) / projections:
        assert above(found.parts, x**-0.5) >= min(1.0, records * law.cdf(projections * x)) - 1e-12
    largest = max(factor for _, factor in found.parts)
    assert records * law.cdf(projections / largest**2) <= found.lost == pytest.approx(1e-12, rel=1e-4)


@pytest.mark.parametrize("mu", [1e-6, 0.1, 3.0])
@pytest.mark.parametrize("projections", [3, 64, 5_000])
def test_split_factors_keep_the_mean_that_makes_them_worse(projections: int, mu: float) -> None:
    found = spread(projections, 1, mu, convex=True, spare=1e-12, widest=100.0)
    law = stats.chi2(projections)

    def distance(x: float) -> float:
        return math.erf(0.5 * mu * (2.0 * x) ** -0.5) / mu

    low, high = law.ppf(1e-12) / projections, law.isf(1e-15) / projections
    marks = list(law.ppf([1e-6, 1e-3, 0.2, 0.8, 0.999]) / projections)
    true, _ = integrate.quad(
        lambda x: projections * law.pdf(projections * x) * distance(x), low, high, points=marks, limit=400, epsabs=0.0
    )
    kept = sum(share * distance(factor**-2) for share, factor in found.parts)
    assert true * (1 - 1e-10) <= kept <= true * (1 + 1e-7)


@pytest.mark.parametrize("law", [gaussian, lambda mu: poisson(0.01, mu, replace=False),
                                 lambda mu: poisson(0.3, mu, replace=False).reversed()],
                         ids=["full batch", "removed", "added"])  # fmt: skip
def test_delta_is_convex_in_the_total_variation_distance(law: Callable[[float], Law]) -> None:
    u = np.linspace(0.501, 0.9999, 60)
    for epsilon in (0.0, 1e-3, 0.3, 3.0):
        delta = np.array([single_delta(law(2.0 * stats.norm.ppf(value)), epsilon) for value in u])
        assert np.diff(delta, 2).min() >= -1e-12


# Against the truth ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("projections", [12, 50, 400])
@pytest.mark.parametrize("sampling", [cw.FullBatch(1_000), cw.Poisson(1_000, 100)], ids=["full batch", "Poisson"])
def test_one_step_against_its_true_privacy(sampling: Any, projections: int) -> None:
    """The worst gradient is very long: it contributes R/sqrt(X) exactly, and X can be integrated out."""
    event = steps(sampling=sampling, noise_multiplier=3.0, projections=projections, steps=1)
    law = stats.chi2(projections)

    def given(s: float, epsilon: float) -> float:
        mu = 1 / (3.0 * math.sqrt(s / projections))
        if isinstance(sampling, cw.FullBatch):
            return gaussian_delta(mu, epsilon)
        return 0.1 * gaussian_delta(mu, math.log1p(math.expm1(epsilon) / 0.1))

    for epsilon in (0.1, 0.3, 0.5):
        marks = list(law.ppf([1e-9, 1e-6, 1e-3, 0.1, 0.5]))
        true, _ = integrate.quad(
            lambda s, e=epsilon: float(law.pdf(s)) * given(s, e),
            law.ppf(1e-15), law.isf(1e-14), points=marks, limit=400, epsabs=0.0,
        )  # fmt: skip
        found = account_delta([event], epsilon).delta
        assert true * (1 - 1e-6) <= found < 1.1 * true


def test_many_full_batch_steps_with_others_against_their_true_privacy() -> None:
    """Full-batch steps add up: given all X they are one Gaussian step, and X can be drawn."""
    rng = np.random.default_rng(0)
    shifts = np.sqrt((100 / rng.chisquare(100, size=(20_000, 50))).sum(1) / 400.0 + 0.1**2 * 4)
    events = [
        steps(sampling=cw.FullBatch(1_000), noise_multiplier=20.0, steps=50),
        cw.GaussianSteps(cw.FullBatch(1_000), 10.0, 3),
        PrivateCalibration(10.0),
    ]
    for epsilon in (0.3, 1.0, 2.0):
        drawn = np.array([gaussian_delta(shift, epsilon) for shift in shifts])
        error = drawn.std() / math.sqrt(len(drawn))
        found = account_delta(events, epsilon).delta
        assert drawn.mean() - 4 * error <= found <= 1.005 * drawn.mean() + 4 * error


def test_the_mixture_costs_little_where_the_least_estimate_costs_much() -> None:
    event = steps(sampling=cw.FullBatch(1_000), noise_multiplier=10.0, steps=100)
    assert account([exact_norms(event)], 1e-5).printed == "4.378"
    found = account([event], 1e-5)
    assert found.printed == "4.432" and found.kind == "upper bound" and found.lower is None


def by_the_least_estimate(event: ProjectedSteps, delta: float) -> float:
    """A weaker bound: all steps at the noise that is left when no estimate is too small, whose chance is added."""
    found = []
    for share in (0.001, 0.01, 0.1, 0.5):
        kept = math.sqrt(stats.chi2.ppf(share * delta / event.steps, event.projections) / event.projections)
        less = cw.GaussianSteps(event.sampling, kept * event.noise_multiplier, event.steps)
        found.append(account([less], (1 - share) * delta).epsilon)
    return min(found)


SETTINGS = [
    steps(),
    steps(projections=1_000, noise_multiplier=0.8),
    steps(steps=2, noise_multiplier=0.7),
    steps(sampling=cw.FullBatch(100), noise_multiplier=30.0, projections=20),
    steps(sampling=cw.FullBatch(100), noise_multiplier=1.0, projections=64, steps=1),
    steps(sampling=cw.Poisson(60_000, 256), noise_multiplier=1.1, projections=256, steps=14_040),
]


@pytest.mark.parametrize("delta", [1e-5, 1e-9])
@pytest.mark.parametrize("event", SETTINGS, ids=str)
def test_it_lies_between_exact_norms_and_the_least_estimate(event: ProjectedSteps, delta: float) -> None:
    found = account([event], delta).epsilon
    assert account([exact_norms(event)], delta).epsilon < found <= by_the_least_estimate(event, delta)


def optimistic_epsilon(event: ProjectedSteps, delta: float) -> float:
    """X moved to the mean of Phi(mu/2) in each of 60 cells: by convexity better for privacy than the truth."""
    law, r = stats.chi2(event.projections), event.projections
    edges = law.ppf([0.0, *np.geomspace(1e-13, 0.02, 30), *np.linspace(0.05, 0.95, 28), 1 - 1e-9])
    mu, shares, factors = 1 / event.noise_multiplier, [], []
    for low, high in itertools.pairwise(edges):
        weight = law.cdf(high) - law.cdf(low)
        mean, _ = integrate.quad(lambda s: law.pdf(s) * stats.norm.cdf(0.5 * mu * math.sqrt(r / s)), low, high)
        shares.append(weight)
        factors.append(2 * stats.norm.ppf(min(mean / weight, 1 - 1e-15)) / mu)
    shares[-1] += 1 - sum(shares)
    whole = gaussian(mu)
    if isinstance(event.sampling, cw.Poisson):
        whole = poisson(event.sampling.rate, mu, replace=False)
    law_ = mixed(whole, tuple(zip(map(float, shares), map(float, factors), strict=True)))
    return exact_epsilon(Composition.of([(law_, event.steps)]), delta)


@pytest.mark.parametrize("event", [
    steps(sampling=cw.FullBatch(1_000), noise_multiplier=10.0, steps=100),
    steps(sampling=cw.FullBatch(1_000), noise_multiplier=10.0, steps=100, projections=16),
    steps(projections=50),
], ids=str)  # fmt: skip
def test_the_bound_is_within_a_percent_of_an_optimistic_one(event: ProjectedSteps) -> None:
    low, high = optimistic_epsilon(event, 1e-5), account([event], 1e-5).epsilon
    assert low < high < 1.005 * low


# As a part of the accounting ------------------------------------------------------------------------------------


@pytest.mark.parametrize("accountant", ["exact", "rdp", "gdp", "edgeworth"])
def test_no_accountant_calls_it_exact_and_none_is_below_exact_norms(accountant: Any) -> None:
    for sampling in (cw.Poisson(10_000, 100), cw.FullBatch(10_000)):
        event = steps(sampling=sampling, noise_multiplier=2.0 if isinstance(sampling, cw.Poisson) else 60.0)
        found = account([event], 1e-5, accountant)
        assert found.epsilon > account([exact_norms(event)], 1e-5, accountant).epsilon
        assert found.delta == 1e-5
        assert found.kind == ("approximation" if accountant in ("gdp", "edgeworth") else "upper bound")
        assert any("estimated from 100 random projections" in warning for warning in found.warnings)
        if accountant == "rdp":
            assert found.epsilon > account([event], 1e-5).epsilon


def test_more_projections_more_noise_and_fewer_steps_cost_less() -> None:
    for name, values in {
        "projections": (1, 40, 100, 1_000, 10**6),
        "noise_multiplier": (1.0, 2.0, 5.0),
        "steps": (2_000, 500, 1),
    }.items():
        found = [account([steps(**{name: value})], 1e-5).epsilon for value in values]
        assert found == sorted(set(found), reverse=True), name
    exact = account([exact_norms(steps())], 1e-5).epsilon
    assert exact < account([steps(projections=10**6)], 1e-5).epsilon < 1.0001 * exact


@pytest.mark.parametrize("event", [steps(), steps(sampling=cw.FullBatch(1_000), noise_multiplier=50.0)], ids=str)
def test_delta_and_epsilon_agree(event: ProjectedSteps) -> None:
    for delta in (1e-3, 1e-9):
        epsilon = account([event], delta).epsilon
        assert account_delta([event], epsilon).delta == pytest.approx(delta, rel=5e-3)


def test_more_records_cost_more() -> None:
    for event in (steps(), steps(sampling=cw.FullBatch(1_000), noise_multiplier=50.0)):
        plain = exact_norms(event)
        one = account([event], 1e-5).epsilon
        replaced = account([event], 1e-5, relation="replace_one").epsilon
        assert replaced > one and replaced > account([plain], 1e-5, relation="replace_one").epsilon
        both = account([event], 1e-5, group=2).epsilon
        assert both > one and both > account([plain], 1e-5, group=2).epsilon
    shuffled = steps(sampling=cw.Shuffled(10_000, 100), noise_multiplier=10.0)
    found, plain = account([shuffled], 1e-5), account([exact_norms(shuffled)], 1e-5)
    assert found.relation == "zero_out" and found.epsilon > plain.epsilon and found.lower is None


def test_two_records_may_have_any_dependence() -> None:
    """Replacing one in full batches: the two estimates may be equal, independent or opposed."""
    rng = np.random.default_rng(0)
    event = steps(sampling=cw.FullBatch(1_000), noise_multiplier=10.0, projections=30, steps=5)
    rank = rng.random((4_000, 5))
    for other in (rank, rng.random((4_000, 5)), 1 - rank):
        mu = sum(np.sqrt(30 / stats.chi2.ppf(ranks, 30)) for ranks in (rank, other)) / 10.0
        drawn = np.array([gaussian_delta(shift, 1.0) for shift in np.sqrt((mu**2).sum(1))])
        assert drawn.mean() < account_delta([event], 1.0, relation="replace_one").delta


def test_two_opposed_estimates_may_cost_more_than_equal_ones() -> None:
    """At epsilon 0 delta is concave in the shift, so replacing one record is no twofold step of one estimate."""
    rank = (np.arange(2_000) + 0.5) / 2_000
    factor = np.sqrt(10 / stats.chi2.ppf(rank, 10))
    equal, opposed = (float((2 * stats.norm.cdf(mu / 2) - 1).mean()) for mu in (2 * factor, factor + factor[::-1]))
    event = steps(sampling=cw.FullBatch(1_000), noise_multiplier=1.0, projections=10, steps=1)
    assert equal + 0.01 < opposed < account_delta([event], 0.0, relation="replace_one").delta


def test_mixed_ledgers_and_their_files() -> None:
    ledger = cw.Ledger([steps(steps=3), steps(steps=2), cw.GaussianSteps(cw.Poisson(10_000, 100), 2.0, 10)])
    assert [event.count for event in ledger.events] == [5, 10] and ledger.steps == 15
    again = cw.Ledger.from_json(ledger.to_json())
    assert again == ledger
    assert again.epsilon(1e-5) > cw.Ledger(ledger.events[:1]).epsilon(1e-5)
    full, sampled = (
        steps(sampling=s, noise_multiplier=n) for s, n in ((cw.FullBatch(1_000), 50.0), (again.events[0].sampling, 2.0))
    )
    several = [full, exact_norms(sampled), sampled]
    parts = [account([event], 1e-5).epsilon for event in several]
    assert max(parts) < account(several, 1e-5).epsilon < sum(parts)
    apart, together = [full, exact_norms(full), full], [full.repeated(1_000), exact_norms(full)]
    assert account(apart, 1e-5).epsilon == pytest.approx(account(together, 1e-5).epsilon, rel=1e-6)


def test_beside_steps_of_a_fixed_size_all_is_about_replacing() -> None:
    """One event has a meaning for replacing only: the others then cost two records, whichever comes first."""
    estimated = steps(sampling=cw.FullBatch(1_000), noise_multiplier=20.0, steps=10)
    fixed = cw.GaussianSteps(cw.FixedSize(1_000, 1_000), 30.0, 2)
    parts = [account([event], 1e-5, relation="replace_one").epsilon for event in (estimated, fixed)]
    assert parts[0] > 1.5 * account([estimated], 1e-5).epsilon
    for order in ([estimated, fixed], [fixed, estimated]):
        found = account(order, 1e-5)
        assert found.relation == "replace_one" and found.epsilon > max(parts)
        # The lower end of the fixed size's steps holds for exact norms only.
        assert found.lower is None and account([exact_norms(estimated), fixed], 1e-5).lower is not None


def test_noise_can_be_calibrated() -> None:
    scale = noise_scale([steps(noise_multiplier=1.0)], epsilon=2.0, delta=1e-5)
    assert 1.99 < account([steps(noise_multiplier=scale)], 1e-5).epsilon <= 2.0


def test_there_is_a_privacy_curve() -> None:
    event = steps(sampling=cw.FullBatch(1_000), noise_multiplier=10.0, steps=100)
    curve = privacy_curve([event], count=6)
    assert 1.0 < curve.mu < 1.03 and (np.diff(curve.delta) < 0).all()


def test_what_has_no_answer_is_refused() -> None:
    with pytest.raises(AccountingError, match="no privacy loss distribution for estimated norms"):
        account([steps()], 1e-5, "pld")
    with pytest.raises(AccountingError, match="batches that are cut"):
        steps(sampling=cw.Poisson(10_000, 100, max_batch_size=150))
    with pytest.raises(AccountingError, match="batches of a fixed size"):
        steps(sampling=cw.FixedSize(10_000, 100))
    with pytest.raises(AccountingError, match="projections"):
        steps(projections=0)


def test_so_few_projections_that_nothing_is_proven() -> None:
    assert math.isinf(account([steps(noise_multiplier=0.0)], 1e-5).epsilon)
    found = account([steps(projections=1)], 1e-5)
    assert math.isinf(found.epsilon) and any("Use more" in warning for warning in found.warnings)
    assert 1e-3 < account_delta([steps(projections=1, steps=1)], 1.0).delta < 1.0


# The cells of the factors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("records", [1, 2, 5])
@pytest.mark.parametrize("projections", [1, 8, 200, 20_000])
def test_cells_cover_what_may_happen_and_are_narrow(projections: int, records: int) -> None:
    """From the least estimate that is not lost to the largest that is told apart; cells of four per cent, or 24."""
    spare = 1e-10
    law = stats.chi2(projections)
    for convex in (True, False):
        found = spread(projections, records, 0.1, convex, spare, widest=1e15)
        factors = np.array(sorted(factor for _, factor in found.parts))
        low = law.ppf(spare / records) / projections
        high = (law.isf(1e-9) if records == 1 else law.ppf(1 / records)) / projections
        top = high**-0.5
        assert factors[-1] == pytest.approx(low**-0.5, rel=1e-6)
        width = np.diff(np.log(factors))
        wanted = min(128, max(24, math.ceil(math.log(factors[-1] / top) / 0.04)))
        assert np.allclose(width, math.log(factors[-1] / top) / wanted, rtol=1e-6)
        if convex or records == 1:  # else nothing is rounded to the top
            assert len(width) == wanted and factors[0] == pytest.approx(top, rel=1e-6)
        assert sum(share for share, _ in found.parts) == pytest.approx(1.0, abs=1e-12)
        assert all(share > 0.0 for share, _ in found.parts)
        assert found.lost == pytest.approx(spare, rel=1e-5)
        assert found.lost >= records * law.cdf(projections * factors[-1] ** -2)


def test_shifts_that_no_lattice_holds_are_lost() -> None:
    """With widest ten times the usual shift, an estimate below a hundredth of its square is not covered."""
    found = spread(3, 1, 1.0, convex=True, spare=1e-12, widest=10.0)
    chance = stats.chi2(3).cdf(3 / 100.0)
    assert max(factor for _, factor in found.parts) == pytest.approx(10.0)
    assert found.lost == pytest.approx(chance, rel=1e-6) and chance > 1e-4
    largest = max(found.parts, key=lambda part: part[1])
    assert largest[0] >= chance
    nothing = spread(3, 1, 100.0, convex=True, spare=1e-12, widest=1.0)
    assert nothing.parts == ((1.0, pytest.approx(0.01)),) and nothing.lost == 1.0


@pytest.mark.parametrize("mu", [1e-3, 1.0, 8.0])
def test_a_cell_is_split_so_that_the_mean_is_kept(mu: float) -> None:
    """Of each cell alone: its probability goes to both ends, the worse one a hair more."""
    projections = 30
    split, rounded = (spread(projections, 1, mu, convex, 1e-10, 1e15).parts for convex in (True, False))
    law = stats.chi2(projections)
    worst = [factor**-2 for _, factor in split]

    def u(x: float) -> float:
        return -float(stats.norm.sf(mu / 2 / math.sqrt(x)))

    given = 0.0  # what the cell below has given to its upper end
    for k in (0, 1, 2):
        low, high = worst[k], worst[k + 1]
        mass = float(law.cdf(projections * high) - law.cdf(projections * low))
        mean, _ = integrate.quad(lambda x: projections * law.pdf(projections * x) * u(x), low, high, epsabs=0.0)
        share = (mean / mass - u(high)) / (u(low) - u(high))
        first = float(law.cdf(projections * low)) if k == 0 else 0.0
        assert split[k][0] == pytest.approx(first + given + share * mass, rel=1e-6)
        assert rounded[k][0] == pytest.approx(first + mass, rel=1e-6)
        given = (1 - share) * mass
