"""The clipped gradient at one point of weight space, and the rate dL/dt at which it moves the loss.

The flow is dw/dt = -(1/n) sum_i C_i g_i (Fact 4.1), so dL/dt = <dL/dw, dw/dt>. Nothing here needs a kernel; the
theory says that it equals -(dL/df) H C (dL/df)^T, and `analyse` computes that.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from clipwise.clipping import Clip, Rule, Style, as_style
from clipwise.engine import clipped_gradients
from clipwise.errors import UnsupportedNode
from clipwise.ntk.network import (
    Inputs,
    LossFunction,
    call,
    evaluating,
    gradients,
    sample_count,
    sample_losses,
    trainable,
)

__all__ = ["Descent", "descent", "loss_rate", "measured_loss_rate"]


@dataclass(frozen=True, eq=False)
class Descent:
    """The loss at one point, the clipped and the true gradient, and what clipping does to the samples."""

    loss: float
    loss_rate: float
    """dL/dt of the clipped flow."""
    unclipped_rate: float
    """dL/dt of the flow without clipping, minus the squared length of dL/dw."""
    alignment: float
    """The cosine of the angle between clipped and true gradient; NaN when one of them is zero."""
    fraction_clipped: float
    """The fraction of factors below 1."""
    clipped: dict[str, Tensor]
    """(1/n) sum_i C_i g_i by parameter; the flow goes against it."""
    factors: dict[str, Tensor]
    """Clipping factors (n,) of every group of parameters; flat clipping has the one group "".."""
    groups: dict[str, list[str]]
    """The parameters of every group."""


def clipped_sum(
    losses: Tensor, weights: Mapping[str, Tensor], style: Style
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """sum_i C_i g_i by parameter and the factors C_i by group; the graph stays alive.

    The sum is that of training, by the engine, or sample by sample where it has no rule for an operation. So are the
    factors, except for gradients of zero: training leaves them out, and the theory asks the rule (C_i = 1 if not
    clipped).
    """
    groups = style.groups(weights)
    try:
        found = clipped_gradients(losses, weights, style, retain_graph=True)
    except UnsupportedNode:
        return _sample_by_sample(losses, weights, style, groups)
    factors = {"": found.factors} if isinstance(found.factors, Tensor) else dict(found.factors)
    for group, names in groups.items():
        if bool((factors[group] == 0).any()):
            norms = sum((found.squared[name] for name in names), torch.zeros_like(found.norms)).sqrt()
            factors[group] = _with_zeros(style.rule_of(group), factors[group], norms, found.bad)
    return found.gradients, factors


def _with_zeros(rule: Rule, factors: Tensor, norms: Tensor, bad: Tensor) -> Tensor:
    """Factors as they are, and what the rule says of a gradient of zero where they are zero for that reason only."""
    left_out = (factors == 0) & ~bad
    norms = norms.masked_fill(bad, 0)
    # Zero up to rounding counts as zero; the smaller keeps what a rule itself leaves out, as Global does.
    said = torch.minimum(rule(norms), rule(norms.masked_fill(left_out, 0))).nan_to_num(0.0, 0.0, 0.0)
    return torch.where(left_out, said.to(factors.dtype), factors)


def _sample_by_sample(
    losses: Tensor, weights: Mapping[str, Tensor], style: Style, groups: Mapping[str, Sequence[str]]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    rows = [gradients(loss, weights) for loss in losses]
    parts = dict(zip(weights, (torch.stack(column) for column in zip(*rows, strict=True)), strict=True))
    squared = {name: part.flatten(1).square().sum(1) for name, part in parts.items()}
    bad = ~torch.isfinite(losses.detach() + sum(squared.values()))
    sums, factors = {}, {}
    for group, names in groups.items():
        norms = sum((squared[name] for name in names), torch.zeros_like(losses)).detach().sqrt().masked_fill(bad, 0)
        factors[group] = style.rule_of(group)(norms).nan_to_num(0.0, 0.0, 0.0).masked_fill(bad, 0)
        for name in names:
            sums[name] = torch.tensordot(factors[group], parts[name].nan_to_num(0.0, 0.0, 0.0), 1)
    return sums, factors


def descent(model: nn.Module, loss_fn: LossFunction, x: Inputs, y: Any, clip: Rule | Clip) -> Descent:
    """The clipped gradient at the model's present weights, and what it does to the loss."""
    style, weights = as_style(clip), trainable(model)
    sample_count(x)
    with evaluating(model):
        losses = sample_losses(loss_fn, call(model, x), y)
        n = len(losses)
        sums, factors = clipped_sum(losses, weights, style)
        true = gradients(losses.mean(), weights)
    clipped = {name: sums[name] / n for name in weights}
    product = _dot(true, list(clipped.values()))
    length, clipped_length = _dot(true, true) ** 0.5, _dot(list(clipped.values()), list(clipped.values())) ** 0.5
    every = torch.cat(list(factors.values()))
    return Descent(
        loss=float(losses.detach().double().mean()),
        loss_rate=-product,
        unclipped_rate=-(length**2),
        alignment=product / (length * clipped_length) if length and clipped_length else float("nan"),
        fraction_clipped=float((every < 1).double().mean()),
        clipped=clipped,
        factors=factors,
        groups=style.groups(weights),
    )


def _dot(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    return float(sum(torch.dot(p.flatten().double(), q.flatten().double()) for p, q in zip(a, b, strict=True)))


def loss_rate(model: nn.Module, loss_fn: LossFunction, x: Inputs, y: Any, clip: Rule | Clip) -> float:
    """dL/dt of the clipped flow at the model's present weights, without forming a kernel.

    >>> from clipwise.clipping import Abadi
    >>> model = nn.Linear(1, 1, bias=False)
    >>> _ = nn.init.ones_(model.weight)
    >>> x, y = torch.ones(1, 1), torch.zeros(1)  # loss w^2 at w = 1: gradient 2, shortened to 1
    >>> loss_rate(model, lambda f, y: (f.squeeze(1) - y).square(), x, y, Abadi(1.0))
    -2.0
    """
    return descent(model, loss_fn, x, y, clip).loss_rate


def measured_loss_rate(
    model: nn.Module, loss_fn: LossFunction, x: Inputs, y: Any, clip: Rule | Clip, step: float = 1e-4
) -> float:
    """dL/dt as seen in training: the change of the loss over small clipped steps, by central differences.

    Accurate to the order of `step` squared where the loss is smooth; the model is left as it was.

    >>> from clipwise.clipping import Abadi
    >>> model = nn.Linear(1, 1, bias=False).double()
    >>> _ = nn.init.ones_(model.weight)
    >>> x, y = torch.ones(1, 1).double(), torch.zeros(1).double()
    >>> round(measured_loss_rate(model, lambda f, y: (f.squeeze(1) - y).square(), x, y, Abadi(1.0)), 6)
    -2.0
    """
    clipped = descent(model, loss_fn, x, y, clip).clipped
    ends = []
    for sign in (1.0, -1.0):
        moved = copy.deepcopy(model)
        with torch.no_grad():
            for name, p in trainable(moved).items():
                p -= sign * step * clipped[name].to(p.dtype)
            with evaluating(moved), torch.no_grad():
                ends.append(float(sample_losses(loss_fn, call(moved, x), y).double().mean()))
    return (ends[0] - ends[1]) / (2 * step)
