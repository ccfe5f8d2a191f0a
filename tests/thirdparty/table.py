"""The table: all rows by family. Importing it imports no package but torch."""

from __future__ import annotations

import importlib

from .row import Row

FAMILIES = (
    "diffusion",
    "geometric",
    "sequence",
    "tables",
    "transformers_other",
    "transformers_text",
    "vision",
)


def rows(family: str) -> list[Row]:
    """The rows of one family."""
    found: list[Row] = importlib.import_module(f"{__package__}.models_{family}").ROWS
    return found


def table() -> dict[str, list[Row]]:
    """Family -> rows."""
    return {family: rows(family) for family in FAMILIES}
