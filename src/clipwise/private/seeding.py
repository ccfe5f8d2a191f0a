"""Where the coins and the noise of a run come from, and what ties those of a seeded run to what they are used for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from clipwise.accounting import Event, Ledger
from clipwise.entropy import Entropy
from clipwise.errors import CheckpointError
from clipwise.hashing import joined, whole
from clipwise.plan import Plan
from clipwise.private import labels
from clipwise.private.digests import Digests
from clipwise.sampling import Draws

__all__ = ["Seeding"]


class Seeding:
    """The entropy of a run. Without a seed it is the operating system's, and nothing here is used.

    Guarantees: with a seed, runs that differ in the plan, in the initial values, in the optimizer's class or
    hyper-parameters, or in data that lie in memory, share no coins; and no two releases share noise unless all of
    this and the sums themselves are equal.
    """

    def __init__(self, seed: int | None, plan: Plan, model: nn.Module, optimizer: Optimizer) -> None:
        self.entropy = Entropy(seed)
        self.digests = Digests()
        self._plan, self._model, self._optimizer = plan, model, optimizer
        self.start: bytes | None = None
        """Plan, initial values and optimizer when the run began, that is at its first draw; None before."""
        self.order = None if self.seeded else self.entropy.take(16, "order")
        """The key of shuffled epochs of an unseeded run: no secret, since shuffling claims no amplification."""
        self.physical: dict[str, Any] | None = None
        """How a seeded run cuts its batches: dropout is drawn again for every physical one."""
        self._data = b""  # digest of a data set in memory; never saved

    @property
    def seeded(self) -> bool:
        """Whether the run can be repeated."""
        return self.entropy.seed is not None

    def begin(self) -> bytes:
        """Fix what the run is begun with, if it has not begun."""
        if self.start is None and self.seeded:
            self.start = labels.of_run(self._plan, self._model, self._optimizer)
        return self.start or b""

    def draws(self) -> Draws:
        """The coins of the run."""
        return Draws(self._plan.sampling, self.entropy.labelled(self.begin(), self._data), self.order)

    def label(self) -> bytes:
        """What a release is labelled with beside its sums: the optimizer's hyper-parameters are those of this step."""
        return joined([self.begin(), self._data, labels.of_optimizer(self._optimizer)]) if self.seeded else b""

    def charging(self, ledger: Ledger, event: Event, step: int) -> Callable[[bytes], None]:
        """What is to be told of a release before it is made.

        A resumed seeded run makes steps again, which is the same release. If other sums come out, by other data, other
        code or arithmetic that does not repeat, it is one more release, and is charged.
        """

        def note(release: bytes) -> None:
            others = self.digests.others(step, release)
            if others:  # also those of processes that died before they could save their ledger
                ledger.record(event.repeated(others).changed(reason="repeated"))

        return note

    def look_at(self, dataset: Dataset[Any], physical_batch_size: int | None) -> Digests | None:
        """Refuse other data than a seeded run was begun with; gives its digests if records are looked at when drawn."""
        if not self.seeded:
            return None
        found = {"physical_batch_size": physical_batch_size}
        if self.physical not in (None, found):
            raise CheckpointError(
                "the seeded run began with another loader (physical_batch_size differs), so it would not repeat. Use "
                "the same one, or start with another seed."
            )
        self.physical = found
        known = whole(dataset)
        self.digests.look_at(known)
        self._data = known or b""
        return self.digests if known is None else None
