"""The values that loaders return: tensors to train and test on, and where they come from."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import TensorDataset, default_collate

from clipwise._validate import is_finite
from clipwise.data.schema import Schema
from clipwise.errors import DataError
from clipwise.hashing import digest

__all__ = ["DataSet", "TargetBounds", "Task", "TensorRecords", "split"]

Task = Literal["classification", "regression"]


class TensorRecords(TensorDataset):
    """A `TensorDataset` that reads a whole batch at once; use it with `TensorRecords.collate`.

    >>> TensorRecords(torch.arange(3.0), torch.arange(3)).__getitems__([0, 2])
    (tensor([0., 2.]), tensor([0, 2]))
    """

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, ...]:
        chosen = torch.as_tensor(indices)
        return tuple(tensor[chosen] for tensor in self.tensors)

    @staticmethod
    def collate(batch: tuple[Tensor, ...] | list[tuple[Tensor, ...]]) -> Any:
        """A batch that was read at once is one already."""
        return batch if isinstance(batch, tuple) else default_collate(batch)


@dataclass(frozen=True)
class TargetBounds:
    """The public range of a regression's target: a model learns it from -1 to 1, whatever its unit.

    The squared error of targets in the hundreds has gradients in the hundreds, and clipping leaves a model that never
    gets there. Targets beyond the bounds count as the bounds, and no prediction is beyond them.

    Guarantees: a scaled target depends on that target and these two numbers alone.

    >>> bounds = TargetBounds(0, 600)
    >>> bounds.scaled(torch.tensor([0.0, 450.0, 900.0])), bounds.restored(torch.tensor([0.5, -2.0]))
    (tensor([-1.0000,  0.5000,  1.0000]), tensor([450.,   0.]))
    """

    low: float
    high: float

    def __post_init__(self) -> None:
        if not (is_finite(self.low) and is_finite(self.high) and self.low < self.high):
            raise DataError(f"bounds of a target are finite numbers low < high, got {self.low!r} and {self.high!r}.")
        object.__setattr__(self, "low", float(self.low))
        object.__setattr__(self, "high", float(self.high))
        if not 0 < self._half < torch.finfo(torch.float32).max or abs(self._middle) > torch.finfo(torch.float32).max:
            raise DataError(f"bounds of a target are numbers of float32, got {self.low!r} and {self.high!r}.")

    @property
    def _middle(self) -> float:
        return self.low / 2 + self.high / 2

    @property
    def _half(self) -> float:
        return self.high / 2 - self.low / 2

    def scaled(self, targets: Tensor) -> Tensor:
        """Targets from -1 to 1."""
        return ((targets.double().clamp(self.low, self.high) - self._middle) / self._half).to(targets.dtype)

    def restored(self, outputs: Tensor) -> Tensor:
        """Predictions in the target's own unit, from what a model returns."""
        return (outputs.double() * self._half + self._middle).clamp(self.low, self.high).to(outputs.dtype)


@dataclass(frozen=True, eq=False)
class DataSet:
    """Records to train on, records held out, and what a report has to say about them.

    `train` and `test` hold the inputs and, last, the targets: int64 classes, or float32 numbers of shape (n,).

    >>> x, y = torch.zeros(6, 2), torch.tensor([0, 1, 0, 1, 0, 1])
    >>> data = DataSet("toy", "classification", TensorDataset(x, y), TensorDataset(x, y), classes=("no", "yes"))
    >>> data.shape, data.outputs
    ((2,), 2)
    """

    name: str
    task: Task
    train: TensorDataset
    test: TensorDataset
    classes: tuple[str, ...] = ()
    """Names of the classes, in the order of their numbers; empty for regression."""
    features: tuple[str, ...] = ()
    """Names of the columns of a table; empty for images and text."""
    source: str = ""
    """Where the records come from: a folder, an address, a package."""
    licence: str = ""
    note: str = ""
    """What anyone who shows a result has to know: a subset, rows left out, statistics that were not private."""
    scaled: tuple[tuple[tuple[float, ...], tuple[float, ...]], ...] = ()
    """Means and deviations of the features that `standardised` has scaled with, each time: new rows need the same."""
    schema: Schema | None = None
    """How the columns of a table were encoded; None where the inputs are as they were read."""
    target_bounds: TargetBounds | None = None
    """Of a regression: between which public numbers its target is learnt. The records have it in its own unit."""

    def __post_init__(self) -> None:
        for part in (self.train, self.test):
            if len(part.tensors) < 2 or not len(part):
                raise DataError(f"{self.name}: a part of a data set needs inputs and targets, and one record at least.")
        if (self.task == "classification") != bool(self.classes):
            raise DataError(f"{self.name}: classes are named for classification, and for nothing else.")
        if self.target_bounds is not None and self.task != "regression":
            raise DataError(f"{self.name}: target_bounds are for a regression, and there are classes.")

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one input."""
        return tuple(self.train.tensors[0].shape[1:])

    @property
    def outputs(self) -> int:
        """How many numbers a model has to return for an input: one for each class, or one."""
        return len(self.classes) or 1

    def standardised(self) -> DataSet:
        """The same records with every feature at mean 0 and standard deviation 1 over the training part.

        These statistics come from the training records without noise, so epsilon does not cover them; the note says so.

        >>> x, y = torch.tensor([[1.0], [3.0]]), torch.tensor([0.5, 1.5])
        >>> data = DataSet("toy", "regression", TensorDataset(x, y), TensorDataset(x, y)).standardised()
        >>> data.train.tensors[0].flatten().tolist()
        [-1.0, 1.0]
        """
        if len(self.shape) != 1 or len(self.train.tensors) != 2:
            raise DataError(
                f"{self.name} is not a table of features; inputs of shape {self.shape} are not standardised."
            )
        x = self.train.tensors[0]
        deviation, mean = torch.std_mean(x, dim=0, correction=0)
        deviation = torch.where(deviation > 0, deviation, 1.0)
        train, test = (TensorDataset((p.tensors[0] - mean) / deviation, p.tensors[1]) for p in (self.train, self.test))
        said = "Features are standardised by mean and deviation of the training records, which epsilon does not cover."
        numbers = tuple(mean.tolist()), tuple(deviation.tolist())
        scaled = (*self.scaled, numbers)
        return replace(self, train=train, test=test, note=f"{self.note} {said}".strip(), scaled=scaled)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of every record of both parts: equal for equal data, wherever they were read from."""
        return digest([self.task, self.classes, list(self.train.tensors), list(self.test.tensors)])


def split(x: Tensor, y: Tensor, test: int, seed: int) -> tuple[TensorDataset, TensorDataset]:
    """A training part, and a test part of `test` records chosen at random but always the same ones for a seed.

    >>> train, held_out = split(torch.arange(5.0), torch.arange(5), test=2, seed=0)
    >>> sorted([*train.tensors[1].tolist(), *held_out.tensors[1].tolist()]), len(held_out)
    ([0, 1, 2, 3, 4], 2)
    """
    if not 0 < test < len(x):
        raise DataError(f"{test} of {len(x)} records cannot be held out: both parts need one at least.")
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    held_out, kept = order[:test].sort().values, order[test:].sort().values
    return TensorDataset(x[kept], y[kept]), TensorDataset(x[held_out], y[held_out])
