"""What stands in for the exact accountant: losses on a grid, Renyi divergences, and the lower end of shuffled batches.
Each is put together a second time from what it is made of."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from scipy import stats

from clipwise.accounting._numerics import grid, shuffle
from clipwise.accounting._numerics.contour import exact_delta, exact_epsilon
from clipwise.accounting._numerics.grid import grid_delta, grid_epsilon, rough_delta, rough_epsilon
from clipwise.accounting._numerics.lattice import points_fine
from clipwise.accounting._numerics.laws import Composition, Law, fixed_size, gaussian, mixed, poisson, truncated_poisson
from clipwise.accounting._numerics.saddle import abscissa, period, saddle_table
from clipwise.accounting._numerics.shuffle import ShuffledRun, shuffled_delta, shuffled_epsilon
from clipwise.accounting.accountants.rdp import ORDERS, _by_quadrature, _log_moment, rdp_delta, rdp_epsilon, renyi
from clipwise.errors import NotConverged

from .common import run

LAWS: dict[str, Law] = {
    "removed": poisson(0.05, 1.0, replace=False),
    "added": poisson(0.05, 1.0, replace=False).reversed(),
    "replaced": poisson(0.1, 0.6, replace=True),
    "fixed size": fixed_size(0.1, 0.4),
    "cut": truncated_poisson(100, 0.1, 14, 0.5, replace=False),
    "two of a group": poisson(0.1, 0.5, replace=False, group=2),
}

# Losses on a grid ------------------------------------------------------------------------------------------------

TAIL, CELLS = 1e-12, 1 << 14


def on_grid(law: Law, step: float, t: float = 0.0, cells: int = CELLS) -> tuple[Any, Any]:
    """The losses of the cells and their probabilities, the tilt taken back."""
    start, tilted, log_moment, _ = grid._place(law, TAIL, step, t, cells)
    losses = step * (start + np.arange(cells))
    assert 0.0 <= 1.0 - float(tilted.sum() * math.exp(log_moment)) <= 2 * TAIL + 1e-14 or t
    assert float(tilted.sum()) == pytest.approx(1.0, abs=3 * TAIL)
    return losses, tilted * np.exp(log_moment - t * losses)


@pytest.mark.parametrize("t", [0.0, 3.0])
@pytest.mark.parametrize("name", LAWS)
def test_losses_on_a_grid_keep_the_probabilities_of_both_data_sets(name: str, t: float) -> None:
    law, step = LAWS[name], 3e-3
    losses, mass = on_grid(law, step, t)
    lattice = points_fine(law, TAIL, 200_000)
    assert float(mass.sum()) == pytest.approx(float(lattice.weight.sum()), abs=1e-12)
    other = float((lattice.weight * np.exp(-lattice.loss)).sum())
    assert float((mass * np.exp(-losses)).sum()) == pytest.approx(other, abs=1e-11)
    assert grid._place(law, TAIL, step, t, CELLS)[3] == 2 * TAIL
    for epsilon in (0.0, 0.2, 1.0):
        # Delta grows, by little: each loss is moved apart by less than a cell.
        true = float(lattice.weight @ np.maximum(0.0, -np.expm1(np.minimum(0.0, epsilon - lattice.loss))))
        found = float(mass @ np.maximum(0.0, -np.expm1(np.minimum(0.0, epsilon - losses))))
        assert true * (1 - 1e-9) - 1e-15 <= found <= true + step


def test_losses_below_the_window_are_rounded_up_to_its_start() -> None:
    law, step, cells = LAWS["replaced"], 0.01, 300
    losses, mass = on_grid(law, step, cells=cells)
    assert losses[0] == pytest.approx(-0.125 * cells * step, abs=1.01 * step)
    lattice = points_fine(law, TAIL, 200_000)
    below = float(lattice.weight[lattice.loss < losses[1]].sum())
    assert below > 1e-6 and float(mass[:2].sum()) >= below


def test_a_step_whose_losses_do_not_fit_has_no_grid() -> None:
    law, step = LAWS["removed"], 0.01
    lattice = points_fine(law, TAIL, 200_000)
    cells = int(np.floor(lattice.loss.max() / step) - np.floor(lattice.loss.min() / step)) + 2
    assert len(grid._place(law, TAIL, step, 0.0, cells)[1]) == cells
    with pytest.raises(NotConverged, match="do not fit"):
        grid._place(law, TAIL, step, 0.0, cells - 1)


@pytest.mark.parametrize("names", [("removed",), ("added", "cut"), ("replaced", "fixed size")])
def test_the_transform_is_the_convolution(names: tuple[str, ...]) -> None:
    counts = [2, 1][: len(names)]
    composition = Composition.of([(LAWS[name], count) for name, count in zip(names, counts, strict=True)])
    epsilon, delta = 0.8, 1e-3
    found = grid._composed(composition, TAIL, epsilon, delta, CELLS)
    step = float(found.losses[1] - found.losses[0])
    table = saddle_table(composition, TAIL)
    t = abscissa(table, epsilon, delta)
    most = max(float(np.max(points_fine(law, TAIL, 200_000).loss)) for law, _ in composition.terms)
    assert step * CELLS == pytest.approx(max(2 * period(table, t, epsilon, delta), 1.25 * most), rel=0.02)
    start, mass, scale = 0.0, np.ones(1), 0.0
    for law, count in composition.terms:
        losses, one = on_grid(law, step)
        used = np.nonzero(one)[0][-1] + 1
        for _ in range(count):
            start, mass = start + float(losses[0]), np.convolve(mass, one[:used])
        scale += count * grid._place(law, TAIL, step, t, CELLS)[2]
    losses = start + step * np.arange(len(mass))
    assert found.losses[0] == pytest.approx(max(0.0, epsilon - 0.25 * step * CELLS), abs=step)
    assert found.losses[-1] == pytest.approx(epsilon + 0.75 * step * CELLS, abs=2 * step)
    assert found.lost == pytest.approx(2 * TAIL * sum(counts), rel=1e-12)
    for at in (epsilon, 0.5, 2.0):
        true = float(mass @ np.maximum(0.0, -np.expm1(np.minimum(0.0, at - losses))))
        assert found.delta(at) == pytest.approx(true + found.lost, rel=1e-8)
    tilt = np.exp(scale - t * found.losses)
    norm = math.sqrt(float(np.sum((mass * np.exp(t * losses - scale)) ** 2)))
    per_factor = found.round_off / tilt / norm
    np.testing.assert_allclose(per_factor, 4 * 2.0**-53 * (math.log2(CELLS) + sum(counts)), rtol=1e-6)


def test_delta_on_a_grid_adds_its_round_off_and_what_was_lost() -> None:
    losses, mass = np.array([0.0, 1.0, 2.0, 3.0]), np.array([0.4, 0.3, 0.2, 0.1])
    composed = grid._Composed(losses, mass, np.array([1.0, 2.0, 3.0, 4.0]) * 1e-3, 1e-4)
    weight = [1 - math.exp(-1.0), 1 - math.exp(-2.0)]
    true = 0.2 * weight[0] + 0.1 * weight[1] + math.hypot(3e-3 * weight[0], 4e-3 * weight[1]) + 1e-4
    assert composed.delta(1.0) == pytest.approx(true, rel=1e-12)
    assert composed.delta(3.0) == 1e-4


@pytest.mark.parametrize(
    ("values", "asked", "best"),
    [
        ((2.0, 1.9, 1.8), 3, 1.8),
        ((2.0, 2.0 - 1e-6, 1.0), 2, 2.0 - 1e-6),
        ((2.0, 2.1, 1.0), 2, 2.0),  # the coarser one is a bound too, and the better one
        ((2.0, 1.9, 1.95), 3, 1.9),
        ((0.0, 0.0, 0.0), 2, 0.0),
    ],
)
def test_a_finer_grid_is_asked_until_two_agree(values: tuple[float, ...], asked: int, best: float) -> None:
    seen: list[tuple[int, float]] = []

    def bound(cells: int, known: float) -> float:
        seen.append((cells, known))
        return values[len(seen) - 1]

    assert grid._refined(bound, 1e-5) == best
    assert [cells for cells, _ in seen] == [1 << 17, 1 << 18, 1 << 20][:asked]
    assert [known for _, known in seen] == [1.0, *(min(values[: k + 1]) for k in range(asked - 1))]


@pytest.mark.parametrize("name", LAWS)
def test_a_bound_on_the_grid_is_one_and_close(name: str) -> None:
    composition = Composition.of([(LAWS[name], 40)])
    delta = 1e-6
    exact = exact_epsilon(composition, delta)
    for bound in (grid_epsilon(composition, delta), rough_epsilon(composition, delta)):
        assert exact * (1 - 1e-9) <= bound <= exact * (1 + 5e-5)
    for bound in (grid_delta(composition, exact), rough_delta(composition, exact)):
        assert delta * (1 - 1e-9) <= bound <= delta * (1 + 5e-4)
    at_zero = exact_delta(composition, 0.0)
    assert at_zero * (1 - 1e-9) <= grid_delta(composition, 0.0) <= at_zero * (1 + 5e-4)


def test_the_grid_knows_epsilon_zero_and_the_least_delta() -> None:
    composition = run(3.0, 0.01, 400)
    apart = exact_delta(composition, 0.0)
    assert grid_epsilon(composition, 1.01 * apart) == rough_epsilon(composition, 1.01 * apart) == 0.0
    assert 0.0 < grid_epsilon(composition, 0.9 * apart) < 0.1
    assert grid_delta(composition, 2.0, floor=1e-15) == 1e-15
    assert grid_delta(composition, 0.5) == pytest.approx(exact_delta(composition, 0.5), rel=1e-3)
    assert rough_delta(composition, 0.5) == pytest.approx(exact_delta(composition, 0.5), rel=1e-3)
    assert grid_delta(run(0.2, 0.9, 30), 0.0) <= 1.0


def test_the_grid_is_for_few_laws() -> None:
    many = Composition.of([(poisson(0.01 + 1e-5 * k, 1.0, replace=False), 1) for k in range(201)])
    assert len(many.terms) == 201
    with pytest.raises(NotConverged, match="few laws"):
        rough_epsilon(many, 1e-5)


# Renyi divergences -----------------------------------------------------------------------------------------------


def divergences(law: Law, orders: Any) -> list[float]:
    """log E_Q[(P/Q)^order] / (order - 1), by a sum over outputs in extended precision; which part it was is seen."""
    x = np.linspace(-90.0, 90.0, 18_001, dtype=np.longdouble)
    found = []
    for order in orders:
        total = np.longdouble(0)
        for share, pair in law.parts:
            p, q = (
                np.logaddexp.reduce([np.log(np.longdouble(w)) - (x - m) ** 2 / 2 for w, m in side])
                for side in (pair.p, pair.q)
            )
            if pair.symmetrised:  # losses above zero are the pair's own, those below their mirror image
                own, loss = np.where(p > q, p, -np.inf), p - q
                above = np.sum(np.exp(own + (order - 1) * loss)), np.sum(np.exp(own - loss - (order - 1) * loss))
                rest = np.sqrt(2 * np.pi) / 0.01 - np.sum(np.exp(own)) - np.sum(np.exp(own - loss))
                total += share * (above[0] + above[1] + rest)
            else:
                total += share * np.sum(np.exp(order * p - (order - 1) * q))
        found.append(float(np.log(total * 0.01 / np.sqrt(2 * np.pi)) / (order - 1)))
    return found


@pytest.mark.parametrize("name", LAWS)
def test_renyi_divergences_by_their_definition(name: str) -> None:
    law = LAWS[name]
    chosen = np.array([1.02, 1.1, 1.5, 2.0, 3.3, 4.0, 4.1, 9.9, 11.0, 12.0, 32.0, 33.0, 64.0])
    at = [int(np.argmin(np.abs(ORDERS - order))) for order in chosen]
    assert np.allclose(ORDERS[at], chosen)
    true = np.array(divergences(law, ORDERS[at]))
    # Adding is bounded by removing, whose divergences are larger.
    known = np.array(divergences(law.reversed(), ORDERS[at])) if name == "added" else true
    found = renyi(Composition.of([(law, 3)]))[at]
    assert np.all(found >= 3 * true * (1 - 1e-10)) and np.all(known >= true * (1 - 1e-10))
    np.testing.assert_allclose(found, 3 * known, rtol=1e-7)
    np.testing.assert_allclose(_by_quadrature(law, ORDERS[at])[ORDERS[at] <= 12], true[chosen <= 12], rtol=1e-7)


def test_renyi_divergences_never_exceed_those_without_amplification() -> None:
    plain = renyi(Composition.of([(gaussian(0.7), 2)]))
    np.testing.assert_allclose(plain, ORDERS * 0.49, rtol=1e-12)
    for law in (poisson(0.999, 0.7, replace=False), poisson(0.3, 0.35, replace=True), fixed_size(0.9, 0.35)):
        found = renyi(Composition.of([(law, 2)]))
        assert np.all(np.isfinite(found)) and np.all(found <= plain * (1 + 1e-12)) and np.all(np.diff(found) > -1e-12)
    assert ORDERS[0] == 1.02 and ORDERS[-1] == 65_536.0 and np.all(np.diff(ORDERS) > 0.0) and len(ORDERS) == 165


def test_a_mixture_whose_part_is_seen_has_the_mean_of_the_moments() -> None:
    law = mixed(LAWS["replaced"], ((0.25, 0.5), (0.75, 2.0)))
    at = [int(np.argmin(np.abs(ORDERS - order))) for order in (1.5, 6.0, 40.0)]
    np.testing.assert_allclose(renyi(Composition.of([(law, 1)]))[at], divergences(law, ORDERS[at]), rtol=1e-8)
    huge = mixed(LAWS["replaced"], ((0.5, 10.0), (0.5, 30.0)))  # moments that no double holds
    last = [len(ORDERS) - 5, len(ORDERS) - 1]
    found = renyi(Composition.of([(huge, 1)]))[last]
    reach = max(pair.reach for _, pair in huge.parts)
    assert np.all(found <= 0.5 * ORDERS[last] * reach**2) and np.all(found > 0.9 * 0.5 * ORDERS[last] * reach**2)


@pytest.mark.parametrize(("rate", "mu"), [(0.01, 1.0), (0.5, 0.1), (1e-9, 2.0), (0.2, 8.0)])
@pytest.mark.parametrize("order", [2, 3, 10, 64])
def test_moments_of_whole_orders_in_forty_digits(rate: float, mu: float, order: int) -> None:
    mpmath = pytest.importorskip("mpmath")
    with mpmath.workdps(40):
        q, m = mpmath.mpf(rate), mpmath.mpf(mu)
        terms = [
            mpmath.binomial(order, k) * q**k * (1 - q) ** (order - k) * mpmath.exp(k * (k - 1) * m**2 / 2)
            for k in range(order + 1)
        ]
        true = float(mpmath.log(mpmath.fsum(terms)))
    assert _log_moment(rate, mu, order) == pytest.approx(true, rel=1e-11)


@pytest.mark.parametrize("name", LAWS)
def test_the_renyi_bound_is_the_least_over_all_orders(name: str) -> None:
    composition = Composition.of([(LAWS[name], 20)])
    rho = renyi(composition)
    pairs = [(a, r) for a, r in zip(ORDERS.tolist(), rho.tolist(), strict=True) if math.isfinite(r)]
    for delta in (1e-9, 1e-3, 0.3):
        least = min(r + math.log((a - 1) / a) - math.log(delta * a) / (a - 1) for a, r in pairs)
        whole = min(math.sqrt(-math.expm1(-r)) for _, r in pairs)  # Bretagnolle and Huber: the total variation
        expected = 0.0 if whole < delta else max(0.0, least)
        assert rdp_epsilon(composition, delta) == pytest.approx(expected, rel=1e-11)
    for epsilon in (0.0, 0.5, 4.0):
        logs = [(a - 1) * (r - epsilon + math.log((a - 1) / a)) - math.log(a) for a, r in pairs]
        expected = min(1.0, math.exp(min(0.0, *logs)), *(math.sqrt(-math.expm1(-r)) for _, r in pairs))
        assert rdp_delta(composition, epsilon) == pytest.approx(expected, rel=1e-11)


# Shuffled batches ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mu", "batches"), [(0.3, 2), (1.0, 10), (4.0, 300)])
def test_the_largest_sum_falls_into_a_bin_as_often_as_its_law_says(mu: float, batches: int) -> None:
    mpmath = pytest.importorskip("mpmath")
    edges = np.linspace(-9.0 / mu, 2.0 + 9.0 / mu, 25)
    with mpmath.workdps(40):

        def below(x: float, shift: float) -> Any:
            return mpmath.ncdf((mpmath.mpf(x) - shift) * mu) * mpmath.ncdf(mpmath.mpf(x) * mu) ** (batches - 1)

        for shift in (1.0, 2.0):
            found = shuffle._bin_masses(shift, edges, mu, batches)
            for low, high, mass in zip(edges, edges[1:], found, strict=False):
                true = float(below(float(high), shift) - below(float(low), shift))
                assert mass == pytest.approx(true, rel=1e-9, abs=1e-30)


@pytest.mark.parametrize("epochs", [1, 2, 3])
def test_epochs_of_shuffled_batches_compose(epochs: int) -> None:
    """Losses of one epoch on a coarse grid, convolved; rounding down may lose a little, never gain."""
    mu, batches = 0.5, 4
    edges = np.linspace(-9.0 / mu, 2.0 + 9.0 / mu, 4_001)
    p, q = (shuffle._bin_masses(shift, edges, mu, batches) for shift in (2.0, 1.0))
    seen = (p > 1e-18) & (q > 1e-30)
    p, loss = p[seen], np.log(p[seen] / q[seen])
    width = 1e-3
    place = np.round(loss / width).astype(int)
    one = np.bincount(place - place.min(), weights=p)
    mass = np.ones(1)
    for _ in range(epochs):
        mass = np.convolve(mass, one)
    losses = width * (epochs * int(place.min()) + np.arange(len(mass)))
    run_of = ShuffledRun(mu, batches, epochs)
    for epsilon in (0.0, 0.5, 1.5):
        true = float(mass @ np.maximum(0.0, -np.expm1(np.minimum(0.0, epsilon - losses))))
        assert shuffled_delta(run_of, epsilon) == pytest.approx(true, rel=2e-3)
    delta = shuffled_delta(run_of, 0.5)
    assert shuffled_epsilon(run_of, delta) == pytest.approx(0.5, abs=1e-6)
    assert shuffled_epsilon(run_of, 1.01 * shuffled_delta(run_of, 0.0)) == 0.0
    composed, chances = shuffle._composed(run_of)
    assert 1.0 - 1e-9 < float(chances.sum()) < 1.0 + 1e-9 and len(composed) == len(chances)
    # A round-off of the transform is taken off.
    above = composed > 0.5
    assert shuffled_delta(run_of, 0.5) == pytest.approx(
        float(chances[above] @ -np.expm1(0.5 - composed[above])) - 1e-13, abs=1e-16
    )
    assert shuffled_delta(run_of, float(composed[-1])) == 0.0


def test_a_lower_end_is_rounded_down_everywhere() -> None:
    """Each loss of an epoch lies at or above its place on the grid, by less than a cell."""
    run_of = ShuffledRun(1.0, 10, 1)
    losses, mass = shuffle._composed(run_of)
    width = float(losses[1] - losses[0])
    edges = np.linspace(-9.0, 11.0, 20_001)
    p, q = (shuffle._bin_masses(shift, edges, 1.0, 10) for shift in (2.0, 1.0))
    seen = (p > 1e-18) & (q > 1e-30)
    loss = np.log(p[seen] / q[seen])
    mean = float(p[seen] @ loss)
    assert mean - width <= float(mass @ losses) <= mean
    assert width == pytest.approx((loss.max() - loss.min()) / (1 << 19))
    assert loss.max() - width <= losses[-1] <= loss.max() and loss.min() - width <= losses[0] <= loss.min()
    assert stats.norm.cdf(-9.0) < 1e-18 * 1e3  # so far out nothing is left out that a delta could see
