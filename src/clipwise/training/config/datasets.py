"""`[data]`: a built-in data set, a file, or the user's `module:function`; and what is done to its inputs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from clipwise import data
from clipwise.accounting import Event, Ledger, PrivateStatistics, as_earlier
from clipwise.data import DataSet, Schema, TargetBounds, TensorRecords, entry, read_table
from clipwise.errors import DataError, InvalidConfig, MissingExtra
from clipwise.training.config.functions import guarded, imported, split_target
from clipwise.training.config.starting import FEWEST_OF_A_CLASS, FEWEST_QUANTITIES
from clipwise.training.config.toml import TomlTable

__all__ = ["DataChoice", "Inputs", "read_data"]

FILES = (".csv", ".npz", ".parquet")
TEXT = ("snli",)

UNSCALED = (
    "Features are not scaled and of very different or large size, as the held-out records show; such a model learns "
    "little and is badly calibrated. Describe the columns ({source}: clipwise data schema), or give data.mean and "
    "data.std; std = 1 says that they are meant to be so."
)
UNBOUNDED = (
    "The target's numbers are large and not scaled, as the held-out records show: clipping leaves a model that never "
    "gets there. Give the range that it can have, data.target_bounds = [low, high]."
)
_LARGEST_TARGET = 10.0
MANY_CLASSES = (
    "There are {classes:,} classes for {held_out:,} held-out records, too many to learn. If the target is a quantity, "
    'say data.task = "regression".'
)
READ_OFF = "Bounds and categories of [data.columns] were read off the records, which epsilon does not cover."


@dataclass(frozen=True)
class Inputs:
    """What is done to every input by itself, with public numbers: nothing is computed from the records."""

    pool: int = 1
    """Images are averaged over squares of this many pixels a side."""
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    """Then the mean is taken off and the rest divided by std: one number, or one per column or channel."""

    def __call__(self, x: Tensor) -> Tensor:
        """The inputs (n, ...) so changed."""
        if self.pool > 1:
            if x.dim() != 4 or min(x.shape[2:]) < self.pool:
                raise InvalidConfig(f"data.pool = {self.pool} needs larger images; inputs are {tuple(x.shape[1:])}.")
            x = F.avg_pool2d(x, self.pool)
        if (self.mean, self.std) != ((0.0,), (1.0,)):
            x = (x - self._aligned("mean", x)) / self._aligned("std", x)
        return x

    def of(self, part: TensorDataset) -> TensorRecords:
        """The records with their first tensor so changed."""
        x, *others = part.tensors
        return TensorRecords(self(x), *others)

    def _aligned(self, name: str, x: Tensor) -> Tensor:
        values = getattr(self, name)
        if x.dim() < 2 or len(values) not in (1, x.shape[1]):
            raise InvalidConfig(f"data.{name} has {len(values)} numbers, the inputs have shape {tuple(x.shape[1:])}.")
        return torch.tensor(values, device="cpu").reshape(-1, *(1 for _ in x.shape[2:]))

    def __str__(self) -> str:
        done = [f"averaged over {self.pool} x {self.pool} pixels"] if self.pool > 1 else []
        if (self.mean, self.std) != ((0.0,), (1.0,)):
            done.append("scaled with constants of the configuration")
        return ", ".join(done) or "as they are"


@dataclass(frozen=True)
class DataChoice:
    """Where the records come from, and what is done to the inputs."""

    source: str
    options: Mapping[str, Any] = field(default_factory=dict)
    inputs: Inputs = Inputs()
    standardise: bool = False
    """Scale a table with the mean and deviation of its training records, which epsilon does not cover."""
    columns_public: bool = True
    """Whether the numbers of `[data.columns]` are publicly known; if not, the report says so."""
    columns_ledger: str | None = None
    """The ledger of what `[data.columns]` cost: a run's epsilon includes it."""
    is_scaled: bool = False
    """Whether the configuration says how inputs are scaled, or with std = 1 that they are."""
    target_bounds: TargetBounds | None = None
    """Of a regression: the public range of its target, which is learnt from -1 to 1."""

    @property
    def origin(self) -> str:
        """Where the records come from, in one text: the same for two choices that read the same source.

        What is done to the records does not count. Of a function its options do: they may choose the records.
        """
        target = split_target(self.source)
        if target is not None:
            module = str(Path(target[0]).resolve()) if target[0].endswith(".py") else target[0]
            return f"{module}:{target[1]} {json.dumps(self.options, sort_keys=True, default=str)}"
        if Path(self.source).suffix.lower() in FILES:
            return str(Path(self.source).resolve())
        return entry(self.source, "data").name

    @property
    def is_cut_from_one_file(self) -> bool:
        """Whether the held-out records are a part of the file with the training records: it shows their number."""
        path = Path(self.source)
        if split_target(self.source) is not None or path.suffix.lower() not in FILES or "test_file" in self.options:
            return False
        return path.suffix.lower() != ".npz" or "x_train" not in read_table(path, ",")

    def load(self) -> DataSet:
        """The data set, made ready."""
        found = self._find().standardised() if self.standardise else self._find()
        if self.target_bounds is not None and found.task != "regression":
            raise InvalidConfig(f"data.target_bounds are for a regression, and {found.name} has classes: omit them.")
        notes = [found.note, self._read_off(), self._unscaled(found), self._unbounded(found), _many_classes(found)]
        found = replace(found, note=" ".join(filter(None, notes)), target_bounds=self.target_bounds)
        return replace(found, train=self.inputs.of(found.train), test=self.inputs.of(found.test))

    def _read_off(self) -> str:
        """What to say of a schema that is not public, and of what stands with it."""
        if self.columns_public:
            return ""
        bounds = "" if self.target_bounds is None else " So were data.target_bounds."
        return READ_OFF + bounds + (" So were data.classes." if "classes" in self.options else "")

    def _unscaled(self, found: DataSet) -> str:
        """What to say of a table with features far from the order of 1.

        It is judged by the held-out records alone, whose metrics are shown without noise as well.
        """
        if self.is_scaled or found.schema is not None or not found.features:
            return ""
        spread, mean = torch.std_mean(found.test.tensors[0].double(), dim=0, correction=0)
        varied = spread[spread > 0]
        if not len(varied) or (bool((mean.abs() + spread).max() <= 10) and bool(varied.max() <= 100 * varied.min())):
            return ""
        return UNSCALED.format(source=self.source)

    def _unbounded(self, found: DataSet) -> str:
        """What to say of a target far from the order of 1, judged by the held-out records as well."""
        if self.target_bounds is not None or found.task != "regression":
            return ""
        spread, mean = torch.std_mean(found.test.tensors[-1].double(), correction=0)
        return "" if float(mean.abs() + spread) <= _LARGEST_TARGET else UNBOUNDED

    def charged(self) -> tuple[Event, ...]:
        """What was released of the records before the run, to be accounted for with it."""
        if self.columns_ledger is None:
            return ()
        events = Ledger.load(self.columns_ledger).events
        if not any(isinstance(event, PrivateStatistics) for event in events):
            raise InvalidConfig(
                f"data.columns_ledger: {self.columns_ledger} has no statistics, so nobody paid there for bounds and "
                "categories. Name the ledger that `clipwise data schema --epsilon` charged; if they are publicly "
                "known, omit columns_ledger."
            )
        if any(event.sampling is not None and event.sampling.keeps_order for event in events):
            raise InvalidConfig(
                f"data.columns_ledger: {self.columns_ledger} also has batches cut from an order of the records, and "
                "two sequences of epochs have no joint epsilon on one ledger. Use a ledger of its own for the schema."
            )
        return tuple(event if isinstance(event, PrivateStatistics) else as_earlier(event) for event in events)

    def _find(self) -> DataSet:
        target = split_target(self.source)
        if target is not None:
            return _from_function(*target, self.options)
        if Path(self.source).suffix.lower() in FILES:
            return data.from_file(self.source, **self.options)
        if entry(self.source, "data").name in TEXT:
            return _text(self.source, **self.options)
        return data.load(self.source)


