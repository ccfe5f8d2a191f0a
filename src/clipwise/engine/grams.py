"""Ghost norms: ||sum_t l_t r_t^T||^2 = <L L^T, R R^T> from the inner products of positions, no gradient is formed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import torch
from torch import Tensor

from clipwise.engine.graph import Edge

_CANCELLED = 4e-3  # squared norm relative to that of its terms, below which float32 is not accurate enough
_COHERENT = 2.5e-4  # the same for the sum of all terms' lengths, squared, if all errors had one sign
_COHERENT_GRAM = 1.8e-3  # where terms are inner products, whose own roundings may have one sign, too
_SCATTERED = 3e-2  # and for the sum of their squares, since errors have either sign
_LOST = {torch.float32: 1e-17, torch.float64: 1e-150}  # lengths whose squares begin to lose their digits
_LARGE = 10.0  # a length that makes up for a lost one
_LOST_PART = 1e-6  # of a squared norm, that lost digits may be
_ROUNDED = 1e-6  # of the sum of all terms' lengths: what the inner product of float64 Gram matrices may not tell
_ROUNDED_DOUBLE = 1e-9  # the same for a sum in float64
_STRIPS = 4
_WORTH_CUTTING = 64  # positions from which cutting saves more arithmetic than its calls cost


@dataclass(frozen=True)
class Gram:
    """The inner products of a sample's positions, (B, *E, T, T), as strips right of the diagonal (they are symmetric).

    A strip holds some rows a:b and the columns from a on.
    """

    strips: tuple[Tensor, ...]

    @classmethod
    def of(cls, vectors: Tensor) -> Gram:
        """From (B, *E, T, m)."""
        count = vectors.shape[-2]
        parts = _STRIPS if count >= _WORTH_CUTTING else 1
        cuts = [count * i // parts for i in range(parts + 1)]
        return cls(tuple(vectors[..., a:b, :] @ vectors[..., a:, :].mT for a, b in pairwise(cuts)))

    def lengths(self) -> Tensor:
        """The norm of every position, (B, *E, T)."""
        return torch.cat([strip.diagonal(dim1=-2, dim2=-1) for strip in self.strips], -1).sqrt_()

    def times_(self, other: Gram) -> Tensor:
        """<self, other> per sample, (B,). This one's memory is used up."""
        total = None
        for mine, theirs in zip(self.strips, other.strips, strict=True):
            product = mine.mul_(theirs)
            above = product[..., product.shape[-2] :]  # these stand for their mirror images as well
            part = product.flatten(1).sum(1) + above.flatten(1).sum(1)
            total = part if total is None else total + part
        assert total is not None
        return total


Pair: TypeAlias = tuple[Gram, Gram]  # of the left and the right factor; the left one is used up


class Doubts:
    """Squared norms of which some may have to be computed again, looked at together: a device is waited for once.

    Norms that were added are not to be used before `settle`, unless `any` is false. Where a norm is in doubt, so is the
    float32 sum of the terms: `careful` has the samples whose terms are to be added in float64, by `whose` they are.
    """

    def __init__(self, *, at_once: bool = False) -> None:
        self._open: list[_Doubt] = []
        self._at_once = at_once
        self.whose: tuple[Edge, ...] = ()
        self.careful: dict[Edge, Tensor] = {}

    def add(self, squared: Tensor, doubtful: Tensor, again: Callable[[Tensor], Tensor]) -> None:
        """Doubt some of `squared`, (B,); `again(mask)` computes those."""
        self._open.append((squared, doubtful, again, self.whose))
        if self._at_once:
            self.settle()

    def add_sums(self, doubtful: Tensor) -> None:
        """Doubt what float32 makes of the terms of some samples, whose norms are right."""
        self._open.append((doubtful, doubtful, None, self.whose))
        if self._at_once:
            self.settle()

    def any(self, device: torch.device) -> Tensor | None:
        """Whether there is any, as a tensor that nobody has waited for; None where nothing was added."""
        found = [each[1].any().to(device) for each in self._open]
        return torch.stack(found).any() if len(found) > 1 else found[0] if found else None

    def settle(self) -> None:
        """Compute again what is doubtful, in place."""
        for squared, doubtful, again, whose in self._open:
            if bool(doubtful.any()):
                if again is not None:
                    squared[doubtful] = again(doubtful).to(squared.dtype)
                self.whose = whose
                self.note(doubtful)
        self.drop()

    def note(self, careful: Tensor) -> None:
        """Some samples whose norms are settled."""
        for edge in self.whose:
            known = self.careful.get(edge)
            self.careful[edge] = careful if known is None else known | careful

    def drop(self) -> None:
        """Let go of what is held to compute norms again."""
        self._open.clear()


_Doubt: TypeAlias = tuple[Tensor, Tensor, Callable[[Tensor], Tensor] | None, tuple[Edge, ...]]


