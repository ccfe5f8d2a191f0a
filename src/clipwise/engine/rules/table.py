"""Tables indexed by the batch: embeddings, embedding bags, advanced indexing.

What a sample adds to a row is added up at once, for norms and sums alike: one order, one rounding, also where the table
has other uses.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from clipwise.engine.layout import pack
from clipwise.engine.node import Node, saved
from clipwise.engine.rules.base import Finish, Operand, Samples, carries_batch, unsupported
from clipwise.engine.uses import Dense, Gathered, Use

_NOT_INDEX = "a table computed from the batch is indexed, and mixes samples"
_FREQUENCY = "scale_grad_by_freq divides by how often a token occurs in the whole batch, which mixes samples"
_SUM, _MEAN, _MAX = 0, 1, 2


def _without_padding(index: Tensor, padding: int, rows: int) -> Tensor:
    return index.masked_fill(index == padding, -1) if 0 <= padding < rows else index


def _gather(
    operand: Operand, samples: Samples, index: Tensor, rows: int | None = None, *, padded: bool = False
) -> Finish:
    """`table[index]`: the output's leading axes are the index's, the trailing ones the row's."""
    if samples.axis >= index.dim():
        raise carries_batch(operand, _NOT_INDEX)
    index_BT = samples.split(index).flatten(1)

    def finish(gradient: Tensor) -> Use:
        split = samples.split(gradient)
        values = split.reshape(*index_BT.shape, -1)
        return Gathered(index_BT, values, operand.shape, rows, padded=padded).lasting()

    return finish


def embedding(operand: Operand, samples: Samples) -> Finish:
    """`F.embedding`: the padding row receives nothing."""
    node = operand.node
    if saved(node, "scale_grad_by_freq"):
        raise unsupported(operand, _FREQUENCY)
    given = saved(node, "indices")
    index = _without_padding(given, saved(node, "padding_idx"), operand.shape[0])
    return _gather(operand, samples, index, padded=index is not given)


def index(operand: Operand, samples: Samples) -> Finish:
    """`table[i]`, `table[i, j]`, ...: integer tensors on the leading axes, read as one index into flattened rows."""
    indices = saved(operand.node, "indices")
    leading = [i for i in indices if i is not None]
    if any(i is None for i in indices[: len(leading)]) or any(i.dtype == torch.bool for i in leading):
        raise unsupported(operand, "an index with a mask, or not on the leading axes")
    flat = torch.zeros((), dtype=torch.long, device=leading[0].device)
    for size, part in zip(operand.shape, leading, strict=False):
        flat = flat * size + torch.where(part < 0, part + size, part)
    return _gather(operand, samples, flat, rows=prod(operand.shape[: len(leading)]))


def index_select(operand: Operand, samples: Samples) -> Finish:
    """`table.index_select(0, index)`."""
    if saved(operand.node, "dim") != 0:
        raise unsupported(operand, "index_select on another axis than the first")
    return _gather(operand, samples, saved(operand.node, "index"))


def embedding_bag(operand: Operand, samples: Samples) -> Finish:
    """`F.embedding_bag`: every entry receives its bag's gradient, weighted."""
    node = operand.node
    if operand.position != 0:
        raise unsupported(operand, "per_sample_weights of an embedding bag computed from parameters")
    if saved(node, "scale_grad_by_freq"):
        raise unsupported(operand, _FREQUENCY)
    if samples.axis != 0 or samples.table is not None:
        raise carries_batch(operand, _NOT_INDEX)
    if saved(node, "mode") == _MAX:
        return _bag_of_maxima(operand, samples, saved(node, "result3"))
    index, bags, sizes = saved(node, "indices"), _bag_of_entry(node), saved(node, "result2")
    weights = saved(node, "per_sample_weights")
    kept = _without_padding(index, saved(node, "padding_idx"), operand.shape[0])
    mean = saved(node, "mode") == _MEAN

    def finish(gradient: Tensor) -> Use:
        if mean:
            gradient = gradient / sizes.clamp(min=1).unsqueeze(1).to(gradient.dtype)
        values = gradient[bags] if weights is None else gradient[bags] * weights.unsqueeze(1)
        owners = samples.owners(gradient.shape[0]).to(index.device)[bags]
        table = pack(owners, samples.batch_size)
        entries = torch.cat([kept, kept.new_full((1,), -1)])
        padded = torch.cat([values, values.new_zeros(1, values.shape[1])])
        return Gathered(entries[table], padded[table], operand.shape).lasting()

    return finish


def _bag_of_entry(node: Node) -> Tensor:
    """Which bag each entry belongs to; torch leaves it out where it takes a fast path."""
    offsets, entries = saved(node, "offsets"), saved(node, "indices").numel()
    positions = torch.arange(entries, device=offsets.device)
    bags = saved(node, "result2").numel()
    return torch.bucketize(positions, offsets[:bags], right=True) - 1


def _bag_of_maxima(operand: Operand, samples: Samples, winners: Tensor) -> Finish:
    """Mode "max": each column's gradient goes to the row that won it."""

    def finish(gradient: Tensor) -> Use:
        split, rows = samples.split(gradient), samples.split(winners)
        table = gradient.new_zeros(samples.batch_size, *operand.shape)
        return Dense(table.scatter_add_(1, rows.clamp(min=0), torch.where(rows >= 0, split, 0)), operand.shape)

    return finish
