"""Kinds of values that several commands take."""

from __future__ import annotations

import argparse

__all__ = ["count"]


def count(text: str) -> int:
    """A whole number of 1 or more.

    >>> count("3")
    3
    """
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return number
