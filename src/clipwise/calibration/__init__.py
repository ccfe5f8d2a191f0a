"""Probabilities and labels in, calibration out: metrics with intervals, and recalibration.

`PrivateTemperatureScaling` lives in `clipwise.recalibration`, above the accounting that it charges; its name is here
for those who look for it beside the others, and is looked up when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from clipwise.calibration.bins import Bins
from clipwise.calibration.evaluator import Evaluator, evaluate
from clipwise.calibration.metrics import METRICS, Metric, Task, metric_named, metrics_of
from clipwise.calibration.regression import evaluate_regression
from clipwise.calibration.scaling import (
    Isotonic,
    IsotonicScaling,
    Temperature,
    TemperatureScaling,
    Vector,
    VectorScaling,
)
from clipwise.calibration.values import CalibrationResult, RegressionResult, Result

__all__ = [
    "METRICS",
    "Bins",
    "CalibrationResult",
    "Evaluator",
    "Isotonic",
    "IsotonicScaling",
    "Metric",
    "PrivateTemperature",
    "PrivateTemperatureScaling",
    "RegressionResult",
    "Result",
    "Task",
    "Temperature",
    "TemperatureScaling",
    "Vector",
    "VectorScaling",
    "evaluate",
    "evaluate_regression",
    "metric_named",
    "metrics_of",
]

_PRIVATE = ("PrivateTemperature", "PrivateTemperatureScaling")


def __getattr__(name: str) -> Any:
    if name not in _PRIVATE:
        raise AttributeError(f"module 'clipwise.calibration' has no attribute {name!r}")
    return getattr(import_module("clipwise.recalibration"), name)
