"""The quadrature below the exact accountant: laws, lattices of outputs, moments, and the table of saddle points."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from scipy import optimize, special, stats

from clipwise.accounting._numerics import lattice
from clipwise.accounting._numerics.gaussian import gaussian_delta, gaussian_epsilon, gaussian_mu
from clipwise.accounting._numerics.lattice import (
    Points,
    count_points,
    log_density_ratio,
    points,
    points_cut,
    points_fine,
    points_whole,
)
from clipwise.accounting._numerics.laws import (
    Composition,
    Law,
    Pair,
    fixed_size,
    gaussian,
    mixed,
    poisson,
    truncated_poisson,
    truncated_up_to,
)
from clipwise.accounting._numerics.moments import large_share, log1p, log_moment, split_moment
from clipwise.accounting._numerics.saddle import (
    ALIAS,
    Saddle,
    abscissa,
    largest_loss,
    period,
    quick_delta,
    quick_epsilon,
    saddle_table,
    tail_share,
)
from clipwise.accounting._numerics.single import single_delta, single_epsilon
from clipwise.errors import NotConverged

from .common import run
from .oracles import Step, hockey_stick


@pytest.fixture
def mp() -> Any:
    """mpmath with 40 digits."""
    mpmath = pytest.importorskip("mpmath")
    with mpmath.workdps(40):
        yield mpmath


# The Gaussian mechanism ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mu", [1e-9, 1e-3, 0.3, 1.0, 4.0, 60.0, 1e3])
def test_delta_of_two_gaussians_in_forty_digits(mu: float, mp: Any) -> None:
    for share in (0.0, 1e-3, 0.5, 1.0, 3.0, 8.0):
        epsilon = share * mu * (1 + mu / 2)
        true = hockey_stick(Step("remove", 1.0, mu), mp.mpf(epsilon), mp)
        assert gaussian_delta(mu, epsilon) == pytest.approx(float(true), rel=1e-11 * (1 + mu))


def test_a_difference_of_nearly_nothing_is_never_negative() -> None:
    assert all(gaussian_delta(1e-13, 1e-13 * x) >= 0.0 for x in np.linspace(0.0, 38.0, 400))


def test_nothing_is_told_by_a_shift_of_zero() -> None:
    assert gaussian_delta(0.0, 0.0) == gaussian_delta(0.0, 1.0) == gaussian_epsilon(0.0, 1e-5) == 0.0


def test_epsilon_of_two_gaussians_is_zero_from_their_distance_on() -> None:
    apart = gaussian_delta(0.5, 0.0)
    assert apart == pytest.approx(math.erf(0.5 / 8**0.5), rel=1e-13)
    assert gaussian_epsilon(0.5, apart) == gaussian_epsilon(0.5, 1.001 * apart) == 0.0
    assert 0.0 < gaussian_epsilon(0.5, 0.999 * apart) < 0.01


@pytest.mark.parametrize(("epsilon", "mu"), [(0.0, 1e-15), (1e-4, 1e-4), (0.5, 0.3), (3.0, 2.0), (5e15, 1e8)])
def test_the_mu_of_a_point_of_the_curve(epsilon: float, mu: float) -> None:
    assert gaussian_mu(epsilon, gaussian_delta(mu, epsilon)) == pytest.approx(mu, rel=1e-9)


# Laws ------------------------------------------------------------------------------------------------------------


def test_a_pair_knows_its_distances() -> None:
    pair = Pair(((0.5, 1.0), (0.2, -2.0), (0.3, 4.0)), ((0.9, 0.5), (0.1, -0.5)))
    assert (pair.gap, pair.reach, pair.shift) == (3.0, 6.0, None)
    assert Pair(((1.0, -1.5),), ((1.0, 2.0),)).shift == 3.5 == Pair(((1.0, -1.5),), ((1.0, 2.0),)).reach
    assert Pair(((1.0, 2.0),)).gap == 0.0
    assert pair.scaled(2.0) == Pair(((0.5, 2.0), (0.2, -4.0), (0.3, 8.0)), ((0.9, 1.0), (0.1, -1.0)))
    assert pair.reversed() == Pair(pair.q, pair.p)
    assert pair.mirrored() == Pair(((0.9, -0.5), (0.1, 0.5)), ((0.5, -1.0), (0.2, 2.0), (0.3, -4.0)))
    hull = fixed_size(0.1, 1.0).parts[0][1]
    assert hull.symmetrised and hull.reversed() == hull and hull.scaled(3.0).symmetrised and hull.mirrored().symmetrised
    plain = Pair(((1.0, 2.0),), ((1.0, 1.0),))
    assert plain.mirrored() == plain


def test_a_composition_adds_equal_laws_and_squared_shifts() -> None:
    one, two = poisson(0.1, 0.5, replace=False), truncated_poisson(100, 0.1, 12, 1.0, replace=False)
    steps = [(one, 2), (gaussian(0.5), 4), (two, 1), (one, 3), (gaussian(2.0), 1)]
    found = Composition.of(steps)
    assert found.gaussian == 5.0 and dict(found.terms) == {one: 5, two: 1}
    assert found == Composition.of(steps[::-1])
    assert found.single is None and not found.empty and Composition.of([]).empty
    assert found.unamplified == pytest.approx(5.0 + 5 * 0.5**2 + 4.0**2)  # cut batches: from -2 to 2
    assert Composition.of([(one, 1)]).single == one
    for more in ([(one, 2)], [(one, 1), (two, 1)], [(one, 1), (gaussian(1.0), 1)], [(gaussian(1.0), 1)]):
        assert Composition.of(more).single is None and not Composition.of(more).empty
    assert found.reversed() == Composition(5.0, tuple((law.reversed(), n) for law, n in found.terms))


@pytest.mark.parametrize("group", [1, 2, 5])
def test_so_many_records_of_a_group_are_in_a_batch(group: int) -> None:
    ((_, pair),) = poisson(0.2, 0.5, replace=True, group=group).parts
    weights = {0.5 * k: math.comb(group, k) * 0.2**k * 0.8 ** (group - k) for k in range(group + 1)}
    assert {mean: weight for weight, mean in pair.p} == pytest.approx(weights)
    assert {-mean: weight for weight, mean in pair.q} == pytest.approx(weights)
    assert poisson(0.2, 0.5, replace=False, group=group).parts == ((1.0, Pair(pair.p)),)
    assert poisson(1.0, 0.5, replace=False, group=group).parts == ((1.0, Pair(((1.0, group * 0.5),))),)


def test_only_what_never_happens_is_left_out_of_a_group() -> None:
    ((_, pair),) = poisson(1e-3, 1.0, replace=False, group=40).parts
    kept = [k for k in range(41) if math.comb(40, k) * 1e-3**k * (1 - 1e-3) ** (40 - k) > 1e-34]
    assert [mean for _, mean in pair.p] == kept and len(kept) < 20
    assert sum(weight for weight, _ in pair.p) == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize("replaced", [False, True])
@pytest.mark.parametrize(("records", "rate", "cap"), [(30, 0.2, 6), (30, 0.2, 9), (8, 0.5, 1), (8, 0.5, 8)])
def test_a_batch_is_cut_as_often_as_the_others_fill_it(records: int, rate: float, cap: int, replaced: bool) -> None:
    chances = [math.comb(records - 1, k) * rate**k * (1 - rate) ** (records - 1 - k) for k in range(records)]
    full = sum(chances[cap:])
    inside = sum(chance * rate * cap / (k + 1) for k, chance in enumerate(chances) if k >= cap)
    plain = poisson(rate, 0.7, replaced).parts[0][1]
    for law, chance in (
        (truncated_poisson(records, rate, cap, 0.7, replaced), inside / full if full else 0.0),
        (truncated_up_to(records, rate, cap, 0.7, replaced), rate),
    ):
        if cap == records:
            assert law.parts == ((1.0, plain),)
            continue
        (rest, whole), (cut, doubled) = law.parts
        assert (rest, cut) == pytest.approx((1 - full, full), rel=1e-10) and whole == plain
        assert [mean for _, mean in doubled.p] == [0.0, 1.4] and [mean for _, mean in doubled.q] == [0.0, -1.4]
        assert doubled.p[1][0] == doubled.q[1][0] == pytest.approx(chance, rel=1e-10)


def test_shares_scale_a_law() -> None:
    law = poisson(0.3, 2.0, replace=True)
    (_, pair), (_, wider) = mixed(law, ((0.25, 1.0), (0.75, 1.5))).parts
    assert pair == law.parts[0][1] and wider == poisson(0.3, 3.0, replace=True).parts[0][1]
    assert [share for share, _ in mixed(law, ((0.25, 1.0), (0.75, 1.5))).parts] == [0.25, 0.75]


# Outputs and losses ----------------------------------------------------------------------------------------------

LAWS: dict[str, Law] = {
    "removed": poisson(0.01, 1.0, replace=False),
    "added": poisson(0.3, 2.0, replace=False).reversed(),
    "replaced": poisson(0.1, 0.7, replace=True),
    "rare, little noise": poisson(1e-6, 5.0, replace=False),
    "nearly all": poisson(0.999, 0.2, replace=False),
    "three of a group": poisson(0.2, 1.5, replace=False, group=3),
    "many of a group": poisson(0.5, 1e-2, replace=False, group=200),
    "fixed size": fixed_size(0.05, 0.6),
    "cut": truncated_poisson(100, 0.1, 14, 0.8, replace=False),
}


FEW = [name for name in LAWS if name != "many of a group"]
"""Those whose densities are summed quickly."""


@pytest.mark.parametrize("mixture", [((1.0, 2.0),), ((0.9, 0.0), (0.1, 3.0)), ((1e-9, -40.0), (1 - 1e-9, 0.5))])
def test_a_density_over_the_normal_one_in_forty_digits(mixture: Any, mp: Any) -> None:
    x = np.array([-50.0, -5.0, -1e-3, 0.0, 0.4, 9.0, 30.0])
    for place, found in zip(x.tolist(), log_density_ratio(mixture, x).tolist(), strict=True):
        true = mp.log(sum(mp.mpf(w) * mp.exp(m * mp.mpf(place) - mp.mpf(m) ** 2 / 2) for w, m in mixture))
        assert found == pytest.approx(float(true), rel=1e-12, abs=1e-16)


def test_a_density_that_is_nearly_the_normal_one_keeps_its_digits(mp: Any) -> None:
    (found,) = log_density_ratio(((1 - 1e-12, 0.0), (1e-12, 1.0)), np.array([0.7]))
    assert found == pytest.approx(float(mp.log1p(mp.mpf(1e-12) * mp.expm1(mp.mpf("0.2")))), rel=1e-10)


def test_a_density_far_below_the_normal_one_keeps_its_digits(mp: Any) -> None:
    """Weights that sum to one only up to rounding: the difference from one once was the log of a negative number."""
    ((_, pair),) = poisson(0.5, 1e-3, replace=False, group=1_000).parts
    for place, found in zip((-150.0, -2.0), log_density_ratio(pair.p, np.array([-150.0, -2.0])), strict=True):
        true = mp.log(sum(mp.mpf(w) * mp.exp(m * mp.mpf(place) - mp.mpf(m) ** 2 / 2) for w, m in pair.p))
        assert found == pytest.approx(float(true), rel=1e-12)
    (nearly,) = log_density_ratio(((1e-12, 0.0), (1 - 1e-12, 1.0)), np.array([-90.0]))
    assert nearly == pytest.approx(math.log(1e-12), rel=1e-12)


def total(grid: Points, z: complex) -> complex:
    return complex(np.sum(np.exp(grid.log_weight + z * grid.loss)))


@pytest.mark.parametrize("window", [0.0, 0.4], ids=["whole", "split"])
@pytest.mark.parametrize(("tilt", "frequency"), [(0.0, 0.0), (3.0, 2.0), (8.0, 20.0), (12.0, 5.0)])
@pytest.mark.parametrize("name", LAWS)
def test_a_lattice_is_as_fine_as_its_sums_need(name: str, tilt: float, frequency: float, window: float) -> None:
    """Sums over it are those over one of thrice as many points, to the last digits."""
    law = LAWS[name]
    grid, finer = (points(law, 1e-14, tilt, frequency, scale, window) for scale in (1.0, 1 / 3))
    assert 2.8 * len(grid.loss) < len(finer.loss) < 3.2 * len(grid.loss) + 20
    size = abs(total(finer, tilt))
    for z in (0.0, complex(0.0, frequency), complex(tilt, 0.0), complex(tilt, frequency)):
        # Above the largest loss that double precision holds, the fade is all that is left.
        assert abs(total(grid, z) - total(finer, z)) <= 3e-12 * max(1.0, size)
    if window:
        parts = [float(one.weight @ large_share(one, window)) for one in (grid, finer)]
        assert parts[0] == pytest.approx(parts[1], rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("tail", [1e-16, 1e-9, 1e-5])
@pytest.mark.parametrize("name", LAWS)
def test_a_lattice_leaves_out_what_it_may_and_says_so(name: str, tail: float) -> None:
    law = LAWS[name]
    hull = law.parts[0][1].symmetrised  # what is left out of it is counted as no loss, and as lost
    faded, cut = points(law, tail, 4.0, 1.0), points_cut(law, tail)
    assert float(faded.weight.sum()) == pytest.approx(1.0 if hull else 1.0 - faded.lost, abs=3e-3 * tail + 1e-13)
    assert 0.1 * tail < faded.lost <= 100.0 * tail
    assert 1.0 - 2.0 * tail - 1e-14 <= float(cut.weight.sum()) <= 1.0 + 1e-13
    assert cut.lost == 0.0


@pytest.mark.parametrize("name", LAWS)
def test_a_lattice_is_counted_before_it_is_made(name: str) -> None:
    law = LAWS[name]
    for asked in itertools.product((1e-15, 1e-6), (0.5, 20.0), (0.0, 30.0), (1.0, 0.83), (0.0, 0.5)):
        made = len(points(law, *asked).loss)
        if law.parts[0][1].symmetrised:
            assert 0.5 * made <= count_points(law, *asked) <= 2.0 * made
        else:
            assert count_points(law, *asked) == made


@pytest.mark.parametrize("name", FEW)
def test_losses_on_every_lattice_have_the_probabilities_of_both_data_sets(name: str) -> None:
    """Sums of exp(-loss) are the other data set's: one. The mean of exp(loss) is E_Q of the squared ratio."""
    law = LAWS[name]
    second = 0.0
    for share, pair in law.parts:
        x = np.linspace(-40.0, 40.0, 160_001)
        p, q = (sum(w * stats.norm.pdf(x, m) for w, m in side) for side in (pair.p, pair.q))
        if pair.symmetrised:  # the larger of both directions at every epsilon: losses above 0 are the pair's own
            ratio = np.where(p > q, p / np.maximum(q, 1e-300), 1.0)
            mass = np.where(p > q, p, 0.0)
            rest = 1.0 - mass.sum() * 5e-4 - (mass / ratio).sum() * 5e-4
            second += share * (float(mass @ ratio) * 5e-4 + float((mass / ratio) @ (1 / ratio)) * 5e-4 + rest)
        else:
            second += share * float(np.sum(np.where(q > 1e-290, p**2 / np.maximum(q, 1e-300), 0.0)) * 5e-4)
    for grid in (points_whole(law, 40.0, 1.0), points_cut(law, 1e-16), points_fine(law, 1e-16, 3_000)):
        assert float(grid.weight.sum()) == pytest.approx(1.0, abs=1e-9)
        assert float(np.exp(grid.log_weight - grid.loss).sum()) == pytest.approx(1.0, abs=1e-9)
    assert float(
        np.exp(points_whole(law, 40.0, 1.0).log_weight + points_whole(law, 40.0, 1.0).loss).sum()
    ) == pytest.approx(second, rel=1e-6)


