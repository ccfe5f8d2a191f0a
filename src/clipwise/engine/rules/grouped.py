"""Grouped matrix products, as mixtures of experts use them: rows sorted by expert, one matrix per expert."""

from __future__ import annotations

import torch
from torch import Tensor

from clipwise.engine.grams import Doubts, doubt_cancelled
from clipwise.engine.layout import pack
from clipwise.engine.node import saved
from clipwise.engine.rules.base import Finish, Operand, Samples, carries_batch, unsupported
from clipwise.engine.uses import Outer, Use


class Segmented(Use):
    """Outer products in segments: segment k adds to matrix `expert[k]` of sample `sample[k]`.

    `left` is (K, T, m), `right` (K, T, n), padded with zero rows; the gradient is (experts, m, n).
    """

    how = "by expert"

    def __init__(
        self, left: Tensor, right: Tensor, sample: Tensor, expert: Tensor, shape: tuple[int, ...], batch: int
    ) -> None:
        self.left, self.right, self.sample, self.expert = left, right, sample, expert
        self.shape, self.batch_size = shape, batch

    def squared_norms(self, doubts: Doubts | None = None) -> Tensor:
        squared = self._by_sample(Outer(self.left, self.right, self.shape[1:]).squared_norms())
        return doubt_cancelled(squared, self.terms(), self.precise_norms, doubts)

    def terms(self) -> Tensor:
        return self._by_sample(Outer(self.left, self.right, self.shape[1:]).terms())

    def _by_sample(self, segments: Tensor) -> Tensor:
        return segments.new_zeros(self.batch_size).index_add_(0, self.sample, segments)

    def gradients(self, samples: slice = slice(None)) -> Tensor:
        wanted = torch.arange(self.batch_size, device=self.sample.device)[samples]
        mine = (self.sample >= wanted[0]) & (self.sample <= wanted[-1])
        table = self.left.new_zeros(len(wanted), *self.shape)
        table[self.sample[mine] - wanted[0], self.expert[mine]] = self.left[mine].mT @ self.right[mine]
        return table

    def weighted(self, factors_B: Tensor) -> Tensor:
        scaled = self.right * factors_B.to(self.right.dtype)[self.sample].view(-1, 1, 1)
        table = self.left.new_zeros(self.shape)
        for expert in self.expert.unique().tolist():
            mine = self.expert == expert
            table[expert] = self.left[mine].flatten(0, 1).mT @ scaled[mine].flatten(0, 1)
        return table

    def precise(self, some_B: Tensor) -> Use:
        mine = some_B[self.sample]
        left, right, sample = (
            self.left[mine].double(),
            self.right[mine].double(),
            some_B.cumsum(0)[self.sample[mine]] - 1,
        )
        return Segmented(left, right, sample, self.expert[mine], self.shape, int(some_B.sum()))

    def without(self, bad_B: Tensor) -> Use:
        bad = bad_B[self.sample].view(-1, 1, 1)
        left, right = self.left.masked_fill(bad, 0), self.right.masked_fill(bad, 0)
        return Segmented(left, right, self.sample, self.expert, self.shape, self.batch_size)


def grouped_mm(operand: Operand, samples: Samples) -> Finish:
    """Y[rows of e] = A[rows of e] @ W[e], rows given by their end offsets."""
    node = operand.node
    if operand.position == 0:
        raise carries_batch(operand, "the rows of a grouped product are computed from the batch and mix samples before")
    offsets, inputs = saved(node, "offs"), saved(node, "self")
    if offsets is None or len(operand.shape) != 3 or inputs.dim() != 2:
        raise unsupported(operand, "a grouped product without row offsets")
    if samples.axis != 0:
        raise carries_batch(operand, "a grouped product has the batch on another axis than its rows")
    rows, experts = inputs.shape[0], operand.shape[0]
    expert = torch.bucketize(torch.arange(rows, device=inputs.device), offsets.long(), right=True)
    segment, inverse = torch.unique(samples.owners(rows) * experts + expert, return_inverse=True)
    table = pack(inverse, segment.numel())

    def padded(tensor: Tensor) -> Tensor:
        return torch.cat([tensor, tensor.new_zeros(1, tensor.shape[1])])[table]

    return lambda gradient: Segmented(
        padded(inputs), padded(gradient), segment // experts, segment % experts, operand.shape, samples.batch_size
    )
