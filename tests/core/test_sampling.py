"""Batches follow the law that is accounted for."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from clipwise.entropy import Entropy
from clipwise.errors import InvalidSampling
from clipwise.sampling import (
    BallsInBins,
    Draws,
    FixedSize,
    FullBatch,
    Poisson,
    Sampling,
    Shuffled,
    arguments,
    made_from,
    split,
)

LEVEL = 1e-4  # of each statistical test; seeds are fixed, so a test that passes goes on passing


def membership(sampling: Sampling, steps: int, seed: int = 0) -> np.ndarray:
    """(steps, sample_size) zeros and ones."""
    draws = Draws(sampling, Entropy(seed))
    members = np.zeros((steps, sampling.sample_size))
    for step in range(steps):
        members[step, draws.batch(step)] += 1
    return members


def test_poisson_batch_sizes_are_binomial() -> None:
    sampling = Poisson(sample_size=50, batch_size=5)
    sizes = membership(sampling, steps=4000).sum(1)
    law = stats.binom(50, 0.1)
    edges = np.arange(1, 11)  # one class for <= 1 and one for >= 10
    observed = [np.sum(sizes <= 1), *(np.sum(sizes == k) for k in edges[1:-1]), np.sum(sizes >= 10)]
    expected = np.array([law.cdf(1), *(law.pmf(k) for k in edges[1:-1]), law.sf(9)]) * len(sizes)
    assert stats.chisquare(observed, expected).pvalue > LEVEL


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 200), st.floats(0.01, 1.0), st.booleans(), st.integers(0, 2**32))
def test_the_mean_size_of_poisson_batches_is_the_expected_one(n: int, share: float, public: bool, seed: int) -> None:
    """Fractions too, and with a rate of one's own."""
    expected, steps = n * share, 400
    sampling = Poisson(rate=share, batch_size=expected) if public else Poisson(n, expected)
    draws = Draws(sampling, Entropy(seed))
    drawn = sum(len(draws.batch(step, n)) for step in range(steps))
    spread = np.sqrt(steps * n * share * (1 - share))
    assert abs(drawn - steps * expected) <= 7 * spread + 1e-9


def test_poisson_samples_join_independently_with_the_rate() -> None:
    members = membership(Poisson(sample_size=20, batch_size=5), steps=4000)
    counts = members.sum(0)
    # Every sample alike ...
    variance = 4000 * 0.25 * 0.75
    assert stats.chi2(20).sf(((counts - 1000) ** 2 / variance).sum()) > LEVEL
    # ... no two samples together more or less often than by chance ...
    pairs = np.corrcoef(members.T)[np.triu_indices(20, k=1)]
    assert abs(pairs.mean()) < 4 / np.sqrt(4000 * len(pairs))
    assert (pairs**2).sum() * 4000 < stats.chi2(len(pairs)).isf(LEVEL)
    # ... and no batch like the one before.
    assert abs(np.corrcoef(members[:-1].ravel(), members[1:].ravel())[0, 1]) < 4 / np.sqrt(members.size)


def test_poisson_has_empty_batches() -> None:
    sizes = membership(Poisson(sample_size=10, batch_size=1), steps=2000).sum(1)
    assert stats.binomtest(int(np.sum(sizes == 0)), 2000, 0.9**10).pvalue > LEVEL


def test_truncated_poisson_keeps_a_uniform_part_of_what_was_drawn() -> None:
    members = membership(Poisson(sample_size=30, batch_size=10, max_batch_size=8), steps=3000)
    sizes = members.sum(1)
    assert sizes.max() == 8
    assert stats.binomtest(int(np.sum(sizes < 8)), 3000, stats.binom(30, 1 / 3).cdf(7)).pvalue > LEVEL
    counts = members.sum(0)
    assert stats.chisquare(counts).pvalue > LEVEL


def test_full_batch_and_rate_one_have_everybody() -> None:
    assert membership(FullBatch(7), steps=3).all()
    assert membership(Poisson(7, 7), steps=3).all()


def test_fixed_size_is_a_uniform_subset() -> None:
    members = membership(FixedSize(sample_size=12, batch_size=3), steps=4000)
    assert (members.sum(1) == 3).all() and members.max() == 1
    assert stats.chisquare(members.sum(0)).pvalue > LEVEL


