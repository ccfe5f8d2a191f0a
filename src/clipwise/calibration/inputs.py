"""What may be evaluated: probabilities or logits with labels. Checked first, then read in float64, a part at a time."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from clipwise._validate import is_count, is_number
from clipwise.errors import DataError

__all__ = [
    "ArrayLike",
    "SampleScores",
    "Scores",
    "check_resamples",
    "check_share",
    "checked_labels",
    "matrix",
    "vector",
]

ArrayLike: TypeAlias = Tensor | NDArray[Any] | Sequence[Any]
"""A torch tensor, a NumPy array or nested lists of numbers; labels may be names."""

_CHUNK_ELEMENTS = 1 << 20


@dataclass(frozen=True)
class SampleScores:
    """Some samples in float64: the probabilities and what each sample adds to the metrics."""

    probabilities: Tensor
    label_B: Tensor
    confidence_B: Tensor
    correct_B: Tensor
    nll_B: Tensor
    brier_B: Tensor
    true_B: Tensor
    """The probability of the true class."""


class Scores:
    """Checked scores with their labels; iterating gives `SampleScores`, at most about a million numbers at a time.

    Guarantees: nothing is guessed. Scores that are not what they are called, and labels that do not fit, are refused
    before anything is computed.
    """

    def __init__(
        self,
        probabilities: ArrayLike | None,
        logits: ArrayLike | None,
        labels: ArrayLike | None,
        names: Sequence[str] | None = None,
    ) -> None:
        if (probabilities is None) == (logits is None):
            raise DataError(
                "Give either probabilities or logits=, and say which by the name: "
                f"got {'neither' if logits is None else 'both'}."
            )
        self.are_logits = probabilities is None
        self.name = "logits" if self.are_logits else "probabilities"
        self.scores = matrix(self.name, logits if probabilities is None else probabilities)
        if names is not None:
            labels = _indices(labels, names, self.classes)
        self.labels = checked_labels(labels, *self.scores.shape)
        for first, chunk in self._chunks():
            self._check(first, chunk)

    def __len__(self) -> int:
        return len(self.scores)

    @property
    def classes(self) -> int:
        """The number of columns."""
        return self.scores.shape[1]

    def __iter__(self) -> Iterator[SampleScores]:
        for first, chunk in self._chunks():
            yield self._rows(chunk, self.labels[first : first + len(chunk)])

    def _chunks(self) -> Iterator[tuple[int, Tensor]]:
        size = max(1, _CHUNK_ELEMENTS // self.classes)
        for first in range(0, len(self.scores), size):
            yield first, self.scores[first : first + size].to("cpu", torch.float64)

    def _check(self, first: int, chunk: Tensor) -> None:
        if self.are_logits:
            bad = ~torch.isfinite(chunk.amax(dim=1))  # NaN and +inf come through; -inf alone is a class ruled out
            self._refuse(bad, first, chunk, "a row has a NaN or +inf, or only -inf")
            return
        sums = chunk.sum(dim=1)
        self._refuse(~torch.isfinite(sums), first, chunk, "a row has a number that is not finite")
        self._refuse(
            chunk.amin(dim=1) < 0, first, chunk, "a row has a negative number; pass logits=... if these are logits"
        )
        off = (sums - 1).abs() > max(1e-4, 4 * torch.finfo(self.scores.dtype).eps)
        self._refuse(off, first, chunk, "a row does not sum to 1; pass logits=... if these are logits, or normalise")

    def _refuse(self, bad: Tensor, first: int, chunk: Tensor, why: str) -> None:
        if bool(bad.any()):
            row = int(bad.nonzero()[0, 0])
            shown = ", ".join(f"{value:.4g}" for value in chunk[row, :6].tolist())
            more = ", ..." if self.classes > 6 else ""
            raise DataError(
                f"{self.name}: {why}. It is row {first + row}; {int(bad.sum())} such row(s) from row {first} on.",
                f"[{shown}{more}] with sum {float(chunk[row].sum()):.6g}",
            )

    def _rows(self, chunk: Tensor, label_B: Tensor) -> SampleScores:
        at_label = label_B[:, None]
        if self.are_logits:
            log_probability = torch.log_softmax(chunk, dim=1)
            nll = -log_probability.gather(1, at_label)[:, 0]
            probability = log_probability.exp_()
        else:
            probability = chunk
            nll = -probability.gather(1, at_label)[:, 0].log()
        true = probability.gather(1, at_label)[:, 0]
        confidence, predicted = probability.max(dim=1)
        brier = torch.linalg.vector_norm(probability, dim=1).square_() - 2 * true + 1
        return SampleScores(probability, label_B, confidence, predicted == label_B, nll, brier, true)


def matrix(name: str, values: ArrayLike | None) -> Tensor:
    """The values as a floating-point tensor of shape (samples, classes), not copied where that can be avoided."""
    tensor = _tensor(name, values)
    if not tensor.is_floating_point():
        raise DataError(f"{name} must be floating-point numbers, got {tensor.dtype}. Are scores and labels swapped?")
    if tensor.ndim != 2:
        hint = " For two classes stack them: [1 - p, p]." if tensor.ndim == 1 else ""
        raise DataError(f"{name} must have the shape (samples, classes), got {tuple(tensor.shape)}.{hint}")
    if 0 in tensor.shape:
        raise DataError(f"{name} are empty: the shape is {tuple(tensor.shape)}.")
    return tensor


def checked_labels(labels: ArrayLike | None, samples: int, classes: int) -> Tensor:
    """The labels as int64 class indices, one per sample."""
    tensor = _tensor("labels", labels)
    if tensor.ndim != 1:
        raise DataError(
            f"labels must be class indices of the shape (samples,), got the shape {tuple(tensor.shape)}. "
            "From one-hot rows take argmax."
        )
    if len(tensor) != samples:
        raise DataError(f"There are {samples} samples but {len(tensor)} labels.")
    if tensor.is_floating_point() or tensor.is_complex():
        raise DataError(f"labels must be integers (class indices), got {tensor.dtype}.")
    tensor = tensor.to("cpu", torch.int64)
    outside = (tensor < 0) | (tensor >= classes)
    if bool(outside.any()):
        row = int(outside.nonzero()[0, 0])
        raise DataError(
            f"labels must be from 0 to {classes - 1} for {classes} classes; that of row {row} is not.",
            str(int(tensor[row])),
        )
    return tensor


def _indices(labels: ArrayLike | None, names: Sequence[str], classes: int) -> NDArray[np.int64]:
    """Labels that are names of classes as the indices of their columns."""
    index = {str(name): column for column, name in enumerate(names)}
    if not isinstance(names, Sequence) or isinstance(names, str) or len(index) != classes or len(names) != classes:
        raise DataError(f"classes must be {classes} different names, one for each column, got {names!r}.")
    given = np.asarray([] if labels is None else labels)
    if labels is None or given.ndim != 1:
        raise DataError("labels must be names of classes, of the shape (samples,).")
    found = np.array([index.get(str(each), -1) for each in given.tolist()], dtype=np.int64)
    wrong = np.flatnonzero(found < 0)
    if len(wrong):
        raise DataError(
            f"labels must be among the {classes} names in classes=; {len(wrong)} of {len(found)} are not, the first in "
            f"row {wrong[0]}.",
            repr(given[wrong[0]]),
        )
    return found


def vector(name: str, values: ArrayLike | float | None, length: int | None = None) -> NDArray[np.float64]:
    """Finite numbers of the shape (samples,) in float64; a column (samples, 1) is taken as one."""
    tensor = _tensor(name, values)
    if tensor.ndim == 2 and tensor.shape[1] == 1:
        tensor = tensor[:, 0]
    if tensor.ndim == 0 and length is not None:
        tensor = tensor.expand(length)
    if tensor.ndim != 1:
        raise DataError(f"{name} must have the shape (samples,), got {tuple(tensor.shape)}.")
    if length is not None and len(tensor) != length:
        raise DataError(f"{name} must have {length} numbers, one per sample, got {len(tensor)}.")
    if not len(tensor):
        raise DataError(f"{name} are empty.")
    array: NDArray[np.float64] = tensor.to("cpu", torch.float64).numpy()
    if not np.isfinite(array).all():
        raise DataError(f"{name} must be finite; number {int(np.argmin(np.isfinite(array)))} is not.")
    return array


def check_share(name: str, value: float) -> float:
    """A number strictly between 0 and 1, such as the level of an interval."""
    if not is_number(value) or not 0.0 < value < 1.0:
        raise DataError(f"{name} must be a number between 0 and 1, both excluded, got {value!r}.")
    return float(value)


def check_resamples(resamples: int, seed: int) -> None:
    """Zero (no intervals) or enough resamples for quantiles, and a seed."""
    for name, value in (("resamples", resamples), ("seed", seed)):
        if not is_count(value, least=0):
            raise DataError(f"{name} must be an integer of at least 0, got {value!r}.")
    if 0 < resamples < 100:
        raise DataError(f"resamples must be 0 (no intervals) or at least 100, better 1000, got {resamples}.")


def _tensor(name: str, values: ArrayLike | float | None) -> Tensor:
    if values is None:
        raise DataError(f"{name} are missing.")
    if isinstance(values, Tensor):
        return values.detach()
    array = np.asarray(values)
    if array.dtype.kind not in "biuf":
        names = " Give the names of the classes, in the order of the columns, as classes=." if name == "labels" else ""
        raise DataError(
            f"{name} must be a tensor or an array of numbers, got {type(values).__name__} of {array.dtype}.{names}"
        )
    if array.dtype.kind == "f" and array.dtype.itemsize > 8:
        array = array.astype(np.float64)
    if array.dtype in (np.uint16, np.uint32, np.uint64):
        array = array.astype(np.int64)
    array = array.astype(array.dtype.newbyteorder("="), copy=False)
    if any(stride < 0 for stride in array.strides):
        array = array.copy()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of arrays that must not be written to: nothing is written here
        return torch.from_numpy(array)
