"""Per-sample norms, gradients and clipped sums straight from the autograd graph of a vector of losses.

`params` is an iterable of tensors or a mapping name -> tensor; results are keyed the same way.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from clipwise.clipping import Clip, Flat, Groupwise, Layerwise, Rule, Style, as_clip
from clipwise.errors import InvalidPlan
from clipwise.engine.check import Summary, check_model, summarize
from clipwise.engine.core import Clipped, Engine, Parameters, Way, clip as _clip, single_gradients, validate

__all__ = ["Clipped", "Summary", "check", "check_model", "clipped_gradients", "per_sample_gradients", "per_sample_norms"]

Params = Iterable[Tensor] | Mapping[str, Tensor]
_ENGINE = Engine()


@torch.no_grad()
def per_sample_norms(losses: Tensor, params: Params, *, retain_graph: bool = False) -> Tensor:
    """The norm of each sample's gradient over all `params` together, shape (B,)."""
    parameters = Parameters(params)
    validate(losses, parameters)
    if losses.shape[0] < 2:
        return _grads_of_few(losses, parameters, retain_graph)[1]
    squared = _ENGINE.backward(losses, parameters, keep=retain_graph).squared_norms()
    return sum(squared.values(), losses.new_zeros(losses.shape)).sqrt()


@torch.no_grad()
def per_sample_gradients(losses: Tensor, params: Params, *, retain_graph: bool = False) -> dict[Any, Tensor]:
    """Each sample's gradient, {parameter or name: (B, *shape)}."""
    parameters = Parameters(params)
    validate(losses, parameters)
    if losses.shape[0] < 2:
        return parameters.keyed(_grads_of_few(losses, parameters, retain_graph)[0])
    found = _ENGINE.backward(losses, parameters, keep=retain_graph).gradients()
    batch = losses.shape[0]
    values = [
        found[place].to(p.dtype) if place in found else p.new_zeros(batch, *p.shape)
        for place, p in enumerate(parameters.tensors)
    ]
    return parameters.keyed(values)


def _grads_of_few(losses: Tensor, parameters: Parameters, keep: bool) -> tuple[list[Tensor], Tensor]:
    if losses.shape[0] == 0:
        return [p.new_zeros(0, *p.shape) for p in parameters.tensors], losses.detach().clone()
    grads = single_gradients(losses, parameters, _ENGINE, keep)
    filled = [
        torch.zeros_like(p) if g is None else g for g, p in zip(grads, parameters.tensors, strict=True)
    ]
    norm = sum((g.double().square().sum() for g in filled), losses.new_zeros((), dtype=torch.float64)).sqrt()
    return [g.unsqueeze(0) for g in filled], norm.view(1).to(losses.dtype)


@torch.no_grad()
def clipped_gradients(
    losses: Tensor, params: Params, clip: Rule | Clip, *, retain_graph: bool = False, way: Way | None = None
) -> Clipped[Any]:
    """The sum over samples of factor_i * g_i; no noise, no division."""
    parameters = Parameters(params)
    validate(losses, parameters)
    style = _style(clip)
    if way not in (None, "bookkeeping", "second_backward"):
        raise ValueError(f'way must be None, "bookkeeping" or "second_backward", got {way!r}.')
    outcome = _clip(losses, parameters, style, _ENGINE, way, retain_graph)
    factors: Tensor | dict[str, Tensor] = outcome.factors
    if isinstance(style, Flat):
        factors = outcome.factors[""]
    return Clipped(parameters.keyed(outcome.sums), outcome.norms, factors, outcome.bad)


def _style(clip: Rule | Clip) -> Style:
    style = as_clip(clip)
    if not isinstance(style, (Flat, Layerwise, Groupwise)):
        raise InvalidPlan(f"expected a rule or a style, got the schedule {clip!r}. Pass clip.at(step, steps).")
    return style


@torch.no_grad()
def check(losses: Tensor, params: Params) -> Summary:
    """Raise NotSeparable or UnsupportedNode with the reason, or say how the gradients will be computed."""
    parameters = Parameters(params)
    validate(losses, parameters)
    return summarize(_ENGINE, losses, parameters)
