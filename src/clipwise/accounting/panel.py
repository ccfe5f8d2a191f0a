"""All accountants side by side for one plan or ledger."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, get_args

from clipwise.accounting._problem import Accountant, Relation, check_delta
from clipwise.accounting.account import account
from clipwise.accounting.events import Event
from clipwise.accounting.guarantee import Guarantee
from clipwise.errors import AccountingError, MissingExtra

__all__ = ["HasEvents", "panel_of", "privacy_panel"]


class HasEvents(Protocol):
    """A ledger (`events` is a tuple) or a plan (`events()` returns one)."""

    @property
    def events(self) -> tuple[Event, ...] | Callable[[], tuple[Event, ...]]:
        """What is or would be released."""


def privacy_panel(source: HasEvents, delta: float, relation: Relation | None = None) -> dict[str, Guarantee]:
    """Each accountant's answer, in the order exact, rdp, pld, gdp, edgeworth, with the seconds it took.

    Those that are not installed, or have no answer for this sampling or delta, are left out.

    >>> from clipwise.accounting.ledger import Ledger
    >>> from clipwise.accounting.events import GaussianSteps
    >>> from clipwise.sampling import FullBatch
    >>> ledger = Ledger([GaussianSteps(FullBatch(1_000), noise_multiplier=10.0, steps=100)])
    >>> {name: g.printed for name, g in privacy_panel(ledger, delta=1e-5).items() if name in ("exact", "rdp")}
    {'exact': '4.378', 'rdp': '4.729'}
    """
    events = source.events
    return panel_of(tuple(events() if callable(events) else events), delta, relation)


def panel_of(
    events: tuple[Event, ...], delta: float, relation: Relation | None = None, group: int = 1
) -> dict[str, Guarantee]:
    """The panel of some events, also for a group of records."""
    check_delta(delta)
    panel: dict[str, Guarantee] = {"exact": account(events, delta, "exact", relation, group)}
    for name in get_args(Accountant)[1:]:
        try:
            panel[name] = account(events, delta, name, relation, group)
        except (AccountingError, MissingExtra):
            continue
    return panel
