"""Element-wise operations whose shared operand is broadcast over the batch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from clipwise.engine.node import Node, saved
from clipwise.engine.rules.base import Finish, Operand, Rule, Samples, carries_batch, sum_to_operand
from clipwise.engine.uses import Dense, Use

Local = Callable[[Tensor], Tensor]  # output gradient -> gradient of the operand before it is summed down


def _elementwise(local: Callable[[Node, int], Local]) -> Rule:
    """The rule of an operation from its derivative by each operand."""

    def rule(operand: Operand, samples: Samples) -> Finish:
        gradient_of = local(operand.node, operand.position)
        return lambda gradient: sum_to_operand(gradient_of(gradient), samples, operand, operand.shape)

    return rule


@_elementwise
def add(node: Node, position: int) -> Local:
    """`a + alpha * b`."""
    alpha = 1 if position == 0 else saved(node, "alpha")
    return (lambda g: g) if alpha == 1 else (lambda g: g * alpha)


@_elementwise
def sub(node: Node, position: int) -> Local:
    """`a - alpha * b`."""
    alpha = saved(node, "alpha")
    return (lambda g: g) if position == 0 else (lambda g: g * -alpha)


@_elementwise
def rsub(node: Node, position: int) -> Local:
    """`b - alpha * a`."""
    alpha = saved(node, "alpha")
    return (lambda g: g * -alpha) if position == 0 else (lambda g: g)


@_elementwise
def mul(node: Node, position: int) -> Local:
    """`a * b`."""
    other = saved(node, "other") if position == 0 else saved(node, "self")
    return lambda g: g * other


@_elementwise
def div(node: Node, position: int) -> Local:
    """`a / b`."""
    denominator = saved(node, "other")
    if position == 0:
        return lambda g: g / denominator
    numerator = saved(node, "self")
    return lambda g: -g * ((numerator / denominator) / denominator)


@_elementwise
def where(node: Node, position: int) -> Local:
    """`torch.where(condition, a, b)`."""
    condition = saved(node, "condition")
    return lambda g: torch.where(condition if position == 0 else ~condition, g, 0)


@_elementwise
def masked_fill(node: Node, position: int) -> Local:
    """`a.masked_fill(mask, b)`."""
    mask = saved(node, "mask")
    return lambda g: torch.where(~mask if position == 0 else mask, g, 0)


@_elementwise
def prelu(node: Node, position: int) -> Local:
    """The slope of `F.prelu`."""
    inputs = saved(node, "self")
    return lambda g: torch.where(inputs > 0, 0, inputs * g)


@_elementwise
def lerp(node: Node, position: int) -> Local:
    """`a + weight * (b - a)`."""
    if position == 2:
        span = saved(node, "end") - saved(node, "self")
        return lambda g: g * span
    weight = saved(node, "weight")
    return (lambda g: g * (1 - weight)) if position == 0 else (lambda g: g * weight)


@_elementwise
def addcmul(node: Node, position: int) -> Local:
    """`a + value * b * c`."""
    if position == 0:
        return lambda g: g
    other = (saved(node, "tensor2") if position == 1 else saved(node, "tensor1")) * saved(node, "value")
    return lambda g: g * other


@_elementwise
def power(node: Node, position: int) -> Local:
    """`a ** b`."""
    base, exponent = saved(node, "self"), saved(node, "exponent")
    if position == 0:
        return lambda g: torch.where(exponent == 0, 0, g * exponent * base.pow(exponent - 1))
    result = saved(node, "result")
    return lambda g: torch.where((base == 0) & (exponent >= 0), 0, g * result * base.log())


def _extremum(sign: int) -> Rule:
    @_elementwise
    def rule(node: Node, position: int) -> Local:
        ahead = (saved(node, "self") - saved(node, "other")) * (sign if position == 0 else -sign)
        return lambda g: g * (ahead > 0) + g * (ahead == 0) / 2

    return rule


maximum, minimum = _extremum(1), _extremum(-1)


@_elementwise
def expand(node: Node, position: int) -> Local:
    """`a.expand(...)`."""
    return lambda g: g


def repeat(operand: Operand, samples: Samples) -> Finish:
    """`tensor.repeat(...)`: every copy's gradient is added, the copies of one sample only."""

    def finish(gradient: Tensor) -> Use:
        split = samples.split(gradient)
        shape = (1,) * (split.dim() - 1 - len(operand.shape)) + tuple(operand.shape)
        if any(size % own for size, own in zip(split.shape[1:], shape, strict=True)):
            raise carries_batch(operand, f"a value of shape {tuple(operand.shape)} that holds the samples is repeated")
        pairs = [part for size, own in zip(split.shape[1:], shape, strict=True) for part in (size // own, own)]
        copies = list(range(1, 2 * len(shape), 2))
        return Dense(split.reshape(split.shape[0], *pairs).sum(copies), operand.shape)

    return finish
