"""Figures. Each is drawn from values that are also saved; nothing is computed here."""

from clipwise.plots.calibration import confidence_histogram, coverage_diagram, reliability_diagram, true_class_histogram
from clipwise.plots.theory import correlated_noise, loss_flows, ntk_monitor, privacy_curves, spectra
from clipwise.plots.training import Curve, Point, accuracy_calibration, heat_map, training_curves

__all__ = [
    "Curve",
    "Point",
    "accuracy_calibration",
    "confidence_histogram",
    "correlated_noise",
    "coverage_diagram",
    "heat_map",
    "loss_flows",
    "ntk_monitor",
    "privacy_curves",
    "reliability_diagram",
    "spectra",
    "training_curves",
    "true_class_histogram",
]
