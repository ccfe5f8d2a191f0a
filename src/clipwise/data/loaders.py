"""`load`, `load_text` and `load_weights`: a name becomes a data set, or public weights; and bytes become tensors.

Pixels are in [0, 1]. The numbers of Wine Quality and California Housing are in their usual units, not standardised;
other tables are in `described`. Public weights are those of transformers, of EfficientNet-Lite0, or a folder of the
user's own.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from clipwise.data import text
from clipwise.data.catalog import CATALOG, entry
from clipwise.data.convert import CIFAR_BATCHES, IDX_FILES, SNLI_ZIP, idx
from clipwise.data.dataset import DataSet, split
from clipwise.data.described import DESCRIBED
from clipwise.data.store import Found, obtain
from clipwise.data.text import TextDataSet
from clipwise.errors import DataError, MissingExtra
from clipwise.progress import Console

__all__ = [
    "CIFAR_CLASSES",
    "DIGITS",
    "FASHION_CLASSES",
    "HOUSING_FEATURES",
    "WINE_FEATURES",
    "Weights",
    "cifar",
    "digits",
    "efficientnet_lite0",
    "housing",
    "idx_parts",
    "load",
    "load_text",
    "load_weights",
    "wine",
]

TEXTS = {"imdb": text.IMDB_CLASSES, "snli": text.SNLI_CLASSES}
"""What is text, with its classes."""


def load(name: str, console: Console | None = None) -> DataSet:
    """A data set by name.

    There are digits, mnist, fashion_mnist, cifar10, wine_quality_red, california_housing, adult, german, compas and
    credit_card_fraud. Files are taken from the cache folder, else from the usual public address, else from a package,
    and are always checked; `console` receives what is fetched (default: standard error). Images are float32 in [0, 1];
    tables are in their own units, except the last four, which a public schema encodes. The test part is the official
    one, or else the same random choice every time.

    >>> data = load("digits")
    >>> data.shape, data.outputs, len(data.train), len(data.test)
    ((1, 8, 8), 10, 1297, 500)
    """
    wanted = entry(name, "data")
    if wanted.name in TEXTS:
        raise DataError(f"{wanted.name} is text: load_text('{wanted.name}').tokenised(tokenizer) makes tensors of it.")
    if wanted.name == "digits":
        train, test = digits()
        return DataSet("digits", "classification", train, test, DIGITS, (), "scikit-learn", wanted.licence)
    return _read(obtain(wanted, console))


def _read(found: Found) -> DataSet:
    name = found.entry.name
    classes: tuple[str, ...] = ()
    features: tuple[str, ...] = ()
    schema = None
    if name in ("mnist", "fashion_mnist"):
        train, test = idx_parts({file: found.read(file) for file in IDX_FILES})
        classes = DIGITS if name == "mnist" else FASHION_CLASSES
    elif name == "cifar10":
        train, test = cifar({file: found.read(file) for file in CIFAR_BATCHES})
        classes = CIFAR_CLASSES
    elif name in DESCRIBED:
        train, test = DESCRIBED[name].parts(found.read(DESCRIBED[name].file))
        classes, schema = DESCRIBED[name].classes, DESCRIBED[name].schema
        features = schema.features
    elif name == "wine_quality_red":
        (file,) = found.paths
        train, test = wine(found.read(file), ";" if file == "winequality-red.csv" else ",")
        features = WINE_FEATURES
    else:
        (file,) = found.paths
        train, test = housing(found.read(file), header=file == "housing.csv")
        features = HOUSING_FEATURES
    return DataSet(
        name=name,
        task="classification" if classes else "regression",
        train=train,
        test=test,
        classes=classes,
        features=features,
        source=found.source,
        licence=found.entry.licence,
        note=found.note,
        schema=schema,
    )


def load_text(name: str, console: Console | None = None) -> TextDataSet:
    """A data set of sentence pairs or texts by name: snli, imdb.

    The full SNLI comes from its usual address only; a package has 100,000 of the training pairs. The note says which
    was read.
    """
    wanted = entry(name, "data")
    if wanted.name not in TEXTS:
        raise DataError(f"{wanted.name} is not text: load({wanted.name!r}) reads it.")
    found = obtain(wanted, console)
    if wanted.name == "imdb":
        train, test = text.imdb(found.read(found.form.files[0].name))
    elif SNLI_ZIP in found.paths:
        train, test = text.snli_from_zip(found.read(SNLI_ZIP))
    else:
        train, test = text.snli(*(found.read(file.name) for file in found.form.files))
    return TextDataSet(wanted.name, train, test, TEXTS[wanted.name], found.source, found.entry.licence, found.note)


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


EFFICIENTNET_FILE = "efficientnet-lite0-57934424.pth"


@dataclass(frozen=True)
class Weights:
    """A folder with weights, and what a report has to say about them.

    For transformers: `AutoModel.from_pretrained(weights.folder)`, and the tokenizer likewise.
    """

    name: str
    folder: Path
    source: str = ""
    licence: str = ""
    note: str = ""


def load_weights(name: str | os.PathLike[str], console: Console | None = None) -> Weights:
    """Weights by name (minilm, efficientnet_lite0, distilbert, smollm2, bert_base, vit_base), or those in a folder.

    Those with a name are taken from the cache folder, else from the model hub, else from a package, and are always
    checked. A folder is taken as it is.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> _ = (folder / "config.json").write_text("{}"), (folder / "model.safetensors").write_bytes(b"")
    >>> load_weights(folder).source
    'a local folder'
    """
    folder = Path(name)
    if str(name) not in CATALOG and os.path.isdir(folder):
        return _local(folder)
    wanted = entry(str(name), "weights")
    found = obtain(wanted, console)
    packed = [path.name for path in found.paths.values() if path.suffix == ".gz"]
    if packed:
        raise DataError(f"{', '.join(packed)} in {found.folder} cannot be read by model libraries; unpack with gunzip.")
    return Weights(wanted.name, found.folder, found.source, wanted.licence, found.note)


def _local(folder: Path) -> Weights:
    if not (folder / "config.json").is_file():
        raise DataError(f"{folder} has no config.json; a folder written by save_pretrained() was expected.")
    if not [*folder.glob("*.safetensors")]:
        raise DataError(f"{folder} has no *.safetensors; save_pretrained() writes them (pickled weights are not read).")
    return Weights(folder.resolve().name, folder, "a local folder", note="Weights of the user's own; not checked.")


def efficientnet_lite0(console: Console | None = None) -> nn.Module:
    """EfficientNet-Lite0 with its ImageNet weights (4.65 million, 1,000 classes), in evaluation mode.

    Keep it there: in training mode its batch norms would mix samples, and `Private` refuses them. It was trained on
    images scaled as `(255 * x - 127) / 128` for x in [0, 1], and not by ImageNet's mean and deviation: give it those.
    `model.extract_features(x)` has shape (B, 1280, h/32, w/32).
    """
    try:
        from efficientnet_lite_pytorch import EfficientNet
    except ImportError:
        raise MissingExtra("EfficientNet-Lite0 needs its network: pip install 'clipwise[vision]'.") from None
    weights = load_weights("efficientnet_lite0", console)
    model = cast(nn.Module, EfficientNet.from_name("efficientnet-lite0"))
    # The file is in torch's old format; weights_only reads tensors and nothing that could run.
    model.load_state_dict(torch.load(weights.folder / EFFICIENTNET_FILE, map_location="cpu", weights_only=True))
    return model.eval()
