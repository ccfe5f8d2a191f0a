"""Element-wise operations whose shared operand is broadcast over the batch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from clipwise.engine.graph import Node
from clipwise.engine.rules.base import Finish, Operand, Rule, Samples, sum_to_operand
from clipwise.engine.uses import Dense, Use

Local = Callable[[Tensor], Tensor]  # output gradient -> gradient of the operand before it is summed down


def _add(node: Node, position: int) -> Local:
    alpha = 1 if position == 0 else node._saved_alpha
    return (lambda g: g) if alpha == 1 else (lambda g: g * alpha)


def _sub(node: Node, position: int) -> Local:
    alpha = node._saved_alpha
    return (lambda g: g) if position == 0 else (lambda g: g * -alpha)


def _rsub(node: Node, position: int) -> Local:
    alpha = node._saved_alpha
    return (lambda g: g * -alpha) if position == 0 else (lambda g: g)


def _mul(node: Node, position: int) -> Local:
    other = node._saved_other if position == 0 else node._saved_self
    return lambda g: g * other


def _div(node: Node, position: int) -> Local:
    denominator = node._saved_other
    if position == 0:
        return lambda g: g / denominator
    numerator = node._saved_self
    return lambda g: -g * ((numerator / denominator) / denominator)


def _where(node: Node, position: int) -> Local:
    condition = node._saved_condition
    return lambda g: torch.where(condition if position == 0 else ~condition, g, 0)


def _masked_fill(node: Node, position: int) -> Local:
    mask = node._saved_mask
    return lambda g: torch.where(~mask if position == 0 else mask, g, 0)


def _prelu(node: Node, position: int) -> Local:
    inputs = node._saved_self
    return lambda g: torch.where(inputs > 0, 0, inputs * g)


def _expand(node: Node, position: int) -> Local:
    return lambda g: g


def _elementwise(local: Callable[[Node, int], Local]) -> Rule:
    def rule(operand: Operand, samples: Samples) -> Finish:
        gradient_of = local(operand.node, operand.position)
        return lambda gradient: sum_to_operand(gradient_of(gradient), samples, operand, operand.shape)

    return rule


def repeat(operand: Operand, samples: Samples) -> Finish:
    """`tensor.repeat(...)`: every copy's gradient is added, the copies of one sample only."""

    def finish(gradient: Tensor) -> Use:
        split = samples.split(gradient)
        shape = (1,) * (split.dim() - 1 - len(operand.shape)) + tuple(operand.shape)
        pairs = [part for size, own in zip(split.shape[1:], shape, strict=True) for part in (size // own, own)]
        copies = list(range(1, 2 * len(shape), 2))
        return Dense(split.reshape(split.shape[0], *pairs).sum(copies), operand.shape)

    return finish


RULES: dict[str, Rule] = {
    "AddBackward0": _elementwise(_add),
    "SubBackward0": _elementwise(_sub),
    "RsubBackward0": _elementwise(_rsub),
    "MulBackward0": _elementwise(_mul),
    "DivBackward0": _elementwise(_div),
    "WhereBackward0": _elementwise(_where),
    "MaskedFillBackward1": _elementwise(_masked_fill),
    "PreluKernelBackward0": _elementwise(_prelu),
    "ExpandBackward0": _elementwise(_expand),
    "RepeatBackward0": repeat,
}
