"""From a configuration to a run's folder: read strictly (`config`), train (`algorithms`), keep (`run`), use (`model`).

One configuration is one run. What differs between algorithms is in `algorithms`; everything here uses the same public
values as a user's own loop does.
"""

from __future__ import annotations

from clipwise.training.config import Config, guarded, imported, proposal, split_target
from clipwise.training.model import Predictor, load, read_weights
from clipwise.training.run import Progress, Watch, prepare
from clipwise.training.run.train import train

__all__ = [
    "Config",
    "Predictor",
    "Progress",
    "Watch",
    "guarded",
    "imported",
    "load",
    "prepare",
    "proposal",
    "read_weights",
    "split_target",
    "train",
]
