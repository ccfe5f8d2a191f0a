"""Element-wise operations whose shared operand is broadcast over the batch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from clipwise.engine.graph import Node
from clipwise.engine.rules.base import Finish, Operand, Rule, Samples, carries_batch, sum_to_operand
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


def _lerp(node: Node, position: int) -> Local:
    if position == 2:
        span = node._saved_end - node._saved_self
        return lambda g: g * span
    weight = node._saved_weight
    return (lambda g: g * (1 - weight)) if position == 0 else (lambda g: g * weight)


def _addcmul(node: Node, position: int) -> Local:
    if position == 0:
        return lambda g: g
    other = (node._saved_tensor2 if position == 1 else node._saved_tensor1) * node._saved_value
    return lambda g: g * other


def _pow(node: Node, position: int) -> Local:
    base, exponent = node._saved_self, node._saved_exponent
    if position == 0:
        return lambda g: torch.where(exponent == 0, 0, g * exponent * base.pow(exponent - 1))
    result = node._saved_result
    return lambda g: torch.where((base == 0) & (exponent >= 0), 0, g * result * base.log())


def _extremum(sign: int) -> Callable[[Node, int], Local]:
    def local(node: Node, position: int) -> Local:
        ahead = (node._saved_self - node._saved_other) * (sign if position == 0 else -sign)
        return lambda g: g * (ahead > 0) + g * (ahead == 0) / 2

    return local


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
        if any(size % own for size, own in zip(split.shape[1:], shape, strict=True)):
            raise carries_batch(operand, f"a value of shape {tuple(operand.shape)} that holds the samples is repeated")
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
    "LerpBackward0": _elementwise(_lerp),
    "LerpBackward1": _elementwise(_lerp),
    "AddcmulBackward0": _elementwise(_addcmul),
    "PowBackward1": _elementwise(_pow),
    "MaximumBackward0": _elementwise(_extremum(1)),
    "MinimumBackward0": _elementwise(_extremum(-1)),
    "ExpandBackward0": _elementwise(_expand),
    "RepeatBackward0": repeat,
}
