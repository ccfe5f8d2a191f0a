"""A configuration: TOML that is read strictly into frozen values."""

from __future__ import annotations

from clipwise.training.config.config import Config
from clipwise.training.config.datasets import Inputs, proposal
from clipwise.training.config.functions import guarded, imported, split_target
from clipwise.training.config.models import Architecture, FromFunction, freeze, saved_architecture
from clipwise.training.config.optimizers import LearningRate, OptimizerChoice, read_optimizer
from clipwise.training.config.toml import TomlTable, TomlText

__all__ = [
    "Architecture",
    "Config",
    "FromFunction",
    "Inputs",
    "LearningRate",
    "OptimizerChoice",
    "TomlTable",
    "TomlText",
    "freeze",
    "guarded",
    "imported",
    "proposal",
    "read_optimizer",
    "saved_architecture",
    "split_target",
]
