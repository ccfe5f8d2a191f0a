"""`clipwise train`: exit codes, what it prints, and the bar that a terminal shows."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from clipwise.cli.main import main
from clipwise.cli.train import watching
from clipwise.progress import Bar, Console
from clipwise.training import Progress
from clipwise.training.run import train as train_module
from tests.conftest import Terminal
from tests.training.common import TINY, exact_panel


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, figures_in_words: None) -> str:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train_module, "guarantees_of", exact_panel)
    Path("tiny.toml").write_text(TINY)
    return "tiny.toml"


def test_a_run_is_printed_and_reported(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", tiny, "--set", "evaluation.resamples=100"]) == 0
    shown = capsys.readouterr()
    for text in (
        "12 steps on 1,297 records of digits",
        "Accuracy",
        "ECE",
        "-differential privacy by the exact",
        " – ",
    ):
        assert text in shown.out
    assert "report: runs/tiny/report.html" in shown.out.replace("\\", "/")
    assert Path("runs/tiny/report.html").stat().st_size > 10_000 and "tiny" in Path("runs/tiny/card.md").read_text()
    lines = shown.err.splitlines()
    assert 0 < len(lines) <= 10 and all("steps/s" in line and "epsilon" in line for line in lines)


ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "clipwise"
Place = tuple[str, str]


def drawn() -> list[tuple[Place, Place | None]]:
    """The functions of CONTRIBUTING's drawing from top to bottom, each with the one that it is drawn under."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    block = re.search(r"```text\nclipwise train CONFIG\n(.*?)```", text, flags=re.DOTALL)
    assert block
    above: dict[int, Place] = {}
    lines: list[tuple[Place, Place | None]] = []
    for indent, file, function in re.findall(r"^( +)([\w/]+\.py) ([\w.]+) ", block[1], flags=re.MULTILINE):
        place = file, function.rpartition(".")[2]
        above = {**{depth: each for depth, each in above.items() if depth < len(indent)}, len(indent): place}
        lines.append((place, list(above.values())[-2] if len(above) > 1 else None))
    assert len(lines) == len(block[1].splitlines())
    return lines


def test_a_run_walks_as_it_is_drawn_for_contributors(tiny: str) -> None:
    lines = drawn()
    places = {place for place, _ in lines}
    walked: list[tuple[Place | None, Place | None]] = []

    names, source = {function for _, function in places}, f"{SOURCE}{os.sep}"

    def place_of(frame: FrameType) -> Place | None:
        code = frame.f_code  # asked for at every call of the run, so the cheapest question comes first
        if code.co_name not in names or not code.co_filename.startswith(source):
            return None
        return code.co_filename.removeprefix(source).replace(os.sep, "/"), code.co_name

    def look(frame: FrameType, event: str, _: Any) -> None:
        place = place_of(frame) if event == "call" else None
        if place not in places:
            return
        caller = frame.f_back
        while caller is not None and place_of(caller) not in places:
            caller = caller.f_back
        step = (place, None if caller is None else place_of(caller))
        if step not in walked:
            walked.append(step)

    sys.setprofile(look)
    try:
        assert main(["train", tiny, "--set", "steps=2", "--set", "evaluation.every=2"]) == 0
    finally:
        sys.setprofile(None)
    assert [step for step in walked if step in lines] == lines


