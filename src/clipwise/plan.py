"""The plan: sampling, steps, clipping and noise of a run, in one frozen value that everything else reads."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from clipwise import clipping
from clipwise._validate import is_count, is_finite
from clipwise.accounting import Event, GaussianSteps, Relation, account, noise_scale
from clipwise.clipping import Clip, Flat, Groupwise, Layerwise, MixUp, Rule, as_clip, is_private
from clipwise.errors import InvalidPlan
from clipwise.sampling import SAMPLINGS, Sampling, arguments, made_from

__all__ = ["Plan"]

VERSION = 1

_SAMPLINGS = tuple(SAMPLINGS.values())
_RULES = tuple(
    getattr(clipping, name)
    for name in ("Abadi", "Automatic", "BatchClip", "Global", "GlobalScaled", "NoClip", "Normalize")
)
_VALUES: dict[str, type[Any]] = {cls.__name__: cls for cls in (*_SAMPLINGS, *_RULES, Flat, Layerwise, Groupwise, MixUp)}


@dataclass(frozen=True)
class Plan:
    """How a run samples, clips and adds noise, and for how many steps.

    Guarantees: the noise has `noise_multiplier` times the joint sensitivity of the style in force at each step, so
    the privacy of the run depends on `sampling`, `steps` and `noise_multiplier` alone.

    >>> from clipwise import Abadi, Poisson
    >>> plan = Plan(sampling=Poisson(60_000, 256), steps=14_040, clip=Abadi(1.0), noise_multiplier=1.1)
    >>> round(plan.epsilon(delta=1e-5), 2)
    2.38
    """

    sampling: Sampling
    steps: int
    clip: Clip | Rule
    noise_multiplier: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.sampling, _SAMPLINGS):
            raise InvalidPlan(
                f"sampling must be Poisson, FullBatch, Shuffled or FixedSize, got {self.sampling!r}. A bare rate or "
                "batch size does not say how batches are drawn."
            )
        if not is_count(self.steps):
            raise InvalidPlan(f"steps must be a positive integer (optimizer steps, not epochs), got {self.steps!r}.")
        object.__setattr__(self, "clip", as_clip(self.clip))
        if isinstance(self.clip, MixUp):
            self.clip.switch_step(self.steps)
        noise = self.noise_multiplier
        if noise is None:
            return
        if not is_finite(noise) or noise < 0:
            raise InvalidPlan(
                f"noise_multiplier must be a finite number >= 0, or None to be calibrated, got {noise!r}."
            )
        if noise > 0 and not self.is_private:
            raise InvalidPlan(
                f"{self.clip!r} does not bound what one sample contributes, so no noise can make it private. Use a "
                "rule such as Abadi(1.0), or noise_multiplier=0 for a run that is not private."
            )

    @property
    def is_private(self) -> bool:
        """Whether every step's clipping is bounded and there will be noise."""
        clip = self.clip
        styles = [clip.small, clip.large] if isinstance(clip, MixUp) else [self.style(0)]
        return self.noise_multiplier != 0 and all(is_private(style) for style in styles)  # type: ignore[arg-type]

    @property
    def batch_size(self) -> int:
        """The expected batch size: the public number that every noisy sum is divided by."""
        return self.sampling.batch_size

    def style(self, step: int) -> clipping.Style:
        """The clipping style in force at step `step` (from 0); noise and clipping both read it."""
        return self.clip.at(step, self.steps)  # type: ignore[union-attr]  # __post_init__ made it a schedule

    def calibrate(
        self,
        epsilon: float,
        delta: float,
        accountant: str = "exact",
        *,
        relation: Relation | None = None,
    ) -> Plan:
        """The same plan with the smallest noise that keeps the whole run within (epsilon, delta).

        >>> from clipwise import Abadi, FullBatch
        >>> plan = Plan(sampling=FullBatch(1_279), steps=2_000, clip=Abadi(1.0))
        >>> 20 < plan.calibrate(epsilon=4.4, delta=1 / 1_407).noise_multiplier < 40
        True
        """
        if self.noise_multiplier == 0 or not self.is_private:
            raise InvalidPlan(f"there is no noise that makes {self.clip!r} with {self.noise_multiplier!r} private.")
        shape = replace(self, noise_multiplier=1.0).events()
        return replace(self, noise_multiplier=noise_scale(shape, epsilon, delta, accountant, relation=relation))

    def epsilon(self, delta: float, accountant: str = "exact", *, relation: Relation | None = None) -> float:
        """The epsilon that the whole run will have spent at this `delta`."""
        return account(self.events(), delta, accountant, relation=relation).epsilon

    def events(self) -> tuple[Event, ...]:
        """What the whole run will have put on its ledger."""
        return (GaussianSteps(self.sampling, self._noise(), self.steps),)

    def _noise(self) -> float:
        if self.noise_multiplier is None:
            raise InvalidPlan(
                "the plan has no noise yet: plan = plan.calibrate(epsilon=..., delta=...), or give noise_multiplier."
            )
        return self.noise_multiplier

    def to_dict(self) -> dict[str, Any]:
        """The plan as a JSON object; a rule of your own is described, see `from_dict`."""
        return {
            "version": VERSION,
            "sampling": _encode(self.sampling),
            "steps": self.steps,
            "clip": _encode(self.clip),
            "noise_multiplier": self.noise_multiplier,
        }

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Plan:
        """Read what `to_dict` wrote. Unknown or missing keys are refused, and so are rules that are not clipwise's.

        >>> from clipwise import Abadi, FullBatch
        >>> plan = Plan(sampling=FullBatch(10), steps=3, clip=Abadi(1.0), noise_multiplier=2.0)
        >>> Plan.from_dict(plan.to_dict()) == plan
        True
        """
        expected = {"version", *(f.name for f in dataclasses.fields(cls))}
        if not isinstance(record, Mapping) or set(record) != expected:
            raise InvalidPlan(f"a plan has the keys {sorted(expected)}, got {_keys(record)}.")
        if record["version"] != VERSION:
            raise InvalidPlan(f"the plan has version {record['version']!r}, this clipwise reads {VERSION}.")
        return cls(**{name: _decode(value) for name, value in record.items() if name != "version"})


