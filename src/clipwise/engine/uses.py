"""What one use of a shared tensor gives: per-sample gradients, their squared norms, and their weighted sum.

A node where a shared tensor meets the batch gives one *use* of that tensor. Each kind of use knows its per-sample
gradient g_i without having to form it, and answers three questions: ||g_i||^2, g_i itself, and sum_i c_i g_i.

Shape suffixes: B samples, T positions, E extra axes, m and n the two sides of a matrix.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from math import prod

import torch
from torch import Tensor

from clipwise.engine.grams import Doubts, Gram, Recent, doubt_cancelled, ghost_norms, rounded_up
from clipwise.engine.lengths import balanced, beyond, lengths, sure_lengths
from clipwise.engine.matrices import add_product, product, stacked_products
from clipwise.engine.precision import HALF, in_dtype
from clipwise.engine.room import Room

_ALL = slice(None)
_NARROW = 16  # columns below which a matrix product leaves most of a vector register empty


def accurate(tensor: Tensor) -> Tensor:
    """Half precision is widened: a norm that reads low by rounding would break the bound."""
    return tensor.float() if tensor.dtype in HALF else tensor


def squares(tensor_B: Tensor) -> Tensor:
    """Squared norm of each sample's block, (B, ...) -> (B,).

    Row norms first, then their squares: no temporary of the gradient's size, and short sums stay accurate in float32.
    """
    if tensor_B.dim() > 2:
        return lengths(tensor_B.flatten(2)).square_().sum(1)
    return lengths(tensor_B.reshape(tensor_B.shape[0], -1)).square_()


def per_sample(factors_B: Tensor, dim: int) -> Tensor:
    """Factors shaped to scale a tensor of `dim` axes whose first is the batch."""
    return factors_B.view(-1, *([1] * (dim - 1)))


def weighted_sum(factors_B: Tensor, gradients_B: Tensor) -> Tensor:
    """sum_i c_i g_i for instantiated gradients."""
    factors_B = in_dtype(factors_B, gradients_B.dtype)
    if gradients_B.dim() == 2:
        return factors_B @ gradients_B
    return (factors_B @ _flat(gradients_B)).view(gradients_B.shape[1:])


def _flat(gradients_B: Tensor) -> Tensor:
    """One row for each sample, also where there is none."""
    return gradients_B.reshape(gradients_B.shape[0], prod(gradients_B.shape[1:]))


class Use(ABC):
    """One use of a shared tensor of shape `shape` by `batch_size` samples."""

    shape: tuple[int, ...]
    batch_size: int

    @property
    @abstractmethod
    def how(self) -> str:
        """How norms are found, in a word."""

    @abstractmethod
    def squared_norms(self, doubts: Doubts | None = None) -> Tensor:
        """||g_i||^2, shape (B,). Given `doubts`, norms that may have to be computed again are left to it."""

    def terms(self) -> Tensor:
        """The lengths of all that `weighted` adds for a sample, added up, (B,): the sum is rounded to these.

        Infinite or undefined where a factor may lead out of the numbers that a dtype holds.
        """
        return self.squared_norms().sqrt_()

    def row_factors(self) -> tuple[Tensor, ...] | None:
        """Matrices (B, n) whose rows' lengths have ||g_i|| as their product; None where there are none."""
        return None

    def settled(self, recent: Recent, doubts: Doubts | None = None) -> tuple[Tensor, Use]:
        """The norms, and a use that gives the same weighted sum and holds no more than it must."""
        use = self.lasting()
        return use.squared_norms(doubts), use

    def lasting(self) -> Use:
        """The second of `settled`, without the norms. To form it again gives the same numbers."""
        return self

    def formed(self, room: Room | None = None) -> Use:
        """The same with its gradients formed now, where that takes less time than it would later."""
        return self

    @abstractmethod
    def gradients(self, samples: slice = _ALL) -> Tensor:
        """g_i for some samples, shape (b, *shape)."""

    @abstractmethod
    def weighted(self, factors_B: Tensor) -> Tensor:
        """sum_i c_i g_i, of shape `shape`."""

    def add_weighted(self, factors_B: Tensor, total: Tensor) -> None:
        """Add sum_i c_i g_i to a sum of as many numbers, in place."""
        total.view(self.shape).add_(self.weighted(factors_B))

    @abstractmethod
    def precise(self, some_B: Tensor) -> Use:
        """The same use of some samples alone, in float64."""

    def precise_norms(self, some_B: Tensor) -> Tensor:
        """The squared norms of some samples in float64, no less than what rounding makes of their terms."""
        use = self.precise(some_B)
        squared = [squares(use.gradients(chunk)) for chunk in chunks(use, 1 << 22)]
        return rounded_up(torch.cat(squared), use.terms())

    @abstractmethod
    def without(self, bad_B: Tensor) -> Use:
        """The same use with the gradients of some samples set to zero, whatever they hold (NaN, Inf)."""


