"""Private training inside an ordinary loop."""

from clipwise.private.statistics import StepStatistics
from clipwise.private.train import Private

__all__ = ["Private", "StepStatistics"]
