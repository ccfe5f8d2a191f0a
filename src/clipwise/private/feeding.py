"""How a loader feeds a run: an iteration begins, hands out parts of logical batches, and is left."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from clipwise.errors import InvalidSampling
from clipwise.private.batch import Batch
from clipwise.private.evidence import Checks
from clipwise.private.evidence.records import Again
from clipwise.private.parts import PhysicalBatch
from clipwise.private.release import Release

__all__ = ["Feeding"]


@dataclass(frozen=True)
class Feeding:
    """The host of a loader: what each of its moves means for the parts of a run. The newest iteration counts."""

    batch: Batch
    release: Release
    checks: Checks
    bind: Callable[[], None]
    """Find the parameters again: layers may have been replaced since the last iteration."""
    step: Callable[[], None]
    """Make a step of noise alone."""

    @property
    def steps_done(self) -> int:
        """Steps on the ledger."""
        return self.release.position.done

    def open(self) -> int:
        """Begin an iteration; what was gathered of an unfinished logical batch is dropped."""
        position = self.release.position
        self.release.check_open()
        self.batch.forget()
        self.bind()
        self.batch.offered = None
        self.checks.abandon()
        self.checks.look_around(self.steps_done)
        position.iteration += 1
        position.is_iterating = True
        return position.iteration

    def offer(self, iteration: int, part: PhysicalBatch, batch: Any, again: Again) -> None:
        """The next losses belong to this part."""
        self._check_iteration(iteration)
        self.release.check_open()
        self.release.guard.begun = True
        self.checks.look_at_losses(batch, part.size, again)
        self.batch.offered = part
        self.checks.open_if_due(batch, part, self.steps_done, again)

    def leave_batch(self, iteration: int) -> None:
        """The loop has done with a batch, whether or not it made a step."""
        position = self.release.position
        if iteration == position.iteration:
            position.passed_by = position.passed_by or self.batch.offered is not None
            self.checks.abandon()
            self.release.check_accounted()

    def leave(self, iteration: int) -> None:
        """The loop was left: never an error, since it may be the garbage collector that says so."""
        if iteration == self.release.position.iteration:
            self.checks.lose() if self.batch.offered is not None else self.checks.abandon()
            self.release.position.is_iterating = False
            self.release.close_if_done()

    def empty_step(self, iteration: int, part: PhysicalBatch) -> None:
        """The noise-only step of an empty batch (left out when batches are only looked at)."""
        self._check_iteration(iteration)
        if part.step == self.steps_done and not self.batch.parts:
            self.step()

    def _check_iteration(self, iteration: int) -> None:
        if iteration != self.release.position.iteration:
            raise InvalidSampling("a newer iteration over private.loader(...) has begun; continue with that one.")
