"""Seeds of one arm: means, intervals, curves and pooled bins against cases done by hand.

The first words of a page follow the numbers, whichever way they go.
"""

from __future__ import annotations

import itertools
import math
import re
import shlex
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

import clipwise as cw
from clipwise import report
from clipwise.accounting import GaussianSteps, Ledger, PrivateCalibration
from clipwise.calibration import Difference, Estimate, difference
from clipwise.errors import DataError
from clipwise.report import Advice, Choices, Run, advice_of, arms_of, table_rows
from clipwise.report.arms import BIN_CHOICES, pooled, rebinned
from clipwise.report.content import content
from clipwise.report.figures import public_drawings
from clipwise.report.reading import NORMALISED, _move, read
from clipwise.report.warnings import joint_of, warnings_of
from clipwise.sampling import FullBatch, Shuffled
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


def pair(small: float, large: float, seeds: int = 3, **changes: object) -> list[Run]:
    return [
        made_run(f"R = {norm:g}", norm, sharpness, seed, **changes)
        for norm, sharpness in ((1.0, small), (10.0, large))
        for seed in range(seeds)
    ]


@pytest.mark.parametrize(
    ("small", "large", "title", "verdict"),
    [
        (2.0, 1.0, "R = 10 gives more trustworthy probabilities than R = 1", "The larger clipping norm is better"),
        (1.0, 2.0, "R = 1 gives more trustworthy probabilities than R = 10", "The smaller clipping norm is better"),
        (1.2, 1.2, "cannot be distinguished", "too close to call"),
    ],
)
def test_the_verdict_follows_the_numbers(small: float, large: float, title: str, verdict: str) -> None:
    reading = read(arms_of(pair(small, large)))
    assert title in reading.title
    assert verdict in reading.verdict


def test_both_epsilon_and_what_r_is_are_told() -> None:
    reading = read(arms_of(comparison()))
    text = " ".join(reading.paragraphs)
    assert "Both private models have the same privacy: epsilon = 1.563 at delta 1e-05" in text
    assert "does not depend on its R (trying several costs more)" in text and "nine in ten are right" in text
    assert "learning rate 1 to 0.1" in reading.verdict


def test_mistakes_are_counted_from_accuracy_and_confidence() -> None:
    run = made_run()
    (_, line), *_ = read(arms_of([replace(run, test=replace(run.test, accuracy=0.94, confidence=0.973))])).lines
    assert "right 94.0 % of the time, 97.3 % sure on average: over-confident by 3.3 points" in line
    assert "expects 27 mistakes and makes 60" in line
    (_, modest), *_ = read(arms_of([replace(run, test=replace(run.test, accuracy=0.9, confidence=0.85))])).lines
    assert "under-confident by 5.0 points" in modest
    (_, wrong), *_ = read(arms_of([replace(run, test=replace(run.test, accuracy=0.0, confidence=0.0))])).lines
    assert "expects 1000 mistakes and makes 1000" in wrong


def test_one_run_each_without_intervals_is_no_proof() -> None:
    assert "not known how much of this is chance" in read(arms_of(pair(2.0, 1.0, seeds=1))).verdict
    assert "from one run each" in read(arms_of(pair(2.0, 1.0, seeds=1, resamples=100))).verdict


def test_unequal_privacy_is_said_and_not_compared() -> None:
    cheap = ledger(2.2)
    small, large = pair(2.0, 1.0, seeds=1)
    panel = {"exact": cheap.guarantee(DELTA)}
    reading = read(arms_of([small, replace(large, ledger=cheap, guarantees=panel)]))
    assert not reading.verdict and "do not have the same privacy" in reading.paragraphs[1]


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"provenance": {"data": {"name": "other digits"}, "model": "mlp 196-64-10"}}, "data"),
        ({"provenance": {"model": "a larger one"}}, "model"),
        ({"choices": Choices(0.1, "Adam(lr=0.1)")}, "optimizer"),
        ({"plan": replace(plan(10.0), steps=1400)}, "steps"),
    ],
)
def test_models_that_differ_in_more_than_the_norm_are_not_evidence_about_it(
    changes: dict[str, object], what: str
) -> None:
    small, large = pair(2.0, 1.0, seeds=1, resamples=100)
    reading = read(arms_of([small, replace(large, **changes)]))  # type: ignore[arg-type]
    assert not reading.verdict and f"more than the clipping norm ({what})" in reading.paragraphs[1]


