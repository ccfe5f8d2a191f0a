"""Clipping: per-sample gradient norms -> clipping factors.

A *rule* maps norms to factors and bounds what one sample can contribute (its sensitivity). A *style* says
over which parameters the norm is taken: all together (`Flat`), layer by layer (`Layerwise`) or by named
group (`Groupwise`). A *schedule* answers which style is in force at a step; every style is the constant
schedule of itself. Noise and clipping read the same object at the same step.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from fractions import Fraction
from typing import Literal, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

from clipwise._validate import is_count, is_positive
from clipwise.errors import InvalidPlan

__all__ = [
    "Abadi", "Automatic", "BatchClip", "Clip", "Flat", "Global", "GlobalScaled", "Groupwise", "Layerwise", "MixUp",
    "NoClip", "Normalize", "Rule", "Style", "Unclipped", "as_clip", "as_style", "bounds_of", "by_layer", "is_private",
    "layer_of", "own_noise",
]  # fmt: skip

GroupNames: TypeAlias = Sequence[str] | int


@runtime_checkable
class Rule(Protocol):
    """A frozen value with a sensitivity that maps per-sample norms to factors; write your own in a few lines."""

    @property
    def sensitivity(self) -> float:
        """The largest norm of `factor * gradient`, whatever the gradient."""
        ...

    def __call__(self, norms: Tensor) -> Tensor:
        """Factors of the same shape as `norms`; a norm that is not finite must not give a finite non-zero factor."""
        ...


def _finite(factors: Tensor) -> Tensor:
    """Leave out what no finite factor can bring to length R: zero, subnormal and NaN norms (0/0, overflow)."""
    return factors.nan_to_num(0.0, 0.0, 0.0)


def _at_most(norms: Tensor, bound: float) -> Tensor:
    """1 where a norm is finite and at most `bound`, else 0; a bound over the dtype's range must not let inf pass."""
    return (norms <= min(bound, torch.finfo(norms.dtype).max)).to(norms.dtype)


class _PositiveNumbers:
    """A rule whose numbers are all positive and finite."""

    def __post_init__(self) -> None:
        for f in fields(self):  # type: ignore[arg-type]  # every rule is a dataclass
            value, name = getattr(self, f.name), type(self).__name__
            if not is_positive(value):
                raise InvalidPlan(f"{name}({f.name}=...) must be a positive finite number, got {value!r}.")
            if isinstance(value, int) and value >= 2**63:
                raise InvalidPlan(f"{name}({f.name}=...) is an integer beyond 64 bits; write {float(value):g}.")
            if value < torch.finfo(torch.float32).tiny:
                raise InvalidPlan(f"{name}({f.name}={value!r}) is smaller than float32 can hold.")


@dataclass(frozen=True)
class _UpToR(_PositiveNumbers):
    """A rule that leaves no gradient longer than R."""

    R: float

    @property
    def sensitivity(self) -> float:
        return self.R


@dataclass(frozen=True)
class Abadi(_UpToR):
    """`min(1, R/||g||)`: shorten long gradients to R, leave short ones (Abadi et al., 2016).

    Guarantees: `factor * ||g|| <= R`.

    >>> Abadi(1.0)(torch.tensor([0.5, 2.0]))
    tensor([1.0000, 0.5000])
    """

    def __call__(self, norms: Tensor) -> Tensor:
        return (self.R / norms).clamp(max=1.0)


@dataclass(frozen=True)
class Automatic(_UpToR):
    """`R/(||g|| + gamma)`: every gradient is brought close to length R (automatic clipping, Bu et al., 2022).

    Guarantees: `factor * ||g|| < R`.

    >>> Automatic(R=1.0, gamma=0.01)(torch.tensor([0.0, 0.99]))
    tensor([100.,   1.])
    """

    R: float = 1.0
    gamma: float = 0.01

    def __call__(self, norms: Tensor) -> Tensor:
        return _finite(self.R / (norms + self.gamma))


@dataclass(frozen=True)
class Normalize(_UpToR):
    """`R/||g||`: every gradient has length exactly R; a zero gradient contributes zero.

    Guarantees: `factor * ||g|| <= R`.

    >>> Normalize()(torch.tensor([0.0, 4.0]))
    tensor([0.0000, 0.2500])
    """

    R: float = 1.0

    def __call__(self, norms: Tensor) -> Tensor:
        return _finite(self.R / norms)