def test_shuffled_uses_each_sample_once_per_epoch_in_a_new_order() -> None:
    sampling = Shuffled(sample_size=10, batch_size=4)
    assert sampling.batches_per_epoch == 3
    draws = Draws(sampling, Entropy(1))
    epochs = [[draws.batch(3 * epoch + k) for k in range(3)] for epoch in range(4)]
    orders = [np.concatenate(batches) for batches in epochs]
    assert all([len(b) for b in batches] == [4, 4, 2] for batches in epochs)
    assert all(sorted(order) == list(range(10)) for order in orders)
    assert len({tuple(order) for order in orders}) == 4


def test_an_unseeded_shuffle_keeps_its_order_within_the_run_and_across_a_resume() -> None:
    sampling = Shuffled(sample_size=100, batch_size=10)
    draws = Draws(sampling, Entropy())
    again = Draws(sampling, Entropy(), order_key=draws.order_key)
    assert all(np.array_equal(draws.batch(t), again.batch(t)) for t in (0, 7, 12, 3))
    assert not np.array_equal(draws.batch(0), Draws(sampling, Entropy()).batch(0))


def test_balls_in_bins_put_each_record_into_one_batch_of_every_epoch_uniformly_and_independently() -> None:
    sampling = BallsInBins(sample_size=9, batch_size=2.5)
    assert sampling.batches_per_epoch == 4 and sampling.largest_batch == 9
    draws, epochs = Draws(sampling, Entropy(1)), 3_000
    places = np.full((epochs, 9), -1)
    for epoch in range(epochs):
        for k in range(4):
            batch = draws.batch(4 * epoch + k)
            assert (places[epoch, batch] == -1).all() and (np.diff(batch) > 0).all()
            places[epoch, batch] = k
    assert (places >= 0).all()
    for record in range(9):  # uniform; independent of the next record, and of itself an epoch before
        assert stats.chisquare(np.bincount(places[:, record])).pvalue > LEVEL
        pairs = np.histogram2d(places[:, record], places[:, (record + 1) % 9], bins=4)[0]
        again = np.histogram2d(places[1:, record], places[:-1, record], bins=4)[0]
        assert min(stats.chi2_contingency(table).pvalue for table in (pairs, again)) > LEVEL
    sizes = np.array([np.bincount(row, minlength=4) for row in places])
    assert (sizes == 0).any() and sizes.max() > 6  # a batch may be empty, or have most


def test_balls_in_bins_have_no_batches_smaller_than_one_record() -> None:
    assert BallsInBins(10, 1).batches_per_epoch == 10 and BallsInBins(10, 10).batches_per_epoch == 1
    for size in (0.5, 0, 11, -1, True, "3", None, math.inf):
        with pytest.raises(InvalidSampling, match="batch_size"):
            BallsInBins(10, size)  # type: ignore[arg-type]
    assert BallsInBins(1_000, 3).description == "each of 1,000 records in one of 334 batches of every epoch"
    assert len(Draws(BallsInBins(10**5, 1), Entropy(0)).batch(10**12)) < 12


@pytest.mark.parametrize(
    "sampling", [Poisson(1000, 100), FixedSize(1000, 100), Shuffled(1000, 100), BallsInBins(1000, 100)]
)
def test_a_seed_repeats_any_step_alone_and_no_seed_repeats_none(sampling: Sampling) -> None:
    one, two, other = (Draws(sampling, Entropy(seed)) for seed in (3, 3, 4))
    batches = [one.batch(t) for t in range(6)]
    assert np.array_equal(batches[5], two.batch(5)) and np.array_equal(batches[2], two.batch(2))
    assert not np.array_equal(batches[2], other.batch(2)) and not np.array_equal(batches[2], batches[3])
    if not sampling.keeps_order:
        free = Draws(sampling, Entropy())
        assert not np.array_equal(free.batch(0), free.batch(0))


