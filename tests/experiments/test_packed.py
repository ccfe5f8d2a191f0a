"""Finished runs in two files: nothing is lost or changed, and a file that is damaged is refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from clipwise.errors import DataError, LedgerError
from clipwise.experiments import CURVES, RESULTS, Arm, Study, Trial, pack, packed, packed_runs, run_all, runs, runs_of
from clipwise.report import Run, arms_of
from tests.experiments.test_runs import CONFIG
from tests.report.samples import judged, made_run, regression_run

ARMS = (Arm("R = 1"), Arm("not private", ("optimizer.learning_rate=0.05",)))


def study_in(folder: Path) -> Study:
    return Study(folder / "config.toml", ARMS, seeds=2, folder=folder)


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a study with two arms and two seeds of each, whose runs have just ended."""
    folder = tmp_path_factory.mktemp("ended")
    (folder / "config.toml").write_text(CONFIG)
    for trial in study_in(folder).trials:
        norm = 1.0 if trial.arm.name == "R = 1" else None
        run = made_run(trial.arm.name, norm, seed=trial.seed, recalibrated={"temperature": judged(trial.seed, 1.0)})
        replace(run, config=trial.config().text).save(trial.folder)
    return folder


@pytest.fixture
def trained(ended: Path, tmp_path: Path) -> Study:
    return study_in(Path(shutil.copytree(ended, tmp_path / "trained")))


def only_packed(made: Study) -> None:
    """As in a fresh checkout."""
    pack(made)
    shutil.rmtree(made.folder / "runs")


def contents(folder: Path) -> tuple[bytes, bytes]:
    return (folder / RESULTS).read_bytes(), (folder / CURVES).read_bytes()


def test_a_packed_run_is_the_run_of_its_folder(trained: Study) -> None:
    before = list(runs_of(trained))
    records = {path.name: Run.record(path) for path in (trained.folder / "runs").iterdir()}
    only_packed(trained)
    assert list(runs_of(trained)) == before and len(before) == 4
    assert packed_runs(trained.folder) == records
    assert all(run.ledger is not None and run.ledger.events for run in before if run.name == "R = 1")


def test_a_run_without_ledger_bins_and_configuration_is_packed_too(tmp_path: Path) -> None:
    run = replace(regression_run(), config=None, fingerprint=None, ledger=None, guarantees={})
    record = Run.record(run.save(tmp_path / "run"))
    packed.write(tmp_path, {"one": record}, arms_of([run]))
    assert Run.from_record(packed_runs(tmp_path)["one"], "here") == run


def test_packing_twice_gives_the_same_bytes(trained: Study) -> None:
    pack(trained)
    first = contents(trained.folder)
    for name in (RESULTS, CURVES):
        (trained.folder / name).unlink()
    pack(trained)
    assert contents(trained.folder) == first
    shutil.rmtree(trained.folder / "runs")
    pack(trained)
    assert contents(trained.folder) == first


def test_results_have_the_arms_and_the_numbers_of_every_run(trained: Study) -> None:
    pack(trained)
    results = json.loads((trained.folder / RESULTS).read_text())
    assert set(results["arms"]) == {"R = 1", "not private"} and results["arms"]["R = 1"]["accuracy"]["seeds"] == 2
    run = results["runs"]["r-1-0"]
    assert {"accuracy", "nll", "ece"} <= set(run["result"]["test"]) and "fine_bins" not in run["result"]["test"]
    assert run["ledger"]["events"] and run["result"]["plan"]["noise_multiplier"] == 1.1 and "curves" not in run
    assert len((trained.folder / RESULTS).read_text().splitlines()) < 500  # a line per run: changes can be read


