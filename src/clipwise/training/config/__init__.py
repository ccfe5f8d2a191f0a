"""A configuration: TOML that is read strictly into frozen values."""

from __future__ import annotations

from clipwise.training.config.config import Config
from clipwise.training.config.datasets import DataChoice, Inputs, read_data
from clipwise.training.config.functions import guarded, imported, split_target
from clipwise.training.config.models import Architecture, FromFunction, WeightsChoice, freeze, saved_architecture
from clipwise.training.config.starting import proposal
from clipwise.training.config.steps import LearningRate, OptimizerChoice, read_correlation, read_optimizer
from clipwise.training.config.toml import TomlTable, TomlText

__all__ = [
    "Architecture",
    "Config",
    "DataChoice",
    "FromFunction",
    "Inputs",
    "LearningRate",
    "OptimizerChoice",
    "TomlTable",
    "TomlText",
    "WeightsChoice",
    "freeze",
    "guarded",
    "imported",
    "proposal",
    "read_correlation",
    "read_data",
    "read_optimizer",
    "saved_architecture",
    "split_target",
]
