"""Probabilities and labels in, calibration out: metrics, bins, intervals."""

from __future__ import annotations

from clipwise.calibration.bins import Bins
from clipwise.calibration.evaluator import Evaluator, evaluate
from clipwise.calibration.regression import evaluate_regression
from clipwise.calibration.values import CalibrationResult, RegressionResult

__all__ = ["Bins", "CalibrationResult", "Evaluator", "RegressionResult", "evaluate", "evaluate_regression"]
