"""The accountants, in one registry: each is one way from a problem to epsilon or delta."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from clipwise.accounting.accountants.definition import Accountant, Answer
from clipwise.accounting.accountants.edgeworth import EDGEWORTH
from clipwise.accounting.accountants.exact import EXACT
from clipwise.accounting.accountants.gdp import GDP
from clipwise.accounting.accountants.pld import PLD
from clipwise.accounting.accountants.rdp import RDP
from clipwise.errors import AccountingError

__all__ = ["ACCOUNTANTS", "Accountant", "Answer", "accountant_named"]

ACCOUNTANTS: Mapping[str, Accountant] = MappingProxyType({one.name: one for one in (EXACT, RDP, PLD, GDP, EDGEWORTH)})
"""All accountants by name, in the order in which they are shown."""


def accountant_named(name: str) -> Accountant:
    """The accountant of this name; another name is refused.

    >>> accountant_named("gdp").kind
    'approximation'
    """
    found = ACCOUNTANTS.get(name) if isinstance(name, str) else None
    if found is None:
        raise AccountingError(f"accountant must be one of {', '.join(ACCOUNTANTS)}, got {name!r}.")
    return found
