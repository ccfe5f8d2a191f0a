"""What any accountant must obey, wherever it answers: with tiny and huge noise, rates near 0 and 1, one step and a
million, delta from 1e-12 to 0.5."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clipwise.accounting import GaussianSteps, PrivateCalibration, ProjectedSteps, account, account_delta
from clipwise.accounting._numerics.laws import Law, truncated_poisson, truncated_up_to
from clipwise.accounting._numerics.single import single_delta
from clipwise.accounting.accountants.edgeworth import saddle_interval as interval
from clipwise.errors import AccountingError
from clipwise.sampling import FixedSize, FullBatch, Poisson, Sampling, Shuffled

from .common import run
from .oracles import Outputs, fixed_batches, outputs_of, poisson_batches, told_apart

SLACK, LEAST = 1 + 1e-6, 1e-12  # of a value, and of an epsilon or a delta near zero
NO_COMPARISON = 3e-18  # deltas below are given as 1e-18

some = settings(max_examples=12)
few = settings(max_examples=5)
many = settings(max_examples=40)


def powers(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(low, high).map(lambda exponent: 10.0**exponent)


sigmas = st.one_of(powers(-0.5, 1.0), powers(-1.99, 4.0))
steps = st.one_of(st.sampled_from([1, 2, 5, 10, 50]), powers(0.0, 6.0).map(int))
deltas = powers(-12.0, math.log10(0.5))
rates = st.one_of(powers(-12.0, 0.0), powers(-12.0, -0.1).map(lambda rest: 1.0 - rest))
relations: st.SearchStrategy[Any] = st.sampled_from([None, "zero_out", "replace_one"])


@st.composite
def sized(draw: Any, kind: Callable[..., Any]) -> Any:
    records = int(draw(powers(0.4, 7.0)))
    return kind(records, max(1, int(records * draw(powers(-7.0, 0.0)))))


@st.composite
def cut(draw: Any) -> Poisson:
    plain = draw(sized(Poisson))
    cap = max(1, int(plain.batch_size * draw(powers(-0.5, 0.5))))
    if draw(st.booleans()):
        return replace(plain, max_batch_size=cap)
    return Poisson(rate=plain.rate, batch_size=1, max_batch_size=cap, largest=plain.sample_size)


PLAIN = st.one_of(rates.map(lambda q: Poisson(rate=q, batch_size=1)), sized(Poisson))
EASY = st.one_of(sized(lambda n, _: FullBatch(n)), sized(Shuffled))
EVERY: st.SearchStrategy[Sampling] = st.one_of(PLAIN, cut(), EASY, sized(FixedSize))


def more(sampling: Sampling) -> Sampling:
    """The same scheme with more records in a batch; batches that are cut have none that is surely worse."""
    if isinstance(sampling, Poisson) and sampling.max_batch_size is None and sampling.sample_size is None:
        return Poisson(rate=min(1.0, 1.2 * sampling.rate), batch_size=1)
    if isinstance(sampling, (Poisson, FixedSize)) and getattr(sampling, "max_batch_size", None) is None:
        size = min(sampling.sample_size or 1, sampling.batch_size + 1 + sampling.batch_size // 5)
        return replace(sampling, batch_size=size)
    return sampling


def dearer(event: Any) -> list[Any]:
    """Events that tell more: another step, less noise, a larger rate, fewer projections."""
    found = [
        event.repeated(event.count + 1 + event.count // 10),
        replace(event, noise_multiplier=max(0.01, 0.9 * event.noise_multiplier)),
        replace(event, sampling=more(event.sampling)),
    ]
    if isinstance(event, ProjectedSteps) and event.projections > 1:
        found.append(replace(event, projections=event.projections - event.projections // 3))
    return found


def obeys(event: Any, delta: float, relation: Any, accountant: str, rate: bool = True) -> None:
    """Epsilon never falls with what tells more or with less delta, delta never rises with epsilon, and both agree."""

    def asked(other: Any, at: float) -> float:
        return account((other,), at, accountant, relation=relation).epsilon

    def back(epsilon: float) -> float:
        return account_delta((event,), epsilon, accountant, relation=relation).delta

    base = asked(event, delta)
    assert base >= 0.0
    worse = dearer(event)
    for other in worse if rate else worse[:2]:
        assert base <= asked(other, delta) * SLACK + LEAST, other
    assert base <= asked(event, 0.7 * delta) * SLACK + LEAST
    if math.isinf(base):
        return
    there, further = back(base), back(1.3 * base + 1e-3)
    assert 0.0 <= further <= there * SLACK + NO_COMPARISON and there <= 1.0
    if accountant != "pld" or base >= 0.4:  # below, pld's epsilon is of a finer grid than its delta
        assert there <= delta * (1 + 1e-4) + NO_COMPARISON
    if base > 0.0 and accountant != "pld":
        assert asked(event, max(there, 1e-20)) >= base * (1 - 1e-4) - LEAST or there < delta


@few
@given(st.one_of(PLAIN, EASY), sigmas, steps, deltas, relations)
def test_rdp(sampling: Sampling, sigma: float, count: int, delta: float, relation: Any) -> None:
    obeys(GaussianSteps(sampling, sigma, count), delta, relation, "rdp")


@few
@given(st.one_of(PLAIN, cut(), sized(FixedSize)), sigmas, deltas, relations)
def test_exact_for_one_step(sampling: Sampling, sigma: float, delta: float, relation: Any) -> None:
    """In closed form; the Renyi bound is one."""
    event = GaussianSteps(sampling, sigma)
    base = account((event,), delta, relation=relation).epsilon
    for other in dearer(event)[1:]:
        assert base <= account((other,), delta, relation=relation).epsilon * SLACK + LEAST
    assert base <= account((event,), 0.7 * delta, relation=relation).epsilon * SLACK + LEAST
    there, nothing = (account_delta((event,), epsilon, relation=relation).delta for epsilon in (base, 0.0))
    assert there <= delta * SLACK + NO_COMPARISON and there <= nothing
    assert there >= delta * (1 - 1e-6) or base == 0.0
    assert account_delta((event,), base, "rdp", relation=relation).delta >= there - NO_COMPARISON
    assert account((event,), delta, "rdp", relation=relation).epsilon >= base / SLACK - LEAST


@few
@given(EASY, sigmas, steps, deltas, relations)
def test_exact_without_amplification(sampling: Sampling, sigma: float, count: int, delta: float, relation: Any) -> None:
    obeys(GaussianSteps(sampling, sigma, count), delta, relation, "exact")


@settings(max_examples=4)
@given(PLAIN, powers(-0.4, 3.0), steps, deltas, relations)
def test_exact(sampling: Sampling, sigma: float, count: int, delta: float, relation: Any) -> None:
    obeys(GaussianSteps(sampling, sigma, count), delta, relation, "exact")


@pytest.mark.slow
@settings(max_examples=30)
@given(EVERY, sigmas, steps, deltas, relations)
def test_rdp_everywhere(sampling: Sampling, sigma: float, count: int, delta: float, relation: Any) -> None:
    obeys(GaussianSteps(sampling, sigma, count), delta, relation, "rdp")


@pytest.mark.slow
@settings(max_examples=8)
@given(EVERY, sigmas, steps, deltas, relations)
def test_exact_everywhere(sampling: Sampling, sigma: float, count: int, delta: float, relation: Any) -> None:
    obeys(GaussianSteps(sampling, sigma, count), delta, relation, "exact")


@some
@given(st.one_of(PLAIN, cut(), EASY), powers(-1.0, 4.0), steps, deltas, relations)
def test_gdp(sampling: Sampling, sigma: float, count: int, delta: float, relation: Any) -> None:
    """Near rate 1 the limit theorem's mu is larger than that of full batches: no larger rate is asked for."""
    event = GaussianSteps(sampling, sigma, count)
    if account((event,), delta, "gdp", relation=relation).epsilon < 1e6:  # beyond, delta has no digits left
        obeys(event, delta, relation, "gdp", rate=False)


