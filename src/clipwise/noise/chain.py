"""Noise that depends on the noise of earlier steps: w = C^-1 z, one step after the other.

A chain stands between a source of normal numbers and a release. It keeps what it needs of earlier steps, in units of
the step's own deviation, for each piece of noise. It may begin again at any step: the accounting covers that.
"""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from clipwise._validate import is_count
from clipwise.correlation import Banded, Correlation, Independent, SquareRoot, Tree
from clipwise.errors import CheckpointError, InvalidPlan
from clipwise.sampling import Sampling, Shuffled

__all__ = ["NoiseChain", "chain_of"]

Floats: TypeAlias = npt.NDArray[np.float64]
Drawn: TypeAlias = Callable[[int], Floats]
"""Further independent normal numbers of a piece and step, counted from 1."""


class NoiseChain(ABC):
    """What one run keeps of its past noise.

    Guarantees: `correlate` gives row t of C^-1 Z, where t counts from the last time the chain began. A step that does
    not follow the last one begins it, and so does `begin`.
    """

    kind: bytes
    """What tells its matrix from others: of one seed, two must not make two things of the same numbers."""

    def __init__(self, pieces: int) -> None:
        self._pieces = pieces
        self.begin()

    def begin(self) -> None:
        """Forget all noise: the next step is the first of a chain."""
        self._last, self._made = -1, 0
        self.trace = b""
        """What tells the past of a seeded run from others: a digest of the releases since the chain began."""
        self._kept: list[Any] = [self._empty() for _ in range(self._pieces)]

    def follow(self, step: int) -> None:
        """The coming step; the chain begins again if it does not follow the last one."""
        if step != self._last + 1 or self._begins(step):
            self.begin()
        self._last, self._made = step, self._made + 1

    def trace_on(self, release: bytes) -> None:
        """One more release of a seeded run is part of the past."""
        self.trace = hashlib.sha256(self.trace + release).digest()

    def _begins(self, step: int) -> bool:
        return False

    @abstractmethod
    def _empty(self) -> Any:
        """What is kept for a piece before the first step."""

    @abstractmethod
    def correlate(self, piece: int, numbers: Floats, further: Drawn) -> None:
        """From normal numbers to the noise of a piece at the step that `follow` named, in place."""

    @abstractmethod
    def _arrays(self, kept: Any) -> list[Floats]:
        """What is kept for a piece, as arrays."""

    @abstractmethod
    def _from(self, arrays: Sequence[Floats], made: int) -> Any:
        """What `_arrays` gave, so many steps after the chain began; ValueError if it makes no sense."""

    def capture(self) -> dict[str, Any]:
        """The past, for a checkpoint of a seeded run. Of an unseeded one it must not be written: it is past noise."""
        arrays = [[torch.from_numpy(array.copy()) for array in self._arrays(kept)] for kept in self._kept]
        return {"last": self._last, "made": self._made, "trace": self.trace.hex(), "kept": arrays}

    def restore(self, saved: Mapping[str, Any], sizes: Sequence[int]) -> None:
        """Continue as when `capture` was called; `sizes` are those of the pieces."""
        try:
            last, made, trace = saved["last"], saved["made"], bytes.fromhex(saved["trace"])
            if not is_count(made, least=0) or not is_count(last, least=made - 1):
                raise ValueError("more steps than were made")
            found = [
                self._from([_array(tensor, size) for tensor in arrays], made)
                for arrays, size in zip(saved["kept"], sizes, strict=True)
            ]
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"the saved run has no past noise that makes sense: it is damaged ({error})."
            ) from error
        self._last, self._made, self.trace, self._kept = last, made, trace, found


def _array(tensor: Tensor, size: int) -> Floats:
    if tensor.dtype != torch.float64 or tensor.shape != (size,):
        raise ValueError("noise of another size")
    if not bool(tensor.isfinite().all()):
        raise ValueError("noise that is not finite")
    return tensor.numpy().copy()


