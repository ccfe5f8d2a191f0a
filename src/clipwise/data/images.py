"""MNIST and its kin, CIFAR-10, scikit-learn's digits: bytes into tensors."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import TensorDataset

from clipwise.data.convert import CIFAR_BATCHES, IDX_FILES, idx
from clipwise.data.dataset import split
from clipwise.errors import MissingExtra

__all__ = ["CIFAR_CLASSES", "DIGITS", "FASHION_CLASSES", "cifar", "digits", "idx_parts"]

DIGITS = tuple("0123456789")
FASHION_CLASSES = (
    *("T-shirt/top", "trouser", "pullover", "dress", "coat"),
    *("sandal", "shirt", "sneaker", "bag", "ankle boot"),
)
CIFAR_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def _tensors(images: NDArray[np.uint8], labels: NDArray[np.uint8]) -> TensorDataset:
    """Pixels as float32 in [0, 1], labels as int64."""
    pixels: Tensor = torch.from_numpy(images.astype(np.float32)).div_(255)
    return TensorDataset(pixels, torch.from_numpy(labels.astype(np.int64)))


def idx_parts(contents: Mapping[str, bytes]) -> tuple[TensorDataset, TensorDataset]:
    """Training and test part of MNIST or Fashion-MNIST, images of shape (1, 28, 28)."""
    images, labels, test_images, test_labels = (idx(contents[name], name) for name in IDX_FILES)
    return _tensors(images[:, None], labels), _tensors(test_images[:, None], test_labels)


def cifar(contents: Mapping[str, bytes]) -> tuple[TensorDataset, TensorDataset]:
    """Training and test part of CIFAR-10, images of shape (3, 32, 32): records of a label and 3072 bytes."""
    batches = [np.frombuffer(contents[name], dtype=np.uint8).reshape(-1, 3073) for name in CIFAR_BATCHES]
    train, test = np.concatenate(batches[:-1]), batches[-1]
    first, second = (_tensors(part[:, 1:].reshape(-1, 3, 32, 32), part[:, 0]) for part in (train, test))
    return first, second


def digits() -> tuple[TensorDataset, TensorDataset]:
    """scikit-learn's 8x8 digits, 500 of them held out; images of shape (1, 8, 8)."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise MissingExtra("the digits come with scikit-learn: pip install 'clipwise[demo]'.") from None
    images, labels = load_digits(return_X_y=True)
    x = torch.from_numpy(images).float().reshape(-1, 1, 8, 8) / 16
    return split(x, torch.from_numpy(labels).long(), test=500, seed=0)