def test_a_fine_lattice_has_thousands_of_points_for_each_pair() -> None:
    law = truncated_poisson(100, 0.1, 14, 0.8, replace=False)
    assert len(points_fine(law, 1e-12, 10).loss) >= 2 * 8_000
    assert len(points_fine(law, 1e-12, 50_000).loss) >= 50_000


def test_a_gaussian_pair_has_the_moments_of_its_shift() -> None:
    law, shift = gaussian(1.5), 1.5
    for t in (0.5, 3.0):
        grid = points_whole(law, 40.0, t)
        assert math.log(total(grid, t).real) == pytest.approx(t * (t + 1) / 2 * shift**2, rel=1e-13)


def test_panels_of_gauss_are_no_wider_than_asked() -> None:
    x, dx = lattice._gauss(-1.0, 2.5, 0.9)
    assert len(x) == 4 * 16 and float(dx.sum()) == pytest.approx(3.5, rel=1e-14)
    assert float(dx @ np.exp(x)) == pytest.approx(math.exp(2.5) - math.exp(-1.0), rel=1e-14)
    assert len(lattice._gauss(0.0, 0.1, 0.9)[0]) == 16


# Moments along a line --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [2, 3, 16, 63, 64, 65, 130])
@pytest.mark.parametrize("begin", [0, 40])
def test_moments_at_equal_steps_are_their_sums(count: int, begin: int) -> None:
    grid, t, window = points(LAWS["removed"], 1e-15, 2.0, 30.0, window=0.3), 2.0, 0.3
    z = t + 1j * 0.17 * np.arange(begin, begin + count)
    direct = np.exp(np.outer(z, grid.loss)) @ grid.weight
    np.testing.assert_allclose(np.exp(log_moment(grid, z)), direct, rtol=1e-12)
    share = 0.5 * special.erfc((window - grid.loss) * 6.0 / window)
    np.testing.assert_allclose(large_share(grid, window), share, rtol=1e-12)
    calm = np.exp(np.outer(z, grid.loss)) @ (grid.weight * (1.0 - share))
    log_calm, ratio = split_moment(grid, z, window)
    np.testing.assert_allclose(np.exp(log_calm), calm, rtol=1e-12)
    np.testing.assert_allclose(ratio, direct / calm - 1.0, rtol=1e-9, atol=1e-13)


