"""Memory from before a batch: what stayed the same, what the data set owns, and what a pass wrote into the model."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset, TensorDataset

import clipwise as cw
from clipwise.private.evidence.memory import Memory, held_by
from clipwise.private.evidence.records import Change, Records
from clipwise.private.evidence.twin import Twin
from clipwise.private.evidence.watch import Watch

X = torch.arange(1.0, 13.0).reshape(4, 3)


class Model(nn.Module):
    """A layer, buffers, and tensors as plain attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.register_buffer("statistic", torch.zeros(3))
        self.register_buffer("empty", None)
        self.register_buffer("count", torch.tensor(0))
        self.kept = torch.zeros(3)
        self.lists = [torch.zeros(3), {"deep": (torch.ones(3),)}]


def passed(memory: Memory, body: Callable[[Tensor], Any], step: int = 0, twins: int = 1) -> Watch:
    """One watched pass over a batch, from `begin` to `end`; the second of two twins exchanges the other samples."""
    x = X.clone()
    kept = torch.tensor([True, False, True, False])
    memory.begin(step)
    changes = [Change.of(kept, 1, "", scale=4.0), Change.of(~kept, 1, "", scale=4.0)][:twins]
    watch = Watch(Records.of(x, 4), [Twin(change) for change in changes], memory.familiar)
    watch.start()
    try:
        body(x)
    finally:
        watch.stop()
        memory.leave(watch)
    memory.end(watch)
    return watch


def nothing(x: Tensor) -> None:
    pass


# Names


def test_all_tensors_of_a_model_are_known_by_name() -> None:
    outer = nn.Sequential(Model())
    found = {name: saved for name, _, saved in held_by(outer)}
    assert found == {
        "0.layer.weight": True, "0.layer.bias": True, "0.statistic": True, "0.count": True, "0.kept": False,
        "0.lists": False,
    }  # fmt: skip
    assert sum(name == "0.lists" for name, _, _ in held_by(outer)) == 2
    assert {name for name, _, _ in held_by(nn.Linear(1, 1))} == {"weight", "bias"}


# Familiar


def test_what_was_there_before_the_first_batch_is_familiar_and_nothing_later() -> None:
    memory, table, other = Memory(Model(), ()), torch.ones(3), torch.ones(3)
    memory.look_around(0)
    for step in (0, 1, 64):  # whether or not the pass before was watched
        later = torch.ones(3)
        memory.begin(step)
        assert memory.familiar(table) and not memory.familiar(later)
    table += 1
    other.numpy()[0] = 2
    for step in (65, 129):
        memory.begin(step)
        assert not memory.familiar(table) and not memory.familiar(other)
    assert not memory.notes


def test_an_exchange_of_two_entries_is_a_change() -> None:
    memory, order, signs = Memory(Model(), ()), torch.arange(6), torch.tensor([1.0, -1.0], dtype=torch.float64)
    places = torch.eye(3).to_sparse().coalesce()
    memory.begin(0)
    assert memory.familiar(order) and memory.familiar(signs) and memory.familiar(places)
    order[[1, 4]] = order[[4, 1]]
    signs.neg_()
    places.indices()[0] = places.indices()[0].flip(0)
    assert not memory.familiar(order) and not memory.familiar(signs) and not memory.familiar(places)


def test_the_process_is_looked_at_once_and_before_anything_of_a_batch() -> None:
    memory = Memory(Model(), ())
    memory.look_around(0)
    of_the_batch = torch.ones(3)
    memory.look_around(0)
    memory.begin(0)
    assert not memory.familiar(of_the_batch)


def test_tensors_that_do_not_answer_are_passed_over() -> None:
    class Silent(Tensor):
        @staticmethod
        def __new__(cls) -> Any:
            return Tensor._make_wrapper_subclass(cls, (3,))

        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise ZeroDivisionError

    held = [Silent(), torch.ones(3, device="meta"), nn.UninitializedParameter()]
    memory, table = Memory(Model(), ()), torch.ones(3)
    memory.begin(0)
    assert memory.familiar(table) and len(held) == 3


def test_a_batch_that_was_there_before_is_no_constant_in_the_next_pass() -> None:
    """As with batches of one's own."""
    memory, x = Memory(Model(), ()), X.clone()
    memory.begin(0)
    watch = Watch(Records.of(x, 4), [], memory.familiar)
    memory.leave(watch)
    memory.begin(1)
    assert not memory.familiar(x)


