"""Probabilities and labels in, calibration out: metrics with intervals, and recalibration on public or private data."""

from clipwise.calibration.bins import Bins, equal_edges, summarise
from clipwise.calibration.evaluator import Evaluator, evaluate, evaluate_regression
from clipwise.calibration.inputs import check_resamples
from clipwise.calibration.metrics import METRICS, Metric, Task, metric_named, metrics_of
from clipwise.calibration.private_scaling import PrivateTemperature, PrivateTemperatureScaling
from clipwise.calibration.scaling import (
    Isotonic,
    IsotonicScaling,
    RecalibrationMap,
    Temperature,
    TemperatureScaling,
    Vector,
    VectorScaling,
    map_of,
)
from clipwise.calibration.values import (
    CalibrationResult,
    Difference,
    Estimate,
    RegressionResult,
    Result,
    difference,
    estimates_of,
)

__all__ = [
    "METRICS",
    "Bins",
    "CalibrationResult",
    "Difference",
    "Estimate",
    "Evaluator",
    "Isotonic",
    "IsotonicScaling",
    "Metric",
    "PrivateTemperature",
    "PrivateTemperatureScaling",
    "RecalibrationMap",
    "RegressionResult",
    "Result",
    "Task",
    "Temperature",
    "TemperatureScaling",
    "Vector",
    "VectorScaling",
    "check_resamples",
    "difference",
    "equal_edges",
    "estimates_of",
    "evaluate",
    "evaluate_regression",
    "map_of",
    "metric_named",
    "metrics_of",
    "summarise",
]
