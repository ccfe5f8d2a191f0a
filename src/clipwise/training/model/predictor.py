"""A trained model in use: `load` reads it from its run's folder, and it answers with probabilities or numbers."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from clipwise.accounting import Guarantee
from clipwise.calibration import Task
from clipwise.data import Table, inputs_of
from clipwise.errors import DataError
from clipwise.report import SEEDED, Run, RunFolder
from clipwise.training.config import guarded
from clipwise.training.model.saved import SavedModel, sha256_of
from clipwise.training.model.weights import read_weights

__all__ = ["Predictor", "load"]

Rows: TypeAlias = Tensor | NDArray[Any] | Sequence[Any] | Mapping[str, Any]
FEW = 20
"""Columns that a message lists."""
BATCH = 1_000
"""Inputs that the network sees at a time."""


def load(
    run: str | os.PathLike[str], *, recalibration: bool = True, trust_code: bool = False, device: str = "cpu"
) -> Predictor:
    """The trained model of a run's folder, ready to predict.

    `recalibration=False` switches off the recalibration that is in force. A model that the user's own function builds
    is refused without `trust_code=True`, since building it runs that function.

    Guarantees: nothing is unpickled, and without `trust_code` no code that the folder names is imported or run. Files
    that were edited, cut or damaged, and weights that do not belong to the model, are refused.

    >>> import tempfile
    >>> import clipwise as cw
    >>> from clipwise.training import Config, train
    >>> config = Config.parse('''
    ... steps = 20
    ... batch_size = 64
    ... data.source = "digits"
    ... model.source = "mlp"
    ... optimizer.learning_rate = 0.5
    ... privacy.private = false
    ... evaluation.resamples = 0
    ... ''')
    >>> _, folder = train(config, output=tempfile.mkdtemp(), page=False)
    >>> model = cw.load(folder)
    >>> model.classes[:3], model.predict_proba(torch.zeros(2, 1, 8, 8)).shape
    (('0', '1', '2'), torch.Size([2, 10]))
    """
    folder = RunFolder(run)
    saved = SavedModel.read(folder, trust_code=trust_code)
    _check_room(saved, folder)
    with torch.random.fork_rng(devices=[]):  # new weights are drawn, and replaced at once
        model = saved.architecture.build(saved)
    read_weights(model, folder.model)
    return Predictor(saved, model.to(device).eval(), folder, device, recalibration)


def _check_room(saved: SavedModel, folder: RunFolder) -> None:
    """Refuse a description of a network that is larger than its weights, before there is room made for it."""
    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        model = saved.architecture.build(saved)
    numbers = sum(parameter.numel() for parameter in model.parameters())
    if numbers > os.path.getsize(folder.model):
        raise DataError(
            f"{folder.description} describes a network with {numbers:.3g} parameters, {folder.model} fewer."
        )


@dataclass(frozen=True, eq=False, repr=False)
class Predictor:
    """A trained model: `predict_proba` and `predict` for rows, and what they mean.

    Rows are given as they were in the data that the model was trained with, before any scaling: as a tensor or an array
    (n, ...), as a table {column: values} (a data frame works too) where the data were one, or as a tuple of tensors for
    a model of several, such as tokens and their mask. Tensors are answered with tensors, everything else with arrays.

    Guarantees: predictions are computed from the released weights and the given rows only, so they cost no further
    epsilon of the training records.
    """

    saved: SavedModel
    model: nn.Module
    folder: RunFolder
    device: str = "cpu"
    recalibration: bool = True
    """Whether `method` is applied."""

    @property
    def task(self) -> Task:
        """What was learnt: classes or numbers."""
        return self.saved.task

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes, in the order of the probabilities; empty for a regression."""
        return self.saved.classes

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns that a table must have, in any order; empty where the data were not a table."""
        schema = self.saved.schema
        return self.saved.features if schema is None else tuple(column.name for column in schema.columns)

    @property
    def features(self) -> tuple[str, ...]:
        """The names of the numbers that the network gets for a row: the columns after encoding."""
        return self.saved.features

    @property
    def method(self) -> str | None:
        """The recalibration that is applied; None where there is none."""
        return self.saved.recalibration[0] if self.recalibration and self.saved.recalibration else None

    @cached_property
    def guarantee(self) -> Guarantee | None:
        """What the weights and the recalibration promise to the training records; None for a run that is not private.

        It is computed from the run's ledger, which must be the one that the model was saved with. What the run's page
        warns of, such as classes that were read off the records, is among its warnings.
        """
        if self.saved.ledger is None:
            return None
        if sha256_of(self.folder.ledger) != self.saved.ledger:
            raise DataError(
                f"{self.folder.ledger} is not the ledger that the model was saved with, so nothing is said of its "
                "privacy. Restore it from the run."
            )
        run = Run.load(self.folder.path)
        known, seeded = run.guarantees["exact"], () if run.seed is None else (SEEDED,)
        return replace(known, warnings=tuple(dict.fromkeys((*known.warnings, *run.warnings, *seeded))))

    def __repr__(self) -> str:
        what = f"{len(self.classes)} classes" if self.classes else "regression"
        run = f"{self.folder.path.absolute().name}, trained on {self.saved.name}"
        return f"Predictor({run}: {what}, {self.saved.shape} inputs, recalibration: {self.method})"

    def predict_proba(self, rows: Rows, where: str = "the rows") -> Any:
        """Probabilities (n, classes), recalibrated if a method is in force; `where` names the rows in an error."""
        if self.task == "regression":
            raise DataError("a regression has no probabilities; use predict.")
        return self._like(rows, self._probabilities(self._inputs(rows, where)))

    def predict(self, rows: Rows, where: str = "the rows") -> Any:
        """The name of the likeliest class for each row, in an array; for a regression the predicted numbers."""
        inputs = self._inputs(rows, where)
        if self.task == "regression":
            outputs, bounds = self._outputs(inputs).squeeze(1), self.saved.target_bounds
            return self._like(rows, outputs if bounds is None else bounds.restored(outputs))
        return np.array(self.classes)[self._probabilities(inputs).argmax(dim=1).numpy()]

    def _inputs(self, rows: Rows, where: str) -> tuple[Tensor, ...]:
        """What the network gets for rows; those that do not fit are a `DataError` that begins with `where`."""
        saved = self.saved
        if isinstance(rows, Mapping) or hasattr(rows, "columns"):
            rows = inputs_of(where, _table(rows), saved.features, saved.schema)
        given = rows if isinstance(rows, tuple) else (rows,)
        if len(given) != len(saved.shapes):
            raise DataError(f"{where}: the model takes {len(saved.shapes)} tensors, got {len(given)}.")
        for each in given:
            self._refuse_text(where, each)
        tensors = [_tensor(where, each, kind) for each, kind in zip(given, saved.kinds, strict=True)]
        for step in saved.inputs:
            tensors[0] = step(tensors[0])
        shape = tuple(tensors[0].shape[1:])
        if len(tensors) == 1 and shape != saved.shape:  # sentences may be shorter than those trained on
            raise DataError(f"{where}: an input has shape {shape}, the model takes {saved.shape}.")
        if len({len(tensor) for tensor in tensors}) > 1:
            raise DataError(f"{where}: the tensors have different lengths: {[len(tensor) for tensor in tensors]}.")
        return tuple(tensors)

    def _refuse_text(self, where: str, rows: Any) -> None:
        """Refuse an array with text or other objects in it, such as the values of a data frame with mixed columns."""
        if not isinstance(rows, np.ndarray) or rows.dtype.kind in "biuf":
            return
        needed = (
            f"Give a data frame, or a table {{column: values}}, with the columns {', '.join(self.columns[:FEW])}"
            f"{', ...' if len(self.columns) > FEW else ''}: they are then encoded as in training."
            if self.columns
            else "Convert it to numbers, as array.astype(np.float32) does."
        )
        raise DataError(f"{where}: an array of {rows.dtype} was given, and the network takes numbers. {needed}")

    def _probabilities(self, inputs: tuple[Tensor, ...]) -> Tensor:
        logits = self._outputs(inputs)
        if self.method is None or self.saved.recalibration is None:
            return torch.softmax(logits.double(), dim=1).to(logits.dtype)
        return self.saved.recalibration[1].predict(logits)

    def _outputs(self, inputs: tuple[Tensor, ...]) -> Tensor:
        """Logits, or predictions in one column, as the network returns them."""
        parts = [torch.empty(0, self.saved.outputs, device="cpu")]
        with torch.no_grad():
            for k in range(0, len(inputs[0]), BATCH):
                batch = [tensor[k : k + BATCH].to(self.device) for tensor in inputs]
                parts.append(guarded("the model's forward pass", lambda: self._forward(batch)))  # noqa: B023 - now
        outputs = torch.cat(parts)
        if not bool(torch.isfinite(outputs).all()):
            raise DataError("the model's outputs are not finite: its weights are damaged, or a row is far too large.")
        return outputs

    def _forward(self, batch: Sequence[Tensor]) -> Tensor:
        outputs = self.saved.architecture.forward(self.model, batch).cpu()
        return outputs.reshape(len(batch[0]), self.saved.outputs)

    @staticmethod
    def _like(rows: Rows, values: Tensor) -> Any:
        first = rows[0] if isinstance(rows, tuple) and rows else rows
        return values if isinstance(first, Tensor) else values.numpy()


def _table(rows: Any) -> Table:
    """Columns by name, of a mapping or of a data frame of pandas or polars; None and NaN of text are empty."""
    return {str(name): _column(rows[name]) for name in getattr(rows, "columns", rows)}


def _column(given: Any) -> list[str] | NDArray[Any]:
    if isinstance(given, list):
        return ["" if cell is None or cell != cell else str(cell) for cell in given]
    column = np.asarray(given)
    return column if column.dtype.kind in "biufUS" else _column(column.tolist())


def _tensor(where: str, rows: Any, kind: torch.dtype) -> Tensor:
    """Rows as the tensor of a network's input, all of it finite."""
    try:
        tensor = torch.as_tensor(rows).cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"{where}: numbers are needed, with as many for each input.", str(error)) from None
    if tensor.dim() == 0:
        raise DataError(f"{where}: a single number is not a list of inputs.")
    if tensor.is_floating_point() and not kind.is_floating_point:
        raise DataError(f"{where}: the model takes whole numbers ({kind}), got {tensor.dtype}.")
    tensor = tensor.to(kind)
    if not bool(torch.isfinite(tensor).all()):
        raise DataError(f"{where}: a number is missing, or not finite in {kind}.")
    return tensor
