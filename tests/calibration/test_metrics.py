"""Metrics against oracles of other libraries and against sums written out by hand.

Edges of bins, empty bins, one class, two samples, ties, half precision: against the reference by hand.

Estimators on a model whose true calibration error is known.

Regression: errors against scikit-learn, coverage against the normal distribution.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from sklearn.calibration import calibration_curve
from sklearn.metrics import accuracy_score, brier_score_loss, log_loss, mean_squared_error, r2_score

from clipwise.calibration import CalibrationResult, RegressionResult, evaluate, evaluate_regression
from clipwise.calibration.bins import bin_of, equal_edges
from tests.calibration.reference import Known, bin_number, reference, samples, smooth_reference, softmax, top

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


def two_classes(confidence: Any) -> Any:
    confidence = np.asarray(confidence, dtype=np.float64)
    return np.stack([confidence, 1 - confidence], axis=1)


CASES: dict[str, tuple[Any, Any]] = {
    "on edges of tenths": (two_classes([0.5, 0.6, 0.7, 0.8, 0.9, 1.0]), [0, 1, 0, 1, 0, 0]),
    "just above edges": (two_classes(np.nextafter([0.5, 0.6, 0.7, 0.8, 0.9], 1.0)), [0, 1, 0, 1, 0]),
    "all certain": (two_classes([1.0, 1.0, 1.0, 1.0]), [0, 0, 1, 0]),
    "one bin filled": (two_classes([0.91, 0.95, 0.97]), [0, 0, 1]),
    "one class in the model": (np.ones((3, 1)), [0, 0, 0]),
    "one class in the labels": (two_classes([0.55, 0.75, 0.95, 0.85]), [0, 0, 0, 0]),
    "two samples": (two_classes([0.7, 0.9]), [0, 1]),
    "one sample": (two_classes([0.7]), [1]),
    "ties": (np.full((4, 4), 0.25), [0, 1, 2, 3]),
    "all samples equal": (two_classes([0.8] * 5), [0, 0, 0, 0, 1]),
    "zeros": (np.array([[0.0, 0.0, 1.0], [0.0, 0.5, 0.5]]), [2, 1]),
}


@pytest.mark.parametrize("bins", [1, 2, 10, 15, 20])
@pytest.mark.parametrize("case", CASES)
def test_case_equals_the_reference(case: str, bins: int) -> None:
    probabilities, labels = CASES[case][0], np.array(CASES[case][1])
    result = evaluate(probabilities, labels, bins=bins, resamples=100)
    for name, value in reference(probabilities, labels, bins).items():
        assert getattr(result, name) == pytest.approx(value, abs=1e-12), name
    assert result.intervals is not None
    for name, (low, high) in result.intervals.items():
        assert low <= result.metrics[name] + 1e-12 and result.metrics[name] <= high + 1e-12, name


@pytest.mark.parametrize("bins", [3, 7, 10, 15, 60, 97])
def test_an_edge_belongs_to_the_bin_below_it(bins: int) -> None:
    edges = equal_edges(bins)
    values = np.concatenate([edges, np.nextafter(edges, 2.0)[:-1], np.nextafter(edges[1:], -1.0)])
    assert bin_of(values, edges).tolist() == [bin_number(v, bins) for v in values.tolist()]
    assert bin_of(edges, edges).tolist() == [0, *range(bins)]


def test_torchmetrics_closes_bins_on_the_left_and_keeps_one_for_certainty() -> None:
    """The difference that docs/calibration.md tells: on edges, and at confidence 1."""
    from torchmetrics.functional.classification import multiclass_calibration_error

    probabilities, labels = two_classes([0.8, 0.75, 1.0, 0.95]), np.array([1, 0, 0, 1])
    theirs = multiclass_calibration_error(
        torch.from_numpy(probabilities), torch.from_numpy(labels), num_classes=2, n_bins=5
    )
    # Ours: (0.6, 0.8] holds 0.8 and 0.75, (0.8, 1] the rest. Theirs: [0.6, 0.8) 0.75; [0.8, 1) 0.8 and 0.95; 1 alone.
    assert evaluate(probabilities, labels, bins=5).ece == pytest.approx((abs(1.55 - 1) + abs(1.95 - 1)) / 4)
    assert float(theirs) == pytest.approx((abs(0.75 - 1) + abs(1.75 - 0) + 0) / 4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_binned_in_float64(dtype: torch.dtype) -> None:
    probabilities, labels = samples(4, 300)
    half = torch.from_numpy(probabilities).to(dtype)
    wide = half.double()
    result = evaluate(half, torch.from_numpy(labels))
    for name, value in reference(wide.numpy(), labels, 15).items():
        assert getattr(result, name) == pytest.approx(value, abs=1e-12), name


def test_a_float16_edge_is_not_the_float64_edge() -> None:
    value = torch.tensor(0.8, dtype=torch.float16)
    assert float(value) < 0.8  # so it lies inside (0.6, 0.8], where 0.8 itself is the edge
    half = torch.stack([value, 1 - value])[None]
    assert evaluate(half, torch.tensor([0]), bins=5).bins.count == (0, 0, 0, 1, 0)
    above = torch.tensor(
        [[0.60009765625, 0.39990234375]], dtype=torch.float16
    )  # above 3/5, which float16 would round to it
    assert evaluate(above, torch.tensor([0]), bins=5).bins.count == (0, 0, 0, 1, 0)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_arrays_and_tensors_give_the_same(dtype: Any) -> None:
    probabilities, labels = samples(5, 100)
    array = probabilities.astype(dtype)
    assert evaluate(array, labels) == evaluate(torch.from_numpy(array), torch.from_numpy(labels))


def test_awkward_arrays_are_read_as_they_are() -> None:
    probabilities, labels = samples(6, 50)
    expected = evaluate(probabilities, labels).metrics
    frozen = probabilities.copy()
    frozen.setflags(write=False)
    for array in (frozen, np.asfortranarray(probabilities), probabilities[::-1], probabilities.astype(">f8")):
        chosen = labels[::-1] if array.strides[0] < 0 else labels
        for name, value in evaluate(array, chosen).metrics.items():
            assert value == pytest.approx(expected[name], abs=1e-12), name
    assert evaluate(probabilities.tolist(), labels.tolist()).metrics == pytest.approx(expected)


def test_the_order_of_samples_does_not_matter() -> None:
    probabilities, labels = CASES["on edges of tenths"][0], np.array(CASES["on edges of tenths"][1])
    order = np.random.default_rng(0).permutation(len(labels))
    one, other = evaluate(probabilities, labels), evaluate(probabilities[order], labels[order])
    assert one.metrics == pytest.approx(other.metrics, abs=1e-12)


N, RUNS = 600, 80


@cache
def runs(known: Known) -> list[CalibrationResult]:
    return [evaluate(*known.draw(seed, N)) for seed in range(RUNS)]


@pytest.mark.slow
@pytest.mark.parametrize("bend", [0.0, 0.2, 0.6])
def test_the_debiased_squared_error_has_no_bias(bend: float) -> None:
    """Before the cut at 0 and the root it is right on average; plain, it is too large by far more than chance."""
    known = Known(bend)
    truth = known.rmsce(15) ** 2
    found = np.array([squared(result) for result in runs(known)])
    error = found.std() / np.sqrt(RUNS)
    assert abs(found.mean() - truth) < 3 * error
    plain = [
        sum(n * g**2 for n, g in zip(r.bins.count, r.bins.gap, strict=True) if g is not None) / N for r in runs(known)
    ]
    assert np.mean(plain) - truth > 3 * error


def squared(result: CalibrationResult) -> float:
    """The debiased squared error without the cut, from the bins; where it is positive its root is the result's."""
    total = 0.0
    for n, confidence, accuracy in zip(result.bins.count, result.bins.confidence, result.bins.accuracy, strict=True):
        if n > 1 and confidence is not None and accuracy is not None:
            total += n / N * ((confidence - accuracy) ** 2 - accuracy * (1 - accuracy) / (n - 1))
    assert result.debiased_rmsce == pytest.approx(np.sqrt(max(total, 0.0)), abs=0.02)
    return total


