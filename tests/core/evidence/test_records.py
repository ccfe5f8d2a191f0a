"""The records of a batch, and the other ones that are put in their place."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from clipwise.private.evidence.records import Change, Records, magnitude, same, same_rows, scaled, some, unreadable

Pair = namedtuple("Pair", ("x", "y"))
ALTERNATING = torch.tensor([[1.0, -1.0], [-1.0, 1.0]]).repeat(2, 1)  # rows of the same size that differ


class OneSlot:
    __slots__ = "x"


class Slots:
    __slots__ = ("__dict__", "__weakref__", "unset", "x")


def tensors_of(batch: Any) -> list[int]:
    return [id(tensor) for tensor in Records.of(batch, 4).tensors]


# What a batch is made of


def test_tensors_are_found_in_slots_and_attributes() -> None:
    one, many = OneSlot(), Slots()
    one.x = many.x = torch.ones(4)  # type: ignore[attr-defined]
    many.y = torch.zeros(4)  # type: ignore[attr-defined]
    assert tensors_of(one) == [id(one.x)]  # type: ignore[attr-defined]
    assert tensors_of(many) == [id(many.y), id(many.x)]  # type: ignore[attr-defined]
    assert not Records.of(many, 4).opaque
    noted = torch.ones(4)
    noted.note = "text"  # type: ignore[attr-defined]
    assert tensors_of(noted) == [id(noted)]


def test_what_holds_itself_is_looked_into_up_to_some_depth() -> None:
    x, mapping, items, thing = torch.ones(4), {}, [], Slots()  # type: ignore[var-annotated]
    mapping |= {"x": x, "itself": mapping}
    items += [x, items]
    thing.x, thing.itself = x, thing  # type: ignore[attr-defined]
    for value in (mapping, items, thing):
        assert set(tensors_of(value)) == {id(x)}


def test_what_holds_no_data_is_not_looked_into() -> None:
    holds_none = [None, True, int, len, lambda: torch.ones(4), nn.Linear(2, 2)]
    records = Records.of((torch.ones(4), *holds_none), 4)
    assert len(records.tensors) == 1 and not records.opaque and not records.hidden


def test_other_values_are_opaque_and_unknown_objects_hidden() -> None:
    for value in ("text", b"bytes", 3, 0.5, 1j, np.ones(4), np.float32(1), {"deep": ["text"]}, {"a", "set"}):
        records = Records.of((torch.ones(4), value), 4)
        assert records.opaque and not records.hidden and len(records.tensors) == 1
    assert Records.of((torch.ones(4), object()), 4).hidden
    assert Records.of(iter([torch.ones(4)]), 4).hidden
    deep: Any = torch.ones(4)
    for _ in range(7):
        deep = [deep]
    assert Records.of(deep, 4).hidden, "deeper than anybody looks"


def test_arrays_are_copied_and_numbers_kept() -> None:
    array = np.arange(4.0)
    strange = np.arange(4.0).astype(">f8"), np.array(["a"]), np.array([1j])
    records = Records.of((array, *strange, 5, 2.5, np.int8(3), "text"), 4)
    assert len(records.arrays) == 1 and records.arrays[0].tolist() == [0, 1, 2, 3]
    array += 1
    assert records.arrays[0].tolist() == [0, 1, 2, 3] and records.numbers == (5, 2.5, 3)


def test_rows_are_those_of_the_samples() -> None:
    x, y, other, number = torch.ones(4, 2), torch.ones(4), torch.ones(3, 4), torch.tensor(4.0)
    records = Records.of((x, y, other, number, torch.ones(4, 2).to_sparse()), 4)
    assert [id(t) for t in records.rows] == [id(x), id(y)]
    assert Records.of((x, number), 4).ragged is False and Records.of((x, other), 4).ragged is True
    assert Records.of(number, 4).ragged is False


SMALL = torch.tensor([0.001, 0.002, 0.0015, 0.0016], dtype=torch.float64)
EXTREMES: dict[str, tuple[Any, tuple[int, int]]] = {
    "by magnitude": (torch.tensor([[1.0, -1.0], [3.0, -3.0], [0.1, -0.1], [2.0, -2.0]]), (1, 2)),
    "by the largest value": (
        torch.tensor([[4, -4, 1, -1], [3, -3, 2, -2], [3.5, -3.5, 1.5, -1.5]]).repeat(2, 1)[:4],
        (0, 1),
    ),
    "whatever the scale": ((SMALL, SMALL, 3e3 - 1e6 * SMALL), (1, 0)),
    "by length": (torch.tensor([[3, 0, 0, 0], [3, -3, 3, 0], [3, -3, 0, 3], [3, -1, -2, 3]]), (3, 0)),
    "by sum": (torch.tensor([[1.0, -1.0], [1.0, 1.0], [-1.0, -1.0], [-1.0, 1.0]]), (1, 2)),
    "by label": (torch.tensor([1, 1, 3, -2]), (2, 3)),
    "beside what says nothing": (
        (torch.tensor([1.0, 2.0, 0.5, 1.5]), torch.ones(4), torch.ones(4, 0), torch.ones(4, 2) * 1j, torch.ones(3)),
        (1, 2),
    ),
    **{f"with {odd}": (torch.tensor([odd, 0.5, 0.7, 0.9]), (3, 0)) for odd in (torch.nan, torch.inf, -torch.inf)},
}


@pytest.mark.parametrize(("batch", "expected"), EXTREMES.values(), ids=EXTREMES)
def test_the_extreme_samples(batch: Any, expected: tuple[int, int]) -> None:
    assert Records.of(batch, 4).extremes() == expected


# Other records


def test_all_forms_of_other_records() -> None:
    """The table of docs/soundness.md: a large one four times as large, the smallest with zeros, the largest alone."""
    x, y = torch.tensor([1.0, 5.0, 2.0, 0.5, 3.0]), torch.tensor([1, 4, 2, 1, 3])
    large, small, one = Records.of((x, y), 5).changes(0, draw=1)
    others = sorted(set(range(5)) - set(large.kept.tolist()))
    assert len(others) == 2 and others == small.kept.tolist() != [0, 1]
    stays = int(large.source[others[0]])
    assert stays in large.kept.tolist() and others[0] < stays < others[1]
    assert large.applied(x).tolist() == [4 * float(x[stays]) if i in others else v for i, v in enumerate(x.tolist())]
    assert large.applied(y).tolist() == [int(y[stays]) if i in others else v for i, v in enumerate(y.tolist())]
    assert small.applied(x).tolist() == [v if i in others else 0.5 for i, v in enumerate(x.tolist())]
    assert small.applied(y).tolist() == [v if i in others else 0 for i, v in enumerate(y.tolist())]
    assert one.applied(x).tolist() == [1.0, 0.125, 2.0, 0.5, 3.0] and one.applied(y).tolist() == [1, 1, 2, 1, 3]
    assert [change.what for change in (large, small, one)] == [
        "2 of 5 samples were other records", "3 of 5 samples were other records", "sample 1 was another record",
    ]  # fmt: skip
    assert [change.losses_only for change in (large, small, one)] == [False, False, True]
    assert not any(change.rigid for change in (large, small, one))


@pytest.mark.parametrize("rigid", [False, True])
def test_later_checks_take_two_forms_in_turn(rigid: bool) -> None:
    records = Records.of(torch.arange(1.0, 6.0), 5)
    found = [
        [(c.scale, c.flat, c.rigid, c.losses_only) for c in records.changes(n, 0, rigid) if not c.wild]
        for n in range(4)
    ]
    large, small, one = (4.0, False, False, False), (1.0, True, False, False), (0.25, False, False, True)
    only = (*small[:3], True)
    stiff = [(4.0, False, True, False), (1.0, True, True, False)] * 2
    plain = [[large, small, one], [small, one], [large, only], [small, one]]
    assert found == [forms + [last] * rigid for forms, last in zip(plain, stiff, strict=True)]


def test_the_second_and_third_check_try_numbers_that_no_record_holds() -> None:
    x, y = torch.arange(1.0, 6.0), torch.arange(5)
    records = Records.of((x, y), 5)
    wild = [[change for change in records.changes(number, 3) if change.wild] for number in range(5)]
    assert [len(found) for found in wild] == [0, 1, 1, 0, 0]
    for (change,), scale in ((wild[1], torch.nan), (wild[2], 1e6)):
        others = sorted(set(range(5)) - set(change.kept.tolist()))
        assert len(others) == 2 and change.losses_only and change.applied(y) is not y
        expected = [scale * v if i in others else v for i, v in enumerate(x.tolist())]
        assert torch.equal(change.applied(x).nan_to_num(-1), torch.tensor(expected).nan_to_num(-1))
        assert torch.equal(change.applied(y), y)
    whole = Records.of(y, 5)
    assert not any(change.wild for number in (1, 2) for change in whole.changes(number)), "integers stay"


def test_halves_are_drawn_and_hold_half_of_the_samples() -> None:
    for size in range(2, 8):
        records = Records.of(torch.arange(1.0, 1.0 + size), size)
        kept = {tuple(records.changes(0, draw)[0].kept.tolist()) for draw in range(20)}
        assert {len(half) for half in kept} == {size - size // 2} and len(kept) > 1


def test_others_become_relatives_of_a_sample_that_stays() -> None:
    """The largest one that stays and has others before and behind it, else the largest that stays."""
    for size in range(2, 9):
        x = torch.randn(size, generator=torch.Generator().manual_seed(size))
        records = Records.of(x, size)
        for draw in range(20):
            change = records.changes(0, draw)[0]
            kept = change.kept.tolist()
            others = [i for i in range(size) if i not in kept]
            assert len(of := {int(change.source[i]) for i in others}) == 1
            between = [i for i in kept if others[0] < i < others[-1]]
            assert of == {max(between or kept, key=lambda i: float(records._magnitudes()[i]))}


def test_a_batch_of_one_or_of_equal_records_has_no_others() -> None:
    assert Records.of(torch.ones(1), 1).changes(0) == [] == Records.of(torch.tensor([3]), 1).changes(0)
    assert len(Records.of(torch.tensor([1.0, 2.0]), 2).changes(0)) == 3
    assert Records.of(torch.zeros(4, 2), 4).changes(0) == []
    assert Records.of(torch.ones(3, 4), 4).changes(0) == [], "no rows"
    assert len(Records.of((torch.zeros(4), torch.arange(4)), 4).changes(0)) == 3, "one tensor that differs is enough"


def test_records_of_the_same_size_are_exchanged_for_each_other() -> None:
    changes = Records.of(ALTERNATING, 4).changes(0)
    assert len(changes) == 3 and changes[2].kept.tolist() == [1, 2, 3]
    assert torch.equal(changes[2].applied(ALTERNATING)[0], ALTERNATING[3] / 4)


def test_only_tensors_in_rows_become_others() -> None:
    change = Change.of(torch.tensor([True, False]), 0, "", scale=4.0, flat=True)
    for kept in (torch.ones(3), torch.tensor(2.0), torch.ones(2).to_sparse()):
        assert change.applied(kept) is kept
    assert change.applied(torch.tensor([[1.0], [2.0]])).tolist() == [[1.0], [4.0]]
    assert change.applied(torch.tensor([1j, 2j])).tolist() == [1j, 4j]
    assert change.applied(torch.tensor([1, 2])).tolist() == [1, 0]
    assert change.applied(torch.tensor([True, False])).tolist() == [True, False]
    assert change.applied(torch.tensor([1, 2], dtype=torch.uint16)).tolist() == [1, 1], "torch cannot zero these"
    round_ones = Change.of(torch.tensor([True, False]), 0, "")
    assert round_ones.applied(torch.tensor([1, 2])).tolist() == [1, 1] and round_ones.kept.tolist() == [0]


# Values that are not in rows


class Again:
    """Makes a batch of records once more."""

    def __init__(self, make: Callable[[list[Tensor]], Any], records: list[Tensor]) -> None:
        self.make, self.records = make, records

    def batch(self) -> Any:
        return self.make(self.records)

    def scaled(self, kept: list[bool], scale: float) -> Any:
        return self.make([r if stays else r * scale for r, stays in zip(self.records, kept, strict=True)])

    def replaced(self, kept: list[bool], longest: bool) -> Any:
        raise NotImplementedError


def columns(records: list[Tensor]) -> Tensor:
    return torch.stack(records, 1)


def failing(records: list[Tensor]) -> Tensor:
    raise LookupError


def test_packed_records_are_scaled_one_half_after_the_other() -> None:
    again = Again(lambda r: (torch.cat(r), torch.arange(4)), [torch.full((n,), float(n)) for n in (1, 2, 3, 4)])
    batch = again.batch()
    changes = Records.of(batch, 4).ragged_changes(3, again)
    assert [change.rigid for change in changes] == [False, False, True]
    first, second, rigid = (change.kept.tolist() for change in changes)
    assert sorted(first + second) == [0, 1, 2, 3] and len(first) == 2 and rigid == first
    for change in changes:
        assert change.what == "2 of 4 samples were other records"
        expected = [float(n) if n - 1 in change.kept.tolist() else 4.0 * n for n in (1, 2, 3, 4) for _ in range(n)]
        assert change.applied(batch[0]).tolist() == expected and change.applied(batch[1]).tolist() == [0, 1, 2, 3]
        assert change.applied(loose := torch.ones(4)) is loose, "what is not of the batch stays"


def test_packed_records_that_cannot_be_others_are_not_changed() -> None:
    zeros = Again(torch.cat, [torch.zeros(1), torch.zeros(2)])
    assert Records.of(zeros.batch(), 2).ragged_changes(0, zeros) == [], "zeros stay zeros"
    longer = Again(torch.cat, [torch.ones(5), torch.ones(3)])
    assert Records.of(torch.ones(5), 2).ragged_changes(0, longer) == [], "another shape"


def test_columns_are_told_from_rows() -> None:
    """As many steps of time as samples: which axis is the samples' shows when some of them are scaled."""
    records = [torch.arange(1.0, 5.0) + i for i in range(4)]

    def has_other_rows(make: Callable[[list[Tensor]], Any]) -> bool:
        again = Again(make, records)
        return Records.of(again.batch(), 4).has_other_rows(0, again)

    assert has_other_rows(columns) and not has_other_rows(torch.stack)
    assert has_other_rows(lambda r: (torch.stack(r), columns(r), torch.arange(4)))
    assert not has_other_rows(lambda r: (columns(r)[:3], columns(r)[None], torch.arange(4), torch.ones(3, 3)))
    assert not Records.of(columns(records), 4).has_other_rows(0, Again(failing, records)), "nobody can tell"


