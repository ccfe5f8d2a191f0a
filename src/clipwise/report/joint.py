"""What all private runs of a page cost together, where that can be said."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from clipwise.accounting import Event, Guarantee, Relation, account
from clipwise.errors import AccountingError
from clipwise.report.run import Run
from clipwise.sampling import Shuffled

__all__ = ["Joint", "joint_of"]


@dataclass(frozen=True)
class Joint:
    """The private runs of a page: how many they are, and their joint guarantee.

    None holds for runs that draw from one seed: they may share coins and noise, which then cancel. `shared` are their
    names.
    """

    runs: int
    guarantee: Guarantee | None
    shared: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.guarantee is not None:
            return self.guarantee.statement()
        named = ", ".join(repr(name) for name in self.shared)
        return f"no joint epsilon, since runs of {named} draw from one and the same seed and may share their noise."


def joint_of(runs: Iterable[Run]) -> Joint | None:
    """What the private ones of these runs cost together; None if there are fewer than two, or nothing joint to say.

    The runs are taken to use the same records; where they do not, this is an upper bound.
    """
    private = [run for run in runs if run.is_private]
    if len(private) < 2 or any(run.delta is None for run in private):
        return None
    drawn = Counter(run.draws_from for run in private)
    shared = [run.name for run in private if run.draws_from is not None and drawn[run.draws_from] > 1]
    if shared:
        return Joint(len(private), None, tuple(dict.fromkeys(shared)))
    try:
        return Joint(len(private), _together(private))
    except AccountingError:
        return None  # runs that protect different things, clients and examples, have no joint epsilon


def _together(runs: Sequence[Run]) -> Guarantee:
    """Shuffled runs are accounted apart, since a ledger is one sequence of epochs, and added up; all others compose."""
    apart = [run for run in runs if _is_shuffled(run)]
    rest = [run for run in runs if not _is_shuffled(run)]
    groups = [[run] for run in apart] + ([rest] if rest else [])
    parts = [account(_events(group), _least_delta(group)) for group in groups]
    relations: set[str] = {part.relation for part in parts}
    if len(relations) > 1:
        common: Relation = "replace_one" if "replace_one" in relations else "zero_out"
        parts = [account(_events(group), _least_delta(group), relation=common) for group in groups]
    if len(parts) == 1:
        return parts[0]
    epsilon, delta = (math.fsum(getattr(part, name) for part in parts) for name in ("epsilon", "delta"))
    sampling = " and ".join(dict.fromkeys(part.sampling for part in parts))
    return replace(parts[0], epsilon=epsilon, delta=delta, kind="upper bound", sampling=sampling, lower=None)


def _events(runs: Sequence[Run]) -> tuple[Event, ...]:
    return tuple(event for run in runs if run.ledger is not None for event in run.ledger.events)


def _least_delta(runs: Sequence[Run]) -> float:
    return min(run.delta for run in runs if run.delta is not None)


def _is_shuffled(run: Run) -> bool:
    return any(isinstance(getattr(event, "sampling", None), Shuffled) for event in _events([run]))
