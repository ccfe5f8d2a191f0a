"""The four questions that can be asked about a vector of losses, and the clipped sum of step after step.

`params` is an iterable of tensors or a mapping name -> tensor; results are keyed the same way. Nothing is written on
the model, its parameters or the graph.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from clipwise.clipping import Clip, Flat, Groupwise, Layerwise, Rule, Style, as_clip
from clipwise.engine.cache import NO_EVIDENCE, Engine, NothingFinite
from clipwise.engine.clip import Clipped, clip_sum, single_gradients
from clipwise.engine.cost import Way
from clipwise.engine.graph import unrecorded
from clipwise.engine.history import Planning
from clipwise.engine.norms import settled
from clipwise.engine.origin import Declared, Evidence
from clipwise.engine.parameters import Parameters, validate
from clipwise.engine.summary import Summary, summarize
from clipwise.engine.uses import accurate
from clipwise.errors import InvalidLosses, InvalidPlan

__all__ = [
    "Clipped", "Clipper", "Planning", "Summary", "check", "clipped_gradients", "per_sample_gradients",
    "per_sample_norms",
]  # fmt: skip

Params: TypeAlias = Iterable[Tensor] | Mapping[str, Tensor]
Constants: TypeAlias = Iterable[Tensor | nn.Module] | Tensor | nn.Module
_ENGINE = Engine()
_HANDFUL = 8  # plans: one for each structure that a loop really has


@unrecorded
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
        backward = _ENGINE.backward(losses, parameters, Declared(constants), keep=retain_graph)
    except NothingFinite:
        return torch.full_like(losses, torch.nan)
    squared = settled(backward, backward.squared_norms(), losses)
    norms = sum(squared.values(), losses.new_zeros(losses.shape, dtype=torch.float64)).sqrt()
    return norms.to(accurate(losses).dtype)


@unrecorded
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
        found = _ENGINE.backward(losses, parameters, Declared(constants), keep=retain_graph).gradients()
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
    grads = single_gradients(losses, parameters, _ENGINE, keep)
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

    `way` forces how the sum is formed: "bookkeeping" (from the saved tensors) or "second_backward" (plain autograd with
    the factors as cotangents; not in half precision, where autograd would round). Both give the same numbers; left
    out, the cost model chooses.

    Guarantees: adding or removing one sample moves the sum by at most `style.sensitivity(groups)`.

    >>> from clipwise.clipping import Abadi
    >>> w = torch.tensor([3.0, 4.0], requires_grad=True)
    >>> clipped_gradients(torch.tensor([[1.0, 0.0], [0.0, 2.0]]) @ w, {"w": w}, Abadi(1.0)).gradients
    {'w': tensor([1., 1.])}
    """
    return Clipper(params)(losses, clip, Declared(constants), retain_graph=retain_graph, way=way)


class Clipper:
    """`clipped_gradients` for parameters that stay the same from step to step, with their bookkeeping done once."""

    def __init__(self, params: Params) -> None:
        self._parameters = Parameters(params)
        self._before = _ENGINE.planning(self._parameters).plans  # by others, or for others at the same addresses
        self._warned = False

    @property
    def planning(self) -> Planning:
        """How many plans were made for these parameters and what differed."""
        found = _ENGINE.planning(self._parameters)
        plans = found.plans - self._before
        return Planning(plans, found.reasons[-plans:] if plans else ())

    def _report(self) -> None:
        """Warn once when the graph keeps changing: every plan costs several backward passes."""
        if not self._warned and self.planning.plans > _HANDFUL:
            self._warned = True
            differences = "; ".join(dict.fromkeys(self.planning.reasons))
            warnings.warn(
                f"{self.planning.plans} different graphs so far, and each was planned again, which costs several "
                f"backward passes. What differed: {differences}. Pad to a few lengths, or keep such values in tensors.",
                stacklevel=5,
            )

    @unrecorded
    def __call__(
        self,
        losses: Tensor,
        clip: Rule | Clip,
        evidence: Evidence = NO_EVIDENCE,
        *,
        retain_graph: bool = False,
        way: Way | None = None,
    ) -> Clipped[Any]:
        """The clipped sum of one batch."""
        if way not in (None, "bookkeeping", "second_backward"):
            raise InvalidPlan(f'way must be None, "bookkeeping" or "second_backward", got {way!r}.')
        validate(losses, self._parameters)
        clipped = clip_sum(losses, self._parameters, _style(clip), _ENGINE, way, retain_graph, evidence)
        self._report()
        return clipped


def _style(clip: Rule | Clip) -> Style:
    style = as_clip(clip)
    if not isinstance(style, (Flat, Layerwise, Groupwise)):
        raise InvalidPlan(f"expected a rule or a style, got the schedule {clip!r}. Pass clip.at(step, steps).")
    return style


@unrecorded
def check(losses: Tensor, params: Params, *, constants: Constants = ()) -> Summary:
    """Raise NotSeparable or UnsupportedNode with the reason, or say how the gradients will be computed.

    >>> model = torch.nn.Linear(3, 1)
    >>> print(check(model(torch.randn(4, 3)).squeeze(1), dict(model.named_parameters())))  # doctest: +ELLIPSIS
    separable: 4 samples, 1 nodes meet parameters
      AddmmBackward0 (linear; axis 0, the batch; instantiated, lengths): bias, weight
    ...
    """
    parameters = Parameters(params)
    validate(losses, parameters)
    try:
        return summarize(_ENGINE, losses, parameters, Declared(constants))
    except NothingFinite:
        raise InvalidLosses("no loss is finite: there is nothing to check.") from None
