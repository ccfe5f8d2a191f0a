"""Where the samples lie inside a tensor, found by asking autograd.

A colour probe back-propagates the cotangent `v`, one power of two per sample, beside the cotangent of ones. Back-
propagation is linear and scaling by a power of two is exact in floating point, so an element of a gradient that
belongs to sample i alone is scaled by exactly v_i, and one that mixes samples is not. Two backward passes thus test
a layout for every element and every sample at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Relative to the element, and to the largest element: room for kernels whose order of summation is not fixed.
_RELATIVE, _ABSOLUTE = 1e-3, 1e-6


def colours(batch_size: int, like: Tensor) -> Tensor:
    """One signed power of two per sample; all distinct up to 16 samples, neighbours distinct beyond."""
    palette = torch.tensor([s * 2.0**k for k in range(8) for s in (1, -1)], dtype=like.dtype)
    generator = torch.Generator().manual_seed(0x5EED)
    rounds = -(-batch_size // 16)
    return torch.cat([palette[torch.randperm(16, generator=generator)] for _ in range(rounds)])[:batch_size].to(
        like.device
    )


@dataclass(frozen=True)
class Layout:
    """Samples along `axis`, whose index is `(outer * B + sample) * inner + rest`.

    `inner=None` is batch-major: one block per sample (outer = 1), whatever the block's size. `exact` was seen with
    one entry per sample only, which tells nothing about longer axes.
    """

    axis: int
    inner: int | None = None
    exact: bool = False

    def fits(self, shape: Sequence[int], batch_size: int) -> bool:
        """Whether the axis of this shape can hold the batch in this layout."""
        if self.axis >= len(shape):
            return False
        size = shape[self.axis]
        return size == batch_size or (not self.exact and size % (batch_size * (self.inner or 1)) == 0)

    def owners(self, shape: Sequence[int], batch_size: int) -> Tensor:
        """The sample that each position along the axis belongs to."""
        size = shape[self.axis]
        inner = size // batch_size if self.inner is None else self.inner
        return torch.arange(size) // inner % batch_size

    def split(self, tensor: Tensor, batch_size: int, axis: int | None = None) -> Tensor:
        """Batch axis first: (B, ...), what is left of the axis stays in its place."""
        k = self.axis if axis is None else axis
        size = tensor.shape[k]
        if size == batch_size:
            return tensor.movedim(k, 0).unsqueeze(k + 1) if k else tensor.unsqueeze(1)
        if self.inner is None:
            return tensor.unflatten(k, (batch_size, size // batch_size)).movedim(k, 0)
        outer = size // (batch_size * self.inner)
        return tensor.unflatten(k, (outer, batch_size, self.inner)).movedim(k + 1, 0).flatten(k + 1, k + 2)

    def __str__(self) -> str:
        kinds = {None: "batch-major", 1: "batch-minor"}
        kind = "the batch" if self.exact else kinds.get(self.inner, f"batch-middle, inner {self.inner}")
        return f"axis {self.axis}, {kind}"


@dataclass(frozen=True)
class Routed:
    """Samples along axis 0 in an order that an index on the graph tells; the index is read anew at every step.

    `node` saved it, as its `item`-th index tensor. If not `placed`, row r comes from (or goes to) row `index[r]` of a
    tensor in layout `other`; if `placed`, row `index[j]` goes to row j of it. `within` says how the rows of one
    entry of the index lie, when the index orders whole samples.
    """

    node: int
    item: int
    placed: bool
    other: Layout
    within: Layout | None = None

    def owners(self, index: Tensor, other_rows: int, rows: int, batch_size: int) -> Tensor | None:
        """The sample of each row, or None when the index does not fit."""
        entries = rows if self.within is None else batch_size
        if index.numel() != entries or not entries:
            return None
        size = entries if self.placed else other_rows
        limit = entries if self.placed else other_rows
        if not self.other.fits([size], batch_size) or int(index.max()) >= limit or int(index.min()) < 0:
            return None
        samples = self.other.owners([size], batch_size).to(index.device)
        if self.placed:
            owners = torch.full_like(index, -1)
            owners[index] = samples
            if bool((owners < 0).any()):
                return None
        else:
            owners = samples[index]
        if self.within is None:
            return owners
        if not self.within.fits([rows], batch_size):
            return None
        return owners[self.within.owners([rows], batch_size).to(index.device)]

    def __str__(self) -> str:
        return f"axis 0, routed by the index of node {self.node}"


def candidates(shape: Sequence[int], batch_size: int) -> Iterator[Layout]:
    """Every regular layout that a tensor of this shape could have, the usual ones first."""
    axes = [k for k, size in enumerate(shape) if size and size % batch_size == 0]
    for k in axes:
        if shape[k] == batch_size:
            yield Layout(k, exact=True)
        else:
            yield Layout(k)
            yield Layout(k, inner=1)
    for k in axes:
        rest = shape[k] // batch_size
        yield from (Layout(k, inner=i) for i in range(2, rest) if rest % i == 0)


@dataclass(frozen=True)
class Probe:
    """The gradients of one value under the cotangents `ones` and `colours`."""

    plain: Tensor
    coloured: Tensor
    colours: Tensor

    @property
    def blank(self) -> bool:
        """Nothing reached this value, or nothing finite did: it tells nothing about its layout."""
        return not bool(((self.plain != 0) & torch.isfinite(self.plain)).any())

    def agrees(self, owners: Tensor, axis: int) -> bool:
        """Whether every element is scaled by the colour of its owner."""
        shape = [1] * self.plain.dim()
        shape[axis] = -1
        expected = self.plain * self.colours.to(self.plain.dtype)[owners.to(self.plain.device)].view(shape)
        finite = torch.isfinite(self.plain) & torch.isfinite(self.coloured)
        size = expected.abs()
        largest = torch.where(finite, size, 0).amax()
        wrong = (self.coloured - expected).abs() > _RELATIVE * size + _ABSOLUTE * largest
        return not bool((wrong & finite).any())

    def layouts(self, batch_size: int) -> tuple[Layout, ...]:
        """All regular layouts that agree with the probe; the irregular "middle" ones only when no usual one does."""
        found: list[Layout] = []
        for layout in candidates(self.plain.shape, batch_size):
            if found and layout.inner not in (None, 1):
                break
            if self.agrees(layout.owners(self.plain.shape, batch_size), layout.axis):
                found.append(layout)
        return tuple(found)


def pack(owners: Tensor, batch_size: int) -> Tensor:
    """Positions (B, T) of each sample's rows, padded with the number of rows (to gather from an appended zero row)."""
    rows = owners.numel()
    counts = torch.bincount(owners, minlength=batch_size)
    longest = int(counts.max()) if rows else 0
    order = torch.argsort(owners, stable=True)
    start = counts.cumsum(0) - counts
    sample = owners[order]
    slot = torch.arange(rows, device=owners.device) - start[sample]
    table = torch.full((batch_size, longest), rows, dtype=torch.long, device=owners.device)
    table[sample, slot] = order
    return table