def test_other_held_out_data_are_warned_of() -> None:
    small, large = pair(2.0, 1.0, seeds=1)
    elsewhere = replace(large, provenance={"data": {"name": "other digits"}})
    texts = [warned.text for warned in warnings_of(arms_of([small, elsewhere]))]
    assert any("not judged on the same held-out data" in text for text in texts)
    assert not any("same held-out" in warned.text for warned in warnings_of(arms_of([small, large])))


def test_epsilons_of_other_deltas_and_units_are_not_the_same() -> None:
    small, large = pair(2.0, 1.0, seeds=1)
    said = read(arms_of([small, replace(large, delta=1e-6)])).paragraphs[1]
    assert "1.563 at delta 1e-05" in said and "1.563 at delta 1e-06" in said and "do not have the same" in said
    client = {"exact": replace(large.guarantees["exact"], unit="client")}
    said = read(arms_of([small, replace(large, guarantees=client)])).paragraphs[1]
    assert "one example against one client is protected" in said
    alone = replace(large, guarantees=client)
    assert "learn about one user, with all its records." in read(arms_of([alone])).paragraphs[1]
    assert "learn about a single record." in read(arms_of([large])).paragraphs[1]


def test_a_single_run_and_none_private() -> None:
    assert read(arms_of([made_run("mine")])).title == "mine: accuracy, calibration and privacy"
    assert "no epsilon holds" in read(arms_of([made_run(clip_norm=None)])).paragraphs[1]


def test_regression_is_read_by_its_coverage() -> None:
    reading = read(arms_of([regression_run(width=0.9)]))
    assert "81.0 % of its 90 %" in reading.lines[0][1]


def test_a_difference_of_equal_seeds_is_exact() -> None:
    same = Estimate.over_seeds([0.5, 0.5])
    assert difference(same, Estimate.over_seeds([0.75, 0.75])).low == 0.25
    assert not difference(same, same).is_clear


@pytest.mark.parametrize(
    ("before", "after"),
    [([0.030, 0.031, 0.036], [0.010, 0.022]), ([0.5, 0.7], [0.61, 0.62, 0.60, 0.63, 0.58]), ([0.1, 0.4], [0.9, 0.3])],
)
def test_a_difference_over_the_seeds_has_welchs_interval(before: list[float], after: list[float]) -> None:
    found = difference(Estimate.over_seeds(before), Estimate.over_seeds(after))
    theirs = stats.ttest_ind(after, before, equal_var=False).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((theirs.low, theirs.high), rel=1e-9)
    assert found.is_clear == (theirs.low > 0 or theirs.high < 0) and found.basis == "over the seeds"


@pytest.mark.parametrize("deltas", [(1e-5, 1e-9), (1e-9, 1e-5), (1e-5, 1e-9, 1e-7)])
def test_runs_of_several_deltas_are_charged_at_the_least(deltas: tuple[float, ...]) -> None:
    """Full batches, so that together they are one Gaussian of all squared shifts: delta in closed form."""
    book = Ledger([GaussianSteps(FullBatch(100), 20.0, 100)])
    runs = [made_run(f"run {i}", seed=i, ledger=book, delta=delta) for i, delta in enumerate(deltas)]
    joint = joint_of(runs)
    assert joint is not None and joint.guarantee is not None and joint.guarantee.delta == min(deltas)
    mu, epsilon = math.sqrt(len(deltas) * 100) / 20.0, joint.guarantee.epsilon
    upper, lower = stats.norm.cdf(mu / 2 - epsilon / mu), stats.norm.cdf(-mu / 2 - epsilon / mu)
    assert upper - math.exp(epsilon) * lower == pytest.approx(min(deltas), rel=1e-6)


def test_all_runs_of_a_page_are_charged_together() -> None:
    joint = joint_of(comparison(seeds=5))
    assert joint is not None and joint.guarantee is not None
    assert joint.runs == 10 and joint.guarantee.epsilon == pytest.approx(5.443, abs=1e-3)
    assert joint_of([made_run()]) is None


def test_shuffled_runs_are_charged_apart_also_where_they_were_recalibrated() -> None:
    book = Ledger([GaussianSteps(Shuffled(1_000, 100), 30.0, 10), PrivateCalibration(20.0)])
    joint = joint_of([made_run(f"run {i}", seed=i, ledger=book) for i in range(2)])
    assert joint is not None and joint.guarantee is not None
    assert joint.guarantee.epsilon == pytest.approx(2 * book.guarantee(DELTA).epsilon, rel=1e-12)
    assert joint.guarantee.delta == 2 * DELTA and str(joint) == joint.guarantee.statement()


