"""Numbers and arrays that leave the tensors of a batch, and what is known of them when they come back."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from clipwise.engine import memory_of
from clipwise.private.evidence.records import Change, Records
from clipwise.private.evidence.traffic import BATCH, CARRIED, Traffic, _is_common, tensors_in
from clipwise.private.evidence.twin import Twin
from clipwise.private.evidence.watch import Watch

aten = torch.ops.aten
SIZE = 5
KEPT = torch.tensor([True, False, True, False, True])
CARRIED_NUMBER = 7.25


def batch() -> Tensor:
    return torch.arange(1.0, 16.0).reshape(SIZE, 3) / 7


def watched(x: Any, twins: int = 2, carried: float = CARRIED_NUMBER) -> Watch:
    """A pass over a batch, whose twins have other values in the second and fourth row: 5 and 9 times the first's."""
    changes = [Change.of(KEPT, 0, "", scale=scale) for scale in (5.0, 9.0)[:twins]]
    return Watch(Records.of(x, SIZE), [Twin(c) for c in changes], lambda *_: True, frozenset({carried}))


class During:
    """The modes are on inside."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def __enter__(self) -> Watch:
        self._watch.start()
        return self._watch

    def __exit__(self, *error: object) -> None:
        self._watch.stop()


def others(x: Tensor, what: Callable[[Tensor], Any]) -> list[Any]:
    """What the twins would have."""
    return [what(torch.where(KEPT[:, None], x, scale * x[0])) for scale in (5.0, 9.0)]


# Containers and common numbers


def test_tensors_are_found_in_containers_up_to_eight_deep() -> None:
    x = torch.ones(1)
    for wrap in (lambda v: [v], lambda v: (v,), lambda v: {"x": v}):
        value: Any = x
        for _ in range(8):
            value = wrap(value)
        assert [id(t) for t in tensors_in(value)] == [id(x)]
    assert [id(t) for t in tensors_in([{x}, "text", 3, {"a": x}])] == [id(x), id(x)]
    items: list[Any] = [x]
    items.append(items)
    mapping: dict[str, Any] = {"x": x}
    mapping["itself"] = mapping
    assert {id(t) for t in tensors_in((items, mapping))} == {id(x)}
    assert list(tensors_in([[x]], 1)) == [] and len(list(tensors_in([x], 1))) == 1


COMMON = (0, 1, -3, 4, -4, 4.0, 0.5, 0.125, -0.875, True)
UNCOMMON = (5, 4.5, 1.5, 1.125, 0.1, 0.3, -5, float("nan"), float("inf"), "1", None)


def test_numbers_that_programs_write_down_by_themselves() -> None:
    assert all(map(_is_common, COMMON)) and not any(map(_is_common, UNCOMMON))


# Numbers that leave


def test_a_number_that_would_be_another_is_remembered() -> None:
    x = batch()
    with During(watched(x)) as watch:
        total = x.sum().item()
        first = x[0, 0].item()
    assert total == float(x.sum()) and watch.traffic.values == {total: others(x, lambda t: float(t.sum()))}
    assert [len(twin.left) for twin in watch.twins] == [1, 1] and first == float(x[0, 0])


def test_a_broken_twin_is_not_asked_for_a_number() -> None:
    x = batch()
    watch = watched(x)
    watch.twins[0].broken = "it is"
    with During(watch):
        total = x.sum().item()
    assert watch.traffic.values == {total: [total, others(x, lambda t: float(t.sum()))[1]]}
    assert not watch.twins[0].left and len(watch.twins[1].left) == 1
    count, why = watch.twins[1].left[0]
    assert count == watch.count and why == "a number was taken out of a tensor of the batch"


@pytest.mark.parametrize("make", [lambda x: (x[1] > 1).any(), lambda x: (x[1] * 1j).sum()], ids=["bool", "complex"])
def test_truth_values_and_complex_numbers_are_not_expected_back(make: Callable[[Tensor], Tensor]) -> None:
    x = batch()
    with During(watched(x)) as watch:
        make(x).item()
        assert not watch.traffic.busy
    assert any(twin.left for twin in watch.twins)


def test_a_whole_number_is_expected_until_the_next_kernel() -> None:
    x = batch()
    with During(watched(x)) as watch:
        count = (x > 1.9).sum().item()
        assert watch.traffic.busy and not watch.traffic.values
        constant = torch.ones(3) * 2
        assert watch.traffic.busy, "a kernel on constants is no use of it"
        x + 1
        assert not watch.traffic.busy
    assert count == 2 and not watch.marks_of(constant)


def test_a_number_has_the_marks_of_its_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a custom function which reads it has them too."""
    x, noted = batch(), list[int]()
    watch = watched(x)
    monkeypatch.setattr(watch, "note_node", noted.append)
    for tensor in (x[1, 1], torch.tensor(3.0)):
        watch.traffic.scalar(aten._local_scalar_dense.default, (tensor,))
    assert noted == [BATCH, 0]


