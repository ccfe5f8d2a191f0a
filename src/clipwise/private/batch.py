"""The logical batch that is being gathered from physical ones."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from clipwise.clipping import Style
from clipwise.engine import Clipped
from clipwise.errors import InvalidLosses, InvalidSampling
from clipwise.sampling import Sampling

__all__ = ["Batch"]


class Batch:
    """The clipped sum so far, its style, and the statistics of every part."""

    def __init__(self) -> None:
        self.style: Style | None = None
        self.sums: list[Tensor] | None = None
        self.parts: list[Clipped[Any]] = []  # without their gradients
        self._given: list[weakref.ref[Tensor]] = []

    def check(self, losses: Tensor) -> None:
        """Refuse losses that were given before."""
        if any(given() is losses for given in self._given):
            raise InvalidLosses(
                "these very losses were given already in this logical batch: a sample that counts twice has twice the "
                "sensitivity. Give each batch once."
            )

    def check_own(self, size: int, sampling: Sampling) -> None:
        """Refuse more samples than the declared sampling can give."""
        gathered = size + sum(part.norms.numel() for part in self.parts)
        most = sampling.largest_batch
        if most is not None and gathered > most:
            raise InvalidSampling(
                f"a logical batch of {gathered} samples is more than {sampling!r} can give: the plan must tell the "
                "truth about your loader."
            )

    def add(self, losses: Tensor, clipped: Clipped[Any], names: Sequence[str], dtypes: Sequence[torch.dtype]) -> None:
        """Add what a physical batch gave, in the order of `names`."""
        gradients = [clipped.gradients[name] for name in names]
        self._gather([g if g.dtype == dtype else g.to(dtype) for g, dtype in zip(gradients, dtypes, strict=True)])
        self._given.append(weakref.ref(losses))
        self.parts.append(clipped.without_gradients())
        self.style = clipped.style

    def _gather(self, gradients: list[Tensor]) -> None:
        if self.sums is not None:
            torch._foreach_add_(self.sums, gradients)
            return
        # Take the engine's own tensors over, but never two that share memory: noise must be independent.
        memory = {g.data_ptr() for g in gradients}
        if len(memory) < len(gradients) or not all(g.is_contiguous() for g in gradients):
            gradients = [g.clone(memory_format=torch.contiguous_format) for g in gradients]
        self.sums = gradients