def test_warnings_name_their_arms_once() -> None:
    warned = warnings_of(arms_of(comparison()), joint_of(comparison()))
    by_text = {each.text.split(".")[0].split(":")[0]: each.arms for each in warned}
    assert by_text["Trained without noise"] == ("not private",)
    assert by_text["Trained with a fixed seed"] == ("R = 1", "R = 10")
    assert any("This page rests on 6 private runs" in each.text for each in warned)


def test_a_delta_that_is_too_large_is_warned_of() -> None:
    panel = {"exact": ledger().guarantee(1e-3)}
    warned = warnings_of(arms_of([made_run(guarantees=panel, delta=1e-3)]))
    assert any("over 1/60000" in each.text for each in warned)


@pytest.mark.parametrize(("before", "after"), [(0.9394, 0.9346), (0.93945, 0.93455), (0.0296, 0.0069), (0.5, 0.5)])
@pytest.mark.parametrize("half", [None, 0.0001, 0.01])
def test_printed_changes_are_those_of_the_printed_numbers(before: float, after: float, half: float | None) -> None:
    change = after - before
    found = Difference(change, *((None, None) if half is None else (change - half, change + half)), "")
    text = _move(Estimate(before), Estimate(after), found).replace("−", "-")
    first, second, shown, *ends = map(float, re.findall(r"[-+]?\d+\.\d+", text))
    assert shown == pytest.approx(second - first, abs=1e-9) and abs(shown - 100 * change) < 0.1
    assert len(ends) == (0 if half is None else 2) and (0.0 not in ends or not found.is_clear)


def test_the_title_of_a_regression_has_what_a_regression_has() -> None:
    """It spoke of accuracy and calibration."""
    run = regression_run("mine")
    bare = replace(run, test=replace(run.test, coverage={}, nll=None))
    titles = [
        read(arms_of([each])).title for each in (run, bare, Run.judged("x", run.test), Run.judged("x", bare.test))
    ]
    assert titles == [
        "mine: error, intervals and privacy", "mine: error and privacy", "x: error and intervals", "x: error",
    ]  # fmt: skip
    assert read(arms_of([Run.judged("x", made_run().test)])).title == "x: accuracy and calibration"


def test_a_regression_that_is_worse_than_a_mean_is_named() -> None:
    run = regression_run("mine")
    for r2, named in ((-0.01, True), (0.0, False), (None, False)):
        arms = arms_of([replace(run, test=replace(run.test, r2=r2))])
        assert any(warned.text.startswith("R² is below 0") for warned in warnings_of(arms)) is named


def test_a_single_run_that_is_far_off_is_advised_with_its_own_command() -> None:
    made = made_run("mine", 1.0, 2.6)
    origin = {**made.provenance, "command": "clipwise train my.toml --set seed=1 --output runs/mine --force"}
    larger, mixed, recalibrated = advice_of(arms_of([replace(made, provenance=origin)]))
    assert (
        larger.how
        == "clipwise train my.toml --set seed=1 --set name=mine-R10 --set clip.R=10 --set optimizer.learning_rate=0.1"
    )
    assert "R = 10, with a learning rate of 0.1 instead of 1" in larger.text
    assert 'schedule="MixUp"' in mixed.how and "private-temperature" in recalibrated.how
    own = replace(made, provenance={})
    assert [each.how.split("(")[0] for each in advice_of(arms_of([own]))] == [
        "clip=cw.Abadi", "clip=cw.MixUp", "cw.calibration.PrivateTemperatureScaling",
    ]  # fmt: skip


def test_advice_is_given_only_where_it_is_due() -> None:
    assert advice_of(arms_of([made_run(sharpness=1.0)])) == ()
    assert advice_of(arms_of([made_run(clip_norm=None, sharpness=2.6)])) == ()
    assert advice_of(arms_of(pair(2.6, 2.6, seeds=1))) == ()
    assert advice_of(arms_of([Run.judged("theirs", made_run(sharpness=2.6).test)])) == ()


