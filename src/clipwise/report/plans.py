"""What was chosen for a run: its plan, and what else; as values, and as result.json has them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, TypeAlias

from clipwise._json import Fields
from clipwise._validate import is_count, is_number
from clipwise.errors import ClipwiseError, DataError
from clipwise.plan import Plan
from clipwise.sampling import SAMPLINGS, arguments

__all__ = ["UNBOUNDED", "AnyPlan", "Choices", "WrittenPlan", "WrittenValue", "has_rule", "items_of", "parts_of",
           "read_plan"]  # fmt: skip

UNBOUNDED = ("BatchClip", "NoClip", "Unclipped")
"""The rules with which no run is private, whatever noise it had."""


@dataclass(frozen=True)
class WrittenValue:
    """A value as a file describes it, of a class that clipwise does not have: a clipping rule of one's own."""

    kind: str
    values: Mapping[str, Any]


@dataclass(frozen=True)
class WrittenPlan:
    """A plan as a file has it, where no `Plan` can be made of it: it has a rule of one's own, or parts only.

    It says what was done. Nothing can be trained or accounted with it.

    >>> plan = WrittenPlan({"steps": 5, "clip": {"kind": "mine.Rule", "R": 0.5}})
    >>> plan.steps, plan.clip, plan.noise_multiplier
    (5, WrittenValue(kind='mine.Rule', values={'R': 0.5}), None)
    """

    record: Mapping[str, Any]

    @property
    def steps(self) -> int | None:
        """The optimizer steps, where they are written."""
        steps = self.record.get("steps")
        return steps if is_count(steps) else None

    @property
    def noise_multiplier(self) -> float | None:
        """Sigma, where it is written."""
        noise = self.record.get("noise_multiplier")
        return float(noise) if is_number(noise) else None

    @property
    def sampling(self) -> Any:
        """How batches were drawn."""
        return _value(self.record.get("sampling"))

    @property
    def clip(self) -> Any:
        """How gradients were clipped."""
        return _value(self.record.get("clip"))

    def to_dict(self) -> dict[str, Any]:
        """As it was written."""
        return dict(self.record)


AnyPlan: TypeAlias = Plan | WrittenPlan


@dataclass(frozen=True)
class Choices:
    """What was chosen for a run besides its plan."""

    learning_rate: float | str | None = None
    """A number, or the rule that gives it."""
    optimizer: str | None = None
    algorithm: str | None = None
    federated: Mapping[str, Any] | None = None
    """Who the users of a federated run are, and what they do."""
    further: Mapping[str, Any] = field(default_factory=dict)
    """Whatever else is worth a row, by name."""

    def __post_init__(self) -> None:
        taken = sorted({*_OF_PLAN, *_NAMED} & set(self.further))
        if taken:
            raise DataError(f"further choices cannot be named {', '.join(taken)}: the plan and the choices have these.")

    def to_dict(self) -> dict[str, Any]:
        """The choices as a JSON object, those that were made."""
        named = {name: getattr(self, name) for name in _NAMED}
        return {**{name: value for name, value in named.items() if value is not None}, **self.further}


_NAMED = ("learning_rate", "optimizer", "algorithm", "federated")
_OF_PLAN = {"version", *(f.name for f in fields(Plan)), "projections", "mechanism"}
_SAMPLINGS = tuple(SAMPLINGS.values())
_USUAL = ("mechanism", "correlation")  # of which nothing is said when they are the ordinary ones


