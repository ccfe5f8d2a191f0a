"""Normalization layers: the affine part is shared, the normalized input is the sample's own."""

from __future__ import annotations

import torch
from torch import Tensor

from clipwise.engine.node import Node, output_meta, saved
from clipwise.engine.rules.base import Finish, Operand, Samples, carries_batch, sum_to_operand
from clipwise.engine.uses import Dense, Use, accurate

_INPUT, _WEIGHT = 0, 1


def _affine(operand: Operand, samples: Samples, normalized: Tensor | None, aligned: tuple[int, ...]) -> Finish:
    """y = weight * normalized + bias, with weight and bias broadcast as `aligned`."""
    if operand.position == _INPUT:
        raise carries_batch(operand, "its input is computed from the batch and mixes samples before")
    if operand.position == _WEIGHT:
        assert normalized is not None
        return lambda gradient: sum_to_operand(normalized.mul_(gradient), samples, operand, aligned)
    return lambda gradient: sum_to_operand(gradient, samples, operand, aligned)


def layer_norm(operand: Operand, samples: Samples) -> Finish:
    """LayerNorm: affine over the trailing axes."""
    normalized = None
    if operand.position == _WEIGHT:
        node = operand.node
        normalized = (accurate(saved(node, "input")) - saved(node, "result1")).mul_(saved(node, "result2"))
    return _affine(operand, samples, normalized, operand.shape)


def _channels(tensor: Tensor) -> tuple[int, ...]:
    return (1, tensor.shape[1], *([1] * (tensor.dim() - 2)))


def group_norm(operand: Operand, samples: Samples) -> Finish:
    """GroupNorm: statistics per sample and group, affine per channel."""
    node = operand.node
    inputs = saved(node, "input")
    if operand.position != _INPUT and samples.per_row and inputs.is_contiguous():
        return _group_norm_affine(operand, samples)
    normalized = None
    if operand.position == _WEIGHT:
        per_group = (saved(node, "N"), saved(node, "group"), 1)
        mean, rstd = saved(node, "result1").reshape(per_group), saved(node, "result2").reshape(per_group)
        grouped = accurate(inputs).reshape(saved(node, "N"), saved(node, "group"), -1)
        normalized = (grouped - mean).mul_(rstd).view(inputs.shape)
    return _affine(operand, samples, normalized, _channels(inputs))


def _group_norm_affine(operand: Operand, samples: Samples) -> Finish:
    """torch's own kernel with the batch folded into the channels: one call for all samples, and for weight and bias."""
    node = operand.node
    groups, positions = saved(node, "group"), saved(node, "HxW")
    inputs, mean, rstd = map(accurate, (saved(node, "input"), saved(node, "result1"), saved(node, "result2")))
    mean, rstd = mean.reshape(1, -1).to(inputs.dtype), rstd.reshape(1, -1).to(inputs.dtype)
    batch, channels = inputs.shape[:2]

    def gradients(gradient: Tensor) -> list[Tensor]:
        ones = inputs.new_ones(batch * channels)
        shape = (1, batch * channels, positions)
        _, *affine = torch.ops.aten.native_group_norm_backward(
            gradient.to(inputs.dtype).reshape(shape).contiguous(),  # the kernel does not ask for strides
            inputs.view(shape), mean, rstd, ones, 1, batch * channels, positions, batch * groups, [False, True, True],
        )  # fmt: skip
        return [each.view(batch, channels) for each in affine]

    def finish(gradient: Tensor) -> Use:
        affine = samples.once("affine", lambda: gradients(gradient))
        return Dense(affine[operand.position - _WEIGHT], operand.shape)

    return finish


def mixes_samples(node: Node) -> bool:
    """Whether a batch normalization uses statistics of the batch.

    Instance normalization is one of a single sample, with a channel for each sample and channel.
    """
    return bool(saved(node, "training")) and output_meta(node).shape[0] > 1


def batch_norm(operand: Operand, samples: Samples) -> Finish:
    """BatchNorm with fixed statistics: an affine map per channel."""
    node = operand.node
    if saved(node, "training"):
        raise carries_batch(operand, "batch normalization in training mode uses statistics of the whole batch")
    inputs = saved(node, "input")
    normalized = None
    if operand.position == _WEIGHT:
        shape = _channels(inputs)
        rstd = (saved(node, "running_var") + saved(node, "eps")).rsqrt()
        normalized = (accurate(inputs) - saved(node, "running_mean").view(shape)).mul_(rstd.view(shape))
    return _affine(operand, samples, normalized, _channels(inputs))