def test_an_under_confident_model_is_trained_longer_or_with_a_smaller_norm() -> None:
    """Only a temperature was advised, after a larger norm had ruined the model."""
    run = made_run("mine", 10.0, 0.5, learning_rate=0.005, config="epochs = 20\nprivacy.epsilon = 3.0\n")
    run = replace(run, provenance={"command": "clipwise train x.toml"})
    longer, smaller, recalibrated = advice_of(arms_of([run]))
    assert longer.how == "clipwise train x.toml --set name=mine-longer --set epochs=80"
    assert "under-confident" in longer.text and "at the same epsilon" in longer.text
    assert "R = 1, with a learning rate of 0.05 instead of 0.005" in smaller.text
    assert smaller.how.endswith("--set name=mine-R1 --set clip.R=1 --set optimizer.learning_rate=0.05")
    assert "temperature" in recalibrated.how
    fixed = advice_of(arms_of([replace(run, config="steps = 30\nprivacy.noise_multiplier = 1.0\n")]))[0]
    assert "steps=120" in fixed.how and "epsilon grows with them" in fixed.text
    for config in (None, "no TOML", "privacy = 1"):
        own = advice_of(arms_of([replace(run, config=config)]))[0]
        assert own.how == f"cw.Plan(..., steps={4 * run.plan.steps:g}).calibrate(epsilon, delta)"
    texts = [each.text for each in advice_of(arms_of([made_run("mine", 0.5, 0.5)]))]
    assert len(texts) == 2 and not any("R = " in text for text in texts), "R is small already"


def test_a_norm_changes_the_learning_rate_of_optimizers_whose_steps_grow_with_gradients_only() -> None:
    """With Adam, a tenth of the rate beside ten times the norm took a model from 72 to 48 % accuracy."""

    def advised(optimizer: str) -> Advice:
        run = made_run("mine", 1.0, 2.6, choices=Choices(0.005, optimizer, algorithm="dp-sgd"))
        return advice_of(arms_of([replace(run, provenance={"command": "clipwise train x.toml"})]))[0]

    for name, cls in vars(torch.optim).items():
        if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer) and name not in ("LBFGS", "Optimizer"):
            assert ("learning_rate" in advised(f"{name}(lr=0.005)").how) is (name in ("SGD", "ASGD")), name
            assert (name in NORMALISED) is (name not in ("SGD", "ASGD")), name
    assert "R = 10, with the learning rate as it is: steps of Adam do not grow" in advised("Adam(lr=0.005)").text
    assert advised("Adam(lr=0.005 / R)").how.endswith("--set clip.R=10 --set optimizer.learning_rate=0.005")
    assert advised("Mine(lr=0.005)").text.endswith("try R = 10.")


@pytest.mark.parametrize("sharpness", [2.6, 0.5])
def test_the_advised_settings_are_settings(sharpness: float) -> None:
    from tests.training.common import TINY, config

    run = made_run("mine", 1.0, sharpness, provenance={"command": "clipwise train x.toml"}, config=TINY)
    for each in advice_of(arms_of([run])):
        words = shlex.split(each.how)
        config(*(setting for option, setting in itertools.pairwise(words) if option == "--set"))


@pytest.mark.parametrize(
    ("command", "kept"),
    [
        (["clipwise", "train", "x.toml", "--output", "runs/a", "--seed", "3"], "clipwise train x.toml --seed 3"),
        (["clipwise", "train", "--output=runs/a", "x.toml"], "clipwise train x.toml"),
        (["clipwise", "train", "--output", "--resume", "x.toml"], "clipwise train x.toml"),
        (["clipwise", "train", "x.toml", "--resume", "--force", "--json", "--quiet"], "clipwise train x.toml --quiet"),
        (["clipwise", "train", "--changed-data", "x.toml", "--show-values"], "clipwise train x.toml"),
        ("clipwise train 'my run.toml' --set a=1", "clipwise train 'my run.toml' --set a=1"),
        ("clipwise train x.toml --set name=mine --set=a.b=1", "clipwise train x.toml --set a.b=1"),
        *((command, None) for command in ("python train.py", ["clipwise"], "clipwise train 'x.toml", 5, None, [])),
    ],
    ids=str,
)
def test_advice_repeats_the_command_of_the_run_under_another_name(command: object, kept: str | None) -> None:
    run = made_run("mine", 2.0, 2.6, learning_rate=0.5, provenance={"command": command})
    larger, mixed, recalibrated = advice_of(arms_of([run]))
    if kept is None:
        assert larger.how == "clip=cw.Abadi(20)" and recalibrated.how.startswith("cw.calibration.")
        assert mixed.how == "clip=cw.MixUp(cw.Abadi(2), cw.Abadi(20), switch_at=0.5)"
    else:
        assert larger.how == f"{kept} --set name=mine-R20 --set clip.R=20 --set optimizer.learning_rate=0.05"
        assert mixed.how.startswith(f"{kept} --set name=mine-mix-up --set 'clip={{schedule=")
        assert recalibrated.how.startswith(f"{kept} --set name=mine-recalibrated --set 'recalibration=")


