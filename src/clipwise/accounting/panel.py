"""All accountants side by side for one plan or ledger."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol, get_args

from clipwise.accounting.accountant import account
from clipwise.accounting.events import Event
from clipwise.accounting.guarantee import Guarantee
from clipwise.accounting.problem import Accountant, Relation, check_delta
from clipwise.errors import AccountingError, MissingExtra

__all__ = ["HasEvents", "events_of", "privacy_panel"]


class HasEvents(Protocol):
    """A ledger (`events` is a tuple) or a plan (`events()` returns one)."""

    @property
    def events(self) -> tuple[Event, ...] | Callable[[], tuple[Event, ...]]:
        """What is or would be released."""


def events_of(source: HasEvents) -> tuple[Event, ...]:
    """The events of a plan or ledger."""
    events = source.events
    return tuple(events() if callable(events) else events)


def privacy_panel(source: HasEvents, delta: float, relation: Relation = "add_remove") -> dict[str, Guarantee]:
    """Each accountant's answer, in the order exact, rdp, pld, gdp, edgeworth; those that cannot answer are left out."""
    check_delta(delta)
    events = events_of(source)
    panel: dict[str, Guarantee] = {}
    for name in get_args(Accountant):
        start = time.perf_counter()
        try:
            panel[name] = account(events, delta, name, relation).with_(seconds=time.perf_counter() - start)
        except (AccountingError, MissingExtra):
            continue
    return panel
