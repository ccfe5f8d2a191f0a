"""What a collate function may make of records: every row of its own record alone, up to padding."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import TensorDataset, default_collate, default_convert

import clipwise as cw
from clipwise.private.evidence.collate import PADDED, check_collate, unchanged_generators

Collate = Callable[[list[Any]], Any]
RANDOM = "the collate function draws random numbers of its own"
STRUCTURE = "the collate function returns another structure for other records"
PACKED = "integers of a packed batch, such as offsets, are not compared"
WHOLE = "whole numbers of the batch, such as lengths, are not compared"


def vectors(n: int = 20) -> TensorDataset:
    """Positive numbers, so that a sum moves with every record; 7 of them, not as many as records are tried."""
    return TensorDataset(1 + torch.rand(n, 7, generator=torch.Generator().manual_seed(0)))


def stacked(records: list[Any]) -> Tensor:
    return torch.stack([record[0] for record in records])


def test_what_torch_collates_with_is_not_tried() -> None:
    class Unreadable(TensorDataset):
        def __getitem__(self, index: int) -> Any:
            raise AssertionError("it was read")

    for collate in (None, default_collate, default_convert):
        assert check_collate(collate, Unreadable(torch.zeros(9, 2))) == ""


@pytest.mark.parametrize("n", [3, 4, 7, 8, 50])
def test_up_to_six_different_records_and_another_one_are_tried(n: int) -> None:
    batches: list[set[float]] = []

    def collate(records: list[Any]) -> Tensor:
        batches.append({float(record[0]) for record in records})
        return stacked(records)

    assert check_collate(collate, TensorDataset(torch.arange(float(n)))) == ""
    count = min(6, n - 1)
    assert {len(batch) for batch in batches} == {count}, "the other record is none of them"
    assert len(set.union(*batches)) == count + 1 and 0.0 in batches[0]


@pytest.mark.parametrize("n", [2, 3])
def test_three_records_are_enough_to_tell(n: int) -> None:
    def collate(records: list[Any]) -> Tensor:
        return stacked(records) - stacked(records).mean(0)

    if n == 2:
        assert check_collate(collate, vectors(n)) == ""
    else:
        with pytest.raises(cw.NotSeparable, match="mixes records"):
            check_collate(collate, vectors(n))


def first_place(records: list[Any]) -> Any:
    x = stacked(records)
    x[-1] += 0.001 * x[0].sum()
    return x


def first_column(records: list[Any]) -> Any:
    x = stacked(records)
    x[:, 0] -= x[:, 0].mean()
    return x


def not_a_number(records: list[Any]) -> Any:
    """The first row is NaN where the second record is the one that takes the others' places."""
    x = stacked(records)
    x[0] = torch.where(torch.equal(x[1], vectors()[17][0]) * torch.ones(7, dtype=torch.bool), torch.nan, x[0])
    return x


MIXING: dict[str, tuple[Collate, str]] = {
    "the last row reads the first": (first_place, "with another record 0, row 5 of tensor 0"),
    "the first column": (first_column, "of tensor 0"),
    "NaN by another record": (not_a_number, "with another record 1, row 0 of tensor 0"),
    "a statistic of its own": (lambda r: (stacked(r), stacked(r).mean(0)), "tensor 1 of its batch"),
    "a statistic without axes": (lambda r: (stacked(r), stacked(r).sum()), "tensor 1 of its batch"),
    "a statistic as an array": (lambda r: (stacked(r), stacked(r).mean(0).numpy()), "tensor 1 of its batch"),
    "a plain number": (lambda r: {"x": stacked(r), "mean": float(stacked(r).mean())}, "a plain number of its batch"),
    "a number of NumPy": (lambda r: (stacked(r), stacked(r).numpy().mean()), "a plain number of its batch"),
    "one of several numbers": (lambda r: (stacked(r), 1.0, float(stacked(r).mean()), 2.0), "a plain number"),
    "integers in rows": (lambda r: stacked(r)[:, 0].argsort().argsort(), "row"),
    "a running sum": (lambda r: (stacked(r), stacked(r).flatten().cumsum(0)), "tensor 1 of its batch"),
    "reversed": (lambda r: stacked(r).flip(0), "with another record 0, row 5 of tensor 0"),
}


@pytest.mark.parametrize(("collate", "what"), MIXING.values(), ids=MIXING)
def test_rows_and_numbers_of_several_records_are_refused(collate: Collate, what: str) -> None:
    with pytest.raises(cw.NotSeparable, match=f"mixes records: .*{what}"):
        check_collate(collate, vectors())


def lengths_of(records: list[Any]) -> list[int]:
    """Two or three numbers, but for the record that takes the others' places, which is the last one that is read."""
    return [6 if torch.equal(record[0], vectors()[17][0]) else 2 + int(record[0][0] * 100) % 2 for record in records]


def padded(records: list[Any], in_front: bool = False) -> Tensor:
    """Records of other lengths, padded to the longest."""
    lengths = lengths_of(records)
    missing = [max(lengths) - length for length in lengths]
    rows = [record[0][:length] for record, length in zip(records, lengths, strict=True)]
    return torch.stack([F.pad(row, (n, 0) if in_front else (0, n)) for row, n in zip(rows, missing, strict=True)])


def padded_in_front(records: list[Any]) -> Tensor:
    return padded(records, in_front=True)


def offsets(records: list[Any]) -> Tensor:
    return torch.tensor([int(record[0][0] * 100) for record in records]).cumsum(0)[:3]


