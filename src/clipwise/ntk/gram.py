"""The Gram route: features of a block of samples from the autograd graph, by the engine.

One backward pass per output, which stops where parameters meet the batch; the forward pass and its activations are
shared by all outputs. The Jacobian as a whole is never formed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from clipwise.engine import Backward, Engine, NothingFinite, Parameters, Use
from clipwise.errors import DataError
from clipwise.ntk.features import Feature, Rows, from_uses, stacked
from clipwise.ntk.network import Inputs, flat_outputs, trainable

_ENGINE = Engine()


def gram_features(model: nn.Module, x: Inputs) -> tuple[dict[str, Feature], int]:
    """The features of every parameter that is reached, for two samples or more, and the number of outputs."""
    weights = trainable(model)
    parameters = Parameters(weights)
    outputs = flat_outputs(model, x)
    if outputs.grad_fn is None:
        raise DataError("the outputs do not depend on the trainable parameters.")
    columns = outputs.unbind(1)
    with torch.no_grad():
        passes = [_one_pass(column, parameters) for column in columns]
    found = {}
    for place, name in enumerate(weights):
        parts = [each.get(place) for each in passes]
        if any(part is not None for part in parts):
            found[name] = _feature(parts, outputs.shape[0])
    return found, len(columns)


def _one_pass(output_b: Tensor, parameters: Parameters) -> dict[int, Use | Tensor]:
    """For each parameter that an output reaches its use, or its per-sample gradients (b, p) if it has no single one."""
    try:
        backward = _ENGINE.backward(output_b, parameters, keep=True)
    except NothingFinite:
        raise DataError("an output is not finite for any sample, so it has no tangent kernel.") from None
    found: dict[int, Use | Tensor] = {}
    others = []
    for place in backward.plan.roots:
        use = _single_use(backward, place)
        if use is None:
            others.append(place)
        else:
            found[place] = use
    if others:
        gradients = backward.gradients()
        found.update((place, gradients[place].flatten(1)) for place in others if place in gradients)
    return found


def _single_use(backward: Backward, place: int) -> Use | None:
    """The use of a parameter that is met once, as a whole; transposed or not is the same for all outputs of a graph."""
    plan = backward.plan
    edge = plan.roots[place][0]
    chain = plan.chains.get(edge)
    if edge not in plan.solo or chain is None or not chain.direct:
        return None
    uses = backward.uses.get(edge, [])
    return uses[0] if uses else None


def _feature(parts: Sequence[Use | Tensor | None], batch_size: int) -> Feature:
    uses = [part for part in parts if not isinstance(part, Tensor)]
    if len(uses) == len(parts):
        return from_uses(uses, batch_size)
    formed = [part.gradients().reshape(batch_size, -1) if isinstance(part, Use) else part for part in parts]
    return Rows(stacked(formed).flatten(0, 1))
