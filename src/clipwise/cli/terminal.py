"""What several commands take from the terminal and print to it: kinds of values, and tables of plain, aligned text."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Sequence

__all__ = ["Later", "add_show_values", "count", "number", "table"]


def count(text: str) -> int:
    """A whole number of 1 or more.

    >>> count("3")
    3
    """
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return number


def number(text: str) -> float:
    """A number, whole where it is written so.

    >>> number("256"), number("12.5")
    (256, 12.5)
    """
    try:
        return int(text)
    except ValueError:
        return float(text)


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


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1, indent: str = "  ") -> str:
    """Columns as wide as their longest cell; the first `left` of them to the left, the others to the right.

    >>> print(table(["model", "accuracy"], [["non-private", "97.0 %"], ["R = 0.1", "94.7 %"]], indent=""))
    model        accuracy
    -----------  --------
    non-private    97.0 %
    R = 0.1        94.7 %
    """
    widths = [max(len(row[k]) for row in [header, *rows]) for k in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.ljust(width) if k < left else cell.rjust(width)
            for k, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return (indent + "  ".join(padded)).rstrip()

    return "\n".join([line(header), line(["-" * width for width in widths]), *(line(row) for row in rows)])
