"""One door to all accountants: events and a question in, a `Guarantee` out."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import get_args

from clipwise.accounting._numerics.contour import EASY, HARD, Attempt, NotConverged, exact_delta, exact_epsilon
from clipwise.accounting._numerics.grid import grid_delta, grid_epsilon, rough_delta, rough_epsilon
from clipwise.accounting._numerics.laws import Composition
from clipwise.accounting._numerics.saddle import quick_delta, quick_epsilon
from clipwise.accounting._numerics.shuffle import shuffled_delta, shuffled_epsilon
from clipwise.accounting._problem import (
    LEAST_NOISE,
    SPARE,
    Accountant,
    Problem,
    Relation,
    check_delta,
    check_epsilon,
    pose,
)
from clipwise.accounting.accountants.edgeworth import edgeworth_delta, edgeworth_epsilon
from clipwise.accounting.accountants.gdp import gdp_delta, gdp_epsilon
from clipwise.accounting.accountants.pld import pld_delta, pld_epsilon
from clipwise.accounting.accountants.rdp import rdp_delta, rdp_epsilon
from clipwise.accounting.events import Event
from clipwise.accounting.guarantee import Guarantee, Kind
from clipwise.errors import AccountingError

__all__ = ["Accountant", "Relation", "account", "account_delta"]

_LARGE_EPSILON = 50.0
_NO_NOISE = f"Some steps had no noise, or a noise multiplier below {LEAST_NOISE:g}: nothing is private."
_TOO_FEW = "So few random projections prove nothing here: their estimates are too often far too small. Use more."
_SPARED = 1e-4  # the share of delta that may be lost to norms under-estimated so much that no pair covers them
_LOST_SHARE, _LEAST_SPARE = 1e-3, 1e-22
_SOURCES = {"rdp": "Renyi divergences", "grid": "privacy losses on a grid"}


@dataclass(frozen=True)
class _Answer:
    value: float
    kind: Kind
    accountant: str
    warnings: tuple[str, ...] = ()


def account(
    events: Iterable[Event],
    delta: float,
    accountant: Accountant = "exact",
    relation: Relation | None = None,
    group: int = 1,
) -> Guarantee:
    """Epsilon at `delta` for everything in `events`.

    Guarantees: unless `kind` is "approximation", the true epsilon is at most this one (up to 1e-8 of it when
    "numerically exact", which printing rounds away).
    """
    start = time.perf_counter()
    delta = check_delta(delta)
    problem = _pose(events, relation, group, accountant, _SPARED * delta)
    if not problem.private:
        answer = _Answer(math.inf, "upper bound", accountant, (_NO_NOISE,))
    elif problem.lost >= delta:
        answer = _Answer(math.inf, "upper bound", accountant, (_TOO_FEW,))
    elif problem.upper:
        answer = _answer(problem, delta - problem.lost, accountant, _EPSILON)
    else:
        answer = _Answer(0.0, "numerically exact", accountant)
    lower = _lower_epsilon(problem, delta, answer.value) if problem.lower is not None else None
    warnings = problem.warnings + answer.warnings + _warnings(problem, answer.value, delta)
    return _guarantee(problem, answer, answer.value, delta, lower, warnings, time.perf_counter() - start)


def account_delta(
    events: Iterable[Event],
    epsilon: float,
    accountant: Accountant = "exact",
    relation: Relation | None = None,
    group: int = 1,
) -> Guarantee:
    """Delta at `epsilon` for everything in `events`; `lower` is in terms of delta here."""
    start = time.perf_counter()
    epsilon = check_epsilon(epsilon)
    events, spare = tuple(events), SPARE
    while True:
        problem = _pose(events, relation, group, accountant, spare)
        if not problem.private:
            answer = _Answer(1.0, "upper bound", accountant, (_NO_NOISE,))
        elif problem.upper:
            answer = _answer(problem, epsilon, accountant, _DELTA)
            answer = replace(answer, value=min(1.0, answer.value + problem.lost))
        else:
            answer = _Answer(0.0, "numerically exact", accountant)
        less = max(_LEAST_SPARE, _SPARED * answer.value)
        if problem.lost <= _LOST_SHARE * answer.value or less >= spare:
            break
        spare = less  # what is lost should not count beside delta
    lower = _lower_delta(problem, epsilon, answer.value) if problem.lower is not None else None
    warnings = problem.warnings + answer.warnings + _warnings(problem, epsilon, answer.value)
    return _guarantee(problem, answer, epsilon, answer.value, lower, warnings, time.perf_counter() - start)


def _pose(events: Iterable[Event], relation: Relation | None, group: int, accountant: str, spare: float) -> Problem:
    if accountant not in get_args(Accountant):
        raise AccountingError(f"accountant must be one of {', '.join(get_args(Accountant))}, got {accountant!r}.")
    return pose(events, relation, group, spare)


def _guarantee(
    problem: Problem,
    answer: _Answer,
    epsilon: float,
    delta: float,
    lower: float | None,
    warnings: tuple[str, ...],
    seconds: float,
) -> Guarantee:
    return Guarantee(
        epsilon=epsilon,
        delta=delta,
        kind=answer.kind,
        accountant=answer.accountant,
        relation=problem.relation,
        sampling=problem.sampling,
        lower=lower,
        warnings=warnings,
        unit=problem.unit,
        group=problem.group,
        seconds=seconds,
    )


@dataclass(frozen=True)
class _Question:
    """The accountants' functions for one unknown, epsilon or delta."""

    exact: Callable[[Composition, float, Sequence[Attempt]], float]
    grid: Callable[[Composition, float], float]
    rough: Callable[[Composition, float], float]
    quick: Callable[[Composition, float], float]
    rdp: Callable[[Composition, float], float]
    pld: Callable[[Problem, float], float]
    gdp: Callable[[Composition, float], float]
    edgeworth: Callable[[Composition, float], float]


