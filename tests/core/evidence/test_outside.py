"""Memory that something other than torch may write: whether it holds what it held when it was last known."""

from __future__ import annotations

import torch

from clipwise.engine import memory_of
from clipwise.private.evidence.outside import Outside


def test_what_was_written_since_is_noticed_wherever_it_lies() -> None:
    table, outside = torch.zeros(3, 4), Outside()
    memory = memory_of(table)
    assert memory not in outside and not outside.changed(memory)
    outside.hold(table[1])
    assert memory in outside and not outside.changed(memory) and not list(outside.all_changed())
    table.numpy()[2, 3] = 1
    assert outside.changed(memory) and [memory_of(found) for found in outside.all_changed()] == [memory]
    outside.hold(table[0])
    assert not outside.changed(memory)


def test_what_nobody_else_holds_is_still_compared() -> None:
    outside, table = Outside(), torch.zeros(3)
    array, memory = table.numpy(), memory_of(table)
    outside.hold(table)
    del table
    array[0] = 1
    assert outside.changed(memory)


def test_not_a_number_is_the_same_again() -> None:
    table, outside = torch.full((3,), float("nan")), Outside()
    outside.hold(table)
    assert not outside.changed(memory_of(table))


def test_memory_that_was_resized_is_another_and_none_is_not() -> None:
    table, outside = torch.zeros(3), Outside()
    outside.hold(table)
    table.untyped_storage().resize_(16)
    assert outside.changed(memory_of(table))
    table.untyped_storage().resize_(0)
    assert not outside.changed(memory_of(table))


def test_memory_that_cannot_be_read_is_passed_over() -> None:
    outside, indices = Outside(), torch.tensor([[0, 1]])
    for table in (
        torch.zeros(2).to_mkldnn(),
        torch.sparse_coo_tensor(indices, torch.ones(2), (2,), check_invariants=True),
    ):
        outside.hold(table)
        assert not outside.changed(memory_of(table))
