"""What an accountant is: a name, what its answers are worth, and the way to each of two unknowns.

A new accountant is one such value in a module of its own, and its place in `ACCOUNTANTS`
(`accountants/__init__.py`): the panel, the command line, the checks of names and the table of tests read that registry.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from clipwise.accounting._numerics.laws import Composition
from clipwise.accounting._problem import Problem
from clipwise.accounting.guarantee import Kind
from clipwise.errors import AccountingError

__all__ = ["Accountant", "Answer", "Solver", "approximation", "upper_bound"]

Solver: TypeAlias = Callable[[Composition, float], float]
"""From a composition and a delta to epsilon, or from an epsilon to delta."""


@dataclass(frozen=True)
class Answer:
    """A value, what it is worth, and which accountant gave it in the end."""

    value: float
    kind: Kind
    accountant: str
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Accountant:
    """One way to answer a problem whose `upper` is not empty.

    `kind` is the best that an answer about sampled batches can be. `slow` says that an answer takes about a second, so
    that a search should come close by other means first.

    >>> from clipwise.accounting import ACCOUNTANTS
    >>> {name: accountant.kind for name, accountant in ACCOUNTANTS.items()}["rdp"]
    'upper bound'
    """

    name: str
    kind: Kind
    epsilon: Callable[[Problem, float], Answer]
    """(problem, delta) -> epsilon"""
    delta: Callable[[Problem, float], Answer]
    """(problem, epsilon) -> delta"""
    slow: bool = False


def upper_bound(name: str, epsilon: Solver, delta: Solver) -> Accountant:
    """An accountant that bounds every direction by itself; the largest bound holds for all."""

    def answer(solve: Solver, problem: Problem, given: float) -> Answer:
        return Answer(max(solve(c, given) for c in problem.upper), "upper bound", name)

    return Accountant(name, "upper bound", partial(answer, epsilon), partial(answer, delta))


def approximation(name: str, epsilon: Solver, delta: Solver) -> Accountant:
    """An accountant by a limit theorem: right where every step is a plain Gaussian one, near the truth elsewhere."""

    def answer(solve: Solver, problem: Problem, given: float) -> Answer:
        plain = not any(c.terms for c in problem.upper)
        if problem.lower is not None and not plain:
            raise AccountingError(f"{name} has no formula for fixed-size batches; ask exact or rdp.")
        value = max(solve(c, given) for c in problem.upper)
        if plain:
            return Answer(value, "numerically exact" if problem.tight else "upper bound", name)
        return Answer(value, "approximation", name)

    return Accountant(name, "approximation", partial(answer, epsilon), partial(answer, delta))
