"""MNIST and its kin (IDX files), CIFAR-10 (binary batches), scikit-learn's digits: bytes into tensors."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from clipwise.errors import DataError

__all__ = ["idx", "idx_bytes", "pixels"]


def idx(data: bytes, name: str = "file") -> NDArray[np.uint8]:
    """The array in an IDX file of unsigned bytes: two zeros, 8, the number of axes, their lengths, the values.

    >>> idx(idx_bytes(np.arange(6, dtype=np.uint8).reshape(2, 3))).tolist()
    [[0, 1, 2], [3, 4, 5]]
    """
    if len(data) < 4 or data[:3] != b"\x00\x00\x08":
        raise DataError(f"{name} is not an IDX file of unsigned bytes.")
    start = 4 + 4 * data[3]
    shape = np.frombuffer(data[4:start], dtype=">u4").astype(np.int64)
    if len(shape) != data[3] or len(data) - start != int(shape.prod()):
        raise DataError(f"{name} should hold {'x'.join(map(str, shape))} bytes, but has {len(data) - start}.")
    return np.frombuffer(data, dtype=np.uint8, offset=start).reshape(shape)


def idx_bytes(array: NDArray[np.uint8]) -> bytes:
    """The IDX file of an array of unsigned bytes."""
    return bytes([0, 0, 8, array.ndim]) + np.array(array.shape, dtype=">u4").tobytes() + array.tobytes()


def pixels(array: NDArray[np.uint8]) -> Tensor:
    """Bytes as float32 in [0, 1]."""
    return torch.from_numpy(array.astype(np.float32)) / 255
