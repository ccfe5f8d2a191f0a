"""Norms of rows, whatever the magnitude of their numbers: what the norm of a gradient is made of.

A linear map with one position per sample has the gradient l r^T, of norm |l||r|; a bias has that of its row. So a small
network needs nothing but the lengths of rows, which are found together.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import mul

import torch
from torch import Tensor

from clipwise.engine.graph import Edge

_FEW = 1 << 15  # elements up to which float64 costs less than to look whether it is needed
_FAINT = 1e-12  # lengths to which many numbers may add whose float32 squares are subnormal, or zero
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


def is_waited_for(tensor: Tensor) -> bool:
    """Whether to read a number of a tensor is to wait for a device."""
    return tensor.device.type != "cpu"


def _in_double(tensor: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(tensor, dim=-1, dtype=torch.float64)
    return norms


def sure_lengths(tensor: Tensor) -> Tensor:
    """The same in float64 where a float32 square over- or underflows, to be multiplied with the lengths of a factor.

    1e30 times an exact 0 is 0, not NaN; and 1e-22, whose square has lost its digits, may meet 1e20. Away from the
    processor all are found in float64: to wait for a device costs more.
    """
    if tensor.dtype == torch.float64 or tensor.numel() <= _FEW or is_waited_for(tensor):
        return _in_double(tensor)
    return _mended(lengths(tensor).unsqueeze(0), [tensor])[0]


def _mended(norms: Tensor, rows: Sequence[Tensor]) -> Tensor:
    """Norms of the rows of several tensors, (len(rows), ...), in float64; found again where float32 did not do."""
    low, high = torch.aminmax(norms)
    wide = norms.double()
    if not (float(low) > _FAINT and float(high) < torch.inf):
        doubtful = ~((norms > _FAINT) & (norms < torch.inf))
        for k in doubtful.flatten(1).any(1).nonzero().flatten().tolist():
            wide[k, doubtful[k]] = lengths(rows[k][doubtful[k]].double())
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

    def squared(self) -> dict[Edge, Tensor]:
        """All squared norms, (B,) each, in float64."""
        if not self._rows:
            return {}
        if is_waited_for(self._rows[0]):
            found = torch.stack([_in_double(rows) for rows in self._rows])
        else:
            found = _mended(torch.stack([lengths(rows) for rows in self._rows]), self._rows)
        squares = found.square_().unbind()
        return {edge: reduce(mul, [squares[k] for k in places]) for edge, places in self._products.items()}