def ghost_norms(grams: Callable[[], Pair], exact: Callable[[Tensor], Pair], doubts: Doubts | None = None) -> Tensor:
    """Squared norms, (B,), from Gram matrices; `exact(mask)` gives those of some samples in float64.

    Given `doubts`, what would be computed again is left to it.

    Rounding of a Gram matrix is relative to a_t = |l_t||r_t|, not to the gradient: a norm that reads low by
    cancellation would let a sample through with more than its bound. The T^2 errors are relative to a_t a_s, so they
    add up to a few units in the last place of sum_t a_t^2, or of (sum_t a_t)^2 if they all had one sign. Where the
    result is not large beside the one (an error of 3e-5 of it) or the other (1e-3, where data were chosen so that all
    roundings of all inner products go to one side), it is computed again: so are unrelated positions, if there are more
    than 555 of them.
    """
    left, right = grams()
    dtype, l_lengths, r_lengths = left.strips[0].dtype, left.lengths(), right.lengths()
    terms = (l_lengths * r_lengths).flatten(1)
    lost = _lost(l_lengths.flatten(1), r_lengths.flatten(1), _LOST[dtype])
    if dtype == torch.float64:
        squared = torch.maximum(left.times_(right), (_ROUNDED * terms.sum(1)).square_())
        unknown = ~torch.isfinite(squared)
    else:
        least = torch.maximum(_COHERENT_GRAM * terms.sum(1).square_(), _SCATTERED * terms.square().sum(1))
        squared = left.times_(right)
        unknown = _below(squared, least)
    faint = (lost > _LOST[dtype] * _LARGE) & ((lost.square() > _LOST_PART * squared) | lost.isinf())
    own = Doubts(at_once=True) if doubts is None else doubts
    own.add(squared, unknown | faint, lambda some: _times(exact(some)))
    return squared.clamp_(min=0)


def _times(pair: Pair) -> Tensor:
    """<left, right> per sample, and no less than what rounding makes of its terms.

    Where huge terms cancel, the inner product of float64 Gram matrices is off by the root of their last digits. A
    factor for a shorter gradient would let more through.
    """
    left, right = pair
    terms = (left.lengths() * right.lengths()).flatten(1).sum(1)
    return torch.maximum(left.times_(right), (_ROUNDED * terms).square_())


def doubt_cancelled(
    squared: Tensor, terms: Tensor, again: Callable[[Tensor], Tensor], doubts: Doubts | None = None
) -> Tensor:
    """Squared norms (B,) of sums of terms whose lengths add up to `terms`; `again(mask)` finds some in float64.

    Where huge terms cancel, a sum in float32 is off by their last digits, once for every addition, and data can have
    all roundings go to one side. In another order the same terms have another sum: a norm that was found from one says
    nothing of the other.
    """
    own = Doubts(at_once=True) if doubts is None else doubts
    own.add(squared, is_cancelled(squared, terms), again)
    return squared


def rounded_up(squared: Tensor, terms: Tensor) -> Tensor:
    """Squared norms of sums in float64, and no less than what rounding makes of their terms."""
    return torch.maximum(squared, (_ROUNDED_DOUBLE * terms).square_())


def is_cancelled(squared: Tensor, terms: Tensor) -> Tensor:
    """Where a sum is so short beside the lengths of its terms that float32 cannot tell it, or these are beyond it."""
    return _below(squared, _COHERENT * terms.square())


def _below(squared: Tensor, least: Tensor) -> Tensor:
    """Also where either is beyond float32, so that nobody knows."""
    return ~(squared >= least) | least.isinf()


def _lost(a: Tensor, b: Tensor, least: float) -> Tensor:
    """The most that squares of lengths below `least` can lose of each sample's gradient.

    From the lengths of its positions' factors, position by position: one with a long factor says nothing of another,
    whose tiny factor meets a huge one.
    """
    return least * (torch.where(a < least, b, 0).sum(1) + torch.where(b < least, a, 0).sum(1))


def cancelled(total: Tensor, parts: Tensor) -> Tensor:
    """Where a squared norm is so much smaller than its terms that float32 cannot tell it."""
    return total < _CANCELLED * parts


class Recent:
    """The Gram matrix of the tensor seen last: query, key and value of an attention read the same one."""

    def __init__(self) -> None:
        self._last: tuple[Tensor, Gram] | None = None

    def of(self, vectors: Tensor) -> Gram:
        """The Gram matrix of a saved tensor. The tensor is held, so that its address cannot become another's."""
        if self._last is not None and same_memory(self._last[0], vectors):
            return self._last[1]
        gram = Gram.of(vectors)
        self._last = (vectors, gram)
        return gram


def same_memory(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are the same numbers because they are the same memory."""
    return (
        a.data_ptr() == b.data_ptr()
        and a.shape == b.shape
        and a.stride() == b.stride()
        and a.dtype == b.dtype
        and a.device == b.device
    )
