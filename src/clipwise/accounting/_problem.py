"""From events to the question an accountant answers: which pairs, under which relation, with which caveats."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from clipwise._validate import is_count, is_finite, is_number
from clipwise.accounting._numerics.laws import Allocation, Composition, Law, gaussian, mixed
from clipwise.accounting._numerics.projected import Spread, spread
from clipwise.accounting._numerics.shuffle import ShuffledRun
from clipwise.accounting._schemes import Laws, Unsampled, scheme_of
from clipwise.accounting.events import CHANGED_DATA, UNMADE, Event, ProjectedSteps, is_event
from clipwise.accounting.relation import Relation, is_tight, relation_of
from clipwise.correlation import Independent
from clipwise.errors import AccountingError
from clipwise.sampling import FixedSize, Poisson, Sampling, public_size

__all__ = [
    "LEAST_NOISE",
    "Problem",
    "check_delta",
    "check_epsilon",
    "pose",
]

_GROUP_LIMIT = 1_000
LEAST_NOISE = 0.01
"""Below this noise multiplier a run counts as not private: epsilon would be in the tens of thousands."""

OWN_BATCHES = (
    "The batches were not drawn by private.loader but by the caller (own_batches=True). That they follow the sampling "
    "that is accounted for, each record at most once in a batch, is declared and not checked."
)

GROUPED = (
    "The ledger has {count:,} different events. Steps of nearly the same noise are counted together, with the smallest "
    "of it: this is an upper bound."
)

_MOST_NOISES = 1_000
"""Of one kind of step: an exact answer takes 2 to 15 ms for each."""

_MOST_EPOCHS = 16
"""Different ones of balls in bins: each takes up to a second."""

OTHER_RECORDS = (
    "Records were changed before the run was continued, and it continued with them as it was asked to. Epsilon is "
    "that of a record in all its forms: what it was before the change and what it is now count as one."
)

SPARE = 1e-12
"""What may be lost where no delta says how much: estimates of norms that are too small are cut off there."""


LEAST_DELTA = 1e-20
"""Below, components of mixtures that are left out as impossible would count."""


@dataclass(frozen=True)
class Problem:
    """The pairs to compose. The answer is the largest over `upper`; `lower` and `shuffled` prove a lower end.

    `tight` says that no smaller answer is true: some data reach it. `estimated` says that norms were, so that the pairs
    are worse than the truth; `lost` is a probability that no pair covers, to be added to delta.
    """

    upper: tuple[Composition, ...]
    lower: tuple[Composition, ...] | None
    shuffled: tuple[ShuffledRun, ...]
    events: tuple[Event, ...]
    relation: Relation
    unit: str
    sampling: str
    group: int
    private: bool
    tight: bool
    estimated: bool
    lost: float
    records: float | None
    warnings: tuple[str, ...]


def check_delta(delta: object) -> float:
    """A delta inside (0, 1), or an error that says why."""
    if not is_number(delta) or not 0.0 < delta < 1.0:
        raise AccountingError(f"delta must be a number between 0 and 1, both excluded, got {delta!r}.")
    if delta < LEAST_DELTA:
        raise AccountingError(f"delta must be at least {LEAST_DELTA:g}, got {delta!r}: less cannot be observed.")
    return float(delta)


def check_epsilon(epsilon: object) -> float:
    """A finite epsilon >= 0, or an error that says why."""
    if not is_finite(epsilon) or epsilon < 0:
        raise AccountingError(f"epsilon must be a finite number >= 0, got {epsilon!r}.")
    return float(epsilon)


def pose(events: Iterable[Event], relation: Relation | None = None, group: int = 1, spare: float = SPARE) -> Problem:
    """Turn events into the pairs to compose, refusing what has no meaning.

    About `spare` of delta, in all, may be lost to estimates of norms that are far too small.
    """
    merged = _merged(events)
    events = _grouped(merged)
    relation, warnings = relation_of(events, relation)
    if not is_count(group) or group > _GROUP_LIMIT:
        raise AccountingError(f"group must be an integer from 1 to {_GROUP_LIMIT}, got {group!r}.")
    units = {event.unit for event in events} or {"example"}
    if len(units) > 1:
        raise AccountingError(
            "The ledger mixes events that protect examples with events that protect clients; one epsilon cannot "
            "state both. Keep two ledgers."
        )
    schemes = [event.sampling for event in events]
    own = any(event.own_batches for event in events)
    private = all(event.noise_multiplier >= LEAST_NOISE for event in events)
    sizes = [public_size(scheme) for scheme in schemes if scheme is not None]
    spreads = _spreads(events, relation, group, spare) if private else {}
    upper, lower = _directions(events, relation, group, spreads) if private else ((), None)
    if events is not merged:
        lower = None  # smaller noise than was added proves nothing from below
        warnings = (*warnings, GROUPED.format(count=len(merged)))
    fewest = min((event.projections for event in events if isinstance(event, ProjectedSteps)), default=None)
    if fewest is not None:
        note = f"Norms were estimated from {fewest} random projections: accounted as if these were published."
        warnings = (*warnings, note)
    if own:
        warnings = (*warnings, OWN_BATCHES)
    if any(CHANGED_DATA in event.reason for event in merged):
        warnings = (*warnings, OTHER_RECORDS)
    return Problem(
        upper=upper,
        lower=lower,
        shuffled=_shuffled_runs(events, relation, group) if lower is not None else (),
        events=events,
        relation=relation,
        unit=units.pop(),
        sampling=_describe(schemes) + _correlated(events) + (", in batches that the caller drew" if own else ""),
        group=group,
        private=private,
        tight=events is merged and is_tight(events),
        estimated=fewest is not None,
        lost=math.fsum(event.count * spreads[event].lost for event in events if event in spreads),
        records=min(sizes) if sizes else None,
        warnings=warnings,
    )


def _merged(events: Iterable[Event]) -> tuple[Event, ...]:
    """Equal consecutive events counted together, as on a ledger: how a run is split changes nothing.

    Steps that were charged and perhaps not made belong to the sequence of epochs that they stand in.
    """
    found: list[Event] = []
    for event in events:
        if not is_event(event):
            raise AccountingError(f"Only events (a ledger's `events`, say) can be accounted for, got {event!r}.")
        if found and event.continues(found[-1]):
            known = found[-1] if event.reason in UNMADE else event
            found[-1] = known.repeated(found[-1].count + event.count)
        else:
            found.append(event)
    return tuple(found)


def _grouped(events: tuple[Event, ...]) -> tuple[Event, ...]:
    """The same events, or where one kind of step has more than 1,000 different noises, groups of them.

    Less noise reveals more: adding the rest gives what was released. So a group counts with its smallest noise. Nothing
    is grouped where a step is not independent of those before (shuffled batches).
    """
    if len(events) <= _MOST_NOISES:
        return events
    kinds: dict[Event, dict[float, int]] = {}
    others = []
    for event in events:
        if event.noise_multiplier <= 0 or not isinstance(event.sampling, (Poisson, FixedSize)):
            others.append(event)
            continue
        counts = kinds.setdefault(event.changed(noise_multiplier=1.0, reason="").repeated(1), {})
        counts[event.noise_multiplier] = counts.get(event.noise_multiplier, 0) + event.count
    if max(map(len, kinds.values()), default=0) <= _MOST_NOISES:
        return events
    found = [
        kind.changed(noise_multiplier=noise).repeated(count)
        for kind, counts in kinds.items()
        for noise, count in _in_groups(counts).items()
    ]
    return (*found, *others)


def _in_groups(counts: Mapping[float, int]) -> dict[float, int]:
    """At most so many noises, each the smallest of a group whose logarithms are close."""
    if len(counts) <= _MOST_NOISES:
        return dict(counts)
    noises = sorted(counts)
    edges = np.geomspace(noises[0], noises[-1], _MOST_NOISES, endpoint=False)
    found: dict[int, tuple[float, int]] = {}
    for noise, group in zip(noises, np.searchsorted(edges, noises, side="right").tolist(), strict=True):
        smallest, count = found.get(group, (noise, 0))
        found[group] = (smallest, count + counts[noise])
    return dict(found.values())


def _spreads(events: Sequence[Event], relation: Relation, group: int, spare: float) -> dict[Event, Spread]:
    """What estimated norms do to the mean shift, for each event that has such."""
    estimated = [event for event in events if isinstance(event, ProjectedSteps)]
    steps = sum(event.count for event in estimated)
    records = group * (2 if relation == "replace_one" else 1)
    found: dict[Event, Spread] = {}
    for event in estimated:
        sampled = isinstance(event.sampling, Poisson) and event.sampling.rate < 1.0
        shifts = 1 if sampled else records
        # Splitting has no proof where a sampled record is replaced, or several are sampled.
        convex = records == 1 or not sampled
        mu, widest = shifts / event.noise_multiplier, shifts / LEAST_NOISE
        found[event] = spread(event.projections, records, mu, convex, spare / steps, widest)
    return found


def _directions(
    events: tuple[Event, ...], relation: Relation, group: int, spreads: Mapping[Event, Spread]
) -> tuple[tuple[Composition, ...], tuple[Composition, ...] | None]:
    upper: list[Composition] = []
    lower: list[Composition] = []
    # The lower end of steps with exact norms is none of steps with estimated ones.
    # That of shuffled batches is proven for independent noise.
    plain = not spreads and all(event.correlation == Independent() for event in events)
    interval = plain and any(scheme_of(event.sampling).interval for event in events)
    # Disjoint calibration data composes in parallel: a record is in one of two parts, but a group may be in both.
    numbered = list(enumerate(events))
    apart = [(i, e) for i, e in numbered if e.disjoint]
    together = [(i, e) for i, e in numbered if not e.disjoint]
    for part in (together, apart) if group == 1 else (numbered,):
        for bucket, bound in ((upper, "upper"), (lower, "lower")):
            laws = [
                (mixed(law, spreads[event].parts) if event in spreads and isinstance(law, Law) else law, n)
                for i, event in part
                for law, n in _laws(event, _steps(event, relation, group, _is_first(events, i)), bound)
            ]
            composition = Composition.of(_affordable(laws))
            if composition.empty:
                continue
            bucket.append(composition)
            if composition.reversed() != composition and not composition.is_symmetric:
                bucket.append(composition.reversed())
    return tuple(upper), tuple(lower) if interval else None


def _affordable(laws: Laws) -> Laws:
    """The same, with the rarer of too many different epochs of balls in bins as plain steps, which dominate them."""
    counts: Counter[Allocation] = Counter()
    for law, n in laws:
        if isinstance(law, Allocation):
            counts[law] += n
    often = {law for law, _ in counts.most_common(_MOST_EPOCHS)}
    plain = [gaussian(law.reach) if isinstance(law, Allocation) and law not in often else law for law, _ in laws]
    return [(law, n) for law, (_, n) in zip(plain, laws, strict=True)]


def _laws(event: Event, steps: Unsampled, bound: str) -> Laws:
    scheme = scheme_of(event.sampling)
    return (scheme.upper if bound == "upper" else scheme.lower)(event.sampling, steps)


def _steps(event: Event, relation: Relation, group: int, first: bool) -> Unsampled:
    return Unsampled(1.0 / event.noise_multiplier, event.count, relation == "replace_one", group, first)


def _is_first(events: Sequence[Event], i: int) -> bool:
    """Whether an event begins a run: nothing before it was drawn by a sampling."""
    return all(event.sampling is None for event in events[:i])


def _shuffled_runs(events: tuple[Event, ...], relation: Relation, group: int) -> tuple[ShuffledRun, ...]:
    found = (
        scheme_of(event.sampling).shuffled_run(event.sampling, _steps(event, relation, group, _is_first(events, i)))
        for i, event in enumerate(events)
    )
    return tuple(run for run in found if run is not None)


def _correlated(events: Iterable[Event]) -> str:
    """What a guarantee says of noise that is correlated over steps."""
    kinds = dict.fromkeys(event.correlation for event in events if event.correlation != Independent())
    return "".join(f", noise correlated over steps by {type(kind).__name__}" for kind in kinds)


def _describe(schemes: Sequence[Sampling | None]) -> str:
    texts: list[str] = []
    for scheme in schemes:
        text = scheme_of(scheme).describe(scheme)
        if text not in texts:
            texts.append(text)
    if len(texts) > 3:
        texts = [*texts[:2], f"{len(texts) - 2} more such schemes"]
    return " and ".join(texts) or "no release at all"