@some
@given(st.one_of(PLAIN, cut(), EASY), sigmas, steps, deltas, relations)
def test_edgeworth_is_an_approximation_or_refuses(
    sampling: Sampling, sigma: float, count: int, delta: float, relation: Any
) -> None:
    event = GaussianSteps(sampling, sigma, count)
    try:
        found = account((event,), delta, "edgeworth", relation=relation)
    except AccountingError:
        return
    exact = isinstance(sampling, FullBatch) or (isinstance(sampling, Poisson) and sampling.rate == 1.0)
    assert 0.0 <= found.epsilon < math.inf
    assert found.kind == "approximation" or exact or isinstance(sampling, Shuffled)


@pytest.mark.slow
@few
@given(PLAIN, powers(-0.2, 2.0), st.sampled_from([1, 2, 10, 1_000]), powers(-7.8, -0.4), relations)
def test_pld(sampling: Sampling, sigma: float, count: int, delta: float, relation: Any) -> None:
    pytest.importorskip("dp_accounting")
    event = GaussianSteps(sampling, sigma, count)
    obeys(event, delta, relation, "pld")
    exact = account((event,), delta, relation=relation)
    if exact.accountant == "exact":
        assert account((event,), delta, "pld", relation=relation).epsilon >= exact.epsilon / SLACK - LEAST
        there = account_delta((event,), exact.epsilon, relation=relation).delta
        assert account_delta((event,), exact.epsilon, "pld", relation=relation).delta >= there / SLACK


@pytest.mark.slow
@settings(max_examples=4)
@given(st.one_of(PLAIN, EASY), powers(-0.5, 2.0), powers(1.0, 6.0).map(int), steps, deltas, relations)
def test_rdp_of_estimated_norms(
    sampling: Sampling, sigma: float, projections: int, count: int, delta: float, relation: Any
) -> None:
    event = ProjectedSteps(sampling, sigma, projections, count)
    base = account((event,), delta, "rdp", relation=relation).epsilon
    # Not a larger rate: with full batches a finer bound of the estimates is proven than for sampled ones.
    for other in (*dearer(event)[:2], *dearer(event)[3:]):
        assert base <= account((other,), delta, "rdp", relation=relation).epsilon * 1.001 + 1e-9, other
    exact_norms = GaussianSteps(sampling, sigma, count)
    assert base >= account((exact_norms,), delta, "rdp", relation=relation).epsilon / SLACK


