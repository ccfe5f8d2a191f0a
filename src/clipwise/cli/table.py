"""Tables for the terminal: plain text, aligned, nothing to install."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["mebibytes", "table"]


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


def mebibytes(size: int) -> str:
    """A number of bytes for reading.

    >>> mebibytes(3084), mebibytes(44_040_192)
    ('under 0.1 MiB', '42.0 MiB')
    """
    return f"{size / 2**20:,.1f} MiB" if size >= 2**20 / 10 else "under 0.1 MiB"
