"""`clipwise demo`: short runs of the real thing; its words follow its numbers."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
from pathlib import Path

import pytest

from clipwise.cli import demo
from clipwise.cli.main import main
from clipwise.errors import DataError
from clipwise.experiments import Arm
from clipwise.report import Run, arms_of
from clipwise.training import Config
from tests.conftest import without_drawing
from tests.experiments.test_runs import one_by_one

SHORT = {"steps": 6, "seeds": 2}
ARGUMENTS = ["demo", "--data", "digits", "--jobs", "1", *(f"--{name}={value}" for name, value in SHORT.items())]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a short demo, and what it printed."""
    folder, shown = tmp_path_factory.mktemp("demo"), io.StringIO()
    with contextlib.redirect_stdout(shown), pytest.MonkeyPatch.context() as patch:
        without_drawing(patch)
        patch.setattr("clipwise.experiments.runs.side_by_side", one_by_one)
        assert main([*ARGUMENTS, "--output", str(folder)]) == 0
    return folder, shown.getvalue()


def runs_of_arm(folder: Path, arm: str) -> list[Run]:
    name = Arm(demo.NAMES[arm]).slug
    return [Run.load(folder / "runs" / f"{name}-{seed}") for seed in range(SHORT["seeds"])]


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
    runs = runs_of_arm(folder, "large")
    mean = 100 * (runs[0].test.accuracy + runs[1].test.accuracy) / 2  # type: ignore[union-attr]
    (row,) = (line for line in shown.splitlines() if line.strip().startswith(demo.NAMES["large"]))
    assert f"{mean:.2f} (" in row


@pytest.mark.slow
def test_two_processes_make_the_same_runs(made: tuple[Path, str], tmp_path: Path) -> None:
    args = argparse.Namespace(**{**SHORT, "seeds": 1}, output=str(tmp_path), jobs=2)
    for run, arm in zip(demo._experiment("digits", args), demo.NAMES, strict=True):
        other = runs_of_arm(made[0], arm)[0]
        assert run.name == other.name and run.test == other.test and run.ledger == other.ledger


def test_the_numbers_as_json(made: tuple[Path, str]) -> None:
    runs = [run for arm in demo.NAMES for run in runs_of_arm(made[0], arm)]
    result = json.loads(json.dumps(demo._result("digits", "", arms_of(runs), made[0] / "report.html", 1.0)))
    assert list(result["arms"]) == list(demo.NAMES.values()) and result["seeds"] == 2
    private = {value for name, value in result["epsilon"].items() if name != demo.NAMES["non-private"]}
    assert private == {result["accountants"]["exact"]} and result["epsilon"][demo.NAMES["non-private"]] is None


def test_digits_are_used_when_mnist_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    fetch = demo._fetch

    def without_mnist(name: str) -> None:
        if name == "mnist":
            raise DataError("no network.")
        fetch(name)

    monkeypatch.setattr(demo, "_fetch", without_mnist)
    name, note = demo._choose_data(None)
    assert name == "digits" and "no network." in note and "too small to see" in note
    with pytest.raises(DataError, match="no network"):
        demo._choose_data("mnist")  # asked for by name: no replacement


@pytest.mark.parametrize("argv", [["--seeds", "0"], ["--steps", "-1"], ["--data", "imagenet"]])
def test_bad_option_is_2(argv: list[str]) -> None:
    assert main(["demo", *argv]) == 2


def test_the_folder_has_a_configuration_that_train_takes(made: tuple[Path, str]) -> None:
    config = Config.load(made[0] / "config.toml")
    own = Config.load(made[0] / "runs" / f"{Arm(demo.NAMES['small']).slug}-0" / "config.toml")
    assert (config.clip, config.algorithm, config.privacy) == (own.clip, own.algorithm, own.privacy)


def test_a_folder_that_cannot_be_made_is_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main([*ARGUMENTS, "--output", str(tmp_path / "file" / "demo")]) == 2
    assert "Name another with --output." in capsys.readouterr().err