def test_records_that_cannot_be_read_again_are_named() -> None:
    again = Again(torch.cat, [torch.ones(1), torch.ones(2)])
    assert unreadable(again, Records.of(torch.ones(3), 2)) == ""
    assert unreadable(again, Records.of(torch.zeros(3), 2)) == "they are others the second time"
    assert unreadable(again, Records.of(torch.ones(1), 2)) == "they are others the second time"
    assert unreadable(Again(failing, [torch.ones(1)]), Records.of(torch.ones(1), 1)) == "LookupError the second time"
    assert not Records.of((torch.ones(2), torch.ones(2)), 2).reads_as(torch.ones(2))
    assert not Records.of(torch.ones(2), 2).reads_as((torch.ones(2), torch.ones(2)))
    assert Records.of((torch.ones(2), torch.zeros(2)), 2).reads_as((torch.ones(2), torch.zeros(2)))
    assert not Records.of((torch.ones(2), torch.zeros(2)), 2).reads_as((torch.ones(2), torch.ones(2)))


# Small ones


def test_the_same_numbers() -> None:
    nan = torch.tensor([1.0, torch.nan])
    assert same(nan, nan) and same(nan, nan.clone()) and not same(nan, torch.tensor([1.0, 2.0]))
    assert not same(torch.tensor([1.0, 2.0]), nan) and not same(nan, torch.tensor([2.0, torch.nan]))
    assert same(torch.ones(2).to_sparse(), torch.zeros(2).to_sparse()), "what cannot be compared is not called moved"


