"""A configuration: TOML that is read strictly into frozen values."""

from __future__ import annotations

from clipwise.training.config.config import Config, default_delta
from clipwise.training.config.datasets import Records
from clipwise.training.config.functions import guarded, imported, split_target
from clipwise.training.config.models import freeze
from clipwise.training.config.optimizers import LearningRate, OptimizerChoice, read_optimizer
from clipwise.training.config.toml import Source, Table

__all__ = [
    "Config",
    "LearningRate",
    "OptimizerChoice",
    "Records",
    "Source",
    "Table",
    "default_delta",
    "freeze",
    "guarded",
    "imported",
    "read_optimizer",
    "split_target",
]