def _text(name: str, tokenizer: str, max_length: int, records: int | None, test_records: int | None) -> DataSet:
    """Pairs of sentences as the tokens of a tokenizer in a local folder."""
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise MissingExtra(f"{tokenizer} is loaded with transformers: pip install 'clipwise[hf]'.") from None
    made = guarded(
        f"loading {tokenizer}", lambda: AutoTokenizer.from_pretrained(tokenizer, local_files_only=True, use_fast=True)
    )
    text = data.load_text(name)
    if records is not None or test_records is not None:
        text = text.subset(records or len(text.train), test_records or len(text.test))
    return text.tokenised(made, max_length)


def _from_function(module: str, function: str, options: Mapping[str, Any]) -> DataSet:
    """A `DataSet`, or what is needed to make one: (x_train, y_train, x_test, y_test)."""
    make = imported(module, function)
    made = guarded(f"{function}()", lambda: make(**options), reads=True)
    if isinstance(made, DataSet):
        return made
    if not isinstance(made, tuple) or len(made) != 4:
        raise DataError(
            f"{function}() must return a clipwise.data.DataSet or (x_train, y_train, x_test, y_test), got "
            f"{type(made).__name__}{f' of length {len(made)}' if isinstance(made, tuple) else ''}."
        )
    parts = guarded(f"the result of {function}()", lambda: [torch.as_tensor(each) for each in made], reads=True)
    x, y, x_test, y_test = parts
    whole = not (y.is_floating_point() or y_test.is_floating_point())
    targets = torch.cat([y, y_test])
    if whole and int(targets.min()) < 0:
        raise DataError(f"{function}() returned negative class numbers; use floats for regression.")
    classes = tuple(map(str, range(int(targets.max()) + 1))) if whole else ()
    kind = torch.int64 if whole else torch.float32
    return DataSet(
        name=f"{module}:{function}",
        task="classification" if whole else "regression",
        train=TensorDataset(_single(x), y.to(kind)),
        test=TensorDataset(_single(x_test), y_test.to(kind)),
        classes=classes,
        source=module,
        note="How many classes there are was read off the records, which epsilon does not cover." if whole else "",
    )


