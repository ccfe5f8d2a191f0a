"""The exact accountant against published values, closed forms, other accountants, and itself."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from scipy import stats

from clipwise.accounting import GaussianSteps, account, account_delta
from clipwise.accounting._numerics import contour
from clipwise.accounting._numerics.contour import Attempt, exact_delta, exact_epsilon
from clipwise.accounting._numerics.gaussian import gaussian_delta, gaussian_epsilon, gaussian_mu
from clipwise.accounting._numerics.grid import grid_delta, grid_epsilon
from clipwise.accounting._numerics.lattice import _posterior_moments, points_fine
from clipwise.accounting._numerics.laws import Composition, gaussian, poisson
from clipwise.accounting._numerics.saddle import quick_delta, quick_epsilon, saddle_table, tail_share
from clipwise.accounting._numerics.single import single_delta, single_epsilon
from clipwise.accounting.accountants.gdp import gdp_epsilon
from clipwise.accounting.accountants.rdp import rdp_epsilon
from clipwise.errors import NotConverged
from clipwise.sampling import Poisson

from .common import MNIST, SNLI, VECTORS, run


def of(vector: dict[str, Any]) -> Composition:
    replace = vector["relation"] == "replace"
    return Composition.of([(poisson(q, 1.0 / sigma, replace), steps) for sigma, q, steps in vector["ledger"]])


def test_every_vector_names_its_source_and_tolerance() -> None:
    assert [v["id"] for v in VECTORS] == list(range(1, 24))
    assert all(len(v["source"]) > 10 and 0.0 < v["exact_tol"] <= 1e-4 for v in VECTORS)
    assert all(v["tol"] is None or v["tol"] <= 0.02 for v in VECTORS)


@pytest.mark.parametrize("vector", VECTORS, ids=lambda v: v["name"])
def test_golden_values(vector: dict[str, Any]) -> None:
    if "delta" in vector:
        found = exact_epsilon(of(vector), vector["delta"])
        assert found == pytest.approx(vector["exact_epsilon"], rel=vector["exact_tol"])
    else:
        few = vector["name"] == "dpacc-single"  # three steps: the grid answers
        found = grid_delta(of(vector), vector["epsilon"]) if few else exact_delta(of(vector), vector["epsilon"])
        assert found == pytest.approx(vector["exact_delta"], rel=vector["exact_tol"])


@pytest.mark.parametrize("vector", [v for v in VECTORS if v["tol"] is not None], ids=lambda v: v["name"])
def test_published_values(vector: dict[str, Any]) -> None:
    method, published = vector["published_method"], vector["published"]
    composition = of(vector)
    if "epsilon" in vector:
        found = grid_delta if vector["name"] == "dpacc-single" else exact_delta
        assert found(composition, vector["epsilon"]) == pytest.approx(published, abs=max(vector["tol"], 1e-9))
    elif method == "RDP":
        # For fractional orders ours is the moment itself, where the published sum of absolute terms is slightly larger.
        ours = rdp_epsilon(composition, vector["delta"])
        assert published - 1e-4 < ours < published + vector["tol"]
    elif method == "RDP old conversion":
        assert rdp_epsilon(composition, vector["delta"]) < published
    else:
        assert exact_epsilon(composition, vector["delta"]) == pytest.approx(published, abs=vector["tol"])


def test_published_gdp() -> None:
    (vector,) = [v for v in VECTORS if v["published_method"] == "CLT-GDP" and v["name"] == "opacus-gdp"]
    low, high = vector["published"]
    assert low < gdp_epsilon(of(vector), vector["delta"]) < high


@pytest.mark.parametrize(
    ("events", "delta", "printed"),
    [(MNIST, 1e-5, "2.380"), (SNLI, 1 / 550_152, "5.131")],
    ids=["mnist", "snli"],
)
def test_the_papers_settings(events: tuple[GaussianSteps, ...], delta: float, printed: str) -> None:
    guarantee = account(events, delta)
    assert (guarantee.printed, guarantee.kind, guarantee.accountant) == (printed, "numerically exact", "exact")


@pytest.mark.parametrize(("steps", "truth"), [(1_500, 1.6553534717241247), (4_500, 2.8514636235029527)])
def test_twelve_digits_of_published_high_precision_values(steps: int, truth: float) -> None:
    assert exact_epsilon(run(2.0, 0.01, steps), 1e-15) == pytest.approx(truth, rel=1e-12)


def test_snli_as_it_was_run() -> None:
    longer = (GaussianSteps(Poisson(550_152, 32), 0.4, 54_076),)
    assert account(longer, 1 / 550_152).epsilon == pytest.approx(5.163332, abs=1e-6)


def test_full_batch_is_the_closed_form() -> None:
    composition = Composition.of([(gaussian(0.5), 9), (gaussian(1.0), 4)])
    assert exact_epsilon(composition, 1e-7) == pytest.approx(gaussian_epsilon(2.5, 1e-7), rel=1e-12)


def test_a_gaussian_part_inside_the_contour() -> None:
    # Rate 1 - 1e-12 is not the closed form's branch, but must agree with it.
    nearly = Composition.of([(gaussian(1.0), 1), (poisson(1.0 - 1e-12, 0.5, replace=False), 12)])
    assert exact_epsilon(nearly, 1e-6) == pytest.approx(gaussian_epsilon(2.0, 1e-6), rel=1e-9)


@pytest.mark.parametrize("mu", [1e-3, 0.3, 4.0, 50.0])
@pytest.mark.parametrize("delta", [1e-15, 1e-5, 0.1])
def test_gaussian_inverses(mu: float, delta: float) -> None:
    epsilon = gaussian_epsilon(mu, delta)
    if epsilon > 0.0:
        assert gaussian_delta(mu, epsilon) == pytest.approx(delta, rel=1e-7)
        assert gaussian_mu(epsilon, delta) == pytest.approx(mu, rel=1e-7)


@pytest.mark.parametrize("sigma", [0.4, 0.8, 2.0])
@pytest.mark.parametrize(("rate", "steps"), [(1e-3, 20_000), (0.05, 500), (0.5, 40)])
def test_delta_inverts_epsilon(sigma: float, rate: float, steps: int) -> None:
    composition = run(sigma, rate, steps)
    for delta in (1e-10, 1e-4):
        epsilon = exact_epsilon(composition, delta)
        assert exact_delta(composition, epsilon) == pytest.approx(delta, rel=1e-6)


@pytest.mark.parametrize("reverse", [False, True], ids=["remove", "add"])
@pytest.mark.parametrize("delta", [1e-3, 1e-7])
def test_two_steps_against_a_double_integral(reverse: bool, delta: float) -> None:
    composition = run(0.8, 0.2, 2)
    law, _ = composition.terms[0]
    if reverse:
        composition, law = composition.reversed(), law.reversed()
    pair = law.parts[0][1]
    x = np.linspace(-12.0, 14.0, 4001)
    ratio = np.log1p(0.2 * np.expm1(x / 0.8 - 0.5 / 0.64)) * (-1.0 if reverse else 1.0)
    density = sum(w * np.exp(-0.5 * (x - m) ** 2) for w, m in pair.p) * (x[1] - x[0]) / math.sqrt(2 * math.pi)
    total, mass = np.add.outer(ratio, ratio), np.outer(density, density)
    try:
        epsilon = exact_epsilon(composition, delta)
    except NotConverged:
        epsilon = grid_epsilon(composition, delta)
    brute = float(np.sum(mass * np.maximum(0.0, -np.expm1(np.minimum(0.0, epsilon - total)))))
    assert brute == pytest.approx(delta, rel=3e-3)


@pytest.mark.parametrize("reverse", [False, True], ids=["remove", "add"])
def test_one_step_in_closed_form(reverse: bool) -> None:
    composition = run(1.0, 0.1, 1)
    composition = composition.reversed() if reverse else composition
    pair = composition.single
    assert pair is not None
    for delta in (1e-3, 1e-6):
        epsilon = single_epsilon(pair, delta)
        assert single_delta(pair, epsilon) == pytest.approx(delta, rel=1e-9)
        assert exact_epsilon(composition, delta) == epsilon


@pytest.mark.parametrize("epsilon", [0.0, 0.05, 0.1, 2.0])
def test_delta_of_one_step_is_that_of_a_scaled_gaussian(epsilon: float) -> None:
    """P - e^eps Q of rate q is q (N(mu) - c N(0)), and the other way (1 - e^eps (1 - q)) (N(0) - c' N(mu))."""
    q, mu = 0.1, 1.25

    def gaussian_at(log_factor: float) -> float:
        upper, lower = mu / 2 - log_factor / mu, -mu / 2 - log_factor / mu
        return float(stats.norm.cdf(upper) - math.exp(log_factor) * stats.norm.cdf(lower))

    removed = q * gaussian_at(math.log1p(math.expm1(epsilon) / q))
    left = 1.0 - math.exp(epsilon) * (1.0 - q)
    added = left * gaussian_at(epsilon + math.log(q / left)) if left > 0.0 else 1e-18
    one = run(1.0 / mu, q, 1)
    assert exact_delta(one, epsilon) == pytest.approx(removed, rel=1e-9)
    assert exact_delta(one.reversed(), epsilon) == pytest.approx(added, rel=1e-9)
    assert exact_delta(Composition.of([(gaussian(mu), 1)]), epsilon) == pytest.approx(gaussian_at(epsilon), rel=1e-9)
    assert account_delta((GaussianSteps(Poisson(10, 1), 1.0 / mu),), epsilon).delta == pytest.approx(removed, rel=1e-9)


@pytest.mark.parametrize("composition", [run(1.0, 0.1, 1), Composition.of([(gaussian(1.0), 1)])], ids=["one", "full"])
def test_a_delta_too_small_to_tell_is_given_as_its_floor(composition: Composition) -> None:
    assert exact_delta(composition, 60.0) == 1e-18 and exact_delta(composition, 60.0, floor=1e-30) == 1e-30


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sigma", "rate", "steps", "delta"),
    [
        (1.1, 256 / 60_000, 14_040, 1e-5),
        (1.0, 1e-3, 1_000, 1e-6),
        (0.4, 32 / 550_152, 51_576, 1e-6),
        (1.0, 0.01, 1000, 1e-13),
    ],
)
def test_the_fallback_grid_is_an_upper_bound_and_close(sigma: float, rate: float, steps: int, delta: float) -> None:
    composition = run(sigma, rate, steps)
    exact, bound = exact_epsilon(composition, delta), grid_epsilon(composition, delta)
    assert exact * (1 - 1e-9) <= bound <= exact * 1.001
    assert grid_delta(composition, exact) == pytest.approx(delta, rel=1e-2)
    assert grid_delta(composition, exact) >= delta * (1 - 1e-6)


