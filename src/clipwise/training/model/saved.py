"""`model.json`: everything that the weights of a run need to be used, beside the weights.

```
format, version, clipwise     "clipwise model", 1, and the version that wrote it
name, task, classes           of the data; classes are empty for a regression
features, schema              names of a table's columns, and how they were encoded (null: as they are)
shapes, kinds                 shape and type of each tensor that an input consists of
inputs                        what is done to an input first: means and deviations that were subtracted and divided by
architecture                  a built-in network with its sizes, a configuration of transformers, or module:function
recalibration                 the method in force and its fitted numbers, or null
target_bounds                 only of a regression that has them: the network's -1 and 1 in the target's own unit
note                          what anyone who uses the model has to know
weights, ledger               SHA-256 of model.safetensors and of ledger.json as they were written with it
checksum                      of all that
```
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

import clipwise
from clipwise._json import RESTORE, Fields, checksum, parse_json, read_json
from clipwise._validate import is_count, is_finite
from clipwise.accounting import Ledger
from clipwise.calibration import RecalibrationMap, Task, map_of
from clipwise.data import DataSet, Schema, TargetBounds
from clipwise.errors import DataError
from clipwise.files import content_sha256, open_ordinary
from clipwise.report import RunFolder, plain, write_text
from clipwise.training.config import Architecture, Inputs, saved_architecture
from clipwise.training.model.weights import write_weights

__all__ = ["SavedModel", "sha256_of"]

FORMAT, VERSION = "clipwise model", 1
_KINDS = {
    str(kind).removeprefix("torch."): kind
    for kind in (torch.float32, torch.float64, torch.uint8, torch.int32, torch.int64, torch.bool)
}
"""The types of tensors that an input may consist of."""
_FIELDS = (
    *("format", "version", "clipwise", "name", "task", "classes", "features", "schema", "shapes", "kinds"),
    *("inputs", "architecture", "recalibration", "note", "weights", "ledger", "checksum"),
)
_OPTIONAL = {"target_bounds"}
"""Fields of models that need them: others are read by a version that does not know of these."""
_SHA256 = 64


@dataclass(frozen=True, eq=False)
class SavedModel:
    """How the weights of a run are used: what goes in, the network, what comes out.

    Guarantees: reading one runs no code that the file names, unless it is trusted, and unpickles nothing. A file that
    was edited, cut or damaged, and weights that are not those it was saved with, are refused.
    """

    name: str
    """Of the data."""
    task: Task
    architecture: Architecture
    shapes: tuple[tuple[int, ...], ...]
    """Of the tensors that one input consists of, as the network gets them."""
    kinds: tuple[torch.dtype, ...]
    classes: tuple[str, ...] = ()
    features: tuple[str, ...] = ()
    schema: Schema | None = None
    inputs: tuple[Inputs, ...] = ()
    """What is done to the first tensor, one after the other."""
    recalibration: tuple[str, RecalibrationMap] | None = None
    """The method in force, and its map."""
    target_bounds: TargetBounds | None = None
    """What -1 and 1 of the network mean; None: its outputs are in the target's own unit."""
    note: str = ""
    weights: str = ""
    """SHA-256 of the file with the weights."""
    ledger: str | None = None
    """SHA-256 of the ledger; None where the run is not private."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the first tensor of an input."""
        return self.shapes[0]

    @property
    def outputs(self) -> int:
        """How many numbers the network returns for an input."""
        return len(self.classes) or 1

    @classmethod
    def of(cls, data: DataSet, architecture: Architecture, inputs: Inputs) -> SavedModel:
        """For a network that is trained on these records, of which `inputs` was the last thing done to them."""
        tensors = data.train.tensors[:-1]
        done = [*(Inputs(mean=mean, std=std) for mean, std in data.scaled), inputs]
        return cls(
            name=data.name,
            task=data.task,
            architecture=architecture,
            shapes=tuple(tuple(tensor.shape[1:]) for tensor in tensors),
            kinds=tuple(tensor.dtype for tensor in tensors),
            classes=data.classes,
            features=data.features,
            schema=data.schema,
            inputs=tuple(each for each in done if each != Inputs()),
            target_bounds=data.target_bounds,
            note=data.note,
        )

    def to_dict(self, model: nn.Module) -> dict[str, Any]:
        """What model.json holds, for this network."""
        body: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "clipwise": clipwise.__version__,
            "name": self.name,
            "task": self.task,
            "classes": self.classes,
            "features": self.features,
            "schema": None if self.schema is None else list(self.schema.to_dict().items()),
            "shapes": self.shapes,
            "kinds": [str(kind).removeprefix("torch.") for kind in self.kinds],
            "inputs": [{"pool": each.pool, "mean": each.mean, "std": each.std} for each in self.inputs],
            "architecture": self.architecture.to_dict(model),
            "recalibration": None,
            "note": self.note,
            "weights": self.weights,
            "ledger": self.ledger,
        }
        if self.recalibration is not None:
            method, fitted = self.recalibration
            body["recalibration"] = {"method": method, "map": fitted.to_dict()}
        if self.target_bounds is not None:
            body["target_bounds"] = {"low": self.target_bounds.low, "high": self.target_bounds.high}
        body = cast(dict[str, Any], plain(body))
        return {**body, "checksum": checksum(body)}

    def check(self, model: nn.Module) -> None:
        """Refuse now what could not be saved when the network is trained."""
        sha = "0" * _SHA256
        text = json.dumps({**self.to_dict(model), "weights": sha, "ledger": None}, allow_nan=False)
        record = parse_json(text, "the model to be saved")
        self.from_dict({**record, "checksum": checksum(record)}, "the model to be saved", trust_code=True)

    def save(self, folder: RunFolder, model: nn.Module, ledger: Ledger | None) -> None:
        """Write the weights, then model.json; `ledger` is what the run's ledger.json is made from."""
        write_weights(model, folder.model)
        sha = None if ledger is None else hashlib.sha256(ledger.to_json().encode()).hexdigest()
        made = replace(self, weights=sha256_of(folder.model), ledger=sha)
        write_text(folder.description, json.dumps(made.to_dict(model), indent=1, allow_nan=False) + "\n")

    @classmethod
    def read(cls, folder: RunFolder, *, trust_code: bool = False) -> SavedModel:
        """What `save` wrote into a run's folder, beside the weights that belong to it."""
        if not folder.description.exists():
            folder.refuse_interrupted("model")
            raise DataError(
                f"{folder.path} has no {folder.description.name}: it is not the folder of a finished run of clipwise "
                "train, or of a version that did not write one. Train it again."
            )
        made = cls.from_dict(read_json(folder.description), os.fspath(folder.description), trust_code=trust_code)
        if sha256_of(folder.model) != made.weights:
            raise DataError(
                f"{folder.model} does not hold the weights that {folder.description.name} was written with. Copy both "
                "again from the run."
            )
        return made

    @classmethod
    def from_dict(cls, record: Mapping[str, Any], where: str, *, trust_code: bool) -> SavedModel:
        """What `to_dict` made; `where` it stands begins every message."""
        fields = _opened(record, where)
        task, classes, features = fields.text("task"), fields.texts("classes"), fields.texts("features")
        if task not in ("classification", "regression") or (task == "classification") != bool(classes):
            fields.fail("task", "'classification' with classes, or 'regression' without")
        shapes = fields.many("shapes", _is_shape, "lists of positive integers")
        kinds = fields.many("kinds", lambda kind: isinstance(kind, str) and kind in _KINDS, f"{', '.join(_KINDS)}")
        if not shapes or len(kinds) != len(shapes):
            fields.fail("kinds", "as many as there are shapes, and one at least")
        if features and tuple(map(tuple, shapes)) != ((len(features),),):
            fields.fail("features", "one name for each number of an input")
        return cls(
            name=fields.text("name"),
            task=cast(Task, task),
            architecture=saved_architecture(fields.object("architecture"), trust_code=trust_code),
            shapes=tuple(map(tuple, shapes)),
            kinds=tuple(_KINDS[kind] for kind in kinds),
            classes=classes,
            features=features,
            schema=None if fields.is_null("schema") else _schema(fields),
            inputs=tuple(_inputs(each, where) for each in fields.many("inputs", lambda _: True, "objects")),
            recalibration=None if fields.is_null("recalibration") else _recalibration(fields.object("recalibration")),
            target_bounds=_target_bounds(fields),
            note=fields.text("note"),
            weights=fields.text("weights"),
            ledger=None if fields.is_null("ledger") else fields.text("ledger"),
        )


