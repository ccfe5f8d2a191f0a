"""Seeds of one arm: means, intervals, curves and pooled bins against cases done by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from clipwise import report
from clipwise.accounting import GaussianSteps, Ledger
from clipwise.calibration import Estimate
from clipwise.errors import DataError
from clipwise.report import arms_of
from clipwise.report.figures import public_drawings
from clipwise.report.pooling import BIN_CHOICES, pooled, rebinned
from tests.report.samples import DELTA, SAMPLING, comparison, judged, ledger, made_run, plan, regression_run


def test_of_many_arms_those_are_drawn_that_differ_most(figures_in_words: None) -> None:
    """The time of a page is that of its panels: fifty arms take little more than twelve."""
    runs = [made_run(f"R = {k}", float(k), 1.0 + 0.1 * k, curves=()) for k in range(1, 16)]
    arms = arms_of(runs)
    reliability = next(each for each in public_drawings(arms) if each.name == "reliability")
    assert [panel.arm for panel in reliability.panels] == [0, 1, 2, 3, 4, 5, 9, 10, 11, 12, 13, 14]
    assert len(reliability.values) == 15
    assert reliability.caption.startswith("Of the 15 models, the 6 with the smallest and the 6 with the largest")


def test_runs_of_one_name_are_seeds_of_one_arm() -> None:
    arms = arms_of(comparison(seeds=2))
    assert [arm.name for arm in arms] == ["not private", "R = 1", "R = 10"]
    assert [arm.clip_norm for arm in arms] == [None, 1.0, 10.0]
    assert [arm.learning_rate for arm in arms] == [0.1, 1.0, 0.1]
    assert arms[0].epsilon is None and arms[1].epsilon == arms[2].epsilon == pytest.approx(1.563, abs=1e-3)


def test_student_interval_over_three_seeds() -> None:
    values = [0.90, 0.92, 0.97]
    found = Estimate.over_seeds(values)
    low, high = stats.t.interval(0.95, 2, np.mean(values), stats.sem(values))
    assert (found.mean, found.low, found.high) == pytest.approx((np.mean(values), low, high))
    assert found.deviation == pytest.approx(np.std(values, ddof=1)) and found.seeds == 3


def test_estimates_are_means_over_the_seeds() -> None:
    arm = arms_of(comparison(seeds=3))[1]
    assert arm.estimates["ece"].mean == pytest.approx(np.mean([run.test.ece for run in arm.runs]))
    assert arm.estimates["ece"].seeds == 3


def test_one_run_has_its_bootstrap_interval() -> None:
    run = made_run(resamples=100)
    found = arms_of([run])[0].estimates["ece"]
    assert (found.low, found.high) == run.test.intervals["ece"] and found.deviation is None
    alone = arms_of([made_run()])[0].estimates["ece"]
    assert alone.low is None and alone.high is None


def test_an_infinite_metric_has_no_interval() -> None:
    assert Estimate.over_seeds([1.0, math.inf]) == Estimate(math.inf, seeds=2)


def test_curves_hold_the_steps_that_every_seed_has() -> None:
    first = made_run(curves=tuple({"step": s, "test": {"ece": 0.1 * s}} for s in (0, 1, 2)))
    second = made_run(seed=1, curves=tuple({"step": s, "test": {"ece": 0.3 * s}} for s in (1, 2, 3)))
    curve = arms_of([first, second])[0].curve("test", "ece")
    assert curve is not None and curve.step == (1.0, 2.0)
    assert curve.mean == pytest.approx((0.2, 0.4))
    spread = np.array([np.std([0.1, 0.3], ddof=1), np.std([0.2, 0.6], ddof=1)])
    assert curve.low == pytest.approx(np.array([0.2, 0.4]) - spread)
    assert curve.high == pytest.approx(np.array([0.2, 0.4]) + spread)
    assert arms_of([first])[0].curve("test", "nothing") is None


def test_nested_statistics_are_found_by_their_path() -> None:
    rows = ({"step": 0, "private": {"loss": 1.0, "ntk": {"smallest": -0.5}, "layers": {"a": {"norm_median": 1.0}}}},)
    (arm,) = arms_of([made_run(curves=rows)])
    assert arm.metrics_in("private") == ("loss", "ntk smallest")
    curve = arm.curve("private", "ntk smallest")
    assert curve is not None and curve.mean == (-0.5,)


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        ([], "no run"),
        ([made_run(), made_run(plan=plan(2.0))], "different plans"),
        ([made_run(), made_run(test=judged(0, 1.0, count=50))], "different data"),
        ([made_run(), regression_run("other")], "cannot be compared"),
        ([made_run(), made_run(provenance={"model": "cnn"})], "differ in their model"),
        ([made_run(), made_run(fingerprint="0")], "in their data"),
        ([made_run(), made_run(ledger=None)], "some are private and some are not"),
    ],
)
def test_runs_that_do_not_belong_together_are_refused(runs: list, message: str) -> None:  # type: ignore[type-arg]
    with pytest.raises(DataError, match=message):
        arms_of(runs)


def test_pooled_bins_are_the_mean_of_the_seeds() -> None:
    results = [judged(seed, 1.5) for seed in range(4)]
    both = pooled(results)
    assert both.ece == pytest.approx(np.mean([r.ece for r in results]))
    counts = np.array([r.bins.count for r in results])
    assert both.bins.count == tuple(np.ceil(counts.mean(axis=0)).astype(int))
    top = [r.bins.accuracy[-1] for r in results]
    assert both.bins.accuracy[-1] == pytest.approx(np.average(top, weights=counts[:, -1]))
    assert pooled(results[:1]) is results[0]


def test_the_band_of_several_seeds_is_not_narrower_than_of_one() -> None:
    one = judged(0, 1.5)
    four = pooled([one, one, one, one])
    assert four.bins.accuracy_low == pytest.approx(one.bins.accuracy_low)


@pytest.mark.parametrize("bins", BIN_CHOICES)
def test_rebinning_equals_evaluating_with_that_number_of_bins(bins: int) -> None:
    from clipwise.calibration import evaluate
    from tests.report.samples import scores

    logits, labels = scores(3, 1.4)
    again = rebinned([judged(3, 1.4)], bins)
    direct = evaluate(logits=logits, labels=labels, bins=bins)
    assert again.bins.count == direct.bins.count
    assert (again.ece, again.mce) == pytest.approx((direct.ece, direct.mce))


def test_privacy_is_that_of_the_most_expensive_seed() -> None:
    cheap = made_run()
    panel = {**cheap.guarantees, "exact": replace(cheap.guarantees["exact"], epsilon=2.5)}
    (arm,) = arms_of([cheap, replace(cheap, seed=1, guarantees=panel)])
    assert arm.epsilon == 2.5


@pytest.mark.usefixtures("figures_in_words")
def test_every_place_tells_the_epsilon_of_the_most_expensive_seed(
    tmp_path: Path,
) -> None:
    more = Ledger([*ledger().events, GaussianSteps(SAMPLING, 1.1, 400)])  # resumed without a seed: some steps twice
    panel = {"exact": more.guarantee(DELTA)}
    runs = [made_run(curves=()), made_run(seed=1, curves=(), ledger=more, guarantees=panel)]
    printed = panel["exact"].printed
    page = report.write(runs, tmp_path).read_text(encoding="utf-8")
    assert "1.563" not in page.split('id="data"')[0] and page.count(printed) >= 4
    assert "Ledger of the run that released most" in page and "1,900 steps" in page
    card = (tmp_path / "card.md").read_text()
    assert printed in card and "1.563" not in card