@dataclass
class Record:
    values: Tensor
    array: Any
    label: int


def test_a_record_is_scaled_where_it_holds_floating_point_numbers() -> None:
    array, whole = np.ones(2, dtype=np.float32), np.ones(2, dtype=np.int64)
    assert scaled(array, 4.0).tolist() == [4, 4] and scaled(array, 4.0).dtype == np.float32
    assert scaled(whole, 4.0) is whole and array.tolist() == [1, 1]
    assert scaled(torch.tensor([1, 2]), 4.0).tolist() == [1, 2] and scaled(torch.tensor([1.5]), 4.0).tolist() == [6]
    assert scaled({"a": 1.5, "b": 2, "c": "text"}, 4.0) == {"a": 6.0, "b": 2, "c": "text"}
    assert scaled([0.5, (0.25,)], 4.0) == [2.0, (1.0,)] and scaled(Pair(0.5, 1), 4.0) == Pair(2.0, 1)


def test_an_object_is_copied_before_it_is_scaled() -> None:
    record = Record(torch.ones(2), np.ones(2), 3)
    other = scaled(record, 4.0)
    assert other.values.tolist() == other.array.tolist() == [4, 4] and other.label == 3
    assert record.values.tolist() == record.array.tolist() == [1, 1]
    whole = scaled(Record(torch.tensor([1]), np.ones(1, dtype=int), 3), 4.0)
    assert whole.values.tolist() == whole.array.tolist() == [1]