class _Band(NoiseChain):
    """w_t = (z_t - c_1 w_(t-1) - ... - c_(b-1) w_(t-b+1)) / c_0, which is C w = z row by row.

    The past of a piece is a ring: one array with a row for each step, of which the oldest is written over. Weights
    turn, rows stay, so all of the past is read once and one row is written. Rows of steps that were not made are zero.
    """

    def __init__(self, pieces: int, column: Floats) -> None:
        self._column, self.kind = column, b"band" + column.tobytes()
        self._rows = len(column) - 1
        super().__init__(pieces)

    def _empty(self) -> Floats | None:
        return None  # made when the size of the piece is known

    def follow(self, step: int) -> None:
        super().follow(step)
        self._weights = np.empty(self._rows)
        self._weights[self._places(self._made - 1)] = self._column[1:]

    def _places(self, made: int) -> npt.NDArray[np.intp]:
        """The rows of the steps before, the last one first, when so many were made."""
        return (made - 1 - np.arange(self._rows)) % self._rows

    def correlate(self, piece: int, numbers: Floats, further: Drawn) -> None:
        from scipy.linalg.blas import dgemv

        past = self._kept[piece]
        if past is None:
            past = self._kept[piece] = np.zeros((self._rows, len(numbers)))
        unit = 1.0 / self._column[0]
        made = dgemv(-unit, past.T, self._weights, beta=unit, y=numbers, overwrite_y=1)
        row = past[(self._made - 1) % self._rows]
        row[:] = made
        if not np.may_share_memory(made, numbers):  # where the library could not write over them
            numbers[:] = made

    def _arrays(self, kept: Floats | None) -> list[Floats]:
        if kept is None:
            return []
        return [kept[place] for place in self._places(self._made)[: self._made]]

    def _from(self, arrays: Sequence[Floats], made: int) -> Floats | None:
        if len(arrays) != min(self._rows, made):
            raise ValueError(f"{len(arrays)} steps of noise")
        if not arrays:
            return None
        past = np.zeros((self._rows, len(arrays[0])))
        past[self._places(made)[: len(arrays)]] = arrays
        return past


class _Tree(NoiseChain):
    """w_t = sqrt(height) (N_t - N_(t-1)), N_t the noise of the sums that make up the first t steps.

    A finished sum is estimated from its own noise and from the estimates of its two halves, weighted by their variances
    (Honaker, 2015): with variance v of a half, that of both is 2 v, and that of the mean 2 v / (1 + 2 v).
    """

    def __init__(self, pieces: int, length: int, height: int) -> None:
        self._length, self._scale, self.kind = length, math.sqrt(height), b"tree %d %d" % (length, height)
        super().__init__(pieces)

    def _begins(self, step: int) -> bool:
        return step % self._length == 0

    def _empty(self) -> list[tuple[int, Floats]]:
        return []  # finished sums that are in no finished one, largest first: height and estimate of the noise

    def correlate(self, piece: int, numbers: Floats, further: Drawn) -> None:
        finished: list[tuple[int, Floats]] = self._kept[piece]
        before: Floats | float = sum((noise for _, noise in finished), start=0.0)
        height, noise, variance = 0, numbers.copy(), 1.0
        while finished and finished[-1][0] == height:
            _, other = finished.pop()
            height += 1
            noise = (2.0 * variance * further(height) + other + noise) / (1.0 + 2.0 * variance)
            variance = 2.0 * variance / (1.0 + 2.0 * variance)
        finished.append((height, noise))
        numbers[:] = self._scale * (sum((noise for _, noise in finished), start=np.zeros_like(noise)) - before)

    def _arrays(self, kept: list[tuple[int, Floats]]) -> list[Floats]:
        return [noise for _, noise in kept]

    def _from(self, arrays: Sequence[Floats], made: int) -> list[tuple[int, Floats]]:
        heights = [height for height in reversed(range(made.bit_length())) if made >> height & 1]
        return list(zip(heights, arrays, strict=True))


def chain_of(correlation: Correlation, sampling: Sampling, steps: int, pieces: int) -> NoiseChain | None:
    """The chain of a run; None for independent noise."""
    if correlation == Independent() or correlation.bands == 1:
        return None
    if isinstance(correlation, (Banded, SquareRoot)):
        return _Band(pieces, correlation.coefficients(steps))
    if isinstance(correlation, Tree) and isinstance(sampling, Shuffled):
        length = sampling.batches_per_epoch
        return _Tree(pieces, length, correlation.height(length))
    raise InvalidPlan(f"{correlation!r} has no chain for {sampling!r}.")
