"""Private training inside an ordinary loop.

`Private`, its statistics and `check_model` are for users. The other names are for those who release in rounds of their
own (`clipwise.federated`) or keep the files of a run.
"""

from clipwise.private.batchnorm import without_batchnorm
from clipwise.private.digests import Looked
from clipwise.private.digests import file_of as digests_file
from clipwise.private.evidence import Checked, LossFn, check_model
from clipwise.private.labels import of_plan as label_of_plan
from clipwise.private.labels import of_values as label_of_values
from clipwise.private.position import Position
from clipwise.private.release import Release
from clipwise.private.saving import Spent, check_form, restored_ledger, spent_in
from clipwise.private.saving import read as read_checkpoint
from clipwise.private.saving import save as save_checkpoint
from clipwise.private.statistics import LayerStatistics, StepStatistics
from clipwise.private.train import Private
from clipwise.private.witness import Witness

__all__ = [
    "Checked",
    "LayerStatistics",
    "Looked",
    "LossFn",
    "Position",
    "Private",
    "Release",
    "Spent",
    "StepStatistics",
    "Witness",
    "check_form",
    "check_model",
    "digests_file",
    "label_of_plan",
    "label_of_values",
    "read_checkpoint",
    "restored_ledger",
    "save_checkpoint",
    "spent_in",
    "without_batchnorm",
]
