"""Who moves whom, by autograd alone: a record is changed, and every other sample's gradient must stay as it is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .programs import Loop, Program, seeded

# What counts as a move, relative to the largest gradient: far above rounding.
_MOVED = {torch.float64: 1e-7, torch.float32: 1e-3}
_COMPARED = 4  # samples of a batch, two of a large one
_LARGE = 256


def mixes(program: Program) -> bool:
    """Whether a change of records moves the gradient of another sample, or anything that the model holds.

    Two batches are played without a step of the optimizer in between, so what reaches the second one, or a buffer or
    parameter afterwards, was kept by the program itself.
    """
    with _default(program.dtype):
        records, others = program.records(), program.records(seed=1)
        size = program.batch_size or len(records)
        batches = [[records[i] for i in range(size)], [records[-1 - i] for i in range(min(size, _LARGE))]]
        before, limit = _play(program, batches), _MOVED[program.dtype]
        for which, kept, changed in _neighbours(batches, others, program.presence):
            after = _play(program, [changed if k == which else batch for k, batch in enumerate(batches)])
            if _gradients_moved(before, after, which, kept) > limit or _holds_other_values(before, after, limit):
                return True
        return False


def _neighbours(batches: list[list[Any]], others: Any, presence: bool) -> Iterator[tuple[int, list[int], list[Any]]]:
    """A changed batch, with its number and the positions of the records that stayed."""
    if presence:
        yield 0, list(range(len(batches[0]) - 1)), batches[0][:-1]
        return
    yield from ((0, *change) for change in _changes(batches[0], others))
    yield from ((1, *change) for change in list(_changes(batches[1], others))[::3])


def _changes(batch: list[Any], others: Any) -> Iterator[tuple[list[int], list[Any]]]:
    size = len(batch)
    for number, position in enumerate(sorted({0, size // 2, size - 1})):  # one record is another
        changed = [*batch[:position], others[number], *batch[position + 1 :]]
        yield [i for i in range(size) if i != position], changed
    for number, position in enumerate(sorted({0, size - 1})):  # all but one are copies of another, or others
        yield [position], [r if i == position else others[number] for i, r in enumerate(batch)]
        yield [position], [r if i == position else others[i % len(others)] for i, r in enumerate(batch)]


@dataclass(frozen=True)
class _Trace:
    """What a play of two batches leaves: gradients of some samples of each, and all that the model holds."""

    gradients: list[dict[int, Tensor]]
    held: dict[str, Tensor]


def _play(program: Program, batches: list[list[Any]]) -> _Trace:
    loop = program.start()
    gradients = [_gradients(loop, records, 11 + k) for k, records in enumerate(batches)]
    held = {**dict(loop.model.named_parameters()), **dict(loop.model.named_buffers())}
    return _Trace(gradients, {name: value.detach().clone() for name, value in held.items()})


def _gradients(loop: Loop, records: list[Any], seed: int) -> dict[int, Tensor]:
    with seeded(seed):
        batch = loop.program.collate(records)
        losses = loop.losses(batch)
        assert losses.shape == (len(records),), f"{loop.program.name} gives losses of shape {tuple(losses.shape)}"
        leaves = [p for p in loop.model.parameters() if p.requires_grad]
        rows = {}
        parts, last = _COMPARED - 1 if len(records) < _LARGE else 1, len(records) - 1
        for i in sorted({last * k // parts for k in range(parts + 1)}):
            found = torch.autograd.grad(losses[i], leaves, retain_graph=True, allow_unused=True)
            filled = [torch.zeros_like(p) if g is None else g for p, g in zip(leaves, found, strict=True)]
            rows[i] = torch.cat([g.to_dense().flatten() for g in filled])
        loop.after(batch)
    return rows


def _gradients_moved(before: _Trace, after: _Trace, which: int, kept: list[int]) -> float:
    pairs = []
    for k, (old, new) in enumerate(zip(before.gradients, after.gradients, strict=True)):
        pairs += [(old[i], new[i]) for i in old.keys() & new.keys() if k != which or i in kept]
    scale = max(float(a.abs().max()) for a, _ in pairs)
    assert 0 < scale < float("inf"), "the gradients say nothing"
    return max(float((a - b).abs().max()) for a, b in pairs) / scale


def _holds_other_values(before: _Trace, after: _Trace, limit: float) -> bool:
    if before.held.keys() != after.held.keys():
        return True
    pairs = [(value.double(), after.held[name].double()) for name, value in before.held.items()]
    return any(a.shape != b.shape or not torch.allclose(a, b, rtol=limit, equal_nan=True) for a, b in pairs)


@contextmanager
def _default(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