def _single(x: Tensor) -> Tensor:
    return x.float() if x.dtype == torch.float64 else x


def read_data(table: TomlTable) -> DataChoice:
    r"""The data that a table describes; a file takes the options of `clipwise.data.from_file`.

    >>> from clipwise.training.config.toml import TomlText
    >>> read_data(TomlText.parse('source = "mnist"\npool = 2').root()).inputs.pool
    2
    """
    source = table.text("source")
    std = table.numbers("std", (1.0,))
    if not all(value > 0 for value in std):
        table.fail("std", "must be over 0.")
    inputs = Inputs(table.integer("pool", 1), table.numbers("mean", (0.0,)), std)
    standardise = table.flag("standardise", False)
    if standardise and inputs != Inputs():
        table.fail("standardise", "goes with neither mean and std nor pool.")
    target_bounds = _target_bounds(table)
    options: dict[str, Any] = {}
    columns_public, columns_ledger = True, None
    if split_target(source) is not None:
        options = table.table("options").rest()
    elif Path(source).suffix.lower() in FILES:
        options = _of_a_file(table)
        columns_public, columns_ledger = table.flag("columns_public", True), table.text("columns_ledger", None)
        for name in ("columns_public", "columns_ledger"):
            if name in table and "schema" not in options:
                table.fail(name, "goes with [data.columns].")
        if "schema" in options and (standardise or inputs != Inputs()):
            table.fail("columns", "scales the inputs itself: it goes with neither standardise, mean and std nor pool.")
    else:
        options = _built_in(table, source)
    table.close()
    is_scaled = standardise or "mean" in table or "std" in table
    return DataChoice(source, options, inputs, standardise, columns_public, columns_ledger, is_scaled, target_bounds)


def _target_bounds(table: TomlTable) -> TargetBounds | None:
    if table.raw("target_bounds") is None:
        return None
    bounds = table.numbers("target_bounds", ())
    if len(bounds) != 2:
        table.fail("target_bounds", f"expected two numbers, [low, high], got {len(bounds)}.")
    try:
        return TargetBounds(*bounds)
    except DataError as error:
        table.fail("target_bounds", str(error))


def _many_classes(found: DataSet) -> str:
    """What to say of a target that is hardly one of classes, judged by the held-out records as above."""
    classes, held_out = len(found.classes), len(found.test)
    if classes < FEWEST_QUANTITIES or classes <= held_out // FEWEST_OF_A_CLASS:
        return ""
    return MANY_CLASSES.format(classes=classes, held_out=held_out)


def _of_a_file(table: TomlTable) -> dict[str, Any]:
    """The options of `clipwise.data.from_file` that are given."""
    options = {
        "target": table.text("target", None),
        "task": table.text("task", None, ("classification", "regression")),
        "features": table.texts("features", None),
        "schema": _schema(table),
        "classes": table.labels("classes"),
        "test": table.raw("test"),
        "test_file": table.text("test_file", None),
        "seed": table.integer("seed", None, least=0),
        "delimiter": table.raw("delimiter"),
    }
    test, delimiter = options["test"], options["delimiter"]
    if test is not None and not ((type(test) is int and test > 0) or (type(test) is float and 0 < test < 1)):
        table.fail("test", f"expected a share below 1, or a number of records, got {test!r}.")
    if delimiter is not None and not (isinstance(delimiter, str) and len(delimiter) == 1 and delimiter not in '"\r\n'):
        table.fail("delimiter", f"expected a single character, got {delimiter!r}.")
    return {name: value for name, value in options.items() if value is not None}


def _schema(table: TomlTable) -> Schema | None:
    """`[data.columns]`, a table for each column; None without it."""
    if "columns" not in table:
        return None
    if "features" in table:
        table.fail("features", "goes with no [data.columns], which names the columns that are used.")
    columns = table.table("columns")
    try:
        return Schema.of(columns.rest())
    except DataError as error:
        columns.fail(None, str(error))


def _built_in(table: TomlTable, source: str) -> dict[str, Any]:
    try:
        name = entry(source, "data").name
    except DataError as error:
        table.fail("source", f"is neither a file ({', '.join(FILES)}) nor module:function, and {error}")
    if name not in TEXT:
        return {}
    return {
        "tokenizer": table.text("tokenizer"),
        "max_length": table.integer("max_length", 128),
        "records": table.integer("records", None),
        "test_records": table.integer("test_records", None),
    }
