"""The committed pages are what the commands make of the committed runs.

The frame of the recipes: what is trained, kept, resumed and written; and caches, filled shard by shard.
"""

from __future__ import annotations

import io
import json
import re
import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import cast
from xml.etree import ElementTree as ET

import pytest

import clipwise as cw
from clipwise import plots
from clipwise.calibration import CalibrationResult, Estimate
from clipwise.errors import DataError
from clipwise.experiments import CURVES, RESULTS, Arm, Study, runs_of, side_by_side
from clipwise.plots import Curve
from clipwise.report import ArmResults, Run
from papers import cache
from papers.__main__ import EXPERIMENTS
from papers.cache import cache_folder, fill
from papers.cifar10 import grid
from papers.figures import save
from papers.pages import DOCS
from papers.regression import climb
from papers.study import complete, main, parser_of, placed
from papers.tables import BINS, Claim, Finding, findings_table, page, results_table, setting, smaller, smaller_mce
from tests.experiments.test_runs import CONFIG

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_figure_is_on_the_page_of_its_experiment(name: str) -> None:
    folder = ROOT / "papers" / name
    page = (folder / "README.md").read_text(encoding="utf-8")
    assert set(re.findall(r"\]\(figures/(.+?)\)", page)) == {path.name for path in (folder / "figures").iterdir()}


def test_figures_that_belong_together_are_one_file(tmp_path: Path) -> None:
    drawn = [plots.training_curves({name: {"ece": Curve((0.0, 1.0), (0.1, 0.2))}}) for name in "ab"]
    save(tmp_path, "several", [*drawn, tuple(drawn)])
    root = ET.parse(tmp_path / "figures" / "several.svg").getroot()
    boxes = [[float(each.attrib[key]) for key in ("x", "y", "width")] for each in root if each.tag.endswith("}svg")]
    (x, top, wide), (_, second, _), third, fourth = boxes
    assert x == top == 0 and second > 0 and third == [0, 2 * second, wide] and fourth == [wide, 2 * second, wide]
    assert [each.text for each in root if each.tag.endswith("}text")] == list("abcd")
    ids = [found for each in root.iter() if (found := each.get("id"))]
    assert len(ids) == len(set(ids)) > 100


def test_the_summary_has_every_claim_and_links_every_page() -> None:
    summary = (DOCS / "paper.md").read_text(encoding="utf-8")
    for name in EXPERIMENTS:
        text = (ROOT / "papers" / name / "README.md").read_text(encoding="utf-8")
        assert f"](../papers/{name}/README.md)" in summary and f"\npaper/{name}\n" in summary
        _, _, table = text.partition(findings_table(()))
        claims = table.split("\n\n", 1)[0].splitlines()
        assert all(claim in summary for claim in claims), name
        assert bool(claims) == (name not in ("federated", "correlated"))  # of which the paper says nothing


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


ARMS = (Arm("fast"), Arm("not so fast", ("optimizer.learning_rate=0.05",)))
QUICK = ("steps=1",)
CLAIMS = (Claim("fast", "accuracy", 0.9), Claim("missing", "ece", 0.01))


@pytest.fixture
def study(tmp_path: Path) -> Study:
    (tmp_path / "config.toml").write_text(CONFIG)
    return Study(tmp_path / "config.toml", ARMS, seeds=2, folder=tmp_path)


def write(arms: Sequence[ArmResults], folder: Path) -> str:
    return page(folder, "Test", arms, CLAIMS, [])


