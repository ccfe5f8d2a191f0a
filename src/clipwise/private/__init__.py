"""Private training inside an ordinary loop.

For users: `Private`, `check_model` and what they answer with. The other names are what the federated server and
configured runs build on.
"""

from clipwise.private.digests import Looked, file_of
from clipwise.private.evidence import Checked, LossFn, check_model
from clipwise.private.labels import of_plan, of_values
from clipwise.private.position import Position
from clipwise.private.release import Release
from clipwise.private.saving import check_form, read_saved, restored_ledger, save_run
from clipwise.private.statistics import LayerStatistics, StepStatistics
from clipwise.private.train import Private

__all__ = [
    "Checked",
    "LayerStatistics",
    "Looked",
    "LossFn",
    "Position",
    "Private",
    "Release",
    "StepStatistics",
    "check_form",
    "check_model",
    "file_of",
    "of_plan",
    "of_values",
    "read_saved",
    "restored_ledger",
    "save_run",
]