@settings(max_examples=40)
@given(
    st.integers(1, 300),
    st.floats(0.0, 1.0),
    st.integers(0, 2**70),
    st.lists(st.integers(0, 10**9), min_size=1, max_size=6),
)
def test_a_batch_does_not_depend_on_the_batches_before_it(size: int, share: float, seed: int, steps: list[int]) -> None:
    part = max(1, int(share * size))
    schemes: list[Sampling] = [Poisson(size, part), Poisson(size, part, max_batch_size=max(1, part // 2))]
    for sampling in (*schemes, FixedSize(size, part), Shuffled(size, part), BallsInBins(size, part), FullBatch(size)):
        draws = Draws(sampling, Entropy(seed))
        for step in (*steps, *reversed(steps)):
            batch = draws.batch(step)
            assert np.array_equal(batch, Draws(sampling, Entropy(seed)).batch(step))
            assert len(set(batch.tolist())) == len(batch) <= (sampling.largest_batch or size)
            assert all(0 <= index < size for index in batch)


def test_indices_are_distinct_and_in_range() -> None:
    for t in range(50):
        batch = Draws(Poisson(40, 20), Entropy(0)).batch(t)
        assert batch.dtype == np.int64 and len(set(batch.tolist())) == len(batch)
        assert (batch >= 0).all() and (batch < 40).all() and (np.diff(batch) > 0).all()


@pytest.mark.parametrize(("size", "sizes"), [(None, [7]), (3, [3, 3, 1]), (7, [7]), (100, [7]), (1, [1] * 7)])
def test_split(size: int | None, sizes: list[int]) -> None:
    pieces = split(np.arange(7), size)
    assert [len(p) for p in pieces] == sizes
    assert np.concatenate(pieces).tolist() == list(range(7))
    assert split(np.arange(0), size) == []


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "3", None])
def test_sizes_that_are_not_positive_integers_are_refused(value: object) -> None:
    for make in (
        lambda: Poisson(value, 1),  # type: ignore[arg-type]
        lambda: FullBatch(value),  # type: ignore[arg-type]
        lambda: Shuffled(10, value),  # type: ignore[arg-type]
        lambda: FixedSize(value, 1),  # type: ignore[arg-type]
    ):
        with pytest.raises(InvalidSampling):
            make()
    if value is not None:
        with pytest.raises(InvalidSampling):
            Poisson(10, 1, max_batch_size=value)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "size",
    [0, -2.5, 0.0, True, "3", None, float("nan"), float("inf"), 10**400, 1e-320, np.float32(2.5), Fraction(5, 2)],
)
@pytest.mark.parametrize("size_or_rate", [{"sample_size": 10}, {"rate": 0.1}])
def test_an_expected_batch_size_is_a_positive_finite_number(size: object, size_or_rate: dict[str, float]) -> None:
    with pytest.raises(InvalidSampling, match="batch_size must be a finite int or float"):
        Poisson(batch_size=size, **size_or_rate)  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [256, 256.0, np.float64(256.0)])
def test_a_whole_expected_batch_size_is_written_as_ever(size: float) -> None:
    """Also in the label of a seed: the same plan, the same noise."""
    sampling = Poisson(1_000, size)
    assert sampling == Poisson(1_000, 256) and repr(sampling) == repr(Poisson(1_000, 256))
    assert json.dumps(arguments(sampling)) == '{"sample_size": 1000, "batch_size": 256, "max_batch_size": null}'
    assert type(Poisson(1_000, np.float64(12.5)).batch_size) is float
    assert "12.5/1,000" in Poisson(1_000, 12.5).description


def test_batches_of_a_known_size_have_no_fractions() -> None:
    for kind in (Shuffled, FixedSize):
        with pytest.raises(InvalidSampling, match=f"got 2.5: a batch of {kind.__name__} has exactly so many records"):
            kind(10, 2.5)  # type: ignore[arg-type]
    for cut in ({"max_batch_size": 4.5}, {"max_batch_size": 4, "largest": 20.5}):
        with pytest.raises(InvalidSampling, match="must be a positive integer"):
            Poisson(rate=0.1, batch_size=2.5, **{"largest": 20, **cut})  # type: ignore[arg-type]


def test_a_rate_over_one_is_refused() -> None:
    for kind in (Poisson, Shuffled, FixedSize):
        with pytest.raises(InvalidSampling, match="over 1"):
            kind(10, 11)
    with pytest.raises(InvalidSampling, match=r"10\.000000000000002 is larger than sample_size 10"):
        Poisson(10, 10.000000000000002)
    assert Poisson(10, 10).rate == 1.0


@pytest.mark.parametrize(
    "sampling",
    [
        *(Poisson(10, 2), Poisson(10, 2.5), Poisson(rate=0.1, batch_size=2), Poisson(rate=0.1, batch_size=1 / 3)),
        *(Poisson(10, 2, max_batch_size=4), FullBatch(10), Shuffled(10, 2), BallsInBins(10, 2.5)),
    ],
)
def test_a_written_sampling_has_each_of_its_arguments(sampling: Sampling) -> None:
    """One that is left out would take a default that was not the run's."""
    written = dict(arguments(sampling))
    assert made_from(type(sampling), written) == sampling
    for name in written:
        with pytest.raises(InvalidSampling):
            made_from(type(sampling), {key: value for key, value in written.items() if key != name})