class Dense(Use):
    """A gradient that is cheap to form: biases, scales, position embeddings."""

    how = "instantiated"

    def __init__(self, gradients_B: Tensor, shape: Sequence[int]) -> None:
        self.shape = tuple(shape)
        self.batch_size = gradients_B.shape[0]
        gradients_B = accurate(gradients_B)
        same = gradients_B.shape[1:] == self.shape
        self._gradients = gradients_B if same else gradients_B.reshape(self.batch_size, *self.shape)

    def squared_norms(self, doubts: Doubts | None = None) -> Tensor:
        return squares(self._gradients)

    def row_factors(self) -> tuple[Tensor, ...] | None:
        return (self._gradients,) if self._gradients.dim() == 2 else None

    def gradients(self, samples: slice = _ALL) -> Tensor:
        return self._gradients[samples]

    def weighted(self, factors_B: Tensor) -> Tensor:
        return weighted_sum(factors_B, self._gradients)

    def add_weighted(self, factors_B: Tensor, total: Tensor) -> None:
        """In one pass over the gradients and the sum."""
        if not _takes(total, self._gradients):
            super().add_weighted(factors_B, total)
        else:
            total.view(-1).addmv_(_flat(self._gradients).t(), in_dtype(factors_B, total.dtype))

    def precise(self, some_B: Tensor) -> Dense:
        return Dense(self._gradients[some_B].double(), self.shape)

    def without(self, bad_B: Tensor) -> Dense:
        return Dense(_zeroed(self._gradients, bad_B), self.shape)

    def transposed(self) -> Dense:
        """The same use of the transposed matrix."""
        *extra, m, n = self.shape
        return Dense(self._gradients.mT, (*extra, n, m))


class Pieces(Use):
    """Uses by consecutive samples, each formed by itself: to join their gradients would copy all of them."""

    how = "instantiated"

    def __init__(self, pieces: Sequence[Dense]) -> None:
        self._pieces = pieces
        self.shape = pieces[0].shape
        self.batch_size = sum(piece.batch_size for piece in pieces)

    def squared_norms(self, doubts: Doubts | None = None) -> Tensor:
        return torch.cat([piece.squared_norms() for piece in self._pieces])

    def gradients(self, samples: slice = _ALL) -> Tensor:
        return torch.cat([piece.gradients() for piece in self._pieces])[samples]

    def _shared_out(self, values_B: Tensor) -> Iterator[tuple[Dense, Tensor]]:
        """Each piece with what belongs to its samples."""
        return zip(self._pieces, values_B.split([piece.batch_size for piece in self._pieces]), strict=True)

    def weighted(self, factors_B: Tensor) -> Tensor:
        first, *others = self._shared_out(factors_B)
        total = first[0].weighted(first[1])
        for piece, factors in others:
            piece.add_weighted(factors, total)
        return total

    def add_weighted(self, factors_B: Tensor, total: Tensor) -> None:
        """One piece after the other."""
        for piece, factors in self._shared_out(factors_B):
            piece.add_weighted(factors, total)

    def precise(self, some_B: Tensor) -> Use:
        return Pieces([piece.precise(some) for piece, some in self._shared_out(some_B)])

    def without(self, bad_B: Tensor) -> Use:
        return Pieces([piece.without(bad) for piece, bad in self._shared_out(bad_B)])


