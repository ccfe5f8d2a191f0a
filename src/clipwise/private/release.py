"""The only way out of a run: charge, then noise, then the mean of a sum."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from clipwise._validate import is_positive
from clipwise.accounting import AHEAD, INTERRUPTED, Ledger, Relation, needed_delta
from clipwise.clipping import Style, bounds_of, is_private, own_noise
from clipwise.correlation import Independent
from clipwise.errors import CheckpointError, InvalidPlan, UnaccountedUpdate
from clipwise.files import Lock
from clipwise.mechanisms import AdaptiveClip, Repeated
from clipwise.noise import GaussianNoise, Normals, chain_of
from clipwise.plan import Plan
from clipwise.private.checkpoint import Journal
from clipwise.private.guard import Guard, check_one_process
from clipwise.private.position import Position
from clipwise.private.witness import Testimony, Witness
from clipwise.sampling import BallsInBins

__all__ = ["Release"]


class Release:
    """What is charged, and the noise that is added, when a sum leaves a run of `Private` or of a federated server.

    `first` numbers the noise of the first release. An adaptive norm (`AdaptiveClip`) is moved here: its count is one
    more number of the noisy vector.

    Guarantees: a step is on `ledger`, in the journal of a saved run and at its witness before its noise is drawn; from
    then on it is spent, whatever happens. Its noise has the multiplier of the event that was recorded, which is that of
    the step's own number. A seeded run that makes a step again with other sums is charged once more. An adaptive norm
    moves by the noisy count of a step that was released, and stays where it is when that count was lost.
    """

    def __init__(
        self,
        plan: Plan,
        position: Position,
        source: Normals | None = None,
        ledger: Ledger | None = None,
        *,
        own_batches: bool = False,
        first: int = 0,
        witness: Witness | None = None,
    ) -> None:
        check_one_process()
        self._plan, self.position = plan, position
        self._adaptive = plan.clip if isinstance(plan.clip, AdaptiveClip) else None
        if self._adaptive is not None:
            position.bound = self._adaptive.R
        self._current: Style | None = None  # of an adaptive norm, as long as it stands where it is
        self._marks: dict[str, Any] = {}
        self.mark(**({} if own_batches is False else {"own_batches": own_batches}))
        self.ledger = Ledger() if ledger is None else ledger
        self.guard = Guard()
        self._source, self._first = source, first
        self._form: tuple[Any, ...] | None = None  # names and forms of the sums that the noise was made for
        self._journal: Journal | None = None
        self._testimony = None if witness is None else Testimony(witness, plan.steps)

    def bind(self, names: Sequence[str], like: Sequence[Tensor], weight: float = 1.0) -> None:
        """Release sums like these from here on. Noise continues where they are like those before.

        `weight` is the most that one record, or user, counts in them.
        """
        like = [*like, *([] if self._adaptive is None else [torch.zeros(1, dtype=torch.float64, device="cpu")])]
        form = (tuple(names), [(tensor.shape, tensor.dtype, tensor.device) for tensor in like])
        if self._form != form:
            chain = partial(chain_of, self._plan.correlation, self._plan.sampling, self._plan.steps)
            self._noise = GaussianNoise(like, self.position.entropy, self._source, chain)
            self._form = form
        self._names, self._weight = names, weight
        self._scaled: tuple[Style, float, list[float]] | None = None
        self._bounds: tuple[tuple[str, float], ...] = ()  # of the style's rules, when its noise was found

    def mark(self, **changes: Any) -> None:
        """Give every further event these values; refuses a plan without noise, and marks that are none."""
        self._marks.update(changes)
        self._stretches: list[tuple[int, Repeated]] = []  # where steps with equal noise end, and the event of one
        for event in self._events(0, self._plan.steps):
            end = event.count + (self._stretches[-1][0] if self._stretches else 0)
            self._stretches.append((end, event.repeated(1)))

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

    def epsilon(self, delta: float | None, accountant: str, relation: Relation | None) -> float:
        """The epsilon spent so far, if everything that was computed from the data is on the ledger."""
        self.check_accounted()
        if self.position.passed_by and not self.position.done:
            raise UnaccountedUpdate(
                "batches of the loader were used, but the losses of none were given to private.step: whatever was "
                "computed from them is not on the ledger, so epsilon 0 would say nothing of it."
            )
        return self.ledger.epsilon(needed_delta(delta, self._plan.sampling), accountant, relation=relation)

    def look(self) -> None:
        """Put an update that clipwise did not make on the ledger, without noise."""
        self.guard.look(self.ledger, self._plan.sampling)

    def close_if_done(self) -> None:
        """After the last step, and the caller's use of it, the parameters are the caller's again."""
        self.guard.is_last = self.position.is_over
        if self.guard.is_last and not self.guard.is_due:
            self.guard.close()

    # The clipping norm

    @property
    def style(self) -> Style:
        """The clipping of the coming step: one object for clipping and for noise, until the step is released."""
        bound = self.position.bound
        if self._adaptive is None or bound is None:
            return self._plan.style(self.position.done)
        if self._current is None or self._current.sensitivity(1) != bound:
            self._current = self._adaptive.style(bound)
        return self._current

    def can_stand_at(self, bound: object) -> bool:
        """Whether this is a place of the adaptive norm of the plan."""
        clip = self._adaptive
        return clip is not None and is_positive(bound) and clip.lowest <= bound <= clip.highest

    def _deviations(self, noise: float) -> tuple[float, Sequence[float]]:
        """The noise multiplier of the sums, and the deviation of the count where there is one."""
        if self._adaptive is None:
            return noise * self._weight, ()
        multiplier, deviation = self._adaptive.split(noise)
        return multiplier * self._weight, (deviation,)

    # The release

    def prepare(self, style: Style) -> Repeated:
        """The event of the coming step, whose noise is found for the style that is in force.

        Refused when the style does not bound what a sample contributes. Without a noise multiplier there is no such
        bound, and no noise either, unless the style brings its own (`Unclipped`).
        """
        event = next(event for end, event in self._stretches if self.position.done < end)
        noise = event.noise_multiplier
        if not noise:
            self._scaled = self._unclipped(style)
            return event
        bounds = bounds_of(style)
        if self._scaled is not None and self._scaled[0] is style:
            if self._bounds != bounds:
                raise InvalidPlan(
                    f"{style!r} changed while it was in force: clipping and noise could differ. Rules and styles are "
                    "values that stay as they are; a schedule of them is a class with at(step, steps), such as MixUp."
                )
            if self._scaled[1] == noise:
                return event
        if not is_private(style):
            raise InvalidPlan(f"{style!r} of step {self.position.done} does not bound what a sample contributes.")
        groups = style.groups(self._names)
        scales = style.noise_scales(list(groups))
        multiplier, further = self._deviations(noise)
        of = {name: multiplier * scales[group] for group, names in groups.items() for name in names}
        self._bounds = bounds
        self._scaled = (style, noise, [*(of[name] for name in self._names), *further])
        return event

    def _unclipped(self, style: Style) -> tuple[Style, float, list[float]] | None:
        """The noise that a style brings to a step that is not private."""
        if not own_noise(style):
            return None
        if self._scaled is not None and self._scaled[0] is style:
            return self._scaled
        if self._plan.correlation != Independent():
            raise InvalidPlan(f"the noise of {style!r} is not correlated: use it without {self._plan.correlation!r}.")
        groups = style.groups(self._names)
        stds = own_noise(style, groups)
        of = {name: stds[group] for group, names in groups.items() for name in names}
        return style, 0.0, [of[name] for name in self._names]

    def mean(self, sums: list[Tensor], style: Style, scale: float, within: float = 0.0) -> list[Tensor]:
        """Charge a step, then give (sums + noise) * scale on the public grid. `sums` are used up.

        `within` is the sum of centred bits for an adaptive norm (`AdaptiveClip.centred`).
        """
        clip, bound = self._adaptive, self.position.bound
        if clip is not None:
            sums = [*sums, torch.tensor([within], dtype=torch.float64, device="cpu")]
        event = self.prepare(style)
        number = self._first + self._charge(event)
        if self._scaled is None:
            torch._foreach_mul_(sums, scale)
        else:
            before = partial(self._charge_repetition, event, number)
            sums = self._noise.release(sums, self._scaled[2], scale, number, self.position.label(), before)
        if clip is None or bound is None:
            return sums
        *sums, count = sums
        self.position.bound = clip.move(bound, 0.5 + float(count) / scale / self._plan.batch_size)
        return sums

    def write(self, sums: list[Tensor], style: Style, scale: float, within: float = 0.0) -> None:
        """The mean as the gradient of the guarded parameters, which may be stepped with once."""
        self.guard.write(self.mean(sums, style, scale, within))
        self.close_if_done()

    # What is charged

    def _events(self, first: int, stop: int, **changes: Any) -> list[Repeated]:
        """What the steps from `first` up to, not including, `stop` put on the ledger."""
        events, changes = self._plan.events_of(first, stop), {**self._marks, **changes}
        return [replace(event, **changes) for event in events] if changes else list(events)

    def _charge(self, event: Repeated) -> int:
        """One step on the ledger, in the journal and at the witness; gives its number."""
        step = self.position.done
        self.ledger.record(event)
        self.position.done += 1
        if self._journal is not None:
            if self.position.seeded:
                self._journal.check()
            else:
                self._journal.charge(self.position.done)
        if self._testimony is not None:
            self._testimony.charge(self.position.done)
        return step

    def _charge_repetition(self, event: Repeated, number: int, release: bytes) -> None:
        """A resumed seeded run makes steps again, which is the same release.

        If other sums come out, by other data, other code or arithmetic that does not repeat, it is one more release.
        """
        others = self.position.digests.others(number, release)
        if others and self._plan.correlation != Independent():
            raise CheckpointError(
                "a seeded run with correlated noise would make a step again with other sums, whose noise shares its "
                "past with that of the first time. No epsilon covers that: start again with another seed."
            )
        if others:  # also those of processes that died before they could save their ledger
            self.ledger.record(replace(event.on_the_same_batch(others), reason="repeated"))

    def past(self) -> dict[str, Any] | None:
        """The past noise that a seeded run continues with; never that of an unseeded one, which nobody may see."""
        return self._noise.past() if self.position.seeded else None

    def continue_from(self, past: Mapping[str, Any] | None) -> None:
        """Continue with the past noise of a seeded run; without it correlated noise begins again."""
        if past is not None:
            self._noise.continue_from(past)

    def lock_of(self, path: str | os.PathLike[str]) -> Lock:
        """The lock of the file that the run is about to be saved in; refused if others continue this one."""
        if self._journal is None:
            return Lock(path, CheckpointError)
        self._journal.check_held()
        return self._journal.lock if self._journal.lock.is_of(path) else Lock(path, CheckpointError)

    def count_in(self, journal: Journal) -> None:
        """Count every step in this file from here on, and no longer in the one before."""
        before, self._journal = self._journal, journal
        if before is None:
            return
        if self.position.seeded:  # which may go back: that repeats the same releases
            before.close()
        else:
            before.retire(self.position.done)
        if before.lock is not journal.lock:
            before.lock.release()

    def check_witness(self, mark: Mapping[str, Any] | None) -> int:
        """The steps that the witness of a saved run has charged; refused if it knows of a later save."""
        if mark is not None and self._testimony is None:
            self._testimony = Testimony(Witness(mark["path"], mark["every"]), self.position.planned)
        if mark is None or self._testimony is None:
            return 0
        return self._testimony.take_up(mark)

    def continue_in(self, journal: Journal, witnessed: int) -> None:
        """Continue from this file: steps that were begun there after it was saved stay charged, with their own noise.

        So do those that a witness has charged ahead, made or not. A seeded run makes them again.
        """
        self._journal = journal
        if not self.position.seeded:
            self._interrupted(journal.begun(), INTERRUPTED)
            self._interrupted(witnessed, AHEAD)
            self.leave_epoch()

    def leave_epoch(self) -> None:
        """Charge what is left of an epoch whose order was in memory only: it cannot go on, and the next one begins.

        Another order for the rest of it would be one more epoch, which nobody planned.
        """
        sampling = self._plan.sampling
        if isinstance(sampling, BallsInBins) and not self.position.seeded:
            end = -(-self.position.done // sampling.batches_per_epoch) * sampling.batches_per_epoch
            self._interrupted(min(end, self._plan.steps), INTERRUPTED)

    def _interrupted(self, begun: int, reason: str) -> None:
        done = self.position.done
        if begun > done:
            for event in self._events(done, begun, reason=reason):
                self.ledger.record(event)
            self.position.done = begun
            self.close_if_done()

    @contextlib.contextmanager
    def being_saved(self) -> Iterator[dict[str, Any] | None]:
        """A save, known to the witness before it begins and when it has ended; gives the mark for the file."""
        if self._testimony is None:
            yield None
            return
        yield self._testimony.saving(self.position.done)
        self._testimony.saved(self.position.done)