@pytest.mark.parametrize("bend", [0.0, 0.1, 0.2])
def test_debiasing_brings_the_ece_nearer_to_the_truth(bend: float) -> None:
    known = Known(bend)
    found = runs(known)
    plain = np.mean([r.ece for r in found]) - known.ece
    debiased = np.mean([r.debiased_ece for r in found]) - known.ece
    assert plain > 0.005
    assert abs(debiased) < 0.75 * plain


def test_of_a_calibrated_model_debiasing_removes_two_fifths() -> None:
    """What the docstring says: 2 |g| - E|N(g, s)| at g ~ N(0, s) is on average 2 - sqrt(2) = 0.586 of |g|."""
    found = runs(Known(0.0))
    ratio = np.mean([r.debiased_ece for r in found]) / np.mean([r.ece for r in found])
    assert 0.5 < ratio < 0.66


@pytest.mark.parametrize("bend", [0.2, 0.4, 0.8])
def test_every_estimator_converges_to_the_known_error(bend: float) -> None:
    known = Known(bend)
    result = evaluate(*known.draw(0, 200_000))
    for name in ("ece", "adaptive_ece", "debiased_ece"):
        assert getattr(result, name) == pytest.approx(known.ece, abs=0.004), name
    assert result.debiased_rmsce == pytest.approx(known.rmsce(15), abs=0.004)
    # Smoothing spreads gaps of one sign but never cancels them, so the smooth ECE has the same limit here.
    assert result.smooth_ece == pytest.approx(known.ece, abs=0.004)