@dataclass(frozen=True)
class Global(_UpToR):
    """`1 if ||g|| <= R else 0`: long gradients are left out, short ones kept as they are.

    Guarantees: `factor * ||g|| <= R`.

    >>> Global(1.0)(torch.tensor([0.5, 2.0]))
    tensor([1., 0.])
    """

    def __call__(self, norms: Tensor) -> Tensor:
        return _at_most(norms, self.R)


@dataclass(frozen=True)
class GlobalScaled(_UpToR):
    """`R/Z if ||g|| <= Z else 0`: keep the proportions of all gradients up to Z, leave out longer ones.

    Guarantees: `factor * ||g|| <= R`.

    >>> GlobalScaled(R=1.0, Z=10.0)(torch.tensor([5.0, 20.0]))
    tensor([0.1000, 0.0000])
    """

    Z: float

    def __call__(self, norms: Tensor) -> Tensor:
        return _finite(_at_most(norms, self.Z) * (self.R / self.Z))


@dataclass(frozen=True)
class NoClip:
    """Every factor is 1. Not private: one sample can move the sum without bound.

    >>> NoClip()(torch.tensor([0.5, 2.0])), NoClip().sensitivity
    (tensor([1., 1.]), inf)
    """

    @property
    def sensitivity(self) -> float:
        return math.inf

    def __call__(self, norms: Tensor) -> Tensor:
        return torch.ones_like(norms)


@dataclass(frozen=True)
class BatchClip(_UpToR):
    """One common factor `min(1, R/sum_i ||g_i||)` for the whole batch. Not private, since each factor depends on all.

    >>> BatchClip(1.0)(torch.tensor([1.0, 3.0]))
    tensor([0.2500, 0.2500])
    """

    @property
    def sensitivity(self) -> float:
        return math.inf

    def __call__(self, norms: Tensor) -> Tensor:
        finite = torch.where(torch.isfinite(norms), norms, torch.zeros_like(norms))
        return torch.ones_like(norms) * (self.R / finite.sum()).clamp(max=1.0)


@dataclass(frozen=True)
class Unclipped(_PositiveNumbers, NoClip):
    """`NoClip`, and Gaussian noise of standard deviation `noise_std` on the sum of a batch all the same.

    Noise without clipping (Neelakantan et al., 2015), to compare with. **Not private**: no noise hides what has no
    bound. `Unclipped(noise_std=sigma * R)` adds the noise of a private run with noise multiplier sigma and clipping
    norm R, to every weight and in every style. It is for plans with `noise_multiplier=0`.

    Guarantees: it has no finite sensitivity, so no plan, ledger or report states a finite epsilon for it.

    >>> Unclipped(noise_std=2.0)(torch.tensor([0.5, 2.0])), Unclipped(noise_std=2.0).sensitivity
    (tensor([1., 1.]), inf)
    """

    noise_std: float


def _check_rule(rule: object) -> None:
    if isinstance(rule, type) or not isinstance(rule, Rule):
        raise InvalidPlan(
            f"expected a clipping rule such as Abadi(1.0), got {rule!r}. A rule has a `sensitivity` and is called "
            "with norms to give factors."
        )
    sensitivity = rule.sensitivity
    if not sensitivity > 0:
        raise InvalidPlan(f"the sensitivity of {rule!r} must be positive, got {sensitivity!r}.")
    if math.isfinite(sensitivity):
        norms = torch.logspace(-6, 6, 49, dtype=torch.float64, device="cpu")
        excess = float((rule(norms) * norms).max()) / sensitivity
        if not excess <= 1 + 1e-6:
            raise InvalidPlan(
                f"{rule!r} lets a sample contribute {excess:.6g} times the sensitivity it states ({sensitivity!r})."
            )


def _check_together(rules: Iterable[Rule]) -> None:
    """The rules of one style: where some bring their own noise, all do, so that every weight gets noise."""
    for rule in (given := list(rules)):
        _check_rule(rule)
    if len({isinstance(rule, Unclipped) for rule in given}) > 1:
        raise InvalidPlan(f"Unclipped brings its own noise and others do not: use it for all groups, not in {given}.")