class Outer(Use):
    """A sum of outer products over positions: g_i = sum_t l_it r_it^T, as in every linear map.

    `left` is (B, *E, T, m), `right` (B, *E, T, n), or (B, m) and (B, n) for one position; the gradient is (*E, m, n),
    seen as `shape`.
    """

    def __init__(self, left: Tensor, right: Tensor, shape: Sequence[int]) -> None:
        self.left, self.right = accurate(left), accurate(right)
        self.shape = tuple(shape)
        self.batch_size = left.shape[0]

    @property
    def how(self) -> str:
        """From lengths, from Gram matrices, or from gradients."""
        return "lengths" if self.one_position else "ghost" if self.ghost_is_cheaper else "instantiated"

    @property
    def one_position(self) -> bool:
        """A single outer product: ||l r^T|| = ||l|| ||r||."""
        return self.left.dim() == 2 or self.left.shape[-2] == 1

    def with_positions(self) -> Outer:
        """The same use with its axis of positions written out."""
        if self.left.dim() > 2:
            return self
        return Outer(self.left.unsqueeze(1), self.right.unsqueeze(1), self.shape)

    @property
    def ghost_is_cheaper(self) -> bool:
        """Gram matrices of size T x T against matrices of size m x n, in time and in memory alike."""
        positions, m, n = self.left.shape[-2], self.left.shape[-1], self.right.shape[-1]
        return positions * (m + n) <= m * n

    def squared_norms(self, doubts: Doubts | None = None) -> Tensor:
        left, right = self.left, self.right
        if self.one_position:
            lefts, rights = sure_lengths(left), sure_lengths(right)
            if doubts is not None:
                doubts.add_sums(beyond(lefts, rights, dtype=left.dtype).view(self.batch_size, -1).any(1))
            return (lefts * rights).square_().view(self.batch_size, -1).sum(1)
        if self.ghost_is_cheaper:
            return self._ghost(Gram.of(left), doubts)
        return doubt_cancelled(squares(stacked_products(left.mT, right)), self.terms(), self.precise_norms, doubts)

    def terms(self) -> Tensor:
        lefts, rights = lengths(self.left), lengths(self.right)
        terms = (lefts * rights).masked_fill_(beyond(lefts, rights, dtype=lefts.dtype), torch.inf)
        return terms.view(self.batch_size, -1).sum(1)

    def row_factors(self) -> tuple[Tensor, ...] | None:
        return (self.left, self.right) if self.left.dim() == 2 else None

    def _ghost(self, gram: Gram, doubts: Doubts | None = None) -> Tensor:
        """Squared norms, with the Gram matrix of the left side at hand."""

        def exact(some: Tensor) -> tuple[Gram, Gram]:
            use = self.precise(some)
            return Gram.of(use.right), Gram.of(use.left)

        return ghost_norms(lambda: (Gram.of(self.right), gram), exact, doubts)

    def settled(self, recent: Recent, doubts: Doubts | None = None) -> tuple[Tensor, Use]:
        """The norms, and this use in the form that takes the least memory for the weighted sum."""
        if self.ghost_is_cheaper and not self.one_position:
            return self._ghost(recent.of(self.left), doubts), self
        return super().settled(recent, doubts)

    def lasting(self) -> Use:
        """Gradients that are formed for their norms are summed as they are."""
        return self if self.one_position or self.ghost_is_cheaper else self.formed()

    def formed(self, room: Room | None = None) -> Use:
        left, right = self.left.mT, self.right
        if room is None or left.dim() != 3:
            return Dense(stacked_products(left, right), self.shape)
        out = room.take((left.shape[0], left.shape[1], right.shape[2]), left)
        return Dense(stacked_products(left, right, out), self.shape)

    def gradients(self, samples: slice = _ALL) -> Tensor:
        use = self.with_positions()
        gradients = stacked_products(use.left[samples].mT, use.right[samples])
        return gradients.reshape(gradients.shape[0], *self.shape)

    def weighted(self, factors_B: Tensor) -> Tensor:
        return self._formed_sum(*self._scaled(factors_B))

    def add_weighted(self, factors_B: Tensor, total: Tensor) -> None:
        """The product is added as it is formed."""
        left, right = self._scaled(factors_B)
        if left.dim() != 2 or not _takes(total, left) or _is_narrow(left, right):
            total.view(self.shape).add_(self._formed_sum(left, right))
        else:
            add_product(total.view(left.shape[1], right.shape[1]), left.t(), right)

    def _formed_sum(self, left: Tensor, right: Tensor) -> Tensor:
        """The sum over samples, of rows that have their factors."""
        product = _product(left, right) if left.dim() == 2 else left.mT @ right
        return product if product.shape == self.shape else product.reshape(self.shape)

    def _scaled(self, factors_B: Tensor) -> tuple[Tensor, Tensor]:
        """All rows (N, m) and (N, n), or stacks (*E, N, m) and (*E, N, n), the narrower ones times their factors."""
        left, right = self.left, self.right
        factors = in_dtype(factors_B, left.dtype)
        factors = factors.unsqueeze(1) if left.dim() == 2 else per_sample(factors, left.dim())
        if left.shape[-1] < right.shape[-1]:
            left = left * factors
        else:
            right = right * factors
        return (left, right) if left.dim() == 2 else _rows(left, right)

    def precise(self, some_B: Tensor) -> Outer:
        return Outer(*balanced(self.left[some_B].double(), self.right[some_B].double()), self.shape)

    def without(self, bad_B: Tensor) -> Use:
        return Outer(_zeroed(self.left, bad_B), _zeroed(self.right, bad_B), self.shape)

    def transposed(self) -> Outer:
        """The same use of the transposed matrix."""
        m, n = self.left.shape[-1], self.right.shape[-1]
        return Outer(self.right, self.left, (*self.shape[:-2], n, m))


