"""How every figure looks: a colour-blind safe palette, marks that differ without colour, sizes that survive print."""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from clipwise._extras import need

__all__ = [
    "GAP",
    "GRID",
    "INK",
    "MUTED",
    "NEUTRAL",
    "Look",
    "arm_legend",
    "figure",
    "log_axis",
    "look",
    "mark_arm",
    "percent_axis",
    "styled",
    "svg",
    "wrapped",
]

P = ParamSpec("P")
T = TypeVar("T")

INK = "#1f2430"
MUTED = "#5b6472"
GRID = "#e3e6eb"
NEUTRAL = "#9aa3b0"
GAP = "#1f2430"

_SETTINGS = {
    "axes.axisbelow": True,
    "axes.edgecolor": NEUTRAL,
    "axes.grid": True,
    "axes.labelcolor": INK,
    "axes.labelsize": 9.5,
    "axes.linewidth": 0.8,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlecolor": INK,
    "axes.titlelocation": "left",
    "axes.titlepad": 9.0,
    "axes.titlesize": 11.0,
    "axes.titleweight": "bold",
    "font.family": "sans-serif",
    "font.sans-serif": ["Helvetica Neue", "Helvetica", "Arial", "Liberation Sans", "DejaVu Sans"],
    "font.size": 9.5,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "hatch.linewidth": 0.7,
    "legend.fontsize": 9.0,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "lines.markersize": 5.0,
    "savefig.bbox": "standard",
    "svg.fonttype": "none",
    "svg.hashsalt": "clipwise",
    "text.color": INK,
    "xtick.color": MUTED,
    "xtick.labelsize": 8.5,
    "ytick.color": MUTED,
    "ytick.labelsize": 8.5,
}


@dataclass(frozen=True)
class Look:
    """How one arm of a comparison is drawn; marks and dashes tell arms apart where colours do not."""

    colour: str
    mark: str
    dashes: tuple[float, ...]

    @property
    def line(self) -> dict[str, Any]:
        """The look as arguments of a line."""
        return {"color": self.colour, "marker": self.mark, "linestyle": (0, self.dashes) if self.dashes else "-"}


# Okabe and Ito (2008), without the yellow that vanishes on white.
_LOOKS = (
    Look("#0072B2", "o", ()),
    Look("#D55E00", "s", (5, 1.5)),
    Look("#009E73", "^", (1.5, 1.2)),
    Look("#CC79A7", "D", (6, 1.5, 1.5, 1.5)),
    Look("#E69F00", "v", (3, 1)),
    Look("#56B4E9", "P", (8, 2)),
    Look("#5b6472", "X", (1, 1)),
)


def look(place: int) -> Look:
    """The look of the arm in this place; beyond seven they come again.

    >>> look(0).colour, look(7) == look(0)
    ('#0072B2', True)
    """
    return _LOOKS[place % len(_LOOKS)]


def _matplotlib() -> Any:
    need("plots", "a figure")
    import matplotlib as mpl

    return mpl


def styled(draw: Callable[P, T]) -> Callable[P, T]:
    """A drawing function under this module's settings, whatever the user's own are; those are left as they were."""

    @wraps(draw)
    def with_style(*args: P.args, **kwargs: P.kwargs) -> T:
        with _matplotlib().rc_context(_SETTINGS):
            return draw(*args, **kwargs)

    return with_style


def mark_arm(artist: Any, place: int) -> None:
    """Name an artist after its arm, so that a page can find and hide it."""
    artist.set_gid(f"arm-{place}")


def arm_legend(drawn: Any, labels: Sequence[str]) -> None:
    """Name the arms below the figure."""
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], **look(place).line) for place in range(len(labels))]
    blank = ["x" * min(len(label), 40) for label in labels]  # the layout asks for the widths of texts
    entry = (0.55 * max(map(len, blank), default=0) + 5.5) * 9.0 / 72  # inches: text, line and gaps at this font
    columns = max(1, min(4, len(labels), int(drawn.get_figwidth() / entry)))
    legend = drawn.legend(handles, blank, loc="outside lower center", ncols=columns, handlelength=2.6, labelcolor=MUTED)
    for text, label in zip(legend.get_texts(), labels, strict=True):
        # Set like this, a label may begin with an underscore and hold dollar signs.
        text.set_parse_math(False)
        text.set_text(wrapped(label))


def wrapped(label: str, width: int = 32) -> str:
    r"""A label in lines that are not longer than a panel is wide.

    >>> wrapped("a small network with a large clipping norm")
    'a small network with a large\nclipping norm'
    """
    return textwrap.fill(label, width)


def percent_axis(axis: Any) -> None:
    """Show the shares on an axis in per cent."""
    axis.set_major_formatter(lambda share, _: f"{round(100 * share, 6):g} %")


def log_axis(axis: Any) -> None:
    """Plain numbers at 1, 2 and 5 of each power of ten."""
    from matplotlib.ticker import LogLocator, NullLocator

    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter("{x:g}")


def figure(width: float, height: float, fitted: bool = True) -> Any:
    """An empty figure that knows of no window, so nothing has to be closed; `fitted` moves axes to where labels fit."""
    _matplotlib()
    from clipwise.plots.drawn import Drawn

    return Drawn(figsize=(width, height), layout="constrained" if fitted else None)


@styled
def svg(drawn: Any, name: str = "figure") -> str:
    """A figure as an SVG element to stand inside a page among others: its ids begin with `name`, words stay words.

    What `mark_arm` named has an attribute data-arm. Equal figures give equal text.
    """
    file = io.StringIO()
    drawn.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = file.getvalue()[file.getvalue().index("<svg") :]
    text = re.sub(r'\bid="arm-(\d+)"', r'data-arm="\1"', text)
    return re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", text)