@pytest.mark.parametrize("delta", [1e-3, 1e-6])
def test_the_quick_bound_pays_for_the_tail_that_it_leaves_out(delta: float) -> None:
    composition, faded = run(1.0, 0.01, 1_000), 1e-6 * delta
    table = saddle_table(composition, tail_share(composition, faded))
    quick = quick_epsilon(composition, delta)
    assert quick >= table.renyi_epsilon(math.log(delta - faded)) > 0.0
    assert exact_epsilon(composition, delta) <= quick <= 1.4 * exact_epsilon(composition, delta)
    assert delta <= quick_delta(composition, exact_epsilon(composition, delta)) <= 20 * delta


def test_nothing_was_released_in_no_steps() -> None:
    nothing = Composition.of([])
    assert exact_delta(nothing, 0.0) == exact_epsilon(nothing, 1e-5) == 0.0


def test_the_fallback_grid_does_not_leave_plain_steps_out() -> None:
    both = Composition.of([(poisson(0.05, 1.0, replace=False), 50), (gaussian(1.0), 1)])
    assert both.gaussian == 1.0 and len(both.terms) == 1
    for question, at in ((grid_epsilon, 1e-5), (grid_delta, 1.0)):
        with pytest.raises(NotConverged, match="no plain Gaussian steps"):
            question(both, at)


