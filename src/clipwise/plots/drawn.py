"""The figures that functions return. Imported only where one is drawn, since it needs matplotlib."""

from __future__ import annotations

import io

from matplotlib.figure import Figure

__all__ = ["Drawn"]


class Drawn(Figure):
    """A matplotlib figure that a notebook shows in any cell, also before pyplot was imported."""

    def _repr_png_(self) -> bytes:
        file = io.BytesIO()
        self.savefig(file, format="png", dpi=144)
        return file.getvalue()
