"""Privacy loss distributions by the Fourier transform, through the optional package dp-accounting.

Guarantees: an upper bound for delta >= 1e-8. Below, the round-off of the transform makes it under-state, so it is
refused.
"""

from __future__ import annotations

import math
from typing import Any

from clipwise.accounting._numerics.saddle import quick_epsilon
from clipwise.accounting._problem import Problem
from clipwise.accounting._schemes import uses
from clipwise.accounting.accountants.definition import Accountant, Answer
from clipwise.accounting.events import Event, ProjectedSteps
from clipwise.errors import AccountingError, MissingExtra
from clipwise.sampling import FixedSize, FullBatch, Poisson, Shuffled

__all__ = ["MIN_DELTA", "PLD"]

MIN_DELTA = 1e-8
_COARSE, _FINE = 1e-4, 1e-5
_MOST_EVENTS, _MOST_STEPS = 50, 1_000_000


def _epsilon(problem: Problem, delta: float) -> Answer:
    """Epsilon by connect-the-dots discretisation, with a finer one where epsilon is small."""
    if delta < MIN_DELTA:
        raise AccountingError(
            f"The Fourier accountant under-states epsilon below delta {MIN_DELTA:g} (round-off); got {delta:g}. "
            "Use the exact or the rdp accountant."
        )
    # Large losses get a coarser grid, or the transforms would not fit into memory; it stays an upper bound.
    rough = max(quick_epsilon(c, delta) for c in problem.upper)
    interval = _COARSE * max(1.0, rough / 50.0 if math.isfinite(rough) else 1.0)
    epsilon = max(float(d.get_epsilon_for_delta(delta)) for d in _distributions(problem, interval))
    if 0.0 < epsilon < 0.4:
        epsilon = min(epsilon, max(float(d.get_epsilon_for_delta(delta)) for d in _distributions(problem, _FINE)))
    return Answer(max(0.0, epsilon), "upper bound", "pld")


def _delta(problem: Problem, epsilon: float) -> Answer:
    """Delta by connect-the-dots discretisation; a value below 1e-8 is given as 1e-8.

    Always on the coarse grid: the round-off of the fine one, about 1e-12, can exceed what it gains.
    """
    interval = _COARSE * max(1.0, epsilon / 50.0)
    delta = max(float(d.get_delta_for_epsilon(epsilon)) for d in _distributions(problem, interval))
    return Answer(min(1.0, max(delta, MIN_DELTA)), "upper bound", "pld")


def _distributions(problem: Problem, interval: float) -> list[Any]:
    try:
        from dp_accounting.pld import privacy_loss_distribution as pld
    except ImportError as error:
        raise MissingExtra(
            "The pld accountant needs dp-accounting, which is not installed. Ask the exact accountant, which is "
            "tighter and needs nothing else, or: pip install 'clipwise[pld]'."
        ) from error
    if problem.group > 1 and any(c.terms for c in problem.upper):
        raise AccountingError("The pld accountant has no group privacy with sampling; use the exact accountant.")
    if len(problem.events) > _MOST_EVENTS:
        raise AccountingError(f"The pld accountant would take minutes for more than {_MOST_EVENTS} events; ask exact.")
    sampled = [e.count for e in problem.events if isinstance(e.sampling, Poisson) and e.sampling.rate < 1.0]
    if max(sampled, default=0) > _MOST_STEPS:
        raise AccountingError(f"The pld accountant would take minutes for more than {_MOST_STEPS:,} steps; ask exact.")
    replace = problem.relation == "replace_one"
    relation = pld.NeighborRel.REPLACE_ONE if replace else pld.NeighborRel.ADD_OR_REMOVE_ONE
    results = []
    for apart in (False, True):
        total = None
        for i, event in enumerate(problem.events):
            if event.disjoint != apart:
                continue
            piece = _event(pld, relation, event, problem.group * (2.0 if replace else 1.0), interval, first=i == 0)
            total = piece if total is None else total.compose(piece)
        if total is not None:
            results.append(total)
    return results


def _event(pld: Any, relation: Any, event: Event, sensitivity: float, interval: float, first: bool) -> Any:
    scheme = event.sampling
    common: dict[str, Any] = {"value_discretization_interval": interval, "neighboring_relation": relation}
    if isinstance(event, ProjectedSteps):
        raise AccountingError("dp-accounting has no privacy loss distribution for estimated norms; ask exact or rdp.")
    if not isinstance(scheme, (FullBatch, Poisson, Shuffled, type(None))):
        what = "fixed-size batches" if isinstance(scheme, FixedSize) else f"{type(scheme).__name__} sampling"
        raise AccountingError(f"dp-accounting has no privacy loss distribution for {what}; ask exact or rdp.")
    if isinstance(scheme, Poisson) and scheme.is_cut:
        if scheme.sample_size is None:
            raise AccountingError("The pld accountant cuts batches of a known number of records only; ask exact.")
        step = pld.from_truncated_subsampled_gaussian_mechanism(
            scheme.sample_size, scheme.rate, scheme.max_batch_size, event.noise_multiplier, **common
        )
        return step.self_compose(event.count)
    if isinstance(scheme, Poisson) and scheme.rate < 1.0:
        step = pld.from_gaussian_mechanism(event.noise_multiplier, sampling_prob=scheme.rate, **common)
        return step.self_compose(event.count)
    count = uses(scheme, event.count, first) if isinstance(scheme, Shuffled) else event.count
    # Gaussian steps add up to one Gaussian step with less noise.
    deviation = event.noise_multiplier / (sensitivity * count**0.5)
    return pld.from_gaussian_mechanism(deviation, value_discretization_interval=interval)


PLD = Accountant("pld", "upper bound", _epsilon, _delta, slow=True)
