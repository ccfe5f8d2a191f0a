"""What a notebook shows of a value: a table that is escaped, short, and true."""

from __future__ import annotations

import re

import pytest

import clipwise as cw
from clipwise.accounting import Guarantee
from tests.core.common import data, losses_of, mlp, plan, sgd
from tests.report.samples import judged


def cells(shown: str) -> dict[str, str]:
    """The rows of a table with two columns, by their heading."""
    return dict(re.findall(r"<tr><th [^>]*>(.*?)</th><td [^>]*>(.*?)</td>", shown))


def test_a_plan_shows_what_it_will_do_and_cost() -> None:
    chosen = cw.Plan(cw.Poisson(60_000, 256), steps=14_040, clip=cw.Abadi(1.0), noise_multiplier=1.1)
    shown = cells(chosen._repr_html_())
    assert shown["epsilon"] == "2.380 at delta 1e-05" and shown["steps"] == "14,040"
    assert shown["clipping"] == "Flat(rule=Abadi(R=1.0))"


@pytest.mark.parametrize(
    ("sampling", "noise", "row", "text"),
    [
        (cw.Poisson(rate=0.1, batch_size=10), 1.0, "epsilon", "at a delta of your choice"),
        (cw.Poisson(100, 10), 0.0, "epsilon", "infinite: not private"),
        (cw.Poisson(100, 10), 0.001, "epsilon", "infinite"),
        (cw.Poisson(100, 10), None, "noise multiplier", "none yet"),
    ],
)
def test_a_plan_without_an_epsilon_says_why(sampling: cw.Poisson, noise: float | None, row: str, text: str) -> None:
    shown = cells(cw.Plan(sampling, steps=5, clip=cw.Abadi(1.0), noise_multiplier=noise)._repr_html_())
    assert text in shown[row]


def test_a_run_shows_what_it_has_spent_and_no_more_than_is_planned() -> None:
    model = mlp()
    private = cw.Private(plan(steps=3), model, sgd(model), seed=0)
    loader = private.loader(data())
    assert len(loader) == 3 and cells(private._repr_html_())["epsilon spent"].startswith("0.000")
    for x, y in loader:
        private.step(losses_of(model, x, y))
        break
    assert len(loader) == 2 and repr(private) == "Private(Sequential, 1 of 3 steps made)"
    spent = float(cells(private._repr_html_())["epsilon spent"].split()[0])
    assert 0 < spent < float(cells(private.plan._repr_html_())["epsilon"].split()[0])


def test_a_guarantee_shows_its_assumptions_and_warnings_escaped() -> None:
    given = Guarantee(2.38, 1e-5, "approximation", "gdp", "zero_out", "<i>Poisson</i>", warnings=("a < b",))
    shown = given._repr_html_()
    assert cells(shown)["epsilon"] == "~2.380" and "no" not in cells(shown)["epsilon"]
    assert "&lt;i&gt;Poisson" in shown and "<p>a &lt; b</p>" in shown and "<i>" not in shown
    assert "approximation, not a bound" in cells(shown)["worth"]


def test_a_result_is_one_line_and_a_table_of_every_metric() -> None:
    result = judged(0, 1.2)
    assert len(repr(result)) < 400 and f"ece={result.ece:.4g}" in repr(result) and "Bins(" not in repr(result)
    shown = cells(result._repr_html_())
    assert shown["ECE"] == f"{100 * result.ece:.2f} %" and len(shown) == len(result.metrics)
    regression = cw.calibration.evaluate_regression([1.0, 2.0], [1.0, 2.5], resamples=100)
    assert "RMSE" in cells(regression._repr_html_()) and "95 % interval" in regression._repr_html_()
