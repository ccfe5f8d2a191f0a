"""`[clip]`, `[correlation]` and `[optimizer]`: how a step is clipped, what its noise depends on, how it is taken.

A clipping rule, style or schedule has the name that Python code uses for it:

```toml
[clip]                    # flat: one norm over all parameters
rule = "Abadi"
R = 1.0

[clip]                    # one rule for every layer; or [clip.layers] with a rule for each by its name
style = "Layerwise"
rule = "Abadi"
R = 0.5
noise = "per_layer"

[clip]                    # the first pattern that a parameter's name matches decides
style = "Groupwise"
[clip.groups]
"encoder.*" = { rule = "Abadi", R = 1.0 }
"*" = { rule = "Abadi", R = 0.5 }

[clip]                    # each of the two is a table like the ones above
schedule = "MixUp"
switch_at = 0.95          # a fraction of the steps, or a step number
small = { rule = "Abadi", R = 0.1 }
large = { rule = "Abadi", R = 20.0 }

[clip]                    # a norm that follows the median of the norms
rule = "AdaptiveClip"
R = 1.0                   # where it starts
quantile = 0.5
floor = 0.1               # below which it never falls
```

An optimizer is any of `torch.optim` by its name, with a learning rate that is a number or follows R.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from clipwise import clipping
from clipwise.clipping import Clip, Flat, Groupwise, Layerwise, MixUp, Rule, Style
from clipwise.correlation import CORRELATIONS, Correlation
from clipwise.errors import InvalidConfig, InvalidPlan
from clipwise.mechanisms import AdaptiveClip
from clipwise.training.config.toml import TomlTable, nearest

__all__ = ["LearningRate", "OptimizerChoice", "read_clip", "read_correlation", "read_optimizer"]

RULES: dict[str, type[Any]] = {
    rule.__name__: rule
    for rule in (
        clipping.Abadi,
        clipping.Automatic,
        clipping.BatchClip,
        clipping.Global,
        clipping.GlobalScaled,
        clipping.NoClip,
        clipping.Normalize,
        clipping.Unclipped,
    )
}
ADAPTIVE = AdaptiveClip.__name__
STYLES = ("Flat", "Groupwise", "Layerwise")
SCHEDULES = ("MixUp",)


_OF_A_SCHEDULE = (
    "a schedule has its norms in small and large, such as small.R. For one norm in all steps give the whole table: "
    "--set 'clip={rule=\"Abadi\",R=1}'."
)


def read_clip(table: TomlTable) -> Clip:
    """The clipping of a table.

    >>> from clipwise.training.config.toml import TomlText
    >>> read_clip(TomlText.parse('rule = "Automatic"').root())
    Flat(rule=Automatic(R=1.0, gamma=0.01))
    """
    try:
        if table.text("schedule", None, SCHEDULES) is None:
            return _adaptive(table) if table.raw("rule") == ADAPTIVE and "style" not in table else _style(table)
        for name in ("R", "rule", "style"):
            if name in table:
                table.fail(name, _OF_A_SCHEDULE)
        at = table.raw("switch_at")
        if at is None:
            table.fail(None, "'switch_at' is missing; it is a fraction of the steps, or a step number.")
        small, large = (_style(_needed(table, name)) for name in ("small", "large"))
        table.close()
        return MixUp(small, large, at)
    except InvalidConfig:
        raise
    except InvalidPlan as error:
        table.fail(None, str(error))


def read_correlation(table: TomlTable) -> Correlation:
    r"""How the noise of a step depends on that of earlier steps; without a table it does not.

    >>> from clipwise.training.config.toml import TomlText
    >>> read_correlation(TomlText.parse('kind = "banded"\nbands = 8').root())
    Banded(bands=8, momentum=0.0, learning_rates=None)
    """
    names = [name.replace("_", "-") for name in CORRELATIONS]
    kind = CORRELATIONS[table.text("kind", "independent", names).replace("-", "_")]
    known = {f.name for f in fields(kind)}
    given: dict[str, Any] = {name: table.integer(name) for name in ("bands",) if name in known}
    if "momentum" in known:
        given["momentum"] = table.raw("momentum") or 0.0
    table.close()
    try:
        made: Correlation = kind(**given)
    except InvalidPlan as error:
        table.fail(None, str(error))
    return made


def _needed(table: TomlTable, name: str) -> TomlTable:
    inner = table.table(name)
    if not inner.values:
        table.fail(None, f"{name!r} is missing; it is a table with a rule.")
    return inner


def _style(table: TomlTable) -> Style:
    name = table.text("style", "Flat", STYLES)
    if name == "Flat":
        return Flat(_rule(table))
    noise: Any = table.text("noise", "joint", ("joint", "per_layer"))
    if name == "Groupwise":
        groups = _rules(_needed(table, "groups"))
        table.close()
        return Groupwise(groups, noise=noise)
    if "layers" not in table:
        return Layerwise(_rule(table), noise)
    layers = _rules(_needed(table, "layers"))
    table.close()
    return Layerwise(layers, noise)


def _rules(table: TomlTable) -> Mapping[str, Rule]:
    return {name: _rule(inner) for name, inner in table.tables().items()}


def _rule(table: TomlTable) -> Rule:
    """A rule and its numbers; nothing else may be in the table."""
    name = table.text("rule", choices=(*RULES, ADAPTIVE))
    if name == ADAPTIVE:
        table.fail("rule", f"{ADAPTIVE} has one norm over all parameters, for all steps: it stands in [clip] alone.")
    rule: Rule = RULES[name](**_numbers(table, RULES[name]))
    return rule


def _adaptive(table: TomlTable) -> AdaptiveClip:
    table.text("rule")
    return AdaptiveClip(**_numbers(table, AdaptiveClip))


def _numbers(table: TomlTable, kind: type[Any]) -> dict[str, Any]:
    numbers = {
        f.name: table.number(f.name) if f.default is MISSING else table.number(f.name, f.default) for f in fields(kind)
    }
    table.close()
    return numbers


_OVER_R = re.compile(r"\s*([0-9.eE+-]+)\s*/\s*R\s*")


@dataclass(frozen=True)
class LearningRate:
    """A number, or `c / R` with R the joint sensitivity of the clipping in force.

    With the latter the noise in a step is the same for every R, and the clipping norm decides only what is clipped.

    >>> from clipwise.clipping import Abadi, Flat
    >>> LearningRate(2.0, over_R=True).at(Flat(Abadi(10.0)), ["layer.weight"])
    0.2
    """

    value: float
    over_R: bool = False  # noqa: N815

    def at(self, style: Style, names: Sequence[str]) -> float:
        """The rate of a step with this style, for these trainable parameters."""
        if not self.over_R:
            return self.value
        sensitivity = style.sensitivity(list(style.groups(names)))
        if not math.isfinite(sensitivity):
            raise InvalidConfig(f"optimizer.learning_rate: {self} needs a clipping norm R, and {style!r} has none.")
        return self.value / sensitivity

    def __str__(self) -> str:
        return f"{self.value:g} / R" if self.over_R else f"{self.value:g}"


@dataclass(frozen=True)
class OptimizerChoice:
    """An optimizer class of `torch.optim`, its learning rate and its options."""

    name: str
    learning_rate: LearningRate
    options: Mapping[str, Any]

    def build(self, parameters: Iterable[Tensor]) -> Optimizer:
        """The optimizer for these parameters; the loop sets its learning rate before every step."""
        try:
            made: Optimizer = getattr(torch.optim, self.name)(parameters, lr=self.learning_rate.value, **self.options)
        except (TypeError, ValueError) as error:
            raise InvalidConfig(f"[optimizer]: torch.optim.{self.name} refuses its options: {error}") from error
        return made

    def __str__(self) -> str:
        options = "".join(f", {name}={value!r}" for name, value in self.options.items())
        return f"{self.name}(lr={self.learning_rate}{options})"


def _classes() -> dict[str, type[Optimizer]]:
    found = {name: value for name, value in vars(torch.optim).items() if isinstance(value, type)}
    return {name: cls for name, cls in found.items() if issubclass(cls, Optimizer) and cls is not Optimizer}


def read_optimizer(table: TomlTable) -> OptimizerChoice:
    r"""The optimizer that a table describes; whatever it has besides name and rate goes to the class.

    >>> from clipwise.training.config.toml import TomlText
    >>> str(read_optimizer(TomlText.parse('name = "SGD"\nlearning_rate = "1.5 / R"\nmomentum = 0.9').root()))
    'SGD(lr=1.5 / R, momentum=0.9)'
    """
    classes = _classes()
    name = table.text("name", "SGD", classes)
    rate = _learning_rate(table)
    known = [p for p in inspect.signature(classes[name]).parameters if p not in ("params", "lr")]
    options = table.rest()
    for option, value in options.items():
        if option == "lr":
            table.fail(option, "is called learning_rate here.")
        if option not in known:
            table.fail(option, f"torch.optim.{name} has no such option; {nearest(option, known)}")
        options[option] = tuple(value) if isinstance(value, list) else value
    return OptimizerChoice(name, rate, options)


def _learning_rate(table: TomlTable) -> LearningRate:
    given = table.raw("learning_rate")
    if not isinstance(given, str):
        return LearningRate(table.number("learning_rate"))
    match = _OVER_R.fullmatch(given)
    try:
        value = float(match[1]) if match else math.nan
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        table.fail("learning_rate", f"expected a number, or a string such as '1.5 / R', got {given!r}.")
    return LearningRate(value, over_R=True)