def test_smooth_ece_of_a_calibrated_model_falls_with_the_sample() -> None:
    small, large = (
        np.mean([evaluate(*Known(0.0).draw(seed, n)).smooth_ece for seed in range(10)]) for n in (500, 20_000)
    )
    assert large < 0.5 * small < 0.03


def test_where_gaps_cancel_bins_hide_what_smoothing_sees() -> None:
    """Confidence 0.70 always right, 0.72 right 42 times in 100: one bin of fifteen (2/3, 11/15] sees no gap at all."""
    confidence = np.repeat([0.70, 0.72], 500)
    right = np.concatenate([np.ones(500, bool), np.arange(500) % 50 < 21])
    probabilities = np.stack([confidence, 1 - confidence], axis=1)
    result = evaluate(probabilities, np.where(right, 0, 1))
    assert result.ece == pytest.approx(0.0, abs=1e-12)
    assert result.smooth_ece > 0.03


LEVELS = (0.5, 0.8, 0.9, 0.95)


def regression_data(seed: int, n: int = 4000) -> tuple[Any, Any, Any]:
    """Predictions, targets, and the true standard deviation of each target around its prediction."""
    random = np.random.default_rng(seed)
    predictions, std = 3 * random.standard_normal(n), 0.5 + random.random(n)
    return predictions, predictions + std * random.standard_normal(n), std


def test_errors_are_those_of_scikit_learn() -> None:
    predictions, targets, _ = regression_data(0)
    result = evaluate_regression(predictions, targets)
    assert result.mse == pytest.approx(mean_squared_error(targets, predictions))
    assert result.rmse == pytest.approx(math.sqrt(result.mse))
    assert result.r2 == pytest.approx(r2_score(targets, predictions))
    assert result.nll is None and result.coverage == {} and result.intervals is None


@pytest.mark.parametrize("factor", [0.5, 1.0, 2.0])
def test_coverage_is_what_the_normal_distribution_says(factor: float) -> None:
    """With std too small by a factor the interval at level p holds 2 Phi(factor * z_p) - 1 of the targets."""
    predictions, targets, std = regression_data(1)
    result = evaluate_regression(predictions, targets, std=factor * std)
    assert tuple(result.coverage) == LEVELS
    for level, share in result.coverage.items():
        expected = 2 * stats.norm.cdf(factor * stats.norm.ppf(0.5 + level / 2)) - 1
        assert share == pytest.approx(expected, abs=4 * math.sqrt(expected * (1 - expected) / 4000))


def test_the_loss_is_that_of_the_normal_distribution() -> None:
    predictions, targets, std = regression_data(2, 50)
    expected = -stats.norm.logpdf(targets, predictions, std).mean()
    assert evaluate_regression(predictions, targets, std=std).nll == pytest.approx(expected)


def test_an_interval_holds_its_ends() -> None:
    z = stats.norm.ppf(0.75)
    assert evaluate_regression([0.0], [z], std=1.0, levels=[0.5]).coverage == {0.5: 1.0}
    assert evaluate_regression([0.0], [np.nextafter(z, 2)], std=1.0, levels=[0.5]).coverage == {0.5: 0.0}


def test_bootstrap_intervals_hold_the_truth() -> None:
    """Mean squared error E std^2, coverage as stated: of 40 data sets at least 34 (chance of fewer: 1 in 100)."""
    truth = {"mse": float(np.mean(np.square(regression_data(0, 100_000)[2]))), "coverage 0.9": 0.9, "coverage 0.5": 0.5}
    held = dict.fromkeys(truth, 0)
    for seed in range(40):
        predictions, targets, std = regression_data(seed, 1500)
        intervals = evaluate_regression(predictions, targets, std=std, resamples=300).intervals
        assert intervals is not None and set(intervals) == {
            "mse",
            "rmse",
            "r2",
            "nll",
            *(f"coverage {x:g}" for x in LEVELS),
        }
        for name, value in truth.items():
            held[name] += intervals[name][0] <= value <= intervals[name][1]
    assert min(held.values()) >= 34, held


def test_equal_targets_have_no_r2() -> None:
    result = evaluate_regression([1.0, 2.0], [1.0, 1.0], resamples=100)
    assert result.r2 is None and result.intervals is not None and "r2" not in result.intervals


def test_columns_and_half_precision_are_read() -> None:
    column = torch.tensor([[1.0], [2.0]], dtype=torch.bfloat16)
    assert evaluate_regression(column, torch.tensor([1, 4])).mse == 2.0


def test_a_result_survives_json() -> None:
    predictions, targets, std = regression_data(3, 200)
    result = evaluate_regression(predictions, targets, std=std, resamples=100)
    assert RegressionResult.from_dict(json.loads(json.dumps(result.to_dict(), allow_nan=False))) == result
    plain = evaluate_regression([1.0, 2.0], [1.0, 1.0])
    assert RegressionResult.from_dict(json.loads(json.dumps(plain.to_dict(), allow_nan=False))) == plain
