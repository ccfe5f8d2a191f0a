"""A study: what is trained, kept, continued and refused.

Finished runs in two files: nothing is lost or changed, and a file that is damaged is refused by name.

Work side by side, in processes of its own.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from clipwise.errors import ClipwiseError, DataError, InvalidConfig, LedgerError
from clipwise.experiments import (
    CURVES,
    RESULTS,
    Arm,
    Show,
    Standing,
    Study,
    Trial,
    Watch,
    advance,
    pack,
    packed,
    packed_runs,
    run_all,
    runs,
    runs_of,
    side_by_side,
    workers,
)
from clipwise.progress import Console
from clipwise.report import Run, arms_of
from tests.conftest import HANG, Terminal
from tests.report.samples import judged, made_run, regression_run

CONFIG = """
batch_size = 64
steps = 3

[data]
source = "digits"

[model]
source = "mlp"
hidden = [4]

[clip]
rule = "NoClip"

[optimizer]
name = "SGD"
learning_rate = 0.5

[privacy]
private = false

[evaluation]
resamples = 0
"""
ARMS = (Arm("fast"), Arm("not so fast", ("optimizer.learning_rate=0.05",)))


def one_by_one(
    work: Callable[[Trial], Any], todo: Sequence[Trial], jobs: int | None, watch: Watch
) -> Iterator[tuple[Trial, Any]]:
    """What `side_by_side` does, in this process: to start another one takes longer than these runs do."""
    for done, trial in enumerate(todo, start=1):
        run = work(trial)
        watch(Standing(done, len(todo), trial, run))
        yield trial, run


@pytest.fixture
def study(tmp_path: Path) -> Study:
    (tmp_path / "config.toml").write_text(CONFIG)
    return Study(tmp_path / "config.toml", ARMS, seeds=2, folder=tmp_path)


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "side_by_side", one_by_one)


@pytest.mark.usefixtures("in_this_process")
def test_arms_with_their_overrides_and_seeds_are_trained_once(study: Study) -> None:
    seen: list[str] = []
    whole = replace(study, arms=(ARMS[0], replace(ARMS[1], seeds=1)), note="chosen by hand")
    made = run_all(whole, watch=lambda standing: seen.append(str(standing.ended)), command="clipwise test")
    assert [(run.name, run.seed, run.choices.learning_rate) for run in made] == [
        ("fast", 0, 0.5),
        ("fast", 1, 0.5),
        ("not so fast", 0, 0.05),
    ]
    assert seen == ["fast, seed 0", "not so fast, seed 0", "fast, seed 1"], "seed by seed"
    assert all(run.warnings[-1] == "chosen by hand" and run.provenance["command"] == "clipwise test" for run in made)
    before = {path: path.read_bytes() for path in study.folder.glob("runs/*/result.json")}
    with pytest.raises(DataError, match="holds 3 runs of this set: --resume keeps them and continues"):
        run_all(whole)
    seen.clear()
    assert run_all(whole, resume=True, watch=lambda standing: seen.append(str(standing.ended))) == made and not seen
    assert {path: path.read_bytes() for path in before} == before
    run_all(replace(whole, seeds=1), force=True, watch=lambda standing: seen.append(str(standing.ended)))
    assert seen == ["fast, seed 0", "not so fast, seed 0"]
    assert [run.seed for run in runs_of(whole)] == [0, 1, 0], "seeds that are there count"


@pytest.mark.usefixtures("in_this_process")
def test_what_all_runs_set_counts_more_than_what_an_arm_sets(study: Study) -> None:
    made = run_all(replace(study, arms=ARMS[1:], seeds=1, overrides=("steps=1", "optimizer.learning_rate=0.25")))
    assert [(run.plan.steps, run.choices.learning_rate) for run in made] == [(1, 0.25)]


@pytest.mark.usefixtures("in_this_process")
def test_a_run_of_other_settings_is_not_kept(study: Study) -> None:
    one = replace(study, arms=ARMS[:1], seeds=1)
    run_all(one)
    study.config.write_text(CONFIG.replace("steps = 3", "steps = 4"))
    for resume in (lambda: run_all(one, resume=True), lambda: runs_of(study)):
        with pytest.raises(DataError, match="fast-0 was trained with other settings than fast, seed 0 has now"):
            resume()


def test_a_run_that_was_cut_is_compared_before_it_continues(study: Study) -> None:
    cut = study.trials[0].folder
    cut.mkdir(parents=True)
    (cut / "checkpoint").touch()
    with pytest.raises(DataError, match="fast-0 is not a whole run"):
        run_all(study, resume=True)
    (cut / "config.toml").write_text(CONFIG)
    with pytest.raises(DataError, match="fast-0 was trained with other settings"):
        run_all(study, resume=True)


def test_names_that_would_share_a_folder_are_refused(study: Study) -> None:
    for arms in ((Arm("R = 1"), Arm("R: 1")), (Arm("R = 1"), Arm("R = 1", ("clip.R=2.0",))), (Arm("="),)):
        with pytest.raises(InvalidConfig, match="need names that differ"):
            replace(study, arms=arms)
    for seeds in (0, -1, True, 1.5):
        with pytest.raises(InvalidConfig, match="at least one seed"):
            replace(study, seeds=seeds)


def test_the_bar_has_the_runs_and_the_largest_epsilon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    terminal, run = Terminal(), made_run("R = 1", 1.0)
    with Show(told=lambda standing: terminal.write("one more\n"), console=Console(terminal)) as show:
        show(Standing(0.5, 2))
        assert terminal.screen == ["runs [#####...............]  0/2"]
        show(Standing(1, 2, "R = 1, seed 0", run))
        show(Standing(2, 2, "R = 1, seed 1", problem="its process was ended"))
        show(Standing(2, 2))
        assert terminal.screen[:2] == ["one more", "failed, R = 1, seed 1: its process was ended"]
        spent = run.guarantees["exact"].epsilon
        shown = float(terminal.screen[2].split("epsilon ")[1])
        assert "2/2" in terminal.screen[2] and spent <= shown < spent + 0.001
    assert terminal.screen[2] == ""


@pytest.mark.slow
def test_a_run_that_fails_stops_no_other_and_can_be_tried_again(study: Study) -> None:
    broken = replace(study, arms=(Arm("broken", ("model.hidden=[0]",)), ARMS[0]), seeds=1)
    with pytest.raises(ClipwiseError, match=r"1 of 2 runs failed. The first: broken, seed 0: "):
        run_all(broken, jobs=2)
    assert [run.name for run in runs_of(study)] == ["fast"]
    whole = replace(study, arms=(Arm("broken", ("model.hidden=[2]",)), ARMS[0]), seeds=1)
    assert [run.name for run in run_all(whole, resume=True, jobs=1)] == ["broken", "fast"]


@pytest.mark.slow
def test_a_study_that_was_stopped_by_ctrl_c_continues_from_the_checkpoint(study: Study) -> None:
    long = replace(study, arms=ARMS[:1], overrides=("steps=20000", "evaluation.every=50", "checkpoint_every=50"))
    code = (
        "import signal; from pathlib import Path; from clipwise.experiments import Arm, Study, run_all\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"run_all(Study(Path({str(long.config)!r}), (Arm('fast'),), 2, Path({str(long.folder)!r}), {long.overrides}), "
        "jobs=1)"
    )
    started = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL, start_new_session=True)
    first, second = long.trials
    while not first.begun:
        assert started.poll() is None
        time.sleep(0.05)
    os.killpg(started.pid, signal.SIGINT)
    assert started.wait(HANG) != 0 and first.begun and not first.finished and not second.folder.exists()
    short = replace(long, seeds=1)
    steps: list[float] = []
    with pytest.raises(KeyboardInterrupt):
        run_all(short, jobs=1, resume=True, watch=lambda standing: _stop_soon(standing, steps))
    rows = [json.loads(line)["step"] for line in (first.folder / "metrics.jsonl").read_text().splitlines()]
    assert rows == [50 * k for k in range(1, len(rows) + 1)] and len(rows) > 1, "continued, nothing written twice"


def _stop_soon(standing: Standing, steps: list[float]) -> None:
    steps.append(standing.done)
    if standing.done > 0:
        raise KeyboardInterrupt


PACKED_ARMS = (Arm("R = 1"), Arm("not private", ("optimizer.learning_rate=0.05",)))


def study_in(folder: Path) -> Study:
    return Study(folder / "config.toml", PACKED_ARMS, seeds=2, folder=folder)


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
    run_all(replace(trained, arms=PACKED_ARMS[:1], seeds=1), force=True)
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


def half(number: int) -> float:
    advance(0.25)
    if number == 3:
        raise ValueError("three cannot be halved")
    return number / 2


@pytest.mark.slow
def test_an_item_that_fails_is_told_and_stops_no_other(capfd: pytest.CaptureFixture[str]) -> None:
    found = []
    with (
        pytest.raises(ClipwiseError, match=r"1 of 4 numbers failed. The first: 3: three cannot be halved"),
        Show("numbers") as show,
    ):
        found.extend(side_by_side(half, [3, 1, 2, 4], 2, show, "numbers"))
    assert sorted(found) == [(1, 0.5), (2, 1.0), (4, 2.0)]
    said = capfd.readouterr().err
    assert "failed, 3: three cannot be halved" in said and "numbers  4/4" in said


def killed(number: int) -> int:
    if number == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


@pytest.mark.slow
def test_a_worker_that_is_killed_takes_no_other_item_with_it(capfd: pytest.CaptureFixture[str]) -> None:
    found = []
    with pytest.raises(ClipwiseError, match=r"1 of 5 numbers failed. The first: 2: its process was ended .*-9"):
        found.extend(side_by_side(killed, [1, 2, 3, 4, 5], 2, what="numbers"))
    assert sorted(number for number, _ in found) == [1, 3, 4, 5]


def marked(path: Path) -> None:
    path.touch()
    time.sleep(HANG)


@pytest.mark.slow
def test_nothing_continues_after_ctrl_c(tmp_path: Path) -> None:
    """The signal reaches the whole group, as from a terminal; what waits is not begun."""
    paths = [tmp_path / name for name in "abcd"]
    code = (
        "import signal; from pathlib import Path; from clipwise.experiments import side_by_side\n"
        "from tests.experiments.test_runs import marked\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's background jobs ignore it
        f"list(side_by_side(marked, [Path(p) for p in {[str(p) for p in paths]}], 2))"
    )
    started = subprocess.Popen(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[2], stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    while not (paths[0].exists() and paths[1].exists()):
        assert started.poll() is None
        time.sleep(0.05)
    os.killpg(started.pid, signal.SIGINT)
    _, said = started.communicate(timeout=HANG)
    assert started.returncode == -signal.SIGINT and said.strip().endswith("KeyboardInterrupt")
    assert sorted(tmp_path.iterdir()) == paths[:2]


@pytest.mark.slow
def test_a_worker_ends_with_its_parent(tmp_path: Path) -> None:
    code = (
        "import os, time; from pathlib import Path; from clipwise.experiments import side_by_side\n"
        "from tests.experiments.test_runs import told_of\n"
        f"list(side_by_side(told_of, [Path({str(tmp_path)!r}, str(k)) for k in range(3)], 1))"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parents[2])
    first = tmp_path / "0"
    while not (first.is_file() and first.read_text()):
        assert parent.poll() is None
        time.sleep(0.05)
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + HANG
    while Path("/proc", first.read_text()).exists():
        assert time.monotonic() < deadline, "the worker lives on"
        time.sleep(0.1)
    assert [path.name for path in tmp_path.iterdir()] == ["0"]


def told_of(path: Path) -> None:
    parent = os.getppid()
    path.write_text(str(os.getpid()))
    while os.getppid() == parent:
        time.sleep(0.05)


def test_nothing_to_do_starts_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_Worker", lambda *a, **k: pytest.fail("a worker for nothing"))
    assert list(side_by_side(half, [], 2)) == []
