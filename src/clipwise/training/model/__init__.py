"""A trained model in its run's folder: what is saved of it (`saved`), and how it is used again (`predictor`)."""

from __future__ import annotations

from clipwise.training.model.predictor import Predictor, load
from clipwise.training.model.saved import SavedModel
from clipwise.training.model.weights import read_weights

__all__ = ["Predictor", "SavedModel", "load", "read_weights"]
