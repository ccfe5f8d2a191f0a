"""The searches below calibration, on functions whose answers are known: where they end and how often they ask."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from clipwise.accounting import GaussianSteps, PrivateCalibration, account, epsilon, free_cap, max_steps, noise_scale
from clipwise.accounting._numerics.gaussian import gaussian_epsilon
from clipwise.accounting.solve import _gallop, _largest_integer, _smallest_noise, noise_multiplier
from clipwise.errors import AccountingError
from clipwise.sampling import FullBatch, Poisson

CURVES: dict[str, Callable[[float], float]] = {
    "slow": lambda noise: 3.0 / noise**0.5,
    "like the noise": lambda noise: 5.0 / noise,
    "fast": lambda noise: 2.0 / noise**3,
    "two ways": lambda noise: 1.0 / noise + 1.0 / noise**2,
    "exponential": lambda noise: math.exp(-noise),
}


@pytest.mark.parametrize("start", [0.01, 0.5, 3.0, 1e4])
@pytest.mark.parametrize("name", CURVES)
def test_the_least_noise_is_found_in_few_questions(name: str, start: float) -> None:
    asked: list[float] = []

    def spent(noise: float) -> float:
        asked.append(noise)
        return CURVES[name](noise)

    for target, tight in ((0.3, 5e-4), (0.3, 0.1), (0.05, 5e-4)):
        del asked[:]
        found = _smallest_noise(spent, target, start, tight)
        assert target * (1 - 1.001 * tight) <= CURVES[name](found) <= target
        assert len(asked) == len(set(asked)) <= 18 and min(asked) >= 0.01 and max(asked) <= 1e7 * (1 + 1e-9)


def test_a_start_that_is_right_is_not_searched_from() -> None:
    """Two questions: it meets the target, and what lies below does not."""
    asked: list[float] = []

    def spent(noise: float) -> float:
        asked.append(noise)
        return 5.0 / noise

    assert _smallest_noise(spent, 1.0, 5.0 * (1 + 1e-4)) == pytest.approx(5.0 * (1 + 1e-4), rel=1e-12)
    assert len(asked) <= 3 and min(asked) > 4.9


@pytest.mark.parametrize("place", [0.02, 1.0, 77.7, 1e6])
def test_a_step_in_the_curve_is_found_from_the_safe_side(place: float) -> None:
    """No noise comes near the target: just above the step the curve is far below it."""

    def spent(noise: float) -> float:
        return 0.1 if noise >= place else 10.0

    found = _smallest_noise(spent, 1.0, 3.0)
    assert place <= found <= place * (1 + 1e-9)


def test_the_search_ends_at_its_limits() -> None:
    assert _smallest_noise(lambda noise: 1e-3, 1.0, 3.0) == pytest.approx(0.01, rel=1e-6)
    assert _smallest_noise(lambda noise: 1e-3, 1.0, 3.0) > 0.01  # noise below counts as none
    assert _smallest_noise(lambda noise: 0.0, 1.0, 0.01) >= 0.01
    assert _smallest_noise(lambda noise: 0.5 if noise >= 0.99e7 else 2.0, 1.0, 3.0) == pytest.approx(0.99e7, rel=1e-6)
    with pytest.raises(AccountingError, match=r"No noise multiplier up to 1e\+07 reaches epsilon 1"):
        _smallest_noise(lambda noise: 1.001, 1.0, 3.0)


@pytest.mark.parametrize("most", [1, 2, 3, 7, 8, 50])
def test_the_largest_number_that_fits_is_found_from_every_start(most: int) -> None:
    for largest in range(most + 3):
        for low in range(min(largest, most) + 1):
            asked: list[int] = []

            def fits(value: int, asked: list[int] = asked, largest: int = largest) -> bool:
                asked.append(value)
                return value <= largest

            assert _gallop(fits, low, most) == min(largest, most)
            assert all(low < value <= most for value in asked) and len(asked) <= 2 * most.bit_length() + 2


def test_the_search_for_a_number_is_logarithmic() -> None:
    asked: list[int] = []

    def fits(value: int) -> bool:
        asked.append(value)
        return value <= 123_456_789

    assert _gallop(fits, 0, 10**9) == 123_456_789
    assert len(asked) <= 56
    del asked[:]
    assert _gallop(fits, 120_000_000, 10**9) == 123_456_789
    assert len(asked) <= 26 and asked[0] == 120_000_000 + 15_000_000 + 1


@pytest.mark.parametrize(("by_rdp", "by_other"), [(10, 25), (10, 10), (25, 10), (0, 25), (0, 0), (40, 40)])
def test_the_renyi_bound_is_where_the_search_begins_and_not_where_it_ends(by_rdp: int, by_other: int) -> None:
    """Another accountant may allow more, or less."""

    def fits(value: int, by: str) -> bool:
        return value <= (by_rdp if by == "rdp" else by_other)

    assert _largest_integer(fits, "exact", 30) == min(30, by_other)


def test_steps_up_to_a_billion() -> None:
    assert max_steps(1.0, 1e-5, FullBatch(100), noise_multiplier=1e9) == 10**9


@pytest.mark.parametrize("tolerance", [1e-3, 0.1])
def test_a_cap_for_few_records(tolerance: float) -> None:
    """The smallest, and never more than there are records."""
    sampling, how = Poisson(30, 10), {"noise_multiplier": 3.0, "steps": 5, "delta": 1e-3}
    cap = free_cap(sampling, tolerance=tolerance, **how)  # type: ignore[arg-type]
    assert 10 < cap <= 30

    def spent(cap: int) -> float:
        return epsilon(3.0, Poisson(30, 10, cap), 5, 1e-3)

    assert spent(cap) <= spent(30) * (1 + tolerance) < spent(cap - 1)


def test_the_noise_of_a_shape_is_measured_by_the_least_of_it() -> None:
    shape = (GaussianSteps(FullBatch(100), 4.0, 3), GaussianSteps(FullBatch(100), 2.0, 1))
    factor = noise_scale(shape, 1.0, 1e-5)
    assert gaussian_epsilon(math.sqrt(3 / 16 + 1 / 4) / factor, 1e-5) == pytest.approx(1.0, rel=6e-4)
    beside = noise_scale(shape, 1.0, 1e-5, fixed=[PrivateCalibration(8.0)])
    mu = math.sqrt((3 / 16 + 1 / 4) / beside**2 + 1 / 64)
    assert gaussian_epsilon(mu, 1e-5) == pytest.approx(1.0, rel=6e-4) and gaussian_epsilon(mu, 1e-5) <= 1.0
    for bad in ((), (GaussianSteps(FullBatch(100), 0.0),), (*shape, GaussianSteps(FullBatch(100), 0.0))):
        with pytest.raises(AccountingError, match="only for events that have some"):
            noise_scale(bad, 1.0, 1e-5)


@pytest.mark.parametrize("relation", ["zero_out", "replace_one"])
def test_noise_is_searched_under_the_relation_that_was_asked_for(relation: Any) -> None:
    found = noise_multiplier(1.0, 1e-5, FullBatch(100), 4, relation=relation)
    reach = 2.0 if relation == "replace_one" else 1.0
    assert gaussian_epsilon(reach * 2.0 / found, 1e-5) == pytest.approx(1.0, rel=6e-4)
    assert account((GaussianSteps(FullBatch(100), found, 4),), 1e-5, relation=relation).epsilon <= 1.0


def test_a_target_that_is_met_to_the_last_bit_is_met() -> None:
    target = epsilon(3.0, FullBatch(100), 7, 1e-5)
    assert max_steps(target, 1e-5, FullBatch(100), noise_multiplier=3.0) == 7
    assert max_steps(math.nextafter(target, 0.0), 1e-5, FullBatch(100), noise_multiplier=3.0) == 6


def test_the_least_noise_of_a_shape_stays_one_that_counts() -> None:
    shape = (GaussianSteps(FullBatch(100), 1.0), GaussianSteps(FullBatch(100), 100.0))
    assert noise_scale(shape, 1e7, 1e-5) == pytest.approx(0.01, rel=1e-6)
