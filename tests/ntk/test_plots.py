"""The figures hold what they were given."""

from __future__ import annotations

import pytest

import clipwise as cw
from clipwise.errors import DataError
from tests.ntk.common import problem


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
