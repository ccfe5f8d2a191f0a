"""Metrics against oracles of other libraries and against sums written out by hand."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.calibration import calibration_curve
from sklearn.metrics import accuracy_score, brier_score_loss, log_loss

from clipwise.calibration import CalibrationResult, evaluate
from tests.calibration.reference import reference, samples, smooth_reference, softmax, top

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import calibration as kumar
    import relplot

# n - 1 is prime to 15: scikit-learn's quantiles never lie on a sample, where its rounding would decide.
SETS = [(0, 398, 5), (1, 38, 2), (2, 998, 30), (3, 5, 10)]


@pytest.fixture(params=SETS, ids=str)
def data(request: pytest.FixtureRequest) -> tuple[Any, Any, CalibrationResult]:
    seed, n, classes = request.param
    probabilities, labels = samples(seed, n, classes)
    return probabilities, labels, evaluate(probabilities, labels, bins=15)


def test_every_metric_equals_the_sums_by_hand(data: tuple[Any, Any, CalibrationResult]) -> None:
    probabilities, labels, result = data
    for name, value in reference(probabilities, labels, 15).items():
        assert getattr(result, name) == pytest.approx(value, abs=1e-12), name


def torchmetrics_error(norm: str) -> Callable[[Any, Any], float]:
    def error(p: Any, y: Any) -> float:
        from torchmetrics.functional.classification import multiclass_calibration_error  # seconds; here, not everywhere

        tensors = torch.from_numpy(p), torch.from_numpy(y)
        return float(multiclass_calibration_error(*tensors, num_classes=p.shape[1], n_bins=15, norm=norm))

    return error


ORACLES: dict[str, Callable[[Any, Any], float]] = {
    "accuracy": lambda p, y: accuracy_score(y, p.argmax(axis=1)),
    "nll": lambda p, y: log_loss(y, p, labels=range(p.shape[1])),
    "brier": lambda p, y: brier_score_loss(y, p, labels=range(p.shape[1]), scale_by_half=False),
    "ece": torchmetrics_error("l1"),
    "mce": torchmetrics_error("max"),
}


@pytest.mark.parametrize("name", ORACLES)
def test_metrics_equal_those_of_other_libraries(name: str, data: tuple[Any, Any, CalibrationResult]) -> None:
    probabilities, labels, result = data
    assert getattr(result, name) == pytest.approx(ORACLES[name](probabilities, labels), abs=1e-6)


def test_adaptive_bins_are_those_of_scikit_learn(data: tuple[Any, Any, CalibrationResult]) -> None:
    probabilities, labels, result = data
    right, confidence = probabilities.argmax(axis=1) == labels, probabilities.max(axis=1)
    accuracy, mean = calibration_curve(right, confidence, n_bins=15, strategy="quantile")
    bins = result.adaptive_bins
    filled = [k for k, count in enumerate(bins.count) if count]
    assert [bins.accuracy[k] for k in filled] == pytest.approx(accuracy.tolist(), abs=1e-12)
    assert [bins.confidence[k] for k in filled] == pytest.approx(mean.tolist(), abs=1e-12)
    weights = np.array([bins.count[k] for k in filled]) / len(labels)
    assert result.adaptive_ece == pytest.approx(float(weights @ np.abs(accuracy - mean)), abs=1e-12)
    assert max(bins.count) - min(bins.count) <= 1


def test_a_quantile_on_a_sample_belongs_to_the_bin_below() -> None:
    confidence = np.linspace(0.5, 1.0, 16)
    probabilities = np.stack([confidence, 1 - confidence], axis=1)
    bins = evaluate(probabilities, np.zeros(16, int), bins=5).adaptive_bins
    assert bins.count == (4, 3, 3, 3, 3)
    assert bins.edges[1:-1] == pytest.approx(confidence[[3, 6, 9, 12]].tolist(), abs=0)


def binned_for_kumar(seed: int) -> tuple[Any, Any, list[list[tuple[float, bool]]]]:
    """Confidences that are equal within each bin, where the estimators are defined without any choice."""
    random = np.random.default_rng(seed)
    levels = (np.arange(7, 15) + 0.5) / 15
    confidence = levels[random.integers(0, len(levels), 800)]
    right = random.random(800) < confidence - 0.1
    probabilities = np.stack([confidence, 1 - confidence], axis=1)
    groups = [[(float(c), bool(r)) for c, r in zip(confidence, right, strict=True) if c == level] for level in levels]
    return probabilities, np.where(right, 0, 1), groups


def test_the_debiased_squared_error_is_that_of_kumar_et_al() -> None:
    probabilities, labels, groups = binned_for_kumar(0)
    expected = kumar.unbiased_square_ce(groups)
    assert evaluate(probabilities, labels).debiased_rmsce ** 2 == pytest.approx(expected, abs=1e-12)


def test_the_debiased_ece_is_that_of_kumar_et_al() -> None:
    probabilities, labels, groups = binned_for_kumar(1)
    np.random.seed(0)  # noqa: NPY002 - the oracle draws from the global generator
    expected = kumar.normal_debiased_ce(groups, power=1, resamples=20_000)
    # Its normal numbers are random, and it divides the variance by n where we divide by n - 1.
    assert evaluate(probabilities, labels).debiased_ece == pytest.approx(expected, abs=5e-4)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_smooth_ece_is_the_fixed_point_of_its_definition(seed: int) -> None:
    probabilities, labels = samples(seed, 300, sharpness=1.0 + 0.3 * seed)
    value = evaluate(probabilities, labels).smooth_ece
    confidence, right = map(np.array, zip(*top(probabilities, labels), strict=True))
    assert smooth_reference(confidence, right, value) == pytest.approx(value, abs=1e-6)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_smooth_ece_agrees_with_relplot(seed: int) -> None:
    probabilities, labels = samples(seed, 2000, sharpness=1.0 + 0.3 * seed)
    confidence, right = map(np.array, zip(*top(probabilities, labels), strict=True))
    # relplot halves its bandwidth ten times (1/1024), and weighs by a density on 200 points.
    expected = relplot.smECE(confidence, right.astype(float), eps=1e-6)
    assert evaluate(probabilities, labels).smooth_ece == pytest.approx(expected, abs=1.5e-3)


@settings(max_examples=60)
@given(
    st.lists(st.lists(st.integers(0, 6), min_size=3, max_size=3).filter(any), min_size=1, max_size=12),
    st.integers(1, 12),
    st.randoms(use_true_random=False),
)
def test_ratios_with_ties_and_edges_equal_the_reference(rows: list[list[int]], bins: int, random: Any) -> None:
    counts = np.array(rows, dtype=float)
    probabilities = counts / counts.sum(axis=1, keepdims=True)
    labels = np.array([random.randrange(3) for _ in rows])
    result = evaluate(probabilities, labels, bins=bins)
    for name, value in reference(probabilities, labels, bins).items():
        assert getattr(result, name) == pytest.approx(value, abs=1e-12), name


def test_logits_and_their_probabilities_give_the_same() -> None:
    random = np.random.default_rng(0)
    logits, labels = 3 * random.standard_normal((200, 7)), random.integers(0, 7, 200)
    one, other = evaluate(logits=logits, labels=labels), evaluate(softmax(logits), labels)
    for name, value in one.metrics.items():
        assert value == pytest.approx(other.metrics[name], abs=1e-9), name


def test_logits_keep_losses_finite_where_probabilities_underflow() -> None:
    logits = torch.tensor([[2000.0, 0.0]])
    assert evaluate(logits=logits, labels=torch.tensor([1])).nll == pytest.approx(2000.0)
    assert evaluate(torch.softmax(logits, dim=1), torch.tensor([1])).nll == float("inf")


@pytest.mark.parametrize("name", ["bins", "fine_bins", "adaptive_bins"])
def test_bins_add_up_to_the_whole(name: str, data: tuple[Any, Any, CalibrationResult]) -> None:
    _, labels, result = data
    bins = getattr(result, name)
    assert sum(bins.count) == len(labels) == sum(result.true_class_histogram) == result.count
    right = sum(n * a for n, a in zip(bins.count, bins.accuracy, strict=True) if a is not None)
    assert right / len(labels) == pytest.approx(result.accuracy)
    assert abs(result.accuracy - result.confidence) - 1e-12 <= bins.ece <= 1  # bins can only add to the overall gap


def test_ece_and_mce_are_those_of_the_bins(data: tuple[Any, Any, CalibrationResult]) -> None:
    *_, result = data
    assert result.ece == pytest.approx(result.bins.ece, abs=1e-12)
    assert result.mce == pytest.approx(result.bins.mce, abs=1e-12)
    assert result.adaptive_ece == pytest.approx(result.adaptive_bins.ece, abs=1e-12)
