"""Answers that were written down, computed again: the epsilon of a file holds only if its ledger says the same."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from typing import get_args

from clipwise._json import RESTORE, Fields
from clipwise.accounting.accountants import ACCOUNTANTS
from clipwise.accounting.accounts import account
from clipwise.accounting.events import Event
from clipwise.accounting.guarantee import Guarantee, Relation
from clipwise.errors import AccountingError, DataError, MissingExtra, NotConverged

__all__ = ["confirmed"]

_TOLERANCE = 1e-3  # relative: less than one digit of what is printed, more than versions and machines differ


def confirmed(name: str, saved: Fields, events: tuple[Event, ...], delta: float) -> Guarantee | None:
    """The answer of the accountant `name`, which `Guarantee.to_dict()` wrote, from the events once more.

    None where that accountant gives no answer now. The relation is the one that holds today: earlier versions said
    add_remove where the number of records is public, with the number that is right under zero_out.

    Guarantees: the epsilon that is returned follows from `events` alone, and one that was written down and differs is a
    `DataError`. The number of an accountant that takes seconds is not computed but kept, if it is a bound: if it is not
    below the exact one.
    """
    if name not in ACCOUNTANTS:
        raise DataError(f"{name!r} is not an accountant; there are {', '.join(ACCOUNTANTS)}. {RESTORE}")
    written = math.inf if saved.is_null("epsilon") else saved.number("epsilon", 0.0)
    seconds, group = saved.number("seconds", 0.0), saved.count("group", 1)
    if saved.number("delta") != delta:
        saved.fail("delta", f"that of the run, {delta:g}")
    relation = saved.text("relation")
    if relation not in get_args(Relation):
        saved.fail("relation", f"one of {', '.join(get_args(Relation))}")
    asked: Relation | None = None if relation == "add_remove" else relation  # type: ignore[assignment]
    exact = _again(events, delta, "exact", asked, group)
    if exact is None:
        raise DataError(f"the ledger has no epsilon at delta {delta:g}, but {written:.4g} was written down. {RESTORE}")
    if ACCOUNTANTS[name].slow and exact.kind == "numerically exact":
        if written < exact.epsilon * (1.0 - _TOLERANCE):
            _refuse(name, written, "at least ", exact)
        found = replace(exact, epsilon=written, kind=ACCOUNTANTS[name].kind, accountant=name)
        return replace(found, seconds=seconds)
    again = _again(events, delta, name, asked, group)
    if again is None:
        return None
    if again.epsilon != written and not math.isclose(again.epsilon, written, rel_tol=_TOLERANCE, abs_tol=1e-9):
        _refuse(name, written, "", again)
    return replace(again, seconds=seconds)


def _refuse(name: str, written: float, least: str, found: Guarantee) -> None:
    raise DataError(
        f"the {name} accountant is said to give epsilon = {written:.4g} at delta {found.delta:g}, but the ledger is "
        f"worth {least}{found.epsilon:.4g}. One of the two was edited, or they are not of one run: restore both from a "
        "copy. `clipwise epsilon --ledger` shows what a ledger is worth."
    )


@lru_cache(maxsize=256)
def _again(
    events: tuple[Event, ...], delta: float, name: str, relation: Relation | None, group: int
) -> Guarantee | None:
    """The seeds of an experiment share it."""
    try:
        return account(events, delta, name, relation=relation, group=group)
    except (AccountingError, MissingExtra, NotConverged):
        return None
