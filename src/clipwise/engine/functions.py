"""The four questions that can be asked about a vector of losses.

`params` is an iterable of tensors or a mapping name -> tensor; results are keyed the same way. Nothing is written on
the model, its parameters or the graph.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from clipwise.clipping import Clip, Rule
from clipwise.engine.cache import ENGINE, NothingFinite
from clipwise.engine.clip import Clipped, Clipper, single_gradients
from clipwise.engine.cost import Way
from clipwise.engine.graph import unrecorded
from clipwise.engine.norms import settled
from clipwise.engine.origin import Declared
from clipwise.engine.parameters import Parameters, Params, validate
from clipwise.engine.summary import Summary, summarize
from clipwise.engine.uses import accurate
from clipwise.errors import InvalidLosses

__all__ = [
    "Clipped", "Clipper", "Summary", "check", "clipped_gradients", "per_sample_gradients",
    "per_sample_norms",
]  # fmt: skip

Constants: TypeAlias = Iterable[Tensor | nn.Module] | Tensor | nn.Module


@unrecorded()
def per_sample_norms(
    losses: Tensor, params: Params, *, retain_graph: bool = False, constants: Constants = ()
) -> Tensor:
    """The norm of each sample's gradient over all `params` together, shape (B,).

    >>> w = torch.tensor([3.0, 4.0], requires_grad=True)
    >>> per_sample_norms(torch.tensor([[1.0, 0.0], [0.0, 2.0]]) @ w, [w])
    tensor([1., 2.])
    """
    parameters = Parameters(params)
    validate(losses, parameters)
    if losses.shape[0] < 2:
        return _few(losses, parameters, retain_graph)[1]
    try:
        backward = ENGINE.backward(losses, parameters, Declared(constants), keep=retain_graph)
    except NothingFinite:
        return torch.full_like(losses, torch.nan)
    squared = settled(backward, backward.squared_norms(), losses)
    norms = sum(squared.values(), losses.new_zeros(losses.shape, dtype=torch.float64)).sqrt()
    return norms.to(accurate(losses).dtype)


@unrecorded()
def per_sample_gradients(
    losses: Tensor, params: Params, *, retain_graph: bool = False, constants: Constants = ()
) -> dict[Any, Tensor]:
    """Each sample's gradient, {parameter or name: (B, *shape)}.

    >>> w = torch.tensor([3.0, 4.0], requires_grad=True)
    >>> per_sample_gradients(torch.tensor([[1.0, 0.0], [0.0, 2.0]]) @ w, {"w": w})
    {'w': tensor([[1., 0.],
            [0., 2.]])}
    """
    parameters = Parameters(params)
    validate(losses, parameters)
    if losses.shape[0] < 2:
        return parameters.keyed(_few(losses, parameters, retain_graph)[0])
    batch = losses.shape[0]
    try:
        found = ENGINE.backward(losses, parameters, Declared(constants), keep=retain_graph).gradients()
    except NothingFinite:
        found = {k: p.new_full((batch, *p.shape), torch.nan) for k, p in enumerate(parameters.tensors)}
    values = [
        found[place].to(p.dtype) if place in found else p.new_zeros(batch, *p.shape)
        for place, p in enumerate(parameters.tensors)
    ]
    return parameters.keyed(values)


def _few(losses: Tensor, parameters: Parameters, keep: bool) -> tuple[list[Tensor], Tensor]:
    """Gradients and norms of no sample or one, by plain autograd."""
    if losses.shape[0] == 0:
        return [p.new_zeros(0, *p.shape) for p in parameters.tensors], losses.detach().clone()
    grads = single_gradients(losses, parameters, keep)
    filled = [torch.zeros_like(p) if g is None else g for g, p in zip(grads, parameters.tensors, strict=True)]
    norm = sum((g.double().square().sum() for g in filled), losses.new_zeros((), dtype=torch.float64)).sqrt()
    return [g.unsqueeze(0) for g in filled], norm.view(1).to(accurate(losses).dtype)


def clipped_gradients(
    losses: Tensor,
    params: Params,
    clip: Rule | Clip,
    *,
    retain_graph: bool = False,
    way: Way | None = None,
    constants: Constants = (),
) -> Clipped[Any]:
    """The sum over samples of factor_i * g_i; no noise, no division.

    `way` forces how the sum is formed: "bookkeeping" (from what the backward pass for the norms has left) or
    "second_backward" (in a second pass, where there is no memory to keep it). Both give the same numbers; left out, the
    cost model chooses.

    Guarantees: adding or removing one sample moves the sum by at most `style.sensitivity(groups)`.

    >>> from clipwise.clipping import Abadi
    >>> w = torch.tensor([3.0, 4.0], requires_grad=True)
    >>> clipped_gradients(torch.tensor([[1.0, 0.0], [0.0, 2.0]]) @ w, {"w": w}, Abadi(1.0)).gradients
    {'w': tensor([1., 1.])}
    """
    return Clipper(params)(losses, clip, Declared(constants), retain_graph=retain_graph, way=way)


@unrecorded()
def check(losses: Tensor, params: Params, *, constants: Constants = ()) -> Summary:
    """Raise NotSeparable or UnsupportedNode with the reason, or say how the gradients will be computed.

    >>> model = torch.nn.Linear(3, 1)
    >>> print(check(model(torch.randn(4, 3)).squeeze(1), dict(model.named_parameters())))  # doctest: +ELLIPSIS
    separable: 4 samples, 1 node meets parameters
      AddmmBackward0 (linear; axis 0, the batch; instantiated, lengths): bias, weight
    ...
    """
    parameters = Parameters(params)
    validate(losses, parameters)
    try:
        return summarize(ENGINE, losses, parameters, Declared(constants))
    except NothingFinite:
        raise InvalidLosses("no loss is finite: there is nothing to check.") from None