def test_a_constant_number_is_nobodys() -> None:
    x = batch()
    with During(watched(x)) as watch:
        torch.tensor([0.3]).sum().item()
    assert not watch.traffic.busy and not any(twin.left for twin in watch.twins)


LEAVING: dict[str, Callable[[Tensor], Any]] = {
    "tolist": Tensor.tolist,
    "numpy": Tensor.numpy,
    "__array__": np.asarray,
    "untyped_storage": Tensor.untyped_storage,
    "data_ptr": Tensor.data_ptr,
}


@pytest.mark.parametrize("how", LEAVING)
def test_arrays_that_would_be_others_leave(how: str) -> None:
    x = batch()
    with During(watched(x)) as watch:
        LEAVING[how](torch.ones(3) * 2)
        assert not any(twin.left for twin in watch.twins)
        y = x + 1
        LEAVING[how](y[::2])  # of the samples that stay
        assert how in ("untyped_storage", "data_ptr") or not any(twin.left for twin in watch.twins)
        LEAVING[how](y)
    for twin in watch.twins:
        count, why = twin.left[-1]
        assert 0 < count <= watch.count and why == f"values of the batch left the tensors by {how}"


def test_a_broken_twin_is_not_asked_for_an_array() -> None:
    x = batch()
    watch = watched(x)
    watch.twins[0].broken = "it is"
    with During(watch):
        x.tolist()
    assert not watch.twins[0].left and len(watch.twins[1].left) == 1


def test_memory_that_left_is_looked_at_again() -> None:
    x = batch()
    with During(watched(x)) as watch:
        values = x.numpy()
        kept = (torch.ones(3) * 2).numpy()
    assert not watch.traffic.written_outside()
    kept += 1
    assert not watch.traffic.written_outside(), "a constant is nobody's"
    values += 1
    assert watch.traffic.written_outside()
    with During(watched(x)) as watch:
        copies = [(x * k).numpy() for k in (1, 2)]
    copies[0] += 1
    assert watch.traffic.written_outside(), "one of them is enough"


def test_what_torch_wrote_after_it_left_was_not_written_outside() -> None:
    x = batch()
    with During(watched(x)) as watch:
        y = x * 2
        y.numpy()
        x.tolist()  # a copy, which nobody can write into
        y.add_(1)
    x += 1
    assert not watch.traffic.written_outside()


# Copies and lists of tensors


def test_a_copy_has_the_twins_of_the_tensor() -> None:
    x = batch()
    watch = watched(x)
    watch.twins[0].broken = "it is"
    with torch._C.DisableTorchFunction():
        out = watch.traffic.call(Tensor.__deepcopy__, (x, {}), {})
        table = watch.traffic.call(Tensor.__deepcopy__, (torch.ones(3), {}), {})
    assert watch.marks_of(out) == BATCH and not watch.marks_of(table)
    assert memory_of(out) not in watch.twins[0]
    assert torch.equal(watch.twins[1].of(out), others(x, lambda t: t)[1])


def test_a_list_of_tensors_becomes_a_tensor_of_the_batch() -> None:
    x = batch()
    with During(watched(x)) as watch:
        means = torch.tensor(list(x.mean(0)))
        constants = torch.tensor([torch.tensor(1.5), torch.tensor(2.5)])
    assert watch.marks_of(means) == BATCH and not watch.marks_of(constants)
    assert not any(memory_of(constants) in twin for twin in watch.twins)
    for twin, expected in zip(watch.twins, others(x, lambda t: t.mean(0)), strict=True):
        assert torch.allclose(twin.of(means), expected) and not twin.broken