def test_advice_on_advice_replaces_what_was_advised_before() -> None:
    command = "clipwise train x.toml --set name=mine-R2 --set clip.R=2 --set optimizer.learning_rate=0.5 --set seed=1"
    run = made_run("mine-R2", 2.0, 2.6, learning_rate=0.5, provenance={"command": command})
    larger, mixed, recalibrated = (shlex.split(each.how) for each in advice_of(arms_of([run])))
    kept = ["clipwise", "train", "x.toml"]
    assert [word for word in larger if word != "--set"] == [
        *kept, "seed=1", "name=mine-R20", "clip.R=20", "optimizer.learning_rate=0.05",
    ]  # fmt: skip
    names = [word.split("=")[0] for word in mixed if "=" in word]
    assert names == ["optimizer.learning_rate", "seed", "name", "clip"] and "name=mine-mix-up" in mixed
    assert "name=mine-R2-recalibrated" in recalibrated and "clip.R=2" in recalibrated


def test_a_recalibrated_run_is_compared_as_it_is_saved_too() -> None:
    before, after = judged(0, 2.6), judged(0, 1.0)
    run = made_run("mine", 1.0, 2.6, recalibrated={"temperature": after}, provenance={"recalibration": "temperature"})
    arms = arms_of([run, made_run("other", 10.0, 1.2)])
    rows = [(name, estimates["ece"].mean) for name, estimates in table_rows(arms[0])]
    assert rows == [("mine, as trained", before.ece), ("mine, saved (temperature)", after.ece)]
    assert [row["name"] for row in content(arms, None)["headline"]["rows"]] == [*(name for name, _ in rows), "other"]
    assert f"recalibrated (temperature): ECE {100 * after.ece:.1f} %" in read(arms).lines[0][1]
    kept = made_run("mine", 1.0, 2.6, recalibrated={"temperature": after}, provenance={"recalibration": None})
    assert [name for name, _ in table_rows(arms_of([kept])[0])] == ["mine"]


def test_advice_on_norms_needs_one_norm_of_abadis_rule() -> None:
    def asked(clip: object, **changes: object) -> list[str]:
        made = made_run("mine", 2.0, 2.6, **changes)
        return [
            each.text.split(",")[0] for each in advice_of(arms_of([replace(made, plan=replace(made.plan, clip=clip))]))
        ]  # type: ignore[type-var]

    norms = ["The model is over-confident. A larger clipping norm often mends that", "Mix-up training"]
    temperature = ["Recalibration with a private temperature divides the logits by one number"]
    assert asked(cw.Abadi(2.0)) == asked(cw.Flat(cw.Abadi(2.0))) == norms + temperature
    assert asked(cw.Abadi(2.0), recalibrated={"temperature": judged(0, 1.0)}) == norms
    rule, layers = cw.Automatic(2.0), cw.Layerwise(cw.Abadi(2.0))
    for clip in (rule, layers, cw.MixUp(cw.Abadi(1.0), cw.Abadi(2.0), switch_at=0.5)):
        assert asked(clip) == temperature
    assert asked(cw.Abadi(2.0), choices=Choices(0.5, algorithm="dp-sgld")) == []
    assert asked(cw.Abadi(2.0), choices=Choices("scheduled", algorithm="dp-sgd"))[1:] == norms[1:] + temperature


@pytest.mark.parametrize(
    ("ece", "low", "due"), [(0.02, None, True), (0.0199, None, False), (0.2, 0.0199, False), (0.2, 0.02, True)]
)
def test_advice_is_due_where_an_error_of_two_per_cent_is_not_chance(ece: float, low: float | None, due: bool) -> None:
    run = made_run(sharpness=2.6, resamples=100)
    intervals = None if low is None else {**(run.test.intervals or {}), "ece": (low, 0.3)}
    test = replace(run.test, ece=ece, intervals=intervals, resamples=0 if low is None else 100)
    assert bool(advice_of(arms_of([replace(run, test=test)]))) is due
