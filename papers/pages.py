"""Pages: their prose is wrapped, and commands write parts of them.

Such a part stands between the lines `<!-- begin NAME -->` and `<!-- end NAME -->`; the rest of the page is written by
hand. `tests/test_documents.py` compares every part with the numbers that it is made from.
"""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
BENCHMARKS = ROOT / "benchmarks" / "README.md"


def put(page: Path, name: str, text: str) -> None:
    """Write the part of a page that has this name."""
    before, _, after = _parted(page, name)
    page.write_text(f"{before}\n\n{wrapped(text)}\n{after}", encoding="utf-8")


def shown(page: Path, name: str) -> str:
    """The part of a page that has this name, as it stands there."""
    return _parted(page, name)[1].strip() + "\n"


def _parted(page: Path, name: str) -> tuple[str, str, str]:
    """What is before it, mark included, the part itself, and what is after."""
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    text = page.read_text(encoding="utf-8")
    if text.count(begin) != 1 or text.count(end) != 1:
        raise ValueError(f"{page} must have the lines {begin} and {end}, each once.")
    before, rest = text.split(begin)
    part, after = rest.split(end)
    return before + begin, part, end + after


def wrapped(text: str) -> str:
    """Prose in lines of 120 characters; tables, figures and headings stay as they are."""
    return "\n\n".join(map(_wrapped, text.rstrip("\n").split("\n\n"))) + "\n"


def _wrapped(block: str) -> str:
    if block.lstrip().startswith(("|", "![", "#")):
        return block
    return "\n".join(
        textwrap.fill(
            " ".join(item.split()),
            120,
            subsequent_indent="  " if item.startswith("- ") else "",
            break_long_words=False,
            break_on_hyphens=False,
        )
        for item in re.split(r"\n(?=- )", block)
    )
