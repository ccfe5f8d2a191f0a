"""The figures of a page: one file for those that belong together, as a paper has them."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import matplotlib as mpl

from clipwise import plots
from clipwise.plots.style import INK

_LETTER = f'font-family="Helvetica, Arial, sans-serif" font-size="12" font-weight="bold" fill="{INK}"'
_HEAD = re.compile(r'width="([\d.]+)pt" height="([\d.]+)pt"')
_GAP = 14
"""Points between the rows of a figure."""


def save(folder: Path, name: str, drawn: Any) -> None:
    """A figure as `figures/name.svg`, or rows of several figures in one; equal figures are equal files."""
    path = folder / "figures" / f"{name}.svg"
    path.parent.mkdir(exist_ok=True)
    rows = [each if isinstance(each, (list, tuple)) else [each] for each in drawn] if isinstance(drawn, list) else None
    path.write_text(_svg(drawn, name) if rows is None else _composed(rows, name), encoding="utf-8")


def _svg(drawn: Any, salt: str) -> str:
    file = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": salt}):
        drawn.savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue()


def _composed(rows: Sequence[Sequence[Any]], name: str) -> str:
    """Figures below and beside one another, each with a letter in its upper left corner."""
    letters = iter(ascii_lowercase)
    parts, top, width = [], 0.0, 0.0
    for row in rows:
        left = tall = 0.0
        for drawn in row:
            letter = next(letters)
            text = _svg(drawn, f"{name}-{letter}").split("<svg", 1)[1]
            text = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{letter}-", text)  # an id stands once in a file
            wide, high = map(float, _HEAD.search(text).groups())
            place = f'x="{left:g}" y="{top:g}" width="{wide:g}" height="{high:g}"'
            parts.append("<svg" + _HEAD.sub(place, text, count=1))
            parts.append(f'<text x="{left + 3:g}" y="{top + 13:g}" {_LETTER}>{letter}</text>\n')
            left, tall = left + wide, max(tall, high)
        top, width = top + tall + _GAP, max(width, left)
    whole = f"{width:g}", f"{top - _GAP:g}"
    head = f'width="{whole[0]}pt" height="{whole[1]}pt" viewBox="0 0 {whole[0]} {whole[1]}"'
    white = '<rect width="100%" height="100%" fill="#ffffff"/>\n'
    return f'<svg {head} xmlns="http://www.w3.org/2000/svg" version="1.1">\n{white}{"".join(parts)}</svg>\n'


def figure(folder: Path, name: str, drawn: Any, caption: str) -> str:
    """Save a figure, or rows of them; the lines of the page that show it, with the caption below."""
    save(folder, name, drawn)
    return f"![{caption}](figures/{name}.svg)\n\n*{caption}.*\n"


HISTOGRAMS = "First seed: (a) confidence, (b) probability of the true class"


def histograms(shown: Mapping[str, Any]) -> list[Any]:
    """Rows of a figure: confidence and probability of the true class, a panel for each result."""
    return [plots.confidence_histogram(shown), plots.true_class_histogram(shown)]