MAGNITUDES: dict[str, tuple[Any, tuple[int, float]]] = {
    "values": (torch.tensor([0.0, -3.0, 2.0]), (2, 3.0)),
    "array and number": ((np.array([0, 5]), 7, 0.0), (2, 7.0)),
    "texts": (("four", b"two"), (7, 0.0)),
    "text and values": (["four", torch.tensor([[1.0, 1.0]])], (6, 1.0)),
    "nothing": ((), (0, 0.0)),
}


@pytest.mark.parametrize(("record", "expected"), MAGNITUDES.values(), ids=MAGNITUDES)
def test_how_long_and_how_large_a_record_is(record: Any, expected: tuple[int, float]) -> None:
    assert magnitude(record) == expected


def test_a_few_samples_are_named() -> None:
    assert some([3]) == "sample 3" and some([]) == "samples "
    assert some([0, 1, 2, 3]) == "samples 0, 1, 2, 3" and some(range(5)) == "samples 0, 1, 2, 3 and others"


@pytest.mark.parametrize("size", [4, 100])  # few rows are compared where they are
def test_some_rows_are_compared_and_no_others(size: int) -> None:
    a = torch.arange(2.0 * size).reshape(size, 2)
    a[0, 0] = torch.nan
    b = a.clone()
    b[1] = 7.0
    assert same_rows(a, b, torch.arange(size)[torch.arange(size) != 1]) and not same_rows(a, b, torch.arange(size))
    assert same_rows(a.long(), a.long(), torch.arange(size)) and same_rows(a, b, torch.arange(0))
