"""What happened over the steps of training, one panel per quantity; and over clipping norms and learning rates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from clipwise.calibration import Estimate, metric_named
from clipwise.errors import DataError
from clipwise.plots.style import (
    INK,
    NEUTRAL,
    arm_legend,
    figure,
    log_axis,
    look,
    mark_arm,
    percent_axis,
    styled,
    wrapped,
)

__all__ = ["Curve", "Point", "accuracy_calibration", "heat_map", "training_curves"]


@dataclass(frozen=True)
class Curve:
    """A quantity over the steps of training: mean over the seeds, and one deviation to both sides when several."""

    step: tuple[float, ...]
    mean: tuple[float | None, ...]
    low: tuple[float | None, ...] = ()
    high: tuple[float | None, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The curve as a JSON object."""
        return {name: list(getattr(self, name)) for name in ("step", "mean", "low", "high")}


@dataclass(frozen=True)
class Point:
    """Where an arm lies among others: what was chosen, and what came out."""

    name: str
    clip_norm: float | None
    learning_rate: float | None
    metrics: Mapping[str, Estimate]

    def to_dict(self) -> dict[str, Any]:
        """The point as a JSON object."""
        chosen = {"name": self.name, "clip_norm": self.clip_norm, "learning_rate": self.learning_rate}
        return {**chosen, "metrics": {name: value.to_dict() for name, value in self.metrics.items()}}


_STATISTICS = {
    "epsilon": "Privacy spent (epsilon)",
    "clipping_norm": "Clipping norm R",
    "loss": "Training loss",
    "fraction_clipped": "Fraction clipped",
    "norm_median": "Median gradient norm",
    "batch_size": "Realised batch size",
    "bad_samples": "Samples left out",
}
"""What is recorded over the steps besides the metrics."""
_SHARES = {"fraction_clipped"}
_LOGARITHMIC = {"clipping_norm", "norm_median"}
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
            if name in _SHARES:
                axes.set_ylim(0, min(1.05, max(0.1, axes.get_ylim()[1])))  # of zeros alone it would begin below zero
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


@styled
def accuracy_calibration(points: Sequence[Point]) -> Any:
    """Three panels: accuracy over R, ECE over R, and one against the other, where the best corner is the upper left.

    A point without a single R (not private, or a schedule) is a dashed level in the first two panels. Whiskers are the
    points' intervals. Returns the matplotlib figure.
    """
    if not points:
        raise DataError("there is nothing to draw: give at least one point.")
    drawn = figure(9.95, 3.3)
    over_accuracy, over_ece, against = drawn.subplots(1, 3)
    for axes, metric in ((over_accuracy, "accuracy"), (over_ece, "ece")):
        _over_norm(axes, points, metric)
    for place, point in enumerate(points):
        style = look(place)
        x, y = point.metrics["ece"], point.metrics["accuracy"]
        whiskers = against.errorbar(
            x.mean, y.mean, _whisker(y), _whisker(x), color=style.colour, marker=style.mark, ms=7
        )
        _mark(whiskers, place)
    against.set(title="Accuracy against calibration", xlabel="ECE (smaller is better)", ylabel="accuracy")
    against.margins(x=0.2, y=0.2)
    percent_axis(against.xaxis)
    percent_axis(against.yaxis)
    arm_legend(drawn, [point.name for point in points])
    return drawn


def _over_norm(axes: Any, points: Sequence[Point], metric: str) -> None:
    placed = [(point.clip_norm, point.metrics[metric].mean) for point in points if point.clip_norm is not None]
    if len({norm for norm, _ in placed}) == len(placed):
        line = sorted(placed)
        axes.plot([norm for norm, _ in line], [mean for _, mean in line], color=NEUTRAL, linewidth=1.1, zorder=1.5)
    for place, point in enumerate(points):
        style, value = look(place), point.metrics[metric]
        if point.clip_norm is None:
            level = axes.axhline(value.mean, color=style.colour, linestyle=(0, (4, 2)), linewidth=1.4)
            mark_arm(level, place)
        else:
            _mark(
                axes.errorbar(
                    point.clip_norm, value.mean, _whisker(value), color=style.colour, marker=style.mark, ms=7
                ),
                place,
            )
    axes.set_xscale("log")
    norms = sorted({norm for norm, _ in placed})
    if norms:
        axes.set_xlim(norms[0] / 1.8, norms[-1] * 1.8)
        axes.set_xticks(norms, [f"{norm:g}" for norm in norms])
        axes.minorticks_off()
    axes.set(title=metric_named(metric).title, xlabel="clipping norm R")
    axes.margins(y=0.2)
    percent_axis(axes.yaxis)


def _whisker(value: Estimate) -> Any:
    if value.low is None or value.high is None:
        return None
    return [[value.mean - value.low], [value.high - value.mean]]


def _mark(container: Any, place: int) -> None:
    line, caps, bars = container
    for artist in (line, *caps, *bars):
        mark_arm(artist, place)


@styled
def heat_map(points: Sequence[Point], metrics: Sequence[str] = ("accuracy", "ece")) -> Any:
    """A map per metric with R to the right and the learning rate upwards; light cells are better.

    Every point needs an R and a learning rate, each pair once. Returns the matplotlib figure.
    """
    cells = {
        (p.clip_norm, p.learning_rate): p for p in points if p.clip_norm is not None and p.learning_rate is not None
    }
    if not cells or len(cells) < len(points):
        raise DataError(
            f"a heat map needs points with an R and a learning rate, each pair once; {len(cells)} of {len(points)} are."
        )
    norms = sorted({norm for norm, _ in cells})
    rates = sorted({rate for _, rate in cells})
    drawn = figure((0.72 * len(norms) + 1.6) * len(metrics), 0.5 * len(rates) + 1.3)
    for axes, metric in zip(drawn.subplots(1, len(metrics), squeeze=False).flat, metrics, strict=True):
        grid = np.full((len(rates), len(norms)), np.nan)
        for (norm, rate), point in cells.items():
            grid[rates.index(rate), norms.index(norm)] = point.metrics[metric].mean
        _map(axes, grid, metric)
        axes.set_xticks(range(len(norms)), [f"{norm:g}" for norm in norms])
        axes.set_yticks(range(len(rates)), [f"{rate:g}" for rate in rates])
        axes.set(title=metric_named(metric).title, xlabel="clipping norm R", ylabel="learning rate")
    return drawn


def _map(axes: Any, grid: Any, metric: str) -> None:
    colours = "cividis_r" if metric_named(metric).better == "smaller" else "cividis"
    image = axes.imshow(grid, cmap=colours, aspect="auto", origin="lower")
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    for (row, column), value in np.ndenumerate(grid):
        if np.isfinite(value):
            text = f"{100 * value:.1f}" if metric_named(metric).share else f"{value:.3g}"
            red, green, blue, _ = image.cmap(image.norm(value))
            dark = 0.3 * red + 0.59 * green + 0.11 * blue < 0.5
            axes.text(column, row, text, ha="center", va="center", fontsize=8.5, color="white" if dark else INK)
