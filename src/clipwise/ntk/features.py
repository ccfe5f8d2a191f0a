"""What a block of samples contributes to the kernel of one parameter, and the inner products of two blocks.

A *feature* stands for the rows df_ik/dp of the Jacobian for one parameter p, b samples and K outputs, samples
first. It answers <row, row'> for all pairs of rows of two blocks; only `Rows` has formed the rows themselves. Where
a matrix meets a sample once, the row is an outer product and <l r^T, l' r'^T> = <l, l'><r, r'>. Where it meets it
at several positions the rows are formed when they are asked for, one parameter at a time, since products of rows
are then far cheaper than sums over pairs of positions.

Shape suffixes: b samples, K outputs, T positions, m and n the two sides of a matrix, N = bK rows.

Two routes lead to the features of a block of samples. The Gram route reads them from the autograd graph, by the engine:
one backward pass per output, which stops where parameters meet the batch; the forward pass and its activations are
shared by all outputs, and the Jacobian as a whole is never formed. The Jacobian route forms every row df_ik/dw, by
`torch.func`.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from clipwise.engine import Backward, Engine, Gathered, NothingFinite, Outer, Parameters, Use
from clipwise.errors import DataError, NotSeparable
from clipwise.ntk.network import Inputs, call, flat_outputs, map_inputs, trainable


class Feature(ABC):
    """Rows of the Jacobian for one parameter, in whatever form."""

    @abstractmethod
    def products(self, other: Feature) -> Tensor:
        """Inner products of all rows with all rows of a feature of the same parameter and form, (N, N')."""

    @property
    @abstractmethod
    def elements_as_rows(self) -> int:
        """Numbers to hold when the rows are formed for good; what is already held when they need not be."""

    @abstractmethod
    def held(self) -> Feature:
        """The form to hold when memory allows it: nothing is formed again at every product."""


class Rows(Feature):
    """The rows themselves, (N, p)."""

    def __init__(self, rows_Np: Tensor) -> None:
        self.rows = rows_Np

    def products(self, other: Feature) -> Tensor:
        assert isinstance(other, Rows)
        return self.rows @ other.rows.T

    @property
    def elements_as_rows(self) -> int:
        return self.rows.numel()

    def held(self) -> Feature:
        return self


class Products(Feature):
    """Outer products l r^T of vectors; `right` is (b, n) when all outputs of a sample share it, else (N, n)."""

    def __init__(self, left_Nm: Tensor, right: Tensor) -> None:
        self.left, self.right = left_Nm, right

    def products(self, other: Feature) -> Tensor:
        assert isinstance(other, Products)
        result = self.left @ other.left.T
        inner = self.right @ other.right.T
        outputs, others = len(self.left) // len(self.right), len(other.left) // len(other.right)
        blocks = result.view(len(self.right), outputs, len(other.right), others)
        blocks *= inner[:, None, :, None]
        return result

    @property
    def elements_as_rows(self) -> int:
        return self.left.numel() + self.right.numel()

    def held(self) -> Feature:
        return self


class Formed(Feature):
    """Uses that form their gradients, one per output: convolutions, matrices that meet a sample several times."""

    def __init__(self, uses: Sequence[Use | None], batch_size: int) -> None:
        self.uses, self.batch_size = list(uses), batch_size

    def _rows(self) -> Rows:
        first = next(use for use in self.uses if use is not None)
        formed = [None if use is None else use.gradients().reshape(self.batch_size, -1) for use in self.uses]
        like = next(part for part in formed if part is not None)
        rows = like.new_zeros(self.batch_size, len(self.uses), prod(first.shape))
        for k, part in enumerate(formed):
            if part is not None:
                rows[:, k] = part
        return Rows(rows.flatten(0, 1))

    def products(self, other: Feature) -> Tensor:
        assert isinstance(other, Formed)
        mine = self._rows()
        return mine.products(mine if other is self else other._rows())

    @property
    def elements_as_rows(self) -> int:
        shape = next(use.shape for use in self.uses if use is not None)
        return self.batch_size * len(self.uses) * prod(shape)

    def held(self) -> Feature:
        return self._rows()


class Picked(Feature):
    """Entries of a table picked by `index` (b, T), as in an embedding: `values` (b, K, T, n). Negative: nothing."""

    def __init__(self, index_bT: Tensor, values_bKTn: Tensor) -> None:
        self.index, self.values = index_bT, values_bKTn

    def products(self, other: Feature) -> Tensor:
        """Only entries of the table that both blocks pick count, so rows are formed over those alone."""
        assert isinstance(other, Picked)
        mine, theirs = self.index.unique(), other.index.unique()
        common = mine[torch.isin(mine, theirs) & (mine >= 0)]
        left = self._over(common)
        return left @ (left if other is self else other._over(common)).T

    def _over(self, picked: Tensor) -> Tensor:
        b, K, T, n = self.values.shape
        place = torch.searchsorted(picked, self.index.contiguous()).clamp(max=max(len(picked) - 1, 0))
        if not len(picked):
            return self.values.new_zeros(b * K, 0)
        kept = picked[place] == self.index
        rows = self.values.new_zeros(b, K, len(picked), n)
        values = torch.where(kept[:, None, :, None], self.values, 0)
        rows.scatter_add_(2, place[:, None, :, None].expand(b, K, T, n), values)
        return rows.reshape(b * K, -1)

    @property
    def elements_as_rows(self) -> int:
        return self.values.numel()

    def held(self) -> Feature:
        return self


def from_uses(uses: Sequence[Use | None], batch_size: int) -> Feature:
    """The feature of one parameter from its uses by the K outputs; None where an output does not reach it."""
    known = [use for use in uses if use is not None]
    if all(isinstance(use, Outer) and use.left.dim() == 2 for use in known):
        return _products(uses)
    if all(isinstance(use, Gathered) for use in known):
        tables = [use for use in known if isinstance(use, Gathered)]
        if all(torch.equal(use.index, tables[0].index) for use in tables):
            return Picked(tables[0].index, stacked([_right(use) for use in uses]))
    return Formed(uses, batch_size)


def _right(use: Use | None) -> Tensor | None:
    return use.right if isinstance(use, (Gathered, Outer)) else None


def _left(use: Use | None) -> Tensor | None:
    return use.left if isinstance(use, Outer) else None


def _products(uses: Sequence[Use | None]) -> Feature:
    rights = [_right(use) for use in uses]
    known = [right for right in rights if right is not None]
    shared = all(_same(right, known[0]) for right in known)
    left = stacked([_left(use) for use in uses]).flatten(0, 1)
    return Products(left, known[0] if shared else stacked(rights).flatten(0, 1))


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are one and the same in memory, as an activation is that several outputs depend on."""
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride()


def stacked(parts: Sequence[Tensor | None]) -> Tensor:
    """(b, K, ...) from one tensor per output; zero where an output has none."""
    like = next(part for part in parts if part is not None)
    return torch.stack([torch.zeros_like(like) if part is None else part for part in parts], 1)


_ENGINE = Engine()


def gram_features(model: nn.Module, x: Inputs) -> tuple[dict[str, Feature], int]:
    """The features of every parameter that is reached, for two samples or more, and the number of outputs."""
    weights = trainable(model)
    parameters = Parameters(weights)
    outputs = flat_outputs(model, x)
    if outputs.grad_fn is None:
        raise DataError("the outputs do not depend on the trainable parameters.")
    columns = outputs.unbind(1)
    with torch.no_grad():
        passes = [_one_pass(column, parameters) for column in columns]
    found = {}
    for place, name in enumerate(weights):
        parts = [each.get(place) for each in passes]
        if any(part is not None for part in parts):
            found[name] = _feature(parts, outputs.shape[0])
    return found, len(columns)


def _one_pass(output_b: Tensor, parameters: Parameters) -> dict[int, Use | Tensor]:
    """For each parameter that an output reaches its use, or its per-sample gradients (b, p) if it has no single one."""
    try:
        backward = _ENGINE.backward(output_b, parameters, keep=True)
    except NothingFinite:
        raise DataError("an output is not finite for any sample, so it has no tangent kernel.") from None
    found: dict[int, Use | Tensor] = {}
    others = []
    for place in backward.plan.roots:
        use = _single_use(backward, place)
        if use is None:
            others.append(place)
        else:
            found[place] = use
    if others:
        gradients = backward.gradients()
        found.update((place, gradients[place].flatten(1)) for place in others if place in gradients)
    return found


def _single_use(backward: Backward, place: int) -> Use | None:
    """The use of a parameter that is met once, as a whole; transposed or not is the same for all outputs of a graph."""
    plan = backward.plan
    edge = plan.roots[place][0]
    chain = plan.chains.get(edge)
    if edge not in plan.solo or chain is None or not chain.direct:
        return None
    uses = backward.uses.get(edge, [])
    return uses[0] if uses else None


def _feature(parts: Sequence[Use | Tensor | None], batch_size: int) -> Feature:
    uses = [part for part in parts if not isinstance(part, Tensor)]
    if len(uses) == len(parts):
        return from_uses(uses, batch_size)
    formed = [part.gradients().reshape(batch_size, -1) if isinstance(part, Use) else part for part in parts]
    return Rows(stacked(formed).flatten(0, 1))


def jacobian(model: nn.Module, x: Inputs) -> dict[str, Tensor]:
    """df_ik/dp for every parameter p, {name: (b, K, *p.shape)}.

    Samples are run one at a time (in one batch by `vmap`); a model whose outputs then differ is refused.
    """
    weights = {name: p.detach() for name, p in trainable(model).items()}

    def single(values: dict[str, Tensor], sample: Any) -> tuple[Tensor, Tensor]:
        batch_of_one = map_inputs(sample, lambda part: part.unsqueeze(0))
        outputs = call(lambda *a, **k: functional_call(model, values, a, k), batch_of_one).reshape(-1)
        return outputs, outputs

    with sdpa_kernel(SDPBackend.MATH), warnings.catch_warnings():  # vmap cannot batch the fused attention kernels
        warnings.filterwarnings("ignore", "There is a performance drop")  # and tells where it falls back to a loop
        rows, alone = vmap(jacrev(single, has_aux=True), in_dims=(None, 0))(weights, x)
    together = flat_outputs(model, x).detach()
    tolerance = 1e4 * torch.finfo(together.dtype).eps * (1 + float(together.abs().max()))
    if float((alone - together).abs().max()) > tolerance:
        raise NotSeparable(
            "a sample's output changes with the other samples of the batch, so there is no kernel of samples. Typical "
            "cause: a statistic over the batch."
        )
    return dict(rows)


def jacobian_features(model: nn.Module, x: Inputs) -> tuple[dict[str, Feature], int]:
    """The same, as features, and the number of outputs."""
    rows = jacobian(model, x)
    K = next(iter(rows.values())).shape[1]
    return {name: Rows(part.flatten(2).flatten(0, 1)) for name, part in rows.items()}, K