class Gathered(Use):
    """Rows of a table picked by index, as in an embedding: row `index` receives `right`.

    `index` is (B, T), `right` (B, T, n); a negative index receives nothing (padding). `padded` is False where no index
    can be negative. How many entries count is not asked for: a device would have to be waited for. `distinct`: no row
    that receives anything is there twice in a sample.
    """

    how = "rows"

    def __init__(
        self,
        index: Tensor,
        right: Tensor,
        shape: Sequence[int],
        rows: int | None = None,
        *,
        padded: bool = True,
        distinct: bool = False,
    ) -> None:
        self.index, self.padded, self.distinct = index, padded, distinct or index.shape[1] == 1
        right = accurate(right)
        self.right = torch.where((index >= 0).unsqueeze(2), right, 0) if padded else right
        self.shape = tuple(shape)
        self.rows = self.shape[0] if rows is None else rows
        self.batch_size = index.shape[0]

    @property
    def _row(self) -> Tensor:
        """The row of every entry; that of padding, which adds zero, is the first."""
        return self.index.clamp(min=0) if self.padded else self.index

    def _added(self, keys: Tensor, samples: slice, count: int) -> Tensor:
        """The values of some samples, added up by `keys`, each sample's own being 0 to count - 1: (b * count, n)."""
        values = self.right[samples]
        offset = torch.arange(values.shape[0], device=keys.device).unsqueeze(1) * count
        flat = values.new_zeros(values.shape[0] * count, values.shape[-1])
        return flat.index_add_(0, (keys + offset).flatten(), values.flatten(0, 1))

    def squared_norms(self, doubts: Doubts | None = None) -> Tensor:
        if self.distinct:
            return squares(self.right)
        squared = self.lasting().squared_norms()
        return doubt_cancelled(squared, self.terms(), self.precise_norms, doubts)

    def precise_norms(self, some_B: Tensor) -> Tensor:
        """No table is formed."""
        use = self.precise(some_B)
        return rounded_up(use.lasting().squared_norms(), use.terms())

    def terms(self) -> Tensor:
        return lengths(self.right).sum(1)

    def lasting(self) -> Gathered:
        """A row met twice adds before it is squared, and before it is scaled: one order, one rounding."""
        if self.distinct:
            return self
        row = self._row
        ordered, order = row.sort(1)
        later = ordered[:, 1:] != ordered[:, :-1]
        place = torch.zeros_like(order).scatter_(1, order[:, 1:], later.cumsum(1))  # among the sample's distinct rows
        values = self._added(place, _ALL, row.shape[1]).view_as(self.right)
        index = torch.zeros_like(row).scatter_(1, place, row)  # places that are left add zero to the first row
        return Gathered(index, values, self.shape, self.rows, padded=False, distinct=True)

    def gradients(self, samples: slice = _ALL) -> Tensor:
        flat = self._added(self._row[samples], samples, self.rows)
        return flat.view(-1, *self.shape)

    def weighted(self, factors_B: Tensor) -> Tensor:
        table = self.right.new_zeros(self.rows, self.right.shape[-1])
        self.add_weighted(factors_B, table)
        return table.view(self.shape)

    def add_weighted(self, factors_B: Tensor, total: Tensor) -> None:
        """Only the rows that were picked are touched."""
        values = self.right * per_sample(factors_B.to(self.right.dtype), 3)
        table = total.view(self.rows, values.shape[-1])
        table.index_add_(0, self._row.flatten(), values.flatten(0, 1).to(table.dtype))

    def precise(self, some_B: Tensor) -> Gathered:
        return self._with(self.index[some_B], self.right[some_B].double())

    def without(self, bad_B: Tensor) -> Use:
        return self._with(self.index, _zeroed(self.right, bad_B))

    def _with(self, index: Tensor, right: Tensor) -> Gathered:
        return Gathered(index, right, self.shape, self.rows, padded=self.padded, distinct=self.distinct)


