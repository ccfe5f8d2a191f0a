"""The parameters of a call, and what losses must be to be differentiated by them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from clipwise.clipping import Style, layer_of
from clipwise.errors import InvalidLosses, UnsupportedNode

Params: TypeAlias = Iterable[Tensor] | Mapping[str, Tensor]


class Parameters:
    """The parameters of a call: distinct, in order, with their names and layers."""

    def __init__(self, params: Params) -> None:
        named = isinstance(params, Mapping)
        pairs: list[tuple[str, Any]] = (
            list(params.items()) if isinstance(params, Mapping) else [("", p) for p in params]
        )
        for name, p in pairs:
            if not isinstance(p, Tensor):
                raise InvalidLosses(f"params must be tensors or a mapping name -> tensor, got {type(p).__name__}.")
            if not p.is_leaf:
                raise InvalidLosses(
                    f"params must be the parameters themselves, but {name or 'one'} of shape {tuple(p.shape)} is "
                    "computed from others. Pass those, or detach it and call requires_grad_() before it is used."
                )
        self.keys: list[list[Any]] = []
        self.tensors: list[Tensor] = []
        self.names: list[str] = []
        self.position: dict[int, int] = {}
        for name, p in pairs:
            place = self.position.get(id(p))
            if place is None:
                place = self.position[id(p)] = len(self.tensors)
                self.tensors.append(p)
                self.names.append(name)
                self.keys.append([])
            self.keys[place].append(name if named else p)
        self.identity = tuple(self.position)
        self._grouped: tuple[Style, dict[str, list[int]]] | None = None

    def describe(self, place: int) -> str:
        """A parameter as an error message names it."""
        return self.names[place] or f"#{place} of shape {tuple(self.tensors[place].shape)}"

    def layer(self, place: int) -> str:
        """The module that owns a parameter: its name before the last dot, or itself when it has no name."""
        name = self.names[place]
        return layer_of(name) if name else f"#{place}"

    def keyed(self, values: Sequence[Tensor]) -> dict[Any, Tensor]:
        """Values in order of the parameters, keyed as the caller gave them."""
        return {key: value for keys, value in zip(self.keys, values, strict=True) for key in keys}

    def groups(self, style: Style) -> dict[str, list[int]]:
        """Clipping groups of a style and the places of their parameters."""
        if self._grouped is None or self._grouped[0] is not style:
            groups: dict[str, list[int]] = {}
            for place, name in enumerate(self.names):
                groups.setdefault(style.group_of(self.layer(place), name), []).append(place)
            self._grouped = style, groups
        return self._grouped[1]


def check_vector(losses: Tensor) -> None:
    """Refuse losses that are not one number for each sample, and say how to get there.

    >>> check_vector(torch.ones(4, 1))
    Traceback (most recent call last):
    clipwise.errors.InvalidLosses: losses must have shape (B,), one loss per sample, got (4, 1). Use losses.squeeze(1).
    """
    if not isinstance(losses, Tensor):
        raise InvalidLosses(
            f"losses must be a tensor of shape (B,), one loss per sample, got {type(losses).__name__}. "
            "Use reduction='none'."
        )
    if losses.dim() == 1:
        return
    if losses.dim() == 0:
        remedy = (
            "This is a mean or a sum over the batch, from which no sample's gradient can be read. Use "
            "reduction='none'. The `loss` of a Hugging Face model is such a mean: compute losses from its `logits`."
        )
    elif losses.dim() == 2 and losses.shape[1] == 1:
        remedy = "Use losses.squeeze(1)."
    elif losses.dim() == 2 and losses.shape[0] == losses.shape[1]:
        remedy = (
            "If outputs have shape (B, 1) and targets (B,), all pairs of them were compared: use outputs.squeeze(1). "
            "Else a sample has several terms: sum or average them per sample."
        )
    else:
        remedy = "A sample has several terms: sum or average them per sample, as losses.flatten(1).mean(1) does."
    raise InvalidLosses(f"losses must have shape (B,), one loss per sample, got {tuple(losses.shape)}. {remedy}")


def validate(losses: Tensor, parameters: Parameters) -> None:
    """Refuse losses that are not a differentiable vector."""
    check_vector(losses)
    if not losses.is_floating_point():
        raise InvalidLosses(f"losses must be floating point, got {losses.dtype}.")
    if not parameters.tensors:
        raise InvalidLosses("params is empty: there is nothing to differentiate.")
    for p in parameters.tensors:
        if not p.requires_grad or p.is_complex() or p.layout != torch.strided:
            _refuse(parameters)
    if losses.numel() and losses.grad_fn is None:
        raise InvalidLosses(
            "losses do not require grad: they were computed under no_grad, detached, or from frozen parameters."
        )


def _refuse(parameters: Parameters) -> None:
    """Refuse parameters that are frozen, complex or sparse."""
    if not all(p.requires_grad for p in parameters.tensors):
        frozen = [parameters.describe(k) for k, p in enumerate(parameters.tensors) if not p.requires_grad]
        raise InvalidLosses(
            f"params holds frozen parameters (requires_grad=False): {', '.join(frozen[:3])}. Leave them out, so that "
            "they get no noise."
        )
    if any(p.is_complex() for p in parameters.tensors):
        raise UnsupportedNode("complex parameters have no per-sample rules; store their real and imaginary parts.")
    if any(p.layout != torch.strided for p in parameters.tensors):
        raise UnsupportedNode("sparse parameters have no per-sample rules: noise is dense. Store them with to_dense().")