def test_a_list_that_other_records_do_not_fit_ends_the_twin() -> None:
    x = batch()
    for before in ("", "it was before"):
        with During(watched(x)) as watch:
            large = (x.sum() * 12).long()  # 205, which would be 226 and 308
            watch.twins[1].broken = before
            found = torch.tensor([large], dtype=torch.uint8)
        assert found.tolist() == [205] and watch.twins[0].of(found).tolist() == [226] and not watch.twins[0].broken
        assert watch.twins[1].broken == (before or "tensor does not take the other records (RuntimeError)")


# Numbers that come back


def marks(watch: Watch, func: Any, *args: Any, found: int = BATCH, **kwargs: Any) -> int:
    return watch.traffic.marks(func, args, kwargs, found)


def test_numbers_that_left_are_known_again() -> None:
    x = batch()
    with During(watched(x)) as watch:
        total = x.sum().item()
    w = torch.ones(3)
    assert marks(watch, aten.mul.Tensor, w, total, found=0) == BATCH
    assert marks(watch, aten.add.Tensor, w, w, alpha=total, found=0) == BATCH
    assert marks(watch, aten.mul.Tensor, w, total + 1, found=0) == 0
    assert marks(watch, aten.mul.Tensor, w, CARRIED_NUMBER, found=0) == CARRIED
    assert marks(watch, aten.addcmul.default, w, w, w, value=CARRIED_NUMBER, found=0) == CARRIED
    assert marks(watch, aten.arange.start, total, CARRIED_NUMBER, found=0) == 0, "these are sizes"
    assert marks(watch, aten.select.int, w, 0, int(total), found=0) == 0, "and this a place"
    assert marks(watch, aten.mul.Tensor, w, True, found=0) == 0


def test_a_common_number_explains_nothing() -> None:
    x = batch()
    with During(watched(x, carried=0.5)) as watch:
        watch.traffic.values[0.5] = [0.25, 0.75]
    assert marks(watch, aten.mul.Tensor, torch.ones(3), 0.5, found=0) == 0


def test_numbers_that_kernels_of_the_batch_computed_with_are_kept_in_their_order() -> None:
    x = batch()
    watch = watched(x)
    traffic = watch.traffic
    marks(watch, aten.mul.Tensor, x, 3)
    marks(watch, aten.add.Tensor, x, x.long(), alpha=0.3)
    marks(watch, aten.mul.Tensor, x, 3, found=0)  # not of the batch
    marks(watch, aten.mul.Tensor, x.long(), 3)  # numbers of rows
    marks(watch, aten.sum.dim_IntList, x, [0])  # not element by element
    marks(watch, aten.mul.Tensor, x, True)
    marks(watch, aten.div.Tensor, x, 0.25)
    assert traffic.numbers == {
        (0, "mul.Tensor", "other"): 3.0, (1, "add.Tensor", "alpha"): 0.3, (2, "div.Tensor", "other"): 0.25,
    }  # fmt: skip
    assert not traffic.size_used


READS: dict[str, tuple[Callable[[Tensor], Any], bool]] = {
    "len": (len, True),
    "shape": (lambda x: x.shape, True),
    "size": (lambda x: x.size(0), True),
    "numel": (lambda x: x[:, 0].numel(), True),
    "of a constant": (lambda x: torch.ones(SIZE).shape, False),
    "of other rows": (lambda x: x[1:].shape, False),
    "of a number": (lambda x: x.sum().shape, False),
    "dtype": (lambda x: x.dtype, False),
}


@pytest.mark.parametrize(("read", "is_size"), READS.values(), ids=READS)
def test_the_number_of_samples_is_noticed_just_after_it_was_read(read: Callable[[Tensor], Any], is_size: bool) -> None:
    for func, name in ((aten.mul.Tensor, "mul.Tensor"), (aten.div_.Tensor, "div_.Tensor")):
        x = batch()
        with During(watched(x)) as watch:
            marks(watch, func, x, SIZE)
            assert not watch.traffic.size_used
            read(x)
            marks(watch, func, x, SIZE + 1)
            marks(watch, aten.add.Tensor, x, SIZE)
            assert not watch.traffic.size_used
            marks(watch, func, x, SIZE)
            assert watch.traffic.size_used == ({name} if is_size else set())
            watch.traffic.settle()
            watch.traffic.size_used.clear()
            marks(watch, func, x, SIZE)
            assert not watch.traffic.size_used, "a kernel has run meanwhile"


