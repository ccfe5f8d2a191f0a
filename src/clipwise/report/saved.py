"""A run that was saved, read strictly: everything in its files is of the kind that it should be, or refused.

The ledger is what a run is held against. Epsilon is computed from it again, and the plan must be the one that it was
recorded with.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any, cast

from clipwise._json import RESTORE, Fields
from clipwise._validate import is_count
from clipwise.accounting import ACCOUNTANTS, EARLIER, UNMADE, Event, Guarantee, Ledger, confirmed
from clipwise.calibration import CalibrationResult, RegressionResult, Result
from clipwise.correlation import Independent
from clipwise.errors import DataError, InvalidPlan, LedgerError
from clipwise.plan import Plan
from clipwise.report.folder import LEDGER, METRICS, RESULT, check_row
from clipwise.report.plans import AnyPlan, parts_of, read_plan

__all__ = ["FORMAT", "VERSION", "trained_steps", "values_of"]

FORMAT, VERSION = "clipwise run", 1
_IN_RESULT = {
    *("format", "version", "name", "task", "seed", "plan", "delta", "guarantees", "provenance"),
    *("test", "recalibrated", "warnings"),
}
_IN_RECORD = {"result", "ledger", "config", "fingerprint", "curves"}
_RESULTS: dict[str, type[Any]] = {"classification": CalibrationResult, "regression": RegressionResult}


def values_of(record: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The fields of the `Run` that a record was made of; `where` it stands begins every message.

    Guarantees: every epsilon is one that the accountants give for the ledger of the record; a record that says another
    number, or a plan that the ledger does not follow, is refused.
    """
    parts = Fields(record, where, _IN_RECORD)
    body = _body(parts.value["result"], f"{where}, {RESULT}")
    try:
        ledger = None if parts.is_null("ledger") else Ledger.from_dict(parts.value["ledger"])
    except LedgerError as error:
        raise LedgerError(f"{where}, {LEDGER}: {error}") from error
    if body.value["guarantees"] and ledger is None:
        raise DataError(
            f"{where} has no {LEDGER} beside its {RESULT}: nothing can be said of the privacy of its run. {RESTORE}"
        )
    events = () if ledger is None else ledger.events
    try:
        plan, choices = read_plan(body.object("plan"))
        _check_plan(plan, events)
        delta = None if body.is_null("delta") else body.number("delta", 0.0, 1.0)
        guarantees = _guarantees(body, events, delta)
        provenance, before = _without_fingerprint(_provenance(body.object("provenance")))
        judged = {name: _result("classification", each) for name, each in body.objects("recalibrated").items()}
        test = _result(body.text("task"), body.object("test"))
    except DataError as error:
        message = str(error)
        raise DataError(message if message.startswith(where) else f"{where}, {RESULT}: {message}") from error
    rows = parts.many("curves", lambda row: isinstance(row, Mapping), "objects")
    return {
        "name": body.text("name"),
        "plan": plan,
        "choices": choices,
        "seed": None if body.is_null("seed") else body.count("seed"),
        "delta": delta,
        "guarantees": guarantees,
        "provenance": provenance,
        "test": test,
        "recalibrated": judged,
        "curves": tuple(check_row(row, f"{where}, {METRICS}, row {k + 1}") for k, row in enumerate(rows)),
        "ledger": ledger,
        "warnings": body.texts("warnings"),
        "config": None if parts.is_null("config") else parts.text("config"),
        "fingerprint": before if parts.is_null("fingerprint") else parts.text("fingerprint"),
    }


def _body(value: Any, where: str) -> Fields:
    """The content of a result.json that this version reads."""
    if not isinstance(value, Mapping) or value.get("format") != FORMAT:
        raise DataError(f"{where} does not hold a clipwise run. {RESTORE}")
    if value.get("version") != VERSION:
        raise DataError(f"{where} has version {value.get('version')!r}, this clipwise reads {VERSION}.")
    body = Fields(value, where, _IN_RESULT)
    if body.text("task") not in _RESULTS:
        body.fail("task", "'classification' or 'regression'")
    return body


def _guarantees(body: Fields, events: tuple[Event, ...], delta: float | None) -> dict[str, Guarantee]:
    saved = body.objects("guarantees")
    if not saved:
        return {}
    if delta is None:
        body.fail("delta", "the delta of the guarantees")
    if "exact" not in saved:  # an approximation would be put forward
        body.fail("guarantees", "those of all accountants, the exact one first")
    found = {name: confirmed(name, each, events, delta) for name, each in saved.items()}
    return {name: each for name in ACCOUNTANTS if (each := found.get(name)) is not None}


