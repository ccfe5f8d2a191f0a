"""The number of samples is private where batches are drawn at random: losses must not be scaled by it.

Plain numbers carry no mark. But a number that follows the batch size from one watched pass to another gives itself
away, and so does one that equals it just after a shape of the batch was read.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import TypeAlias

from clipwise.errors import NotSeparable

Pass: TypeAlias = tuple[int, Mapping[tuple[int, str, str], float], frozenset[str]]  # size, numbers by place, uses

_LARGE = 16  # a constant that happens to equal a larger size just after it was read is not likely
_POWERS = (1.0, -1.0, 0.5, -0.5)
_SIMPLE = 6  # schedules such as (step + 1) / 10 grow by 2, 3 / 2, ... and sizes may do so by chance
_ROUNDING = 4e-7  # of numbers that are tensors in float32


def refuse_sizes(now: Pass, earlier: Sequence[Pass]) -> None:
    """Refuse numbers that follow the number of samples."""
    size, numbers, used = now
    if used and size > _LARGE:
        raise _scaled(min(used))
    followed: Counter[tuple[int, str, str]] = Counter()
    for other_size, others, other_used in earlier:
        if other_size == size:
            continue
        if used & other_used:
            raise _scaled(min(used & other_used))
        if others.keys() != numbers.keys():
            continue  # another program: what is in one place is not the same number
        ratio = Fraction(size, other_size)
        sure = max(ratio.numerator, ratio.denominator) > _SIMPLE
        for place, value in numbers.items():
            before = others.get(place)
            if before is not None and before != value and _follows(value, before, float(ratio)):
                followed[place] += 2 if sure else 1
    if followed and max(followed.values()) > 1:
        raise _scaled(followed.most_common(1)[0][0][1])


def _follows(value: float, before: float, ratio: float) -> bool:
    return bool(before) and any(math.isclose(value / before, ratio**power, rel_tol=_ROUNDING) for power in _POWERS)


def _scaled(kernel: str) -> NotSeparable:
    return NotSeparable(
        f"the losses are scaled by the number of samples in the batch ({kernel}), which is private: with one sample "
        "more or less every other gradient changes. Private divides by the expected batch size itself: leave the "
        "losses as they are, one per sample, or divide by a public number."
    )
