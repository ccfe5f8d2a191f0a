"""What happened over the steps of training: one panel per quantity, one line per arm."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from clipwise.calibration import metric_named
from clipwise.errors import DataError
from clipwise.plots.style import arm_legend, figure, log_axis, look, mark_arm, percent_axis, styled, wrapped
from clipwise.plots.values import Curve

__all__ = ["training_curves"]

_STATISTICS = {
    "epsilon": "Privacy spent (epsilon)",
    "loss": "Training loss",
    "fraction_clipped": "Fraction clipped",
    "norm_median": "Median gradient norm",
    "batch_size": "Realised batch size",
    "bad_samples": "Samples left out",
}
"""What is recorded over the steps besides the metrics."""
_SHARES = {"fraction_clipped"}
_LOGARITHMIC = {"norm_median"}
_COUNTS = {"bad_samples"}
_PER_ROW = 3


@styled
def training_curves(curves: Mapping[str, Mapping[str, Curve]], metrics: Iterable[str] | None = None) -> Any:
    """Lines over the steps: `{label: {metric: curve}}`, a panel per metric and a line per label.

    Where a curve has several seeds, the line is their mean and the band one standard deviation to both sides. Returns
    the matplotlib figure.
    """
    names = list(dict.fromkeys(name for each in curves.values() for name in each) if metrics is None else metrics)
    if not names or not any(name in each for each in curves.values() for name in names):
        raise DataError("there is no curve to draw: no run has recorded these metrics over its steps.")
    columns = min(_PER_ROW, len(names))
    rows = -(-len(names) // columns)
    drawn = figure(3.25 * columns + 0.2, 2.55 * rows + 0.35)
    grid = list(drawn.subplots(rows, columns, squeeze=False).flat)
    for axes, name in zip(grid, names, strict=False):
        for place, each in enumerate(curves.values()):
            if name in each:
                _line(axes, place, each[name])
        axes.set_title(wrapped(_STATISTICS.get(name) or metric_named(name).title), parse_math=False)
        axes.set_xlabel("step")
        axes.margins(x=0.02)
        if name in _SHARES or metric_named(name).share:
            percent_axis(axes.yaxis)
        elif name in _LOGARITHMIC:
            axes.set_yscale("log")
            log_axis(axes.yaxis)
        elif name in _COUNTS:
            axes.set_ylim(0, max(1.0, axes.get_ylim()[1]))
    for axes in grid[len(names) :]:
        axes.set_axis_off()
    if len(curves) > 1 or next(iter(curves)):
        arm_legend(drawn, list(curves))
    return drawn


def _line(axes: Any, place: int, curve: Curve) -> None:
    style = look(place)
    mean = _floats(curve.mean)
    every = max(1, len(mean) // 6)
    (line,) = axes.plot(curve.step, mean, markevery=every, **style.line)
    mark_arm(line, place)
    if curve.low:
        band = axes.fill_between(
            curve.step, _floats(curve.low), _floats(curve.high), color=style.colour, alpha=0.18, linewidth=0
        )
        mark_arm(band, place)


def _floats(values: Iterable[float | None]) -> Any:
    return np.array([np.nan if v is None else v for v in values], dtype=np.float64)
