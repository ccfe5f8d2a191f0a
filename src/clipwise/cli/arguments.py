"""Kinds of values that several commands take."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator

__all__ = ["Later", "add_show_values", "count"]


def count(text: str) -> int:
    """A whole number of 1 or more.

    >>> count("3")
    3
    """
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return number


def add_show_values(parser: argparse.ArgumentParser) -> None:
    """Declare the option of commands that read records; `clipwise.cli.main` heeds it."""
    parser.add_argument("--show-values", action="store_true", help="let error messages quote records: private data")


class Later(Iterable[str]):
    """The choices of an option, from the registry that has them, which is imported only when somebody looks.

    >>> "b" in Later(lambda: ("a", "b"))
    True
    """

    def __init__(self, find: Callable[[], Iterable[str]]) -> None:
        self._find = find

    def __iter__(self) -> Iterator[str]:
        return iter(self._find())