def test_constants_that_are_one_number_are_kept() -> None:
    watch = watched(batch())
    watch.traffic.note_constants(
        [torch.tensor(0.3), torch.full((2, 2), 0.7), torch.tensor([1.0, 2.0]), torch.tensor([1.0, 1.0, 2.0]),
         torch.zeros(0), torch.tensor([1j]), torch.ones(2).to_sparse(), torch.tensor([4])]
    )  # fmt: skip
    kept = {place: round(value, 6) for (_, kind, place), value in watch.traffic.numbers.items()}
    assert kept == {"0": 0.3, "1": 0.7, "7": 4.0}
    assert {kind for _, kind, _ in watch.traffic.numbers} == {"a constant tensor"}
    assert [number for number, _, _ in watch.traffic.numbers] == [0, 1, 2]


# What a twin computes with


def test_a_twin_computes_with_its_own_numbers() -> None:
    x = batch()
    with During(watched(x)) as watch:
        total = x.sum().item()
        scaled, shifted = x * total, x + torch.tensor(total)
    for twin, number in zip(watch.twins, others(x, lambda t: float(t.sum())), strict=True):
        assert torch.allclose(twin.of(scaled), twin.of(x) * number)
        assert torch.allclose(twin.of(shifted), twin.of(x) + number)


def other_numbers(
    watch: Watch, func: Any, *args: Any, place: int = 0, **kwargs: Any
) -> tuple[list[Any], dict[str, Any]]:
    positional, named = watch.traffic.other_numbers(func, args, kwargs, place)
    return positional, named


def test_whole_numbers_are_others_in_the_next_kernel_alone() -> None:
    x = batch()
    watch = watched(x)
    traffic = watch.traffic
    traffic._just_left.append((7, [8, 9]))
    traffic._just_left.append((2, [3, 4]))
    traffic.values[0.3] = [0.4, 0.5]
    assert other_numbers(watch, aten.mul.Tensor, x, 7) == ([x, 8], {})
    assert other_numbers(watch, aten.mul.Tensor, x, 7, place=1) == ([x, 9], {})
    assert other_numbers(watch, aten.mul.Tensor, x, -7) == ([x, -8], {})
    assert other_numbers(watch, aten.mul.Tensor, x, 0.3, place=1) == ([x, 0.5], {})
    assert other_numbers(watch, aten.mul.Tensor, x, 2) == ([x, 2], {}), "a common number"
    assert other_numbers(watch, aten.mul.Tensor, x, 6) == ([x, 6], {})
    assert other_numbers(watch, aten.add.Tensor, x, x, alpha=7) == ([x, x], {"alpha": 8})
    assert other_numbers(watch, aten.roll.default, x, [7, -2], [7]) == ([x, [8, -3], [7]], {}), "shifts, and axes"
    assert other_numbers(watch, aten.view.default, x, [7, 2]) == ([x, [8, 2]], {})
    assert other_numbers(watch, aten.select.int, x, 7, 7) == ([x, 7, 8], {}), "an axis, and a place"
    assert other_numbers(watch, aten.sum.dim_IntList, x, [7], True) == ([x, [7], True], {})


# Tensors made of plain values


def imported(watch: Watch, value: Any) -> Tensor:
    with During(watch):
        return torch.tensor(value)


def test_a_tensor_of_plain_values_is_a_constant_unless_values_left() -> None:
    x = batch()
    watch = watched(x)
    table = imported(watch, [0.3] * SIZE)
    assert not watch.marks_of(table) and memory_of(table) in watch.drawn and not watch.traffic.imported_any
    number = imported(watch, 0.3)
    assert not watch.marks_of(number) and memory_of(number) not in watch.drawn
    with During(watch):
        values = x.sum(1).tolist()
        rows, other = torch.tensor([v * 2 for v in values]), torch.tensor([0.3, 0.4])
    assert watch.marks_of(rows) == BATCH and not watch.marks_of(other) and watch.traffic.imported_any
    for twin in watch.twins:
        assert twin.broken == "a tensor was made from values of the batch that are not tensors"


