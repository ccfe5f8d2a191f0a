"""A trained model in its run's folder: what is saved of it (`saved`), and how it is used again (`predictor`)."""

from __future__ import annotations

from clipwise.training.model.predictor import Predictor, load
from clipwise.training.model.saved import SavedModel, sha256_of
from clipwise.training.model.weights import Filled, read_weights

__all__ = ["Filled", "Predictor", "SavedModel", "load", "read_weights", "sha256_of"]