def test_packed_runs_count_as_finished(trained: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    only_packed(trained)
    monkeypatch.setattr(runs, "_carry_out", lambda *trial: pytest.fail(f"trains {trial} again"))
    before = runs_of(trained)
    assert run_all(trained, resume=True) == before and len(before) == 4
    with pytest.raises(DataError, match=r"holds 4 runs of this set: --resume keeps them"):
        run_all(trained)
    assert not (trained.folder / "runs").exists()


def test_only_missing_runs_are_trained(trained: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    only_packed(trained)
    before, asked = runs_of(trained)[0], list[str]()

    def note(work: object, todo: Sequence[Trial], jobs: object, watch: object) -> Iterator[None]:
        asked.extend(map(str, todo))
        for trial in todo:
            replace(before, name=trial.arm.name, config=trial.config().text).save(trial.folder)
        return iter(())

    monkeypatch.setattr(runs, "side_by_side", note)
    run_all(replace(trained, seeds=3), resume=True)
    assert asked == ["R = 1, seed 2", "not private, seed 2"]
    asked.clear()
    run_all(replace(trained, arms=ARMS[:1], seeds=1), force=True)
    assert asked == ["R = 1, seed 0"]
    asked.clear()
    run_all(replace(trained, seeds=2), resume=True, force=True)
    assert asked == ["not private, seed 0", "R = 1, seed 1", "not private, seed 1"], "that in a folder is kept"


def test_a_folder_wins_over_the_packed_run_and_is_packed_again(trained: Study) -> None:
    before = runs_of(trained)[0]
    only_packed(trained)
    newer = replace(before, warnings=("trained again",))
    newer.save(trained.folder / "runs" / "r-1-0")
    assert runs_of(trained)[0] == newer
    only_packed(trained)
    assert [run.warnings for run in runs_of(trained)] == [("trained again",), (), (), ()]


def test_a_packed_run_of_other_settings_is_refused(trained: Study) -> None:
    only_packed(trained)
    (trained.folder / "config.toml").write_text(CONFIG.replace("steps = 3", "steps = 4"))
    for read in (pack, runs_of, partial(run_all, resume=True)):
        with pytest.raises(DataError, match=r"results\.json, r-1-0 was trained with other settings .*add --again"):
            read(trained)


@pytest.mark.parametrize("name", [RESULTS, CURVES])
@pytest.mark.parametrize("damage", ["missing", "empty", "cut", "changed", "of other runs"])
def test_a_damaged_file_is_refused_by_name(trained: Study, name: str, damage: str) -> None:
    only_packed(trained)
    path = trained.folder / name
    whole = path.read_bytes()
    if damage == "missing":
        path.unlink()
    elif damage == "of other runs":
        records = dict(list(packed_runs(trained.folder).items())[:2])
        other = trained.folder / "other"
        other.mkdir()
        packed.write(other, records, ())
        shutil.copy(other / name, path)
    else:
        middle = len(whole) // 2
        changed = whole[:middle] + bytes([whole[middle] ^ 0xFF]) + whole[middle + 1 :]
        path.write_bytes({"empty": b"", "cut": whole[:-30], "changed": changed}[damage])
    expected = CURVES if damage == "of other runs" else name
    for read in (pack, runs_of, partial(run_all, resume=True), partial(run_all, force=True)):
        with pytest.raises(DataError, match=rf"{expected} is missing or damaged .*Restore"):
            read(trained)


def test_an_edited_ledger_is_refused(trained: Study) -> None:
    only_packed(trained)
    path = trained.folder / RESULTS
    path.write_text(path.read_text().replace('"steps": 1500, "reason"', '"steps": 150, "reason"'))
    with pytest.raises(LedgerError, match=r"results\.json, r-1-0, ledger\.json: .*edited"):
        pack(trained)


@pytest.mark.parametrize("text", ["[]", "{}", '{"runs": [], "curves": ""}', '{"runs": {"a": 1}, "curves": ""}'])
def test_results_of_another_form_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / RESULTS).write_text(text)
    with pytest.raises(DataError, match="is missing or damaged"):
        packed_runs(tmp_path)


def test_a_folder_without_runs_has_none(tmp_path: Path) -> None:
    assert packed_runs(tmp_path) == {} == packed_runs(tmp_path / "nowhere")
