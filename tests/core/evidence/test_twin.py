"""The second storages of a twin: what is read from them, kept apart, exchanged and let go."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from clipwise.engine import memory_of
from clipwise.private.evidence import twin as module
from clipwise.private.evidence.records import Change
from clipwise.private.evidence.twin import Twin
from tests.interrupts import at_every_line

KEPT = torch.tensor([True, False, True])


def twin(**options: Any) -> Twin:
    return Twin(Change.of(KEPT, 0, "", **options))


def batch() -> Tensor:
    return torch.arange(12.0).reshape(3, 4)


OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "of the same form": lambda x: x + 5,
    "transposed": lambda x: (x + 5).T.contiguous().T,
    "behind others in its memory": lambda x: torch.cat([x, x + 5])[3:],
    "before others in its memory": lambda x: torch.cat([x + 5, x])[:3],
    "itself": lambda x: x,
    "another view of its memory": lambda x: x.flip(0),
    "of another type": lambda x: (x + 5).double(),
}


@pytest.mark.parametrize("make", OTHERS.values(), ids=OTHERS)
def test_a_tensor_is_what_it_would_be_and_its_views_too(make: Callable[[Tensor], Tensor]) -> None:
    x, pair = batch(), twin()
    expected = make(x).to(x.dtype).clone()
    pair.enter(x, make(x))
    assert memory_of(x) in pair and not pair.broken and not pair.has_odd
    assert torch.equal(pair.of(x), expected) and torch.equal(pair.of(x[1:, ::2]), expected[1:, ::2])
    assert torch.equal(pair.of(x.T), expected.T) and pair.of(x).stride() == x.stride()
    x += 100
    assert torch.equal(pair.of(x), expected), "its memory is its own"


def test_what_the_batch_never_reached_is_itself() -> None:
    x, pair = batch(), twin()
    assert pair.of(x) is x and pair.read(x) is x and memory_of(x) not in pair
    assert pair.mapped([x, (3, x)])[0] is x and pair.mapped("text") == "text"


def test_two_views_of_one_memory_keep_both_their_twins() -> None:
    x, pair = batch(), twin()
    pair.enter(x[:, :2], x[:, :2] + 5)
    pair.enter(x[:, 2:], x[:, 2:] - 5)
    assert torch.equal(pair.of(x), torch.cat([x[:, :2] + 5, x[:, 2:] - 5], 1))
    found = pair.mapped([x[0], (x[1],), 3])
    assert torch.equal(found[0], pair.of(x)[0]) and torch.equal(found[1][0], pair.of(x)[1]) and found[2] == 3


def test_a_view_is_another_without_the_rest_of_its_memory() -> None:
    x, other, pair = batch(), torch.zeros(3, 4), twin()
    pair.enter(x, x + 5)
    pair.enter(x[:2], other[:2])
    assert torch.equal(pair.of(x), torch.cat([other[:2], x[2:] + 5]))
    shifted = twin()
    shifted.enter(x[:2], (x + 5)[1:])
    assert torch.equal(shifted.of(x[:2]), (x + 5)[1:])


def test_rows_that_share_their_memory_cannot_be_others() -> None:
    x, pair = torch.ones(1, 4).expand(3, 4), twin()
    pair.enter(x, torch.ones(3, 4))
    assert not pair.broken and pair.of(x) is x
    pair.enter(x, torch.arange(12.0).reshape(3, 4))
    assert pair.broken == "a tensor of the batch is expanded"


def test_conjugates_and_negatives_are_views_of_the_same_memory() -> None:
    x, pair = torch.tensor([1 + 2j, 3 - 1j, 2j]), twin()
    other = x * (2 - 1j)
    pair.enter(x, other)
    assert torch.equal(pair.of(x.conj()).resolve_conj(), other.conj().resolve_conj())
    assert torch.equal(pair.of(x.conj().imag).resolve_neg(), other.conj().imag.resolve_neg())


def test_a_rigid_twin_keeps_whole_numbers_and_looks_up_others() -> None:
    numbers, values, pair = torch.tensor([1, 2, 3]), batch(), twin(rigid=True)
    pair.enter(numbers, numbers * 0)
    pair.enter(values, values + 5)
    assert pair.of(numbers) is numbers and torch.equal(pair.read(numbers), numbers * 0)
    assert torch.equal(pair.of(values), values + 5) and torch.equal(pair.of(values * 1j), values * 1j)
    computed, real = numbers + 1, values + 1
    pair.pair(computed, computed * 0)
    pair.pair(real, real * 0)
    assert memory_of(computed) not in pair and torch.equal(pair.of(real), real * 0)
    loose = twin()
    loose.pair(computed, computed * 0)
    assert torch.equal(loose.of(computed), computed * 0)


def test_shapes_that_follow_the_records_are_followed_view_by_view() -> None:
    x, other, pair = batch(), torch.arange(20.0).reshape(5, 4), twin()
    pair.pair_odd(x, other)
    pair.pair_odd(x[:1], other[:2])
    assert pair.has_odd and pair.is_odd(x) and pair.is_odd(x[1]) and memory_of(x) in pair
    assert pair.of(x) is other and torch.equal(pair.of(x[:1]), other[:2])
    assert not pair.is_odd(batch()) and memory_of(batch()) not in pair
    with pytest.raises(KeyError):  # a view that nobody saw being made
        pair.of(x[1:])
    for unseen in (x.T, x.reshape(4, 3), x.view(torch.int32), x[:1, :2]):
        with pytest.raises(KeyError):
            pair.of(unseen)


def test_memory_that_is_about_to_be_written_gets_a_twin_of_its_own() -> None:
    x, pair = batch(), twin()
    pair.keep_apart(x)
    assert pair.of(x) is not x and torch.equal(pair.of(x), x)
    pair.of(x)[:] = 7
    assert not bool((x == 7).all())
    pair.keep_apart(x)
    assert bool((pair.of(x) == 7).all()), "it has one already"
    rigid, numbers = twin(rigid=True), torch.tensor([1, 2])
    rigid.keep_apart(numbers)
    rigid.keep_apart(x)
    assert memory_of(numbers) not in rigid and memory_of(x) in rigid
    pair.keep_apart(numbers)
    assert memory_of(numbers) in pair


def test_numbers_are_exchanged_for_a_while() -> None:
    x, gone, pair = batch(), torch.ones(3), twin()
    pair.enter(x, x + 5)
    pair.enter(gone, gone + 5)
    del gone

    def fails() -> None:
        assert torch.equal(x, batch() + 5) and torch.equal(pair.of(x), batch())
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        pair.exchanged(fails)
    assert torch.equal(x, batch()) and torch.equal(pair.of(x), batch() + 5)


def test_what_a_rigid_twin_looks_up_is_not_exchanged() -> None:
    numbers, x, pair = torch.tensor([1, 2, 3]), batch(), twin(rigid=True)
    pair.enter(numbers, numbers * 0)
    pair.enter(x, x + 5)
    assert pair.exchanged(lambda: numbers.tolist() == [1, 2, 3] and torch.equal(x, batch() + 5))
    pliant = twin()
    pliant.enter(numbers, numbers * 0)
    assert pliant.exchanged(numbers.tolist) == [0, 0, 0]


def test_twins_of_memory_that_is_gone_are_let_go() -> None:
    x, gone, pair = batch(), batch(), twin()
    pair.enter(x, x + 5)
    pair.enter(gone, gone + 5)
    address = memory_of(gone)
    del gone
    assert address in pair
    pair.let_go()
    assert address not in pair and torch.equal(pair.of(x), x + 5)


@pytest.mark.parametrize("piece", [1, 8, 40, 1 << 20])
def test_numbers_are_exchanged_in_pieces(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PIECE", piece)
    x, pair = batch(), twin()
    pair.enter(x, x + 5)
    assert pair.exchanged(lambda: torch.equal(x, batch() + 5) and torch.equal(pair.of(x), batch()))
    assert torch.equal(x, batch()) and torch.equal(pair.of(x), batch() + 5)


class Full(TorchDispatchMode):
    """Memory for so many tensors more."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room = room

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func._schema.name in ("aten::clone", "aten::empty") and out.numel():
            self.room -= 1
            if self.room < 0:
                raise torch.OutOfMemoryError
        return out


