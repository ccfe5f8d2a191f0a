"""Where the records of a data set lie: what is of records, what is not, and objects that do not answer."""

from __future__ import annotations

import weakref
from collections import deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, Dataset, TensorDataset

from clipwise.private.evidence import held_records
from clipwise.private.evidence.held_records import HeldRecords, merged


class Six(Dataset[Any]):
    """Six records in any form."""

    def __init__(self, **values: Any) -> None:
        vars(self).update(values)

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        return index


def rows(count: int) -> Tensor:
    return torch.ones(count, 2)


def test_the_first_axis_decides() -> None:
    for count, is_of_records in ((5, False), (6, True), (7, True)):
        for nest in (lambda x: x, lambda x: [x], lambda x: {"a": {"b": (x,)}}, lambda x: SimpleNamespace(x=x)):
            x, array = rows(count), np.ones((count, 2))
            held = HeldRecords(Six(x=nest(x), array=nest(array)))
            assert held.meets(x) is held.meets(x[-1, 1:]) is held.meets(torch.from_numpy(array)) is is_of_records
    assert not HeldRecords(Six(x=torch.ones(2, 6), number=torch.ones(()), none=rows(0))).meets(rows(6))


def test_a_container_of_as_many_entries_is_of_records() -> None:
    for count, is_of_records in ((5, False), (6, True), (7, True)):
        for kind in (list, tuple, deque, lambda values: dict(enumerate(values)), np.array):
            items: list[Any] = [{"x": torch.ones(1, k + 1), "y": [np.ones((1, k + 1))]} for k in range(count)]
            held = HeldRecords(Six(items=kind(items)))
            assert held.meets(items[-1]["x"]) is is_of_records
            assert held.meets(torch.from_numpy(items[-1]["y"][0])) is is_of_records


def test_what_is_together_as_many_or_as_long_is_of_records() -> None:
    parts = [rows(1), rows(2), rows(3)]
    others = [torch.ones(1, 3), torch.ones(3, dtype=torch.long), torch.tensor(1.0)]
    held = HeldRecords(Six(a=parts[:1], b={"b": parts[1:]}, others=others))
    assert all(map(held.meets, parts)) and not any(map(held.meets, others))
    assert not any(map(HeldRecords(Six(parts=parts[1:])).meets, parts))
    nested = [[torch.ones(4) for _ in range(3)] for _ in range(2)]
    assert HeldRecords(Six(nested=nested)).meets(nested[1][2])
    assert not HeldRecords(Six(nested=nested[:1])).meets(nested[0][0])
    assert not HeldRecords(Six(a=parts[2], b=[parts[2]])).meets(parts[2]), "the same one twice"


def test_a_data_set_inside_has_its_own_length() -> None:
    short, table, long = rows(2), rows(1), rows(9)
    inner = TensorDataset(short)
    inner.table = table  # type: ignore[attr-defined]
    held = HeldRecords(Six(inner=[inner], more={"long": TensorDataset(long)}, empty=TensorDataset(rows(0))))
    assert held.meets(short) and held.meets(long) and not held.meets(table)
    parts = [TensorDataset(rows(1)), TensorDataset(rows(5))]
    assert all(HeldRecords(ConcatDataset(parts)).meets(part.tensors[0]) for part in parts)


def test_what_records_share_is_looked_into_only_where_few_do() -> None:
    for sharing, is_of_records in ((6, False), (4, False), (3, True), (1, True)):
        transform, module, tensor = SimpleNamespace(mean=torch.ones(2)), nn.Linear(1, 1), torch.ones(2)
        items = [(tensor, module, torch.add, transform if k < sharing else None) for k in range(6)]
        held = HeldRecords(Six(items=items))
        assert held.meets(transform.mean) is is_of_records
        assert held.meets(tensor) and not held.meets(module.weight.detach())


def test_the_model_is_not_looked_into_but_other_modules_are() -> None:
    model, bank = nn.Sequential(nn.Linear(2, 9)), nn.Linear(2, 9)
    held = HeldRecords(Six(model=model, layer=model[0], bank=bank), model.modules())
    assert not held.meets(model[0].weight) and held.meets(bank.weight)


def test_objects_that_do_not_answer_are_passed_over() -> None:
    class Silent:
        @property
        def shape(self) -> Any:
            raise ZeroDivisionError

        def __len__(self) -> int:
            raise ZeroDivisionError

        def __getitem__(self, index: int) -> Any:
            raise ZeroDivisionError

    silent: Any = Silent()
    silent.x = x = rows(6)
    silent.itself = [silent]
    gone: Any = weakref.proxy(Silent())
    strange = [torch.ones(9, 2, device="meta"), rows(9).to_mkldnn(), np.ones((9, 0)), np.float64(3), gone]
    held = HeldRecords(Six(silent=silent, strange=strange, text=["a"] * 9, kinds=(int, Silent, np)))
    assert held.meets(x) and held.is_whole
    assert not held.meets(torch.ones(9, device="meta")) and not held.meets(rows(9).to_mkldnn())
    assert not held.meets(torch.ones(0, 2)) and not HeldRecords().meets(x)


def test_any_part_of_the_memory_is_met() -> None:
    whole = np.ones((20, 4))
    tensor = torch.from_numpy(whole)
    held = HeldRecords(Six(x=whole[16:9:-1, 1:3]))  # rows 10 to 16
    for first, last, is_met in ((0, 10, False), (0, 11, True), (9, 12, True), (16, 17, True), (17, 20, False)):
        assert held.meets(tensor[first:last]) is is_met
    assert held.meets(tensor[0:12, 3]) and held.meets(tensor.T) and not held.meets(tensor[5:5])
    assert not held.meets(tensor[10, :1]) and held.meets(tensor[10, 1:2])
    assert held.meets(tensor[16, 2:3]) and not held.meets(tensor[16, 3:])


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_the_parts_of_sparse_tensors_are_met() -> None:
    for layout in (rows(6).to_sparse(), rows(6).to_sparse_csr(), rows(6).to_sparse_csc()):
        assert HeldRecords(Six(x=layout)).meets(layout) and not HeldRecords(Six(x=layout)).meets(rows(6))


def test_intervals_are_joined() -> None:
    assert merged([(5, 7), (0, 10), (2, 3), (20, 30), (25, 40)]) == [(0, 10), (20, 40)]
    assert merged([(0, 4), (6, 8), (7, 9), (1, 2)]) == [(0, 4), (6, 9)]


@pytest.mark.parametrize("form", ["records", "nested"])
def test_the_search_ends(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = Six(x=[[torch.ones(1)] for _ in range(500)] if form == "records" else {"a": [[[]]] * 5, "b": list(range(5))})
    assert HeldRecords(data).is_whole
    monkeypatch.setattr(held_records, "_MOST", 10)
    assert not HeldRecords(data).is_whole
