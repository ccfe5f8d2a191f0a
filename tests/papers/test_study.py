"""The frame of the recipes: what is trained, kept, resumed and written; and caches, filled shard by shard."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from clipwise.calibration import Estimate
from clipwise.errors import DataError
from clipwise.experiments import Arm, Study, runs_of, side_by_side
from clipwise.report import ArmResults
from papers import cache
from papers.cache import cache_folder, fill
from papers.study import main, placed
from papers.tables import page
from papers.verdicts import Claim
from tests.experiments.test_runs import CONFIG

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
