"""What counts as a number in an argument (True and False do not, though Python takes them for 1 and 0), and a name."""

from __future__ import annotations

import sys
import unicodedata
from typing import TypeGuard

__all__ = ["MOST_NOISE", "is_count", "is_finite", "is_line", "is_noise", "is_number", "is_positive"]

MOST_NOISE = 1e30
"""The largest noise multiplier; nothing is left of a gradient long before."""


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value is an int or a float (NaN and infinity included), and not a bool.

    >>> is_number(2), is_number(0.5), is_number(True), is_number("2")
    (True, True, False, False)
    """
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_finite(value: object) -> TypeGuard[float]:
    """Whether a value is a number that a float can hold.

    >>> is_finite(-1), is_finite(10**400), is_finite(float("inf")), is_finite(float("nan"))
    (True, False, False, False)
    """
    return is_number(value) and abs(value) <= sys.float_info.max


def is_positive(value: object) -> TypeGuard[float]:
    """Whether a value is a finite number greater than 0.

    >>> is_positive(0.5), is_positive(0), is_positive(float("inf"))
    (True, False, False)
    """
    return is_finite(value) and value > 0


def is_count(value: object, least: int = 1) -> TypeGuard[int]:
    """Whether a value is an integer of at least `least`, and not a bool.

    >>> is_count(1), is_count(0), is_count(0, least=0), is_count(1.0), is_count(True)
    (True, False, True, False, False)
    """
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_noise(value: object) -> TypeGuard[float]:
    """Whether a value is a noise multiplier: 0, or a number that neither an accountant nor float32 overflows with.

    >>> is_noise(1.1), is_noise(0), is_noise(-1), is_noise(1e300)
    (True, True, False, False)
    """
    return is_finite(value) and 0 <= value <= MOST_NOISE


def is_line(text: str) -> bool:
    r"""Whether a text has no control characters, line breaks or halves of characters: it can be printed as it is.

    >>> is_line("R = 1, é"), is_line("a\x1b[2J"), is_line("a\u202eb")
    (True, False, False)
    """
    return not any(unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp") for character in text)
