"""The exact accountant: contour integrals, and a bound where they do not converge."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from clipwise.accounting._numerics.contour import EASY, HARD, Attempt, exact_delta, exact_epsilon
from clipwise.accounting._numerics.grid import grid_delta, grid_epsilon, rough_delta, rough_epsilon
from clipwise.accounting._numerics.laws import Composition
from clipwise.accounting._numerics.saddle import quick_delta, quick_epsilon
from clipwise.accounting._problem import Problem
from clipwise.accounting.accountants.definition import Accountant, Answer, Solver
from clipwise.accounting.accountants.rdp import rdp_delta, rdp_epsilon
from clipwise.accounting.guarantee import Kind
from clipwise.errors import NotConverged

__all__ = ["EXACT"]

_SOURCES = {"rdp": "Renyi divergences", "grid": "privacy losses on a grid"}


@dataclass(frozen=True)
class _Ways:
    """The ways to one unknown: the exact one, and the bounds that stand in for it."""

    exact: Callable[[Composition, float, Sequence[Attempt]], float]
    grid: Solver
    rough: Solver
    quick: Solver
    rdp: Solver


_EPSILON = _Ways(exact_epsilon, grid_epsilon, rough_epsilon, quick_epsilon, rdp_epsilon)
_DELTA = _Ways(exact_delta, grid_delta, rough_delta, quick_delta, rdp_delta)


def _answer(to: _Ways, problem: Problem, given: float) -> Answer:
    """The largest over directions; one whose quick bound cannot matter is not computed."""
    value, sources = -math.inf, set()
    for composition in problem.upper:
        if value >= 0.0 and to.quick(composition, given) <= value:
            continue
        found, source = _exact_or_bound(to, composition, given, value, problem.estimated)
        if found > value:
            value, sources = found, {source}
    tight = problem.tight and not problem.estimated
    kind: Kind = "numerically exact" if tight else "upper bound"
    source = sources.pop()
    if source == "exact":
        return Answer(value, kind, "exact")
    if any(composition.is_allocated for composition in problem.upper):
        return Answer(value, "upper bound", source)  # epochs of balls in bins have no contour
    note = f"The contour integral did not converge here; this is an upper bound from {_SOURCES[source]}."
    return Answer(value, "upper bound", source, (note,))


def _exact_or_bound(
    to: _Ways, composition: Composition, given: float, known: float, estimated: bool
) -> tuple[float, str]:
    """The value, or a bound of it where the contours fail; below `known` the value does not matter.

    Estimated norms only have a bound, and laws of so many pairs that trying hard takes seconds.
    """
    with contextlib.suppress(NotConverged):
        return to.exact(composition, given, EASY), "exact"  # never with epochs of balls in bins
    if known >= 0.0:
        with contextlib.suppress(NotConverged):
            rough = to.rough(composition, given)
            if rough <= known:
                return rough, "grid"
    if estimated:
        with contextlib.suppress(NotConverged):
            return to.grid(composition, given), "grid"
    if composition.is_allocated:
        with contextlib.suppress(NotConverged):
            return min((to.grid(composition, given), "grid"), (to.quick(composition, given), "rdp"))
    with contextlib.suppress(NotConverged):
        return to.exact(composition, given, HARD), "exact"
    bounds = [(to.rdp(composition, given), "rdp"), (to.quick(composition, given), "rdp")]
    with contextlib.suppress(NotConverged):
        bounds.append((to.grid(composition, given), "grid"))
    return min(bounds)


EXACT = Accountant("exact", "numerically exact", partial(_answer, _EPSILON), partial(_answer, _DELTA))
