"""The Edgeworth accountant against its definition: cumulants by summing over outputs, the series by multiplying out
exp(sum of lambda_k D^k / k!), every integral by a sum over a fine grid."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
import pytest
from numpy.polynomial import hermite_e

from clipwise.accounting._numerics.laws import Composition, gaussian, poisson, truncated_poisson
from clipwise.accounting.accountants import edgeworth
from clipwise.accounting.accountants.edgeworth import edgeworth_delta, edgeworth_epsilon, saddle_interval
from clipwise.errors import AccountingError

from .common import run

MIXED = Composition.of(
    [
        (gaussian(0.1), 9),
        (poisson(0.05, 1.0 / 1.5, replace=False), 60),
        (truncated_poisson(200, 0.1, 24, 0.5, replace=True), 20),
    ]
)
"""Plain Gaussian steps, sampled ones, and some whose law has two parts."""
RUNS = {"one law": run(1.1, 0.01, 2_000), "several": MIXED, "added": run(1.2, 0.05, 400).reversed()}


@cache
def tilted_law(composition: Composition, t: float) -> tuple[float, list[float], float]:
    """log E[exp(t S)], the cumulants kappa_1 .. kappa_6 of S tilted by exp(t S), and the sum of third absolute
    central moments, with the plain Gaussian steps as one summand."""
    g = composition.gaussian
    log_moment, kappa, third = (
        g * t * (t + 1) / 2,
        [g * (t + 0.5), g, 0.0, 0.0, 0.0, 0.0],
        g**1.5 * 4 / math.sqrt(2 * math.pi),
    )
    x = np.linspace(-25.0, 25.0, 6_001)
    for law, count in composition.terms:
        weights, losses = [], []
        for share, pair in law.parts:
            p, q = (sum(w * np.exp(-((x - m) ** 2) / 2) for w, m in side) for side in (pair.p, pair.q))
            weights.append(share * p * (x[1] - x[0]) / math.sqrt(2 * math.pi))
            losses.append(np.log(p / q))
        weight, loss = np.concatenate(weights), np.concatenate(losses)
        raised = weight * np.exp(t * loss)
        total = float(raised.sum())
        raised /= total
        mean = float(raised @ loss)
        moments = [float(raised @ (loss - mean) ** k) / math.factorial(k) for k in range(7)]
        # The log of a power series, term by term: n b_n = n a_n - sum of k b_k a_(n-k).
        logs = [0.0] * 7
        for n in range(1, 7):
            logs[n] = moments[n] - sum(k * logs[k] * moments[n - k] for k in range(1, n)) / n
        log_moment += count * math.log(total)
        kappa = [
            a + count * b
            for a, b in zip(kappa, [mean, *(logs[n] * math.factorial(n) for n in range(2, 7))], strict=True)
        ]
        third += count * float(raised @ np.abs(loss - mean) ** 3)
    return log_moment, kappa, third


def series(kappa: list[float], order: int) -> list[float]:
    """The coefficients of He_0, He_1, ...: a cumulant kappa_k is of order k - 2, and so are products of them."""
    s = math.sqrt(kappa[1])
    found, power = {(0, 0): 1.0}, {(0, 0): 1.0}
    for factor in range(1, order + 1):
        product: dict[tuple[int, int], float] = {}
        for (h, d), c in power.items():
            for k in range(3, 7):
                if h + k - 2 <= order:
                    at = (h + k - 2, d + k)
                    product[at] = product.get(at, 0.0) + c * kappa[k - 1] / s**k / math.factorial(k) / factor
        power = product
        for at, c in power.items():
            found[at] = found.get(at, 0.0) + c
    coefficients = [0.0] * (3 * order + 1)
    for (_, d), c in found.items():
        coefficients[d] += c
    return coefficients


def integral(kappa: list[float], order: int, epsilon: float, weight: Any) -> float:
    """The integral of weight(S) over S > epsilon against the expanded density of S."""
    s = math.sqrt(kappa[1])
    nodes, weights = np.polynomial.legendre.leggauss(400)
    z = (epsilon - kappa[0]) / s
    x = z + (1.0 + nodes) * 20.0
    density = np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi) * hermite_e.hermeval(x, series(kappa, order))
    return float(20.0 * weights @ (density * weight(kappa[0] + s * x)))


def delta_of(composition: Composition, epsilon: float, order: int, form: str, t: float = 0.0) -> float:
    log_moment, kappa, _ = tilted_law(composition, t)
    if form == "classic":
        other = tilted_law(composition, -1.0)[1]
        above = [integral(k, order, epsilon, lambda s: 1.0) for k in (kappa, other)]
        return above[0] - math.exp(epsilon) * above[1]
    excess = integral(kappa, order, epsilon, lambda s: -np.expm1(epsilon - s) * np.exp(-t * (s - epsilon)))
    return math.exp(log_moment - t * epsilon) * excess


@pytest.mark.parametrize("form", ["classic", "one_density"])
@pytest.mark.parametrize("order", [1, 2, 3, 4])
@pytest.mark.parametrize("name", RUNS)
def test_delta_is_the_integral_of_the_series(name: str, order: int, form: Any) -> None:
    for epsilon in (0.0, 0.4, 1.5):
        true = delta_of(RUNS[name], epsilon, order, form)
        assert edgeworth_delta(RUNS[name], epsilon, order, form) == pytest.approx(min(1.0, max(0.0, true)), rel=1e-9)


@pytest.mark.parametrize("order", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("name", RUNS)
def test_the_tilted_form_is_the_integral_around_the_saddle_point(name: str, order: int) -> None:
    composition, places = RUNS[name], (0.7, 1.5, 2.5)
    t, epsilon, log_delta = edgeworth._tilted_curve(composition, places, order)
    assert t.tolist() == list(places)
    for place, at, found in zip(places, epsilon.tolist(), log_delta.tolist(), strict=True):
        mean = tilted_law(composition, place)[1][0]
        assert at == pytest.approx(mean - 1 / place - 1 / (1 + place), rel=1e-8)
        assert math.exp(found) == pytest.approx(delta_of(composition, at, order, "tilted", place), rel=1e-8)
        if at > 0.0:
            assert edgeworth_delta(composition, at, order, "tilted") == pytest.approx(math.exp(found), rel=0.02)
            assert edgeworth_epsilon(composition, math.exp(found), order, "tilted") == pytest.approx(at, rel=1e-5)


@pytest.mark.parametrize("form", ["classic", "one_density"])
@pytest.mark.parametrize("order", [1, 2, 3, 4])
@pytest.mark.parametrize("name", RUNS)
def test_epsilon_is_where_the_series_last_meets_delta(name: str, order: int, form: Any) -> None:
    composition, delta = RUNS[name], 1e-4
    epsilon = edgeworth_epsilon(composition, delta, order, form)
    assert epsilon > 0.0 and delta_of(composition, epsilon, order, form) == pytest.approx(delta, rel=1e-6)
    for share in (1.01, 1.3, 2.0):
        assert edgeworth_delta(composition, share * epsilon, order, form) < delta


@pytest.mark.parametrize("name", RUNS)
def test_the_rigorous_interval_is_the_series_of_order_zero_and_its_error(name: str) -> None:
    """Berry and Esseen's error, 0.56 of the third absolute moments, twice; the weight is t^t / (1+t)^(1+t) at most."""
    composition = RUNS[name]
    places = np.geomspace(0.4, 3.0, 8)
    epsilon, value, error = edgeworth._with_error(composition, places)
    for t, at, middle, around in zip(places, epsilon, value, error, strict=True):
        log_moment, kappa, third = tilted_law(composition, t)
        assert middle == pytest.approx(delta_of(composition, at, 0, "tilted", t), rel=1e-8)
        weight = math.exp(log_moment - t * at) * t**t / (1 + t) ** (1 + t)
        assert around == pytest.approx(weight * 2 * 0.56 * third / kappa[1] ** 1.5, rel=1e-4)
    seen = [(at, middle - around) for at, middle, around in zip(epsilon, value, error, strict=True) if at > 0.1]
    at, least = seen[len(seen) // 2]
    if least > 0.0:
        # Everything below is told apart at this delta, and the search comes close to it.
        assert saddle_interval(composition, least)[0] == pytest.approx(at, rel=2e-3)
    at, most = next((at, middle + around) for at, middle, around in zip(epsilon, value, error, strict=True) if at > 0.3)
    assert saddle_interval(composition, most)[1] == pytest.approx(at, rel=2e-3)


def test_plain_gaussian_steps_have_no_error() -> None:
    plain = Composition.of([(gaussian(1.0), 1)])
    assert saddle_interval(plain, 1e-5) == pytest.approx((4.3771781, 4.3771781), rel=1e-8)
    assert edgeworth_epsilon(plain, 1e-5) == pytest.approx(4.3771781, rel=1e-8)
    assert edgeworth_delta(plain, 4.3771780957) == pytest.approx(1e-5, rel=1e-8)


@pytest.mark.parametrize("form", ["classic", "one_density"])
def test_no_epsilon_exceeds_the_largest_loss(form: Any) -> None:
    """A record that is added makes nothing less likely than 1 - rate times, in each step."""
    for steps, rate, sigma, order in ((1, 0.5, 2.0, 2), (2, 0.5, 2.0, 1), (2, 0.5, 2.0, 2), (1, 0.1, 1.0, 4)):
        most = -steps * math.log1p(-rate)
        added = run(sigma, rate, steps).reversed()
        found = edgeworth_epsilon(added, 1e-12, order, form)
        assert 0.0 < found <= most * (1 + 1e-12)
        if edgeworth_delta(added, most, order, form) > 1e-12:
            assert found == pytest.approx(most, rel=1e-12)


@pytest.mark.parametrize("form", ["classic", "one_density", "tilted"])
def test_a_delta_that_nothing_exceeds_is_met_by_epsilon_zero(form: Any) -> None:
    assert edgeworth_epsilon(run(10.0, 0.01, 10), 0.4, 2, form) == 0.0
    assert 0.0 <= edgeworth_delta(run(10.0, 0.01, 10), 8.0, 2, form) < 1e-12


@pytest.mark.parametrize("form", ["classic", "one_density", "tilted"])
def test_delta_is_at_most_one(form: Any) -> None:
    assert edgeworth_delta(run(0.3, 0.5, 2_000), 0.0, 2, form) == pytest.approx(1.0, rel=1e-6)


def test_a_curve_that_ends_above_delta_is_said() -> None:
    with pytest.raises(AccountingError, match="does not reach this delta; use the exact accountant"):
        edgeworth_epsilon(run(2.0, 0.5, 1).reversed(), 1e-19, 2, "tilted")
