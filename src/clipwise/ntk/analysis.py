"""The matrix that clipping makes of the tangent kernel, its properties, and the rate of the loss that follows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from clipwise.clipping import Clip, Flat, Rule, Style, as_style
from clipwise.errors import InvalidLosses
from clipwise.ntk.dynamics import clipped_sum
from clipwise.ntk.kernels import Route, clipped_kernel, kernel
from clipwise.ntk.network import (
    Inputs,
    LossFunction,
    call,
    evaluating,
    output_gradient,
    refuse_not_finite,
    sample_count,
    sample_losses,
    trainable,
)
from clipwise.ntk.properties import Properties, product_properties, properties

__all__ = ["NTKAnalysis", "analyse"]


@dataclass(frozen=True, eq=False)
class NTKAnalysis(Properties):
    """The matrix M of a clipping style at one point: H, H C or sum_r H_r C_r, with dL/dt = -(dL/df) M (dL/df)^T.

    Its symmetry and positivity are those of `Properties`: where x^T M x >= 0 for every x, the loss cannot rise.
    """

    matrix: Tensor
    """M, of shape (nK, nK), samples first."""
    loss: float
    loss_rate: float
    """dL/dt by the formula above (equations 4.3 and 4.4)."""
    factors: Tensor | dict[str, Tensor]
    """The factors C_i, (n,); for a style with groups, of each group."""
    output_gradient: Tensor
    """dL/df, (nK,)."""
    clip: Style

    @property
    def fraction_clipped(self) -> float:
        """The fraction of factors below 1."""
        parts = [self.factors] if isinstance(self.factors, Tensor) else list(self.factors.values())
        return float((torch.cat(parts) < 1).double().mean())


def _refuse_other_ways(loss_fn: LossFunction, outputs: Tensor, y: Any, weights: dict[str, Tensor]) -> None:
    """The formula knows the loss by its outputs alone: a loss that sees the weights beside them is refused."""
    beside = loss_fn(outputs.detach(), y)
    if not beside.requires_grad:
        return
    found = torch.autograd.grad(beside.sum(), list(weights.values()), allow_unused=True)
    if any(part is not None for part in found):
        raise InvalidLosses(
            "the losses depend on the weights in other ways than through the outputs (a penalty on the weights?), of "
            "which the kernel knows nothing. Leave that part out of loss_fn."
        )


def analyse(
    model: nn.Module,
    loss_fn: LossFunction,
    x: Inputs,
    y: Any,
    clip: Rule | Clip,
    *,
    route: Route | None = None,
    block: int = 128,
    tolerance: float | None = None,
) -> NTKAnalysis:
    """What a clipping rule or style makes of the tangent kernel at the model's present weights.

    `loss_fn(outputs, y)` gives per-sample losses; L is their mean. `route` and `block` are as for `kernel`, `tolerance`
    as for `properties`. The model is run in evaluation mode and left as it was.

    >>> from clipwise.clipping import Abadi, Layerwise, NoClip
    >>> _ = torch.manual_seed(0)
    >>> model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    >>> x, y = torch.randn(4, 2).double(), torch.randn(4).double()
    >>> loss = lambda outputs, y: (outputs.squeeze(1) - y).square()
    >>> for clip in (NoClip(), Abadi(0.1), Layerwise(Abadi(0.1))):
    ...     found = analyse(model, loss, x, y, clip)
    ...     print(found.symmetric, found.positive_quadratic, found.positive_eigenvalues)
    True True True
    False False True
    False False True
    """
    style, weights = as_style(clip), trainable(model)
    sample_count(x)
    with evaluating(model):
        outputs = call(model, x)
        losses = sample_losses(loss_fn, outputs, y)
        refuse_not_finite(losses)
        gradient = output_gradient(losses, outputs).detach()
        _, factors = clipped_sum(losses, weights, style)
        _refuse_other_ways(loss_fn, outputs, y, weights)
    if isinstance(style, Flat):
        H = kernel(model, x, route=route, block=block)
        columns = factors[""].to(H.dtype).repeat_interleave(len(H) // len(losses))
        matrix = H * columns
        found = product_properties(H, columns, matrix, tolerance=tolerance)
    else:
        groups = style.groups(weights)
        matrix = clipped_kernel(model, x, groups, factors, route=route, block=block)
        found = properties(matrix, tolerance=tolerance)
    slope = gradient.to(matrix.dtype)
    return NTKAnalysis(
        matrix=matrix,
        **vars(found),
        loss=float(losses.detach().double().mean()),
        loss_rate=-float(slope.double() @ (matrix @ slope).double()),
        factors=factors[""] if isinstance(style, Flat) else factors,
        output_gradient=gradient,
        clip=style,
    )
