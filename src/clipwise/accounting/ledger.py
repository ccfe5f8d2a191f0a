"""The ledger: an append-only record of everything that was released."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from clipwise._json import checksum, parse_json
from clipwise._validate import is_count
from clipwise.accounting.accounts import account, account_delta
from clipwise.accounting.events import MOST, Event, decode, encode, is_event
from clipwise.accounting.guarantee import Guarantee, needed_delta, round_up
from clipwise.accounting.relation import Relation, relation_of
from clipwise.errors import BudgetSpent, LedgerError
from clipwise.files import in_turn, read_bytes, replacing

__all__ = ["Ledger"]

VERSION = 2
"""2: the relation stands in the file. 1 is read as well."""
_FORMAT = "clipwise ledger"


class Ledger:
    """What was released, in order. Events can be added, never removed or changed.

    Guarantees: a step that was recorded is in every later answer and every later file; a file that was edited, cut
    or written by a newer version is refused and left as it is.

    >>> from clipwise import GaussianSteps, Poisson
    >>> ledger = Ledger()
    >>> for _ in range(3):
    ...     ledger.record(GaussianSteps(Poisson(60_000, 256), noise_multiplier=1.1))
    >>> ledger.steps, len(ledger.events)
    (3, 1)
    """

    def __init__(self, events: Iterable[Event] = ()) -> None:
        self._run = secrets.token_hex(8)  # tells apart what different runs, or processes, recorded
        self._origin: tuple[str, tuple[Event, ...]] | None = None  # what this was read from, and of whom
        self._mechanisms: list[Event] = []
        self._counts: list[int] = []
        self._is_kept = False
        for event in events:
            self._check_one_run(event)
            self.record(event)

    def _check_one_run(self, event: Event) -> None:
        """Refuse what would become one sequence of epochs and can only be two: a run has its steps in one event."""
        if self._mechanisms and self._mechanisms[-1].same_mechanism(event) and _in_order(event):
            raise LedgerError(
                f"Two equal events in a row with {event.sampling!r}: they would count as one sequence of epochs (or "
                "turns), which two runs are not. Account for each run by itself, and add up epsilons and deltas. The "
                "steps of one run are one event, with their number."
            )

    def record(self, event: Event) -> None:
        """Append one event; equal consecutive ones are counted together."""
        if self._is_kept:
            raise LedgerError(
                "This ledger belongs to a finished run, whose epsilon is computed: record on private.ledger, then make "
                "the run."
            )
        if self._mechanisms and self._mechanisms[-1].same_mechanism(event):
            if self._counts[-1] + event.count > MOST:
                raise LedgerError(f"One kind of step cannot stand on a ledger more than {MOST:.0e} times.")
            self._counts[-1] += event.count
            return
        if not is_event(event):
            raise LedgerError(f"Only events can go on a ledger, got {event!r}.")
        self._mechanisms.append(event)
        self._counts.append(event.count)

    def kept(self) -> Ledger:
        """What stands here now. Nothing can be added to it, and what this one records later is not in it.

        >>> from clipwise import FullBatch, GaussianSteps
        >>> ledger = Ledger([GaussianSteps(FullBatch(10), 2.0)])
        >>> kept = ledger.kept()
        >>> ledger.record(GaussianSteps(FullBatch(10), 2.0))
        >>> kept.steps, ledger.steps
        (1, 2)
        """
        made = Ledger(self.events)
        made._run, made._origin, made._is_kept = self._run, self._origin, True
        return made

    @property
    def events(self) -> tuple[Event, ...]:
        """All events in order, equal consecutive ones merged."""
        return tuple(m.repeated(count) for m, count in zip(self._mechanisms, self._counts, strict=True))

    @property
    def steps(self) -> int:
        """How many training steps (and federated rounds) were recorded."""
        pairs = zip(self._mechanisms, self._counts, strict=True)
        return sum(count for m, count in pairs if m.trains)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ledger) and self.events == other.events

    def __repr__(self) -> str:
        return f"Ledger({len(self._counts)} events, {self.steps} steps, {self.relation})"

    @property
    def relation(self) -> Relation:
        """The neighbouring relation that answers are for, unless another is asked for.

        >>> from clipwise import GaussianSteps, Poisson
        >>> Ledger([GaussianSteps(Poisson(60_000, 256), 1.1)]).relation
        'zero_out'
        """
        return relation_of(self._mechanisms)[0]

    def epsilon(
        self, delta: float | None = None, accountant: str = "exact", *, relation: Relation | None = None
    ) -> float:
        """The epsilon spent so far at this `delta` (the upper end where only an interval is known)."""
        return self.guarantee(delta, accountant, relation=relation).epsilon

    def delta(self, epsilon: float, accountant: str = "exact", *, relation: Relation | None = None) -> float:
        """The delta spent so far at this `epsilon`."""
        return account_delta(self.events, epsilon, accountant, relation=relation).delta

    def guarantee(
        self, delta: float | None = None, accountant: str = "exact", *, relation: Relation | None = None, group: int = 1
    ) -> Guarantee:
        """The whole answer: epsilon with its kind, relation, sampling scheme and warnings."""
        sampling = next((event.sampling for event in self.events if event.sampling is not None), None)
        return account(self.events, needed_delta(delta, sampling), accountant, relation=relation, group=group)

    def to_json(self) -> str:
        """The ledger as one JSON object with a version and a checksum.

        >>> from clipwise.accounting import PrivateCalibration
        >>> Ledger.from_json(Ledger([PrivateCalibration(2.0)]).to_json()).events
        (PrivateCalibration(noise_multiplier=2.0, releases=1, disjoint=False, reason='calibration'),)
        """
        body: dict[str, Any] = {
            "format": _FORMAT,
            "version": VERSION,
            "run": self._run,
            "relation": self.relation,
            "events": [encode(event) for event in self.events],
        }
        return json.dumps({**body, "checksum": checksum(body)}, indent=1)

    @classmethod
    def from_json(cls, text: str | bytes) -> Ledger:
        """Read what `to_json` wrote; anything edited, cut or newer is a `LedgerError`."""
        return cls.from_dict(parse_json(text, "The ledger", LedgerError))

    @classmethod
    def from_dict(cls, record: Any) -> Ledger:
        """As `from_json`, of JSON that was read already."""
        if not isinstance(record, dict) or record.get("format") != _FORMAT:
            raise LedgerError("This is not a clipwise ledger.")
        version = record.get("version")
        if not is_count(version):
            raise LedgerError(f"The ledger's version is {version!r}, expected a positive integer.")
        if version > VERSION:
            raise LedgerError(
                f"The ledger has version {version}, this clipwise reads up to {VERSION}. Update clipwise to read it."
            )
        fields = {"format", "version", "run", "events", "checksum", *(["relation"] if version > 1 else [])}
        if set(record) != fields or not isinstance(record["events"], list) or not isinstance(record["run"], str):
            raise LedgerError("The ledger has missing or unknown fields: it was edited.")
        if record["checksum"] != checksum(record):
            raise LedgerError(
                "The ledger's checksum does not fit its events: it was edited by hand. Restore it as it was saved: "
                "older copies lack what was released since."
            )
        ledger = cls(decode(event) for event in record["events"])
        if record.get("relation", ledger.relation) != ledger.relation:
            raise LedgerError(
                f"The ledger says {record['relation']!r}, but its events support {ledger.relation!r} only."
            )
        ledger._origin = (record["run"], ledger.events)
        return ledger

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write to `path` so that a crash leaves the old or the new file, never a part.

        A file that is there already must be an earlier state of this ledger, or of the one that this was read from;
        otherwise it is kept and refused. So of two processes that read one ledger only one can write it again. A link
        stays, and the file that it points to is written.
        """
        target = Path(os.path.realpath(path))  # writing would put a file in the place of the link
        _refuse_other_names(target)
        if target.exists() and not self._continues(Ledger.load(target)):
            raise LedgerError(
                f"{target} holds releases that are not on this ledger, or that another process or run recorded; "
                "overwriting it would forget them. Load it first, or save under another name."
            )
        with replacing(target, LedgerError) as file:
            file.write(self.to_json().encode())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Ledger:
        """Read a saved ledger; a damaged file is refused with the reason and left as it is."""
        text = read_bytes(path, LedgerError)
        try:
            return cls.from_json(text)
        except LedgerError as error:
            raise LedgerError(f"{os.fspath(path)}: {error}") from error

    @classmethod
    def charge(
        cls, path: str | os.PathLike[str], events: Iterable[Event], delta: float, *, epsilon: float | None = None
    ) -> Ledger:
        """Put events on the ledger at `path` before they are released, and give that ledger as it is then.

        Any number of processes and threads may charge one file. With `epsilon`, events that would take all of it
        beyond (`epsilon`, `delta`) are refused. `Ledger().save(path)` begins a ledger: where there is none, this does
        not, since it may have been moved or removed, and what was charged there would be forgotten.

        Guarantees: when this returns, the events are in the file, and so are those of everybody else who charged it;
        together they stay within `epsilon`, if all give it. After an error nothing was charged.

        >>> import tempfile
        >>> from clipwise import FullBatch, GaussianSteps
        >>> path = Path(tempfile.mkdtemp(), "budget.ledger")
        >>> Ledger().save(path)
        >>> Ledger.charge(path, [GaussianSteps(FullBatch(100), 5.0, reason="fit a")], delta=1e-5, epsilon=1.0).steps
        1
        >>> Ledger.charge(path, [GaussianSteps(FullBatch(100), 5.0, reason="fit b")], delta=1e-5, epsilon=1.0).steps
        Traceback (most recent call last):
        clipwise.errors.BudgetSpent: .../budget.ledger: with these events epsilon would be ... at delta 1e-05, ...
        """
        place = os.path.realpath(path)  # one lock for all links to it
        if not os.path.exists(place):
            raise LedgerError(
                f"There is no ledger at {os.fspath(path)}. Begin one, once, with clipwise.Ledger().save(path). If "
                "there was one, restore it: a new one would not know what has been released."
            )
        with in_turn(place, LedgerError) as lock:
            ledger, added = cls.load(place), cls(events)
            if ledger.steps and added.steps and ledger.relation != added.relation:
                raise LedgerError(
                    f"{os.fspath(path)} is about {ledger.relation!r}, and these events about {added.relation!r}: one "
                    "epsilon cannot state both. Keep two ledgers."
                )
            if _keeps_order(ledger) and _keeps_order(added):
                raise LedgerError(
                    f"{os.fspath(path)} and these events both have batches cut from an order of the records. They are "
                    "accounted as one sequence of epochs, which two runs are not. Use Poisson sampling, or two ledgers."
                )
            if any(event.disjoint for event in (*ledger.events, *added.events)):
                raise LedgerError(
                    f"{os.fspath(path)} or these events have a calibration on records that were not trained on "
                    "(disjoint=True). Nobody knows that of the other fits on a shared ledger. Charge it with "
                    "disjoint=False, or keep two ledgers."
                )
            for event in added.events:
                ledger.record(event)
            spent = ledger.epsilon(delta)  # also refuses events that protect something else
            if epsilon is not None and not spent <= epsilon:
                raise BudgetSpent(
                    f"{os.fspath(path)}: with these events epsilon would be {round_up(spent):.3f} at delta {delta:g}, "
                    f"and the total is to be {epsilon:g}. Nothing was charged, and nothing is released."
                )
            if not lock.is_held:
                raise LedgerError(
                    f"The lock beside {os.fspath(path)} was removed while it was held. Nothing was charged."
                )
            ledger.save(place)
        return ledger

    def _continues(self, saved: Ledger) -> bool:
        """Whether everything on `saved` is known to be on this ledger."""
        assert saved._origin is not None  # it was read
        writer, events = saved._origin
        if not events:
            return True
        if writer == self._run:
            return _begins(self.events, events)
        return self._origin is not None and writer == self._origin[0] and _begins(self._origin[1], events)


def _begins(whole: Sequence[Event], part: Sequence[Event]) -> bool:
    """Whether `whole` begins with `part`."""
    if len(part) > len(whole) or tuple(part[:-1]) != tuple(whole[: len(part) - 1]):
        return False
    last, same = part[-1], whole[len(part) - 1]
    return last.same_mechanism(same) and last.count <= same.count


def _refuse_other_names(place: Path) -> None:
    """Refuse a file with hard links: it is replaced when it is written, and the other names would keep the old one."""
    if place.is_file() and place.stat().st_nlink > 1:
        raise LedgerError(
            f"{place} has other names (hard links), which would not get what is written here. Copy it to a file of "
            "its own, and remove or replace the other names."
        )


def _in_order(event: Event) -> bool:
    return event.sampling is not None and event.sampling.keeps_order


def _keeps_order(ledger: Ledger) -> bool:
    return any(map(_in_order, ledger.events))
