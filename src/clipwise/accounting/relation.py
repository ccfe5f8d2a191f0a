"""Which neighbouring data sets a guarantee is about: what the sampling supports, and nothing else.

| sampling | number of records | relations that hold, the default first |
| --- | --- | --- |
| `Poisson(rate=...)` | any; nothing of the mechanism depends on it | add_remove, zero_out, replace_one |
| `Poisson(sample_size=...)`, `CyclicPoisson`, `FullBatch`, `Shuffled`, `BallsInBins` | public | zero_out, replace_one |
| `FixedSize` | public | replace_one |
| calibration statistics, which are sums over all records | any | add_remove, zero_out, replace_one |

With a public number n the rate, the divisor or the order of an epoch is made from n, so a data set with one record
more would run another mechanism: there is no promise about adding a record. Blanking one (its contribution becomes
zero) is the comparison that the mechanism allows, and for Poisson and full batches it costs the same epsilon. For
batches of a fixed size only replacing is proven.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import get_args

from clipwise.accounting._schemes import OF_A_RATE, scheme_of
from clipwise.accounting.events import FIT, Event
from clipwise.accounting.guarantee import Relation
from clipwise.errors import AccountingError
from clipwise.sampling import FullBatch, Poisson

__all__ = ["Relation", "is_tight", "relation_of"]


def relation_of(events: Iterable[Event], asked: Relation | None = None) -> tuple[Relation, tuple[str, ...]]:
    """The relation that an answer about these events is for, and a warning where it is not the one asked for.

    >>> from clipwise import GaussianSteps, Poisson
    >>> relation_of([GaussianSteps(Poisson(sample_size=60_000, batch_size=256), 1.1)])[0]
    'zero_out'
    >>> relation_of([GaussianSteps(Poisson(rate=0.004, batch_size=256), 1.1)])[0]
    'add_remove'
    """
    if asked is not None and asked not in get_args(Relation):
        raise AccountingError(f"relation must be None or one of {', '.join(get_args(Relation))}, got {asked!r}.")
    held = [(event.sampling, scheme_of(event.sampling).relations(event.sampling)) for event in events]
    common = [relation for relation in OF_A_RATE if all(relation in relations for _, relations in held)]
    if asked is None or asked in common:
        return asked or common[0], ()
    if asked == "add_remove":
        scheme = next(sampling for sampling, relations in held if asked not in relations)
        raise AccountingError(
            f"relation='add_remove' does not hold for {scheme!r}: its number of records is public and part of the "
            "mechanism, so a data set with one record more would run another one. Draw with a public rate, "
            "Poisson(rate=..., batch_size=...), or leave relation out: what holds here is "
            f"{common[0]}{', at the same epsilon' if isinstance(scheme, (Poisson, FullBatch)) else ''}."
        )
    return common[0], (
        "Batches of a fixed size have a meaning only for replacing a record, so the relation is replace_one.",
    )


def is_tight(events: Iterable[Event]) -> bool:
    """Whether the laws that are accounted are reached by some data; else an answer is an upper bound at best."""
    events = tuple(events)
    fits = {event.reason.split(" ")[1] for event in events if event.reason.startswith(f"{FIT} ")}
    if len(fits) > 1:  # of a cross-validation, for example: not every record is in every fit
        return False
    return all(scheme_of(event.sampling).is_tight(event.sampling) for event in events)
