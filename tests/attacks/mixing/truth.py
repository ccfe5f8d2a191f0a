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


def _positions(size: int) -> list[int]:
    """Where records are changed, or kept while all others are."""
    return sorted({0, size // 2, size - 1})


def _changes(batch: list[Any], others: Any) -> Iterator[tuple[list[int], list[Any]]]:
    size = len(batch)
    for number, position in enumerate(_positions(size)):  # one record is another
        changed = [*batch[:position], others[number], *batch[position + 1 :]]
        yield [i for i in range(size) if i != position], changed
    for number, position in enumerate(sorted({0, size - 1})):  # all but one are copies of another, or others
        yield [position], [r if i == position else others[number] for i, r in enumerate(batch)]
        yield [position], [r if i == position else others[i % len(others)] for i, r in enumerate(batch)]


def _weights(size: int) -> Tensor:
    """A number for each sample, such that a sum over samples shows what moves in any of them."""
    return 1.5 + torch.cos(torch.arange(float(size)))


@dataclass(frozen=True)
class _Gradients:
    """Of one batch: some samples' gradients by position, and the weighted sum of all."""

    size: int
    rows: dict[int, Tensor]
    total: Tensor

    def of(self, kept: list[int]) -> Tensor:
        """The gradient of one sample, or the weighted sum of several."""
        if len(kept) == 1:
            return self.rows[kept[0]]
        left_out, weights = set(range(self.size)) - set(kept), _weights(self.size)
        return self.total - sum((weights[i] * self.rows[i] for i in left_out), torch.zeros(()))


@dataclass(frozen=True)
class _Trace:
    """What a play of two batches leaves: the gradients of each, and all that the model holds."""

    gradients: list[_Gradients]
    held: dict[str, Tensor]


def _play(program: Program, batches: list[list[Any]]) -> _Trace:
    loop = program.start()
    gradients = [_gradients(loop, records, 11 + k) for k, records in enumerate(batches)]
    held = {**dict(loop.model.named_parameters()), **dict(loop.model.named_buffers())}
    return _Trace(gradients, {name: value.detach().clone() for name, value in held.items()})


def _gradients(loop: Loop, records: list[Any], seed: int) -> _Gradients:
    leaves = [p for p in loop.model.parameters() if p.requires_grad]

    def gradient(loss: Tensor) -> Tensor:
        found = torch.autograd.grad(loss, leaves, retain_graph=True, allow_unused=True)
        filled = [torch.zeros_like(p) if g is None else g.to_dense() for p, g in zip(leaves, found, strict=True)]
        return torch.cat([g.flatten() for g in filled])

    with seeded(seed):
        batch = loop.program.collate(records)
        losses = loop.losses(batch)
        size = len(records)
        assert losses.shape == (size,), f"{loop.program.name} gives losses of shape {tuple(losses.shape)}"
        rows = {i: gradient(losses[i]) for i in _positions(size)}
        total = gradient(losses @ _weights(size).to(losses))
        loop.after(batch)
    return _Gradients(size, rows, total)


def _gradients_moved(before: _Trace, after: _Trace, which: int, kept: list[int]) -> float:
    pairs = [(before.gradients[which].of(kept), after.gradients[which].of(kept))]
    pairs.append((before.gradients[1 - which].total, after.gradients[1 - which].total))
    scale = max(float(row.abs().max()) for g in before.gradients for row in g.rows.values())
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