def _joint(sensitivities: Iterable[float]) -> float:
    return math.sqrt(math.fsum(s * s for s in sensitivities))


def _count(groups: GroupNames) -> int:
    return groups if isinstance(groups, int) else len(groups)


def layer_of(name: str) -> str:
    """The module that owns a parameter.

    >>> layer_of("encoder.0.weight")
    'encoder.0'
    """
    return name.rpartition(".")[0]


def by_layer(names: Iterable[str]) -> dict[str, list[str]]:
    """The parameters of each layer.

    >>> by_layer(["0.weight", "0.bias", "2.weight"])
    {'0': ['0.weight', '0.bias'], '2': ['2.weight']}
    """
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(layer_of(name), []).append(name)
    return found


class _Grouped(ABC):
    """What every style does with its groups."""

    @abstractmethod
    def group_of(self, layer: str, parameter: str) -> str:
        """The clipping group of a parameter."""

    def groups(self, names: Iterable[str]) -> dict[str, list[str]]:
        """The parameters of each clipping group, by their full names.

        >>> Groupwise({"*.bias": Abadi(0.1), "*": Abadi(1.0)}).groups(["0.weight", "0.bias", "2.weight"])
        {'*': ['0.weight', '2.weight'], '*.bias': ['0.bias']}
        """
        found: dict[str, list[str]] = {}
        for name in names:
            found.setdefault(self.group_of(layer_of(name), name), []).append(name)
        return found


@dataclass(frozen=True)
class Flat(_Grouped):
    """One norm over all parameters, one factor per sample.

    >>> Flat(Abadi(2.0)).sensitivity()
    2.0
    """

    rule: Rule

    def __post_init__(self) -> None:
        _check_rule(self.rule)

    def group_of(self, layer: str, parameter: str) -> str:
        """The clipping group of a parameter: here always the same one."""
        return ""

    def rule_of(self, group: str) -> Rule:
        """The rule of a group."""
        return self.rule

    def sensitivity(self, groups: GroupNames = 1) -> float:
        """The largest norm of one sample's whole contribution."""
        return self.rule.sensitivity

    def noise_scales(self, groups: Sequence[str]) -> dict[str, float]:
        """Noise standard deviation of each group for noise multiplier 1."""
        return dict.fromkeys(groups, self.sensitivity(groups))

    def at(self, step: int, steps: int) -> Flat:
        """A style is the constant schedule of itself."""
        return self


def _scales(sensitivities: Mapping[str, float], noise: Literal["joint", "per_layer"]) -> dict[str, float]:
    """Noise per group such that the noise-to-sensitivity ratio of the whole vector is the noise multiplier.

    "joint" gives every group the joint sensitivity sqrt(sum R_r^2). "per_layer" gives group r the scale sqrt(L) R_r:
    in units of its own noise each group has sensitivity 1/sqrt(L), jointly 1 again.
    """
    if noise == "joint":
        return dict.fromkeys(sensitivities, _joint(sensitivities.values()))
    return {group: math.sqrt(len(sensitivities)) * s for group, s in sensitivities.items()}


