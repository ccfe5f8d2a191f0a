"""Estimators on a model whose true calibration error is known."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from clipwise.calibration import CalibrationResult, evaluate
from tests.calibration.reference import Known

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