def test_the_fallback_grid_loses_little() -> None:
    composition = run(1.0, 0.05, 50)
    exact = exact_epsilon(composition, 1e-5)
    assert exact <= grid_epsilon(composition, 1e-5) <= exact * (1 + 3e-6)


def test_moments_of_the_means_given_an_output() -> None:
    mixture, x = ((0.3, 0.0), (0.6, 2.0), (0.1, -1.0)), np.array([-0.5, 0.4, 3.0])
    weights = np.array([[w * stats.norm.pdf(place, loc=mean) for w, mean in mixture] for place in x])
    shares, means = weights / weights.sum(1, keepdims=True), np.array([mean for _, mean in mixture])
    first = shares @ means
    found = _posterior_moments(mixture, x)
    assert found[0] == pytest.approx(first) and found[1] == pytest.approx(shares @ means**2 - first**2)


def test_a_fine_lattice_has_the_points_that_were_asked_for() -> None:
    assert len(points_fine(poisson(0.01, 1.0, replace=False), 1e-12, 30_000).loss) >= 30_000


@pytest.mark.parametrize(("steps", "truth"), [(1_000_000, 0.36995), (1_000, 0.0264774)])
def test_the_fallback_grid_covers_its_own_round_off(steps: int, truth: float) -> None:
    """Values by the same transform in long double arithmetic; without the allowance the first was 0.36968."""
    composition = run(0.45, 1e-7, steps)
    bound = grid_epsilon(composition, 1e-10)
    assert truth <= bound <= 1.06 * truth
    assert grid_delta(composition, truth) >= 1e-10