@dataclass(frozen=True)
class Layerwise(_Grouped):
    """One norm and one factor per layer (weight and bias of a module together).

    `rule` is one rule for all layers, or a mapping layer name -> rule that names every layer. `noise="joint"`
    adds noise of std sigma*sqrt(sum R_r^2) to all layers; `"per_layer"` sigma*sqrt(L)*R_r to layer r. The noise
    multiplier is sigma both times.

    >>> Layerwise(Abadi(1.0)).sensitivity(groups=4)
    2.0
    """

    rule: Rule | Mapping[str, Rule]
    noise: Literal["joint", "per_layer"] = "joint"

    def __post_init__(self) -> None:
        if self.noise not in ("joint", "per_layer"):
            raise InvalidPlan(f'Layerwise(noise=...) must be "joint" or "per_layer", got {self.noise!r}.')
        if isinstance(self.rule, Mapping):
            object.__setattr__(self, "rule", dict(self.rule))
            if not self.rule:
                raise InvalidPlan("Layerwise got an empty mapping; name a rule for every layer, or give one rule.")
            _check_together(self.rule.values())
        else:
            _check_rule(self.rule)

    def group_of(self, layer: str, parameter: str) -> str:
        """The clipping group of a parameter: its layer."""
        if isinstance(self.rule, Mapping) and layer not in self.rule:
            known = ", ".join(sorted(self.rule))
            raise InvalidPlan(f"Layerwise has no rule for layer {layer!r} (it names: {known}). Add one.")
        return layer

    def rule_of(self, group: str) -> Rule:
        """The rule of a group."""
        return self.rule[group] if isinstance(self.rule, Mapping) else self.rule

    def sensitivity(self, groups: GroupNames) -> float:
        """The largest norm of one sample's whole contribution, sqrt(sum R_r^2)."""
        if not isinstance(self.rule, Mapping):
            return math.sqrt(_count(groups)) * self.rule.sensitivity
        if isinstance(groups, int):
            raise InvalidPlan("Layerwise with a mapping needs the group names, not their count.")
        return _joint(self.rule_of(group).sensitivity for group in groups)

    def noise_scales(self, groups: Sequence[str]) -> dict[str, float]:
        """Noise standard deviation of each group for noise multiplier 1."""
        return _scales({group: self.rule_of(group).sensitivity for group in groups}, self.noise)

    def at(self, step: int, steps: int) -> Layerwise:
        """A style is the constant schedule of itself."""
        return self


@dataclass(frozen=True)
class Groupwise(_Grouped):
    """One norm and one factor per named group; the first matching pattern of a parameter's name decides.

    >>> style = Groupwise({"encoder.*": Abadi(1.0), "*": Abadi(0.5)})
    >>> style.group_of("head", "head.weight")
    '*'
    """

    rules: Mapping[str, Rule]
    noise: Literal["joint", "per_layer"] = field(default="joint", kw_only=True)

    def __post_init__(self) -> None:
        if not isinstance(self.rules, Mapping) or not self.rules:
            raise InvalidPlan(f"Groupwise needs a mapping name pattern -> rule, got {self.rules!r}.")
        if self.noise not in ("joint", "per_layer"):
            raise InvalidPlan(f'Groupwise(noise=...) must be "joint" or "per_layer", got {self.noise!r}.')
        object.__setattr__(self, "rules", dict(self.rules))
        _check_together(self.rules.values())

    def group_of(self, layer: str, parameter: str) -> str:
        """The clipping group of a parameter: the first pattern that its full name matches."""
        if not parameter:
            raise InvalidPlan("Groupwise needs parameter names: pass dict(model.named_parameters()) as params.")
        for pattern in self.rules:
            if fnmatchcase(parameter, pattern):
                return pattern
        patterns = ", ".join(self.rules)
        raise InvalidPlan(f"no Groupwise pattern ({patterns}) matches parameter {parameter!r}. Add one, such as '*'.")

    def rule_of(self, group: str) -> Rule:
        """The rule of a group."""
        return self.rules[group]

    def sensitivity(self, groups: GroupNames) -> float:
        """The largest norm of one sample's whole contribution, sqrt(sum R_r^2) over the groups in use."""
        if isinstance(groups, int):
            if groups != len(self.rules):
                raise InvalidPlan(f"Groupwise has {len(self.rules)} groups, got the count {groups}; pass the names.")
            groups = list(self.rules)
        return _joint(self.rules[group].sensitivity for group in groups)

    def noise_scales(self, groups: Sequence[str]) -> dict[str, float]:
        """Noise standard deviation of each group for noise multiplier 1."""
        return _scales({group: self.rules[group].sensitivity for group in groups}, self.noise)

    def at(self, step: int, steps: int) -> Groupwise:
        """A style is the constant schedule of itself."""
        return self


Style: TypeAlias = Flat | Layerwise | Groupwise


@runtime_checkable
class Clip(Protocol):
    """A schedule: which style is in force at a step. Styles are constant schedules."""

    def at(self, step: int, steps: int) -> Style:
        """The style of step `step` (from 0) of `steps`."""
        ...


