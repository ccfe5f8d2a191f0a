"""Figures show the values they are given, tell arms apart without colour, and leave the user's settings alone."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest

import clipwise as cw
from clipwise import plots
from clipwise.accounting import privacy_curve
from clipwise.errors import DataError, MissingExtra
from clipwise.plots import Curve
from clipwise.plots.style import look, svg
from clipwise.report import arms_of
from tests.ntk.common import problem
from tests.report.samples import comparison, judged, ledger, made_run

RESULTS = {"not private": judged(0, 1.2), "R = 1": judged(1, 2.0), "R = 10": judged(2, 1.0)}
ONE = RESULTS["R = 1"]
CALIBRATION = (plots.reliability_diagram, plots.confidence_histogram, plots.true_class_histogram)


def heights(axes: Any, collection: int) -> Any:
    """The heights of the bars of a panel."""
    corners = np.array([path.vertices[:4] for path in axes.collections[collection].get_paths()])
    return corners[:, 1, 1] - corners[:, 0, 1]


def test_the_reliability_diagram_shows_accuracy_gap_band_and_counts() -> None:
    axes = plots.reliability_diagram(ONE).axes[0]
    full = np.array(ONE.bins.count) > 0

    def values(name: str) -> Any:
        return np.array(getattr(ONE.bins, name), dtype=np.float64)[full]

    assert heights(axes, 0) == pytest.approx(values("accuracy"))
    assert heights(axes, 1) == pytest.approx(values("accuracy_high") - values("accuracy_low"))
    clear = (values("confidence") < values("accuracy_low")) | (values("confidence") > values("accuracy_high"))
    assert 0 < clear.sum() < len(clear), "some gaps are more than chance, some are not"
    assert heights(axes, 2) == pytest.approx(values("gap")[clear])
    assert heights(axes, 3) == pytest.approx(values("gap")[~clear])
    (strip,) = axes.child_axes
    assert heights(strip, 0) == pytest.approx(100 * np.array(ONE.bins.count) / ONE.count)
    assert any(f"{100 * ONE.ece:.1f}" in text.get_text() for text in axes.texts)


def test_histograms_show_shares_of_the_samples() -> None:
    counts = {plots.confidence_histogram: ONE.bins.count, plots.true_class_histogram: ONE.true_class_histogram}
    for draw, expected in counts.items():
        axes = draw(ONE).axes[0]
        assert heights(axes, 0) == pytest.approx(100 * np.array(expected) / ONE.count)
    marked = [line.get_xdata()[0] for line in plots.confidence_histogram(ONE).axes[0].lines]
    assert marked == [ONE.confidence, ONE.accuracy]


@pytest.mark.parametrize("draw", CALIBRATION)
def test_several_results_stand_side_by_side(draw: Callable[..., Any]) -> None:
    drawn = draw(RESULTS)
    assert [axes.get_title(loc="left") for axes in drawn.axes] == list(RESULTS)
    assert len({axes.get_position().x0 for axes in drawn.axes}) == 3
    assert len(draw({str(k): ONE for k in range(6)}).axes) == 6


@pytest.mark.parametrize("draw", CALIBRATION)
def test_a_panel_can_be_drawn_in_axes_of_the_users(draw: Callable[..., Any]) -> None:
    from matplotlib.figure import Figure

    figure = Figure()
    axes = figure.subplots()
    assert draw(ONE, ax=axes) is figure
    assert axes.collections
    with pytest.raises(DataError, match="one panel"):
        draw(RESULTS, ax=axes)
    with pytest.raises(DataError, match="nothing to draw"):
        draw({})


def test_a_notebook_shows_a_figure_without_pyplot() -> None:
    drawn = plots.reliability_diagram(ONE)
    assert drawn._repr_png_().startswith(b"\x89PNG")


def test_empty_bins_are_left_empty() -> None:
    certain = judged(0, 50.0)
    assert heights(plots.reliability_diagram(certain).axes[0], 0).size == sum(n > 0 for n in certain.bins.count)


def test_a_share_of_nothing_is_drawn_from_zero_upwards() -> None:
    drawn = plots.training_curves({"a": {"fraction_clipped": Curve((0.0, 1.0), (0.0, 0.0))}})
    assert drawn.axes[0].get_ylim() == (0, 0.1)
    drawn = plots.training_curves({"a": {"fraction_clipped": Curve((0.0, 1.0), (0.2, 1.0))}})
    assert drawn.axes[0].get_ylim()[0] == 0 and 1.0 < drawn.axes[0].get_ylim()[1] <= 1.05


def test_training_curves_have_a_panel_per_metric_and_a_line_per_arm() -> None:
    arms = arms_of(comparison(seeds=2))
    curves = {arm.name: {name: arm.curve("test", name) for name in ("accuracy", "ece")} for arm in arms}
    drawn = plots.training_curves(curves)
    assert [axes.get_title(loc="left") for axes in drawn.axes] == ["Accuracy", "Calibration error (ECE)"]
    for axes, name in zip(drawn.axes, ("accuracy", "ece"), strict=True):
        for line, each in zip(axes.lines, curves.values(), strict=True):
            assert line.get_ydata() == pytest.approx(each[name].mean)
        assert len(axes.collections) == 3, "a band of one deviation for each"
    assert len({line.get_marker() for line in drawn.axes[0].lines}) == 3
    assert [text.get_text() for text in drawn.legends[0].get_texts()] == list(curves)


def test_a_curve_with_gaps_is_drawn_with_gaps() -> None:
    drawn = plots.training_curves({"": {"loss": Curve((0.0, 1.0, 2.0), (1.0, None, 0.5))}})
    assert np.isnan(drawn.axes[0].lines[0].get_ydata()[1]) and not drawn.legends
    with pytest.raises(DataError, match="no curve"):
        plots.training_curves({"a": {}})


def test_accuracy_and_calibration_over_the_clipping_norm() -> None:
    points = [arm.point for arm in arms_of(comparison(seeds=2))]
    over_accuracy, over_ece, against = plots.accuracy_calibration(points).axes
    placed = {p.clip_norm: p.metrics["ece"].mean for p in points if p.clip_norm is not None}
    line = over_ece.lines[0]
    assert dict(zip(line.get_xdata(), line.get_ydata(), strict=True)) == pytest.approx(placed)
    assert over_accuracy.get_xscale() == "log"
    marks = {(float(c.lines[0].get_xdata()[0]), float(c.lines[0].get_ydata()[0])) for c in against.containers}
    assert marks == {(p.metrics["ece"].mean, p.metrics["accuracy"].mean) for p in points}
    with pytest.raises(DataError):
        plots.accuracy_calibration([])


def test_a_heat_map_has_a_cell_for_every_pair() -> None:
    grid = [made_run(f"{r:g}/{lr:g}", r, 1 + r / 20, learning_rate=lr) for r in (1.0, 10.0) for lr in (0.1, 0.5, 1.0)]
    points = [arm.point for arm in arms_of(grid)]
    left, right = plots.heat_map(points).axes
    assert left.images[0].get_array().shape == (3, 2)
    assert right.images[0].get_array()[2, 1] == pytest.approx(points[-1].metrics["ece"].mean)
    assert len(left.texts) == 6
    with pytest.raises(DataError, match="each pair once"):
        plots.heat_map([points[0], points[0]])


def test_coverage_lies_on_the_diagonal_when_right() -> None:
    axes = plots.coverage_diagram({"right": {0.5: 0.5, 0.9: 0.9}}).axes[0]
    assert list(axes.lines[1].get_xdata()) == list(axes.lines[1].get_ydata()) == [0.5, 0.9]
    with pytest.raises(DataError):
        plots.coverage_diagram({})


def test_the_privacy_curve_marks_delta() -> None:
    drawn = plots.privacy_curves(privacy_curve(ledger().events, count=6), delta=1e-5)
    assert any(list(line.get_ydata()) == [1e-5, 1e-5] for line in drawn.axes[0].lines)


def test_correlated_noise_is_drawn_with_its_coefficients_and_their_inverse() -> None:
    column = cw.SquareRoot(5).coefficients(30)
    left = {"this": cw.SquareRoot(5).left(30), "independent": cw.Independent().left(30)}
    sums, coefficients = plots.correlated_noise(left, column).axes
    assert [line.get_label() for line in sums.lines] == list(left)
    assert list(sums.lines[0].get_xdata()) == list(range(1, 31))
    inverse = np.convolve(coefficients.lines[1].get_ydata(), column)[:5]
    np.testing.assert_allclose(inverse, [1, 0, 0, 0, 0], atol=1e-12)
    assert len(plots.correlated_noise(left).axes) == 1
    with pytest.raises(DataError, match="nothing to draw"):
        plots.correlated_noise({})


@pytest.mark.parametrize(
    "names", [("R = 2", "R = 20", "R = 200", "not private"), ("a rather long name of an arm",) * 2]
)
def test_the_names_of_the_arms_fit_below_a_single_panel(names: tuple[str, ...]) -> None:
    drawn = plots.training_curves(
        {f"{name}{' ' * k}": {"mse": Curve((0.0, 1.0), (1.0, 0.5))} for k, name in enumerate(names)}
    )
    drawn.canvas.draw()
    box = drawn.legends[0].get_window_extent()
    assert box.x0 >= 0 and box.x1 <= drawn.bbox.width


def test_looks_differ_in_colour_and_without_it() -> None:
    looks = [look(k) for k in range(7)]
    assert len({each.colour for each in looks}) == len({(each.mark, each.dashes) for each in looks}) == 7


def test_the_users_settings_stay_as_they_are() -> None:
    before = dict(mpl.rcParams)
    svg(plots.reliability_diagram(ONE))
    assert dict(mpl.rcParams) == before


def test_svg_is_repeatable_and_its_ids_are_its_own() -> None:
    first, second = (svg(plots.true_class_histogram(RESULTS), "a") for _ in range(2))
    assert first == second and 'id="a-' in first and 'id="axes' not in first
    assert "R = 10" in first, "words are text, not outlines"


@pytest.mark.parametrize("label", ["_hidden", "$\\frac{$", "<b>&", "long " * 30])
def test_any_label_can_be_drawn(label: str) -> None:
    svg(plots.reliability_diagram({label: ONE}))
    text = svg(plots.training_curves({label: {"ece": Curve((0.0, 1.0), (0.1, 0.2))}, "b": {}}))
    assert "<b>" not in text


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtra, match=r"pip install 'clipwise\[plots\]'"):
        plots.reliability_diagram(ONE)


def test_spectra_are_sorted_and_what_is_negative_is_shaded() -> None:
    drawn = cw.plots.spectra({"H": [1.0, 3.0, 2.0], "H C": [-1.0, 2.0]})
    (axes,) = drawn.axes
    first, second, zero = axes.lines
    assert list(first.get_ydata()) == [3.0, 2.0, 1.0] and list(second.get_ydata()) == [2.0, -1.0]
    assert list(zero.get_ydata()) == [0.0, 0.0] and len(axes.patches) == 1
    assert not cw.plots.spectra({"H": [1.0]}).axes[0].patches


def test_loss_flows_draw_loss_and_rate() -> None:
    task = problem("mlp", 1, "mse")
    flow = cw.ntk.gradient_flow(*task, cw.Abadi(1.0), 0.5, points=5)
    top, bottom = cw.plots.loss_flows({"flat": flow, "again": flow}).axes
    assert list(top.lines[1].get_ydata()) == flow.loss.tolist()
    assert list(bottom.lines[0].get_ydata()) == flow.loss_rate.tolist()
    assert (
        top.get_yscale() == "log" and cw.plots.loss_flows({"flat": flow}, linear=True).axes[0].get_yscale() == "linear"
    )


def test_monitor_says_whether_epsilon_covers_it() -> None:
    model, loss_fn, x, y = problem("mlp", 1, "mse")
    private = cw.ntk.NTKMonitor(model, loss_fn, x, y, cw.Abadi(1.0), every=1)
    private.update()
    drawn = cw.plots.ntk_monitor({"run": private})
    assert len(drawn.axes) == 6 and "not covered by epsilon" in drawn.get_suptitle()
    assert list(drawn.axes[0].lines[0].get_ydata()) == [record.loss for record in private.records]
    public = cw.ntk.NTKMonitor(model, loss_fn, x, y, cw.Abadi(1.0), public=True)
    assert "not covered" not in cw.plots.ntk_monitor({"run": public}).get_suptitle()


def test_nothing_to_draw_is_refused() -> None:
    for draw in (cw.plots.spectra, cw.plots.loss_flows, cw.plots.ntk_monitor):
        with pytest.raises(DataError):
            draw({})  # type: ignore[operator]
