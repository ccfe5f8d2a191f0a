"""Where the samples lie inside a tensor, found by asking autograd.

A colour probe back-propagates the cotangent `v`, one colour per sample, beside the cotangent of ones. Back-propagation
is linear and scaling by a power of two is exact in floating point, so an element of a gradient that belongs to sample
i alone is scaled by exactly v_i, and one that mixes samples is scaled by a weighted mean of their colours.

That mean must not be the colour of another sample, as (-2 + 4) / 2 = 1 would be. Colours are signed powers of four:
the mean of two or of three is never another one. Whatever the weights are, they are chosen without knowledge of the
colours, which are drawn again for every probe, two or more for each sample where there is a third one to be taken for.
Only a refusal can depend on the draw.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor

# Units in the last place; none relative to other elements: a small loss must not hide behind a large one.
_SLACK = 8
_MOST = 2.0**-7  # of an element: one unit of bfloat16, whose exponents are those of float32, so that it scales exactly
_HALF_FAINT = 2.0**-20  # float16 has few exponents: what is smaller has lost its digits
_FEW = 512  # elements that are looked at before all are

# Exponents of four. Two colours differ by no more than what the slack can tell: else the smaller one is lost in a mean.
NARROW = range(-1, 3)  # for half precision: float16 has few exponents, too
WIDE = range(-5, 3)  # what is huge must stay finite, what is tiny must keep its digits
_FEWEST = 2  # colourings: weights may be such that one in thirty draws of a single one gives the mean to a third sample
_SPARE = 4  # most combinations are nobody's, so that what a mean looks like is seldom somebody


@dataclass(frozen=True)
class Colours:
    """Colourings (B,) that together tell every sample from every other."""

    each: Sequence[Tensor]
    exponents: range = WIDE

    @cached_property
    def _whose(self) -> Tensor:
        """The sample with each number that the digits of colours can have; -1 where there is none."""
        numbers = self._numbers(self.each)
        table = numbers.new_full(((2 * len(self.exponents)) ** len(self.each),), -1)
        table[numbers] = torch.arange(len(numbers), device=numbers.device)
        return table

    def samples(self, ratios: Sequence[Tensor]) -> Tensor:
        """The sample whose colours are nearest to these ratios; -1 where nobody has such."""
        return self._whose[self._numbers(ratios)]

    def _numbers(self, ratios: Sequence[Tensor]) -> Tensor:
        """Colours are the digits of a number."""
        number = torch.zeros(ratios[0].shape, dtype=torch.long, device=ratios[0].device)
        for ratio in reversed(ratios):
            power = torch.frexp(ratio).exponent.long().div_(2, rounding_mode="floor")  # 4^k is 0.5 * 2^(2k + 1)
            digit = power.sub_(self.exponents.start).clamp_(0, len(self.exponents) - 1).mul_(2).add_(ratio < 0)
            number.mul_(2 * len(self.exponents)).add_(digit)
        return number


def drawn(batch_size: int, like: Tensor, exponents: range = WIDE) -> Colours:
    """New colours for a batch, from the system's entropy: no seed tells them, and they change no seeded run."""
    palette = [sign * 4.0**k for k in exponents for sign in (1, -1)]
    count = _FEWEST if batch_size > 2 else 1
    while len(palette) ** count < _SPARE * batch_size:
        count += 1
    generator = torch.Generator(device="cpu")
    generator.seed()
    numbers = torch.randperm(len(palette) ** count, generator=generator, device="cpu")[:batch_size]
    colours = torch.tensor(palette, dtype=like.dtype, device="cpu")
    digits = [colours[numbers // len(palette) ** place % len(palette)] for place in range(count)]
    return Colours(torch.stack(digits).to(like.device).unbind(), exponents)


@dataclass(frozen=True)
class Layout:
    """Samples along `axis`, whose index is `(outer * B + sample) * inner + rest`.

    `inner=None` is batch-major: one block per sample (outer = 1), whatever the block's size. `exact` was seen with
    one entry per sample only, which tells nothing about longer axes. Any other `inner` was seen with `rest` entries per
    sample, and tells nothing about other numbers of them.
    """

    axis: int
    inner: int | None = None
    exact: bool = False
    rest: int | None = None

    def fits(self, shape: Sequence[int], batch_size: int) -> bool:
        """Whether the axis of this shape can hold the batch in this layout."""
        if self.axis >= len(shape):
            return False
        size = shape[self.axis]
        if self.rest is not None:
            return size == batch_size * self.rest
        return size == batch_size or (not self.exact and size % batch_size == 0)

    def owners(self, shape: Sequence[int], batch_size: int) -> Tensor:
        """The sample that each position along the axis belongs to."""
        size = shape[self.axis]
        inner = size // batch_size if self.inner is None else self.inner
        return torch.arange(size, device="cpu") // inner % batch_size

    def elements(self, shape: Sequence[int], batch_size: int) -> Tensor:
        """The sample that each element belongs to, in the order of elements."""
        view = [1] * len(shape)
        view[self.axis] = -1
        return self.owners(shape, batch_size).view(view).expand(*shape).flatten()

    def split(self, tensor: Tensor, batch_size: int, axis: int | None = None) -> Tensor:
        """Batch axis first: (B, ...), what is left of the axis stays in its place."""
        k = self.axis if axis is None else axis
        size = tensor.shape[k]
        if size == batch_size:
            return tensor.movedim(k, 0).unsqueeze(k + 1) if k else tensor.unsqueeze(1)
        if self.inner is None:
            blocks: Tensor = tensor.unflatten(k, (batch_size, size // batch_size))
            return blocks.movedim(k, 0)
        strided: Tensor = tensor.unflatten(k, (size // (batch_size * self.inner), batch_size, self.inner))
        return strided.movedim(k + 1, 0).flatten(k + 1, k + 2)

    def __str__(self) -> str:
        kinds = {None: "batch-major", 1: "batch-minor"}
        kind = "the batch" if self.exact else kinds.get(self.inner, f"batch-middle, inner {self.inner}")
        return f"axis {self.axis}, {kind}"


@dataclass(frozen=True)
class Scattered:
    """Samples along an axis in no regular order, such as tokens routed to experts; read by colours at every step."""

    axis: int

    def __str__(self) -> str:
        return f"axis {self.axis}, scattered"


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
        yield from (Layout(k, inner=i, rest=rest) for i in range(2, rest) if rest % i == 0)


def all_finite(tensor: Tensor) -> bool:
    """Whether no element is NaN or infinite: their sum tells, unless it overflows by itself."""
    return bool(torch.isfinite(tensor.sum())) or bool(torch.isfinite(tensor).all())


def blank(gradient: Tensor) -> bool:
    """Nothing reached a value, or nothing finite did: whatever is dropped there contributes nothing."""
    few = gradient.flatten()[:: 1 + gradient.numel() // _FEW]
    return all(not bool(((part != 0) & torch.isfinite(part)).any()) for part in (few, gradient))


@dataclass(frozen=True)
class Probe:
    """The gradients of a value under the cotangents of ones and of colours; `bad` marks losses that are not finite."""

    plain: Tensor
    coloured: Sequence[Tensor]
    colours: Colours
    bad: Tensor

    @cached_property
    def blank(self) -> bool:
        """Whether this value tells nothing about its layout. Samples that mix may cancel, but not in all colours."""
        return blank(self.plain) and all(map(blank, self.coloured))

    @property
    def faint(self) -> float:
        """What is smaller may have lost its digits on the way."""
        numbers = torch.finfo(self.plain.dtype)
        return _HALF_FAINT if self.plain.dtype == torch.float16 else numbers.tiny / numbers.eps

    @cached_property
    def _few(self) -> tuple[Tensor, Probe]:
        """Some elements, by their numbers, which tell most wrong layouts at little cost: zeros tell nothing."""
        plain = self.plain.flatten()
        number = torch.arange(0, plain.numel(), 1 + plain.numel() // _FEW, device=plain.device)
        if not bool(plain[number].any()):  # one class of many
            reached = plain.nonzero().squeeze(1)
            number = reached[:: 1 + reached.numel() // _FEW]
        coloured = [c.flatten()[number] for c in self.coloured]
        return number, Probe(plain[number], coloured, self.colours, self.bad)

    def agrees(self, owners: Tensor, axis: int) -> bool:
        """Whether every element is scaled by the colour of its owner, and NaN lies with bad samples only."""
        owners = owners.to(self.plain.device)
        if self.plain.numel() > 2 * _FEW:
            number, few = self._few
            inner = prod(self.plain.shape[axis + 1 :])
            if not few.agrees(owners[number // inner % self.plain.shape[axis]], 0):
                return False
        shape = [1] * self.plain.dim()
        shape[axis] = -1
        each = zip(self.coloured, self.colours.each, strict=True)
        return all(self._agrees_in(coloured, colours, owners, shape) for coloured, colours in each)

    def _agrees_in(self, coloured: Tensor, colours: Tensor, owners: Tensor, shape: Sequence[int]) -> bool:
        scales = colours.to(self.plain.dtype)[owners].view(shape)
        expected = self.plain * scales
        if torch.equal(coloured, expected) and all_finite(expected):  # the usual case: powers of two scale exactly
            return True
        slack = min(_SLACK * torch.finfo(self.plain.dtype).eps, _MOST)
        limit = expected.abs().mul_(slack).add_(self.faint * (1 + scales.abs()))
        wrong = ~((coloured - expected).abs() <= limit)
        finite = torch.isfinite(self.plain) & torch.isfinite(coloured)
        return not bool(torch.where(finite, wrong, ~self.bad[owners].view(shape)).any())

    def layouts(self, batch_size: int) -> tuple[Layout, ...]:
        """All regular layouts that agree with the probe: a usual one may do so by chance, where rows are zero."""
        each = candidates(self.plain.shape, batch_size)
        return tuple(k for k in each if self.agrees(k.owners(self.plain.shape, batch_size), k.axis))


def owners_by_digits(probe: Probe, axis: int) -> Tensor | None:
    """The sample of each position along an axis, read off its colours; None when a position mixes samples.

    A position that received no gradient, or one that cannot be read, may belong to anybody, one that received NaN
    belongs to a bad sample: all are given to the first bad sample, or to the first of all.
    """
    plain = probe.plain
    sizes, places = peaks(plain, axis)
    numbers = _row_at(plain, axis, places)
    ratios = [(_row_at(colour, axis, places) / numbers).nan_to_num(0, 0, 0) for colour in probe.coloured]
    owners = torch.where(sizes > probe.faint, probe.colours.samples(ratios), int(probe.bad.to(torch.uint8).argmax()))
    if bool((owners < 0).any()) or not probe.agrees(owners, axis):
        return None
    return owners


def _rows(tensor: Tensor, axis: int) -> Tensor:
    """The positions along an axis as rows of real numbers."""
    rows = tensor.movedim(axis, 0).unsqueeze(-1).flatten(1)
    return torch.view_as_real(rows.resolve_conj()).flatten(1) if rows.is_complex() else rows


def _row_at(tensor: Tensor, axis: int, places: Tensor) -> Tensor:
    """One number of each row."""
    return _rows(tensor, axis).gather(1, places.unsqueeze(1)).squeeze(1).double()


def peaks(tensor: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    """The size of the largest finite number at each position along an axis, 0 where there is none, and its place."""
    rows = _rows(tensor, axis)
    if rows.shape[1] == 0:
        nothing = torch.zeros(rows.shape[0], device=rows.device)
        return nothing, nothing.long()
    sizes, places = (rows if all_finite(rows) else rows.nan_to_num(0, 0, 0)).abs().max(1)
    return sizes, places


def pack(owners: Tensor, batch_size: int) -> Tensor:
    """Positions (B, T) of each sample's rows, padded with the number of rows (to gather from an appended zero row)."""
    rows = owners.numel()
    counts = torch.bincount(owners, minlength=batch_size)
    order = torch.argsort(owners, stable=True)
    start = counts.cumsum(0) - counts
    sample = owners[order]
    slot = torch.arange(rows, device=owners.device) - start[sample]
    table = torch.full((batch_size, int(counts.max())), rows, dtype=torch.long, device=owners.device)
    table[sample, slot] = order
    return table