def _result(task: str, record: Fields) -> Result:
    return cast(Result, _RESULTS[task].from_dict(record.value))


# The plan, and what was recorded


def trained_steps(events: Iterable[Event]) -> int:
    """How many steps of a plan these events are: no repetitions, no earlier runs, no updates that nobody planned."""
    return sum(event.count for event in events if _is_planned(event))


def lost_steps(events: Iterable[Event]) -> int:
    """How many of them were charged without moving the weights, since the run was interrupted."""
    return sum(event.count for event in events if _is_own(event) and event.reason in UNMADE)


def _is_planned(event: Event) -> bool:
    return _is_own(event) and event.reason != "repeated"


def _is_own(event: Event) -> bool:
    """Whether it is a noisy step of this run, and not of an earlier one that it continues."""
    return event.trains and event.noise_multiplier > 0 and not event.reason.startswith(EARLIER)


def _check_plan(plan: AnyPlan, events: tuple[Event, ...]) -> None:
    """Refuse a plan that has other noise, another sampling or fewer steps than the ledger was recorded with."""
    released = [event for event in events if _is_own(event)]
    if not released:
        return
    made = trained_steps(events)
    if is_count(plan.steps) and made > plan.steps:
        _refuse("steps", f"{plan.steps:,}", f"{made:,}")
    if isinstance(plan, Plan):
        _check_events(plan, released, made)
        return
    for event in released:  # of a rule of one's own: as far as it is written
        if plan.noise_multiplier is not None and plan.noise_multiplier != event.noise_multiplier:
            _refuse("noise_multiplier", f"{plan.noise_multiplier:g}", f"{event.noise_multiplier:g}")
        if _is_planned(event) and plan.sampling is not None and parts_of(plan.sampling) != parts_of(event.sampling):
            _refuse("sampling", str(parts_of(plan.sampling)), str(parts_of(event.sampling)))


def _check_events(plan: Plan, released: list[Event], made: int) -> None:
    try:
        planned = plan.events_of(0, made) if made else plan.events
    except InvalidPlan as error:
        raise DataError(f"plan: {error} But the ledger has noise. {RESTORE}") from error
    allowed = _counted(planned)
    independent = plan.correlation == Independent()  # else no step is made again
    again = {_mechanism(event.on_the_same_batch(1)) for event in planned} if independent else set()
    for event in released:
        if _mechanism(event) not in allowed and (_is_planned(event) or _mechanism(event) not in again):
            first = planned[0]
            name = "noise_multiplier" if event.sampling == first.sampling else "sampling"
            _refuse(name, str(getattr(first, name)), str(getattr(event, name)))
    if made and _counted(filter(_is_planned, released)) != allowed:
        _refuse("noise_multiplier", f"{plan.noise_multiplier}", "the same noise in other steps")


def _counted(events: Iterable[Event]) -> Counter[tuple[Any, ...]]:
    found: Counter[tuple[Any, ...]] = Counter()
    for event in events:
        found[_mechanism(event)] += event.count
    return found


def _mechanism(event: Event) -> tuple[Any, ...]:
    """What a plan determines of an event: not how often it happened, why, nor who drew the batches."""
    names = [f.name for f in fields(cast(Any, event)) if f.name not in (event.counted, "reason", "own_batches")]
    return type(event), *(getattr(event, name) for name in names)


def _refuse(name: str, planned: str, recorded: str) -> None:
    raise DataError(
        f"plan: {name} is {planned}, but the ledger has {recorded}. One of the two was edited, or they are not of one "
        "run: restore both from a copy."
    )


# The provenance


def _provenance(found: Fields) -> Mapping[str, Any]:
    """As it was written, where what pages read of it is of the right kind."""
    given = found.value
    if given.get("arm") is not None:
        found.text("arm")
    if given.get("seconds") is not None:
        found.number("seconds", 0.0)
    if "versions" in given:
        found.object("versions")
    if not isinstance(given.get("data", {}), (str, Mapping, type(None))):
        found.fail("data", "a text or an object")
    return given


def _without_fingerprint(provenance: Mapping[str, Any]) -> tuple[Mapping[str, Any], str | None]:
    """Take the digest of the data out of the provenance: earlier versions wrote it there."""
    data = provenance.get("data")
    if not isinstance(data, Mapping) or "fingerprint" not in data:
        return provenance, None
    rest = {name: value for name, value in data.items() if name != "fingerprint"}
    return {**provenance, "data": rest}, Fields(data, "provenance: data").text("fingerprint")
