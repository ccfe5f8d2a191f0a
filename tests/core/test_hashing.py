"""Digests of values: equal for equal content, other for any other content, none of what cannot be looked into."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from clipwise.errors import CheckpointError
from clipwise.hashing import digest, digest_of, joined, whole


@dataclass
class Point:
    x: Any
    y: Any = 0


@dataclass
class Place:
    x: Any
    y: Any = 0


class Plain:
    def __init__(self, **values: Any) -> None:
        vars(self).update(values)


class Image:
    """What images are, as far as a digest goes."""

    def __init__(self, content: bytes, size: tuple[int, int] = (2, 1), mode: str = "L") -> None:
        self.content, self.size, self.mode = content, size, mode

    def tobytes(self) -> bytes:
        return self.content


def nested(depth: int, wrap: Any = lambda inner: [inner]) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = wrap(value)
    return value


def different() -> list[Any]:
    """Values of which no two are the same."""
    objects = np.empty(2, dtype=object)
    objects[:] = [1, "a"]
    return [
        *(1, 2, 1.0, True, 1j, "1", b"1", None, "", b"", np.int64(1), np.float32(1.0)),
        *(torch.ones(2), torch.zeros(2), torch.ones(2, 1), torch.ones(1, 2), torch.ones(2).double(), torch.ones(0)),
        *(torch.ones(0, 2), torch.tensor(1.0), torch.ones(2).int(), torch.tensor(True)),
        *(np.ones(2), np.ones((2, 1)), np.ones(2, np.float32), np.zeros(2), objects, objects[::-1]),
        *([], (), {}, set(), [1], (1,), [[1]], [1, 2], [2, 1], [[1], [2]], [[1, 2], []], [[1, 2]], [1, [2]], [[1], 2]),
        *(("ab", "c"), ("a", "bc"), ("abc",), {"a": 1}, {"a": 2}, {"b": 1}, ["a", 1], {"a": {"b": 1}}, {1: "a"}),
        *({1, 2}, {1, 3}, {1}, {"1"}, {(1,)}, {(1, 2)}, {frozenset({1})}),
        *(Point(1), Point(2), Point(1, 1), Place(1), Plain(x=1, y=0), Plain(x=1), Plain(y=1), Plain(x=2, y=0)),
        *(Image(b"ab"), Image(b"ac"), Image(b"ab", (1, 2)), Image(b"ab", mode="P")),
    ]


def test_equal_values_have_equal_digests_and_no_others_have() -> None:
    found, again = ([digest_of(value) for value in different()] for _ in range(2))
    assert found == again and None not in found
    assert all(len(each) == 16 for each in found)  # type: ignore[arg-type]
    values = different()
    for (i, one), (j, other) in combinations(enumerate(found), 2):
        assert one != other, f"{values[i]!r} and {values[j]!r}"


def test_neither_the_layout_nor_the_order_of_a_set_matters() -> None:
    grid = torch.arange(6.0).reshape(2, 3)
    assert digest_of(grid.t()) == digest_of(grid.t().contiguous()) != digest_of(grid)
    assert digest_of(grid.numpy().T) == digest_of(np.ascontiguousarray(grid.numpy().T))
    assert digest_of({"a", "b", "c"}) == digest_of({"c", "b", "a"}) == digest_of(frozenset("cab"))
    assert digest_of(torch.ones(2, requires_grad=True)) == digest_of(torch.ones(2))
    first, second = Plain(a=1, b=2), Plain(b=2, a=1)
    assert digest_of(first) == digest_of(second)


@pytest.mark.parametrize("value", [iter(()), object(), len, lambda: 1, Point, Plain(), type, range, (1, iter(()))])
def test_what_cannot_be_looked_into_has_no_digest(value: Any) -> None:
    assert digest_of(value) is None and digest_of([value]) is None and digest_of({"a": value}) is None


@pytest.mark.parametrize("error", [RuntimeError, TypeError, ValueError, NotImplementedError])
def test_a_record_that_fails_when_it_is_read_has_no_digest(error: type[Exception]) -> None:
    class Failing(Image):
        def tobytes(self) -> bytes:
            raise error("no")

    assert digest_of(Failing(b"")) is None


@pytest.mark.parametrize("wrap", [lambda x: [x], lambda x: {"a": x}, lambda x: frozenset({x}), Point])
def test_values_are_followed_nineteen_levels_deep(wrap: Any) -> None:
    """So that one which holds itself has an end."""
    assert digest_of(nested(19, wrap)) is not None and digest_of(nested(20, wrap)) is None
    assert digest_of(nested(18, wrap)) != digest_of(nested(19, wrap))
    endless: list[Any] = []
    endless.append(endless)
    assert digest_of(endless) is None


def test_where_parts_end_matters() -> None:
    sets = [[], [b""], [b"", b""], [b"a"], [b"ab", b"c"], [b"a", b"bc"], [b"abc"], [b"1:a"], [b"1", b"a"]]
    assert len({joined(parts) for parts in sets}) == len(sets) and len(joined([])) == 32


def test_a_fingerprint_is_of_structure_types_and_numbers() -> None:
    values = [
        {"w": torch.ones(2)}, {"w": torch.zeros(2)}, {"w": torch.ones(2, 1)}, {"w": torch.ones(2).double()},
        {"v": torch.ones(2)}, [torch.ones(2)], (torch.ones(2),), [torch.ones(2), torch.ones(2)], 1, 1.0, "1",
    ]  # fmt: skip
    found = [digest(value) for value in values]
    assert len(set(found)) == len(values) and all(len(each) == 64 for each in found)
    assert found == [digest(value) for value in values]
    with pytest.raises(CheckpointError, match=r"value\['a'\] is a set"):
        digest({"a": {1}})


def test_a_data_set_in_memory_is_known_by_all_its_tensors() -> None:
    class Augmented(TensorDataset):
        def __getitem__(self, index: int) -> Any:
            return super().__getitem__(index)[0] + 1

    class Named(TensorDataset):
        name = "mine"

    x, y = torch.arange(6.0), torch.arange(6)
    data, changed = TensorDataset(x, y), TensorDataset(x, y.flip(0))
    sets = [data, changed, TensorDataset(x), Subset(data, [0, 2]), Subset(data, [2, 0]), Subset(changed, [0, 2])]
    sets += [Subset(data, range(6)), Subset(Subset(data, [0, 2]), [0])]
    found = [whole(each) for each in sets]
    assert None not in found and len(set(found)) == len(sets)
    assert whole(Named(x, y)) == whole(data) and whole(Subset(data, (0, 2))) == whole(Subset(data, [0, 2]))
    for unknown in (Augmented(x, y), Subset(Augmented(x, y), [0]), ConcatDataset([data, data])):
        assert whole(unknown) is None
