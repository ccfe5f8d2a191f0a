"""A collate function sees all records of a batch: called with other records, it must leave everybody else's rows alone.

Padding to the longest record is allowed here; whether it moves the losses of others is a question to the losses.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate, default_convert

from clipwise.entropy import Entropy
from clipwise.errors import NotSeparable
from clipwise.private.evidence.records import Records

Collate = Callable[[list[Any]], Any]
_MOST = 6
_SEEDS = 4
PADDED = (
    "records are padded to the longest of their batch, and whether that moves the losses of other records can only be "
    "seen with Private(..., loss_fn=...)"
)


def check_collate(collate: Collate | None, dataset: Any) -> str:
    """Refuse a collate function that mixes records; say what could not be checked, if anything."""
    length = len(dataset)
    if collate is None or collate in (default_collate, default_convert) or length < 3:
        return ""
    count = min(_MOST, length - 1)
    places = [length * k // (count + 1) for k in range(count + 1)]
    with unchanged_generators():
        *items, spare = (dataset[i] for i in places)
        return next(filter(None, [_check(collate, items, spare, seed) for seed in range(_SEEDS)]), "")


def _check(collate: Collate, items: list[Any], spare: Any, seed: int) -> str:
    """Replace one record after the other, with random numbers that begin at the same place."""
    count, unclear = len(items), ""
    base, again = (_made(collate, items, seed) for _ in range(2))
    if not base.has_form_of(again) or any(
        a.shape != b.shape or _changed(a, b) for a, b in zip(base.all, again.all, strict=True)
    ):
        return "the collate function draws random numbers of its own"
    flat = any(not tensor.dim() or tensor.shape[0] != count for tensor in base.tensors)
    changed: list[list[set[int]]] = [[] for _ in base.all]
    for j in range(count):
        found = _made(collate, [*items[:j], spare, *items[j + 1 :]], seed)
        if not found.has_form_of(base):
            return "the collate function returns another structure for other records"
        for number, (before, after) in enumerate(zip(base.tensors, found.tensors, strict=True)):
            if flat and not before.is_floating_point():
                unclear = unclear or "integers of a packed batch, such as offsets, are not compared"
            elif before.dim() and before.shape[0] == after.shape[0] == count:
                unclear = _compare_rows(number, before, after, j) or unclear
            elif before.shape == after.shape:
                changed[number].append(_changed(before.flatten(), after.flatten()))
        changed[-2].append(_changed(base.floats, found.floats))
        changed[-1].append(_changed(base.whole, found.whole))
    for number, sets in enumerate(changed):
        if any(a & b for k, a in enumerate(sets) for b in sets[:k]):
            if number == len(changed) - 1:
                return unclear or "whole numbers of the batch, such as lengths, are not compared"
            what = f"tensor {number}" if number < len(base.tensors) else "a plain number"
            raise _mixing(f"{what} of its batch is computed from several records together")
    return unclear


@contextmanager
def unchanged_generators() -> Iterator[None]:
    """Leave the global generators of torch, NumPy and Python as they were."""
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
        random.setstate(states[2])


@dataclass(frozen=True)
class _Made:
    """What a collate function made: tensors and arrays, and the plain numbers beside them."""

    tensors: list[Tensor]
    floats: Tensor
    whole: Tensor

    @property
    def all(self) -> list[Tensor]:
        return [*self.tensors, self.floats, self.whole]

    def has_form_of(self, other: _Made) -> bool:
        counts = [(len(made.tensors), len(made.floats), len(made.whole)) for made in (self, other)]
        return counts[0] == counts[1]


def _made(collate: Collate, items: Sequence[Any], seed: int) -> _Made:
    Entropy(seed).seed_globals("collate")
    found = Records.of(collate(copy.deepcopy(list(items))), len(items))
    tensors = [tensor.detach() for tensor in (*found.tensors, *found.arrays) if tensor.layout is torch.strided]
    floats = [float(number) for number in found.numbers if isinstance(number, (float, np.floating))]
    whole = [float(number) for number in found.numbers if isinstance(number, (int, np.integer))]
    return _Made(
        tensors,
        torch.tensor(floats, dtype=torch.float64, device="cpu"),
        torch.tensor(whole, dtype=torch.float64, device="cpu"),
    )


def _changed(before: Tensor, after: Tensor) -> set[int]:
    moved = ~((before == after) | ((before != before) & (after != after)))
    return set(torch.atleast_1d(moved)[..., None].flatten(1).any(1).nonzero().flatten().tolist())


def _compare_rows(number: int, before: Tensor, after: Tensor, j: int) -> str:
    """Rows of the records that stayed, up to padding."""
    padded = before.shape != after.shape
    if before.dim() != after.dim():
        return "the collate function returns another structure for other records"
    front = [slice(None), *(slice(0, min(a, b)) for a, b in zip(before.shape[1:], after.shape[1:], strict=True))]
    back = [slice(None), *(slice(-min(a, b), None) for a, b in zip(before.shape[1:], after.shape[1:], strict=True))]
    moved = set.intersection(*(_changed(before[tuple(cut)], after[tuple(cut)]) for cut in (front, back))) - {j}
    columns = before.dim() > 1 and before.shape == after.shape and before.shape[1] == before.shape[0]
    if moved and not (columns and _changed(before.transpose(0, 1), after.transpose(0, 1)) <= {j}):
        raise _mixing(f"with another record {j}, row {min(moved)} of tensor {number} of its batch changed")
    return PADDED if padded else ""


def _mixing(what: str) -> NotSeparable:
    return NotSeparable(
        f"the collate function mixes records: {what}, so the gradient of one sample depends on others. Typical causes: "
        "mixup or cutmix, standardisation or weights by the batch, negatives from other records. Mix views of one "
        "record in the data set instead, and use public constants."
    )
