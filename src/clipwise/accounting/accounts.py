"""One door to all accountants: events and a question in, a `Guarantee` out."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Protocol

from clipwise.accounting._numerics.contour import exact_delta, exact_epsilon
from clipwise.accounting._numerics.laws import Composition
from clipwise.accounting._numerics.shuffle import ShuffledRun, shuffled_delta, shuffled_epsilon
from clipwise.accounting._problem import LEAST_NOISE, SPARE, Problem, check_delta, check_epsilon, pose
from clipwise.accounting.accountants import ACCOUNTANTS, Answer, accountant_named
from clipwise.accounting.accountants.definition import Solver
from clipwise.accounting.events import Event, GaussianSteps
from clipwise.accounting.guarantee import Guarantee
from clipwise.accounting.relation import Relation
from clipwise.accounting.schedule import Steps
from clipwise.errors import AccountingError, MissingExtra, NotConverged
from clipwise.sampling import Sampling

__all__ = ["HasEvents", "account", "account_delta", "delta", "epsilon", "privacy_panel"]

_LARGE_EPSILON = 50.0
_NO_NOISE = (
    f"Some steps had no noise, noise on what nothing bounds, or a noise multiplier below {LEAST_NOISE:g}: nothing is "
    "private."
)
_TOO_FEW = "So few random projections prove nothing here: their estimates are too often far too small. Use more."
_SPARED = 1e-4  # the share of delta that may be lost to norms under-estimated so much that no pair covers them
_LOST_SHARE, _LEAST_SPARE = 1e-3, 1e-22


def epsilon(
    noise_multiplier: float | Steps,
    sampling: Sampling,
    steps: int,
    delta: float,
    accountant: str = "exact",
    *,
    relation: Relation | None = None,
) -> float:
    """The epsilon of `steps` steps at `delta` (the upper end where only an interval is known).

    >>> from clipwise.sampling import Poisson
    >>> 2.3 < epsilon(1.1, Poisson(60_000, 256), steps=14_040, delta=1e-5) < 2.6
    True
    >>> falling = Steps({0: 1.2, 7_020: 1.0})
    >>> 2.3 < epsilon(falling, Poisson(60_000, 256), steps=14_040, delta=1e-5) < 2.6
    True
    """
    return account(_steps(sampling, noise_multiplier, steps), delta, accountant, relation=relation).epsilon


def delta(
    noise_multiplier: float | Steps,
    sampling: Sampling,
    steps: int,
    epsilon: float,
    accountant: str = "exact",
    *,
    relation: Relation | None = None,
) -> float:
    """The delta of `steps` steps at `epsilon`.

    >>> from clipwise.sampling import Poisson
    >>> delta(1.1, Poisson(60_000, 256), steps=14_040, epsilon=3.0) < 1e-5
    True
    """
    return account_delta(_steps(sampling, noise_multiplier, steps), epsilon, accountant, relation=relation).delta


def _steps(sampling: Sampling, noise: float | Steps, steps: int) -> tuple[Event, ...]:
    if steps == 0:  # no step yet is a state of every run, though no event
        return ()
    if not isinstance(noise, Steps):
        return (GaussianSteps(sampling, noise, steps),)
    noise.check(steps)
    return tuple(GaussianSteps(sampling, each, count) for each, count in noise.stretches(0, steps))


def account(
    events: Iterable[Event],
    delta: float,
    accountant: str = "exact",
    *,
    relation: Relation | None = None,
    group: int = 1,
) -> Guarantee:
    """Epsilon at `delta` for everything in `events`.

    Guarantees: unless `kind` is "approximation", the true epsilon is at most this one (up to 1e-8 of it when
    "numerically exact", which printing rounds away).

    >>> from clipwise.sampling import FullBatch
    >>> account([GaussianSteps(FullBatch(1_000), noise_multiplier=10.0, steps=100)], delta=1e-5).printed
    '4.378'
    """
    start = time.perf_counter()
    delta = check_delta(delta)
    by = accountant_named(accountant)
    problem = pose(events, relation, group, _SPARED * delta)
    if problem.lost >= delta:
        answer = Answer(math.inf, "upper bound", by.name, (_TOO_FEW,))
    else:
        answer = _ask(problem, by.name, partial(by.epsilon, problem, delta - problem.lost), without_noise=math.inf)
    lower = _lower_end(problem, delta, answer.value, exact_epsilon, shuffled_epsilon)
    return _guarantee(problem, answer, answer.value, delta, lower, start)


def account_delta(
    events: Iterable[Event],
    epsilon: float,
    accountant: str = "exact",
    *,
    relation: Relation | None = None,
    group: int = 1,
) -> Guarantee:
    """Delta at `epsilon` for everything in `events`; `lower` is in terms of delta here."""
    start = time.perf_counter()
    epsilon = check_epsilon(epsilon)
    by = accountant_named(accountant)
    events, spare = tuple(events), SPARE
    while True:
        problem = pose(events, relation, group, spare)
        answer = _ask(problem, by.name, partial(by.delta, problem, epsilon), without_noise=1.0)
        answer = replace(answer, value=min(1.0, answer.value + problem.lost))
        less = max(_LEAST_SPARE, _SPARED * answer.value)
        if problem.lost <= _LOST_SHARE * answer.value or less >= spare:
            break
        spare = less  # what is lost should not count beside delta
    lower = _lower_end(problem, epsilon, answer.value, exact_delta, shuffled_delta)
    return _guarantee(problem, answer, epsilon, answer.value, lower, start)


class HasEvents(Protocol):
    """A ledger or a plan."""

    @property
    def events(self) -> tuple[Event, ...]:
        """What is or would be released."""


def privacy_panel(
    source: HasEvents | Iterable[Event], delta: float, *, relation: Relation | None = None, group: int = 1
) -> dict[str, Guarantee]:
    """Each accountant's answer about a plan, a ledger or some events, with the seconds it took; exact comes first.

    Those that are not installed, or have no answer for this sampling or delta, are left out.

    >>> from clipwise.accounting.ledger import Ledger
    >>> from clipwise.sampling import FullBatch
    >>> ledger = Ledger([GaussianSteps(FullBatch(1_000), noise_multiplier=10.0, steps=100)])
    >>> {name: g.printed for name, g in privacy_panel(ledger, delta=1e-5).items() if name in ("exact", "rdp")}
    {'exact': '4.378', 'rdp': '4.729'}
    """
    events = tuple(source if isinstance(source, Iterable) else source.events)
    panel = {"exact": account(events, delta, relation=relation, group=group)}  # a question it refuses is a bad one
    for name in list(ACCOUNTANTS)[1:]:
        try:
            panel[name] = account(events, delta, name, relation=relation, group=group)
        except (AccountingError, MissingExtra):
            continue
    return panel


def _ask(problem: Problem, name: str, question: Callable[[], Answer], without_noise: float) -> Answer:
    """The accountant's answer, unless none is needed."""
    if not problem.private:
        return Answer(without_noise, "upper bound", name, (_NO_NOISE,))
    return question() if problem.upper else Answer(0.0, "numerically exact", name)