def test_memory_of_the_model_that_changed_before_the_first_pass_is_not_familiar() -> None:
    model = Model()
    memory = Memory(model, ())
    model.kept += 1
    memory.begin(0)
    assert not memory.familiar(model.kept)


def test_declared_and_trained_memory_is_always_familiar() -> None:
    model, teacher = Model(), nn.Linear(2, 2)
    frozen = model.layer.bias.requires_grad_(False)
    memory = Memory(model, (teacher, model.statistic))  # type: ignore[arg-type]
    passed(memory, nothing)
    with torch.no_grad():
        for changed in (model.layer.weight, frozen, teacher.weight, model.statistic):
            changed += 1  # type: ignore[operator]
    memory.begin(1)
    assert memory.familiar(model.layer.weight) and memory.familiar(teacher.weight)
    assert memory.familiar(model.statistic)  # type: ignore[arg-type]
    assert not memory.familiar(frozen)


def test_whole_numbers_of_torchscript_are_taken_and_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Memory(Model(), ())
    passed(memory, nothing)
    monkeypatch.setattr("clipwise.private.evidence.memory.has_scripts", lambda: False)
    memory.begin(1)
    assert memory.familiar(torch.tensor(3), True)
    assert memory.notes == ["a number of unknown origin in TorchScript"]
    assert not memory.familiar(torch.tensor(3.0), True) and not memory.familiar(torch.tensor([3]), True)
    assert not memory.familiar(torch.tensor(3)), "a call of torch"


