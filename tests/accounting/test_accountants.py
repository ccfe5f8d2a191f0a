"""RDP, PLD, GDP and Edgeworth: values, kinds, and the order that must hold between them."""

from __future__ import annotations

import builtins
import math
from typing import Any

import numpy as np
import pytest

from clipwise import Abadi, Plan, Steps
from clipwise.accounting import GaussianSteps, Ledger, ProjectedSteps, account, account_delta, privacy_panel
from clipwise.accounting._numerics.contour import exact_epsilon
from clipwise.accounting._numerics.gaussian import gaussian_epsilon
from clipwise.accounting._numerics.laws import fixed_size, poisson, truncated_poisson
from clipwise.accounting._problem import pose
from clipwise.accounting.accountants.edgeworth import edgeworth_delta, edgeworth_epsilon, saddle_interval
from clipwise.accounting.accountants.gdp import clt_mu
from clipwise.accounting.accountants.rdp import ORDERS, _by_quadrature, _step, rdp_delta, rdp_epsilon
from clipwise.errors import AccountingError, InvalidPlan, MissingExtra
from clipwise.sampling import FixedSize, FullBatch, Poisson, Shuffled, public_size

from .common import MNIST, SNLI, run, scheme

SETTINGS = [(1.3, 0.02, 750, 1e-5), (0.6, 1e-3, 2_000, 1e-6), (1.0, 0.01, 1_000, 1e-8), (20.0, 0.5, 1_000, 1e-6)]


@pytest.mark.parametrize(("rate", "mu"), [(0.01, 1.0), (0.3, 2.5), (1e-5, 0.7), (0.3, 20.0)])
def test_renyi_closed_form_equals_quadrature(rate: float, mu: float) -> None:
    law = poisson(rate, mu, replace=False)
    whole = (np.floor(ORDERS) == ORDERS) & (ORDERS <= 64)
    np.testing.assert_allclose(_step(law)[whole], _by_quadrature(law, ORDERS[whole]), rtol=1e-8, atol=1e-15)


def test_renyi_fractional_order_in_high_precision() -> None:
    mpmath = pytest.importorskip("mpmath")
    q, mu, order = 0.01, 1.0 / 0.7, 4.4
    with mpmath.workdps(30):
        ratio = lambda x: 1 - q + q * mpmath.exp(mu * x - mu**2 / 2)  # noqa: E731
        moment = mpmath.quad(lambda x: mpmath.npdf(x) * ratio(x) ** order, [-12, 0, 4, 8, 20])
        truth = float(mpmath.log(moment) / (order - 1))
    ours = _step(poisson(q, mu, replace=False))[np.argmin(np.abs(ORDERS - order))]
    assert ours == pytest.approx(truth, rel=1e-10)


@pytest.mark.parametrize(
    "law", [poisson(0.01, 1.0, replace=True), fixed_size(0.01, 0.5), truncated_poisson(1000, 0.01, 16, 1.0, False)]
)
def test_renyi_of_other_laws_is_monotone_in_the_order(law: Any) -> None:
    values = _step(law)
    finite = np.isfinite(values)
    assert np.all(values[finite] >= 0.0) and np.all(np.diff(values[finite]) > -1e-12)


@pytest.mark.parametrize(("sigma", "rate", "steps", "delta"), SETTINGS)
def test_exact_is_at_most_rdp_and_pld(sigma: float, rate: float, steps: int, delta: float) -> None:
    events = (GaussianSteps(scheme(rate), sigma, steps),)
    exact = account(events, delta).epsilon
    assert exact <= account(events, delta, "rdp").epsilon
    pytest.importorskip("dp_accounting")
    pld = account(events, delta, "pld")
    assert pld.kind == "upper bound"
    assert exact * (1 - 1e-6) <= pld.epsilon <= exact * 1.001


