"""Where the random bits of a run come from.

Every random choice of a run (which samples, which noise) asks `Entropy` for bytes under a purpose and a step number.
Without a seed they come from the operating system each time, so none can be saved. (In memory, a thread's generator
stays as its last piece left it, and from this the noise of that piece can be computed.) With a seed they are a function
of seed, label, purpose and step, so a resumed run needs no generator state.

The label says what the bytes are for: plan, data, initial values, optimizer, and for noise the very sums that it is
added to (`docs/decisions/0014-seeds.md`). So runs of one seed that differ in any of these share no coins and no noise.
"""

from __future__ import annotations

import hashlib
import os
import random
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from clipwise._validate import is_count
from clipwise.errors import InvalidPlan
from clipwise.hashing import joined

__all__ = ["Entropy", "arm_seed"]


def arm_seed(seed: int | None, arm: str) -> int | None:
    """The seed from which an arm of an experiment draws, where all arms show the same `seed`.

    Two arms of one seed would otherwise differ in their labels alone, and no label sees everything (a loss function).

    >>> arm_seed(0, "R = 1") == arm_seed(0, "R = 10"), arm_seed(0, "R = 1") == arm_seed(0, "R = 1"), arm_seed(None, "")
    (False, True, None)
    """
    if seed is None:
        return None
    return int.from_bytes(joined([b"clipwise arm", str(Entropy(seed).seed).encode(), arm.encode()])[:16], "little")


@dataclass(frozen=True)
class Entropy:
    """Bytes for a purpose: from the operating system, or derived from `seed` and `label` (SHAKE-256).

    Guarantees: without a seed two calls share nothing; with a seed equal calls give equal bytes, and different
    labels, purposes (names without a slash) or counters independent ones.

    >>> Entropy(7).take(4, "noise", 3) == Entropy(7).take(4, "noise", 3)
    True
    >>> Entropy(None).take(16, "noise", 3) == Entropy(None).take(16, "noise", 3)
    False
    >>> Entropy(7).labelled(b"R = 1").take(4, "noise", 3) == Entropy(7).labelled(b"R = 2").take(4, "noise", 3)
    False
    """

    seed: int | None = field(default=None, repr=False)
    label: bytes = field(default=b"", repr=False)
    """May depend on the data, so it is never shown, and written nowhere."""

    def __post_init__(self) -> None:
        seed = self.seed
        if seed is not None and not is_count(seed, least=0):
            raise InvalidPlan(f"seed must be a non-negative integer or None (operating system entropy), got {seed!r}.")

    def take(self, size: int, purpose: str, *counters: int) -> bytes:
        """`size` bytes for this purpose and these counters."""
        if self.seed is None:
            return os.urandom(size)
        asked = "/".join(["clipwise", str(self.seed), purpose, *map(str, counters)]).encode()
        return hashlib.shake_256(asked if not self.label else b"/".join([asked, self.label])).digest(size)

    def labelled(self, *parts: bytes) -> Entropy:
        """The same seed for something else: `parts` are added to the label. Without a seed there is none."""
        return self if self.seed is None else replace(self, label=joined([self.label, *parts]))

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