POISSON: dict[str, object] = {"sample_size": 100, "batch_size": 5}
PUBLIC: dict[str, object] = {"rate": 0.25, "batch_size": 5}
CUT: dict[str, object] = {**PUBLIC, "max_batch_size": 8, "largest": 30}


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({}, "Poisson needs sample_size="),
        ({"batch_size": 5}, "Poisson needs sample_size="),
        ({"sample_size": 100}, "batch_size must be a finite int or float"),
        ({"rate": 0.25}, "batch_size must be a finite int or float"),
        ({**POISSON, "rate": 0.05}, "not both"),
        ({**POISSON, "rate": float("nan")}, "not both"),
        *(({**PUBLIC, "rate": rate}, "rate must be a number over 0") for rate in (0.0, 0, -0.1, 1.5, 5, "0.5", True)),
        ({**PUBLIC, "rate": float("nan")}, "rate must be a number over 0"),
        ({**PUBLIC, "batch_size": 0}, "batch_size must be"),
        ({**PUBLIC, "max_batch_size": 8}, "needs largest="),
        ({**PUBLIC, "largest": 30}, "largest= goes with rate= and max_batch_size= only"),
        ({**POISSON, "largest": 100}, "largest= goes with rate= and max_batch_size= only"),
        ({**POISSON, "max_batch_size": 8, "largest": 100}, "largest= goes with rate= and max_batch_size= only"),
        ({**CUT, "largest": 0}, "largest must be a positive integer"),
        ({**CUT, "max_batch_size": 0}, "max_batch_size must be a positive integer"),
    ],
    ids=str,
)
def test_a_poisson_sampling_that_is_not_whole_is_refused(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidSampling, match=reason):
        Poisson(**given)


@pytest.mark.parametrize(
    ("given", "rate", "largest_batch", "is_cut"),
    [
        (POISSON, 0.05, 100, False),
        ({**POISSON, "max_batch_size": 99}, 0.05, 99, True),
        ({**POISSON, "max_batch_size": 100}, 0.05, 100, False),
        (PUBLIC, 0.25, None, False),
        ({"rate": 1, "batch_size": 5}, 1.0, None, False),
        ({"rate": 1e-9, "batch_size": 5}, 1e-9, None, False),
        (CUT, 0.25, 8, True),
        ({**CUT, "largest": 8}, 0.25, 8, False),
        ({**CUT, "largest": 9}, 0.25, 8, True),
    ],
    ids=str,
)
def test_what_a_poisson_sampling_says_of_its_batches(
    given: dict[str, Any], rate: float, largest_batch: int | None, is_cut: bool
) -> None:
    sampling = Poisson(**given)
    assert sampling.rate == rate and isinstance(sampling.rate, float)
    assert (sampling.largest_batch, sampling.is_cut) == (largest_batch, is_cut)
    assert ("at most" in sampling.description) == (sampling.max_batch_size is not None)
    assert replace(sampling, batch_size=4).rate == (0.04 if sampling.sample_size else rate)


def test_with_a_public_rate_the_data_say_how_many_records_there_are() -> None:
    draws = Draws(Poisson(**PUBLIC), Entropy(0))  # type: ignore[arg-type]
    assert max(draws.batch(step, 40).max() for step in range(20)) > 30
    assert all(draws.batch(step, 3).max(initial=0) < 3 for step in range(20))
    with pytest.raises(InvalidSampling, match="does not say how many records there are"):
        draws.batch(0)


def test_the_order_of_an_epoch_has_a_key_of_128_bits() -> None:
    assert len(Draws(Shuffled(10, 4), Entropy()).order_key) == len(Draws(Shuffled(10, 4), Entropy(0)).order_key) == 16


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        (FullBatch, {"sample_size": 10, "batch_size": 10}),
        (FixedSize, {"sample_size": 10}),
        (Poisson, {"sample_size": 10, "batch_size": 2, "max_batch_size": None, "rate": 0.2}),
        (Poisson, {"sample_size": 10, "batch_size": 2, "max_batch_size": None, "largest": None}),
        (Poisson, {"rate": 0.1, "batch_size": 2, "max_batch_size": None, "largest": None}),
    ],
)
def test_a_written_sampling_has_no_other_arguments(kind: type[Sampling], given: dict[str, Any]) -> None:
    with pytest.raises(InvalidSampling):
        made_from(kind, given)
