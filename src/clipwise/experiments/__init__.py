"""Arms x seeds on all cores: a `Study` is planned as values, `run_all` trains what is missing, `pack` keeps it small.

The demo and the recipes of the paper run here.
"""

from clipwise.experiments.packed import CURVES, RESULTS, noise_of, packed_runs
from clipwise.experiments.runs import pack, run_all, runs_of
from clipwise.experiments.study import Arm, Study, Trial
from clipwise.experiments.workers import Show, Standing, Watch, advance, side_by_side

__all__ = [
    "CURVES",
    "RESULTS",
    "Arm",
    "Show",
    "Standing",
    "Study",
    "Trial",
    "Watch",
    "advance",
    "noise_of",
    "pack",
    "packed_runs",
    "run_all",
    "runs_of",
    "side_by_side",
]
