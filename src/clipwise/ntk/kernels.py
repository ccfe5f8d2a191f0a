"""The neural tangent kernel H = (df/dw)(df/dw)^T, its layers, and its products with clipping factors.

Samples are taken in blocks; every pair of blocks gives one tile of the kernel. Features of all blocks are held when
they fit the memory they may take, and computed again for each pair otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn

from clipwise.clipping import by_layer
from clipwise.errors import DataError, UnsupportedNode
from clipwise.ntk.features import Feature, gram_features, jacobian_features
from clipwise.ntk.network import Inputs, evaluating, map_inputs, sample_count, trainable

__all__ = ["Route", "clipped_kernel", "kernel", "layer_kernels"]

Route: TypeAlias = Literal["gram", "jacobian"]
Groups: TypeAlias = Mapping[str, Sequence[str]]  # group -> its parameters
Provider: TypeAlias = Callable[[nn.Module, Inputs], tuple[dict[str, Feature], int]]

_PROVIDERS: dict[Route, Provider] = {"gram": gram_features, "jacobian": jacobian_features}
_BLOCK = 128
_HELD_BYTES = 1 << 30


def kernel(model: nn.Module, x: Inputs, *, route: Route | None = None, block: int = _BLOCK) -> Tensor:
    """H = (df/dw)(df/dw)^T of shape (nK, nK) for n samples with K outputs each, samples first.

    `route` is "gram" (through the engine; the Jacobian is never formed) or "jacobian" (`torch.func`); left out, it
    is the first, or the second where the engine has no rule for an operation. `block` is the number of samples that
    are taken at a time. The model is run in evaluation mode and left as it was.

    >>> model = nn.Linear(2, 1, bias=False)
    >>> kernel(model, torch.tensor([[1.0, 0.0], [1.0, 2.0]]))  # a linear model: H = X X^T
    tensor([[1., 1.],
            [1., 5.]])
    """
    (found,) = _kernels(model, x, {"": list(trainable(model))}, route, block).values()
    return found


def layer_kernels(model: nn.Module, x: Inputs, *, route: Route | None = None, block: int = _BLOCK) -> dict[str, Tensor]:
    """H_r of every layer r (the module that owns the parameters); they add up to H.

    >>> model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    >>> x = torch.randn(4, 2)
    >>> layers = layer_kernels(model, x)
    >>> list(layers), torch.allclose(sum(layers.values()), kernel(model, x))
    (['0', '2'], True)
    """
    return _kernels(model, x, by_layer(trainable(model)), route, block)


def clipped_kernel(
    model: nn.Module,
    x: Inputs,
    groups: Groups,
    factors: Mapping[str, Tensor],
    *,
    route: Route | None = None,
    block: int = _BLOCK,
) -> Tensor:
    """The sum over groups r of H_r C_r, with C_r = diag(factors[r]), one factor (n,) per sample.

    One group holding every parameter gives H C (flat clipping), one per layer the matrix of layerwise clipping. No
    H_r is held by itself.

    >>> model = nn.Linear(2, 1, bias=False)
    >>> clipped_kernel(model, torch.eye(2), {"": ["weight"]}, {"": torch.tensor([1.0, 0.5])})
    tensor([[1.0000, 0.0000],
            [0.0000, 0.5000]])
    """
    n = sample_count(x)
    if groups.keys() != factors.keys() or any(factor.shape != (n,) for factor in factors.values()):
        raise DataError(f"each group needs one factor per sample, shape ({n},).")
    unknown = sorted({name for names in groups.values() for name in names} - trainable(model).keys())
    if unknown:
        raise DataError(f"the model has no trainable parameters named {', '.join(unknown)}.")
    total: Tensor | None = None
    for tile in _tiles(model, x, groups, route, block):
        columns = factors[tile.group].to(tile.values.dtype).repeat_interleave(tile.size // n)
        total = tile.values.new_zeros(tile.size, tile.size) if total is None else total
        total[tile.rows, tile.columns] += tile.values * columns[tile.columns]
        if tile.rows != tile.columns:
            total[tile.columns, tile.rows] += tile.values.T * columns[tile.rows]
    assert total is not None
    return total


def _kernels(model: nn.Module, x: Inputs, groups: Groups, route: Route | None, block: int) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for tile in _tiles(model, x, groups, route, block):
        if tile.group not in found:
            found[tile.group] = tile.values.new_empty(tile.size, tile.size)
        found[tile.group][tile.rows, tile.columns] = tile.values
        if tile.rows != tile.columns:
            found[tile.group][tile.columns, tile.rows] = tile.values.T
    return {group: found[group] for group in groups}


@dataclass(frozen=True, eq=False)
class _Tile:
    """The part of one group's kernel that two blocks of samples share; `rows` is never after `columns`."""

    group: str
    rows: slice
    columns: slice
    values: Tensor
    size: int  # of the whole kernel, nK


