"""Data sets as tensors: `load("mnist")`. Files are looked for in `CLIPWISE_DATA`."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

from clipwise.data.dataset import DataSet
from clipwise.data.dataset import split as _split
from clipwise.data.images import idx, pixels
from clipwise.errors import DataError, MissingExtra

__all__ = ["DataSet", "load"]


def _mnist() -> DataSet:
    folder = Path(os.environ.get("CLIPWISE_DATA", ".")) / "mnist"
    parts = []
    for part in ("train", "t10k"):
        try:
            images, labels = (
                idx(gzip.decompress((folder / f"{part}-{kind}-ubyte.gz").read_bytes()))
                for kind in ("images-idx3", "labels-idx1")
            )
        except OSError as error:
            raise DataError(f"MNIST is not in {folder} ({error}). Set CLIPWISE_DATA to the folder above it.") from error
        parts.append(TensorDataset(pixels(images).unsqueeze(1), torch.from_numpy(labels.astype("int64"))))
    classes = tuple("0123456789")
    return DataSet("mnist", "classification", parts[0], parts[1], classes, source=str(folder), licence="CC BY-SA 3.0")


def _digits() -> DataSet:
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise MissingExtra("digits come with scikit-learn: pip install 'clipwise[demo]'.") from None
    images, labels = load_digits(return_X_y=True)
    x, y = torch.from_numpy(images).float().reshape(-1, 1, 8, 8) / 16, torch.from_numpy(labels).long()
    train, test = _split(x, y, test=500, seed=0)
    classes = tuple("0123456789")
    return DataSet("digits", "classification", train, test, classes, source="scikit-learn", licence="CC BY 4.0")


def load(name: str) -> DataSet:
    """A data set by name, as tensors.

    >>> load("digits").shape
    (1, 8, 8)
    """
    loaders = {"mnist": _mnist, "digits": _digits}
    if name not in loaders:
        raise DataError(f"there is no data set {name!r}; there are {', '.join(sorted(loaders))}.")
    return loaders[name]()
