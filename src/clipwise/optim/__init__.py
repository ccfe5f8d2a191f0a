"""Algorithms beyond DP-SGD on the same mechanism: sampling from a posterior."""

from clipwise.optim.langevin import SGNHT, Langevin, LangevinOptimizer, printed_temperature
from clipwise.optim.posterior import AveragedCalibration, FlatPrior, GaussianPrior, LaplacePrior, Posterior, Prior

__all__ = [
    "SGNHT",
    "AveragedCalibration",
    "FlatPrior",
    "GaussianPrior",
    "Langevin",
    "LangevinOptimizer",
    "LaplacePrior",
    "Posterior",
    "Prior",
    "printed_temperature",
]
