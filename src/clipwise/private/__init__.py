"""Private training inside an ordinary loop."""

from clipwise.private.digests import Looked
from clipwise.private.evidence import Checked, LossFn, check_model
from clipwise.private.statistics import LayerStatistics, StepStatistics
from clipwise.private.train import Private

__all__ = ["Checked", "LayerStatistics", "Looked", "LossFn", "Private", "StepStatistics", "check_model"]
