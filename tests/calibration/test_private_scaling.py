"""The private temperature: its sensitivity, its noise, its place on the ledger, and what it is worth."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from scipy import stats
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import clipwise as cw
from clipwise.accounting import PrivateCalibration
from clipwise.calibration import PrivateTemperatureScaling, TemperatureScaling, evaluate
from clipwise.calibration.private_scaling import QUERIES, statistic
from clipwise.entropy import Entropy
from clipwise.errors import ClipwiseError, DataError
from clipwise.noise import DefaultNormals
from tests.calibration.test_scaling import data

ANY_LOGIT = st.one_of(
    st.floats(-20, 20), st.floats(allow_nan=True, allow_infinity=True), st.sampled_from([1e308, -1e308, 0.0])
)
TEMPERATURES = st.floats(math.log(0.05), math.log(20)).map(math.exp)


class Watched:
    """Normal numbers, or none, with a look at the ledger whenever they are asked for."""

    def __init__(self, ledger: cw.Ledger | None = None, scale: float = 1.0) -> None:
        self.ledger, self.scale, self.source = ledger, scale, DefaultNormals()
        self.seen: list[tuple[Any, ...]] = []
        self.drawn: list[float] = []
        self.steps: list[int] = []

    def fill_(self, buffer: Tensor, entropy: Entropy, step: int, piece: int = 0) -> None:
        if self.ledger is not None:
            self.seen.append(self.ledger.events)
        self.source.fill_(buffer, entropy, step, piece)
        buffer.mul_(self.scale)
        self.drawn.extend(buffer.tolist())
        self.steps.append(step)


@settings(max_examples=200)
@given(
    arrays.arrays(np.float64, st.tuples(st.integers(1, 6), st.integers(1, 5)), elements=ANY_LOGIT),
    TEMPERATURES,
    st.data(),
)
def test_one_record_changes_the_statistic_by_at_most_one(logits: Any, temperature: float, more: Any) -> None:
    """For all data, all neighbours by adding or removing a record, all temperatures. Rounding: under 1e-12."""
    z = torch.from_numpy(logits)
    hits = torch.tensor(more.draw(st.lists(st.booleans(), min_size=len(z), max_size=len(z))))
    removed = more.draw(st.integers(0, len(z) - 1))
    keep = torch.arange(len(z)) != removed
    change = statistic(z, hits, temperature) - statistic(z[keep], hits[keep], temperature)
    assert abs(float(change)) <= 1 + 1e-12


def test_the_bound_on_the_sensitivity_is_reached() -> None:
    """A certain and wrong record adds 1, so the noise is not larger than it must be."""
    assert float(statistic(torch.tensor([[1e6, 0.0]]), torch.tensor([False]), 1.0)) == 1.0


@settings(max_examples=50)
@given(arrays.arrays(np.float64, (5, 3), elements=st.floats(-20, 20)), TEMPERATURES, TEMPERATURES)
def test_the_statistic_falls_with_the_temperature(logits: Any, one: float, other: float) -> None:
    z, hits = torch.from_numpy(logits), torch.tensor([True, False, True, True, False])
    low, high = sorted((one, other))
    assert float(statistic(z, hits, low)) >= float(statistic(z, hits, high)) - 1e-9


def test_the_event_is_on_the_ledger_before_any_noise_is_drawn() -> None:
    ledger = cw.Ledger()
    noise = Watched(ledger)
    scaling = PrivateTemperatureScaling(noise_multiplier=3.0, noise=noise)
    scaling.fit(*data(0, 200), ledger=ledger)
    assert noise.seen == [(scaling.event,)] * QUERIES
    assert ledger.events == (scaling.event,)


def test_a_fit_that_is_refused_is_not_charged() -> None:
    ledger = cw.Ledger()
    with pytest.raises(DataError):
        PrivateTemperatureScaling(noise_multiplier=1.0).fit([[0.0, 1.0]], [5], ledger)
    assert ledger.events == ()


@pytest.mark.parametrize("noise_multiplier", [0.7, 4.0])
def test_the_noise_has_the_standard_deviation_that_is_charged(noise_multiplier: float) -> None:
    """An empty statistic (one record of NaN counts 0) shows the noise alone: normal, sqrt(8) * noise_multiplier."""
    values = []
    for seed in range(150):
        asked: list[float] = []
        scaling = Spy(noise_multiplier=noise_multiplier, seed=seed)
        scaling.fit(torch.full((1, 2), math.nan), torch.tensor([0]), cw.Ledger(), asked)
        values.extend(asked)
    assert len(values) == 150 * QUERIES
    expected = noise_multiplier * math.sqrt(QUERIES)
    assert stats.kstest(values, "norm", args=(0.0, expected)).pvalue > 0.001
    assert np.std(values) == pytest.approx(expected, rel=4 / math.sqrt(2 * len(values)))
    assert PrivateTemperatureScaling(noise_multiplier).event.noise_multiplier == pytest.approx(expected)


class Spy(PrivateTemperatureScaling):
    """Hands out the noisy sums that the search sees."""

    def fit(self, logits: Any, labels: Any, ledger: Any, asked: list[float] | None = None) -> Any:
        object.__setattr__(self, "_asked", [] if asked is None else asked)
        return super().fit(logits, labels, ledger)

    def _next(self, asked: list[tuple[float, float]]) -> tuple[float, bool]:
        found: list[float] = self._asked  # type: ignore[attr-defined]
        found[:] = [value for _, value in asked]
        return super()._next(asked)


def test_every_query_of_every_fit_has_its_own_noise() -> None:
    ledger = cw.Ledger()
    noise = Watched()
    for _ in range(2):
        PrivateTemperatureScaling(noise_multiplier=1.0, seed=5, noise=noise).fit(*data(0, 50), ledger=ledger)
    assert noise.steps == list(range(2 * QUERIES))
    assert len(set(noise.drawn)) == 2 * QUERIES


def test_the_noise_is_not_that_of_training_with_the_same_seed() -> None:
    noise, plain = Watched(), torch.zeros(1, dtype=torch.float64)
    PrivateTemperatureScaling(noise_multiplier=1.0, seed=5, noise=noise).fit(*data(0, 50), ledger=cw.Ledger())
    DefaultNormals().fill_(plain, Entropy(5), 0, 0)
    assert float(plain) not in noise.drawn


def test_without_a_seed_two_fits_differ_and_with_one_they_agree() -> None:
    def fit(seed: int | None) -> float:
        return PrivateTemperatureScaling(1.0, seed=seed).fit(*data(0, 300), ledger=cw.Ledger()).temperature

    assert fit(None) != fit(None)
    assert fit(3) == fit(3) != fit(4)


@pytest.mark.parametrize("sharpness", [0.4, 1.0, 3.0])
def test_without_noise_the_mean_confidence_becomes_the_accuracy(sharpness: float) -> None:
    logits, labels = data(1, 2000, sharpness)
    fitted = PrivateTemperatureScaling(1.0, noise=Watched(scale=0.0)).fit(logits, labels, cw.Ledger())
    result = evaluate(fitted.predict(logits), labels)
    assert result.confidence == pytest.approx(result.accuracy, abs=2e-3)
    assert not fitted.at_limit


def test_a_private_temperature_is_nearly_as_good_as_a_public_one() -> None:
    """2,000 records at noise multiplier 5: the ECE falls from over 13 % to near what public data give."""
    (logits, labels), (test_logits, test_labels) = data(2, 2000), data(3, 20_000)
    public = evaluate(TemperatureScaling().fit(logits, labels).predict(test_logits), test_labels)
    before = evaluate(logits=test_logits, labels=test_labels)
    errors = []
    for seed in range(20):
        fitted = PrivateTemperatureScaling(noise_multiplier=5.0, seed=seed).fit(logits, labels, cw.Ledger())
        errors.append(evaluate(fitted.predict(test_logits), test_labels).ece)
    assert before.ece > 0.13
    assert np.mean(errors) < public.ece + 0.01 and np.max(errors) < 0.04


def test_a_search_that_finds_no_sign_change_says_so() -> None:
    logits, labels = torch.tensor([[2.0, 0.0]] * 2000), torch.ones(2000, dtype=torch.int64)  # always wrong
    fitted = PrivateTemperatureScaling(1.0, seed=0).fit(logits, labels, cw.Ledger())
    assert fitted.at_limit and 19 < fitted.temperature < 20


@pytest.mark.parametrize(("label", "limit", "towards"), [(0, 0.05, 1), (1, 20.0, -1)], ids=["right", "wrong"])
def test_a_search_without_a_sign_change_halves_its_way_to_the_limit(label: int, limit: float, towards: int) -> None:
    """Always right: less sure than right at every temperature, so the least one; always wrong: the largest."""
    logits, labels = torch.tensor([[2.0, 0.0]] * 50), torch.full((50,), label)
    fitted = PrivateTemperatureScaling(1.0, noise=Watched(scale=0.0)).fit(logits, labels, cw.Ledger())
    left = 0.5 * math.log(20.0 / 0.05) / 2**QUERIES
    assert fitted.at_limit and math.log(fitted.temperature / limit) == pytest.approx(towards * left, rel=1e-9)


@pytest.mark.parametrize(
    ("asked", "expected", "crossed"),
    [
        ([], 0.5 * (math.log(0.05) + math.log(20.0)), False),
        ([(1.0, 4.0)], 0.5 * (math.log(20.0) + 1.0), False),
        ([(1.0, -4.0)], 0.5 * (math.log(0.05) + 1.0), False),
        ([(1.0, 0.0)], 0.5 * (math.log(0.05) + 1.0), False),
        ([(1.0, 9.0), (2.0, 4.0), (2.5, 3.0)], 0.5 * (math.log(20.0) + 2.5), False),
        ([(1.0, 9.0), (2.0, 4.0), (2.5, 0.0)], 0.5 * (math.log(20.0) + 2.5), False),
        ([(1.0, -3.0), (-2.0, -1.0), (0.5, -2.0)], 0.5 * (math.log(0.05) - 2.0), False),
        ([(1.0, 0.0), (2.0, -3.0)], 0.5 * (math.log(0.05) + 1.0), False),
        ([(2.0, -4.0), (1.0, 4.0)], 1.5, True),
        ([(1.0, 0.5), (2.0, -0.5)], 1.5, True),
        ([(1.0, 6.0), (2.0, 1.0), (3.0, -3.0)], 2.25, True),
        ([(1.0, 6.0), (2.0, -2.0), (3.0, -3.0)], 1.75, True),
        ([(1.0, 6.0), (2.0, 0.5), (3.0, -0.5)], 2.5, True),
        # What rises is pooled: the fit is then 5, 0, 0, -6 at 1, 2, 3, 4.
        ([(1.0, 5.0), (2.0, -1.0), (3.0, 1.0), (4.0, -6.0)], 2.5, True),
        # 4, 4, -1.5, -1.5: from the middle of the first two to that of the others.
        ([(1.0, 3.0), (2.0, 5.0), (3.0, -2.0), (4.0, -1.0)], 1.5 + 2.0 * 4.0 / 5.5, True),
        ([(1.0, 7.0), (1.5, 3.0), (2.0, 5.0), (3.0, -2.0), (4.0, -1.0), (4.5, -9.0)], 1.75 + 1.75 * 4.0 / 5.5, True),
    ],
    ids=str,
)
def test_the_next_temperature_is_where_a_falling_fit_crosses_zero(
    asked: list[tuple[float, float]], expected: float, crossed: bool
) -> None:
    found, said = PrivateTemperatureScaling(1.0)._next(asked)
    assert found == pytest.approx(expected, rel=1e-12) and said is crossed


def test_the_statistic_is_the_sum_of_confidence_minus_hit() -> None:
    logits = torch.tensor([[2.0, 0.0, 1.0], [0.0, 3.0, 0.0], [math.nan, 0.0, 0.0], [math.inf, 0.0, 0.0]]).double()
    hits = torch.tensor([True, False, False, True])
    confidences = [
        max(math.exp(z / 2.0) for z in row) / sum(math.exp(z / 2.0) for z in row) for row in logits[:2].tolist()
    ]
    assert float(statistic(logits, hits, 2.0)) == pytest.approx(confidences[0] - 1 + confidences[1], rel=1e-12)


def test_neither_seed_nor_ledger_is_shown() -> None:
    scaling = PrivateTemperatureScaling(2.0, seed=987_654, noise=Watched())
    assert repr(scaling) == "PrivateTemperatureScaling(noise_multiplier=2.0, disjoint=False, low=0.05, high=20.0)"
    assert scaling == PrivateTemperatureScaling(2.0, seed=987_654) != PrivateTemperatureScaling(2.0, seed=1)
    one, other = (scaling.fit(*data(0, 50), ledger=cw.Ledger()) for _ in range(2))
    other.ledger.record(PrivateCalibration(1.0))
    assert one == other and "edger" not in repr(one) and one.epsilon(1e-5) < other.epsilon(1e-5)
    bare = cw.calibration.PrivateTemperature(1.5)
    assert (bare.noise_multiplier, bare.disjoint, bare.ledger.events) == (0.0, False, ())


@pytest.mark.parametrize(("low", "high"), [(0.0, 20.0), (2.0, 2.0), (3.0, 2.0), (0.05, math.inf), (math.nan, 2.0)])
def test_the_limits_of_the_temperature_are_two_numbers(low: float, high: float) -> None:
    with pytest.raises(ClipwiseError):
        PrivateTemperatureScaling(1.0, low=low, high=high)


def test_the_charge_is_that_of_one_gaussian_mechanism() -> None:
    """Eight sums with sqrt(8) times the noise compose to one with the noise multiplier asked for."""
    ledger = cw.Ledger()
    fitted = PrivateTemperatureScaling(noise_multiplier=2.0, seed=0).fit(*data(0, 100), ledger=ledger)
    for accountant in ("exact", "rdp"):
        once = cw.Ledger([PrivateCalibration(2.0)]).epsilon(1e-5, accountant)
        assert fitted.epsilon(1e-5, accountant) == pytest.approx(once, rel=1e-6)


def trained() -> tuple[cw.Private, nn.Module, TensorDataset]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 3, generator=generator)
    dataset = TensorDataset(x, (x[:, 0] > 0).long())
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    plan = cw.Plan(sampling=cw.Poisson(60, 20), steps=5, clip=cw.Abadi(1.0), noise_multiplier=2.0)
    private = cw.Private(plan, model, torch.optim.SGD(model.parameters(), lr=0.1), seed=0)
    for inputs, labels in private.loader(dataset):
        private.step(nn.functional.cross_entropy(model(inputs), labels, reduction="none"))
    return private, model, dataset


def test_the_combined_epsilon_counts_training_and_calibration() -> None:
    private, model, dataset = trained()
    training = private.epsilon(1e-5)
    inputs, labels = dataset.tensors
    fitted = PrivateTemperatureScaling(noise_multiplier=2.0).fit(model(inputs), labels, private.ledger)
    alone = cw.Ledger([PrivateCalibration(2.0)]).epsilon(1e-5)
    combined = fitted.epsilon(1e-5)
    assert max(training, alone) < combined < training + alone
    assert private.epsilon(1e-5) == combined == fitted.guarantee(1e-5).epsilon
    assert "statistics over all records" in fitted.guarantee(1e-5).statement()


def test_disjoint_records_compose_in_parallel() -> None:
    private, model, _ = trained()
    training = private.epsilon(1e-5)
    other = torch.randn(40, 3, generator=torch.Generator().manual_seed(1))
    scaling = PrivateTemperatureScaling(noise_multiplier=1.0, disjoint=True)
    fitted = scaling.fit(model(other), (other[:, 0] > 0).long(), private.ledger)
    alone = cw.Ledger([PrivateCalibration(1.0)]).epsilon(1e-5)
    assert fitted.epsilon(1e-5) == pytest.approx(max(training, alone), rel=1e-6)


def test_a_run_can_be_resumed_with_its_calibration_on_the_ledger(tmp_path: Any) -> None:
    private, model, dataset = trained()
    inputs, labels = dataset.tensors
    PrivateTemperatureScaling(noise_multiplier=2.0).fit(model(inputs), labels, private.ledger)
    private.save(tmp_path / "run.pt")
    again = nn.Linear(3, 2)
    resumed = cw.Private.resume(tmp_path / "run.pt", again, torch.optim.SGD(again.parameters(), lr=0.1))
    assert resumed.ledger == private.ledger and resumed.epsilon(1e-5) == private.epsilon(1e-5)


@pytest.mark.parametrize("disjoint", [False, True])
def test_within_spends_what_is_left(disjoint: bool) -> None:
    private, model, dataset = trained()
    inputs, labels = dataset.tensors
    target = private.epsilon(1e-5) + 0.5
    scaling = PrivateTemperatureScaling.within(target, 1e-5, private.ledger, disjoint=disjoint)
    assert scaling.disjoint is disjoint
    fitted = scaling.fit(model(inputs), labels, private.ledger)
    assert 0.99 * target < fitted.epsilon(1e-5) <= target


def test_a_budget_that_is_spent_already_leaves_nothing() -> None:
    private, *_ = trained()
    assert not PrivateTemperatureScaling.within(10.0, 1e-5, private.ledger).disjoint  # unless it is said
    with pytest.raises(ClipwiseError):
        PrivateTemperatureScaling.within(0.5 * private.epsilon(1e-5), 1e-5, private.ledger)


@pytest.mark.parametrize("noise_multiplier", [0.0, -1.0, math.nan, True])
def test_noise_must_be_positive(noise_multiplier: float) -> None:
    with pytest.raises(ClipwiseError, match="noise_multiplier must be"):
        PrivateTemperatureScaling(noise_multiplier=noise_multiplier)


def test_the_name_is_found_beside_the_others() -> None:
    assert cw.calibration.PrivateTemperatureScaling is PrivateTemperatureScaling
    with pytest.raises(AttributeError, match="no attribute 'PrivateIsotonic'"):
        _ = cw.calibration.PrivateIsotonic
