"""Clipping by estimated norms (DP-SGD-JL): what can be proven, and what it costs.

The norm of a gradient g is estimated as M = ||g|| sqrt(X) from r random projections, with X distributed as chi2_r / r,
fresh in every step. Clipping by M lets a sample contribute at most R / sqrt(X). Choose a g < 1 and call a step bad for
a sample when X < 1 - g, which has probability d whatever happened before. While no step is bad, the mechanism is the
Gaussian one at noise multiplier sigma sqrt(1 - g). Whether a step is bad for the one record in question is decided by
the projections and the weights so far, and these can be published: with or without the record, some step is bad
with probability at most T d. So

    delta(epsilon) <= delta of T steps at noise multiplier sigma sqrt(1 - g)  +  T d

in both directions, for every g; the best one is looked for. Replacing a record concerns two of them: 2 T d. This is
an upper bound, never the exact value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TypeAlias

from scipy import optimize, stats

from clipwise.accounting.events import Event, GaussianSteps, ProjectedSteps
from clipwise.accounting.gaussian import gaussian_epsilon, gaussian_mu
from clipwise.accounting.guarantee import Guarantee, Kind
from clipwise.accounting.problem import Accountant, Relation
from clipwise.sampling import FixedSize

__all__ = ["has_projections", "noise_kept", "projected_delta", "projected_epsilon", "records_at_risk"]

Ask: TypeAlias = Callable[[tuple[Event, ...], float, Accountant], Guarantee]
"""Events, a delta (or an epsilon) and an accountant in, the guarantee out."""

_LEAST_NOISE = 1e-2  # below it nothing is worth computing
_SHARES = (1e-6, 0.9)  # of delta, for bad steps
_USUAL_SHARE = 0.1


def noise_kept(projections: int, failure: float) -> float:
    """sqrt(1 - g) with P(X < 1 - g) = `failure`: the part of the noise multiplier that can be accounted for.

    >>> round(noise_kept(projections=100, failure=1e-9), 3)
    0.608
    """
    # A hair below, so that rounding is on the safe side.
    return math.sqrt(float(stats.chi2.ppf(failure, projections)) / projections) * (1.0 - 1e-9)


def has_projections(events: Iterable[Event]) -> bool:
    """Whether some norms were only estimated."""
    return any(isinstance(event, ProjectedSteps) for event in events)


def projected_epsilon(
    events: tuple[Event, ...], delta: float, accountant: Accountant, ask: Ask, records: int
) -> Guarantee:
    """Epsilon at `delta`, a part of which is for bad steps; `records` is what the neighbouring data sets differ in."""
    at_risk = _steps_at_risk(events, records)

    def spent(share: float) -> Guarantee:
        found = ask(_at_reduced_noise(events, share * delta / at_risk), delta * (1.0 - share), accountant)
        return _restated(found, events, share * delta / at_risk, delta)

    usual = spent(_USUAL_SHARE)
    if not 0.0 < usual.epsilon < math.inf:
        return usual
    projections = _fewest(events)
    mu = gaussian_mu(usual.epsilon, (1.0 - _USUAL_SHARE) * delta)
    scale = mu * noise_kept(projections, _USUAL_SHARE * delta / at_risk)

    def as_if_gaussian(log_share: float) -> float:
        share = math.exp(log_share)
        return gaussian_epsilon(scale / noise_kept(projections, share * delta / at_risk), (1.0 - share) * delta)

    return min(usual, spent(math.exp(_lowest(as_if_gaussian, _SHARES))), key=lambda found: found.epsilon)


def projected_delta(
    events: tuple[Event, ...], epsilon: float, accountant: Accountant, ask: Ask, records: int
) -> Guarantee:
    """Delta at `epsilon`, the chance of a bad step included."""
    at_risk = _steps_at_risk(events, records)

    def spent(log_failure: float) -> Guarantee:
        failure = math.exp(log_failure)
        found = ask(_at_reduced_noise(events, failure), epsilon, accountant)
        return _restated(found, events, failure, min(1.0, found.delta + at_risk * failure))

    def log_delta(log_failure: float) -> float:
        return math.log(max(spent(log_failure).delta, 1e-300))

    return spent(_lowest(log_delta, (1e-20 / at_risk, 0.1 / at_risk)))


def records_at_risk(events: Iterable[Event], relation: Relation, group: int) -> int:
    """The records that neighbouring data sets differ in: replacing one concerns the old and the new one."""
    fixed = any(isinstance(event, ProjectedSteps) and isinstance(event.sampling, FixedSize) for event in events)
    return group * (2 if fixed or relation == "replace_one" else 1)


def _steps_at_risk(events: Sequence[Event], records: int) -> int:
    """In how many places an estimate that is too small would matter."""
    return records * sum(event.count for event in events if isinstance(event, ProjectedSteps))


def _at_reduced_noise(events: Sequence[Event], failure: float) -> tuple[Event, ...]:
    """The steps as those of exact norms, with the noise that is left when no step is bad."""
    found: list[Event] = []
    for event in events:
        if isinstance(event, ProjectedSteps):
            noise = event.noise_multiplier * noise_kept(event.projections, failure)
            noise = noise if noise >= _LEAST_NOISE else 0.0
            found.append(GaussianSteps(event.sampling, noise, event.steps, event.reason, event.own_batches))
        else:
            found.append(event)
    return tuple(found)


def _lowest(value: Callable[[float], float], between: tuple[float, float]) -> float:
    """The logarithm in this range with about the lowest value; every one gives a bound, so about is enough."""
    bounds = math.log(between[0]), math.log(between[1])
    return float(optimize.minimize_scalar(value, bounds=bounds, method="bounded", options={"xatol": 0.2}).x)


def _fewest(events: Sequence[Event]) -> int:
    return min(event.projections for event in events if isinstance(event, ProjectedSteps))


def _restated(found: Guarantee, events: Sequence[Event], failure: float, delta: float) -> Guarantee:
    projections = _fewest(events)
    kept = noise_kept(projections, failure)
    note = (
        f"Norms were estimated from {projections} random projections: accounted at about {kept:.2f} of the noise "
        "multiplier, and delta covers estimates that are too small."
    )
    if math.isinf(found.epsilon):
        note = f"Norms estimated from only {projections} random projections prove nothing here: use more."
    kind: Kind = found.kind if found.kind == "approximation" else "upper bound"
    # A proven lower end would be that of the mechanism with less noise, which this one is not.
    return replace(found, kind=kind, delta=delta, lower=None, warnings=(*found.warnings, note))
