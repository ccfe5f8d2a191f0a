"""Wine Quality, California Housing and Adult: text into tensors.

Numbers are in their usual units and not standardised, except in Adult, whose text needs a schema: its columns are
encoded, and numbers scaled, by what is publicly known of them.
"""

from __future__ import annotations

import csv
import io

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import TensorDataset

from clipwise.data.dataset import split
from clipwise.data.readers import Table
from clipwise.data.schema import Category, Number, Schema
from clipwise.errors import DataError

__all__ = ["ADULT", "ADULT_CLASSES", "HOUSING_FEATURES", "WINE_FEATURES", "adult", "housing", "wine"]

WINE_FEATURES = (
    *("fixed acidity", "volatile acidity", "citric acid", "residual sugar", "chlorides", "free sulfur dioxide"),
    *("total sulfur dioxide", "density", "pH", "sulphates", "alcohol"),
)
HOUSING_FEATURES = (
    *("MedInc", "HouseAge", "AveRooms", "AveBedrms", "Population", "AveOccup", "Latitude", "Longitude"),
)
ADULT_CLASSES = ("<=50K", ">50K")
ADULT = Schema(
    (
        Number("age", low=17, high=90),
        Number("education-num", low=1, high=16),
        Number("capital-gain", low=0, high=20_000),
        Number("capital-loss", low=0, high=4_000),
        Number("hours-per-week", low=1, high=99),
        Category(
            "workclass",
            (
                *("Private", "Self-emp-not-inc", "Self-emp-inc", "Federal-gov", "Local-gov", "State-gov"),
                *("Without-pay", "Never-worked"),
            ),
            missing=True,
        ),
        Category(
            "marital-status",
            (
                *("Married-civ-spouse", "Divorced", "Never-married", "Separated", "Widowed", "Married-spouse-absent"),
                "Married-AF-spouse",
            ),
        ),
        Category(
            "occupation",
            (
                *("Tech-support", "Craft-repair", "Other-service", "Sales", "Exec-managerial", "Prof-specialty"),
                *("Handlers-cleaners", "Machine-op-inspct", "Adm-clerical", "Farming-fishing", "Transport-moving"),
                *("Priv-house-serv", "Protective-serv", "Armed-Forces"),
            ),
            missing=True,
        ),
        Category("relationship", ("Wife", "Own-child", "Husband", "Not-in-family", "Other-relative", "Unmarried")),
        Category("race", ("White", "Asian-Pac-Islander", "Amer-Indian-Eskimo", "Other", "Black")),
        Category("sex", ("Female", "Male")),
    )
)
"""The categories are those in UCI's description; the bounds of the numbers are round ones, and no statistics."""
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


def adult(text: bytes) -> tuple[TensorDataset, TensorDataset]:
    """What a census knows of a person, encoded by `ADULT`, and whether the income is over 50,000; a fifth held out.

    The weight of the survey, the name of the education (whose number is there) and the country are left out.
    """
    rows = list(csv.DictReader(io.StringIO(text.decode())))
    table: Table = {column.name: [row[column.name] for row in rows] for column in ADULT.columns}
    y = torch.tensor([ADULT_CLASSES.index(row["income-per-year"]) for row in rows])
    return split(ADULT.encode(table, "adult.csv"), y, test=round(0.2 * len(rows)), seed=_SEED)
