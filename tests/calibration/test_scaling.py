"""Recalibration on public data: optima, oracles, and better probabilities on data that were not fitted."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.isotonic import IsotonicRegression
from torch.nn import functional as F

from clipwise._json import parse_json
from clipwise.calibration import (
    IsotonicScaling,
    PrivateTemperature,
    Temperature,
    TemperatureScaling,
    Vector,
    VectorScaling,
    evaluate,
    map_of,
)
from clipwise.errors import DataError
from tests.calibration.reference import draw_labels, softmax


def data(seed: int, n: int = 3000, sharpness: float = 2.0, shift: float = 0.0) -> tuple[Any, Any]:
    """Logits that are `sharpness` times too large (and shifted by class), and labels."""
    random = np.random.default_rng(seed)
    logits = 1.5 * random.standard_normal((n, 4))
    return sharpness * logits + shift * np.arange(4), draw_labels(random, softmax(logits))


METHODS: dict[str, Any] = {
    "temperature": TemperatureScaling(),
    "vector": VectorScaling(),
    "isotonic": IsotonicScaling(),
}


@pytest.mark.parametrize("method", METHODS)
def test_recalibration_helps_on_other_samples(method: str) -> None:
    test_logits, test_labels = data(1)
    fitted = METHODS[method].fit(*data(0))
    before = evaluate(logits=test_logits, labels=test_labels)
    after = evaluate(fitted.predict(test_logits), test_labels)
    assert before.ece > 0.12 and after.ece < 0.04
    assert after.brier < before.brier


@pytest.mark.parametrize("method", METHODS)
def test_a_fitted_map_is_written_and_read_to_the_last_bit(method: str) -> None:
    logits, _ = data(1, 200)
    fitted = METHODS[method].fit(*data(0))
    again = map_of(parse_json(json.dumps(fitted.to_dict()), "map.json"))
    assert type(again) is type(fitted) and np.array_equal(again.predict(logits), fitted.predict(logits))


def test_a_private_temperature_is_read_as_a_plain_one() -> None:
    private = PrivateTemperature(2.0, noise_multiplier=3.0)
    assert map_of(private.to_dict()) == Temperature(2.0)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"kind": "pickle"}, "kind should be one of temperature, vector, isotonic"),
        ({"kind": "temperature", "temperature": -1.0, "at_limit": False}, "temperature should be a number from 0"),
        ({"kind": "temperature", "temperature": 1.0, "at_limit": 0}, "at_limit true or false"),
        ({"kind": "vector", "scale": [1.0], "shift": []}, "as many numbers"),
        ({"kind": "vector", "scale": [1.0], "shift": [0.0], "run": "x"}, "unknown fields: run"),
        ({"kind": "isotonic", "knots": []}, "a list of pairs"),
        ({"kind": "isotonic", "knots": [[[0.5, 0.5], [0.1, 0.2]]]}, "the first of which rises"),
        ({"kind": "isotonic", "knots": [[[0.5], [1.5]]]}, "lists of probabilities"),
    ],
)
def test_a_map_that_was_edited_is_refused(record: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        map_of(record)


@pytest.mark.parametrize("sharpness", [0.3, 1.0, 5.0])
def test_the_temperature_is_the_true_one(sharpness: float) -> None:
    fitted = TemperatureScaling().fit(*data(2, 20_000, sharpness))
    assert fitted.temperature == pytest.approx(sharpness, rel=0.05) and not fitted.at_limit


def test_the_temperature_has_the_smallest_loss() -> None:
    logits, labels = (torch.from_numpy(values) for values in data(3))
    best = TemperatureScaling().fit(logits, labels).temperature
    temperature = torch.tensor(best, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(F.cross_entropy(logits / temperature, labels), temperature)
    assert abs(float(slope)) < 1e-10


def test_predictions_stay_under_a_temperature() -> None:
    logits, labels = data(4)
    probabilities = TemperatureScaling().fit(logits, labels).predict(logits)
    assert (probabilities.argmax(axis=1) == logits.argmax(axis=1)).all()


@pytest.mark.parametrize(("right", "limit"), [(True, 0.05), (False, 20.0)])
def test_a_temperature_without_a_finite_optimum_stops_at_the_limit(right: bool, limit: float) -> None:
    logits = torch.tensor([[2.0, 0.0], [0.0, 3.0]])
    labels = torch.tensor([0, 1] if right else [1, 0])
    assert TemperatureScaling().fit(logits, labels) == Temperature(limit, at_limit=True)


def test_vector_scaling_is_at_the_minimum_of_its_loss() -> None:
    logits, labels = (torch.from_numpy(values) for values in data(5, shift=0.5))
    fitted = VectorScaling(penalty=1e-3).fit(logits, labels)
    scale, shift = (torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in (fitted.scale, fitted.shift))
    penalty = 1e-3 * ((scale - 1).square().sum() + shift.square().sum())
    loss = F.cross_entropy(logits * scale + shift, labels) + penalty
    for slope in torch.autograd.grad(loss, [scale, shift]):
        assert float(slope.abs().max()) < 1e-6


def test_vector_scaling_undoes_a_shift_that_a_temperature_cannot() -> None:
    calibration, test = data(6, shift=0.8), data(7, shift=0.8)
    errors = [
        evaluate(method.fit(*calibration).predict(test[0]), test[1]).classwise_ece
        for method in (TemperatureScaling(), VectorScaling())
    ]
    assert errors[1] < 0.5 * errors[0]


def test_vector_scaling_stays_finite_on_separated_classes() -> None:
    logits = torch.eye(3).repeat(20, 1)
    fitted = VectorScaling().fit(logits, logits.argmax(dim=1))
    assert all(math.isfinite(value) for value in (*fitted.scale, *fitted.shift))


def test_isotonic_maps_are_those_of_scikit_learn() -> None:
    (logits, labels), (other, _) = data(8, 500), data(9, 300)
    rounded = logits.round(1)  # ties
    fitted = IsotonicScaling().fit(rounded, labels)
    expected = np.empty_like(other)
    for k in range(4):
        oracle = IsotonicRegression(y_min=0, y_max=1, out_of_bounds="clip")
        oracle.fit(softmax(rounded)[:, k], labels == k)
        expected[:, k] = oracle.predict(softmax(other)[:, k])
    expected /= expected.sum(axis=1, keepdims=True)
    assert fitted.predict(other) == pytest.approx(expected, abs=1e-9)


def test_where_no_class_is_left_isotonic_says_uniform() -> None:
    logits = np.array([[3.0, 0.0], [0.0, 3.0]] * 5)
    fitted = IsotonicScaling().fit(logits, np.array([1, 0] * 5))  # always wrong
    assert fitted.predict(np.array([[3.0, 0.0]])) == pytest.approx(np.full((1, 2), 0.5))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("given", "returned"),
    [(torch.float16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)],
)
def test_probabilities_have_the_form_of_the_logits(method: str, given: torch.dtype, returned: torch.dtype) -> None:
    logits, labels = data(10, 200)
    fitted = METHODS[method].fit(logits, labels)
    tensor = fitted.predict(torch.from_numpy(logits).to(given))
    array = fitted.predict(torch.from_numpy(logits).to(given).numpy())
    assert tensor.dtype == returned and torch.equal(torch.from_numpy(array), tensor)
    assert evaluate(tensor, labels).count == 200  # rows sum to 1


REFUSED: dict[str, tuple[Any, str]] = {
    "infinite logits": (lambda: TemperatureScaling().fit([[0.0, -math.inf]], [0]), "finite for recalibration"),
    "limits": (lambda: TemperatureScaling(low=2.0, high=1.0), "0 < low < high"),
    "labels": (lambda: VectorScaling().fit([[0.0, 1.0]], [2]), "from 0 to 1"),
    "penalty": (lambda: VectorScaling(penalty=0.0).fit([[0.0, 1.0]], [1]), "penalty must be a positive"),
    "classes": (lambda: IsotonicScaling().fit([[0.0, 1.0]], [1]).predict(np.zeros((1, 3))), "fitted on 2 classes"),
    "classes of a vector": (lambda: Vector((1.0, 1.0), (0.0, 0.0)).predict(np.zeros((1, 3))), "fitted on 2 classes"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusal(case: str) -> None:
    call, words = REFUSED[case]
    with pytest.raises(DataError, match=words):
        call()