def _takes(total: Tensor, part: Tensor) -> bool:
    """Whether products of `part` can be added in any view of a sum."""
    return total.dtype == part.dtype and total.is_contiguous()


def _is_narrow(left: Tensor, right: Tensor) -> bool:
    """Whether left^T right is formed faster by way of its transpose."""
    return right.shape[1] < _NARROW <= left.shape[1]


def _product(left: Tensor, right: Tensor) -> Tensor:
    """left^T right, for a narrow result by way of its transpose, which is several times faster."""
    return (right.t() @ left).t().contiguous() if _is_narrow(left, right) else product(left.t(), right)


def _rows(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Samples and positions as one axis of rows: (B, *E, T, m) -> (*E, B * T, m), in whatever order both share."""
    if left.dim() > 3:
        left, right = left.movedim(0, -3), right.movedim(0, -3)
    elif left.stride(0) < left.stride(1):  # positions outermost in memory: no copy, if in that of both
        left, right = left.transpose(0, 1), right.transpose(0, 1)
    return left.flatten(-3, -2), right.flatten(-3, -2)


def _zeroed(tensor_B: Tensor, bad_B: Tensor) -> Tensor:
    return tensor_B.masked_fill(per_sample(bad_B, tensor_B.dim()), 0)


def joint_weighted(
    uses: Sequence[Use], factors_B: Tensor, onto: Tensor | None = None, careful_B: Tensor | None = None
) -> Tensor:
    """sum_i c_i g_i for several uses of one tensor, added to `onto` where there is one.

    Rows of a table come last, to be added to what there is. The terms of some samples are added in float64 (`Doubts`).
    """
    if careful_B is not None:
        total = joint_weighted(uses, factors_B.masked_fill(careful_B, 0), onto)
        precise = joint_weighted([use.precise(careful_B) for use in uses], factors_B[careful_B])
        return total.add_(precise.view_as(total))
    if onto is None and len(uses) == 1:
        return uses[0].weighted(factors_B)
    ordered = sorted(uses, key=lambda use: isinstance(use, Gathered))
    total = ordered.pop(0).weighted(factors_B) if onto is None else onto
    for use in ordered:
        use.add_weighted(factors_B, total)
    return total


def chunks(use: Use, limit: int = 1 << 24) -> list[slice]:
    """Slices of the batch whose instantiated gradients stay below `limit` elements."""
    size = max(1, limit // max(1, prod(use.shape)))
    return [slice(start, start + size) for start in range(0, use.batch_size, size)]
