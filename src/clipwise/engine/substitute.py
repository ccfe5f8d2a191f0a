"""Call a function of a model with other weights in it, leaving the model as it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Substitute"]


class Substitute(nn.Module):
    """`function(model, *args)`, to be called with other weights.

    >>> model = nn.Linear(2, 1, bias=False)
    >>> doubled = Substitute(model, lambda model, x: 2 * model(x))
    >>> doubled.with_weights({"weight": torch.ones(1, 2)}, torch.tensor([3.0, 4.0]))
    tensor([14.])
    """

    def __init__(self, model: nn.Module, function: Callable[..., Any]) -> None:
        super().__init__()
        self.model = model
        self.function = function

    def forward(self, *args: Any) -> Any:
        """The function with whatever weights the model has at the moment."""
        return self.function(self.model, *args)

    def with_weights(self, weights: Mapping[str, Tensor], *args: Any) -> Any:
        """The function with these weights in place of the model's own of these names."""
        return torch.func.functional_call(self, {f"model.{name}": w for name, w in weights.items()}, args)