def _keys(record: object) -> object:
    return sorted(map(str, record)) if isinstance(record, Mapping) else record


def _encode(value: Any) -> Any:
    """A frozen value as {"kind": class name, fields}; a mapping as {"kind": "mapping", "items": pairs, order kept}."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {"kind": "mapping", "items": [[key, _encode(item)] for key, item in value.items()]}
    if not dataclasses.is_dataclass(value):
        raise InvalidPlan(f"{value!r} cannot be written down: make it a frozen dataclass of numbers and strings.")
    cls = type(value)
    known = _VALUES.get(cls.__name__) is cls
    kind = cls.__name__ if known else f"{cls.__module__}.{cls.__qualname__}"
    if isinstance(value, _SAMPLINGS):
        return {"kind": kind, **arguments(value)}
    return {"kind": kind, **{f.name: _encode(getattr(value, f.name)) for f in dataclasses.fields(value)}}


def _decode(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    kind = value.get("kind")
    if kind == "mapping":
        return {key: _decode(item) for key, item in value["items"]}
    cls = _VALUES.get(str(kind))
    if cls is None:
        # Importing whatever a file names would let the file choose the code that runs.
        raise InvalidPlan(f"{kind!r} is not one of clipwise's own values; give the plan itself instead (plan=...).")
    if cls in _SAMPLINGS:
        return made_from(cls, {name: item for name, item in value.items() if name != "kind"})
    names = {f.name for f in dataclasses.fields(cls)}
    if set(value) - {"kind"} != names:
        raise InvalidPlan(f"{kind} has the fields {sorted(names)}, got {_keys(value)}.")
    return cls(**{name: _decode(value[name]) for name in names})
