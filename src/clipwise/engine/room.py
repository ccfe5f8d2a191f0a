"""Memory for per-sample gradients that is kept from step to step: fresh memory costs more than to write into it."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor


class Room:
    """One block of numbers, given out in parts that hold until the next step begins.

    `memory` is how many bytes of gradients are wanted beyond what is held anyway; None leaves it to the cost model.
    """

    def __init__(self, memory: int | None = None) -> None:
        self.memory = memory
        self._block = self._like = torch.empty(0, device="cpu")
        self._taken = 0

    def begin(self) -> None:
        """A new step: everything that was given out is free again."""
        if self._taken > self._block.numel():
            self._block = self._like.new_empty(0)  # let go of the old one first
            self._block = self._like.new_empty(self._taken)
        self._taken = 0

    def take(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """Numbers of any value; fresh ones where the block is too small, or is of another kind."""
        start, self._taken = self._taken, self._taken + prod(shape)
        self._like = like.new_empty(0)
        fits = self._taken <= self._block.numel() and self._block.dtype == like.dtype
        if not fits or self._block.device != like.device:
            return like.new_empty(shape)
        return self._block[start : self._taken].view(*shape)
