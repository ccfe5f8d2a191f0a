"""Norms of rows, whatever the magnitude of their numbers: what the norm of a gradient is made of.

A linear map with one position per sample has the gradient l r^T, of norm |l||r|; a bias has that of its row. So a small
network needs nothing but the lengths of rows, which are found together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache, reduce
from operator import mul

import torch
from torch import Tensor

from clipwise.engine.grams import Doubts
from clipwise.engine.graph import Edge

_FEW = 1 << 15  # elements up to which float64 costs less than to look whether it is needed
_FAINT = {torch.float32: 1e-12, torch.float64: 1e-140}  # to which numbers may add whose squares are subnormal, or zero
_SMALLEST = 5e-324  # of all numbers
_LONG = 1 << 10  # numbers beyond which a running sum of float32 squares loses digits


def lengths(tensor: Tensor) -> Tensor:
    """Norms along the last axis.

    Of long rows those of pieces come first: torch adds squares one after the other, and a million equal numbers would
    read low by a thousandth.
    """
    if tensor.shape[-1] > _LONG and tensor.dtype != torch.float64:
        whole, rest = tensor.tensor_split([tensor.shape[-1] // _LONG * _LONG], dim=-1)
        pieces = torch.linalg.vector_norm(whole.unflatten(-1, (-1, _LONG)), dim=-1)
        return lengths(torch.cat([pieces, torch.linalg.vector_norm(rest, dim=-1, keepdim=True)], dim=-1))
    norms: Tensor = torch.linalg.vector_norm(tensor, dim=-1)
    return norms


@cache
def largest_norm(dtype: torch.dtype) -> float:
    """Beyond this the square of a norm is beyond `dtype`."""
    return math.sqrt(torch.finfo(dtype).max)


def beyond(*norms: Tensor, dtype: torch.dtype) -> Tensor:
    """Where some of these norms of rows is so large that a row times a factor may leave `dtype`.

    A factor brings a gradient to its bound, not each of the two rows that it is the product of: 1e33 beside 1e-45
    gives a gradient of 1e-12 and a factor of 1e12, and 1e33 times 1e12 is infinite. Beside 3e38 a row of a few units of
    the smallest number meets a factor below one, and rounds to other units. Rows up to the root of the largest number
    are far from either.
    """
    return reduce(torch.maximum, norms) > largest_norm(dtype)


def balanced(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Float64 rows whose outer products are the same, those of `left` brought to about one by powers of two.

    A factor meets the length of the gradient, then, and nothing else.
    """
    if not left.shape[-1]:
        return left, right
    exponents = torch.frexp(left.abs().amax(-1, keepdim=True)).exponent.clamp(-1000, 1000).double()
    return left * torch.exp2(-exponents), right * torch.exp2(exponents)


def is_waited_for(tensor: Tensor) -> bool:
    """Whether to read a number of a tensor is to wait for a device."""
    return tensor.device.type != "cpu"


def _in_double(tensor: Tensor) -> Tensor:
    """Norms in float64; of float64 rows after they were scaled, whose squares may be beyond it as well."""
    if tensor.dtype == torch.float64 and tensor.shape[-1]:
        size = tensor.abs().amax(-1, keepdim=True)
        found = lengths(tensor / torch.where(size == 0, 1, size)) * size.squeeze(-1)  # NaN and infinity stay
        return torch.where(found == 0, 0, found + _SMALLEST)  # not rounded down: it may be multiplied with what is huge
    norms: Tensor = torch.linalg.vector_norm(tensor, dim=-1, dtype=torch.float64)
    return norms


def sure_lengths(tensor: Tensor) -> Tensor:
    """The same in float64 where a float32 square over- or underflows, to be multiplied with the lengths of a factor.

    1e30 times an exact 0 is 0, not NaN; and 1e-22, whose square has lost its digits, may meet 1e20. Away from the
    processor all are found in float64: to wait for a device costs more.
    """
    if tensor.dtype == torch.float64 or tensor.numel() <= _FEW or is_waited_for(tensor):
        return _in_double(tensor)
    norms = lengths(tensor).unsqueeze(0)
    return (norms.double() if _is_sure(norms) else _mended(norms, [tensor]))[0]


def _is_sure(norms: Tensor) -> bool:
    """Whether no square of a row over- or underflowed, and no factor will make it."""
    low, high = torch.aminmax(norms)
    return float(low) > _FAINT[norms.dtype] and float(high) <= largest_norm(norms.dtype)


def _mended(norms: Tensor, rows: Sequence[Tensor]) -> Tensor:
    """Norms of the rows of several tensors, (len(rows), ...), in float64; found again where squares did not do."""
    wide = norms.double()
    doubtful = ~((norms > _FAINT[norms.dtype]) & (norms < torch.inf))
    for k in doubtful.flatten(1).any(1).nonzero().flatten().tolist():
        wide[k, doubtful[k]] = _in_double(rows[k][doubtful[k]])
    return wide


class Lengths:
    """The lengths of the rows of many matrices (B, n), found together, and squared norms that are products of them."""

    def __init__(self) -> None:
        self._rows: list[Tensor] = []
        self._place: dict[int, int] = {}
        self._products: dict[Edge, list[int]] = {}

    def add(self, edge: Edge, factors: Sequence[Tensor]) -> None:
        """The norms of an operand's gradients are the products of the lengths of these matrices' rows."""
        self._products[edge] = [self._of(rows) for rows in factors]

    def _of(self, rows: Tensor) -> int:
        place = self._place.get(id(rows))  # weight and bias of a layer read the same gradient
        if place is None:
            place = self._place[id(rows)] = len(self._rows)
            self._rows.append(rows)
        return place

    def squared(self, doubts: Doubts) -> dict[Edge, Tensor]:
        """All squared norms, (B,) each, in float64. Samples with a row `beyond` are in `doubts`, for their sums."""
        if not self._rows:
            return {}
        if is_waited_for(self._rows[0]):
            found = torch.stack([_in_double(rows) for rows in self._rows])
        else:
            norms = torch.stack([lengths(rows) for rows in self._rows])
            if _is_sure(norms):
                squares = norms.double().square_().unbind()
                return {edge: reduce(mul, [squares[k] for k in places]) for edge, places in self._products.items()}
            found = _mended(norms, self._rows)
        each = found.unbind()  # multiplied before they are squared, which float64 may not hold
        squared = {edge: reduce(mul, [each[k] for k in places]).square() for edge, places in self._products.items()}
        narrowest = min((rows.dtype for rows in self._rows), key=largest_norm)
        doubts.whose = tuple(squared)
        doubts.add_sums(beyond(found, dtype=narrowest).any(0))
        return squared
