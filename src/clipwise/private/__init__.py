"""Private training inside an ordinary loop."""

from clipwise.private.statistics import LayerStatistics, StepStatistics
from clipwise.private.train import Private

__all__ = ["LayerStatistics", "Private", "StepStatistics"]