def test_a_log_near_one_keeps_its_digits_and_near_zero_stays_finite(mp: Any) -> None:
    for x in (1e-20 + 0j, 1e-9 - 3e-10j, -0.5 + 2j, -2.0 - 1e-3j, 5.0 + 0j):
        (found,) = log1p(np.array([x]))
        true = complex(mp.log(1 + mp.mpc(x)))
        assert found.real == pytest.approx(true.real, rel=1e-12) and found.imag == pytest.approx(true.imag, rel=1e-12)
    assert log1p(np.array([-1.0 + 0j]))[0].real == pytest.approx(math.log(1e-8), abs=0.1)


def test_moments_of_rare_records_keep_their_digits(mp: Any) -> None:
    """log E[exp(z L)] is about the rate squared: sums of probabilities alone would leave three digits of it."""
    rate, grid = 1e-7, points(poisson(1e-7, 1.0, replace=False), 1e-20, 1.0, 1.0)
    z = 1.0 + 1j * np.array([0.0, 0.5, 1.0])
    square = rate**2 * math.expm1(1.0)  # E[(P/Q - 1)^2] under Q
    for place, found in zip(z, log_moment(grid, z), strict=True):
        # To the next order: log E_P exp(zL) = z (z+1) / 2 times that.
        assert abs(found / (place * (place + 1) / 2 * square) - 1) < 1e-2