@pytest.mark.parametrize(
    ("batch", "size", "fewer", "more", "delta"),
    [(1, 10**7, 1_000, 30_000, 1e-10), (1, 10**7, 1_000, 30_000, 1e-15), (1, 10**5, 2, 10, 1e-10)],
)
def test_rare_records_and_large_losses_have_a_tight_answer(
    batch: int, size: int, fewer: int, more: int, delta: float
) -> None:
    """One step's largest loss exceeds all others together: the saddle point lies far left of the usual places."""
    short, long = (account((GaussianSteps(Poisson(size, batch), 0.45, steps),), delta) for steps in (fewer, more))
    assert short.epsilon <= long.epsilon
    assert short.accountant in ("grid", "exact")


def test_a_fallback_says_so() -> None:
    guarantee = account((GaussianSteps(Poisson(10_000, 1), 1.0, 10),), 1e-6)
    assert guarantee.kind == "upper bound" and guarantee.accountant in ("grid", "rdp")
    assert any("did not converge" in warning for warning in guarantee.warnings)
    # Ten steps at rate 1e-4: the answer by a grid of another program is 0.00237.
    assert 0.0023 < guarantee.epsilon < 0.0025


@pytest.mark.parametrize("wrong", [float("nan"), -1.0, 0.0, 1e-30])
def test_a_contour_gone_wrong_is_never_an_answer(wrong: float, monkeypatch: pytest.MonkeyPatch) -> None:
    events = (GaussianSteps(Poisson(1_000, 17), 1.7, 123),)
    truth = account(events, 1e-6).epsilon
    monkeypatch.setattr(contour._Contour, "_terms", lambda self, epsilon: wrong * np.ones_like(self._z))
    guarantee = account(events, 1e-6)
    assert guarantee.accountant != "exact" and guarantee.kind == "upper bound"
    assert guarantee.epsilon >= truth * (1 - 1e-6)


