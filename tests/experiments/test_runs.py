"""A study: what is trained, kept, continued and refused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clipwise.errors import ClipwiseError, DataError, InvalidConfig
from clipwise.experiments import Arm, Show, Standing, Study, Trial, Watch, run_all, runs, runs_of
from clipwise.progress import Console
from tests.conftest import HANG, Terminal
from tests.report.samples import made_run

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