def read_plan(record: Fields) -> tuple[AnyPlan, Choices]:
    """Plan and choices from the one object that result.json has of both.

    >>> read_plan(Fields({"steps": 5, "optimizer": "SGD(lr=1)", "cosine": True}, "here"))
    (WrittenPlan(record={'steps': 5}), Choices(..., optimizer='SGD(lr=1)', ..., further={'cosine': True}))
    """
    written = {name: value for name, value in record.value.items() if name in _OF_PLAN}
    rest = {name: value for name, value in record.value.items() if name not in _OF_PLAN}
    for name in ("optimizer", "algorithm"):
        if rest.get(name) is not None:
            record.text(name)
    if not isinstance(rest.get("learning_rate"), (str, type(None))):
        record.number("learning_rate")
    if rest.get("federated") is not None:
        record.object("federated")
    choices = Choices(**{name: rest.pop(name) for name in _NAMED if name in rest}, further=rest)
    try:
        return Plan.from_dict(_of_today(written, choices)), choices
    except (ClipwiseError, ArithmeticError, AttributeError, KeyError, TypeError, ValueError):
        return WrittenPlan(written), choices


def _of_today(written: Mapping[str, Any], choices: Choices) -> dict[str, Any]:
    """A plan as it is written today: earlier versions had the mechanism elsewhere."""
    plan = dict(written)
    if "projections" in plan:
        plan["mechanism"] = {"kind": "ProjectedNorms", "projections": plan.pop("projections")}
    users = choices.federated
    if users is not None and "mechanism" not in plan:
        plan["mechanism"] = {"kind": "Rounds", **{name: users.get(name) for name in ("weight_cap", "total_weight")}}
    return plan


def _value(written: Any) -> Any:
    """What a file describes, as far as it has a name."""
    if isinstance(written, Mapping) and written.get("kind") == "mapping":
        pairs = written.get("items")
        if isinstance(pairs, list) and all(_is_pair(each) for each in pairs):
            return {key: _value(item) for key, item in pairs}
    if isinstance(written, Mapping) and "kind" in written:
        values = {name: _value(item) for name, item in written.items() if name != "kind"}
        return WrittenValue(str(written["kind"]), values)
    return written


def _is_pair(value: Any) -> bool:
    """Whether it is a name or a number with a value."""
    return isinstance(value, list) and len(value) == 2 and isinstance(value[0], (str, int, float))


def parts_of(value: Any) -> tuple[str, dict[str, Any]] | None:
    """The class of a chosen value and its arguments, the same for a value and for one that was written down.

    >>> from clipwise import Abadi
    >>> parts_of(Abadi(0.5)) == parts_of(WrittenValue("Abadi", {"R": 0.5})) == ("Abadi", {"R": 0.5})
    True
    """
    if isinstance(value, WrittenValue):
        return value.kind, dict(value.values)
    if isinstance(value, type) or not is_dataclass(value):
        return None
    cls = type(value)
    kind = cls.__name__ if cls.__module__.startswith("clipwise.") else f"{cls.__module__}.{cls.__qualname__}"
    if isinstance(value, _SAMPLINGS):
        return kind, arguments(value)
    return kind, {f.name: getattr(value, f.name) for f in fields(value)}


def has_rule(clip: Any, names: Collection[str]) -> bool:
    """Whether one of these rules clips any group at any step, by what is written down.

    >>> from clipwise import Abadi, Layerwise, MixUp, Unclipped
    >>> has_rule(MixUp(Abadi(1.0), Layerwise(Unclipped(2.0)), 0.5), UNBOUNDED), has_rule(Abadi(1.0), UNBOUNDED)
    (True, False)
    """
    if isinstance(clip, Mapping):
        return any(has_rule(each, names) for each in clip.values())
    parts = parts_of(clip)
    return parts is not None and (parts[0] in names or has_rule(parts[1], names))


def items_of(plan: AnyPlan) -> dict[str, Any]:
    """What a plan says, by name; of an ordinary mechanism nothing is said.

    >>> items_of(WrittenPlan({"version": 1, "steps": 5}))
    {'steps': 5}
    """
    if isinstance(plan, WrittenPlan):
        return {name: _value(value) for name, value in plan.record.items() if name != "version"}
    named = {f.name: (getattr(plan, f.name), f.default) for f in fields(plan)}
    return {name: value for name, (value, usual) in named.items() if name not in _USUAL or value != usual}
