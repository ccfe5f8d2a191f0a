"""A network as the theory sees it: weights w, outputs f(x_i, w) with K numbers each, losses of single samples.

Inputs are a tensor, a tuple of tensors (`model(*x)`) or a mapping (`model(**x)`), always with the samples on the
first axis. The outputs are a tensor, or the `logits` of what the model returns. Dropout is off: the kernel of a
random network is not defined.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from clipwise.errors import DataError, InvalidLosses

Inputs: TypeAlias = Tensor | Sequence[Tensor] | Mapping[str, Tensor]
LossFunction: TypeAlias = Callable[[Tensor, Any], Tensor]  # (outputs, y) -> per-sample losses (n,)


def _tensors(x: Inputs) -> list[Tensor]:
    parts = [x] if isinstance(x, Tensor) else list(x.values() if isinstance(x, Mapping) else x)
    if not parts or not all(isinstance(part, Tensor) and part.dim() for part in parts):
        raise DataError("x must be a tensor, a tuple or a mapping of tensors, with the samples on the first axis.")
    return parts


def sample_count(x: Inputs) -> int:
    """The number of samples, the same in all parts."""
    counts = {part.shape[0] for part in _tensors(x)}
    if len(counts) != 1 or counts == {0}:
        raise DataError(f"all parts of x need the same number of samples, at least one, got {sorted(counts)}.")
    return counts.pop()


def map_inputs(x: Inputs, change: Callable[[Tensor], Tensor]) -> Inputs:
    """The same inputs with every tensor changed."""
    if isinstance(x, Tensor):
        return change(x)
    if isinstance(x, Mapping):
        return {name: change(part) for name, part in x.items()}
    return tuple(change(part) for part in x)


def call(model: Callable[..., Any], x: Inputs) -> Tensor:
    """The outputs of the model, as it gives them."""
    found = model(x) if isinstance(x, Tensor) else model(**x) if isinstance(x, Mapping) else model(*x)
    outputs = found if isinstance(found, Tensor) else getattr(found, "logits", None)
    if not isinstance(outputs, Tensor) or not outputs.is_floating_point():
        raise DataError(
            f"the model must return a floating point tensor or something with `logits`, got {type(found).__name__}."
        )
    return outputs


def flat_outputs(model: Callable[..., Any], x: Inputs) -> Tensor:
    """The outputs as (n, K); refused when the first axis is not the samples'."""
    outputs = call(model, x)
    n = sample_count(x)
    if outputs.dim() == 0 or outputs.shape[0] != n:
        raise DataError(f"the outputs need the {n} samples on their first axis, got shape {tuple(outputs.shape)}.")
    return outputs.reshape(n, -1)


def trainable(model: nn.Module) -> dict[str, Tensor]:
    """The weights w, by name: every parameter that is not frozen."""
    found: dict[str, Tensor] = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not found:
        raise DataError("the model has no trainable parameter, so it has no tangent kernel.")
    if any(p.is_complex() for p in found.values()):
        raise DataError("complex parameters have no tangent kernel here; store their real and imaginary parts.")
    return found


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode with gradients, and every module's own mode restored."""
    before = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.enable_grad():
            yield
    finally:
        for module, training in before:
            module.training = training


def sample_losses(loss_fn: LossFunction, outputs: Tensor, y: Any) -> Tensor:
    """The per-sample losses (n,); refused when they are not one per sample."""
    if outputs.dim() == 0:
        raise DataError("the model returned a single number; its outputs need the samples on their first axis.")
    losses = loss_fn(outputs, y)
    n = outputs.shape[0]
    if not isinstance(losses, Tensor) or losses.shape != (n,):
        shape = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
        raise InvalidLosses(
            f"loss_fn(outputs, y) must give one loss per sample, shape ({n},), got {shape}. Use reduction='none'."
        )
    return losses


def gradients(loss: Tensor, weights: Mapping[str, Tensor]) -> list[Tensor]:
    """The gradient of a number by every weight, zero where it does not depend on it; the graph stays alive."""
    found = torch.autograd.grad(loss, list(weights.values()), retain_graph=True, materialize_grads=True)
    return [part.to_dense() if part.is_sparse else part for part in found]  # embeddings may have sparse ones


def output_gradient(losses: Tensor, outputs: Tensor) -> Tensor:
    """The row dL/df of the mean loss L, shape (nK,), samples first."""
    if outputs.grad_fn is None or losses.grad_fn is None:
        raise InvalidLosses("the losses do not depend on the trainable parameters, so the theory has nothing to say.")
    (gradient,) = torch.autograd.grad(losses.sum(), outputs, retain_graph=True, materialize_grads=True)
    return gradient.reshape(-1) / losses.shape[0]


def refuse_not_finite(losses: Tensor) -> None:
    """The theory needs a loss of every sample; training leaves out those that have none."""
    bad = (~torch.isfinite(losses.detach())).nonzero().flatten().tolist()
    if bad:
        raise DataError(f"the losses of {len(bad)} of {len(losses)} samples are not finite, the first is {bad[0]}.")
