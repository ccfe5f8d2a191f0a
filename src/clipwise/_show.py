"""Numbers and values as people see them: text in tables and sentences, HTML in notebooks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape

__all__ = ["html_table", "mebibytes", "number", "percent"]


def number(value: float) -> str:
    """Three decimals, or four digits for large numbers and two for tiny ones.

    >>> number(0.29731), number(0.0), number(12345.6), number(float("inf"))
    ('0.297', '0.000', '1.235e+04', 'infinite')
    """
    if not math.isfinite(value):
        return "infinite" if value > 0 else "not a number"
    if value == 0 or 0.001 <= abs(value) < 1000:
        return f"{value:.3f}"
    return f"{value:.4g}" if abs(value) >= 1000 else f"{value:.2g}"


def percent(share: float, digits: int = 1) -> str:
    """A share in per cent.

    >>> percent(0.9402)
    '94.0 %'
    """
    return f"{100 * share:.{digits}f} %"


def mebibytes(size: int) -> str:
    """A number of bytes for reading.

    >>> mebibytes(3084), mebibytes(44_040_192)
    ('under 0.1 MiB', '42.0 MiB')
    """
    return f"{size / 2**20:,.1f} MiB" if size >= 2**20 / 10 else "under 0.1 MiB"


def html_table(title: str, rows: Iterable[Sequence[str]], header: Sequence[str] = (), notes: Iterable[str] = ()) -> str:
    """A table for a notebook, in the notebook's own colours; the first cell of a row is its heading.

    >>> html_table("Plan", [("steps", "5")], notes=["R < 1"])
    '<table><caption>Plan</caption><tbody><tr>...steps</th>...5</td></tr></tbody></table><p>R &lt; 1</p>'
    """
    left = 'style="text-align:left"'
    head = "".join(f'<th scope="col" {left}>{escape(name)}</th>' for name in header)
    lines = [
        f'<tr><th scope="row" {left}>{escape(row[0])}</th>'
        + "".join(f"<td {left}>{escape(cell)}</td>" for cell in row[1:])
        + "</tr>"
        for row in rows
    ]
    return (
        f"<table><caption>{escape(title)}</caption>"
        + (f"<thead><tr>{head}</tr></thead>" if head else "")
        + f"<tbody>{''.join(lines)}</tbody></table>"
        + "".join(f"<p>{escape(note)}</p>" for note in notes)
    )
