"""How far a run is, and what ties its coins and its noise to it: what is saved, and what a resume continues."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils.data import Dataset

from clipwise.entropy import Entropy
from clipwise.errors import BudgetSpent, CheckpointError
from clipwise.hashing import joined, whole
from clipwise.private.digests import Digests
from clipwise.sampling import Draws, Sampling

__all__ = ["Position"]


class Position:
    """Where a run stands among its planned steps (or rounds), and where its randomness comes from.

    `start` describes what the run is begun with, `now` what else tells one step from the same step of another run.
    Without a seed the entropy is the operating system's, and neither is used.

    Guarantees: with a seed, runs that differ in `start` (of `Private`: the plan, the initial values, the optimizer's
    class or hyper-parameters), or in data that lie in memory, share no coins; and no two releases share noise unless
    all of this and the sums themselves are equal.
    """

    def __init__(
        self,
        planned: int,
        sampling: Sampling,
        seed: int | None,
        start: Callable[[], bytes],
        now: Callable[[], bytes] | None = None,
        *,
        unit: str = "steps",
        bound: float | None = None,
    ) -> None:
        self.done = 0
        """Steps of the plan that are used up."""
        self.bound = bound
        """Where an adaptive clipping norm stands; None: the norm is the plan's."""
        self.planned, self.unit = planned, unit
        self.is_closed = False
        """Whether the caller ended the run."""
        self.iteration = 0
        """The newest iteration over the loader, from 1; the others do not count any more."""
        self.is_iterating = False
        self.passed_by = False
        """Whether a batch was handed out, and no losses of it came."""
        self.entropy = Entropy(seed)
        self.digests = Digests()
        self.order = None if self.seeded else self.entropy.take(16, "order")
        """The key of epochs or groups of an unseeded run; where amplification is claimed by it, in memory only."""
        self.cuts: dict[str, Any] | None = None
        """How a seeded run cuts its batches: dropout is drawn again for every physical one."""
        self._sampling, self._start, self._now = sampling, start, now
        self._started: bytes | None = None
        self._data = b""  # digest of a data set in memory; never saved

    # How far

    @property
    def is_over(self) -> bool:
        """Whether every step was made, and no loop is waiting for more."""
        return self.done >= self.planned and not self.is_iterating

    def check_left(self) -> None:
        """Refuse more steps than were planned, and any after the end."""
        if self.done >= self.planned:
            raise BudgetSpent(
                f"all {self.planned} {self.unit} of the plan are made. More would spend privacy that was not planned: "
                f"make a plan with more {self.unit} before training."
            )
        self.check_open()

    def check_open(self) -> None:
        """Refuse to continue a run that the caller ended."""
        if self.is_closed:
            raise BudgetSpent("the run was closed by private.close(). Begin another one to train further.")

    # Coins and noise

    @property
    def seeded(self) -> bool:
        """Whether the run can be repeated."""
        return self.entropy.seed is not None

    def begin(self) -> bytes:
        """What the run is begun with, fixed at its first draw."""
        if self._started is None and self.seeded:
            self._started = self._start()
        return self._started or b""

    def draws(self) -> Draws:
        """The coins of the run."""
        return Draws(self._sampling, self.entropy.labelled(self.begin(), self._data), self.order)

    def label(self) -> bytes:
        """What a release is labelled with beside its sums."""
        if not self.seeded or self._now is None:
            return self.begin()
        return joined([self.begin(), self._data, self._now()])

    def look_at(self, dataset: Dataset[Any], physical_batch_size: int | None) -> Digests | None:
        """Refuse other data than a seeded run was begun with; gives its digests if records are looked at when drawn."""
        if not self.seeded:
            return None
        found = {"physical_batch_size": physical_batch_size}
        if self.cuts not in (None, found):
            raise CheckpointError(
                "the seeded run began with another loader (physical_batch_size differs), so it would not repeat. Use "
                "the same one, or start with another seed."
            )
        self.cuts = found
        known = whole(dataset)
        self.digests.look_at(known)
        self._data = known or b""
        return self.digests if known is None else None

    # What is saved

    def capture(self) -> dict[str, Any]:
        """The position. Only a seeded one holds anything that its randomness could be rebuilt from."""
        label = self.begin().hex() if self.seeded else None
        norm = {} if self.bound is None else {"bound": self.bound}
        return {"steps": self.done, "seed": self.entropy.seed, "label": label, **norm}

    def capture_loader(self) -> dict[str, Any]:
        """What besides lets the loader, and random numbers in the model, continue from here."""
        order = self.order if self._sampling.keeps_order and not self._sampling.hides_order else None
        return {
            "order": None if order is None else order.hex(),
            "loader": self.cuts,
            "generator": torch.get_rng_state() if self.seeded else None,
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Stand where `capture` was made."""
        self._started = None if saved["label"] is None else bytes.fromhex(saved["label"])
        self.done = saved["steps"]
        self.bound = saved.get("bound")

    def restore_loader(self, saved: Mapping[str, Any]) -> None:
        """Continue as when `capture_loader` was called."""
        if saved["order"] is not None and not self._sampling.hides_order:
            self.order = bytes.fromhex(saved["order"])
        self.cuts = saved["loader"]
        if saved["generator"] is not None:
            torch.set_rng_state(saved["generator"])