@dataclass(frozen=True)
class MixUp:
    """Small clipping norm first, large at the end: accuracy of the first, calibration of the second (section 5.4).

    `switch_at` is a fraction of the steps (a float in (0, 1)) or a step number (an int). Noise follows the style
    in force, so the noise multiplier, and with it the privacy, is the same throughout.

    >>> clip = MixUp(small=Abadi(0.1), large=Abadi(20.0), switch_at=0.95)
    >>> clip.at(949, 1000), clip.at(950, 1000)
    (Flat(rule=Abadi(R=0.1)), Flat(rule=Abadi(R=20.0)))
    """

    small: Rule | Style
    large: Rule | Style
    switch_at: float | int

    def __post_init__(self) -> None:
        for name in ("small", "large"):
            object.__setattr__(self, name, as_style(getattr(self, name)))
        at = self.switch_at
        step = is_count(at)
        fraction = isinstance(at, float) and 0.0 < at < 1.0
        if not (step or fraction):
            raise InvalidPlan(
                f"MixUp(switch_at=...) must be a fraction in (0, 1) or a positive step number, got {at!r}."
            )

    def switch_step(self, steps: int) -> int:
        """The first step with the large clipping norm."""
        if isinstance(self.switch_at, int):
            if self.switch_at >= steps:
                raise InvalidPlan(f"MixUp switches at step {self.switch_at}, but the plan has only {steps} steps.")
            return self.switch_at
        # As the decimal that was written: in binary 0.07 * 100 is 7.000000000000001, one step too many.
        return math.ceil(Fraction(repr(float(self.switch_at))) * steps)

    def at(self, step: int, steps: int) -> Style:
        """The style of step `step` (from 0) of `steps`."""
        style = self.small if step < self.switch_step(steps) else self.large
        assert isinstance(style, (Flat, Layerwise, Groupwise))
        return style


def as_clip(clip: Rule | Clip) -> Clip:
    """A bare rule means `Flat(rule)`; styles and schedules pass through.

    >>> as_clip(Abadi(1.0))
    Flat(rule=Abadi(R=1.0))
    """
    if isinstance(clip, (Flat, Layerwise, Groupwise)):  # asked at every step; the protocol below is slow to ask for
        return clip
    if isinstance(clip, type):
        raise InvalidPlan(f"expected a clipping value such as Abadi(1.0), got the class {clip.__name__}.")
    return clip if isinstance(clip, Clip) else Flat(clip)


def as_style(clip: Rule | Clip) -> Style:
    """A rule or a style; a schedule is refused where one style is needed.

    >>> as_style(Abadi(1.0))
    Flat(rule=Abadi(R=1.0))
    """
    style = as_clip(clip)
    if not isinstance(style, (Flat, Layerwise, Groupwise)):
        raise InvalidPlan(f"expected a rule or a style, got the schedule {clip!r}. Pass clip.at(step, steps).")
    return style


def _rules(style: Style) -> Mapping[str, Rule]:
    if isinstance(style, Groupwise):
        return style.rules
    return style.rule if isinstance(style.rule, Mapping) else {"": style.rule}


def bounds_of(style: Style) -> tuple[tuple[str, float], ...]:
    """The sensitivities of a style's rules as they are now, by group.

    >>> bounds_of(Groupwise({"*.bias": Abadi(0.1), "*": Abadi(1.0)}))
    (('*.bias', 0.1), ('*', 1.0))
    """
    return tuple((group, rule.sensitivity) for group, rule in _rules(style).items())


def is_private(style: Style) -> bool:
    """Whether one sample's contribution is bounded.

    >>> is_private(Flat(Abadi(1.0))), is_private(Flat(NoClip()))
    (True, False)
    """
    return all(math.isfinite(rule.sensitivity) for rule in _rules(style).values())


def own_noise(style: Style, groups: Iterable[str] | None = None) -> dict[str, float]:
    """The noise that a style's rules bring by themselves, by group (of these groups); without `Unclipped` none.

    >>> own_noise(Layerwise(Unclipped(2.0)), ["0", "2"]), own_noise(Flat(NoClip()))
    ({'0': 2.0, '2': 2.0}, {})
    """
    rules = {group: style.rule_of(group) for group in (_rules(style) if groups is None else groups)}
    return {group: rule.noise_std for group, rule in rules.items() if isinstance(rule, Unclipped)}
