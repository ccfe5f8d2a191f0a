"""Numbers that left the tensors of a batch and remember what they would be with other records.

`.item()` and `x.shape[0]` give plain numbers, which can come back into the losses: `losses / n`. While a forward pass
is watched they are numbers of these classes, which behave as plain ones and carry their twins through arithmetic.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

Plain = int | float


class _Remembering:
    """A number with what it would be in each twin of the watched pass that it came from."""

    twins: tuple[Plain, ...]
    watch: int

    def __reduce__(self) -> tuple[Any, ...]:
        return (int, (int(self),)) if isinstance(self, int) else (float, (float(self),))  # type: ignore[arg-type]


class Whole(_Remembering, int):
    """An integer that came from the batch."""


class Real(_Remembering, float):
    """A floating point number that came from the batch."""


def remembering(value: Plain, twins: tuple[Plain, ...], watch: int) -> Plain:
    """The number, with its twins where they differ from it."""
    if isinstance(value, bool) or all(twin == value for twin in twins):
        return value
    number: Whole | Real = Whole(value) if isinstance(value, int) else Real(value)
    number.twins, number.watch = twins, watch
    return number


def is_remembering(value: Any) -> bool:
    """Whether a number came from a batch."""
    return isinstance(value, _Remembering)


def is_carried(value: Any, watch: int) -> bool:
    """Whether a number came from the batch of an earlier watched pass."""
    return isinstance(value, _Remembering) and value.watch != watch


def twin_of(value: Any, place: int) -> Any:
    """What a number would be in a twin."""
    return value.twins[place] if isinstance(value, _Remembering) and place < len(value.twins) else value


def _carried(apply: Callable[..., Any]) -> Callable[..., Any]:
    def method(*operands: Any) -> Any:
        for operand in operands:
            if not isinstance(operand, (int, float)):
                return NotImplemented
        carried = [operand for operand in operands if isinstance(operand, _Remembering)]
        count, watch = max(len(n.twins) for n in carried), min(n.watch for n in carried)
        plain = [_plain(operand) for operand in operands]
        try:
            twins = tuple(apply(*(_plain(twin_of(operand, k)) for operand in operands)) for k in range(count))
        except (ArithmeticError, ValueError):
            return apply(*plain)
        return remembering(apply(*plain), twins, watch)

    return method


def _plain(value: Any) -> Any:
    if isinstance(value, _Remembering):
        return int(value) if isinstance(value, int) else float(value)  # type: ignore[arg-type]
    return value


_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
for _name in _BINARY:
    _apply: Callable[..., Any] = getattr(operator, _name)
    for _kind in (Whole, Real):
        setattr(_kind, f"__{_name}__", _carried(_apply))
        setattr(_kind, f"__r{_name}__", _carried(lambda a, b, _apply=_apply: _apply(b, a)))
for _name in ("neg", "pos", "abs"):
    for _kind in (Whole, Real):
        setattr(_kind, f"__{_name}__", _carried(getattr(operator, _name)))
