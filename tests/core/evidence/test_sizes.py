"""Numbers that follow the number of samples, among those that kernels of the batch computed with."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import pytest

import clipwise as cw
from clipwise.private.evidence.sizes import Pass, refuse_sizes

PLACE = (0, "mul.Tensor", "other")
OTHER = (1, "div.Tensor", "other")


def seen(size: int, numbers: float | Mapping[tuple[int, str, str], float] = 1.0, used: str = "") -> Pass:
    """A watched pass over so many samples."""
    given = {PLACE: float(numbers)} if isinstance(numbers, (int, float)) else numbers
    return size, given, frozenset(used.split())


def is_refused(now: Pass, *earlier: Pass) -> bool:
    try:
        refuse_sizes(now, earlier)
    except cw.NotSeparable as error:
        return "number of samples" in str(error)
    return False


@pytest.mark.parametrize("size", [16, 17])
def test_the_size_just_after_it_was_read_is_refused_at_once_where_it_is_large(size: int) -> None:
    assert is_refused(seen(size, used="mul.Tensor")) == (size == 17)
    assert not is_refused(seen(size))


def test_a_small_size_is_refused_when_the_same_kernel_used_two_of_them() -> None:
    now = seen(8, used="mul.Tensor add.Tensor")
    assert is_refused(now, seen(7, used="mul.Tensor"))
    assert not is_refused(now, seen(7, used="div.Tensor"))
    assert not is_refused(now, seen(7))
    assert not is_refused(now, seen(8, used="mul.Tensor")), "a constant may equal one size"


FOLLOWING: dict[str, Callable[[int], float]] = {
    "size": lambda size: 3.0 * size,
    "share": lambda size: 0.4 / size,
    "root": lambda size: math.sqrt(size),
    "one over the root": lambda size: 2 / math.sqrt(size),
    "negative": lambda size: -float(size),
    "rounded as float32 is": lambda size: size * (1 + 1.5e-7 * (size % 2)),
}


@pytest.mark.parametrize("number", FOLLOWING.values(), ids=FOLLOWING)
def test_a_number_that_follows_the_size_is_refused(number: Callable[[int], float]) -> None:
    for size, before in ((8, 7), (7, 8), (97, 100)):
        assert is_refused(seen(size, number(size)), seen(before, number(before)))
        assert not is_refused(seen(size, number(size)), seen(size, number(before))), "the sizes are equal"


NOT_FOLLOWING: dict[str, tuple[float, float]] = {
    "the same": (8.0, 8.0),
    "from zero": (8.0, 0.0),
    "to zero": (0.0, 7.0),
    "other sign": (8.0, -7.0),
    "infinite": (math.inf, 7.0),
    "not a number": (math.nan, 7.0),
    "square": (64.0, 49.0),
    "ten times the size": (80.0, 7.0),
    "five roots": ((8 / 7) ** 5.0, 1.0),
    "one over five roots": ((7 / 8) ** 5.0, 1.0),
    "ten sizes": ((8 / 7) ** 10.0, 1.0),
    "one over ten sizes": ((7 / 8) ** 10.0, 1.0),
    "nearly": (8.0 * (1 + 2e-6), 7.0),
}


@pytest.mark.parametrize(("value", "before"), NOT_FOLLOWING.values(), ids=NOT_FOLLOWING)
def test_other_numbers_do_not_follow_the_size(value: float, before: float) -> None:
    assert not is_refused(seen(8, value), seen(7, before))


def test_sizes_that_grow_as_schedules_do_must_be_followed_twice() -> None:
    """A weight of (step + 1) / 10 doubles as well; 7 to 6 is not such a ratio, 6 to 5 is."""
    assert is_refused(seen(7, 7), seen(6, 6)) and is_refused(seen(6, 6), seen(7, 7))
    assert not is_refused(seen(6, 6), seen(5, 5)) and not is_refused(seen(5, 5), seen(6, 6))
    assert is_refused(seen(6, 6), seen(5, 5), seen(4, 4))
    assert not is_refused(seen(6, 6), seen(5, 5), seen(4, 11))


def test_one_place_that_follows_is_enough() -> None:
    def numbers(size: int, other: float) -> Mapping[tuple[int, str, str], float]:
        return {PLACE: float(size), OTHER: other}

    assert is_refused(seen(6, numbers(6, 6.0)), seen(5, numbers(5, 5.0)), seen(4, numbers(4, 1.0)))
    assert is_refused(seen(8, numbers(8, 1.0)), seen(7, numbers(7, 1.0)))


def test_another_program_has_other_places() -> None:
    assert not is_refused(seen(8, 8), seen(7, {PLACE: 7.0, OTHER: 1.0}))
    assert not is_refused(seen(8, {PLACE: 8.0, OTHER: 1.0}), seen(7, 7))
    assert is_refused(seen(8, 8), seen(7, {PLACE: 7.0, OTHER: 1.0}), seen(6, 6), seen(5, 5)), "the others are compared"