@pytest.mark.parametrize("room", range(8))
def test_without_memory_all_numbers_are_where_they_were(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guarantees: without memory for it, and after an interrupt at any line, all numbers are where they were."""
    monkeypatch.setattr(module, "_PIECE", 16)
    tensors, pair = [batch(), batch() + 50], twin()
    for x in tensors:
        pair.enter(x, x + 5)

    def are_exchanged() -> bool:
        return all(torch.equal(x, batch() + 50 * start + 5) for start, x in enumerate(tensors))

    with Full(room), suppress(torch.OutOfMemoryError):
        assert pair.exchanged(are_exchanged)
    for start, x in enumerate(tensors):
        assert torch.equal(x, batch() + 50 * start) and torch.equal(pair.of(x), x + 5)


def test_a_resized_storage_is_not_exchanged_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PIECE", 16)
    x, pair = batch(), twin()
    pair.enter(x, x + 5)
    x.untyped_storage().resize_(32)
    with pytest.raises(RuntimeError, match="resized"):
        pair.exchanged(lambda: None)
    assert torch.equal(x.as_strided((8,), (1,)), torch.arange(8.0))


@pytest.mark.parametrize("again", [False, True], ids=["one interrupt", "another while numbers are put back"])
def test_after_an_interrupt_at_any_line_all_numbers_are_where_they_were(
    again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A piece that was written on one side only left other records in the batch, for the next sum to be made of."""
    monkeypatch.setattr(module, "_PIECE", 16)
    exchange = module._Exchange
    functions = [Twin.exchanged, exchange.put, exchange.put_back, exchange._turn, exchange._finish]
    made: list[tuple[Tensor, Twin]] = []

    def stop() -> None:
        raise KeyboardInterrupt

    def attempt() -> Callable[[], object]:
        x, pair = batch(), twin()
        pair.enter(x, x + 5)
        made.append((x, pair))
        return lambda: pair.exchanged(stop if again else x.sum)

    places = 0
    for where, let_out in at_every_line(functions[1:] if again else functions, attempt):
        x, pair = made.pop()
        assert let_out, where
        assert torch.equal(x, batch()) and torch.equal(pair.of(x), batch() + 5), where
        places += 1
    assert places > 50
