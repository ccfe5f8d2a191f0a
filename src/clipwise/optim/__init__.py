"""Algorithms beyond DP-SGD on the same mechanism: sampling from a posterior, and clipping by estimated norms."""

from clipwise.optim.jl import ProjectedPrivate
from clipwise.optim.posterior import AveragedCalibration, Posterior
from clipwise.optim.priors import FlatPrior, GaussianPrior, LaplacePrior, Prior
from clipwise.optim.sgld import Langevin, LangevinOptimizer, printed_temperature

__all__ = [
    "AveragedCalibration",
    "FlatPrior",
    "GaussianPrior",
    "Langevin",
    "LangevinOptimizer",
    "LaplacePrior",
    "Posterior",
    "Prior",
    "ProjectedPrivate",
    "printed_temperature",
]
