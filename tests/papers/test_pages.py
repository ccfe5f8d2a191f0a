"""The committed pages are what the commands make of the committed runs."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from papers.__main__ import EXPERIMENTS, PAGE, assembled
from papers.regression import climb
from papers.study import runs_of
from papers.tables import Claim, Finding, findings_table, results_table, setting, smaller

from clipwise.report import Arm, Estimate, Run, arms_of

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_of_the_paper_is_put_together_from_those_of_the_experiments() -> None:
    assert PAGE.read_text(encoding="utf-8") == assembled(), "run python -m papers"
    page = PAGE.read_text(encoding="utf-8")
    for name in EXPERIMENTS:
        for figure in (ROOT / "papers" / name / "figures").glob("*.svg"):
            assert f"(../papers/{name}/figures/{figure.name})" in page, figure


@pytest.mark.parametrize("name", ["mnist", "rules", "wine", "california"])
def test_a_page_regenerates_from_its_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = ROOT / "papers" / name
    recipe = import_module(f"papers.{name}.__main__")
    (tmp_path / name).mkdir()
    (tmp_path / "mnist").mkdir(exist_ok=True)
    (tmp_path / "mnist" / "runs").symlink_to(ROOT / "papers" / "mnist" / "runs")
    arms = arms_of(list(runs_of(recipe.STUDY, kept / "runs")))
    recipe.write(arms, tmp_path / name)
    for file in ("README.md", "results.json"):
        assert (tmp_path / name / file).read_text(encoding="utf-8") == (kept / file).read_text(encoding="utf-8"), file
    assert {path.name for path in (tmp_path / name / "figures").iterdir()} == {
        path.name for path in (kept / "figures").iterdir()
    }


def test_a_curve_climbs_above_its_lowest_value_so_far() -> None:
    assert climb([4.0, 2.0, None, 1.0]) == 0
    assert climb([4.0, 2.0, 3.0, 1.0, 1.2]) == pytest.approx(0.5)


def test_a_finding_says_yes_no_or_what_holds() -> None:
    table = findings_table([Finding("a", "1", True), Finding("b", "2", False), Finding("c", "3", "for R = 2")])
    assert "| a | 1 | yes |" in table and "| b | 2 | no |" in table and "| c | 3 | for R = 2 |" in table


def test_seeds_that_are_far_apart_decide_nothing() -> None:
    assert Claim("a", "mce", 0.5).verdict(Estimate(0.3, 0.2, seeds=3)) == "not clear: the seeds are far apart"
    assert Claim("a", "mce", 0.5).verdict(Estimate(0.3, 0.11, seeds=3)) == "same"
    assert (
        smaller(Estimate(0.3, 0.2, seeds=4), Estimate(0.4, 0.0, seeds=4)) == "not clear: within the spread of the seeds"
    )
    assert smaller(Estimate(0.3, 0.02, seeds=4), Estimate(0.4, 0.0, seeds=4)) is True
    assert smaller(Estimate(0.4), Estimate(0.3)) is False


def test_epsilon_is_never_rounded_down() -> None:
    arm = SimpleNamespace(name="a", runs=[0], epsilon=0.6003, estimates={"mse": Estimate(1.0)})
    assert "| 0.601 |" in results_table([cast("Arm", arm)], ["mse"])


@pytest.mark.parametrize(("sampling", "batch"), [({"batch_size": 256}, "an expected batch of 256"), ({}, "all")])
def test_a_page_tells_what_was_trained_on_what(sampling: dict[str, int], batch: str) -> None:
    data = {"records": 1279, "held_out": 320, "inputs": "as they are", "note": ""}
    plan = {"sampling": sampling, "steps": 2000, "noise_multiplier": 35.0}
    run = SimpleNamespace(plan=plan, provenance={"data": data, "model": "MLP()", "parameters": 7041})
    assert setting(cast("Run", run)) == (
        f"MLP() with 7,041 parameters; 2,000 steps on {batch} of 1,279 records, inputs as they are; noise "
        "multiplier 35; measured on 320 records."
    )


@pytest.mark.parametrize(
    ("metric", "value", "unit", "printed"),
    [("accuracy", 0.96, 0.01, "96 %"), ("ece", 0.007, 0.001, "0.7 %"), ("accuracy", 0.9717, 1e-4, "97.17 %"),
     ("nll", 1.79, 0.01, "1.79")],
)  # fmt: skip
def test_the_papers_numbers_have_the_papers_digits(metric: str, value: float, unit: float, printed: str) -> None:
    assert Claim("a", metric, value, unit=unit).printed == printed
