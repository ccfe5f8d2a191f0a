"""Matrix products with a shared factor: every gradient is a sum of outer products.

In grouped products, as mixtures of experts use them, rows are sorted by expert, with one matrix per expert.
"""

from __future__ import annotations

import torch
from torch import Tensor

from clipwise.engine.grams import Doubts, doubt_cancelled
from clipwise.engine.layout import pack
from clipwise.engine.node import saved
from clipwise.engine.rules.base import Finish, Operand, Samples, carries_batch, sum_to_operand, unsupported
from clipwise.engine.uses import Dense, Outer, Use, accurate

_LEFT = "the left factor of a matrix product is computed from the batch and mixes samples before"
_RIGHT = "the right factor of a matrix product is computed from the batch and mixes samples before"


def _product(operand: Operand, samples: Samples, other: Tensor, right: bool, scale: float) -> Finish:
    """Y = A @ W with W shared: its gradient is sum_t a_t g_t^T over the sample's rows; for W @ A over its columns."""
    rows, columns = other.dim() - 2, other.dim() - 1
    if samples.axis != (rows if right else columns):
        raise carries_batch(operand, _RIGHT if right else _LEFT)
    if samples.per_row and right and other.dim() == 2:
        return lambda gradient: Outer(other, gradient if scale == 1 else gradient * scale, operand.shape)
    data = samples.split(other, samples.axis)  # (B, *E, t, k), or (B, *E, k, t) by columns

    def finish(gradient: Tensor) -> Use:
        split = samples.split(gradient if scale == 1 else gradient * scale)
        if right:
            left, other_side = data, split
        else:
            left, other_side = split.mT, data.mT
        if left.dim() == 4 and left.shape[1] == 1:
            left, other_side = left[:, 0], other_side[:, 0]
        return Outer(left, other_side, operand.shape)

    return finish


def mm(operand: Operand, samples: Samples) -> Finish:
    """Y = A @ B, also batched: one factor shared."""
    right = operand.position == 1
    other = saved(operand.node, "self") if right else saved(operand.node, "mat2")
    return _product(operand, samples, other, right, 1)


def _added(operand: Operand, samples: Samples, scale: float) -> Finish:
    def finish(gradient: Tensor) -> Use:
        if scale == 1 and samples.per_row and gradient.shape[1:] == operand.shape:  # at every layer: no call more
            return Dense(gradient, operand.shape)
        return sum_to_operand(gradient if scale == 1 else gradient * scale, samples, operand, operand.shape)

    return finish


def addmm(operand: Operand, samples: Samples) -> Finish:
    """Y = beta * C + alpha * A @ B."""
    return _added_product(operand, samples, "mat1", "mat2")


def baddbmm(operand: Operand, samples: Samples) -> Finish:
    """Y = beta * C + alpha * A @ B for stacks of matrices."""
    return _added_product(operand, samples, "batch1", "batch2")


def _added_product(operand: Operand, samples: Samples, a: str, b: str) -> Finish:
    node = operand.node
    if operand.position == 0:
        return _added(operand, samples, saved(node, "beta"))
    right = operand.position == 2
    return _product(operand, samples, saved(node, a if right else b), right, saved(node, "alpha"))


def linear(operand: Operand, samples: Samples) -> Finish:
    """Y = A @ W^T + b as one node: rows on any leading axes."""
    if operand.position == 2:
        return _added(operand, samples, 1)
    if operand.position == 0:
        raise carries_batch(operand, _LEFT)
    data = samples.split(saved(operand.node, "input")).flatten(1, -2)
    return lambda gradient: Outer(samples.split(gradient).flatten(1, -2), data, operand.shape)


def _vector(operand: Operand, samples: Samples, matrix: Tensor, scale: float) -> Finish:
    """y = A @ w with w shared: w's gradient is sum_t g_t a_t."""
    data = samples.split(matrix)
    return lambda gradient: Dense((data * (samples.split(gradient) * scale).unsqueeze(-1)).sum(1), operand.shape)


def mv(operand: Operand, samples: Samples) -> Finish:
    """y = A @ v."""
    if operand.position == 0:
        raise carries_batch(operand, _LEFT)
    return _vector(operand, samples, saved(operand.node, "self"), 1)


def addmv(operand: Operand, samples: Samples) -> Finish:
    """y = beta * c + alpha * A @ v."""
    node = operand.node
    if operand.position == 0:
        return _added(operand, samples, saved(node, "beta"))
    if operand.position == 1:
        raise carries_batch(operand, _LEFT)
    return _vector(operand, samples, saved(node, "mat"), saved(node, "alpha"))


class Segmented(Use):
    """Outer products in segments: segment k adds to matrix `expert[k]` of sample `sample[k]`.

    `left` is (K, T, m), `right` (K, T, n), padded with zero rows; the gradient is (experts, m, n).
    """

    how = "by expert"

    def __init__(
        self, left: Tensor, right: Tensor, sample: Tensor, expert: Tensor, shape: tuple[int, ...], batch: int
    ) -> None:
        self.left, self.right, self.sample, self.expert = accurate(left), accurate(right), sample, expert
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
