"""How a loader feeds a run: an iteration begins, hands out parts of logical batches, and is left."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from clipwise.errors import InvalidSampling
from clipwise.private.evidence.closure import check_losses
from clipwise.private.evidence.records import Again
from clipwise.private.loader import Part

if TYPE_CHECKING:
    from clipwise.private.train import Private

__all__ = ["Feeding"]

_SAMPLES_TO_CHECK = 3
_SAMPLES_TO_WATCH = 2


class Feeding:
    """The host of a loader: what each of its moves means for the run. The newest iteration is the one that counts."""

    def __init__(self, private: Private) -> None:
        self._private = private

    @property
    def steps_done(self) -> int:
        """Steps on the ledger."""
        return self._private.steps_done

    def open(self) -> int:
        """Begin an iteration; what was gathered of an unfinished logical batch is dropped."""
        private = self._private
        private._check_open()
        private._forget()
        private._bind()  # layers may have been replaced since the last one
        private._offered = None
        private._checks.abandon()
        private._iteration += 1
        private._iterating = True
        return private._iteration

    def offer(self, iteration: int, part: Part, batch: Any, again: Again) -> None:
        """The next losses belong to this part."""
        private = self._private
        self._check_iteration(iteration)
        private._check_open()
        private._guard.begun = True
        if private._loss_fn is not None and part.size >= _SAMPLES_TO_CHECK:
            unclear = check_losses(private._model, private._loss_fn, batch, part.size, again)
            private._checks.losses_checked(unclear)
            private._loss_fn = None
        private._offered = part
        if part.size >= _SAMPLES_TO_WATCH and private._checks.is_due(part.step):
            private._open_watch(batch, part.size, again)

    def leave_batch(self, iteration: int) -> None:
        """The loop has done with a batch, whether or not it made a step."""
        private = self._private
        if iteration == private._iteration:
            private._passed_by = private._passed_by or private._offered is not None
            private._checks.abandon()
            private._check_accounted()

    def leave(self, iteration: int) -> None:
        """The loop was left: never an error, since it may be the garbage collector that says so."""
        if iteration == self._private._iteration:
            self._private._checks.abandon()
            self._private._iterating = False
            self._private._close_if_done()

    def empty_step(self, iteration: int, part: Part) -> None:
        """The noise-only step of an empty batch (left out when batches are only looked at)."""
        private = self._private
        self._check_iteration(iteration)
        if part.step == private.steps_done and not private._parts:
            private._check_ready()
            private._offered = None
            with private._guard.restoring():
                private._step()

    def _check_iteration(self, iteration: int) -> None:
        if iteration != self._private._iteration:
            raise InvalidSampling("a newer iteration over private.loader(...) has begun; continue with that one.")
