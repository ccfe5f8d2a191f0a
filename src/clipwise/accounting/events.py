"""Events: what was released, as plain facts. Accountants read these, never a bare sampling rate.

A kind of event is one frozen dataclass below and its place in `_KINDS`; `encode` and `decode` are its JSON form.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, TypeGuard, TypeVar, cast

from clipwise._validate import MOST_NOISE, is_count, is_noise
from clipwise.accounting._schemes import check_correlation, scheme_of
from clipwise.correlation import CORRELATIONS, Correlation, Independent
from clipwise.errors import AccountingError, ClipwiseError, LedgerError
from clipwise.sampling import SAMPLINGS, FullBatch, Poisson, Sampling, arguments, made_from

__all__ = [
    "AHEAD",
    "CHANGED_DATA",
    "EARLIER",
    "INTERRUPTED",
    "UNMADE",
    "Event",
    "FederatedRounds",
    "GaussianSteps",
    "PrivateCalibration",
    "PrivateStatistics",
    "ProjectedSteps",
    "as_earlier",
    "check_projected_sampling",
    "decode",
    "encode",
    "is_event",
]

MOST = 10**12
"""Steps, or records: more than anybody has, and few enough for double precision."""

CHANGED_DATA = "changed data"
"""The reason of steps on other records than the run was begun with."""
EARLIER = "earlier run"
"""The reason of what a run released that another one continues."""

FIT = "fit"
"""The reason of what a fit of an estimator released begins with it and the name of the fit."""
INTERRUPTED, AHEAD = "interrupted", "charged ahead"
UNMADE = (INTERRUPTED, AHEAD)
"""The reasons of steps of a run that were charged, and perhaps not made, since it was interrupted."""

E = TypeVar("E", bound="Event")


def _check_noise(name: str, noise: object) -> None:
    if not is_noise(noise):
        raise AccountingError(
            f"{name} must be a finite number >= 0 (0 means not private) and at most {MOST_NOISE:g}, got {noise!r}."
        )


def _check_count(name: str, count: object) -> None:
    if not is_count(count):
        raise AccountingError(f"{name} must be a positive integer, got {count!r}.")
    if count > MOST:
        raise AccountingError(f"{name} must be at most {MOST:.0e}, got a larger number.")


def _check_text(name: str, text: object) -> None:
    if not isinstance(text, str):
        raise AccountingError(f"{name} must be a text, got {text!r}.")


def _check_flag(name: str, flag: object) -> None:
    if not isinstance(flag, bool):
        raise AccountingError(f"{name} must be True or False, got {flag!r}.")


def _check_sampling(name: str, sampling: Any) -> None:
    if not any(isinstance(sampling, kind) for kind in SAMPLINGS.values()):
        known = [f"cw.{kind.__name__}" for kind in SAMPLINGS.values()]
        raise AccountingError(
            f"{name} must be {', '.join(known[:-1])} or {known[-1]}, got {sampling!r}. "
            "A bare rate does not say how batches were drawn."
        )
    if max(sampling.sample_size or 0, getattr(sampling, "largest", None) or 0) > MOST:
        raise AccountingError(f"sample_size must be at most {MOST:.0e} for accounting.")
    if isinstance(sampling, Poisson) and sampling.rate < 1 / MOST:
        raise AccountingError(f"rate must be at least {1 / MOST:.0e} for accounting, got {sampling.rate!r}.")


def _check_correlation(name: str, correlation: Any) -> None:
    if type(correlation) not in CORRELATIONS.values():  # what others do is not known
        raise AccountingError(f"{name} must be a value such as cw.Banded(8), got {correlation!r}.")


_CHECKS: dict[str, Callable[[str, Any], None]] = {
    "sampling": _check_sampling,
    "noise_multiplier": _check_noise,
    **dict.fromkeys(("steps", "rounds", "releases", "projections"), _check_count),
    **dict.fromkeys(("own_batches", "disjoint"), _check_flag),
    "reason": _check_text,
    "correlation": _check_correlation,
}
"""What the fields of events may hold, by name."""


class Event:
    """Something that was released, a number of times. Each kind is a frozen dataclass with fields of `_CHECKS`."""

    counted: ClassVar[str]
    """The field that says how often the mechanism ran."""
    unit: ClassVar[str] = "example"
    """Whose privacy is protected."""
    trains: ClassVar[bool] = True
    """Whether it is a training step (or round)."""

    sampling: Sampling | None
    """How its records were drawn; None: all of them, whatever their number."""
    noise_multiplier: float
    reason: str
    own_batches: bool = False
    disjoint: bool = False
    correlation: Correlation = Independent()

    def __post_init__(self) -> None:
        for name in _names(type(self)):
            _CHECKS[name](name, getattr(self, name))

    @property
    def count(self) -> int:
        """How often the mechanism ran."""
        return cast(int, getattr(self, self.counted))

    def repeated(self: E, count: int) -> E:
        """The same mechanism, run `count` times."""
        return self.changed(**{self.counted: count})

    def on_the_same_batch(self: E, count: int) -> E:
        """The mechanism run `count` times more on a batch that was drawn before: without amplification.

        Given what was released first, a record of that batch is in these for sure, so each is at worst a Gaussian step.
        Where batches are cut and the number of records is not public, another record may take its place, too.

        >>> from clipwise.sampling import Poisson
        >>> GaussianSteps(Poisson(1_000, 10), 2.0, 50).on_the_same_batch(3).sampling
        FullBatch(sample_size=1000)
        """
        sampling = self.sampling
        if sampling is None:
            return self.repeated(count)
        if sampling.sample_size is not None:
            return self.repeated(count).changed(sampling=FullBatch(sampling.sample_size))
        halved = (
            self.noise_multiplier / 2 if isinstance(sampling, Poisson) and sampling.is_cut else self.noise_multiplier
        )
        surely = Poisson(rate=1.0, batch_size=sampling.batch_size)
        return self.repeated(count).changed(sampling=surely, noise_multiplier=halved)

    def changed(self: E, **values: Any) -> E:
        """The same event with other values of these fields."""
        return cast(E, replace(cast(Any, self), **values))

    def same_mechanism(self, other: object) -> bool:
        """Whether `other` differs at most in how often it ran."""
        if type(other) is not type(self):
            return False
        names = [name for name in _names(type(self)) if name != self.counted]
        return [getattr(self, name) for name in names] == [getattr(other, name) for name in names]

    def continues(self, before: Event) -> bool:
        """Whether these are further steps of the same run, after an event that stands just before.

        An epoch of balls in bins that was interrupted is charged to its end, so that the run goes on in its sequence.
        """
        if self.sampling is not None and self.sampling.hides_order and {self.reason, before.reason} & set(UNMADE):
            return self.changed(reason=before.reason).same_mechanism(before)
        return self.same_mechanism(before)


def _names(kind: type[Event]) -> tuple[str, ...]:
    return tuple(f.name for f in fields(cast(Any, kind)))


@dataclass(frozen=True)
class GaussianSteps(Event):
    """`steps` optimizer steps, each a noisy clipped sum over a batch drawn by `sampling`.

    `noise_multiplier` is the noise's standard deviation over the joint sensitivity of one sample. A schedule (of
    noise, of rate, of clipping) is a sequence of such events; `reason` says why they happened. `own_batches`: the
    caller drew the batches, and declares that they follow `sampling`. `correlation` is that of the noise over steps,
    which may have begun again at any of them.

    >>> from clipwise.sampling import Poisson
    >>> GaussianSteps(Poisson(60_000, 256), noise_multiplier=1.1, steps=14_040).count
    14040
    """

    counted = "steps"

    sampling: Sampling
    noise_multiplier: float
    steps: int = 1
    reason: str = "training"
    own_batches: bool = False
    correlation: Correlation = Independent()  # noqa: RUF009 - a frozen value

    def __post_init__(self) -> None:
        super().__post_init__()
        check_correlation(self.sampling, self.correlation)
        if self.own_batches and self.sampling.hides_order:
            raise AccountingError(
                f"{type(self.sampling).__name__} is not accounted for with own_batches=True: nothing shows that every "
                "record's batch is drawn afresh in each epoch, independently of the others and unknown to anybody, nor "
                "where an epoch begins. Use private.loader(dataset); a shuffling loader of your own is cw.Shuffled."
            )
        if self.own_batches and self.correlation.bands != 1:
            # An epoch of a caller's loader may begin at any step, or leave out its last batch.
            raise AccountingError(
                f"{self.correlation!r} is not accounted for with own_batches=True: nothing shows that the caller's "
                "epochs or groups begin where the noise expects them. Use private.loader(dataset), or Independent()."
            )


def check_projected_sampling(sampling: Sampling) -> None:
    """Refuse schemes in which a record takes the place of another: then the estimates for both of them matter."""
    unproven = scheme_of(sampling).unproven(sampling)
    if unproven is not None:
        raise AccountingError(f"estimated norms have no proof for {unproven}, or use exact norms.")


@dataclass(frozen=True)
class ProjectedSteps(Event):
    """Steps whose norms were only estimated, each from `projections` fresh random ones (DP-SGD-JL).

    An estimate that is too small lets a sample contribute more than the sensitivity that `noise_multiplier` refers to,
    so such steps are never accounted like exact ones (`_numerics/projected.py` says how). All records of a step share
    its projections.

    >>> from clipwise.sampling import Poisson
    >>> ProjectedSteps(Poisson(60_000, 256), noise_multiplier=1.1, projections=64, steps=10).count
    10
    """

    counted = "steps"

    sampling: Sampling
    noise_multiplier: float
    projections: int
    steps: int = 1
    reason: str = "training"
    own_batches: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_projected_sampling(self.sampling)


@dataclass(frozen=True)
class FederatedRounds(Event):
    """`rounds` noisy sums over clients, drawn by `sampling` among the clients. Protects a whole client.

    >>> from clipwise.sampling import Poisson
    >>> FederatedRounds(Poisson(1_000, 50), noise_multiplier=1.0, rounds=20).unit
    'client'
    """

    counted = "rounds"
    unit = "client"

    sampling: Sampling
    noise_multiplier: float
    rounds: int = 1
    reason: str = "federated"


@dataclass(frozen=True)
class PrivateCalibration(Event):
    """`releases` noisy statistics of a calibration set (every record each time), such as a private temperature.

    `disjoint=True` states that no calibration record was trained on; the two sets then compose in parallel.

    >>> PrivateCalibration(noise_multiplier=2.0, disjoint=True).count
    1
    """

    counted = "releases"
    trains = False
    sampling = None

    noise_multiplier: float
    releases: int = 1
    disjoint: bool = False
    reason: str = "calibration"


@dataclass(frozen=True)
class PrivateStatistics(Event):
    """`releases` noisy counts or sums over all records, such as a private schema. Not disjoint from the training.

    >>> PrivateStatistics(noise_multiplier=2.0).count
    1
    """

    counted = "releases"
    trains = False
    sampling = None

    noise_multiplier: float
    releases: int = 1
    reason: str = "statistics"


_KINDS: dict[str, type[Event]] = {
    "gaussian_steps": GaussianSteps,
    "projected_steps": ProjectedSteps,
    "federated_rounds": FederatedRounds,
    "private_calibration": PrivateCalibration,
    "private_statistics": PrivateStatistics,
}


def is_event(value: object) -> TypeGuard[Event]:
    """Whether this is an event of a known kind."""
    return isinstance(value, tuple(_KINDS.values()))


def as_earlier(event: Event) -> Event:
    """As it stands on the ledger of a later run, whose records need not be disjoint from any of it.

    >>> as_earlier(PrivateCalibration(2.0, disjoint=True))
    PrivateCalibration(noise_multiplier=2.0, releases=1, disjoint=False, reason='earlier run')
    """
    reason = f"{EARLIER}, {CHANGED_DATA}" if CHANGED_DATA in event.reason else EARLIER
    return event.changed(reason=reason, **({"disjoint": False} if event.disjoint else {}))


_LEFT_OUT = {"own_batches": False, "correlation": Independent()}
"""Values that are not written down, so that a ledger reads as it did before there were these fields."""


def _encode_value(value: Any) -> Any:
    for name, kind in SAMPLINGS.items():
        if type(value) is kind:
            return {"kind": name, **arguments(value)}
    for name, kind in CORRELATIONS.items():
        if type(value) is kind:
            return {"kind": name, **{f.name: getattr(value, f.name) for f in fields(value)}}
    return value


def _decode_value(name: str, value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    given = {key: item for key, item in value.items() if key != "kind"}
    if name != "correlation":
        return made_from(_kind(SAMPLINGS, value, "sampling scheme"), given)
    kind = _kind(CORRELATIONS, value, "correlation")
    if {f.name for f in fields(kind)} != given.keys():
        raise LedgerError(f"{kind.__name__} has the fields {[f.name for f in fields(kind)]}, got {sorted(given)}.")
    return kind(**given)


def _kind(kinds: Mapping[str, type[Any]], record: Mapping[str, Any], what: str) -> type[Any]:
    kind = kinds.get(str(record.get("kind")))
    if kind is None:
        raise LedgerError(f"Unknown {what} {record.get('kind')!r}; known are {', '.join(kinds)}.")
    return kind


def encode(event: Event) -> dict[str, Any]:
    """The event as a JSON object.

    >>> encode(PrivateCalibration(2.0))["kind"]
    'private_calibration'
    """
    for found, kind in _KINDS.items():
        if type(event) is kind:
            values = {name: _encode_value(getattr(event, name)) for name in _names(kind)}
            kept = {key: value for key, value in values.items() if getattr(event, key) != _LEFT_OUT.get(key, ...)}
            return {"kind": found, **kept}
    raise LedgerError(f"Only events can go on a ledger ({', '.join(k.__name__ for k in _KINDS.values())}): {event!r}.")


def decode(record: Mapping[str, Any]) -> Event:
    """The event that `encode` wrote; unknown kinds, missing and extra fields are refused.

    >>> decode(encode(PrivateCalibration(2.0)))
    PrivateCalibration(noise_multiplier=2.0, releases=1, disjoint=False, reason='calibration')
    """
    if not isinstance(record, Mapping):
        raise LedgerError(f"An event must be a JSON object, got {record!r}.")
    kind = _kind(_KINDS, record, "event")
    names = set(_names(kind))
    if (set(record) - {"kind"}) | (names & _LEFT_OUT.keys()) != names:
        raise LedgerError(f"A {record['kind']} has the fields {sorted(names)}, got {sorted(set(record) - {'kind'})}.")
    try:
        event: Event = kind(**{name: _decode_value(name, record[name]) for name in names if name in record})
    except LedgerError:
        raise
    except ClipwiseError as error:
        raise LedgerError(f"A {record['kind']} makes no sense: {error}") from error
    return event
