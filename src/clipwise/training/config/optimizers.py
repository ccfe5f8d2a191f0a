"""`[optimizer]`: any of `torch.optim` by its name, and a learning rate that is a number or follows R."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from clipwise.clipping import Style
from clipwise.errors import InvalidConfig
from clipwise.training.config.toml import TomlTable, nearest

__all__ = ["LearningRate", "OptimizerChoice", "read_optimizer"]

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
