"""Priors on the weights, for sampling from a posterior. They are public, so they cost no privacy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from clipwise._validate import is_positive
from clipwise.errors import InvalidPlan

__all__ = ["FlatPrior", "GaussianPrior", "LaplacePrior", "Prior"]


@runtime_checkable
class Prior(Protocol):
    """A density over every weight, the same for all; write your own as a frozen value with this one method."""

    def log_density_gradient(self, weights: Tensor) -> Tensor:
        """The gradient of log p at these weights, of their shape."""
        ...


def _check_scale(owner: object, name: str, value: object) -> None:
    if not is_positive(value):
        raise InvalidPlan(f"{type(owner).__name__}({name}=...) must be a positive finite number, got {value!r}.")


@dataclass(frozen=True)
class FlatPrior:
    """No preference for any weights.

    >>> FlatPrior().log_density_gradient(torch.ones(2))
    tensor([0., 0.])
    """

    def log_density_gradient(self, weights: Tensor) -> Tensor:
        return torch.zeros_like(weights)


@dataclass(frozen=True)
class GaussianPrior:
    """Every weight is N(0, std^2) before the data are seen: weight decay of 1/(n std^2).

    >>> GaussianPrior(std=0.5).log_density_gradient(torch.tensor([1.0, -2.0]))
    tensor([-4.,  8.])
    """

    std: float

    def __post_init__(self) -> None:
        _check_scale(self, "std", self.std)

    def log_density_gradient(self, weights: Tensor) -> Tensor:
        return weights / -(self.std**2)


@dataclass(frozen=True)
class LaplacePrior:
    """Every weight has density exp(-abs(w)/scale)/(2 scale): a lasso.

    >>> LaplacePrior(scale=0.5).log_density_gradient(torch.tensor([1.0, -2.0]))
    tensor([-2.,  2.])
    """

    scale: float

    def __post_init__(self) -> None:
        _check_scale(self, "scale", self.scale)

    def log_density_gradient(self, weights: Tensor) -> Tensor:
        return torch.sign(weights) / -self.scale
