"""Tables for the terminal: plain text, aligned, nothing to install."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["table"]


def table(header: Sequence[str], rows: Sequence[Sequence[str]], indent: str = "  ") -> str:
    """Columns as wide as their longest cell; the first one to the left, the others to the right.

    >>> print(table(["model", "accuracy"], [["non-private", "97.0 %"], ["R = 0.1", "94.7 %"]], indent=""))
    model        accuracy
    -----------  --------
    non-private    97.0 %
    R = 0.1        94.7 %
    """
    widths = [max(len(row[k]) for row in [header, *rows]) for k in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        first, *others = zip(cells, widths, strict=True)
        padded = [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]
        return (indent + "  ".join(padded)).rstrip()

    return "\n".join([line(header), line(["-" * width for width in widths]), *(line(row) for row in rows)])
