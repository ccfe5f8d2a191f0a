"""Constants with other values for every sample of a batch, by hand-made tensors and twins."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import clipwise as cw
from clipwise.private.evidence.places import factors_of, is_row_by_row, meets_places, operands_of, refuse_places
from clipwise.private.evidence.records import Change
from clipwise.private.evidence.twin import Twin

aten = torch.ops.aten
SIZE = 4
KEPT = torch.tensor([True, False, True, False])
EQUAL = torch.ones(SIZE, 3)
PLACES = torch.arange(float(SIZE))[:, None] * torch.ones(3)


def batch(*shape: int) -> Tensor:
    return 1 + torch.arange(float(torch.Size(shape).numel())).reshape(shape)


def twin_of(x: Tensor, other: Tensor, **options: Any) -> Twin:
    twin = Twin(Change.of(KEPT, 0, "", **options))
    twin.enter(x, other)
    return twin


def moved(x: Tensor, *rows: int) -> Tensor:
    other = x.clone()
    other[list(rows)] += 5
    return other


def test_kernels_that_meet_row_by_row() -> None:
    for kernel, name in (
        (aten.add.Tensor, "add"),
        (aten.where.self, "where"),
        (aten.cat.default, "cat"),
        (aten.mm.default, "mm"),
    ):
        assert is_row_by_row(kernel, name)
    for kernel, name in ((aten.sum.default, "sum"), (aten.convolution.default, "convolution")):
        assert not is_row_by_row(kernel, name)


def test_what_is_overwritten_is_not_read() -> None:
    a, b = batch(4, 3), batch(4, 3)
    operands, read = operands_of("copy_", (a, b))
    assert [id(t) for t in operands if t is not operands[1]] == [id(a), id(b)] and [id(t) for t in read] == [id(b)]
    assert [id(t) for t in operands_of("add", (a, b))[1]] == [id(a), id(b)]


@pytest.mark.parametrize(
    ("shape", "dim", "beside"),
    [((4, 3), None, False), ((4, 3), 0, False), ((4, 3), -2, False), ((4, 3), 1, True), ((4, 3), -1, True),
     ((4,), -1, False), ((4, 3, 2), -2, True), ((4, 3, 2), -3, False), ((4, 3, 2), 2, True)],
)  # fmt: skip
def test_tensors_that_are_put_one_below_the_other_do_not_meet(
    shape: tuple[int, ...], dim: int | None, beside: bool
) -> None:
    parts = [batch(*shape), batch(*shape)]
    args = (parts,) if dim is None else (parts, dim)
    for found in operands_of("cat", args):
        assert [id(t) for t in found] == ([id(t) for t in parts] if beside else [])
    assert len(operands_of("cat", (parts[:1], 1))[0]) == 1


def test_a_copy_into_some_columns_meets_the_whole_rows() -> None:
    for z in (batch(4, 6), batch(5, 6)[1:]):
        for columns, column in ((z[:, 3:], batch(4, 3)), (z[:, 5], batch(4)), (z[:, :1], batch(4, 1))):
            (_, whole, beside), read = operands_of("copy_", (columns, column))
            assert torch.equal(whole, z) and read[0] is beside and beside.dim() == 2
    deep = batch(4, 2, 3)
    assert operands_of("copy_", (deep[:, 1:], batch(4, 1, 3)))[0][1].shape == (4, 1, 6)
    for into in (batch(6, 4).t()[:, 1:], batch(4, 1).expand(4, 3), torch.tensor(1.0), batch(4, 6)[:, 3:].T):
        assert len(operands_of("copy_", (into, into.clone()))[0]) in (2, 3), "whatever its memory looks like"
    assert len(operands_of("copy_", (batch(4, 3), batch(3)))[0]) == 2, "broadcast to all"


def test_rows_meet_in_a_product_with_a_diagonal_matrix_alone() -> None:
    x, table = batch(4, 3), torch.diag(batch(4))
    for args in ((table, x), (x.t(), table)):
        found, read = operands_of("mm", args)
        assert found == read and torch.equal(found[0], table) and torch.equal(found[1], x)
    assert torch.equal(operands_of("mv", (table, batch(4)))[0][1], batch(4)[:, None])
    assert torch.equal(operands_of("addmm", (x, table, x))[0][1], x)
    for other in (torch.eye(4), batch(4, 4), torch.ones(4, 4), torch.zeros(4, 4), batch(2, 4)):
        assert operands_of("mm", (other, x)) == ([], [])
    for features in (4, 8):
        assert operands_of("mm", (table, batch(4, features))) == ([], []), "as many features as samples, or steps"
    assert len(operands_of("bmm", (batch(4, 3, 2), batch(4, 2, 1)))[0]) == 2
    assert operands_of("bmm", (batch(4, 4, 2), batch(4, 2, 1))) == ([], []), "as many experts as samples"


def test_factors_are_the_operands_of_products_and_the_weights_of_classes() -> None:
    a, b, c = batch(4, 3), batch(3, 2), batch(4, 2)
    assert [id(t) for t in factors_of("mm", (a, b))] == [id(a), id(b)]
    assert [id(t) for t in factors_of("addmm", (c, a, b))] == [id(a), id(b)]
    assert factors_of("nll_loss_forward", (a, c, b, 0, -100))[0] is b
    assert factors_of("nll_loss_forward", (a, c, None, 0, -100)) == [] == factors_of("add", (a, a))


def test_a_class_is_beside_its_row_of_scores() -> None:
    scores, classes = batch(4, 3), torch.tensor([0, 1, 2, 0])
    for found in operands_of("nll_loss_forward", (scores, classes, torch.ones(3), 0, -100)):
        assert found[0] is scores and torch.equal(found[1], classes[:, None]) and len(found) == 2
    assert operands_of("nll_loss_forward", (scores[0], classes[0], None, 0, -100)) == ([], [])


def test_rows_meet_a_constant_that_differs_from_row_to_row() -> None:
    x = batch(SIZE, 3)
    twins = [twin_of(x, moved(x, 1, 3))]
    assert meets_places([x], [PLACES], twins, SIZE)
    assert meets_places([x], [EQUAL, PLACES], twins, SIZE)
    assert not meets_places([x], [EQUAL], twins, SIZE)
    assert not meets_places([x], [], twins, SIZE) and not meets_places([], [], twins, SIZE)
    last = EQUAL.clone()
    last[-1] += 1
    assert meets_places([x], [last], twins, SIZE), "one row that differs is enough"


def test_only_the_first_of_the_axes_is_that_of_the_samples() -> None:
    square = batch(SIZE, SIZE)
    twins = [twin_of(square, moved(square, 1, 3))]
    assert not meets_places([square], [torch.arange(float(SIZE))], twins, SIZE), "a number for every feature"
    assert meets_places([square], [torch.arange(float(SIZE))[:, None]], twins, SIZE)
    vector = batch(SIZE)
    assert not meets_places([vector], [batch(3, SIZE)], [twin_of(vector, moved(vector, 1, 3))], SIZE)
    assert not meets_places(
        [vector, square], [torch.arange(float(SIZE))], [*twins, twin_of(vector, moved(vector, 1, 3))], SIZE
    )
    assert meets_places([vector], [torch.arange(float(SIZE))], [twin_of(vector, moved(vector, 1, 3))], SIZE)
    assert not meets_places([torch.tensor(2.0)], [torch.tensor(1.0)], twins, SIZE), "numbers have no rows"


def test_values_without_a_row_for_each_sample_do_not_count() -> None:
    x = batch(SIZE - 1, 3)
    assert not meets_places([x], [PLACES[:-1]], [twin_of(x, x + 1)], SIZE)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_and_sparse_constants_have_no_rows() -> None:
    x = batch(SIZE, 3)
    for fixed in (torch.nested.nested_tensor(list(PLACES)), PLACES.to_sparse()):
        assert not meets_places([x], [fixed], [twin_of(x, moved(x, 1, 3))], SIZE)


ROWS: dict[str, tuple[tuple[int, ...], bool]] = {
    "of the others alone": ((1, 3), True),
    "of one of the others": ((3,), True),
    "of nobody": ((), False),
    "of one that stayed": ((0,), False),
    "of everybody": ((0, 1, 2, 3), False),
}


@pytest.mark.parametrize(("rows", "are_samples"), ROWS.values(), ids=ROWS)
def test_rows_are_those_of_the_samples_when_other_records_move_their_own(
    rows: tuple[int, ...], are_samples: bool
) -> None:
    x = batch(SIZE, 3)
    assert meets_places([x], [PLACES], [twin_of(x, moved(x, *rows))], SIZE) == are_samples


def test_a_twin_that_cannot_tell_is_not_asked() -> None:
    x = batch(SIZE, 3)
    able, broken = twin_of(x, moved(x, 1, 3)), twin_of(x, moved(x, 1, 3))
    broken.broken = "it is"
    assert not meets_places([x], [PLACES], [broken], SIZE)
    assert meets_places([x], [PLACES], [broken, able], SIZE)
    longer = Twin(Change.of(KEPT, 0, ""))
    longer.pair_odd(x, batch(SIZE + 1, 3))
    assert not meets_places([x], [PLACES], [longer], SIZE)
    # One changed sample may move one row of another axis by chance; half of them hardly move just their own.
    assert not meets_places([x], [PLACES], [twin_of(x, moved(x, 1, 3), losses_only=True)], SIZE)


def test_a_place_that_reaches_the_losses_is_refused_with_its_line() -> None:
    refuse_places([0, 1, 2, 3, 8], 4, "")
    for marks in ([0, 4, 1], [5]):
        with pytest.raises(cw.NotSeparable, match=r"place of a sample in its batch \(loop.py:7\): a constant"):
            refuse_places(marks, 4, "loop.py:7")
    with pytest.raises(cw.NotSeparable, match="place of a sample in its batch: a constant"):
        refuse_places([4], 4, "")
