"""Are the probabilities right? Reliability diagrams and histograms, one panel per result, side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from clipwise.errors import DataError
from clipwise.plots.style import (
    GAP,
    INK,
    MUTED,
    NEUTRAL,
    arm_legend,
    figure,
    look,
    mark_arm,
    percent_axis,
    styled,
    wrapped,
)

if TYPE_CHECKING:
    from clipwise.calibration import CalibrationResult

    Results: TypeAlias = CalibrationResult | Mapping[str, CalibrationResult]

__all__ = ["confidence_histogram", "coverage_diagram", "reliability_diagram", "true_class_histogram"]

# Inches; three panels fit the width of a printed page. Fixed places are drawn several times faster than fitted ones.
_WIDTH = 2.55
_FIRST_MARGIN, _MARGIN, _RIGHT, _BOTTOM = 0.74, 0.58, 0.12, 0.5
_STRIP, _STRIP_GAP = 0.24, 0.07  # the strip below a reliability diagram, in heights of the diagram


@styled
def reliability_diagram(results: Results, ax: Any = None, *, first: int = 0, share: float | None = None) -> Any:
    """How often a model is right (line) when it says that it is so sure (axis), with the share of samples below.

    A calibrated model's lines lie on the diagonal. The narrow bar is the gap from accuracy to mean confidence: black
    where the confidence is outside the interval of the bin's accuracy (the band), grey where chance may explain it.
    `results` is one result, or several by label for panels side by side; `first` is the place of the first one's
    colour, and `share` the largest share of samples that the lower scale must hold. Draws in `ax` when given (one
    result only) and returns the matplotlib figure.
    """
    panels = _panels(results)
    top = max(_top_share(result) for _, result in panels) if share is None else share

    def draw(axes: Any, label: str, result: CalibrationResult, colour: str, leftmost: bool) -> None:
        _diagram(axes, result, colour)
        axes.set_title(wrapped(label), parse_math=False)
        _note(axes, f"ECE {100 * result.ece:.1f} %")
        strip = _strip(axes, result, colour, top)
        if leftmost:
            axes.set_ylabel("accuracy")
            strip.set_ylabel("samples")

    return _side_by_side(panels, ax, draw, first, height=1.0, below=_STRIP + _STRIP_GAP)


@styled
def confidence_histogram(results: Results, ax: Any = None, *, first: int = 0) -> Any:
    """How sure a model is: the share of samples by confidence, with mean confidence and accuracy marked.

    The two lines are apart where a model is over- or under-confident on the whole. The share's scale is
    logarithmic. Arguments and result as for `reliability_diagram`.
    """
    panels = _panels(results)

    def draw(axes: Any, label: str, result: CalibrationResult, colour: str, leftmost: bool) -> None:
        _histogram(axes, result.bins.edges, result.bins.count, colour)
        axes.axvline(result.confidence, color=INK, linestyle=(0, (4, 2)), linewidth=1.3, label="mean confidence")
        axes.axvline(result.accuracy, color=GAP, linewidth=1.6, label="accuracy")
        axes.set_title(wrapped(label), parse_math=False)
        axes.set_xlabel("confidence")
        axes.legend(loc="upper left", handlelength=1.4, borderaxespad=0.2)
        if leftmost:
            axes.set_ylabel("share of samples")

    return _side_by_side(panels, ax, draw, first, height=0.85)


@styled
def true_class_histogram(results: Results, ax: Any = None, *, first: int = 0) -> Any:
    """What probability a model gave to the class that was true: mass near 0 is being sure and wrong.

    The share's scale is logarithmic. Arguments and result as for `reliability_diagram`.
    """
    panels = _panels(results)

    def draw(axes: Any, label: str, result: CalibrationResult, colour: str, leftmost: bool) -> None:
        _histogram(axes, result.bins.edges, result.true_class_histogram, colour)
        axes.set_title(wrapped(label), parse_math=False)
        axes.set_xlabel("probability of the true class")
        if leftmost:
            axes.set_ylabel("share of samples")

    return _side_by_side(panels, ax, draw, first, height=0.75)


@styled
def coverage_diagram(coverage: Mapping[str, Mapping[float, float]]) -> Any:
    """How many true values lie in a regression model's intervals, against how many should: `{label: {level: share}}`.

    Below the diagonal the intervals are too narrow. Returns the matplotlib figure.
    """
    if not coverage:
        raise DataError("there is nothing to draw: give {label: {level: share}}.")
    drawn = figure(4.6, 4.2)
    axes = drawn.subplots()
    axes.plot([0, 1], [0, 1], color=MUTED, linestyle=(0, (1, 1.5)), linewidth=1.2)
    for place, shares in enumerate(coverage.values()):
        levels = sorted(shares)
        (line,) = axes.plot(levels, [shares[level] for level in levels], **look(place).line)
        mark_arm(line, place)
    axes.set(xlim=(0, 1), ylim=(0, 1), aspect="equal", xlabel="nominal level", ylabel="share of true values inside")
    percent_axis(axes.xaxis)
    percent_axis(axes.yaxis)
    arm_legend(drawn, list(coverage))
    return drawn


def _panels(results: Results) -> list[tuple[str, CalibrationResult]]:
    if not isinstance(results, Mapping):
        return [("", results)]
    if not results:
        raise DataError("there is nothing to draw: give one result, or {label: result}.")
    return list(results.items())


Draw: TypeAlias = "Callable[[Any, str, CalibrationResult, str, bool], None]"


def _side_by_side(
    panels: Sequence[tuple[str, CalibrationResult]], ax: Any, draw: Draw, first: int, height: float, below: float = 0.0
) -> Any:
    """One panel each, in rows of at most four; `height` and what hangs `below` are in widths of a panel."""
    if ax is not None:
        if len(panels) > 1:
            raise DataError(f"ax holds one panel, but there are {len(panels)} results; leave ax out.")
        draw(ax, *panels[0], look(first).colour, True)
        return ax.figure
    columns = min(4, len(panels))
    rows = -(-len(panels) // columns)
    lines = max(wrapped(label).count("\n") + 1 if label else 0 for label, _ in panels)
    top = 0.1 + 0.19 * lines
    tall = top + (height + below) * _WIDTH + _BOTTOM
    wide = _FIRST_MARGIN + columns * (_WIDTH + _RIGHT) + (columns - 1) * _MARGIN
    drawn = figure(wide, rows * tall, fitted=False)
    for k, (label, result) in enumerate(panels):
        row, column = divmod(k, columns)
        left = _FIRST_MARGIN + column * (_WIDTH + _RIGHT + _MARGIN)
        bottom = (rows - row) * tall - top - height * _WIDTH
        place = (left / wide, bottom / (rows * tall), _WIDTH / wide, height * _WIDTH / (rows * tall))
        draw(drawn.add_axes(place), label, result, look(first + k).colour, column == 0)
    return drawn


def _floats(values: Sequence[float | None]) -> Any:
    return np.array([np.nan if v is None else v for v in values], dtype=np.float64)


def _diagram(axes: Any, result: CalibrationResult, colour: str) -> None:
    bins = result.bins
    full = np.asarray(bins.count) > 0
    left, width = np.asarray(bins.edges[:-1])[full], np.diff(bins.edges)[full]
    accuracy, confidence = _floats(bins.accuracy)[full], _floats(bins.confidence)[full]
    _bars(axes, left, accuracy, width, color=colour, alpha=0.13)
    clear = np.ones(len(left), dtype=bool)
    if bins.accuracy_low:
        low, high = _floats(bins.accuracy_low)[full], _floats(bins.accuracy_high)[full]
        _bars(axes, left, high - low, width, bottom=low, color=colour, alpha=0.3, zorder=2.2)
        clear = (confidence < low) | (confidence > high)
    for which, shade in ((clear, GAP), (~clear, NEUTRAL)):
        gap, start, wide = (confidence - accuracy)[which], left[which] + 0.3 * width[which], 0.4 * width[which]
        _bars(axes, start, gap, wide, bottom=accuracy[which], color=shade, zorder=3)
    axes.hlines(accuracy, left, left + width, color=colour, linewidth=2.2, zorder=3.5)
    axes.plot([0, 1], [0, 1], color=MUTED, linestyle=(0, (1, 1.5)), linewidth=1.2, zorder=4)
    axes.set(xlim=(0, 1), ylim=(0, 1), aspect="equal")
    axes.tick_params(labelbottom=False)


def _strip(axes: Any, result: CalibrationResult, colour: str, share: float) -> Any:
    """The share of samples in each bin, below the diagram and on the same axis."""
    strip = axes.inset_axes((0, -_STRIP - _STRIP_GAP, 1, _STRIP))
    edges, count = np.asarray(result.bins.edges), np.asarray(result.bins.count)
    _bars(strip, edges[:-1], 100 * count / count.sum(), np.diff(edges), color=colour, edgecolor="white", linewidth=0.4)
    strip.set(xlim=(0, 1), ylim=(0, 108 * share), xlabel="confidence")
    strip.yaxis.set_major_formatter("{x:.0f} %")
    strip.locator_params(axis="y", nbins=3)
    return strip


def _bars(axes: Any, left: Any, height: Any, width: Any, bottom: Any = 0.0, **look: Any) -> None:
    """Bars as one collection: a tenth of the artists that `axes.bar` makes, and drawn as much faster."""
    from matplotlib.collections import PolyCollection

    low, right, high = np.broadcast_to(bottom, np.shape(left)), left + width, bottom + height
    corners = np.stack([(left, low), (left, high), (right, high), (right, low)]).transpose(2, 0, 1)
    axes.add_collection(PolyCollection(list(corners), **{"linewidth": 0, **look}))


def _top_share(result: CalibrationResult) -> float:
    return max(result.bins.count) / sum(result.bins.count)


def _histogram(axes: Any, edges: Sequence[float], counts: Sequence[int], colour: str) -> None:
    left, count = np.asarray(edges), np.asarray(counts)
    share, width = 100 * count / count.sum(), np.diff(left)
    _bars(axes, left[:-1], share, width, color=colour, alpha=0.75, edgecolor="white", linewidth=0.6)
    axes.set_yscale("log")
    axes.set_yticks([0.01, 0.1, 1, 10, 100], ["0.01 %", "0.1 %", "1 %", "10 %", "100 %"])
    axes.minorticks_off()
    axes.set(xlim=(0, 1), ylim=(0.01, 130))


def _note(axes: Any, text: str) -> None:
    box = {"boxstyle": "round,pad=0.3", "facecolor": "white", "edgecolor": "none", "alpha": 0.85}
    place = {"transform": axes.transAxes, "va": "top", "zorder": 6}
    axes.text(0.04, 0.95, text, fontsize=10.5, fontweight="bold", bbox=box, **place)