@pytest.mark.slow
def test_a_set_that_was_cut_goes_on_and_its_page_counts_seeds(
    study: Study, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    main(study, QUICK, write, ["--jobs", "1", "--only", "fast", "--seeds", "1"])
    first = (study.folder / "runs" / "fast-0" / "result.json").read_bytes()
    with pytest.raises(SystemExit, match="--resume keeps them"):
        main(study, QUICK, write, ["--jobs", "1"])
    main(study, QUICK, write, ["--jobs", "1", "--resume"])
    assert (study.folder / "runs" / "fast-0" / "result.json").read_bytes() == first
    runs = runs_of(study)
    assert [(run.name, run.choices.learning_rate) for run in runs] == [("fast", 0.5)] * 2 + [("not so fast", 0.05)] * 2
    said = capsys.readouterr().out
    assert "[3/3]" in said and "| not so fast | 2 |" in said and "| missing | ECE | 1.0 % | not run | - | - |" in said
    saved = json.loads((study.folder / "results.json").read_text())["arms"]
    assert set(saved) == {"fast", "not so fast"} and saved["fast"]["accuracy"]["mean"] > 0
    page_text = (study.folder / "README.md").read_text()
    main(study, QUICK, write, ["--draw"])
    assert (study.folder / "README.md").read_text() == page_text


@pytest.mark.slow
def test_quick_leaves_the_folder_alone(study: Study) -> None:
    main(study, QUICK, write, ["--quick", "--jobs", "1", "--only", "fast"])
    assert [path.name for path in study.folder.iterdir()] == ["config.toml"]


@pytest.mark.parametrize(("mean", "verdict"), [(0.953, "same"), (0.93, "same"), (0.91, "different: fewer steps")])
def test_verdict_allows_for_rounding_and_for_the_spread_of_the_seeds(mean: float, verdict: str) -> None:
    ours = Estimate(mean, 0.018 if mean == 0.93 else 0.0)
    assert Claim("R = 1", "accuracy", 0.96, "fewer steps", unit=0.02).verdict(ours) == verdict


def test_an_unknown_arm_is_refused_with_the_known_ones(study: Study) -> None:
    with pytest.raises(SystemExit, match="no arm is called 'slow'; there are 'fast', 'not so fast'"):
        main(study, QUICK, write, ["--only", "slow"])


@pytest.mark.parametrize("wrong", [["--jobs", "0"], ["--jobs", "-2"], ["--seeds", "0"], ["--seeds", "-1"]])
def test_numbers_of_runs_are_one_or_more(wrong: list[str], study: Study, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(study, QUICK, write, ["--draw", *wrong])
    assert stop.value.code == 2
    assert f"argument {wrong[0]}: must be at least 1, got {wrong[1]}" in capsys.readouterr().err


def test_a_damaged_run_is_told_in_a_sentence(study: Study) -> None:
    folder = study.folder / "runs" / "fast-0"
    folder.mkdir(parents=True)
    (folder / "result.json").write_text('{"format": "clip')
    with pytest.raises(SystemExit, match=r"clipwise: error: .*result\.json"):
        main(study, QUICK, write, ["--draw"])


def test_folders_that_are_no_runs_are_passed_over(study: Study) -> None:
    for name in ("fast-0.bak", "fast-0 (copy)", "fast-1"):
        (study.folder / "runs" / name).mkdir(parents=True)
    assert runs_of(study) == ()


def test_the_quick_form_stands_beside_no_other_recipe(tmp_path: Path) -> None:
    with placed(Study(tmp_path / "config.toml", ARMS, 1, tmp_path / "rules"), QUICK) as made:
        assert made.folder.name == "rules" and list(made.folder.parent.iterdir()) == [made.folder]
        assert made.overrides == QUICK and made.config == tmp_path / "config.toml"


def test_nothing_to_draw_is_said(study: Study) -> None:
    with pytest.raises(SystemExit, match="holds no finished run"):
        main(study, QUICK, write, ["--draw"])


@pytest.mark.slow
def test_a_run_of_other_settings_is_not_counted_as_one_of_the_set(
    study: Study, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    main(study, QUICK, write, ["--jobs", "1", "--only", "fast", "--seeds", "1"])
    (study.folder / "config.toml").write_text(CONFIG.replace("steps = 3", "steps = 4"))
    with pytest.raises(SystemExit, match=r"fast-0 was trained with other settings than fast, seed 0 has now"):
        main(study, QUICK, write, ["--jobs", "1", "--only", "fast", "--seeds", "1", "--resume"])
    with pytest.raises(SystemExit, match=r"fast-0 was trained with other settings"):
        main(study, QUICK, write, ["--draw"])


@pytest.mark.slow
def test_curves_that_were_cut_are_told(study: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    main(study, QUICK, write, ["--jobs", "1", "--only", "fast", "fast", "--seeds", "1"])
    curves = study.folder / "runs" / "fast-0" / "metrics.jsonl"
    curves.write_text("".join(line for line in curves.read_text().splitlines(True)[:-1]))
    with pytest.raises(SystemExit, match=r"metrics\.jsonl is cut"):
        main(study, QUICK, write, ["--draw"])


@pytest.mark.slow
@pytest.mark.parametrize("resume", [["--resume"], []], ids=["resumed", "not resumed"])
def test_a_run_that_was_cut_before_its_first_checkpoint_starts_anew(
    study: Study, resume: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    begun = study.folder / "runs" / "fast-0"
    begun.mkdir(parents=True)
    (begun / "config.toml").write_text("half of")
    main(study, QUICK, write, ["--jobs", "1", "--only", "fast", "--seeds", "1", *resume])
    assert len(runs_of(study)) == 1


@pytest.mark.slow
def test_a_page_that_cannot_be_written_leaves_the_old_one(study: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    main(study, QUICK, write, ["--jobs", "1", "--only", "fast", "--seeds", "2"])
    before = (study.folder / "README.md").read_bytes()
    assert "±" in before.decode("utf-8")

    def full(arms: Sequence[ArmResults], folder: Path) -> str:
        raise OSError(28, "No space left on device")

    with pytest.raises(SystemExit, match=r"clipwise: error: .*No space left"):
        main(study, QUICK, full, ["--draw"])
    assert (study.folder / "README.md").read_bytes() == before


def test_a_run_that_was_begun_is_not_taken_up_unasked(study: Study) -> None:
    begun = study.folder / "runs" / "fast-0"
    begun.mkdir(parents=True)
    (begun / "config.toml").write_text(CONFIG)
    (begun / "checkpoint").write_bytes(b"")
    with pytest.raises(SystemExit, match="holds 1 runs of this set: --resume"):
        main(study, QUICK, write, ["--jobs", "1", "--only", "fast"])


def slow_shard(folder: Path) -> None:
    def make(k: int, file: io.BufferedIOBase) -> None:
        file.write(b"half of ")
        time.sleep(0.3)
        file.write(b"it")
        with open(folder / "made", "a") as told:
            told.write(f"{k}\n")

    fill("shards", [folder / f"{k}.bin" for k in range(3)], make)


@pytest.mark.slow
def test_two_processes_fill_a_cache_once(tmp_path: Path) -> None:
    list(side_by_side(slow_shard, [tmp_path, tmp_path], 2))
    assert (tmp_path / "made").read_text() == "0\n1\n2\n"
    assert all((tmp_path / f"{k}.bin").read_bytes() == b"half of it" for k in range(3))


def test_shards_are_whole_or_not_there_and_made_once(tmp_path: Path) -> None:
    paths, made = [tmp_path / f"{k}.bin" for k in range(3)], []

    def make(k: int, file: io.BufferedIOBase) -> None:
        file.write(b"half of ")
        if k == 2 and not made.count(2):
            made.append(k)
            raise KeyboardInterrupt
        made.append(k)
        file.write(b"it")

    with pytest.raises(KeyboardInterrupt):
        fill("shards", paths, make)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.bin", "1.bin"]
    fill("shards", paths, make)
    assert made == [0, 1, 2, 2] and all(path.read_bytes() == b"half of it" for path in paths)


def test_a_cache_is_kept_where_it_is_and_begun_where_one_can_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.write_text("no folder")
    monkeypatch.setattr(cache, "folders", lambda: [file, tmp_path / "second"])
    made = cache_folder("kind", "name", {"of": 1})
    assert made.parent == tmp_path / "second" / "kind" and made.name.startswith("name-")
    assert cache_folder("kind", "name", {"of": 1}) == made != cache_folder("kind", "name", {"of": 2})
    monkeypatch.setattr(cache, "folders", lambda: [file])
    with pytest.raises(DataError, match="cannot be written; let CLIPWISE_DATA"):
        cache_folder("kind", "name", {"of": 1})