HONEST: dict[str, tuple[Collate, str]] = {
    "rows": (stacked, ""),
    "rows that hold NaN": (lambda r: torch.where(stacked(r) > 1.5, torch.nan, stacked(r)), ""),
    "a list of numbers": (lambda r: [float(record[0].mean()) for record in r], ""),
    "numbers in another order": (lambda r: (stacked(r), *[float(record[0].mean()) for record in r[1:]]), ""),
    "a constant": (lambda r: (stacked(r), torch.tensor(0.3), 0.7, 5, np.float32(2)), ""),
    "one below the other": (lambda r: stacked(r).flatten(), ""),
    "nothing beside": (lambda r: (stacked(r), torch.zeros(0), torch.zeros(0, 3), torch.zeros(6, 0)), ""),
    "padded": (padded, PADDED),
    "padded in front": (padded_in_front, PADDED),
    "offsets of a packed batch": (lambda r: (stacked(r).flatten(), offsets(r)), PACKED),
    "a whole number": (lambda r: (stacked(r), int(stacked(r).sum())), WHOLE),
    "texts": (lambda r: (stacked(r), [str(record[0]) for record in r], "all"), ""),
}


@pytest.mark.parametrize(("collate", "unclear"), HONEST.values(), ids=HONEST)
def test_rows_of_one_record_each_are_honest(collate: Collate, unclear: str) -> None:
    assert check_collate(collate, vectors()) == unclear


def test_padding_in_both_places_hides_no_mixing() -> None:
    for pad in (padded, padded_in_front):

        def collate(records: list[Any], pad: Collate = pad) -> Any:
            x = pad(records)
            return x - x.mean(0)

        with pytest.raises(cw.NotSeparable, match="mixes records"):
            check_collate(collate, vectors())


def test_what_was_unclear_stays_unclear() -> None:
    """A later tensor, or a later record, has nothing to say about an earlier one."""
    assert check_collate(lambda r: (padded(r), stacked(r)), vectors()) == PADDED
    assert check_collate(lambda r: (offsets(r), stacked(r).flatten(), padded(r)), vectors()) == PADDED
    assert check_collate(lambda r: (padded(r), int(stacked(r).sum())), vectors()) == PADDED


OWN_DRAWS: dict[str, Callable[[np.random.Generator], Collate]] = {
    "other values": lambda g: lambda r: stacked(r) + float(g.normal()),
    "other shapes": lambda g: lambda r: F.pad(stacked(r), (0, int(g.integers(1 << 8)))),
    "more tensors": lambda g: lambda r: [stacked(r)] * int(g.integers(1 << 8)),
    "other numbers": lambda g: lambda r: (stacked(r), float(g.normal())),
    "more numbers": lambda g: lambda r: (stacked(r), *[1.0] * int(g.integers(1 << 8))),
}


@pytest.mark.parametrize("draws", OWN_DRAWS.values(), ids=OWN_DRAWS)
def test_a_generator_of_its_own_is_not_checked(draws: Callable[[np.random.Generator], Collate]) -> None:
    assert check_collate(draws(np.random.default_rng(0)), vectors()) == RANDOM


FOLLOWING: dict[str, Callable[[bool], Any]] = {
    "tensors": lambda more: [torch.ones(6)] * (1 + more),
    "numbers": lambda more: [1.0] * (1 + more),
    "whole numbers": lambda more: [1] * (1 + more),
    "axes": lambda more: torch.ones(6, 3)[None if more else ...].transpose(0, -2),
}


@pytest.mark.parametrize("made", FOLLOWING.values(), ids=FOLLOWING)
def test_a_structure_that_follows_the_records_is_not_checked(made: Callable[[bool], Any]) -> None:
    dataset = vectors()
    dataset.tensors[0][17] = 9.0  # the record that takes the others' places
    assert check_collate(lambda r: made(bool((stacked(r) == 9).any())), dataset) == STRUCTURE


def test_mixing_that_is_drawn_now_and_then_is_found() -> None:
    """With the generators at the same place for every call, and at four places."""
    first = {"torch": lambda: float(torch.rand(())), "numpy": np.random.rand, "python": random.random}
    for draw in first.values():

        def collate(records: list[Any], draw: Callable[[], float] = draw) -> Tensor:
            return stacked(records) + (stacked(records).mean() if draw() < 0.5 else 0.0) + draw()

        with pytest.raises(cw.NotSeparable, match="mixes records"):
            check_collate(collate, vectors())
        honest: Collate = lambda r, draw=draw: stacked(r) + draw()  # type: ignore[misc]  # noqa: E731
        assert check_collate(honest, vectors()) == ""


def test_records_and_generators_are_left_as_they_were() -> None:
    dataset = vectors()
    before = dataset.tensors[0].clone()

    def states() -> tuple[Any, ...]:
        return torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()  # type: ignore[index]  # noqa: NPY002

    held = states()
    check_collate(lambda r: [record[0].add_(1) for record in r] and stacked(r), dataset)
    assert torch.equal(dataset.tensors[0], before) and states() == held

    def fails() -> None:
        with unchanged_generators():
            torch.rand(3), np.random.rand(3), random.random()  # noqa: NPY002
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert states() == held


def test_columns_hold_the_records_only_where_there_are_as_many() -> None:
    """As many numbers as records: then each record may have a column, and no column may follow two."""
    square = TensorDataset(1 + torch.rand(20, 6, generator=torch.Generator().manual_seed(0)))
    assert check_collate(lambda r: stacked(r).T, square) == ""
    with pytest.raises(cw.NotSeparable, match="mixes records"):
        check_collate(lambda r: stacked(r).T - stacked(r).T.mean(1, keepdim=True), square)
    with pytest.raises(cw.NotSeparable, match="mixes records"):
        check_collate(lambda r: stacked(r).T.flip(1), square)