phases = st.lists(st.tuples(EVERY, sigmas, steps), min_size=2, max_size=3)


@settings(max_examples=3)
@given(phases, deltas, relations, powers(0.0, 3.0))
def test_phases_together_cost_at_least_each_of_them(parts: Any, delta: float, relation: Any, noise: float) -> None:
    events = [GaussianSteps(*part) for part in parts]
    if any(isinstance(sampling, FixedSize) for sampling, *_ in parts):
        relation = "replace_one"  # the one that all of them have
    everything = [*events, PrivateCalibration(noise)]
    whole = account(everything, delta, "rdp", relation=relation).epsilon
    for event in everything:
        assert account((event,), delta, "rdp", relation=relation).epsilon <= whole * SLACK + LEAST


@settings(max_examples=3)
@given(st.lists(st.tuples(PLAIN, powers(0.0, 2.0), steps), min_size=2, max_size=2), deltas, relations)
def test_exact_phases_together_cost_at_least_each_of_them(parts: Any, delta: float, relation: Any) -> None:
    """With full batches among them; together at most the sum, each at its part of delta."""
    events = [GaussianSteps(*part) for part in parts] + [GaussianSteps(FullBatch(100), 20.0, 3)]
    whole = account(events, delta, relation=relation).epsilon
    each = [account((event,), delta, relation=relation).epsilon for event in events]
    assert max(each) <= whole * SLACK + LEAST
    apart = sum(account((event,), delta / 3, "rdp", relation=relation).epsilon for event in events)
    assert whole <= apart * SLACK + LEAST


# Statements of the modules ---------------------------------------------------------------------------------------


@many
@given(
    powers(-4.0, 0.0), st.integers(1, 60), st.integers(2, 2_000), st.floats(0.0, 1.0), powers(-3.0, 1.3),
    st.booleans(), st.one_of(st.just(0.0), powers(-6.0, 1.5)),
)  # fmt: skip
def test_the_law_of_at_most_so_many_records_dominates_every_number_of_them(
    rate: float, cap: int, largest: int, share: float, mu: float, replaced: bool, epsilon: float
) -> None:
    bound = truncated_up_to(largest, rate, cap, mu, replaced)
    law = truncated_poisson(1 + int(share * (largest - 1)), rate, cap, mu, replaced)

    def worst(of: Law) -> float:
        return max(single_delta(of, epsilon), single_delta(of.reversed(), epsilon))

    assert worst(law) <= worst(bound) * (1 + 1e-9) + 1e-300


unit = st.floats(-1.0, 1.0)


@few
@given(st.lists(unit, min_size=2, max_size=4), unit, st.integers(1, 4), powers(-0.5, 1.0), powers(-2.0, 0.5))
def test_no_data_of_fixed_size_or_cut_batches_are_worse_than_their_bound(
    values: list[float], other: float, size: int, sigma: float, epsilon: float
) -> None:
    """One step, any numbers of at most one; the first is replaced, blanked or left out."""
    n, size = len(values), min(size, len(values))
    rate = size / n
    cases: list[tuple[Any, Any, list[Any], Callable[[Any], Any]]] = [
        (FixedSize(n, size), "replace_one", [other, *values[1:]], lambda v: fixed_batches(v, size)),
        (Poisson(n, size, size), "replace_one", [other, *values[1:]], lambda v: poisson_batches(v, rate, size)),
        (Poisson(n, size, size), "zero_out", [0.0, *values[1:]], lambda v: poisson_batches(v, rate, size)),
        (Poisson(rate=rate, batch_size=1, max_batch_size=size, largest=n), "add_remove", values[1:],
         lambda v: poisson_batches(v, rate, size)),
    ]  # fmt: skip
    for sampling, relation, neighbour, batches in cases:
        bound = account_delta((GaussianSteps(sampling, sigma),), epsilon, relation=relation).delta
        pair: list[Outputs] = [outputs_of(batches(values)), outputs_of(batches(neighbour))]
        for one, two in itertools.permutations(pair):
            assert told_apart([(one, two, 1)], sigma, epsilon) <= bound + 1e-15


@few
@given(powers(-0.3, 2.0), powers(-5.0, -0.01), steps, deltas)
def test_the_rigorous_interval_holds_the_truth(sigma: float, rate: float, count: int, delta: float) -> None:
    low, high = interval(run(sigma, rate, count), delta)
    assert 0.0 <= low <= high
    found = account((GaussianSteps(Poisson(rate=rate, batch_size=1), sigma, count),), delta)
    assert low <= found.epsilon * SLACK + LEAST
    if found.accountant == "exact":
        assert found.epsilon <= high * SLACK + LEAST or math.isinf(high)
