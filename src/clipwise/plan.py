"""The plan: sampling, steps, clipping, noise and mechanism of a run, in one frozen value that everything else reads."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakValueDictionary

from clipwise._encoding import decode, encode, keys
from clipwise._show import html_table
from clipwise._validate import MOST_NOISE, is_count, is_noise
from clipwise.accounting import (
    Event,
    Relation,
    Steps,
    account,
    check_correlation,
    default_delta,
    needed_delta,
    noise_scale,
    round_up,
)
from clipwise.clipping import Clip, Flat, Groupwise, Layerwise, MixUp, Rule, Style, as_clip, is_private, own_noise
from clipwise.correlation import CORRELATIONS, Correlation, Independent
from clipwise.errors import AccountingError, ClipwiseError, InvalidPlan
from clipwise.mechanisms import AdaptiveClip, Gaussian, Mechanism, Repeated
from clipwise.sampling import SAMPLINGS, Sampling

__all__ = ["Plan", "accept_delta", "warn_of_delta"]

VERSION = 1
_TOLD: WeakValueDictionary[int, Plan] = WeakValueDictionary()
"""Plans of which a large delta was said, by their identity."""


@dataclass(frozen=True)
class Plan:
    """How a run samples, clips and adds noise, for how many steps, and what it releases in each.

    `noise_multiplier` is one number, or a schedule such as `cw.Steps({0: 2.0, 500: 1.0})`. None is for `calibrate`.
    `mechanism` is what is released: the sum of clipped gradients (`Gaussian()`, also for None), the same with norms
    that are only estimated (`cw.mechanisms.ProjectedNorms`), or rounds of users (`cw.mechanisms.Rounds`).
    `correlation` says how the noise of the Gaussian mechanism depends on that of earlier steps, such as `cw.Banded(8)`.

    Guarantees: the noise has `noise_multiplier` times the joint sensitivity of the style in force at each step (what is
    correlated is noise in units of that), so the privacy of the run depends on `sampling`, `steps`, `noise_multiplier`,
    `mechanism` and `correlation` alone.

    >>> from clipwise import Abadi, Poisson
    >>> plan = Plan(sampling=Poisson(60_000, 256), steps=14_040, clip=Abadi(1.0), noise_multiplier=1.1)
    >>> round(plan.epsilon(delta=1e-5), 2)
    2.38
    """

    sampling: Sampling
    steps: int
    clip: Clip | Rule
    noise_multiplier: float | Steps | None = None
    mechanism: Mechanism = Gaussian()  # noqa: RUF009 - a frozen value
    correlation: Correlation = Independent()  # noqa: RUF009 - a frozen value

    def __post_init__(self) -> None:
        if not isinstance(self.sampling, tuple(SAMPLINGS.values())):
            raise InvalidPlan(
                f"sampling must be {_one_of(SAMPLINGS)}, got {self.sampling!r}. A bare rate or batch size does not say "
                "how batches are drawn."
            )
        if not is_count(self.steps):
            raise InvalidPlan(
                f"steps must be a positive integer (optimizer steps or rounds, not epochs), got {self.steps!r}."
            )
        object.__setattr__(self, "clip", as_clip(self.clip))
        if isinstance(self.clip, MixUp):
            self.clip.switch_step(self.steps)
        self._check_mechanism()
        self._check_correlation()
        if self.noise_multiplier is None:
            return
        self._check_noise()
        if self.noise_multiplier != 0 and not self.is_private:
            raise InvalidPlan(
                f"{self.clip!r} does not bound what one sample contributes, so no noise can make it private. Use a "
                "rule such as Abadi(1.0), or noise_multiplier=0 for a run that is not private, to which Unclipped("
                "noise_std=...) adds noise."
            )

    def _check_noise(self) -> None:
        noise = self.noise_multiplier
        if isinstance(noise, Steps):
            noise.check(self.steps)
            if len(noise.noise) == 1:
                object.__setattr__(self, "noise_multiplier", noise.at(0))
        elif not is_noise(noise):
            raise InvalidPlan(
                f"noise_multiplier must be a finite number >= 0 and at most {MOST_NOISE:g}, a schedule such as "
                f"cw.Steps({{0: 2.0, 500: 1.0}}), or None to be calibrated, got {noise!r}."
            )

    def _check_mechanism(self) -> None:
        if self.mechanism is None:
            object.__setattr__(self, "mechanism", Gaussian())
        if not isinstance(self.mechanism, Mechanism):
            raise InvalidPlan(
                f"mechanism must be a value such as clipwise.mechanisms.Gaussian(), got {self.mechanism!r}."
            )
        if isinstance(self.clip, AdaptiveClip) and type(self.clip) is not AdaptiveClip:
            raise InvalidPlan(
                f"{type(self.clip).__name__} is a class of its own, which could split the noise otherwise than the "
                "proof says: use AdaptiveClip itself."
            )
        if isinstance(self.clip, AdaptiveClip) and not self.mechanism.learns_norm:
            raise InvalidPlan(
                f"AdaptiveClip together with {self.mechanism!r} has no proof: how many norms are within R would be "
                "counted with norms that are only estimated. Use exact norms, or a norm that stays as it is."
            )
        self.mechanism.check(self)

    def _check_correlation(self) -> None:
        if type(self.correlation) not in CORRELATIONS.values():  # another class could have other coefficients
            raise InvalidPlan(f"correlation must be {_one_of(CORRELATIONS)}, got {self.correlation!r}.")
        if self.correlation == Independent():
            return
        if self.mechanism != Gaussian():
            raise InvalidPlan(f"correlated noise is for the sum of clipped gradients, not for {self.mechanism!r}.")
        if any(own_noise(style) for style in self.styles):
            raise InvalidPlan(f"the noise of {self.clip!r} is not correlated: use it without {self.correlation!r}.")
        if isinstance(self.noise_multiplier, Steps) and len(self.noise_multiplier.noise) > 1:
            raise InvalidPlan(
                f"{self.noise_multiplier!r} together with {self.correlation!r} has no proof: use one noise."
            )
        if isinstance(self.clip, AdaptiveClip):
            raise InvalidPlan(
                f"AdaptiveClip together with {self.correlation!r} has no proof: use independent noise, or a norm that "
                "does not follow what was released, such as Abadi(1.0) or MixUp."
            )
        try:
            check_correlation(self.sampling, self.correlation)
        except AccountingError as error:
            raise InvalidPlan(str(error)) from error

    @property
    def is_private(self) -> bool:
        """Whether every step's clipping is bounded and there will be noise."""
        return self.noise_multiplier != 0 and all(is_private(style) for style in self.styles)

    @property
    def batch_size(self) -> float:
        """The expected batch size, a public number; of `Poisson` it may be a fraction."""
        return self.sampling.batch_size

    @property
    def denominator(self) -> float:
        """The public number that every noisy sum is divided by."""
        return self.mechanism.denominator(self.sampling)

    @property
    def styles(self) -> tuple[Style, ...]:
        """The clipping styles of the run; of a schedule of one's own, those of the first and the last step."""
        if isinstance(self.clip, (Flat, Layerwise, Groupwise)):
            return (self.clip,)
        return (self.style(0), self.style(self.steps - 1))

    def style(self, step: int) -> Style:
        """The clipping style in force at step `step` (from 0); noise and clipping both read it.

        Of an adaptive norm it is that of the first step: `private.style` is the one in force.
        """
        return self.clip.at(step, self.steps)  # type: ignore[union-attr]  # __post_init__ made it a schedule

    def calibrate(
        self,
        epsilon: float,
        delta: float | None = None,
        *,
        accountant: str = "exact",
        relation: Relation | None = None,
        fixed: Iterable[Event] = (),
    ) -> Plan:
        """The same plan with the smallest noise that keeps the whole run within (epsilon, delta).

        `delta` has to be given, below 1/n; a larger one is warned about. A schedule of noise keeps its shape: all of it
        is multiplied by one number. `fixed` are events that the run is charged besides, such as that of a private
        temperature.

        >>> from clipwise import Abadi, FullBatch
        >>> plan = Plan(sampling=FullBatch(1_279), steps=2_000, clip=Abadi(1.0))
        >>> 20 < plan.calibrate(epsilon=4.4, delta=1 / 1_407).noise_multiplier < 40
        True
        """
        delta = needed_delta(delta, self.sampling)
        if not self.is_private:
            raise InvalidPlan(f"there is no noise that makes {self.clip!r} with {self.noise_multiplier!r} private.")
        noise = self.noise_multiplier if isinstance(self.noise_multiplier, Steps) else Steps({0: 1.0})
        shape = replace(self, noise_multiplier=noise).events
        factor = noise_scale(shape, epsilon, delta, accountant, relation=relation, fixed=fixed)
        made = replace(self, noise_multiplier=noise.scaled(factor))
        warn_of_delta(made, delta)
        return made

    def epsilon(
        self, delta: float | None = None, accountant: str = "exact", *, relation: Relation | None = None
    ) -> float:
        """The epsilon that the whole run will have spent at this `delta`."""
        return account(self.events, needed_delta(delta, self.sampling), accountant, relation=relation).epsilon

    @property
    def events(self) -> tuple[Repeated, ...]:
        """What the whole run will have put on its ledger."""
        return self.events_of(0, self.steps)

    def events_of(self, first: int, stop: int) -> tuple[Repeated, ...]:
        """What the steps from `first` up to, not including, `stop` put on the ledger.

        >>> from clipwise import Abadi, FullBatch
        >>> plan = Plan(FullBatch(10), 9, Abadi(1.0), Steps({0: 2.0, 4: 1.0}))
        >>> [(event.noise_multiplier, event.count) for event in plan.events_of(3, 6)]
        [(2.0, 1), (1.0, 2)]
        """
        noise = self.noise_multiplier
        if noise is None:
            raise InvalidPlan(
                "the plan has no noise yet: plan = plan.calibrate(epsilon=..., delta=...), or give noise_multiplier."
            )
        if not 0 <= first < stop:
            raise InvalidPlan(f"there are no steps from {first!r} to {stop!r}.")
        stretches = noise.stretches(first, stop) if isinstance(noise, Steps) else [(noise, stop - first)]
        found = tuple(self.mechanism.event(self.sampling, each, count) for each, count in stretches)
        if self.correlation == Independent():
            return found
        return tuple(event.changed(correlation=self.correlation) for event in found)

    def event_at(self, step: int) -> Repeated:
        """What step `step` (from 0) puts on the ledger. Its noise multiplier is that of the step."""
        (event,) = self.events_of(step, step + 1)
        return event

    def _repr_html_(self) -> str:
        return html_table("Plan", self.rows())

    def rows(self, spent: Callable[[float], float] | None = None) -> list[tuple[str, str]]:
        """What is planned, and its epsilon, in labelled rows; of a run that has begun, what it has `spent` at a delta.

        >>> from clipwise import Abadi, FullBatch
        >>> Plan(FullBatch(10), 5, Abadi(1.0), 9.0).rows()[2:]
        [('clipping', 'Flat(rule=Abadi(R=1.0))'), ('noise multiplier', '9'), ('epsilon', '0.357 at delta 0.01')]
        """
        noise = self.noise_multiplier
        found = {"batches": self.sampling.description, "steps": f"{self.steps:,}", "clipping": repr(self.clip)}
        if self.mechanism != Gaussian():
            found["mechanism"] = repr(self.mechanism)
        if self.correlation != Independent():
            found["noise over steps"] = self.correlation.describe()
        if noise is None:
            missing = "none yet: plan.calibrate(epsilon, delta) finds it" if self.is_private else "none: not private"
            return [*found.items(), ("noise multiplier", missing)]
        found["noise multiplier"] = f"{noise:g}" if is_noise(noise) else repr(noise)
        label, epsilon = ("epsilon", self.epsilon) if spent is None else ("epsilon spent", spent)
        found[label] = self._cost(epsilon) if self.is_private else "infinite: not private"
        return list(found.items())

    def _cost(self, epsilon: Callable[[float], float]) -> str:
        """Epsilon at the delta that a public number of records suggests."""
        if self.sampling.sample_size is None:
            return "at a delta of your choice: the number of records is not public"
        delta = default_delta(self.sampling.sample_size)
        try:
            value = epsilon(delta)
        except ClipwiseError as error:
            return f"unknown: {error}"
        return f"{round_up(value):.3f} at delta {delta:g}" if math.isfinite(value) else "infinite"

    def to_dict(self) -> dict[str, Any]:
        """The plan as a JSON object; a rule of your own is described, see `from_dict`."""
        kept = [name for name in _NAMES if getattr(self, name) != _LEFT_OUT.get(name, ...)]
        return {"version": VERSION, **{name: encode(getattr(self, name)) for name in kept}}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Plan:
        """Read what `to_dict` wrote. Unknown or missing keys are refused, and so are rules that are not clipwise's.

        >>> from clipwise import Abadi, FullBatch
        >>> plan = Plan(sampling=FullBatch(10), steps=3, clip=Abadi(1.0), noise_multiplier=2.0)
        >>> Plan.from_dict(plan.to_dict()) == plan
        True
        """
        expected = {"version", *_NAMES}
        if not isinstance(record, Mapping) or {*_LEFT_OUT, *record} != expected:
            raise InvalidPlan(f"a plan has the keys {sorted(expected)}, got {keys(record)}.")
        if not is_count(record["version"]) or record["version"] != VERSION:
            raise InvalidPlan(f"the plan has version {record['version']!r}, this clipwise reads {VERSION}.")
        return cls(**{name: decode(value) for name, value in record.items() if name != "version"})


def warn_of_delta(plan: Plan, delta: float) -> None:
    """Warn the caller's caller of a delta over 1/n, once for a plan; where n is not public, nothing is said."""
    records = plan.sampling.sample_size
    if records is None or delta <= 1 / records or _TOLD.get(id(plan)) is plan:
        return
    accept_delta(plan)
    whom = "record" if plan.mechanism.unit == "example" else "user"
    warnings.warn(
        f"delta = {delta:g} is over 1/n = {1 / records:.3g}: such a promise allows publishing everything about a "
        f"{whom} now and then. Give a delta below 1/n, such as {default_delta(records):g}.",
        stacklevel=3,
    )


def accept_delta(plan: Plan) -> None:
    """Of this plan's delta no more is said: somebody asked for it, or has been warned."""
    _TOLD[id(plan)] = plan


_NAMES = tuple(f.name for f in dataclasses.fields(Plan))
_LEFT_OUT = {"mechanism": Gaussian(), "correlation": Independent()}
"""Values that are not written down, so that a plan reads as it did before there was a choice."""


def _one_of(kinds: Mapping[str, type[Any]]) -> str:
    names = [kind.__name__ for kind in kinds.values()]
    return f"{', '.join(names[:-1])} or {names[-1]}"