# The table of saddle points --------------------------------------------------------------------------------------

TABLES = {
    "one law": run(1.0, 0.01, 1_000),
    "with plain steps": Composition.of([(gaussian(0.3), 4), (poisson(0.05, 0.8, replace=False), 60)]),
    "two laws": Composition.of([(LAWS["replaced"], 20), (LAWS["cut"], 30)]),
    "much noise": run(50.0, 0.01, 100),
}


@pytest.mark.parametrize("name", TABLES)
def test_the_table_holds_k_and_its_derivatives(name: str) -> None:
    composition = TABLES[name]
    tail = tail_share(composition, 1e-15)
    table = saddle_table(composition, tail)
    assert np.all(np.diff(table.t) > 0.0) and len(table.t) >= 50
    grids = [(points_cut(law, tail, table.reliable / 2), count) for law, count in composition.terms]

    def log_mean(t: float) -> float:
        logs = sum(count * math.log1p(float(grid.weight @ np.expm1(t * grid.loss))) for grid, count in grids)
        return composition.gaussian * t * (t + 1) / 2 + logs

    at = [i for i in range(len(table.t)) if 0.02 < table.t[i] < 4.0]
    for i in at[:: max(1, len(at) // 6)]:
        t = float(table.t[i])
        h = 1e-3 * t
        assert table.K[i] == pytest.approx(log_mean(t), rel=1e-9)
        assert table.slope[i] == pytest.approx((log_mean(t + h) - log_mean(t - h)) / (2 * h), rel=1e-4)
        assert table.curvature[i] == pytest.approx(
            (log_mean(t + h) - 2 * log_mean(t) + log_mean(t - h)) / h**2, rel=2e-2
        )
    t, slope, curvature = table.t, table.slope, table.curvature
    bend = curvature + 1 / t**2 + 1 / (1 + t) ** 2
    np.testing.assert_allclose(table.epsilon, slope - 1 / t - 1 / (1 + t))
    laplace = np.exp(table.K - table.epsilon * t) / (t * (1 + t)) / np.sqrt(2 * math.pi * bend)
    here = np.abs(table.log_delta) < 300.0
    np.testing.assert_allclose(table.log_delta[here], np.log(laplace[here]), rtol=1e-9)
    middle = float(t[len(t) // 2])
    assert table.width(middle) == pytest.approx(bend[len(t) // 2] ** -0.5)
    assert table.other(middle) == 0.85 * middle and table.other(float(t[0])) == t[0]


@pytest.mark.parametrize("name", TABLES)
def test_the_table_is_read_between_its_rows(name: str) -> None:
    table = saddle_table(TABLES[name], 1e-18)
    i = int(np.argmin(np.abs(table.log_delta - math.log(1e-6))))
    epsilon = float(table.epsilon[i])
    assert table.at_epsilon(epsilon) == pytest.approx((table.t[i], table.log_delta[i]), rel=1e-9)
    t, found = table.at_delta(float(table.log_delta[i]))
    assert (t, found) == pytest.approx((table.t[i], epsilon), rel=1e-6)
    half = 0.5 * float(table.log_delta[i] + table.log_delta[i + 1])
    t, found = table.at_delta(half)
    assert table.t[i] < t < table.t[i + 1] and epsilon < found < table.epsilon[i + 1]
    assert found == pytest.approx(0.5 * float(epsilon + table.epsilon[i + 1]), rel=1e-9)
    for outside in (float(table.epsilon[0]), float(table.epsilon[-1])):
        with pytest.raises(NotConverged, match="outside the table"):
            table.at_epsilon(outside)
    for inside in (table.epsilon[:2], table.epsilon[-2:]):
        found = table.at_epsilon(float(inside.mean()))[0]
        assert table.t[0] < found < table.t[1] or table.t[-2] < found < table.t[-1]
    with pytest.raises(NotConverged, match="outside the table"):
        table.at_delta(float(table.log_delta.min()) - 1.0)
    with pytest.raises(NotConverged, match="end of the table"):
        period(table, float(table.t[-1]), epsilon, 1e-6)


@pytest.mark.parametrize("name", TABLES)
def test_what_the_table_proves_is_the_least_over_its_rows(name: str) -> None:
    """Renyi's conversion at every order 1 + t, and Chernoff's bound with the best weight; written out."""
    composition = TABLES[name]
    table = saddle_table(composition, tail_share(composition, 1e-12))
    assert np.count_nonzero(table.t <= table.reliable) > 0
    for delta, epsilon in ((1e-3, 0.1), (1e-6, 0.5), (1e-9, 2.0)):
        rows = [(t, K) for t, K in zip(table.t, table.K, strict=True) if t <= table.reliable]
        renyi = min(K / t + math.log(1 / delta) / t + math.log(t / (1 + t)) - math.log(1 + t) / t for t, K in rows)
        assert table.renyi_epsilon(math.log(delta)) == pytest.approx(renyi, rel=1e-12)
        chernoff = min(K - epsilon * t + t * math.log(t) - (1 + t) * math.log(1 + t) for t, K in rows)
        assert table.chernoff_delta(epsilon) == pytest.approx(min(1.0, math.exp(chernoff)), rel=1e-12)
    none = Saddle(table.t, table.K, table.slope, table.curvature, 0.5 * float(table.t[0]))
    assert math.isinf(none.renyi_epsilon(-5.0)) and none.chernoff_delta(1.0) == 1.0


@pytest.mark.parametrize("name", TABLES)
def test_the_period_keeps_the_other_copies_out(name: str) -> None:
    """delta(eps - H) e^(-Ht) <= e^(-Ht), and delta(eps + H) e^(Ht) by Chernoff, are below their share of delta."""
    composition, delta = TABLES[name], 1e-6
    table = saddle_table(composition, 1e-18)
    _, epsilon = table.at_delta(math.log(delta))
    t = abscissa(table, epsilon, delta)
    best = table.at_epsilon(epsilon)[0]
    assert 0.2 * best < t <= best
    assert period(table, t, epsilon, delta) <= period(table, best, epsilon, delta)
    for place in (t, best, 0.6 * best):
        H = period(table, place, epsilon, delta)
        left = math.exp(-H * place)
        steeper = table.t[table.t > 1.05 * place]
        K = table.K[table.t > 1.05 * place]
        right = math.exp(float(np.min(K - (epsilon + H) * steeper)) + H * place)
        assert max(left, right) == pytest.approx(ALIAS * delta, rel=1e-6)


def test_the_probability_per_step_is_rounded_down_to_a_power_of_ten() -> None:
    composition = Composition.of([(LAWS["removed"], 30), (LAWS["cut"], 70), (gaussian(1.0), 500)])
    assert tail_share(composition, 3.1e-10) == pytest.approx(1e-12, rel=1e-12)
    assert tail_share(composition, 1.01e-10) == pytest.approx(1e-12, rel=1e-12)
    assert tail_share(composition, 0.99e-10) == pytest.approx(1e-13, rel=1e-12)
    assert tail_share(Composition.of([(gaussian(1.0), 500)]), 2e-5) == pytest.approx(1e-5)
    assert tail_share(composition, 0.0) == pytest.approx(1e-290)


def test_so_little_noise_has_no_table() -> None:
    with pytest.raises(NotConverged, match="So little noise"):
        saddle_table(run(1 / 151.0, 0.1, 2), 1e-12)
    assert saddle_table(run(1 / 149.0, 0.1, 2), 1e-12).reliable > 0.0


def test_no_loss_is_larger_than_one_over_the_chance_of_being_left_out() -> None:
    added = poisson(0.2, 1.0, replace=False).reversed()
    assert largest_loss(Composition.of([(added, 3)])) == pytest.approx(-3 * math.log(0.8))
    for other in (poisson(0.2, 1.0, replace=False), poisson(0.2, 1.0, replace=True), fixed_size(0.2, 1.0)):
        assert math.isinf(largest_loss(Composition.of([(added, 3), (other, 1)])))
    assert math.isinf(largest_loss(Composition.of([(added, 3), (gaussian(1.0), 1)])))
    both = Composition.of([(added, 3)])
    assert quick_epsilon(both, 1e-9) <= largest_loss(both)
    assert quick_delta(both, largest_loss(both)) == 0.0 < quick_delta(both, 0.999 * largest_loss(both))


@pytest.mark.parametrize("name", TABLES)
def test_quick_bounds_are_bounds_of_what_is_unamplified_too(name: str) -> None:
    composition = TABLES[name]
    plain = math.sqrt(composition.unamplified)
    for delta in (1e-9, 1e-3):
        assert 0.0 <= quick_epsilon(composition, delta) <= gaussian_epsilon(plain, delta)
    for epsilon in (0.0, 1.0):
        assert 0.0 < quick_delta(composition, epsilon) <= gaussian_delta(plain, epsilon)
    few = Composition.of([(gaussian(0.5), 4)])
    assert quick_epsilon(few, 1e-5) == gaussian_epsilon(1.0, 1e-5) and quick_delta(few, 1.0) == gaussian_delta(1.0, 1.0)
    # Next to no noise there is no table, and the unamplified bound is all that is left.
    bare = run(1e-3, 0.5, 2)
    assert quick_epsilon(bare, 1e-5) == gaussian_epsilon(math.sqrt(2e6), 1e-5)
    assert quick_delta(bare, 1.0) == gaussian_delta(math.sqrt(2e6), 1.0)


# One step --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FEW)
def test_delta_of_one_step_by_summing_densities(name: str) -> None:
    law, x = LAWS[name], np.linspace(-45.0, 45.0, 180_001)
    for epsilon in (0.0, 0.05, 1.0):
        true = 0.0
        for share, pair in law.parts:
            p, q = (sum(w * stats.norm.pdf(x, m) for w, m in side) for side in (pair.p, pair.q))
            true += share * float(np.maximum(p - math.exp(epsilon) * q, 0.0).sum() * (x[1] - x[0]))
        assert single_delta(law, epsilon) == pytest.approx(true, rel=1e-6, abs=1e-15)


@pytest.mark.parametrize("kind", ["remove", "add", "replace"])
@pytest.mark.parametrize(("rate", "mu"), [(0.1, 150.0), (0.6, 70.0), (1e-9, 30.0), (0.5, 1e-8)])
def test_delta_of_one_step_with_means_far_apart_and_close(rate: float, mu: float, kind: Any, mp: Any) -> None:
    law = poisson(rate, mu, replace=kind == "replace")
    law = law.reversed() if kind == "add" else law
    for epsilon in (0.0, 0.3, 20.0, 2_000.0):
        true = hockey_stick(Step(kind, rate, mu), mp.mpf(epsilon), mp)
        assert single_delta(law, epsilon) == pytest.approx(float(true), rel=1e-6, abs=1e-30)


@pytest.mark.parametrize("name", FEW)
def test_epsilon_of_one_step_is_where_delta_falls_to_it(name: str) -> None:
    law = LAWS[name]
    apart = single_delta(law, 0.0)
    assert single_epsilon(law, apart) == single_epsilon(law, min(1.0, 2 * apart)) == 0.0
    for share in (0.9, 1e-3):
        epsilon = single_epsilon(law, share * apart)
        assert epsilon > 0.0 and single_delta(law, epsilon) == pytest.approx(share * apart, rel=1e-7)
    reference = optimize.brentq(lambda e: single_delta(law, e) - 0.5 * apart, 0.0, 300.0, xtol=1e-14)
    assert single_epsilon(law, 0.5 * apart) == pytest.approx(reference, rel=1e-9)
