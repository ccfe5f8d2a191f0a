"""Who moves whom, by autograd alone: a record is changed, and every other sample's gradient must stay as it is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from .programs import Loop, Program, seeded

MOVED = 1e-7  # of the largest gradient; rounding in float64 is a million times less
_COMPARED = 6  # samples of a batch, two of a large one
_LARGE = 256


def influence(program: Program) -> float:
    """The largest move of another sample's gradient, relative to the largest gradient; inf if shapes changed.

    Two batches are played without a step of the optimizer in between, so what reaches the second one, or a buffer or
    parameter afterwards, was kept by the program itself.
    """
    with _float64():
        records, others = program.records(), program.records(seed=1)
        size = program.batch_size or len(records)
        first = [records[i] for i in range(size)]
        second = [records[-1 - i] for i in range(min(size, _LARGE))]
        before = _play(program, first, second)
        worst = 0.0
        for kept, changed in _neighbours(first, others, program.presence):
            after = _play(program, changed, second)
            worst = max(worst, _distance(before, after, kept))
            if worst > MOVED:
                break
        return worst


def _neighbours(batch: list[Any], others: Any, presence: bool) -> Iterator[tuple[dict[int, int], list[Any]]]:
    """Changed batches, each with where the records that stayed were and are now."""
    size = len(batch)
    if presence:
        yield {i: i for i in range(size - 1)}, batch[:-1]
        return
    for position in sorted({0, size // 2, size - 1}):  # one record is another
        for number in range(2):
            changed = [*batch[:position], others[number], *batch[position + 1 :]]
            yield {i: i for i in range(size) if i != position}, changed
    for position in sorted({0, size - 1}):  # all but one are copies of another, or others
        for number in range(2):
            yield {position: position}, [r if i == position else others[number] for i, r in enumerate(batch)]
        yield {position: position}, [r if i == position else others[i % len(others)] for i, r in enumerate(batch)]


class _Trace:
    """What a play of two batches leaves: gradients of some samples of each, and all that the model holds."""

    def __init__(self, first: dict[int, Tensor], second: dict[int, Tensor], held: dict[str, Tensor]) -> None:
        self.first, self.second, self.held = first, second, held


def _play(program: Program, first: list[Any], second: list[Any]) -> _Trace:
    loop = program.start()
    gradients = [_gradients(loop, records, seed) for seed, records in ((11, first), (12, second))]
    held = {**dict(loop.model.named_parameters()), **dict(loop.model.named_buffers())}
    return _Trace(*gradients, {name: value.detach().clone() for name, value in held.items()})


def _gradients(loop: Loop, records: list[Any], seed: int) -> dict[int, Tensor]:
    with seeded(seed):
        batch = loop.program.collate(records)
        losses = loop.losses(batch)
        assert losses.shape == (len(records),), f"{loop.program.name} gives losses of shape {tuple(losses.shape)}"
        leaves = [p for p in loop.model.parameters() if p.requires_grad]
        rows = {}
        compared = _COMPARED if len(records) < _LARGE else 1
        for i in sorted({len(records) * k // compared for k in range(compared)} | {len(records) - 1}):
            found = torch.autograd.grad(losses[i], leaves, retain_graph=True, allow_unused=True)
            filled = [torch.zeros_like(p) if g is None else g for p, g in zip(leaves, found, strict=True)]
            rows[i] = torch.cat([g.to_dense().flatten() for g in filled])
        loop.after(batch)
    return rows


def _distance(before: _Trace, after: _Trace, kept: dict[int, int]) -> float:
    pairs = [(before.first[i], after.first[k]) for i, k in kept.items() if i in before.first and k in after.first]
    pairs += [(value, after.second[i]) for i, value in before.second.items()]
    scale = max(float(a.abs().max()) for a, _ in pairs)
    assert 0 < scale < float("inf"), "the gradients say nothing"
    moved = max(float((a - b).abs().max()) for a, b in pairs) / scale
    if before.held.keys() != after.held.keys():
        return float("inf")
    for name, value in before.held.items():
        other = after.held[name]
        if other.shape != value.shape or not torch.allclose(value.double(), other.double(), rtol=MOVED, equal_nan=True):
            return float("inf")
    return moved


@contextmanager
def _float64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
