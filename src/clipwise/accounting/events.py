"""Events: what was released, as plain facts. Accountants read these, never a bare sampling rate.

Each event kind is one frozen dataclass with a `count` (how often the mechanism ran), a `unit` (whose privacy it
protects) and `repeated(count)`; `encode` and `decode` are its JSON form.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, TypeAlias

from clipwise._validate import is_count, is_finite
from clipwise.errors import AccountingError, ClipwiseError, LedgerError
from clipwise.sampling import FixedSize, FullBatch, Poisson, Sampling, Shuffled, arguments, made_from

__all__ = [
    "Event",
    "FederatedRounds",
    "GaussianSteps",
    "PrivateCalibration",
    "ProjectedSteps",
    "check_projected_sampling",
    "decode",
    "encode",
]

_SAMPLINGS: dict[str, type[Any]] = {
    "poisson": Poisson,
    "full_batch": FullBatch,
    "shuffled": Shuffled,
    "fixed_size": FixedSize,
}


MOST = 10**12
"""Steps, or records: more than anybody has, and few enough for double precision."""


def _check_noise(noise_multiplier: object) -> None:
    if not is_finite(noise_multiplier) or noise_multiplier < 0:
        raise AccountingError(
            f"noise_multiplier must be a finite number >= 0 (0 means not private), got {noise_multiplier!r}."
        )


def _check_count(name: str, count: object) -> None:
    if not is_count(count):
        raise AccountingError(f"{name} must be a positive integer, got {count!r}.")
    if count > MOST:
        raise AccountingError(f"{name} must be at most {MOST:.0e}, got a larger number.")


def _check_reason(reason: object) -> None:
    if not isinstance(reason, str):
        raise AccountingError(f"reason must be a text, got {reason!r}.")


def _check_flag(name: str, flag: object) -> None:
    if not isinstance(flag, bool):
        raise AccountingError(f"{name} must be True or False, got {flag!r}.")


def _check_sampling(sampling: object) -> None:
    if not isinstance(sampling, (Poisson, FullBatch, Shuffled, FixedSize)):
        raise AccountingError(
            f"sampling must be cw.Poisson, cw.FullBatch, cw.Shuffled or cw.FixedSize, got {sampling!r}. "
            "A bare rate does not say how batches were drawn."
        )
    if max(sampling.sample_size or 0, getattr(sampling, "largest", None) or 0) > MOST:
        raise AccountingError(f"sample_size must be at most {MOST:.0e} for accounting.")
    if isinstance(sampling, Poisson) and sampling.rate < 1 / MOST:
        raise AccountingError(f"rate must be at least {1 / MOST:.0e} for accounting, got {sampling.rate!r}.")


@dataclass(frozen=True)
class GaussianSteps:
    """`steps` optimizer steps, each a noisy clipped sum over a batch drawn by `sampling`.

    `noise_multiplier` is the noise's standard deviation over the joint sensitivity of one sample. A schedule (of
    noise, of rate, of clipping) is a sequence of such events; `reason` says why they happened. `own_batches`: the
    caller drew the batches, and declares that they follow `sampling`.

    >>> from clipwise.sampling import Poisson
    >>> GaussianSteps(Poisson(60_000, 256), noise_multiplier=1.1, steps=14_040).count
    14040
    """

    sampling: Sampling
    noise_multiplier: float
    steps: int = 1
    reason: str = "training"
    own_batches: bool = False

    def __post_init__(self) -> None:
        _check_sampling(self.sampling)
        _check_noise(self.noise_multiplier)
        _check_count("steps", self.steps)
        _check_reason(self.reason)
        _check_flag("own_batches", self.own_batches)

    @property
    def count(self) -> int:
        """How often the mechanism ran."""
        return self.steps

    @property
    def unit(self) -> str:
        """Whose privacy is protected."""
        return "example"

    def repeated(self, count: int) -> GaussianSteps:
        """The same steps, `count` of them."""
        return GaussianSteps(self.sampling, self.noise_multiplier, count, self.reason, self.own_batches)

    def same_mechanism(self, other: object) -> bool:
        """Whether `other` differs at most in its number of steps."""
        return (
            type(other) is GaussianSteps
            and self.noise_multiplier == other.noise_multiplier
            and (self.sampling is other.sampling or self.sampling == other.sampling)
            and self.reason == other.reason
            and self.own_batches == other.own_batches
        )


def check_projected_sampling(sampling: Sampling) -> None:
    """Refuse schemes in which a record takes the place of another: then the estimates for both of them matter."""
    cut = isinstance(sampling, Poisson) and sampling.max_batch_size is not None
    if cut or isinstance(sampling, FixedSize):
        what = "batches that are cut: leave max_batch_size out" if cut else "batches of a fixed size: use cw.Poisson"
        raise AccountingError(f"estimated norms have no proof for {what}, or use exact norms.")


@dataclass(frozen=True)
class ProjectedSteps:
    """Steps whose norms were only estimated, each from `projections` fresh random ones (DP-SGD-JL).

    An estimate that is too small lets a sample contribute more than the sensitivity that `noise_multiplier` refers to,
    so such steps are never accounted like exact ones (`_numerics/projected.py` says how). All records of a step share
    its projections.

    >>> from clipwise.sampling import Poisson
    >>> ProjectedSteps(Poisson(60_000, 256), noise_multiplier=1.1, projections=64, steps=10).count
    10
    """

    sampling: Sampling
    noise_multiplier: float
    projections: int
    steps: int = 1
    reason: str = "training"
    own_batches: bool = False

    def __post_init__(self) -> None:
        _check_sampling(self.sampling)
        _check_noise(self.noise_multiplier)
        _check_count("projections", self.projections)
        _check_count("steps", self.steps)
        _check_reason(self.reason)
        _check_flag("own_batches", self.own_batches)
        check_projected_sampling(self.sampling)

    @property
    def count(self) -> int:
        """How often the mechanism ran."""
        return self.steps

    @property
    def unit(self) -> str:
        """Whose privacy is protected."""
        return "example"

    def repeated(self, count: int) -> ProjectedSteps:
        """The same steps, `count` of them."""
        return replace(self, steps=count)

    def same_mechanism(self, other: object) -> bool:
        """Whether `other` differs at most in its number of steps."""
        return type(other) is ProjectedSteps and self.repeated(1) == other.repeated(1)


@dataclass(frozen=True)
class FederatedRounds:
    """`rounds` noisy sums over clients, drawn by `sampling` among the clients. Protects a whole client.

    >>> from clipwise.sampling import Poisson
    >>> FederatedRounds(Poisson(1_000, 50), noise_multiplier=1.0, rounds=20).unit
    'client'
    """

    sampling: Sampling
    noise_multiplier: float
    rounds: int = 1
    reason: str = "federated"

    def __post_init__(self) -> None:
        _check_sampling(self.sampling)
        _check_noise(self.noise_multiplier)
        _check_count("rounds", self.rounds)
        _check_reason(self.reason)

    @property
    def count(self) -> int:
        """How often the mechanism ran."""
        return self.rounds

    @property
    def unit(self) -> str:
        """Whose privacy is protected."""
        return "client"

    def repeated(self, count: int) -> FederatedRounds:
        """The same rounds, `count` of them."""
        return FederatedRounds(self.sampling, self.noise_multiplier, count, self.reason)

    def same_mechanism(self, other: object) -> bool:
        """Whether `other` differs at most in its number of rounds."""
        return type(other) is FederatedRounds and self.repeated(1) == other.repeated(1)


@dataclass(frozen=True)
class PrivateCalibration:
    """`releases` noisy statistics of a calibration set (every record each time), such as a private temperature.

    `disjoint=True` states that no calibration record was trained on; the two sets then compose in parallel.

    >>> PrivateCalibration(noise_multiplier=2.0, disjoint=True).count
    1
    """

    noise_multiplier: float
    releases: int = 1
    disjoint: bool = False
    reason: str = "calibration"

    def __post_init__(self) -> None:
        _check_noise(self.noise_multiplier)
        _check_count("releases", self.releases)
        _check_reason(self.reason)
        _check_flag("disjoint", self.disjoint)

    @property
    def count(self) -> int:
        """How often the mechanism ran."""
        return self.releases

    @property
    def unit(self) -> str:
        """Whose privacy is protected."""
        return "example"

    def repeated(self, count: int) -> PrivateCalibration:
        """The same releases, `count` of them."""
        return PrivateCalibration(self.noise_multiplier, count, self.disjoint, self.reason)

    def same_mechanism(self, other: object) -> bool:
        """Whether `other` differs at most in its number of releases."""
        return type(other) is PrivateCalibration and self.repeated(1) == other.repeated(1)


Event: TypeAlias = GaussianSteps | ProjectedSteps | FederatedRounds | PrivateCalibration

_KINDS: dict[str, type[Any]] = {
    "gaussian_steps": GaussianSteps,
    "projected_steps": ProjectedSteps,
    "federated_rounds": FederatedRounds,
    "private_calibration": PrivateCalibration,
}

_ONLY_IF_TRUE = {"own_batches"}  # left out otherwise, so that a ledger reads as it did before there was the field


def _encode_value(value: Any) -> Any:
    for name, kind in _SAMPLINGS.items():
        if type(value) is kind:
            return {"kind": name, **arguments(value)}
    return value


def _decode_value(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    kind = _kind(_SAMPLINGS, value, "sampling scheme")
    return made_from(kind, {name: item for name, item in value.items() if name != "kind"})


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
    for name, kind in _KINDS.items():
        if type(event) is kind:
            values = {f.name: _encode_value(getattr(event, f.name)) for f in fields(kind)}
            return {"kind": name, **{key: value for key, value in values.items() if value or key not in _ONLY_IF_TRUE}}
    raise LedgerError(f"Only events can go on a ledger ({', '.join(k.__name__ for k in _KINDS.values())}): {event!r}.")


def decode(record: Mapping[str, Any]) -> Event:
    """The event that `encode` wrote; unknown kinds, missing and extra fields are refused.

    >>> decode(encode(PrivateCalibration(2.0)))
    PrivateCalibration(noise_multiplier=2.0, releases=1, disjoint=False, reason='calibration')
    """
    if not isinstance(record, Mapping):
        raise LedgerError(f"An event must be a JSON object, got {record!r}.")
    kind = _kind(_KINDS, record, "event")
    names = {f.name for f in fields(kind)}
    if (set(record) - {"kind"}) | (names & _ONLY_IF_TRUE) != names:
        raise LedgerError(f"A {record['kind']} has the fields {sorted(names)}, got {sorted(set(record) - {'kind'})}.")
    try:
        event: Event = kind(**{name: _decode_value(record[name]) for name in names if name in record})
    except LedgerError:
        raise
    except ClipwiseError as error:
        raise LedgerError(f"A {record['kind']} makes no sense: {error}") from error
    return event
