"""Properties that must hold for any setting: bounds, monotonicity, invariance, robustness."""

from __future__ import annotations

import math

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from clipwise.accounting import GaussianSteps, Ledger, account, account_delta
from clipwise.sampling import FixedSize, FullBatch, Poisson, Sampling, Shuffled

from .common import within

SLACK = 1 + 1e-6

sizes = st.integers(10, 10**6)
shares = st.floats(-3.0, -0.3).map(lambda e: 10.0**e)
noises = st.floats(-0.3, 1.0).map(lambda e: 10.0**e)
counts = st.integers(200, 20_000)
deltas = st.floats(-10.0, -2.0).map(lambda e: 10.0**e)


def poisson(size: int, share: float) -> Poisson:
    return Poisson(size, max(1, int(size * share)))


def spent(sampling: Sampling, sigma: float, steps: int, delta: float) -> float:
    return account((GaussianSteps(sampling, sigma, steps),), delta).epsilon


@settings(max_examples=8)
@given(sizes, shares, noises, counts, deltas)
def test_monotone_in_everything(size: int, share: float, sigma: float, steps: int, delta: float) -> None:
    base = spent(poisson(size, share), sigma, steps, delta)
    assert 0.0 <= base < math.inf
    assert base <= spent(poisson(size, share), sigma, 2 * steps, delta) * SLACK
    assert base <= spent(poisson(size, min(1.0, 2 * share)), sigma, steps, delta) * SLACK
    assert base <= spent(poisson(size, share), 0.8 * sigma, steps, delta) * SLACK
    assert base <= spent(poisson(size, share), sigma, steps, delta / 10) * SLACK


@settings(max_examples=10)
@given(sizes, shares, noises, counts, deltas)
def test_at_most_rdp_and_inverted_by_delta(size: int, share: float, sigma: float, steps: int, delta: float) -> None:
    events = (GaussianSteps(poisson(size, share), sigma, steps),)
    exact = account(events, delta)
    assert exact.epsilon <= account(events, delta, "rdp").epsilon * SLACK + 1e-12
    assume(exact.accountant == "exact" and exact.epsilon > 1e-3)
    assert account_delta(events, exact.epsilon).delta == pytest.approx(delta, rel=1e-4)


@settings(max_examples=6)
@given(st.lists(st.tuples(st.integers(1, 30), noises, st.integers(1, 300)), min_size=2, max_size=4), deltas)
def test_splitting_and_reordering_change_nothing(parts: list[tuple[int, float, int]], delta: float) -> None:
    events = [GaussianSteps(Poisson(1_000, batch), sigma, steps) for batch, sigma, steps in parts]
    whole = account(events, delta).epsilon
    split = [piece for e in events for piece in ([e.repeated(1), e.repeated(e.steps - 1)] if e.steps > 1 else [e])]
    assert account(split[::-1], delta).epsilon == whole
    assert Ledger(split).epsilon(delta) == whole


@settings(max_examples=6)
@given(sizes, shares, noises, st.integers(200, 5_000))
def test_relations_are_ordered(size: int, share: float, sigma: float, steps: int) -> None:
    events = (GaussianSteps(poisson(size, share), sigma, steps),)
    one, other = (account(events, 1e-5, relation=r).epsilon for r in ("zero_out", "replace_one"))
    assert one <= other * SLACK


@settings(max_examples=6)
@given(st.integers(2, 200), st.integers(2, 50), noises, st.integers(50, 2_000))
def test_intervals_are_intervals(batches: int, batch: int, sigma: float, steps: int) -> None:
    n = batches * batch
    for scheme in (Shuffled(n, batch), FixedSize(n, batch)):
        guarantee = account((GaussianSteps(scheme, sigma, steps),), 1e-6)
        assert guarantee.lower is not None and 0.0 <= guarantee.lower <= guarantee.epsilon < math.inf


@settings(max_examples=20)
@given(st.floats(-1.0, 2.0), st.integers(1, 10**6), st.floats(-15.0, -1.0))
def test_full_batch_has_no_trouble_anywhere(log_sigma: float, steps: int, log_delta: float) -> None:
    value = spent(FullBatch(1_000), 10.0**log_sigma, steps, 10.0**log_delta)
    assert 0.0 <= value < math.inf


CORNERS = [
    (sigma, batch, size, steps, delta)
    for sigma in (0.1, 100.0)
    for batch, size in ((1, 10**7), (999_999, 10**6))
    for steps in (1, 10**6)
    for delta in (1e-15, 0.1)
]


@pytest.mark.parametrize(("sigma", "batch", "size", "steps", "delta"), CORNERS)
def test_corners(sigma: float, batch: int, size: int, steps: int, delta: float) -> None:
    events = (GaussianSteps(Poisson(size, batch), sigma, steps),)
    with within(30.0):
        guarantee = account(events, delta)
    assert 0.0 <= guarantee.epsilon < math.inf
    assert guarantee.epsilon <= account(events, delta, "rdp").epsilon * SLACK + 1e-9


@pytest.mark.slow
def test_a_thousand_segments() -> None:
    events = tuple(GaussianSteps(Poisson(100_000, 1_000), 1.6 - 0.7 * k / 999, 10) for k in range(1_000))
    with within(60.0):
        guarantee = account(events, 1e-5)
    assert guarantee.accountant == "exact" and guarantee.epsilon == pytest.approx(4.6728, abs=1e-3)