def _lower_end(
    problem: Problem, given: float, upper: float, solve: Solver, shuffled: Callable[[ShuffledRun, float], float]
) -> float | None:
    """What is proven from below where only an interval is known."""
    if problem.lower is None:
        return None
    composed = (_or_zero(solve, c, given) for c in problem.lower)
    return min(upper, max([0.0, *composed, *(shuffled(run, given) for run in problem.shuffled)]))


def _or_zero(solve: Solver, composition: Composition, given: float) -> float:
    try:
        return solve(composition, given)
    except NotConverged:
        return 0.0


def _guarantee(
    problem: Problem, answer: Answer, epsilon: float, delta: float, lower: float | None, start: float
) -> Guarantee:
    return Guarantee(
        epsilon=epsilon,
        delta=delta,
        kind=answer.kind,
        accountant=answer.accountant,
        relation=problem.relation,
        sampling=problem.sampling,
        lower=lower,
        warnings=problem.warnings + answer.warnings + _warnings(problem, epsilon, delta),
        unit=problem.unit,
        group=problem.group,
        seconds=time.perf_counter() - start,
    )


def _warnings(problem: Problem, epsilon: float, delta: float) -> tuple[str, ...]:
    found = []
    if problem.records is not None and delta > 1.0 / problem.records:
        found.append(
            f"delta {delta:g} is over 1/{problem.records:.10g}: it allows publishing a record outright now and then."
        )
    if problem.private and epsilon > _LARGE_EPSILON:
        found.append(f"epsilon over {_LARGE_EPSILON:g} promises next to nothing.")
    return tuple(found)
