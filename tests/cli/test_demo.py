"""`clipwise demo`: short runs of the real thing; its words follow its numbers."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest

from clipwise.cli import demo
from clipwise.cli.main import main
from clipwise.errors import DataError
from clipwise.report import Run, arms_of
from tests.conftest import without_drawing

SHORT = {"steps": 6, "seeds": 2}
ARGUMENTS = ["demo", "--data", "digits", "--jobs", "1", *(f"--{name}={value}" for name, value in SHORT.items())]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a short demo, and what it printed."""
    folder, shown = tmp_path_factory.mktemp("demo"), io.StringIO()
    with contextlib.redirect_stdout(shown), pytest.MonkeyPatch.context() as patch:
        without_drawing(patch)
        assert main([*ARGUMENTS, "--output", str(folder)]) == 0
    return folder, shown.getvalue()


def test_every_arm_is_a_run_that_train_could_have_made(made: tuple[Path, str]) -> None:
    runs = [Run.load(folder) for folder in sorted((made[0] / "runs").iterdir())]
    assert sorted({run.name for run in runs}) == sorted(demo.NAMES.values()) and len(runs) == 8
    epsilons = {run.guarantees["exact"].epsilon for run in runs if run.is_private}
    assert len(epsilons) == 1, "the private arms have one and the same epsilon"
    assert [run.is_private for run in runs].count(False) == 2
    c = demo.SETTINGS["digits"].rate
    assert {run.name: run.choices.learning_rate for run in runs} == {
        demo.NAMES["small"]: c / demo.SMALL,
        demo.NAMES["large"]: c / demo.LARGE,
        demo.NAMES["mix-up"]: f"{c:g} / R",
        demo.NAMES["non-private"]: c / demo.LARGE,
    }
    assert {len(run.curves) for run in runs} == {SHORT["steps"]}
    assert all("chosen by looking at these data" in run.warnings[-1] for run in runs), "told by every page on them"


def test_it_prints_a_table_both_epsilons_and_the_page(made: tuple[Path, str]) -> None:
    folder, shown = made
    for text in (
        *demo.NAMES.values(),
        " to ",
        "95 % intervals over 2 seeds",
        "numerically exact",
        "approximation, no bound",
    ):
        assert text in shown
    assert f"report: {folder / 'report.html'}" in shown
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert all(name in page for name in demo.NAMES.values())


def test_the_printed_numbers_are_those_of_the_runs(made: tuple[Path, str]) -> None:
    folder, shown = made
    runs = [Run.load(folder / "runs" / f"large-{seed}") for seed in range(2)]
    mean = 100 * (runs[0].test.accuracy + runs[1].test.accuracy) / 2  # type: ignore[union-attr]
    (row,) = (line for line in shown.splitlines() if line.strip().startswith(demo.NAMES["large"]))
    assert f"{mean:.2f} (" in row


@pytest.mark.slow
def test_two_processes_make_the_same_runs(made: tuple[Path, str], tmp_path: Path) -> None:
    args = argparse.Namespace(**{**SHORT, "seeds": 1}, output=str(tmp_path), jobs=2)
    for run, arm in zip(demo._experiment("digits", args), demo.NAMES, strict=True):
        other = Run.load(made[0] / "runs" / f"{arm}-0")
        assert run.test == other.test and run.ledger == other.ledger


def test_the_numbers_as_json(made: tuple[Path, str]) -> None:
    runs = [Run.load(made[0] / "runs" / f"{arm}-{seed}") for arm in demo.NAMES for seed in range(2)]
    result = json.loads(json.dumps(demo._result("digits", "", arms_of(runs), made[0] / "report.html", 1.0)))
    assert list(result["arms"]) == list(demo.NAMES.values()) and result["seeds"] == 2
    private = {value for name, value in result["epsilon"].items() if name != demo.NAMES["non-private"]}
    assert private == {result["accountants"]["exact"]} and result["epsilon"][demo.NAMES["non-private"]] is None


def test_digits_are_used_when_mnist_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    load = demo._data

    def without_mnist(name: str) -> Any:
        if name == "mnist":
            raise DataError("no network.")
        return load(name)

    monkeypatch.setattr(demo, "_data", without_mnist)
    name, note = demo._choose_data(None)
    assert name == "digits" and "no network." in note and "too small to see" in note
    with pytest.raises(DataError, match="no network"):
        demo._choose_data("mnist")  # asked for by name: no replacement


@pytest.mark.parametrize("argv", [["--seeds", "0"], ["--steps", "-1"], ["--data", "imagenet"]])
def test_bad_option_is_2(argv: list[str]) -> None:
    assert main(["demo", *argv]) == 2
