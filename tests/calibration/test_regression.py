"""Regression: errors against scikit-learn, coverage against the normal distribution."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn.metrics import mean_squared_error, r2_score

from clipwise.calibration import RegressionResult, evaluate_regression

LEVELS = (0.5, 0.8, 0.9, 0.95)


def data(seed: int, n: int = 4000) -> tuple[Any, Any, Any]:
    """Predictions, targets, and the true standard deviation of each target around its prediction."""
    random = np.random.default_rng(seed)
    predictions, std = 3 * random.standard_normal(n), 0.5 + random.random(n)
    return predictions, predictions + std * random.standard_normal(n), std


def test_errors_are_those_of_scikit_learn() -> None:
    predictions, targets, _ = data(0)
    result = evaluate_regression(predictions, targets)
    assert result.mse == pytest.approx(mean_squared_error(targets, predictions))
    assert result.rmse == pytest.approx(math.sqrt(result.mse))
    assert result.r2 == pytest.approx(r2_score(targets, predictions))
    assert result.nll is None and result.coverage == {} and result.intervals is None


@pytest.mark.parametrize("factor", [0.5, 1.0, 2.0])
def test_coverage_is_what_the_normal_distribution_says(factor: float) -> None:
    """With std too small by a factor the interval at level p holds 2 Phi(factor * z_p) - 1 of the targets."""
    predictions, targets, std = data(1)
    result = evaluate_regression(predictions, targets, std=factor * std)
    assert tuple(result.coverage) == LEVELS
    for level, share in result.coverage.items():
        expected = 2 * stats.norm.cdf(factor * stats.norm.ppf(0.5 + level / 2)) - 1
        assert share == pytest.approx(expected, abs=4 * math.sqrt(expected * (1 - expected) / 4000))


def test_the_loss_is_that_of_the_normal_distribution() -> None:
    predictions, targets, std = data(2, 50)
    expected = -stats.norm.logpdf(targets, predictions, std).mean()
    assert evaluate_regression(predictions, targets, std=std).nll == pytest.approx(expected)


def test_an_interval_holds_its_ends() -> None:
    z = stats.norm.ppf(0.75)
    assert evaluate_regression([0.0], [z], std=1.0, levels=[0.5]).coverage == {0.5: 1.0}
    assert evaluate_regression([0.0], [np.nextafter(z, 2)], std=1.0, levels=[0.5]).coverage == {0.5: 0.0}


def test_bootstrap_intervals_hold_the_truth() -> None:
    """Mean squared error E std^2, coverage as stated: of 40 data sets at least 34 (chance of fewer: 1 in 100)."""
    truth = {"mse": float(np.mean(np.square(data(0, 100_000)[2]))), "coverage 0.9": 0.9, "coverage 0.5": 0.5}
    held = dict.fromkeys(truth, 0)
    for seed in range(40):
        predictions, targets, std = data(seed, 1500)
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
    predictions, targets, std = data(3, 200)
    result = evaluate_regression(predictions, targets, std=std, resamples=100)
    assert RegressionResult.from_dict(json.loads(json.dumps(result.to_dict(), allow_nan=False))) == result
    plain = evaluate_regression([1.0, 2.0], [1.0, 1.0])
    assert RegressionResult.from_dict(json.loads(json.dumps(plain.to_dict(), allow_nan=False))) == plain
