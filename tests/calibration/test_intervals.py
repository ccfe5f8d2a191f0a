"""Bootstrap intervals hold the truth as often as they say, and bands of the bins too."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from scipy import stats

from clipwise.calibration import Bins, CalibrationResult, evaluate, metrics_of
from clipwise.calibration.bins import summarise
from clipwise.calibration.estimators import GROUPS, Groups, pivotal, weights
from clipwise.errors import DataError
from tests.calibration.reference import Known, draw_labels, samples, softmax


def share_covered(truth: dict[str, float], runs: list[CalibrationResult]) -> dict[str, float]:
    def holds(run: CalibrationResult, name: str) -> bool:
        assert run.intervals is not None
        low, high = run.intervals[name]
        return low <= truth[name] + 1e-12 and truth[name] <= high + 1e-12

    return {name: float(np.mean([holds(run, name) for run in runs])) for name in truth}


@pytest.mark.slow
def test_intervals_hold_the_truth_of_a_model_that_is_too_sure() -> None:
    """Of 60 data sets: 95 % intervals are honest within what 60 runs can tell (52 of 60 has a chance of under 1 %)."""
    known = Known(bend=0.4)
    truth = {"accuracy": 0.75 - 0.1, "confidence": 0.75, "ece": 0.1, "adaptive_ece": 0.1, "debiased_ece": 0.1}
    truth |= {"classwise_ece": 0.1, "debiased_rmsce": known.rmsce(15)}
    runs = [evaluate(*known.draw(seed, 1500), resamples=150) for seed in range(60)]
    covered = share_covered(truth, runs)
    assert min(covered.values()) >= 52 / 60, covered


def test_a_calibrated_model_is_not_convicted() -> None:
    """At zero the ordinary bootstrap fails: here the intervals begin at 0 unless chance does not explain the error."""
    names = [metric.name for metric in metrics_of("classification")]
    calibration_errors = [name for name in names if "ce" in name and name not in ("accuracy", "confidence")]
    runs = []
    for seed in range(40):
        random = np.random.default_rng(seed)
        probabilities = softmax(2 * random.standard_normal((800, 4)))
        runs.append(evaluate(probabilities, draw_labels(random, probabilities), resamples=200))
    covered = share_covered(dict.fromkeys(calibration_errors, 0.0), runs)
    assert len(covered) == 7
    assert min(covered.values()) >= 34 / 40, covered


def test_a_model_that_is_wrong_is_convicted() -> None:
    result = evaluate(*Known(bend=0.6).draw(0, 2000), resamples=200)
    assert result.intervals is not None
    for name in ("ece", "mce", "adaptive_ece", "debiased_ece", "debiased_rmsce", "smooth_ece", "classwise_ece"):
        assert result.intervals[name][0] > 0.05, name


def mean_width(probabilities: Any, labels: Any) -> float:
    """Of the interval of the accuracy, over several assignments to groups."""
    widths = []
    for seed in range(6):
        intervals = evaluate(probabilities, labels, resamples=300, seed=seed).intervals
        assert intervals is not None
        widths.append(intervals["accuracy"][1] - intervals["accuracy"][0])
    return float(np.mean(widths))


@pytest.mark.parametrize("n", [100, 8 * GROUPS])
def test_groups_estimate_the_standard_error_whatever_the_order(n: int) -> None:
    """Data often come class by class: random groups do not make the intervals of sorted data narrower."""
    probabilities, labels = samples(1, n, classes=3)
    right = probabilities.argmax(axis=1) == labels
    expected = 2 * 1.96 * np.sqrt(right.mean() * (1 - right.mean()) / n)
    order = np.argsort(right, kind="stable")
    assert mean_width(probabilities, labels) == pytest.approx(expected, rel=0.08)
    assert mean_width(probabilities[order], labels[order]) == pytest.approx(expected, rel=0.08)


def test_groups_are_even() -> None:
    counts = np.bincount(Groups(seed=0).take(100 * GROUPS), minlength=GROUPS)
    assert stats.chisquare(counts).pvalue > 0.001


def test_weights_draw_with_replacement() -> None:
    drawn = weights(50, resamples=4000, seed=0)
    assert (drawn.sum(axis=1) == 50).all()
    assert drawn.mean(axis=0) == pytest.approx(np.ones(50), abs=0.08)
    assert drawn.var() == pytest.approx(1 - 1 / 50, abs=0.02)


def test_the_interval_takes_the_measured_bias_out_of_its_lower_end() -> None:
    replicates = np.random.default_rng(0).normal(0.12, 0.01, 20_000)  # truth 0.10 in the bootstrap's world: bias 0.02
    low, high = pivotal(0.10, 0.10, replicates, level=0.95)
    assert low == pytest.approx(0.10 - 0.02 - 0.0196, abs=5e-4)
    assert high == pytest.approx(0.10 + 0.0196, abs=5e-4)


def test_an_infinite_loss_has_no_interval() -> None:
    result = evaluate(np.array([[1.0, 0.0], [0.5, 0.5]] * 10), np.array([1, 0] * 10), resamples=100)
    assert result.nll == float("inf")
    assert result.intervals is not None and result.intervals["nll"] == (0.0, float("inf"))
    again = CalibrationResult.from_dict(json.loads(json.dumps(result.to_dict(), allow_nan=False)))
    assert again == result


@pytest.mark.parametrize("resamples", [0, 100])
def test_a_result_survives_json(resamples: int) -> None:
    result = evaluate(*samples(2, 80), bins=7, resamples=resamples)
    again = CalibrationResult.from_dict(json.loads(json.dumps(result.to_dict(), allow_nan=False)))
    assert again == result and (again.intervals is None) == (resamples == 0)


def test_json_with_other_fields_is_refused() -> None:
    record = evaluate(*samples(2, 20)).to_dict()
    with pytest.raises(DataError, match="unknown fields: f1"):
        CalibrationResult.from_dict({**record, "f1": 0.5})
    with pytest.raises(DataError, match="Bins has missing or unknown fields"):
        Bins.from_dict({"edges": [0, 1]})


def test_seeds_make_intervals_reproducible() -> None:
    data = samples(3, 100)
    assert evaluate(*data, resamples=100, seed=1) == evaluate(*data, resamples=100, seed=1)
    assert evaluate(*data, resamples=100, seed=1).intervals != evaluate(*data, resamples=100, seed=2).intervals


@pytest.mark.parametrize("confidence", [0.3, 0.9])
def test_a_calibrated_bin_lies_in_its_consistency_bar(confidence: float) -> None:
    """Exactly: the probability, over what the bin could have counted, that its accuracy is inside the bar."""
    n, right = 40, np.arange(41)
    bins = summarise([0.0, 1.0], [n], [n * confidence], [20])
    low, high = bins.consistent_low[0], bins.consistent_high[0]
    assert low is not None and high is not None
    inside = (right / n >= low) & (right / n <= high)
    covered = stats.binom.pmf(right, n, confidence)[inside].sum()
    assert 0.95 <= covered < 0.99


@pytest.mark.parametrize("accuracy", [0.05, 0.5, 0.97])
def test_the_accuracy_of_a_bin_lies_in_its_interval(accuracy: float) -> None:
    n, right = 60, np.arange(61)
    covered = 0.0
    for count in right:
        bins = summarise([0.0, 1.0], [n], [0.5 * n], [count])
        low, high = bins.accuracy_low[0], bins.accuracy_high[0]
        assert low is not None and high is not None
        covered += float(stats.binom.pmf(count, n, accuracy)) * (low <= accuracy <= high)
    assert 0.92 < covered < 0.99


def test_wilson_is_that_of_scipy() -> None:
    bins = summarise([0.0, 0.5, 1.0], [10, 0], [4.0, 0.0], [3, 0], level=0.9)
    expected = stats.binomtest(3, 10).proportion_ci(0.9, method="wilson")
    assert (bins.accuracy_low[0], bins.accuracy_high[0]) == pytest.approx((expected.low, expected.high), abs=1e-12)
    assert bins.accuracy_low[1] is None and bins.consistent_high[1] is None and bins.confidence[1] is None


@pytest.mark.parametrize("bins", [1, 10, 12, 15, 20, 30, 60])
def test_fine_bins_merge_into_the_bins_of_an_evaluation(bins: int) -> None:
    probabilities, labels = samples(4, 500)
    fine, direct = evaluate(probabilities, labels).fine_bins, evaluate(probabilities, labels, bins=bins).bins
    merged = fine.merged(bins)
    assert merged.edges == direct.edges and merged.count == direct.count
    assert merged.ece == pytest.approx(direct.ece, abs=1e-12) and merged.mce == pytest.approx(direct.mce, abs=1e-12)
    for wrong in (7, 0, True, 2.0):
        with pytest.raises(DataError, match="divides 60"):
            fine.merged(wrong)  # type: ignore[arg-type]


def test_bins_of_unequal_lengths_are_refused() -> None:
    with pytest.raises(DataError, match=r"M \+ 1 edges"):
        Bins(edges=(0.0, 1.0), count=(1, 2), confidence=(0.5, 0.5), accuracy=(0.5, 0.5))
