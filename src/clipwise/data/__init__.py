"""Data sets as tensors, and public weights: `load("mnist")`, `from_file("mine.csv", target="label")`.

Every file is checked against a known SHA-256 before it is used.
"""

from clipwise.data.dataset import DataSet
from clipwise.data.loaders import load, load_text
from clipwise.data.own import from_file
from clipwise.data.text import Pairs, TextDataSet, trim
from clipwise.data.weights import Weights, efficientnet_lite0, load_weights

__all__ = [
    "DataSet",
    "Pairs",
    "TextDataSet",
    "Weights",
    "efficientnet_lite0",
    "from_file",
    "load",
    "load_text",
    "load_weights",
    "trim",
]
