"""The committed pages are what the commands make of the committed runs."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

import clipwise as cw
from clipwise.calibration import CalibrationResult, Estimate
from clipwise.experiments import CURVES, RESULTS
from clipwise.report import ArmResults, Run
from papers.__main__ import EXPERIMENTS
from papers.cifar10 import grid
from papers.pages import DOCS
from papers.regression import climb
from papers.study import complete, parser_of
from papers.tables import findings_table, results_table, setting
from papers.verdicts import BINS, Claim, Finding, smaller, smaller_mce

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_figure_is_on_the_page_of_its_experiment(name: str) -> None:
    folder = ROOT / "papers" / name
    page = (folder / "README.md").read_text(encoding="utf-8")
    assert set(re.findall(r"\]\(figures/(.+?)\)", page)) == {path.name for path in (folder / "figures").iterdir()}


def test_the_summary_has_every_claim_and_links_every_page() -> None:
    summary = (DOCS / "paper.md").read_text(encoding="utf-8")
    for name in EXPERIMENTS:
        text = (ROOT / "papers" / name / "README.md").read_text(encoding="utf-8")
        assert f"](../papers/{name}/README.md)" in summary and f"\npaper/{name}\n" in summary
        _, _, table = text.partition(findings_table(()))
        claims = table.split("\n\n", 1)[0].splitlines()
        assert all(claim in summary for claim in claims), name
        assert bool(claims) == (name != "federated")


def redrawn(name: str, folder: Path) -> None:
    """What `--draw` makes of the packed runs in a folder."""
    recipe = import_module(f"papers.{name}.__main__")
    kept = ROOT / "papers" / name
    study = recipe.study() if name == "cifar10" else recipe.STUDY
    arms = complete(replace(study, folder=folder), parser_of(name, 1).parse_args(["--draw"]))
    if name == "cifar10":
        settings = recipe.head_settings(recipe.DEFAULT, quick=False)
        rows = grid.complete([], kept / "grid.json", kept / "config.toml", settings, 1)
        recipe.write(arms, rows, folder, recipe.DEFAULT)
    else:
        recipe.write(arms, folder, *([None] if name == "snli" else []))


def same_drawing(path: Path, kept: Path) -> bool:
    """Equal bytes, where the same version of matplotlib drew both."""
    return version("matplotlib") not in kept.read_text(encoding="utf-8") or path.read_bytes() == kept.read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_a_page_regenerates_from_the_packed_runs(name: str, tmp_path: Path) -> None:
    kept = ROOT / "papers" / name
    if not (kept / CURVES).is_file():
        pytest.skip("the curves are in the repository, not in the source distribution")
    for each in {name, "mnist"}:
        (tmp_path / each).mkdir()
        for file in (RESULTS, CURVES):
            shutil.copy(ROOT / "papers" / each / file, tmp_path / each)
    redrawn(name, tmp_path / name)
    for file in ("README.md", RESULTS, CURVES):
        assert (tmp_path / name / file).read_bytes() == (kept / file).read_bytes(), file
    drawn = {path.name: path for path in (tmp_path / name / "figures").iterdir()}
    assert set(drawn) == {path.name for path in (kept / "figures").iterdir()}
    assert [file for file, path in drawn.items() if not same_drawing(path, kept / "figures" / file)] == []


def test_a_curve_climbs_above_its_lowest_value_so_far() -> None:
    assert climb([4.0, 2.0, None, 1.0]) == 0
    assert climb([4.0, 2.0, 3.0, 1.0, 1.2]) == pytest.approx(0.5)


def test_a_finding_says_yes_no_or_what_holds() -> None:
    table = findings_table(
        [Finding("a", "1", True, (5, 5)), Finding("b", "2", False, (5, 1)), Finding("c", "3", "for R = 2", (1,))]
    )
    assert "| a | 1 | 5 | yes |" in table and "| b | 2 | 5, 1 | no |" in table and "| c | 3 | 1 | for R = 2 |" in table


def test_seeds_that_are_far_apart_decide_nothing() -> None:
    assert Claim("a", "mce", 0.5).verdict(Estimate(0.3, 0.2, seeds=3)) == "not clear: the seeds are far apart"
    assert Claim("a", "mce", 0.5).verdict(Estimate(0.3, 0.11, seeds=3)) == "same"
    assert (
        smaller(Estimate(0.3, 0.2, seeds=4), Estimate(0.4, 0.0, seeds=4)) == "not clear: within the spread of the seeds"
    )
    assert smaller(Estimate(0.3, 0.02, seeds=4), Estimate(0.4, 0.0, seeds=4)) is True
    assert smaller(Estimate(0.4), Estimate(0.3)) is False
    low, high = Estimate(0.3, None, 0.2, 0.35), Estimate(0.4, None, 0.36, 0.45)
    assert smaller(low, high) is True and smaller(high, low) is False
    assert smaller(low, Estimate(0.4, None, 0.34, 0.45)) == "not clear: one seed, and its intervals overlap"


def classifier(*gaps: tuple[float, float, float]) -> ArmResults:
    """An arm with a run for every triple: its MCE with 10, 15 and 20 bins."""
    runs = []
    for values in gaps:
        test = object.__new__(CalibrationResult)
        merged = dict(zip(BINS, values, strict=True))
        object.__setattr__(test, "fine_bins", SimpleNamespace(merged=lambda n, m=merged: SimpleNamespace(mce=m[n])))
        runs.append(SimpleNamespace(test=test))
    return cast("ArmResults", SimpleNamespace(runs=runs))


def test_an_mce_that_depends_on_the_bins_decides_nothing() -> None:
    ours, theirs = classifier((0.1, 0.2, 0.3), (0.11, 0.21, 0.31)), classifier((0.4, 0.4, 0.2), (0.41, 0.41, 0.21))
    assert smaller_mce(ours, theirs) == "not clear: it depends on the number of bins"
    assert smaller_mce(ours, classifier((0.4, 0.4, 0.5), (0.41, 0.41, 0.51))) is True
    assert smaller_mce(ours, ours) == "not clear: within the spread of the seeds"


def test_epsilon_is_never_rounded_down() -> None:
    arm = SimpleNamespace(name="a", runs=[0], epsilon=0.6003, estimates={"mse": Estimate(1.0)})
    assert "| 0.601 |" in results_table([cast("ArmResults", arm)], ["mse"])


@pytest.mark.parametrize(
    ("sampling", "batch"), [(cw.Poisson(1279, 256), "an expected batch of 256"), (cw.FullBatch(1279), "all")]
)
def test_a_page_tells_what_was_trained_on_what(sampling: cw.Sampling, batch: str) -> None:
    data = {"records": 1279, "held_out": 320, "inputs": "as they are", "note": ""}
    plan = cw.Plan(sampling, steps=2000, clip=cw.Abadi(1.0), noise_multiplier=35.0)
    run = SimpleNamespace(plan=plan, delta=7.1078e-4, provenance={"data": data, "model": "MLP()", "parameters": 7041})
    assert setting(cast("Run", run)) == (
        f"MLP() with 7,041 parameters; 2,000 steps on {batch} of 1,279 records, inputs as they are; noise "
        "multiplier 35, delta 0.000711; measured on 320 records."
    )


@pytest.mark.parametrize(
    ("metric", "value", "unit", "printed"),
    [("accuracy", 0.96, 0.01, "96 %"), ("ece", 0.007, 0.001, "0.7 %"), ("accuracy", 0.9717, 1e-4, "97.17 %"),
     ("nll", 1.79, 0.01, "1.79")],
)  # fmt: skip
def test_the_papers_numbers_have_the_papers_digits(metric: str, value: float, unit: float, printed: str) -> None:
    assert Claim("a", metric, value, unit=unit).printed == printed
