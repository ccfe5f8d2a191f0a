"""Data sets as tensors, and public weights: `load("mnist")`, `from_file("mine.csv", target="label")`.

Every file is checked against a known SHA-256 before it is used. The names below are loaded when they are first used, so
that looking into the cache folder does not cost an import of torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from clipwise.data.catalog import CATALOG, Entry, entry
    from clipwise.data.dataset import DataSet, TargetBounds, TensorRecords
    from clipwise.data.loaders import Weights, efficientnet_lite0, load, load_text, load_weights
    from clipwise.data.own import class_names, from_file, inputs_of
    from clipwise.data.predictions import Predictions, read_predictions
    from clipwise.data.private_statistics import PrivateMoments, PrivateSchema
    from clipwise.data.readers import Table, no_column, read_parts, read_table
    from clipwise.data.schema import Category, Kind, Number, Schema, proposed
    from clipwise.data.store import find, folders, obtain, problems
    from clipwise.data.text import Pairs, TextDataSet, trim

__all__ = [
    "CATALOG",
    "Category",
    "DataSet",
    "Entry",
    "Kind",
    "Number",
    "Pairs",
    "Predictions",
    "PrivateMoments",
    "PrivateSchema",
    "Schema",
    "Table",
    "TargetBounds",
    "TensorRecords",
    "TextDataSet",
    "Weights",
    "class_names",
    "efficientnet_lite0",
    "entry",
    "find",
    "folders",
    "from_file",
    "inputs_of",
    "load",
    "load_text",
    "load_weights",
    "no_column",
    "obtain",
    "problems",
    "proposed",
    "read_parts",
    "read_predictions",
    "read_table",
    "trim",
]

_HOME = {
    "catalog": ("CATALOG", "Entry", "entry"),
    "dataset": ("DataSet", "TargetBounds", "TensorRecords"),
    "loaders": ("Weights", "efficientnet_lite0", "load", "load_text", "load_weights"),
    "own": ("class_names", "from_file", "inputs_of"),
    "predictions": ("Predictions", "read_predictions"),
    "private_statistics": ("PrivateMoments", "PrivateSchema"),
    "readers": ("Table", "no_column", "read_parts", "read_table"),
    "schema": ("Category", "Kind", "Number", "Schema", "proposed"),
    "store": ("find", "folders", "obtain", "problems"),
    "text": ("Pairs", "TextDataSet", "trim"),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}


def __getattr__(name: str) -> Any:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module 'clipwise.data' has no attribute {name!r}")
    return getattr(import_module(f"clipwise.data.{module}"), name)