_EPSILON = _Question(
    exact_epsilon, grid_epsilon, rough_epsilon, quick_epsilon, rdp_epsilon, pld_epsilon, gdp_epsilon, edgeworth_epsilon
)
_DELTA = _Question(exact_delta, grid_delta, rough_delta, quick_delta, rdp_delta, pld_delta, gdp_delta, edgeworth_delta)


def _answer(problem: Problem, given: float, accountant: str, ask: _Question) -> _Answer:
    interval = problem.lower is not None
    if accountant == "exact":
        return _exact(problem, given, ask)
    if accountant == "rdp":
        return _Answer(max(ask.rdp(c, given) for c in problem.upper), "upper bound", "rdp")
    if accountant == "pld":
        return _Answer(ask.pld(problem, given), "upper bound", "pld")
    plain = not any(c.terms for c in problem.upper)
    if interval and not plain:
        raise AccountingError(f"{accountant} has no formula for fixed-size batches; ask exact or rdp.")
    value = max(ask.gdp(c, given) if accountant == "gdp" else ask.edgeworth(c, given) for c in problem.upper)
    if plain:
        return _Answer(value, "numerically exact" if problem.tight else "upper bound", accountant)
    return _Answer(value, "approximation", accountant)


def _exact(problem: Problem, given: float, ask: _Question) -> _Answer:
    """The largest over directions; one whose quick bound cannot matter is not computed."""
    value, sources = -math.inf, set()
    for composition in problem.upper:
        if value >= 0.0 and ask.quick(composition, given) <= value:
            continue
        found, source = _exact_or_bound(composition, given, ask, value, problem.estimated)
        if found > value:
            value, sources = found, {source}
    tight = problem.tight and not problem.estimated
    kind: Kind = "numerically exact" if tight else "upper bound"
    source = sources.pop()
    if source == "exact":
        return _Answer(value, kind, "exact")
    note = f"The contour integral did not converge here; this is an upper bound from {_SOURCES[source]}."
    return _Answer(value, "upper bound", source, (note,))


def _exact_or_bound(
    composition: Composition, given: float, ask: _Question, known: float, estimated: bool
) -> tuple[float, str]:
    """The value, or a bound of it where the contours fail; below `known` the value does not matter.

    Estimated norms only have a bound, and laws of so many pairs that trying hard takes seconds.
    """
    with contextlib.suppress(NotConverged):
        return ask.exact(composition, given, EASY), "exact"
    if known >= 0.0:
        with contextlib.suppress(NotConverged):
            rough = ask.rough(composition, given)
            if rough <= known:
                return rough, "grid"
    if estimated:
        with contextlib.suppress(NotConverged):
            return ask.grid(composition, given), "grid"
    with contextlib.suppress(NotConverged):
        return ask.exact(composition, given, HARD), "exact"
    bounds = [(ask.rdp(composition, given), "rdp"), (ask.quick(composition, given), "rdp")]
    with contextlib.suppress(NotConverged):
        bounds.append((ask.grid(composition, given), "grid"))
    return min(bounds)


def _lower_epsilon(problem: Problem, delta: float, upper: float) -> float:
    return min(
        upper,
        max(
            [_or_zero(exact_epsilon, c, delta) for c in problem.lower or ()]
            + [0.0]
            + [shuffled_epsilon(run, delta) for run in problem.shuffled]
        ),
    )


def _lower_delta(problem: Problem, epsilon: float, upper: float) -> float:
    return min(
        upper,
        max(
            [_or_zero(exact_delta, c, epsilon) for c in problem.lower or ()]
            + [0.0]
            + [shuffled_delta(run, epsilon) for run in problem.shuffled]
        ),
    )


def _or_zero(function: Callable[[Composition, float], float], composition: Composition, given: float) -> float:
    try:
        return function(composition, given)
    except NotConverged:
        return 0.0


def _warnings(problem: Problem, epsilon: float, delta: float) -> tuple[str, ...]:
    found = []
    if problem.records is not None and delta > 1.0 / problem.records:
        found.append(
            f"delta {delta:g} is over 1/{problem.records:.10g}: it allows publishing a record outright now and then."
        )
    if problem.private and epsilon > _LARGE_EPSILON:
        found.append(f"epsilon over {_LARGE_EPSILON:g} promises next to nothing.")
    return tuple(found)
