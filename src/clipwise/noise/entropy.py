"""Where the random bits of a run come from.

Every random choice of a run (which samples, which noise) asks `Entropy` for bytes under a purpose and a step number.
Without a seed they come from the operating system each time, so no key lives on between steps and none can be
saved. With a seed they are a function of seed, purpose and step, so a resumed run needs no generator state.
"""

from __future__ import annotations

import hashlib
import os
import random
from dataclasses import dataclass, field

import numpy as np
import torch

from clipwise.errors import InvalidPlan

__all__ = ["Entropy"]


@dataclass(frozen=True)
class Entropy:
    """Bytes for a purpose: from the operating system, or derived from `seed` (SHAKE-256).

    Guarantees: without a seed two calls share nothing; with a seed equal calls give equal bytes, and different
    purposes or counters independent ones.

    >>> Entropy(7).take(4, "noise", 3) == Entropy(7).take(4, "noise", 3)
    True
    >>> Entropy(None).take(16, "noise", 3) == Entropy(None).take(16, "noise", 3)
    False
    """

    seed: int | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        seed = self.seed
        if seed is not None and (not isinstance(seed, int) or isinstance(seed, bool) or seed < 0):
            raise InvalidPlan(f"seed must be a non-negative integer or None (operating system entropy), got {seed!r}.")

    def take(self, size: int, purpose: str, *counters: int) -> bytes:
        """`size` bytes for this purpose and these counters."""
        if self.seed is None:
            return os.urandom(size)
        label = "/".join(["clipwise", str(self.seed), purpose, *map(str, counters)])
        return hashlib.shake_256(label.encode()).digest(size)

    def child(self, purpose: str) -> Entropy:
        """An entropy for somebody who must not learn this one's seed."""
        return self if self.seed is None else Entropy(int.from_bytes(self.take(16, purpose), "little"))

    def generator(self, purpose: str, *counters: int) -> np.random.Generator:
        """A NumPy generator (Philox, 128-bit key) for this purpose and these counters."""
        return np.random.Generator(np.random.Philox(key=int.from_bytes(self.take(16, purpose, *counters), "little")))

    def seed_globals(self, purpose: str, *counters: int) -> None:
        """With a seed, set the global generators of torch, NumPy and Python, so dropout and augmentation replay."""
        if self.seed is None:
            return
        words = np.frombuffer(self.take(16, purpose, *counters), dtype=np.uint32)
        # torch.manual_seed also formats a stack trace for devices that are not there: too slow for every batch.
        torch.default_generator.manual_seed(int(words[0]))
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(int(words[0]))
        np.random.seed(int(words[1]))  # noqa: NPY002 - the global generator that augmentation code draws from
        random.seed(words[2:].tobytes())