def test_what_is_known_already_was_not_made_of_plain_values(monkeypatch: pytest.MonkeyPatch) -> None:
    x, noted = batch(), list[int]()
    watch = watched(x)
    monkeypatch.setattr(watch, "note_node", noted.append)
    for known in (x, torch.tensor(CARRIED_NUMBER, dtype=torch.float64), torch.tensor([0.3])):
        out = watch.traffic.imported(aten.lift_fresh.default, (known,), {})
        assert torch.equal(out, known)
    assert noted == [BATCH, CARRIED, 0] and len(watch.traffic.imports) == 1
    assert memory_of(x) not in watch.drawn and torch.equal(watch.twins[0].of(x), others(x, lambda t: t)[0])


def test_a_number_that_left_is_known_as_a_tensor_and_in_one() -> None:
    x = batch()
    with During(watched(x)) as watch:
        total = x.sum().item()
        number, pair, loose = torch.tensor(total), torch.tensor([0.3, total]), torch.tensor(total + 1)
    assert watch.marks_of(number) == watch.marks_of(pair) == BATCH and not watch.marks_of(loose)
    assert watch.traffic.imported_any, "of the pair"
    for twin in watch.twins:
        assert twin.broken == "a tensor was made from values of the batch that are not tensors"


def test_a_number_alone_is_followed() -> None:
    x = batch()
    with During(watched(x)) as watch:
        number = torch.tensor(x.sum().item(), dtype=torch.float64)
        carried = torch.tensor(CARRIED_NUMBER, dtype=torch.float64)
    assert watch.marks_of(carried) == CARRIED and not watch.traffic.imported_any
    for twin, expected in zip(watch.twins, others(x, lambda t: float(t.sum())), strict=True):
        assert float(twin.of(number)) == expected and not twin.broken


def test_values_of_a_batch_that_is_not_all_tensors_are_the_batchs() -> None:
    x = batch()
    watch = watched((x, "text"))
    rows, other = imported(watch, [[0.3], [0.4], [0.5], [0.6], [0.7]]), None
    assert watch.marks_of(rows) == BATCH and watch.traffic.imported_any
    for twin in watch.twins:
        assert not twin.broken and torch.allclose(twin.of(rows)[1], twin.change.scale * rows[0])
    other = imported(watch, [0.3, 0.4])
    assert watch.marks_of(other) == BATCH and all(twin.broken for twin in watch.twins)


def test_tensors_of_plain_values_are_compared_from_pass_to_pass() -> None:
    def imports(*values: Any) -> list[int]:
        watch = watched(batch())
        for value in values:
            imported(watch, value)
        return watch.traffic.imports

    assert imports([0.3], [[1]]) == imports([0.3], [[1]]) and len(imports([0.3], [[1]], 2.0)) == 2
    assert imports([0.3]) != imports([0.4]) and imports([1.0]) != imports([1]) and imports([[1]]) != imports([1])


def test_a_shape_that_follows_the_records_ends_the_twin_when_it_is_read() -> None:
    reads: list[Callable[[Tensor], Any]] = [
        lambda y: y.shape,
        len,
        lambda y: torch.ones(4).view_as(y),
        lambda y: torch.ones(4).view_as(other=y),
    ]
    for read in reads:
        x = batch()
        with During(watched(x)) as watch:
            watch.twins[1].broken = "it was before"
            y = x[x > 1][:4]
            x.shape  # noqa: B018  # this one follows nobody
            assert not watch.twins[0].broken
            torch.ones(4).view_as(torch.ones(2, 2))
            assert not watch.twins[0].broken
            read(y)
        assert watch.twins[0].broken == "a shape that follows the records is read"
        assert watch.twins[1].broken == "it was before"


def test_a_deep_copy_is_a_copy() -> None:
    x = batch()
    with During(watched(x)) as watch:
        out = copy.deepcopy(x)
    assert torch.equal(out, x) and watch.marks_of(out) == BATCH


def test_calls_are_counted_while_they_are_under_way() -> None:
    traffic = Traffic(watched(batch()), frozenset())
    depths: list[int] = []

    def call() -> None:
        depths.append(traffic.depth)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        traffic.call(lambda: traffic.call(call, (), {}), (), {})
    assert depths == [2] and traffic.depth == 0


@pytest.mark.filterwarnings("default:Using a target size")
def test_what_torch_warns_of_is_said_of_the_line_that_called_it() -> None:
    x = batch()
    with pytest.warns(UserWarning, match="Using a target size") as caught, During(watched(x)):
        torch.nn.functional.mse_loss(x, x[:, :1], reduction="none")
    assert [Path(each.filename).name for each in caught] == ["test_traffic.py"]
