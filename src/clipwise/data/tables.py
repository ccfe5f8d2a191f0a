"""Wine Quality and California Housing: text into tensors, in the usual units, not standardised."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import TensorDataset

from clipwise.data.dataset import split
from clipwise.errors import DataError

__all__ = ["HOUSING_FEATURES", "WINE_FEATURES", "housing", "wine"]

WINE_FEATURES = (
    *("fixed acidity", "volatile acidity", "citric acid", "residual sugar", "chlorides", "free sulfur dioxide"),
    *("total sulfur dioxide", "density", "pH", "sulphates", "alcohol"),
)
HOUSING_FEATURES = (
    *("MedInc", "HouseAge", "AveRooms", "AveBedrms", "Population", "AveOccup", "Latitude", "Longitude"),
)
_SEED = 0


def _numbers(text: bytes, columns: int, skip: int, delimiter: str) -> NDArray[np.float64]:
    """A table of numbers; a missing one is NaN, columns beyond the wanted ones are left out."""
    rows = np.genfromtxt(text.decode().splitlines(), delimiter=delimiter, skip_header=skip, usecols=range(columns))
    if rows.ndim != 2 or not len(rows):
        raise DataError(f"the file has no table of {columns} columns.")
    return rows


def _parts(x: NDArray[np.float64], y: NDArray[np.float64], share: float) -> tuple[TensorDataset, TensorDataset]:
    return split(torch.from_numpy(x).float(), torch.from_numpy(y).float(), test=round(share * len(x)), seed=_SEED)


def wine(text: bytes, delimiter: str) -> tuple[TensorDataset, TensorDataset]:
    """Eleven measurements of a red wine and its quality (a score, 3 to 8); 320 of the 1,599 held out."""
    rows = _numbers(text, columns=12, skip=1, delimiter=delimiter)
    return _parts(rows[:, :-1], rows[:, -1], share=0.2)


def housing(text: bytes, header: bool) -> tuple[TensorDataset, TensorDataset]:
    """Eight features of a district as in scikit-learn, and its median house value in 100,000 dollars; a tenth held out.

    Rows with a missing number are left out.
    """
    rows = _numbers(text, columns=9, skip=int(header), delimiter=",")
    rows = rows[np.isfinite(rows).all(axis=1)]
    longitude, latitude, age, rooms, bedrooms, population, households, income, value = rows.T
    averages = rooms / households, bedrooms / households, population, population / households
    x = np.stack([income, age, *averages, latitude, longitude], axis=1)
    return _parts(x, value / 1e5, share=0.1)
