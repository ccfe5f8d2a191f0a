"""Physical batches: how a logical batch is cut.

The first steps are checked, which costs several forward and backward passes and the memory of as many. So their first
physical batches have a few samples only, and those are checked instead of whole ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from clipwise.sampling import Indices, split

__all__ = ["EARLY", "PhysicalBatch", "cut"]

EARLY = 3
"""How many of the first steps are checked."""
_FEW = ((7, 5, 7, 6), (6, 7, 5), (7, 6, 7))  # sizes that differ before anything is released: a loss may follow them
_FEWER = ((2, 3, 4), (3,), (4,))  # where a physical batch is small itself
_SMALL = 16  # samples; as many in whole ones are checked too: two or three are their own partners by chance
_LEAST = 4  # samples of a physical batch, below which no other is spared for it alone


@dataclass(frozen=True)
class PhysicalBatch:
    """One physical batch: piece `part` of the logical batch of step `step`, of which the first `few` are checked."""

    step: int
    part: int
    size: int
    last: bool
    indices: tuple[int, ...] = field(default=(), repr=False, compare=False)
    few: int = 0

    @property
    def is_few(self) -> bool:
        """Whether it is checked instead of others."""
        return self.part < self.few

    @property
    def is_spared(self) -> bool:
        """Whether others of the same step are checked instead."""
        return self.few > 0 and not self.is_few


def cut(indices: Indices, step: int, physical_batch_size: int | None) -> Iterator[PhysicalBatch]:
    """The physical batches of a step. With `None` there is one: a loop may rely on one batch a step.

    A function of its arguments alone, so that a run that is resumed has the same ones. Those of no sample are one too.

    >>> import numpy as np
    >>> [part.size for part in cut(np.arange(100), 0, 64)], [part.size for part in cut(np.arange(100), 3, 64)]
    ([7, 5, 7, 6, 64, 11], [64, 36])

    The few are taken from all over the batch: neighbours in a data set may be of one class, or equally long.
    """
    few: list[Indices] = []
    for size in _few_samples(step, physical_batch_size):
        if len(indices) > size:
            spread = np.arange(size) * (len(indices) - 1) // (size - 1)
            few.append(indices[spread])
            indices = np.delete(indices, spread)
    checked = len(few) + _whole(step, physical_batch_size, bool(few))
    pieces = [*few, *split(indices, physical_batch_size)] or [indices]
    for k, piece in enumerate(pieces):
        yield PhysicalBatch(step, k, len(piece), k == len(pieces) - 1, tuple(piece.tolist()), checked)


def _whole(step: int, physical_batch_size: int | None, has_few: bool) -> int:
    """How many whole physical batches are checked as well; of two or three samples all, where there are no fewer."""
    if physical_batch_size is None or step >= EARLY or physical_batch_size >= _SMALL:
        return 0
    return _SMALL // physical_batch_size if has_few or physical_batch_size >= _LEAST else 0


def _few_samples(step: int, physical_batch_size: int | None) -> tuple[int, ...]:
    if physical_batch_size is None or step >= EARLY:
        return ()
    sizes = (_FEW if physical_batch_size >= _SMALL else _FEWER)[step]
    return tuple(size for size in sizes if size < physical_batch_size)
