"""Normalization layers: the affine part is shared, the normalized input is the sample's own."""

from __future__ import annotations

import torch
from torch import Tensor

from clipwise.engine.rules.base import Finish, Operand, Rule, Samples, carries_batch, sum_to_operand
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
        normalized = (accurate(node._saved_input) - node._saved_result1).mul_(node._saved_result2)
    return _affine(operand, samples, normalized, operand.shape)


def _channels(tensor: Tensor) -> tuple[int, ...]:
    return (1, tensor.shape[1], *([1] * (tensor.dim() - 2)))


def group_norm(operand: Operand, samples: Samples) -> Finish:
    """GroupNorm: statistics per sample and group, affine per channel."""
    node = operand.node
    inputs = node._saved_input
    if operand.position == _WEIGHT and samples.per_row and inputs.is_contiguous():
        return _group_norm_weight(operand, samples)
    normalized = None
    if operand.position == _WEIGHT:
        per_group = (node._saved_N, node._saved_group, 1)
        mean, rstd = node._saved_result1.reshape(per_group), node._saved_result2.reshape(per_group)
        grouped = accurate(inputs).reshape(node._saved_N, node._saved_group, -1)
        normalized = (grouped - mean).mul_(rstd).view(inputs.shape)
    return _affine(operand, samples, normalized, _channels(inputs))


def _group_norm_weight(operand: Operand, samples: Samples) -> Finish:
    """torch's own kernel with the batch folded into the channels: one call for all samples."""
    node = operand.node
    groups, positions = node._saved_group, node._saved_HxW
    inputs, mean, rstd = map(accurate, (node._saved_input, node._saved_result1, node._saved_result2))
    mean, rstd = mean.reshape(1, -1).to(inputs.dtype), rstd.reshape(1, -1).to(inputs.dtype)
    batch, channels = inputs.shape[:2]

    def finish(gradient: Tensor) -> Use:
        ones = inputs.new_ones(batch * channels)
        shape = (1, batch * channels, positions)
        _, weight, _ = torch.ops.aten.native_group_norm_backward(
            gradient.to(inputs.dtype).reshape(shape), inputs.view(shape), mean, rstd, ones, 1, batch * channels,
            positions, batch * groups, [False, True, False],
        )  # fmt: skip
        return Dense(weight.view(batch, channels), operand.shape)

    return finish


def batch_norm(operand: Operand, samples: Samples) -> Finish:
    """BatchNorm with fixed statistics: an affine map per channel."""
    node = operand.node
    if node._saved_training:
        raise carries_batch(operand, "batch normalization in training mode uses statistics of the whole batch")
    inputs = node._saved_input
    normalized = None
    if operand.position == _WEIGHT:
        shape = _channels(inputs)
        rstd = (node._saved_running_var + node._saved_eps).rsqrt()
        normalized = (accurate(inputs) - node._saved_running_mean.view(shape)).mul_(rstd.view(shape))
    return _affine(operand, samples, normalized, _channels(inputs))


RULES: dict[str, Rule] = {
    "NativeLayerNormBackward0": layer_norm,
    "NativeGroupNormBackward0": group_norm,
    "NativeBatchNormBackward0": batch_norm,
}
