"""Finished runs in two files: nothing is lost or changed, and a file that is damaged is refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from papers import packed, study
from papers.packed import CURVES, RESULTS
from papers.study import Study, Variant, jobs, main, parser_of, runs_of

from clipwise.errors import DataError
from clipwise.report import ArmResults, Run, arms_of
from clipwise.training import Config
from tests.papers.test_study import CONFIG
from tests.report.samples import judged, made_run, regression_run

VARIANTS = (Variant("R = 1"), Variant("not private", ("optimizer.learning_rate=0.05",)))


def said(arms: Sequence[ArmResults], folder: Path) -> str:
    return "; ".join(f"{arm.name}: {len(arm.runs)}" for arm in arms)


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a study with two arms and two seeds of each, whose runs have just ended."""
    folder = tmp_path_factory.mktemp("ended")
    (folder / "config.toml").write_text(CONFIG)
    for job in jobs(Study(folder, VARIANTS, 2, ()), folder, parser_of("trained", 2).parse_args([])):
        norm = 1.0 if job.variant.name == "R = 1" else None
        run = made_run(job.variant.name, norm, seed=job.seed, recalibrated={"temperature": judged(job.seed, 1.0)})
        replace(run, config=Config.load(job.config, job.overrides()).text).save(job.output)
    return folder


@pytest.fixture
def trained(ended: Path, tmp_path: Path) -> Study:
    return Study(Path(shutil.copytree(ended, tmp_path / "trained")), VARIANTS, seeds=2, quick=())


def only_packed(made: Study) -> None:
    """As in a fresh checkout."""
    main(made, said, ["--draw"])
    shutil.rmtree(made.folder / "runs")


def contents(folder: Path) -> tuple[bytes, bytes]:
    return (folder / RESULTS).read_bytes(), (folder / CURVES).read_bytes()


def test_a_packed_run_is_the_run_of_its_folder(trained: Study) -> None:
    before = list(runs_of(trained, trained.folder))
    records = {path.name: Run.record(path) for path in (trained.folder / "runs").iterdir()}
    only_packed(trained)
    assert list(runs_of(trained, trained.folder)) == before and len(before) == 4
    assert packed.read(trained.folder) == records
    assert all(run.ledger is not None and run.ledger.events for run in before if run.name == "R = 1")


def test_a_run_without_ledger_bins_and_configuration_is_packed_too(tmp_path: Path) -> None:
    run = replace(regression_run(), config=None, fingerprint=None, ledger=None, guarantees={})
    record = Run.record(run.save(tmp_path / "run"))
    packed.write(tmp_path, {"one": record}, arms_of([run]))
    assert Run.from_record(packed.read(tmp_path)["one"], "here") == run


def test_packing_twice_gives_the_same_bytes(trained: Study) -> None:
    main(trained, said, ["--draw"])
    first = contents(trained.folder)
    for name in (RESULTS, CURVES):
        (trained.folder / name).unlink()
    main(trained, said, ["--draw"])
    assert contents(trained.folder) == first
    shutil.rmtree(trained.folder / "runs")
    main(trained, said, ["--draw"])
    assert contents(trained.folder) == first


def test_results_have_the_arms_and_the_numbers_of_every_run(trained: Study) -> None:
    main(trained, said, ["--draw"])
    results = json.loads((trained.folder / RESULTS).read_text())
    assert set(results["arms"]) == {"R = 1", "not private"} and results["arms"]["R = 1"]["accuracy"]["seeds"] == 2
    run = results["runs"]["r-1-0"]
    assert {"accuracy", "nll", "ece"} <= set(run["result"]["test"]) and "fine_bins" not in run["result"]["test"]
    assert run["ledger"]["events"] and run["result"]["plan"]["noise_multiplier"] == 1.1 and "curves" not in run
    assert len((trained.folder / RESULTS).read_text().splitlines()) < 500  # a line per run: changes can be read


def test_packed_runs_count_as_finished(trained: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    only_packed(trained)
    monkeypatch.setattr(study, "train_all", lambda todo, processes: pytest.fail(f"trains {todo} again"))
    main(trained, said, ["--resume"])
    with pytest.raises(SystemExit, match=r"holds 4 runs of this set: --resume keeps them"):
        main(trained, said, [])
    assert not (trained.folder / "runs").exists()


def test_only_missing_runs_are_trained(trained: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    only_packed(trained)
    asked: list[str] = []
    monkeypatch.setattr(study, "train_all", lambda todo, processes: asked.extend(map(str, todo)))
    main(trained, said, ["--resume", "--seeds", "3"])
    assert asked == ["R = 1, seed 2", "not private, seed 2"]
    asked.clear()
    main(trained, said, ["--again", "--only", "R = 1", "--seeds", "1"])
    assert asked == ["R = 1, seed 0"]


def test_a_folder_wins_over_the_packed_run_and_is_packed_again(trained: Study) -> None:
    before = next(iter(runs_of(trained, trained.folder)))
    only_packed(trained)
    newer = replace(before, warnings=("trained again",))
    newer.save(trained.folder / "runs" / "r-1-0")
    assert next(iter(runs_of(trained, trained.folder))) == newer
    only_packed(trained)
    assert [run.warnings for run in runs_of(trained, trained.folder)] == [("trained again",), (), (), ()]


def test_a_packed_run_of_other_settings_is_refused(trained: Study) -> None:
    only_packed(trained)
    (trained.folder / "config.toml").write_text(CONFIG.replace("steps = 3", "steps = 4"))
    for arguments in (["--draw"], ["--resume"]):
        with pytest.raises(SystemExit, match=r"results\.json, r-1-0 was trained with other settings .*add --again"):
            main(trained, said, arguments)


@pytest.mark.parametrize("name", [RESULTS, CURVES])
@pytest.mark.parametrize("damage", ["missing", "empty", "cut", "changed", "of other runs"])
def test_a_damaged_file_is_refused_by_name(trained: Study, name: str, damage: str) -> None:
    only_packed(trained)
    path = trained.folder / name
    whole = path.read_bytes()
    if damage == "missing":
        path.unlink()
    elif damage == "of other runs":
        records = dict(list(packed.read(trained.folder).items())[:2])
        other = trained.folder / "other"
        other.mkdir()
        packed.write(other, records, ())
        shutil.copy(other / name, path)
    else:
        middle = len(whole) // 2
        changed = whole[:middle] + bytes([whole[middle] ^ 0xFF]) + whole[middle + 1 :]
        path.write_bytes({"empty": b"", "cut": whole[:-30], "changed": changed}[damage])
    expected = CURVES if damage == "of other runs" else name
    for arguments in (["--draw"], ["--resume"]):
        with pytest.raises(SystemExit, match=rf"clipwise: error: .*{expected} is missing or damaged .*Restore"):
            main(trained, said, arguments)


def test_an_edited_ledger_is_refused(trained: Study) -> None:
    only_packed(trained)
    path = trained.folder / RESULTS
    path.write_text(path.read_text().replace('"steps": 1500, "reason"', '"steps": 150, "reason"'))
    with pytest.raises(SystemExit, match=r"results\.json, r-1-0: .*edited"):
        main(trained, said, ["--draw"])


@pytest.mark.parametrize("text", ["[]", "{}", '{"runs": [], "curves": ""}', '{"runs": {"a": 1}, "curves": ""}'])
def test_results_of_another_form_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / RESULTS).write_text(text)
    with pytest.raises(DataError, match="is missing or damaged"):
        packed.read(tmp_path)


def test_a_folder_without_runs_has_none(tmp_path: Path) -> None:
    assert packed.read(tmp_path) == {} == packed.read(tmp_path / "nowhere")