@pytest.mark.parametrize(
    ("event", "relation", "reach"),
    [
        (GaussianSteps(Poisson(10**9, 1, 3), 1.0, 1_000), None, 1.0),
        (GaussianSteps(Poisson(rate=1e-12, batch_size=1), 1.0, 7), "replace_one", 1.0),
        (GaussianSteps(FixedSize(10**11, 1), 1.0, 2), None, 2.0),
        (ProjectedSteps(Poisson(rate=1e-10, batch_size=1), 1.0, 100, 3), None, 0.8),
    ],
)
def test_rdp_of_rare_records_is_never_zero(event: Any, relation: Any, reach: float) -> None:
    """At least what one step tells at epsilon 0: the rate times how far two Gaussians are apart."""
    distance = event.sampling.batch_size / public_size(event.sampling) * math.erf(reach / 8**0.5)
    assert account_delta((event,), 0.0, "rdp", relation=relation).delta >= distance
    assert account((event,), 0.9 * distance, "rdp", relation=relation).epsilon > 0.0


def test_so_strong_a_tilt_that_one_loss_is_left() -> None:
    found = account((GaussianSteps(FixedSize(727, 30), 0.10877935713511865, 10),), 0.16759981459959966)
    assert found.lower is not None and 0.0 < found.lower <= found.epsilon < 180.0


def test_rdp_delta_inverts_epsilon() -> None:
    composition = run(1.1, 256 / 60_000, 14_040)
    assert rdp_delta(composition, rdp_epsilon(composition, 1e-5)) == pytest.approx(1e-5, rel=1e-9)


def test_pld_is_refused_below_1e_8() -> None:
    with pytest.raises(AccountingError, match="under-states"):
        account(MNIST, 1e-9, "pld")


def test_pld_is_refused_for_groups_that_are_sampled() -> None:
    """Its law of one sampled record would under-state what two of them show."""
    pytest.importorskip("dp_accounting")
    with pytest.raises(AccountingError, match="no group privacy with sampling"):
        account(MNIST, 1e-5, "pld", group=2)