@pytest.mark.parametrize("scripts", [False, True])
def test_numbers_that_torchscript_gives_back_are_noted_and_those_from_before_are_not(
    scripts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clipwise.private.evidence.memory.has_scripts", lambda: scripts)
    memory = Memory(Model(), ())
    passed(memory, nothing)
    kept = torch.tensor(3)
    memory.begin(1)
    assert memory.familiar(torch.tensor(3)) is scripts and not memory.familiar(kept)
    assert memory.familiar(torch.tensor(3.0)) is scripts and not memory.familiar(torch.tensor([3]))
    assert len(memory.notes) == 2 * scripts


def test_other_numbers_of_torchscript_are_taken_in_the_first_pass_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clipwise.private.evidence.memory.has_scripts", lambda: False)
    memory = Memory(Model(), ())
    memory.look_around(0)
    held = torch.tensor(0.3)
    memory.begin(0)
    assert memory.familiar(held, True) and not memory.familiar(torch.tensor(0.3)) and not memory.notes
    passed(memory, nothing)
    memory.begin(1)
    assert memory.familiar(held, True)
    held += 1
    assert not memory.familiar(held, True)


def test_a_count_of_steps_is_familiar() -> None:
    """One that counts as the steps do; in whole numbers, whatever their type."""
    for dtype in (torch.int64, torch.float32):
        memory = Memory(Model(), ())
        count = torch.tensor(7, dtype=dtype)
        passed(memory, lambda x, count=count: x + count, step=2)
        count += 3
        memory.begin(5)
        assert memory.familiar(count) and not memory.notes
        if dtype.is_floating_point:
            count += 1
            assert not memory.familiar(count)
            count -= 0.5
            assert not memory.familiar(count)


def test_a_count_goes_on_from_the_step_of_the_first_batch() -> None:
    """The first step of a run that was resumed."""
    model, count = Model(), torch.tensor(7.0)
    model.kept = torch.tensor(4.0)
    memory = Memory(model, ())
    memory.look_around(5)
    count += 2
    model.kept += 2
    memory.begin(7)
    assert memory.familiar(count) and memory.familiar(model.kept)


def test_a_count_of_the_model_began_with_it() -> None:
    model = Model()
    model.kept = torch.tensor(4.0)
    memory = Memory(model, ())
    model.kept += 3
    memory.begin(3)
    assert memory.familiar(model.kept)


def test_what_a_pass_made_of_constants_is_familiar_as_long_as_it_stays() -> None:
    """Also after a pass that came to nothing, and passes in which it was not met."""
    memory, cache = Memory(Model(), ()), SimpleNamespace()

    def body(x: Tensor) -> None:
        cache.table, cache.batch = torch.ones(3) * 2, x.mean(0)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        passed(memory, body)
    passed(memory, nothing, 1)
    memory.begin(2)
    assert memory.familiar(cache.table) and not memory.familiar(cache.batch)
    cache.table.copy_(cache.batch)
    assert not memory.familiar(cache.table)


def test_what_was_trained_once_is_familiar_when_it_is_frozen() -> None:
    model = Model()
    memory = Memory(model, ())
    memory.trains([model.layer.weight])
    model.layer.requires_grad_(False)
    with torch.no_grad():
        model.layer.weight += 1
        model.layer.bias += 1
    memory.begin(7)
    assert memory.familiar(model.layer.weight) and not memory.familiar(model.layer.bias)


def test_what_the_model_replaces_without_the_batch_may_be_replaced_while_nobody_watches() -> None:
    """A cache that grows with the longest sequence; never again where the same name held the batch once."""
    for once in (False, True):
        model = Model()
        memory = Memory(model, ())
        passed(memory, lambda x, model=model: setattr(model, "kept", torch.ones(3) * 2))
        passed(memory, lambda x, model=model, once=once: setattr(model, "kept", x.mean(0)) if once else None, 1)
        model.kept = torch.ones(5)
        memory.begin(64)
        assert memory.familiar(model.kept) is not once


def test_each_tensor_of_a_list_is_compared_with_itself() -> None:
    """Several have one name: they passed for memory that the model rewrites, and might hold anything."""
    model = Model()
    memory = Memory(model, ())
    passed(memory, nothing)
    model.lists[0] += 1  # type: ignore[operator, arg-type]
    memory.begin(1)
    assert not memory.familiar(model.lists[0])  # type: ignore[arg-type]


def test_a_constant_of_the_program_may_become_an_attribute() -> None:
    model, table = Model(), torch.ones(4)
    memory = Memory(model, ())
    passed(memory, lambda x: (setattr(model, "kept", table), setattr(model, "fresh", table)))
    memory.begin(1)
    assert memory.familiar(model.kept)
    model.kept = torch.ones(3)
    memory.begin(2)
    assert not memory.familiar(model.kept)


def test_memory_of_the_program_that_a_pass_rewrites_is_not_familiar_any_more() -> None:
    """Not even from constants: in the same pass something other than torch may have written into it."""
    memory, table = Memory(Model(), ()), torch.zeros(3)
    passed(memory, lambda x: x + table.add_(1))
    memory.begin(1)
    assert not memory.familiar(table)


# The data set


class Holding(Dataset[Any]):
    """Records in any form, of which there are four."""

    def __init__(self, **values: Any) -> None:
        vars(self).update(values)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return index


class Around(Holding):
    """A data set of another length around one of four."""

    def __len__(self) -> int:
        return 2


def test_memory_with_a_row_for_each_record_is_private() -> None:
    tensor, array, other = torch.ones(4, 3), np.ones((4, 3)), torch.ones(3, 3)
    items = [(torch.ones(2), 1), (torch.ones(2), 1), (torch.ones(2), 1), (torch.ones(2), 1)]
    memory = Memory(Model(), ())
    memory.add_data(
        Holding(tensor=tensor, array=array, other=other, items=items, pair=(other, {"x": 1}, SimpleNamespace(a=tensor)),
                number=torch.tensor(4.0), sparse=torch.ones(4).to_sparse(), short=np.ones(3), zero=np.float64(3))
    )  # fmt: skip
    private = [tensor, tensor[-1, -1:], torch.from_numpy(array), torch.from_numpy(array)[-1, -1:], items[3][0]]
    public = [other, torch.ones(4, 3), torch.ones(4).to_sparse()]
    memory.begin(0)
    for value in private:
        assert memory.is_record(value) and not memory.familiar(value)
    for value in public:
        assert not memory.is_record(value) and memory.familiar(value)


def test_records_are_found_behind_wrappers() -> None:
    tensor = torch.ones(4, 3)
    itself: list[Any] = [tensor]
    itself.append(itself)
    wrapped = SimpleNamespace(inner=tensor, dataset=None)
    wrapped.itself = wrapped
    nests = [Holding(part=part) for part in ([tensor], [[tensor]], [tensor] * 64, itself, wrapped, [wrapped])]
    for dataset in (Subset(TensorDataset(tensor), [0, 1]), Around(dataset=Holding(x=tensor)), *nests):
        memory = Memory(Model(), ())
        memory.add_data(dataset)
        assert memory.is_record(tensor)


def test_two_records_are_private() -> None:
    tensor, array, items = torch.ones(2, 3), np.ones((2, 3)), [torch.ones(3), torch.ones(3)]
    dataset = TensorDataset(tensor)
    dataset.array, dataset.items = array, items  # type: ignore[attr-defined]
    memory = Memory(Model(), ())
    memory.add_data(dataset)
    assert all(map(memory.is_record, (tensor, torch.from_numpy(array), items[1])))


def test_neighbouring_memory_is_not_a_record() -> None:
    whole = torch.ones(12, 3)
    array = np.ones((12, 3))
    memory = Memory(Model(), ())
    memory.add_data(Holding(x=array[4:8]))
    rows = torch.from_numpy(array)
    assert not memory.is_record(rows[3]) and not memory.is_record(rows[8]) and not memory.is_record(rows[0])
    assert memory.is_record(rows[4]) and memory.is_record(rows[7])
    memory.add_data(Holding(x=whole[4:8]))
    assert memory.is_record(whole[0]), "a tensor's memory is all of its storage"
    memory.add_data(Holding(x=array[0:4], y=array[8:12], z=array[9:13]))
    assert [memory.is_record(rows[k]) for k in (0, 3, 4, 7, 8, 11)] == [True, True, False, False, True, True]


def test_records_of_an_array_without_rows_do_not_matter() -> None:
    memory = Memory(Model(), ())
    memory.add_data(
        Holding(number=np.array(4.0), empty=np.ones((4, 0)), other=np.ones((3, 4)), text=np.array(["a"] * 3))
    )
    table = torch.ones(3)
    memory.begin(0)
    assert memory.familiar(table) and not memory._records


# What a pass wrote


def test_a_statistic_of_the_batch_in_a_buffer_is_refused() -> None:
    model = Model()
    with pytest.raises(cw.NotSeparable, match=r"computed from the batch into 'statistic', shape \(3,\)"):
        passed(Memory(model, ()), lambda x: model.statistic.lerp_(x.mean(0), 0.1))  # type: ignore[union-attr, operator]
    with pytest.raises(cw.NotSeparable, match="into 'statistic'"):  # without a twin nobody can tell
        passed(Memory(Model(), ()), nothing) and passed(
            Memory(model := Model(), ()), lambda x: setattr(model, "statistic", x.mean(0)), twins=0
        )


def test_what_other_records_leave_the_same_may_be_written() -> None:
    model = Model()
    passed(Memory(model, ()), lambda x: model.statistic.copy_(x[0]))  # type: ignore[union-attr, operator]
    assert torch.equal(model.statistic, X[0])  # type: ignore[arg-type]
    with pytest.raises(cw.NotSeparable, match="into 'statistic'"):  # the other twin has another record there
        passed(Memory(model, ()), lambda x: model.statistic.copy_(x[0] + 1), twins=2)  # type: ignore[union-attr, operator]


def test_an_attribute_that_holds_the_batch_is_unknown_to_the_next_pass() -> None:
    model = Model()
    memory = Memory(model, ())
    passed(memory, lambda x: setattr(model, "kept", x.mean(0)))
    memory.begin(1)
    assert not memory.familiar(model.kept)


def test_memory_of_unknown_origin_in_a_buffer_is_refused() -> None:
    model, memory_of_old = Model(), []
    memory = Memory(model, ())
    passed(memory, lambda x: memory_of_old.append(x.mean(0)))
    with pytest.raises(cw.NotSeparable, match="memory of unknown origin into 'statistic'"):
        passed(memory, lambda x: model.statistic.copy_(memory_of_old[0]), 1)  # type: ignore[union-attr, operator]


def test_what_something_else_than_torch_wrote_is_refused() -> None:
    for name in ("statistic", "kept"):
        model = Model()
        array = getattr(model, name).numpy()
        with pytest.raises(cw.NotSeparable, match=f"'{name}' was changed during the forward pass by something other"):
            passed(Memory(model, ()), lambda x, array=array: np.add(array, 1, out=array))


def test_what_the_model_itself_writes_without_the_batch_is_familiar() -> None:
    model = Model()
    memory = Memory(model, ())

    def body(x: Tensor) -> None:
        model.statistic.add_(1)  # type: ignore[union-attr, operator]
        model.kept = torch.ones(3) * 7
        model.new = torch.ones(3) * 8

    passed(memory, body)
    passed(memory, nothing, 1)
    with torch.no_grad():
        model.statistic.add_(1)  # type: ignore[union-attr, operator]
    memory.begin(2)
    for known in (model.statistic, model.kept, model.new):
        assert memory.familiar(known)  # type: ignore[arg-type]