def _tiles(model: nn.Module, x: Inputs, groups: Groups, route: Route | None, block: int) -> Iterator[_Tile]:
    """The upper triangle of every group's kernel, tile by tile."""
    if route not in (None, "gram", "jacobian"):
        raise DataError(f'route must be None, "gram" or "jacobian", got {route!r}.')
    if block < 1:
        raise DataError(f"block must be a positive number of samples, got {block!r}.")
    blocks = _Blocks(model, x, route, block)
    for i in range(len(blocks)):
        mine = blocks[i]
        for j in range(i, len(blocks)):
            theirs = mine if i == j else blocks[j]
            rows, columns = blocks.span(i), blocks.span(j)
            for group, names in groups.items():
                values = _inner(mine, theirs, names, blocks)
                values = values[: rows.stop - rows.start, : columns.stop - columns.start]
                yield _Tile(group, rows, columns, values, blocks.size)


class _Blocks:
    """The features of every block, held if they fit."""

    def __init__(self, model: nn.Module, x: Inputs, route: Route | None, block: int) -> None:
        self._model, self._x = model, x
        n = sample_count(x)
        count = ceil(n / block)
        self._bounds = [n * i // count for i in range(count + 1)]
        self._spans = list(pairwise(self._bounds))
        self._provider: Provider = _PROVIDERS[route or "gram"]
        try:
            first, self.outputs = self._features(0)
        except UnsupportedNode:
            if route is not None:
                raise
            self._provider = jacobian_features
            first, self.outputs = self._features(0)
        self.dtype = next(p.dtype for p in trainable(model).values())
        self.size = n * self.outputs
        share = sum(feature.elements_as_rows for feature in first.values()) * self.dtype.itemsize
        self._hold = share * len(self) <= _HELD_BYTES
        self._held: dict[int, dict[str, Feature]] = {}
        if self._hold:
            self._held[0] = _held(first)

    def __len__(self) -> int:
        return len(self._spans)

    def span(self, i: int) -> slice:
        """The rows of the kernel that belong to a block."""
        return slice(self._bounds[i] * self.outputs, self._bounds[i + 1] * self.outputs)

    def __getitem__(self, i: int) -> dict[str, Feature]:
        if not self._hold:
            return self._features(i)[0]
        if i not in self._held:
            self._held[i] = _held(self._features(i)[0])
        return self._held[i]

    def _features(self, i: int) -> tuple[dict[str, Feature], int]:
        start, stop = self._spans[i]
        part = map_inputs(self._x, lambda values: values[start:stop])
        if stop - start == 1:  # where the samples lie cannot be told from one: take it twice, the tile is cut
            part = map_inputs(part, lambda values: torch.cat([values, values]))
        with evaluating(self._model):
            return self._provider(self._model, part)


@torch.no_grad()
def _held(features: Mapping[str, Feature]) -> dict[str, Feature]:
    return {name: feature.held() for name, feature in features.items()}


@torch.no_grad()
def _inner(mine: Mapping[str, Feature], theirs: Mapping[str, Feature], names: Sequence[str], blocks: _Blocks) -> Tensor:
    """The products of two blocks, added over the parameters of a group that both reach."""
    total: Tensor | None = None
    for name in names:
        if name in mine and name in theirs:
            part = mine[name].products(theirs[name])
            total = part if total is None else total.add_(part)
    if total is None:
        return torch.zeros(blocks.size, blocks.size, dtype=blocks.dtype)
    return total