def test_the_result_as_json(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["train", tiny, "--json", "--output", "elsewhere", "--set", "privacy.delta=0.01", "--allow-large-delta"])
        == 0
    )
    result = json.loads(capsys.readouterr().out)
    assert result["folder"] == "elsewhere" and result["steps"] == 12 and result["seed"] == 3
    assert 0 < result["test"]["accuracy"]["mean"] <= 1 and result["test"]["ece"]["low"] is None
    assert result["guarantees"]["exact"]["epsilon"] > 0
    assert any("over 1/1297" in warning for warning in result["guarantees"]["exact"]["warnings"])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--set", "clip.r=2"], "--set clip.r=2: clip.r: [clip] has no such key; did you mean 'R'?"),
        (["--resume"], "holds no checkpoint to resume from"),
        (["--set", "data.source=nowhere.csv"], "nowhere.csv"),
        (["--output", "tiny.toml"], "cannot be the folder of a run"),
    ],
)
def test_mistakes_are_one_line_and_2(
    tiny: str, argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", tiny, *argv]) == 2
    shown = capsys.readouterr().err
    assert message in shown and shown.startswith("clipwise: error: ") and shown.count("\n") == 1
    assert not Path("runs").exists()


def test_an_unknown_key_is_named_with_its_line(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path(tiny).write_text(TINY.replace("seed", "sede"))
    assert main(["train", tiny]) == 2
    expected = "tiny.toml, line 3: sede: the configuration has no such key; did you mean 'seed'?"
    assert expected in capsys.readouterr().err


@pytest.mark.slow
def test_ctrl_c_says_how_to_go_on(
    tiny: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(self: Bar, done: float, *others: object) -> None:
        if done == 6:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Bar, "show", interrupt)
        assert main(["train", tiny]) == 130
    assert "--resume continues" in capsys.readouterr().err
    assert main(["train", tiny]) == 2
    assert main(["train", tiny, "--resume", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["guarantees"]["exact"]["epsilon"] > 0


@pytest.mark.parametrize("where", [["--set", "name=k 2"], ["--output", "k 2"]])
def test_the_command_of_a_message_resumes_the_run_in_its_folder_under_its_name(
    where: list[str], tiny: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The stored configuration had neither name nor folder: it resumed nothing, or a run called 'config'."""
    Path("long.toml").write_text(TINY.replace('name = "tiny"\n', ""))

    def interrupt(self: Bar, done: float, *others: object) -> None:
        if done == 6:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Bar, "show", interrupt)
        assert main(["train", "long.toml", *where, "--set", "steps=9"]) == 130
    assert main(["train", "long.toml", *where, "--resume"]) == 2
    command = re.search(r"\(steps differ\)\. Resume it by `clipwise (.*)`", capsys.readouterr().err)
    assert command is not None
    assert main([*shlex.split(command[1]), "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["steps"] == 9 and made["name"] == ("k 2" if where[0] == "--set" else "long")
    assert Path(made["folder"]) == Path("runs/k 2" if where[0] == "--set" else "k 2")


def progress(step: int, steps: int = 100, epsilon: float | None = 1.2341) -> Progress:
    test = {"accuracy": 0.9, "nll": 0.3, "ece": 0.031} if step % 10 == 0 else None
    return Progress(step, steps, 0, lambda: epsilon, test)


def bar_on(stream: io.StringIO) -> Bar:
    return Bar("run", "steps", console=Console(stream))


def test_the_bar_of_a_run_has_speed_time_left_and_epsilon(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("clipwise.progress.time.monotonic", lambda: now[0])
    monkeypatch.setenv("COLUMNS", "160")
    terminal = Terminal()
    bar = bar_on(terminal)
    watch = watching(bar)
    for step in (1, 10, 50):
        now[0] = float(step)
        watch(progress(step))
    last = terminal.getvalue().split("\r")[-1]
    assert "run [##########..........]  50/100  1 steps/s  0:50 left  " in last
    assert "epsilon 1.235" in last and last.endswith("accuracy 90.0 %  ECE 3.1 %")  # rounded up
    bar.close()
    assert terminal.getvalue().endswith("\r\033[K")


def test_the_bar_knows_runs_without_privacy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    terminal = Terminal()
    watching(bar_on(terminal))(progress(50, epsilon=None))
    assert "not private" in terminal.getvalue()


def test_a_file_gets_a_line_for_every_tenth() -> None:
    stream = io.StringIO()
    bar = bar_on(stream)
    watch = watching(bar)
    for step in range(1, 1001):
        watch(progress(step, 1000))
    bar.close()
    lines = stream.getvalue().splitlines()
    assert len(lines) == 10 and "\r" not in stream.getvalue()
    assert all("epsilon 1.235" in line and "ECE 3.1 %" in line for line in lines)