def _opened(record: Mapping[str, Any], where: str) -> Fields:
    """The fields of a model.json that this version reads, and that nobody edited."""
    if not isinstance(record, Mapping) or record.get("format") != FORMAT:
        raise DataError(f"{where} does not describe a model of clipwise. {RESTORE}")
    if record.get("version") != VERSION:
        raise DataError(f"{where} has version {record.get('version')!r}, this clipwise reads {VERSION}.")
    fields = Fields(record, where, {*_FIELDS, *(_OPTIONAL & record.keys())})
    if record["checksum"] != checksum(record):
        raise DataError(f"{where} does not fit its checksum. {RESTORE}")
    return fields


def _schema(fields: Fields) -> Schema:
    """A list of columns, since their order counts."""
    pairs = fields.many("schema", lambda each: isinstance(each, list) and len(each) == 2, "pairs of name and column")
    try:
        schema = Schema.of(dict(pairs))
    except (DataError, TypeError) as error:
        fields.fail("schema", f"columns as `Schema.to_dict` gives them ({error})")
    if schema.features != fields.texts("features"):
        fields.fail("features", "those of the schema")
    return schema


def _is_shape(value: Any) -> bool:
    return isinstance(value, list) and all(is_count(each) for each in value)


def _inputs(record: Any, where: str) -> Inputs:
    fields = Fields(record, f"{where}: inputs", ("pool", "mean", "std"))
    mean, std = (tuple(map(float, fields.many(name, is_finite, "numbers"))) for name in ("mean", "std"))
    if not mean or not std or min(std) <= 0:
        fields.fail("std", "numbers over 0, beside as many means")
    return Inputs(fields.count("pool", 1), mean, std)


def _target_bounds(fields: Fields) -> TargetBounds | None:
    if "target_bounds" not in fields.value:
        return None
    found = fields.object("target_bounds").closed(("low", "high"))
    if fields.text("task") != "regression":
        fields.fail("target_bounds", "left out where there are classes")
    try:
        return TargetBounds(found.number("low"), found.number("high"))
    except DataError as error:
        fields.fail("target_bounds", str(error))


def _recalibration(fields: Fields) -> tuple[str, RecalibrationMap]:
    found = fields.closed(("method", "map"))
    return found.text("method"), map_of(found.object("map").value, "recalibration: map")


def sha256_of(path: Path) -> str:
    """SHA-256 of a file of a run; one that is not there is an error."""
    try:
        with open(open_ordinary(path), "rb") as file:
            return content_sha256(file)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from error
