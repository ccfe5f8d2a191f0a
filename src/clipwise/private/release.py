"""The only way out of a run: charge, then noise, then the mean of a sum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from clipwise.accounting import Ledger
from clipwise.clipping import Style, is_private
from clipwise.errors import InvalidPlan
from clipwise.mechanisms import Repeated
from clipwise.noise import GaussianNoise, Normals
from clipwise.private.checkpoint import Journal
from clipwise.private.guard import Guard, check_one_process
from clipwise.private.position import Position

__all__ = ["Release"]


class Release:
    """What is charged, and the noise that is added, when a sum leaves a run of `Private` or of a federated server.

    `multiplier` times the style's scales is the noise's deviation; `first` numbers the noise of the first release.

    Guarantees: a step is on `ledger`, and in the journal of a saved run, before its noise is drawn; from then on it is
    spent, whatever happens. A seeded run that makes a step again with other sums is charged once more.
    """

    def __init__(
        self,
        event: Repeated,
        position: Position,
        multiplier: float,
        source: Normals | None = None,
        ledger: Ledger | None = None,
        *,
        first: int = 0,
    ) -> None:
        check_one_process()
        self.event, self.position = event, position
        self.ledger = Ledger() if ledger is None else ledger
        self.guard = Guard()
        self._multiplier, self._source, self._first = multiplier, source, first
        self._journal: Journal | None = None

    def bind(self, names: Sequence[str], like: Sequence[Tensor], stds: Sequence[float] = ()) -> None:
        """Release sums like these from here on. `stds` are the deviations of what comes after the named ones."""
        self._names, self._further = names, stds
        self._noise = GaussianNoise(like, self.position.entropy, self._source)
        self._scaled: tuple[Style, list[float]] | None = None

    # Whether the run may continue

    def check_open(self) -> None:
        """Refuse to continue a run that was ended, is one of several ranks, or had an update from elsewhere."""
        self.position.check_open()
        check_one_process()
        self.check_accounted()

    def check_accounted(self) -> None:
        """Refuse to continue, or to state anything, after an update that clipwise did not make."""
        self.look()
        self.guard.check()

    def look(self) -> None:
        """Put an update that clipwise did not make on the ledger, without noise."""
        self.guard.look(self.ledger, self.event.sampling)

    def close_if_done(self) -> None:
        """After the last step, and the caller's use of it, the parameters are the caller's again."""
        self.guard.is_last = self.position.is_over
        if self.guard.is_last and not self.guard.is_due:
            self.guard.close()

    # The release

    def prepare(self, style: Style) -> None:
        """Find the noise of a style; refused when it does not bound what a sample contributes."""
        if not self._multiplier or (self._scaled is not None and self._scaled[0] is style):
            return
        if not is_private(style):
            raise InvalidPlan(f"{style!r} of step {self.position.done} does not bound what a sample contributes.")
        groups = style.groups(self._names)
        scales = style.noise_scales(list(groups))
        of = {name: self._multiplier * scales[group] for group, names in groups.items() for name in names}
        self._scaled = (style, [*(of[name] for name in self._names), *self._further])

    def mean(self, sums: list[Tensor], style: Style, scale: float) -> list[Tensor]:
        """Charge a step, then give (sums + noise) * scale on the public grid. `sums` are used up."""
        self.prepare(style)
        step = self._charge()
        if self._scaled is None:
            torch._foreach_mul_(sums, scale)
            return sums
        number = self._first + step
        before = partial(self._charge_repetition, number)
        return self._noise.release(sums, self._scaled[1], scale, number, self.position.label(), before)

    def write(self, sums: list[Tensor], style: Style, scale: float) -> None:
        """The mean as the gradient of the guarded parameters, which may be stepped with once."""
        self.guard.write(self.mean(sums, style, scale))
        self.close_if_done()

    # What is charged

    def _charge(self) -> int:
        """One step on the ledger and in the journal; gives its number."""
        step = self.position.done
        self.ledger.record(self.event)
        self.position.done += 1
        if self._journal is not None:
            self._journal.charge(self.position.done)
        return step

    def _charge_repetition(self, number: int, release: bytes) -> None:
        """A resumed seeded run makes steps again, which is the same release.

        If other sums come out, by other data, other code or arithmetic that does not repeat, it is one more release.
        """
        others = self.position.digests.others(number, release)
        if others:  # also those of processes that died before they could save their ledger
            self.ledger.record(replace(self.event.repeated(others), reason="repeated"))

    def count_in(self, journal: Journal) -> None:
        """Count every step in this file from here on, and no longer in the one before."""
        before = self._journal
        if before is not None and before.path != journal.path:
            before.retire(self.position.done)
        elif before is not None:
            before.close()
        self._journal = journal

    def continue_in(self, journal: Journal) -> None:
        """Go on from this file: steps that were begun there after it was saved stay charged."""
        self._journal = journal
        lost = journal.begun() - self.position.done
        if lost > 0:
            self.ledger.record(replace(self.event.repeated(lost), reason="interrupted"))
            self.position.done += lost
            self.close_if_done()
