"""What the graph alone makes suspicious: a table of positions is shared, rows of the batch that mix are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clipwise.engine import per_sample_gradients
from clipwise.errors import NotSeparable

from .reference import flat, loop_gradients, norms_of, relative_errors

B, T, D = 4, 8, 3  # a table of T rows could be two rows of each sample
ODD = 7  # rows that cannot be the batch's
Context: TypeAlias = Callable[[Tensor, int], Tensor]  # a parameter and a number of rows -> D numbers, or rows of them


def table(rows: int, *shape: int) -> Tensor:
    return torch.sin(torch.arange(float(rows * torch.Size(shape).numel()), dtype=torch.float64)).view(rows, *shape)


def ids(rows: int) -> Tensor:
    return torch.arange(rows) * 3 % 5


def mean(rows: Tensor) -> Tensor:
    return rows.tanh().mean(0)


# Rows that met a parameter, then brought together: refused if they may be the batch's.
LOOKUPS: dict[str, tuple[tuple[int, ...], Context]] = {
    "embedding": ((5, D), lambda w, n: mean(F.embedding(ids(n), w))),
    "index": ((5, D), lambda w, n: mean(w[ids(n)])),
    "two indices": ((5, 5, D), lambda w, n: mean(w[ids(n), ids(n).flip(0)])),
    "index and number": ((5, 5, D), lambda w, n: mean(torch.ops.aten.index(w, [ids(n), torch.tensor(1)]))),
    "index of columns": ((D, 5), lambda w, n: mean(w[:, ids(n)].T)),
    "index apart": ((5, D, 5), lambda w, n: mean(w[ids(n), :, ids(n)])),
    "index apart, inside": ((D, 5, 2, 5), lambda w, n: mean(w[:, ids(n), :, ids(n)]).sum(1)),
    "index_select": ((5, D), lambda w, n: mean(w.index_select(0, ids(n)))),
    "index_select of columns": ((D, 5), lambda w, n: mean(w.index_select(-1, ids(n)).T)),
}
PRODUCTS: dict[str, tuple[tuple[int, ...], Context]] = {
    "rows": ((2, D), lambda w, n: mean(table(n, 2) @ w)),
    "columns": ((D, 2), lambda w, n: mean((w @ table(2, n)).T)),
    "rows as wide as the result": ((D, D), lambda w, n: mean(table(n, D).requires_grad_() @ w)),
    "added": ((2, D), lambda w, n: mean(torch.addmm(table(1, D)[0], table(n, 2), w))),
    "stacks": ((1, 2, D), lambda w, n: mean(torch.bmm(table(n, 1, 2), w.expand(n, 2, D)))[0]),
    "rows of stacks": ((3, 2, D), lambda w, n: mean(torch.bmm(table(3, n, 2), w).transpose(0, 1))[0]),
    "vector": ((2,), lambda w, n: mean(torch.mv(table(n, 2), w)).expand(D)),
    "images": ((D, 2, 2), lambda w, n: mean(F.conv1d(table(n, 2, 2), w)).squeeze(1)),
}
FOLLOWED: dict[str, Callable[[Tensor], Tensor]] = {
    "element by element": lambda rows: (2 * rows.tanh() + 1).sigmoid().mean(0),
    "turned": lambda rows: rows.T.unsqueeze(0).mean(2)[0],
    "normalized": lambda rows: F.layer_norm(rows, (D,)).sum(0),
    "rows of a product": lambda rows: (rows @ table(D, D)).amax(0),
    "columns of a product": lambda rows: table(1, T)[0] @ rows,
    "with itself": lambda rows: (rows @ rows.T)[0, :D],
    "along the rows": lambda rows: rows.cumsum(0)[-1],
    "a row of it": lambda rows: rows[1],
}


def losses_of(context: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(B, D, generator=generator, dtype=torch.float64) * context).sum(1).square()


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64))


def accepted(losses: Tensor, w: Tensor) -> bool:
    """Whether losses are not refused; then they must be exact."""
    loop = loop_gradients(losses, {"w": w})
    try:
        found = per_sample_gradients(losses, {"w": w})
    except NotSeparable:
        return False
    assert relative_errors(flat(found), flat(loop), norms_of(loop), torch.float64).max() <= 1e-10
    return True


@pytest.mark.parametrize("rows", [B, T, ODD])
@pytest.mark.parametrize("name", [*LOOKUPS, *PRODUCTS])
def test_rows_that_may_be_the_batch_are_not_brought_together(name: str, rows: int) -> None:
    shape, context = (LOOKUPS | PRODUCTS)[name]
    w = parameter(*shape)
    assert accepted(losses_of(context(w, rows)), w) is (rows == ODD)


@pytest.mark.parametrize("name", FOLLOWED)
def test_they_are_followed_to_where_they_come_together(name: str) -> None:
    w = parameter(2, D)
    assert not accepted(losses_of(FOLLOWED[name](table(T, 2) @ w)), w)


SHARED: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Tensor]]] = {
    "a matrix of positions": ((5, D), lambda w: mean(F.embedding(ids(T).view(2, T // 2), w)).sum(0)),
    "a matrix of indices": ((5, D), lambda w: mean(w[ids(T).view(T, 1)]).sum(0)),
    "a mask of rows": ((5, D), lambda w: mean(w[torch.tensor([True, True, False, True, True])])),
    "a number as an index": ((5, D), lambda w: w[torch.tensor(2)].tanh()),
    "a matrix times numbers": ((T, D), lambda w: torch.mv(w, table(1, D)[0]).tanh().sum().expand(D)),
    "a parameter that is turned": ((2 * B, D), lambda w: (table(2 * B, 2 * B) @ w).tanh().sum(0)),
    "a parameter that is turned by a leaf": (
        (2 * B, D),
        lambda w: (table(2 * B, 2 * B).requires_grad_() @ w).tanh().sum(0),
    ),
    "only numbers of it": ((2, D), lambda w: (table(ODD, 2) @ w).tanh().sum(0)),
}


@pytest.mark.parametrize("name", SHARED)
def test_a_table_that_cannot_be_the_batch_is_shared(name: str) -> None:
    shape, context = SHARED[name]
    w = parameter(*shape)
    assert accepted(losses_of(context(w)), w)


def test_a_parameter_that_is_turned_may_be_the_batch_where_a_side_is_as_long() -> None:
    w = parameter(B, B)
    assert not accepted(losses_of((table(B, B) @ w).tanh().sum(0)[:D]), w)


POSITIONS: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Tensor]]] = {
    "embedding": ((5, D), lambda w: F.embedding(ids(T), w)),
    "index": ((5, D), lambda w: w[ids(T)]),
    "index_select": ((5, D), lambda w: w.index_select(0, ids(T))),
    "product": ((2, D), lambda w: torch.addmm(table(1, D)[0], table(T, 2), w)),
    "two products": ((2, D), lambda w: (table(T, 2) @ w).tanh() @ table(D, D)),
}


@pytest.mark.parametrize("name", POSITIONS)
def test_rows_that_are_only_broadcast_over_the_samples_are_shared(name: str) -> None:
    """What meets the batch before it is brought together belongs to a sample."""
    shape, rows = POSITIONS[name]
    w, generator = parameter(*shape), torch.Generator().manual_seed(0)
    x = torch.randn(B, T, D, generator=generator, dtype=torch.float64)
    assert accepted((x + rows(w).tanh()).square().sum((1, 2)), w)


def test_inner_products_of_rows_are_refused_though_they_are_only_broadcast() -> None:
    """Attention between all rows: each is brought together with the others."""
    w = parameter(2, D)
    rows = table(T, 2) @ w
    x = torch.randn(B, T, T, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert not accepted((x + rows @ rows.T).square().sum((1, 2)), w)


def test_another_parameter_of_the_shape_of_the_result_says_nothing_of_a_product() -> None:
    """Wherever it stands on the graph: here it is the last leaf."""
    w, v = parameter(2, D), parameter(T, D)
    far = v
    for _ in range(12):
        far = far.unsqueeze(0).squeeze(0)
    x = torch.randn(B, T, D, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    losses = losses_of(mean(table(T, 2) @ w)) + (x * far).sum((1, 2))
    with pytest.raises(NotSeparable, match=r"samples mix after \w+ \(parameters w\)"):
        per_sample_gradients(losses, {"w": w, "v": v})


@pytest.mark.parametrize("size", [4, 6])
def test_two_towers_of_looked_up_rows_are_refused(size: int) -> None:
    """In-batch softmax, without a module: one item moved the sum of all the others."""
    users, items = parameter(9, D), parameter(9, D)
    scores = users[torch.randint(9, (size,))] @ items[torch.randint(9, (size,))].T
    losses = F.cross_entropy(scores, torch.arange(size), reduction="none")
    with pytest.raises(NotSeparable, match=r"samples mix after \w+ \(parameters items\)"):
        per_sample_gradients(losses, {"users": users, "items": items})
