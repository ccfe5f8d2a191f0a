"""The list of metrics: every row is read off a result, lies where it says, and moves the way it says.

The examples of docs/calibration.md run as they stand and print what the comments beside them say.
"""

from __future__ import annotations

import contextlib
import io
import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clipwise import report
from clipwise.calibration import (
    METRICS,
    Metric,
    Result,
    evaluate,
    evaluate_regression,
    metric_named,
    metrics,
    metrics_of,
)
from clipwise.cli.train import measured
from clipwise.report import Run
from clipwise.report.content import content
from tests.report.samples import made_run, regression_run

ROW = pytest.mark.parametrize("metric", METRICS, ids=lambda metric: f"{metric.task}-{metric.name}")


@cache
def result(task: str, quality: str) -> Result:
    """Of good predictions, or of bad ones on the same samples: wrong more often, and surer."""
    random = np.random.default_rng(0)
    if task == "classification":
        labels = random.integers(0, 3, 600)
        logits = random.normal(size=(600, 3))
        logits[np.arange(600), labels] += 2.0
        if quality == "bad":
            logits = 8.0 * np.roll(logits, 1, axis=1)
        return evaluate(logits=logits, labels=labels, resamples=100)
    targets = random.normal(size=600)
    error = random.normal(size=600) * (0.3 if quality == "good" else 3.0)
    return evaluate_regression(targets + error, targets, std=0.3, resamples=100)


@ROW
def test_a_row_is_read_off_a_result_within_its_bounds(metric: Metric) -> None:
    for quality in ("good", "bad"):
        found = result(metric.task, quality)
        numbers = metric.read(found)
        assert numbers and numbers.items() <= found.metrics.items()
        for name, value in numbers.items():
            assert metric.range[0] <= value <= metric.range[1]
            assert found.intervals is not None
            low, high = found.intervals[name]
            assert metric.bounds[0] <= low <= high <= metric.bounds[1]
            assert metric_named(name, metric.task).bounds == metric.bounds


@ROW
def test_a_row_says_which_way_is_better(metric: Metric) -> None:
    good, bad = (metric.read(result(metric.task, quality)) for quality in ("good", "bad"))
    for name in good:
        if metric.better is not None:
            assert (good[name] < bad[name]) == (metric.better == "smaller"), (good, bad)


def columns(run: report.Run) -> list[str]:
    """What stands above the columns of a page's tables."""
    shown = content(report.arms_of([run]), None)
    return [*shown["headline"]["columns"], *(shown["more"]["columns"] if shown["more"] else ())]


@ROW
def test_a_row_is_a_column_of_every_page(metric: Metric) -> None:
    run = made_run() if metric.task == "classification" else regression_run()
    assert {metric_named(name).heading for name in metric.read(run.test)} <= set(columns(run))


def test_names_and_places_are_those_of_one_row_each() -> None:
    for task in ("classification", "regression"):
        rows = metrics_of(task)  # type: ignore[arg-type]
        places = [row.place for row in rows if row.place is not None]
        assert len({row.name for row in rows}) == len({row.label for row in rows}) == len(rows)
        assert sorted(places) == list(range(1, len(places) + 1))
    assert {*metrics_of("classification"), *metrics_of("regression")} == set(METRICS)


def test_a_new_metric_is_one_row(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    row = Metric("excess", "classification", "excess of confidence", of=lambda found: found.confidence - found.accuracy)
    monkeypatch.setattr(metrics, "METRICS", (*METRICS, row))
    run = made_run()
    assert Run.load(run.save(tmp_path)).test == run.test  # folders that were written before are read
    assert report.arms_of([run])[0].estimates["excess"].mean == run.test.metrics["excess"] > 0
    assert columns(run)[-1] == "Excess of confidence"
    assert measured({"accuracy": 0.5, "ece": 0.25, "excess": 1.0}) == "accuracy 50.0 %  ECE 25.0 %"


def test_of_an_unlisted_name_nothing_is_known() -> None:
    row = metric_named("my_score")
    assert (row.title, row.better, row.share) == ("my score", None, False)


NUMBER = re.compile(r"\d+\.\d+")
DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "calibration.md"


def test_the_examples_print_what_they_say() -> None:
    blocks = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len(blocks) >= 6
    namespace: dict[str, Any] = {}
    for block in blocks:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(block, str(DOCUMENT), "exec"), namespace)
        # A comment at the end of a print, or on lines of their own after a loop.
        promised = re.findall(r"^\s*(?:print\(.*\)\s+)?# (.*)$", block, flags=re.MULTILINE)
        for line, promise in zip(printed.getvalue().splitlines(), promised, strict=True):
            _check(line, promise)


def _check(line: str, promise: str) -> None:
    """Equal; or alike, where the promise is one example: the noise of a seed depends on how a processor rounds."""
    example = promise.removeprefix("for example ")
    if example == promise:
        assert line == promise
        return
    assert NUMBER.sub("", line) == NUMBER.sub("", example)
    found, expected = ([float(number) for number in NUMBER.findall(text)] for text in (line, example))
    assert found == pytest.approx(expected, rel=0.4)