@pytest.mark.parametrize("error", [3e-7, -3e-7])
@pytest.mark.parametrize("scale", [1.0, 0.83], ids=["first", "second"])
def test_contours_that_differ_in_the_seventh_digit_are_no_answer(
    scale: float, error: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of the two goes wrong in turn, by more than they may differ, and then by less."""
    composition, real = run(1.0, 0.01, 1_000), contour._Contour.delta

    def wrong_by(error: float) -> None:
        def delta(self: contour._Contour, epsilon: float) -> float:
            return real(self, epsilon) * (1.0 + (error if self._lattice_scale == scale else 0.0))

        monkeypatch.setattr(contour._Contour, "delta", delta)

    wrong_by(error)
    with pytest.raises(NotConverged, match="Two contours disagree"):
        exact_epsilon(composition, 1e-5, contour.EASY)
    with pytest.raises(NotConverged, match="Two contours disagree"):
        exact_delta(composition, 2.0, contour.EASY)
    wrong_by(error / 6)
    assert exact_epsilon(composition, 1e-5, contour.EASY) > 0.0 and exact_delta(composition, 2.0, contour.EASY) > 0.0


@pytest.mark.parametrize("tail", [1e-7, 1e-6, 1e-5])
def test_what_is_faded_out_with_the_tail_makes_the_answer_larger(tail: float) -> None:
    composition, truth = run(2.0, 0.01, 1_500), 1.6553534717241247  # as published, at delta 1e-15
    attempts = (Attempt(tail, split=False, work=4_000_000),)
    assert truth < exact_epsilon(composition, 1e-15, attempts) < truth * (1.0 + tail)
    assert 1e-15 < exact_delta(composition, truth, attempts) < 1e-15 * (1.0 + 10.0 * tail)


def test_a_tail_that_matters_is_not_faded_out() -> None:
    attempts = (Attempt(1e-3, split=False, work=4_000_000),)
    with pytest.raises(NotConverged, match="Too much of the loss's tail"):
        exact_epsilon(run(2.0, 0.01, 1_500), 1e-15, attempts)


def test_epsilon_zero_is_checked_too() -> None:
    # Total variation between one step's bound and delta: only the contour can tell that epsilon is 0.
    composition = run(3.0, 0.01, 400)
    tv = exact_delta(composition, 0.0)
    assert exact_epsilon(composition, 1.001 * tv) == 0.0
    assert exact_epsilon(composition, 0.999 * tv) > 0.0


def test_remove_dominates_here_and_the_maximum_is_reported() -> None:
    remove = run(1.1, 256 / 60_000, 14_040)
    assert exact_epsilon(remove.reversed(), 1e-5) == pytest.approx(2.2415, abs=1e-4)
    assert account(MNIST, 1e-5).epsilon == exact_epsilon(remove, 1e-5)


def test_delta_of_a_ledger_takes_the_larger_direction() -> None:
    found = account_delta(MNIST, 2.0)
    both = [exact_delta(c, 2.0) for c in (run(1.1, 256 / 60_000, 14_040), run(1.1, 256 / 60_000, 14_040).reversed())]
    assert found.delta == pytest.approx(max(both), rel=1e-12)


def test_a_law_that_overflows_on_the_contour_is_answered_all_the_same() -> None:
    events = (
        GaussianSteps(Poisson(23_805, 1), 7.133416483194745, 1_430),
        GaussianSteps(Poisson(1_194_947, 1), 0.903580942579272, 1),
    )
    guarantee = account(events, 1.6e-4, relation="replace_one", group=5)
    assert 0.0 < guarantee.epsilon <= account(events, 1.6e-4, "rdp", relation="replace_one", group=5).epsilon
