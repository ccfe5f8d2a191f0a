"""One door to all accountants: events and a question in, a `Guarantee` out."""

from __future__ import annotations

from collections.abc import Iterable

from clipwise.accounting.events import Event
from clipwise.accounting.guarantee import Guarantee
from clipwise.accounting.problem import Accountant, Relation, check_delta, check_epsilon, pose
from clipwise.accounting.rdp import rdp_delta, rdp_epsilon

__all__ = ["Accountant", "Relation", "account", "account_delta"]


def account(
    events: Iterable[Event],
    delta: float,
    accountant: Accountant = "exact",
    relation: Relation = "add_remove",
    group: int = 1,
) -> Guarantee:
    """Epsilon at `delta` for everything in `events`."""
    check_delta(delta)
    problem = pose(events, relation, group)
    epsilon = max((rdp_epsilon(c, delta) for c in problem.upper), default=0.0) if problem.private else float("inf")
    return Guarantee(
        epsilon, delta, "upper bound", "rdp", problem.relation, problem.sampling, None, problem.warnings, problem.unit
    )


def account_delta(
    events: Iterable[Event],
    epsilon: float,
    accountant: Accountant = "exact",
    relation: Relation = "add_remove",
    group: int = 1,
) -> Guarantee:
    """Delta at `epsilon` for everything in `events`."""
    check_epsilon(epsilon)
    problem = pose(events, relation, group)
    delta = max((rdp_delta(c, epsilon) for c in problem.upper), default=0.0) if problem.private else 1.0
    return Guarantee(
        epsilon, delta, "upper bound", "rdp", problem.relation, problem.sampling, None, problem.warnings, problem.unit
    )