def test_pld_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("dp_accounting"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingExtra, match=r"Ask the exact accountant.*clipwise\[pld\]"):
        account(MNIST, 1e-5, "pld")
    assert "pld" not in privacy_panel(Ledger(MNIST), 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("relation", [None, "replace_one"])
def test_pld_of_schedules_and_truncation(relation: Any) -> None:
    pytest.importorskip("dp_accounting")
    events = (
        GaussianSteps(Poisson(1_000, 20), 2.0, 30),
        GaussianSteps(Poisson(1_000, 20, 40), 2.0, 20),
        GaussianSteps(FullBatch(1_000), 8.0, 5),
    )
    exact, pld = (account(events, 1e-5, name, relation=relation).epsilon for name in ("exact", "pld"))
    assert exact * (1 - 1e-6) <= pld <= exact * 1.001


def test_gdp_is_exact_for_full_batches_only() -> None:
    wine = (GaussianSteps(FullBatch(1_279), 35.0, 2_000),)
    delta = 1 / (1.1 * 1_279)
    gdp = account(wine, delta, "gdp")
    assert gdp.kind == "numerically exact" and gdp.epsilon == pytest.approx(account(wine, delta).epsilon, rel=1e-12)
    mnist = account(MNIST, 1e-5, "gdp")
    assert mnist.kind == "approximation" and mnist.printed == "~2.322" and not mnist.is_bound
    assert account(SNLI, 1 / 550_152, "gdp").epsilon == pytest.approx(1.254, abs=1e-3)


@pytest.mark.parametrize(("sigma", "rate", "epochs", "share"), [(0.5, 1e-4, 3, 0.283), (0.4, 1e-2, 100, 3.536)])
def test_the_central_limit_theorem_errs_both_ways(sigma: float, rate: float, epochs: int, share: float) -> None:
    events = (GaussianSteps(scheme(rate), sigma, round(epochs / rate)),)
    assert account(events, 1e-5, "gdp").epsilon / account(events, 1e-5).epsilon == pytest.approx(share, abs=1e-3)


@pytest.mark.parametrize(
    ("name", "setting", "orders", "tilted"),
    [
        ("cifar", (1.3, 0.02, 750, 1e-5), (2.205, 2.187, 2.133), 2.1038),
        ("mnist", (1.1, 256 / 60_000, 14_040, 1e-5), (2.423, 2.390, 2.381), 2.3794),
        ("snli", (0.4, 32 / 550_152, 51_576, 1 / 550_152), (1.554, 1.754, 1.938), 5.1458),
        ("california", (1.0, 256 / 18_576, 3_650, 1 / (1.1 * 18_576)), (4.823, 4.755, 4.666), 4.6226),
    ],
)
def test_edgeworth_orders(name: str, setting: Any, orders: tuple[float, ...], tilted: float) -> None:
    sigma, rate, steps, delta = setting
    composition = run(sigma, rate, steps)
    assert [edgeworth_epsilon(composition, delta, k) for k in (1, 2, 3)] == pytest.approx(orders, abs=6e-4)
    assert edgeworth_epsilon(composition, delta, 0, "tilted") == pytest.approx(tilted, abs=2e-4)


@pytest.mark.parametrize(
    ("delta", "steps", "value"),
    [(0.1, 2_000, 0.8744), (0.015, 500, 0.7348), (0.015, 10_000, 5.4084), (1e-5, 2_000, 4.2708), (1e-7, 500, 2.753)],
)
def test_edgeworth_one_density(delta: float, steps: int, value: float) -> None:
    composition = run(0.8, 0.01, steps)
    assert edgeworth_epsilon(composition, delta, 4, "one_density") == pytest.approx(value, abs=6e-4)


@pytest.mark.parametrize("form", ["classic", "one_density", "tilted"])
def test_edgeworth_delta_inverts_epsilon(form: Any) -> None:
    composition = run(1.1, 256 / 60_000, 14_040)
    epsilon = edgeworth_epsilon(composition, 1e-5, 2, form)
    assert edgeworth_delta(composition, epsilon, 2, form) == pytest.approx(1e-5, rel=2e-2)


@pytest.mark.parametrize(
    ("setting", "interval"),
    [
        ((1.3, 0.02, 750, 1e-5), (1.814, 2.209)),
        ((1.1, 256 / 60_000, 14_040, 1e-5), (2.336, 2.414)),
        ((0.4, 32 / 550_152, 51_576, 1 / 550_152), (0.0, 6.60)),
    ],
)
def test_the_rigorous_interval_holds_the_exact_value(setting: Any, interval: tuple[float, float]) -> None:
    sigma, rate, steps, delta = setting
    low, high = saddle_interval(run(sigma, rate, steps), delta)
    assert (low, high) == pytest.approx(interval, abs=1e-3)
    assert low <= exact_epsilon(run(sigma, rate, steps), delta) <= high


def test_edgeworth_refuses_unknown_orders() -> None:
    with pytest.raises(AccountingError, match="order"):
        edgeworth_epsilon(run(1.0, 0.1, 10), 1e-5, 5)
    with pytest.raises(AccountingError, match="order"):
        edgeworth_epsilon(run(1.0, 0.1, 10), 1e-5, 0)


@pytest.mark.parametrize(
    ("scheme", "sigma", "steps"), [(Poisson(117, 1, 3), 0.2976, 19_451), (Poisson(60_000, 256), 0.01, 1_000)]
)
def test_edgeworth_says_where_it_has_no_value(scheme: Poisson, sigma: float, steps: int) -> None:
    events = (GaussianSteps(scheme, sigma, steps),)
    with pytest.raises(AccountingError, match="leaves double precision"):
        account(events, 0.03, "edgeworth", relation="replace_one")


@pytest.mark.parametrize(("order", "form"), [(5, "classic"), (0, "classic"), (3, "clasic"), (0, "")])
def test_an_edgeworth_expansion_that_does_not_exist_is_refused(order: int, form: Any) -> None:
    for question in (edgeworth_epsilon, edgeworth_delta):
        with pytest.raises(AccountingError, match=r"order must be|form must be"):
            question(run(1.0, 0.01, 100), 1e-5, order, form)


def test_gdp_of_a_tiny_mu_is_not_lost_in_rounding() -> None:
    assert clt_mu(run(1e4, 1e-3, 1)) == pytest.approx(1e-3 * math.sqrt(math.expm1(1e-8)), rel=1e-9)


def test_pld_has_a_finer_grid_where_epsilon_is_small() -> None:
    pytest.importorskip("dp_accounting")
    events = (GaussianSteps(Poisson(10_000, 100), 4.0, 100),)
    assert 1.0 <= account(events, 1e-5, "pld").epsilon / account(events, 1e-5).epsilon <= 1 + 2e-5


def test_gdp_of_a_huge_mu() -> None:
    # The central limit theorem's mu of this run is about 1e14: no bound, but no crash either.
    event = GaussianSteps(Poisson(1_339, 1), 0.11336806396179262, 10)
    assert 1e28 < account((event,), 1e-8, "gdp").epsilon < math.inf
    assert math.isinf(gaussian_epsilon(1e200, 1e-8))


@pytest.mark.slow
@pytest.mark.parametrize("scheme", [Poisson(60_000, 256), Poisson(60_000, 256, 300), FixedSize(60_000, 256)])
def test_very_little_noise_has_a_finite_bound_and_less_counts_as_none(scheme: Any) -> None:
    little, less = (GaussianSteps(scheme, sigma, 10) for sigma in (0.01, 0.0099))
    for name in ("exact", "rdp"):
        # Never worse than without any amplification: a shift of at most four sensitivities in each step.
        bound = gaussian_epsilon(4.0 * 100.0 * 10**0.5, 1e-5)
        assert 0.0 < account((little,), 1e-5, name).epsilon <= 1.1 * bound
    nothing = account((less,), 1e-5)
    assert math.isinf(nothing.epsilon) and "below 0.01" in nothing.warnings[-1]


def test_so_much_noise_that_nothing_is_left() -> None:
    for sampling in (FullBatch(100), Poisson(100, 10)):
        for name in ("exact", "rdp", "gdp", "edgeworth"):
            assert account((GaussianSteps(sampling, 1e30, 10),), 1e-5, name).epsilon == 0.0


@pytest.mark.parametrize("noise", [1e31, 1e160, 1e300])
def test_noise_that_numbers_overflow_with_is_refused_everywhere(noise: float) -> None:
    """With 1e200 in the middle of a run the weights became infinite, and the accountants divided by zero."""
    with pytest.raises(AccountingError, match=r"at most 1e[+]30, got"):
        GaussianSteps(FullBatch(100), noise)
    with pytest.raises(InvalidPlan, match=r"at most 1e[+]30, a schedule"):
        Plan(FullBatch(100), 5, Abadi(1.0), noise)
    with pytest.raises(InvalidPlan, match=r"noise multiplier of step 2 must be a number from 0 to 1e[+]30"):
        Steps({0: 1.0, 2: noise})


def test_a_hundred_million_steps_are_accounted_and_pld_says_that_it_cannot() -> None:
    steps = (GaussianSteps(Poisson(60_000, 256), 50.0, 100_000_000),)
    found = {name: account(steps, 1e-5, name).epsilon for name in ("exact", "rdp", "gdp", "edgeworth")}
    assert found["exact"] == pytest.approx(found["gdp"], rel=1e-3) and found["rdp"] > found["exact"] > 3.6
    pytest.importorskip("dp_accounting")
    with pytest.raises(AccountingError, match="minutes for more than 1,000,000 steps; ask exact"):
        account(steps, 1e-5, "pld")


@pytest.mark.parametrize("name", ["exact", "rdp"])
def test_many_different_noises_are_bounded_in_groups(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many terms as groups, whatever the number of events; never less than the truth, and little more."""
    noises = [1.0 + 0.01 * (k * 7 % 30) for k in range(30)]
    events = tuple(GaussianSteps(Poisson(600, 60), noise, 2) for noise in noises)
    truth = account(events, 1e-5, name)
    assert truth.kind != "upper bound" or name == "rdp"
    monkeypatch.setattr("clipwise.accounting._problem._MOST_NOISES", 10)
    problem = pose(events)
    assert len(problem.events) <= 10 and sum(event.count for event in problem.events) == 60
    bound = account(events, 1e-5, name)
    assert truth.epsilon <= bound.epsilon < 1.03 * truth.epsilon
    assert bound.kind == "upper bound" and "30 different events" in bound.warnings[0]
    shuffled = tuple(GaussianSteps(Shuffled(600, 60), noise, 2) for noise in noises)
    assert pose(shuffled).events == shuffled


def test_a_ledger_of_twenty_thousand_noises_has_a_thousand_terms() -> None:
    problem = pose(GaussianSteps(Poisson(60_000, 256), 1.0 + 1e-4 * k) for k in range(20_000))
    assert all(len(each.terms) <= 1_000 for each in problem.upper) and sum(e.count for e in problem.events) == 20_000


def test_panel_has_all_with_their_kinds() -> None:
    pytest.importorskip("dp_accounting")

    class PlanLike:
        @property
        def events(self) -> tuple[GaussianSteps, ...]:
            return MNIST

    panel = privacy_panel(PlanLike(), 1e-5)
    assert list(panel) == ["exact", "rdp", "pld", "gdp", "edgeworth"]
    assert [g.kind for g in panel.values()] == ["numerically exact", "upper bound", "upper bound"] + [
        "approximation"
    ] * 2
    assert all(g.seconds > 0.0 and g.relation == "zero_out" and "Poisson" in g.sampling for g in panel.values())
    assert panel.keys() == privacy_panel(Ledger(MNIST), 1e-5).keys()


def test_nothing_released_costs_nothing() -> None:
    for name in ("exact", "rdp", "gdp", "edgeworth"):
        assert account((), 1e-5, name).epsilon == 0.0
    assert account_delta((), 1.0).delta == 0.0


def test_no_noise_is_infinite_and_said() -> None:
    guarantee = account((GaussianSteps(Poisson(100, 10), 0.0, 3),), 1e-5)
    assert math.isinf(guarantee.epsilon) and guarantee.printed == "infinite"
    assert any("nothing is private" in warning for warning in guarantee.warnings)
    assert guarantee.to_dict()["epsilon"] is None


def test_bad_questions_are_refused() -> None:
    for delta in (0.0, 1.0, -1e-5, 2.0, float("nan"), True, "1e-5"):
        with pytest.raises(AccountingError, match="delta"):
            account(MNIST, delta)  # type: ignore[arg-type]
    for delta in (9e-21, 5e-324):
        with pytest.raises(AccountingError, match="at least 1e-20"):
            account(MNIST, delta)
    with pytest.raises(AccountingError, match="Only events"):
        account(("a step",), 1e-5)  # type: ignore[arg-type]
    for epsilon in (-1.0, float("inf"), float("nan"), 10**400):
        with pytest.raises(AccountingError, match="epsilon"):
            account_delta(MNIST, epsilon)
    with pytest.raises(AccountingError, match="accountant"):
        account(MNIST, 1e-5, "moments")
    with pytest.raises(AccountingError, match="relation"):
        account(MNIST, 1e-5, "exact", relation="swap")  # type: ignore[arg-type]
    with pytest.raises(AccountingError, match="group"):
        pose(MNIST, group=0)


def test_a_delta_is_compared_with_the_smallest_number_of_records() -> None:
    events = [GaussianSteps(FullBatch(n), noise_multiplier=5.0) for n in (1_000, 10)]
    assert not any("outright" in warning for warning in account(events, 0.01).warnings)
    assert any("over 1/10:" in warning for warning in account(events, 0.2).warnings)
