"""The frame of the command line: exit codes, messages, pipes."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import clipwise
from clipwise.cli import main as cli
from clipwise.cli.table import table
from clipwise.errors import BudgetSpent, DataError, InvalidPlan
from tests.conftest import HANG


def fake_command(monkeypatch: pytest.MonkeyPatch, outcome: object) -> None:
    """Put a command `fake` into the list that returns or raises `outcome`."""

    def run(args: argparse.Namespace) -> int:
        if isinstance(outcome, BaseException):
            raise outcome
        assert isinstance(outcome, int)
        return outcome

    command = SimpleNamespace(NAME="fake", HELP="does nothing", add_arguments=lambda parser: None, run=run)
    monkeypatch.setattr(cli, "COMMANDS", ("fake",))
    monkeypatch.setattr(cli, "_load", lambda name: command)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith(f"clipwise {clipwise.__version__} (torch ")


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in cli.COMMANDS)


WRITES_A_TABLE = {"predict"}
"""Its standard output is a CSV file, for programs as it is."""


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_follows_the_convention(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = cli._load(name)
    assert name == command.NAME and command.HELP
    assert cli.main([name, "--help"]) == 0
    assert ("--json" in capsys.readouterr().out) is (name not in WRITES_A_TABLE)


@pytest.mark.parametrize("argv", [[], ["no-such-command"], ["--no-such-option"], ["demo", "--no-such-option"]])
def test_bad_usage_is_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(argv) == 2
    assert "usage: clipwise" in capsys.readouterr().err


@pytest.mark.parametrize("code", [0, 1])
def test_exit_code_of_the_command_is_passed_on(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_command(monkeypatch, code)
    assert cli.main(["fake"]) == code


@pytest.mark.parametrize("error", [InvalidPlan("too much\nof  it."), BudgetSpent("too much of it.")])
def test_our_errors_are_one_line_and_2(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_command(monkeypatch, error)
    assert cli.main(["fake"]) == 2
    assert capsys.readouterr().err == "clipwise: error: too much of it.\n"


def test_listed_problems_keep_their_lines(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    fake_command(monkeypatch, DataError("2 problems:\n  row 1: a\n gap\n  row 2: text"))
    assert cli.main(["fake"]) == 2
    assert capsys.readouterr().err == "clipwise: error: 2 problems:\n  row 1: a gap\n  row 2: text\n"


def test_other_errors_are_bugs_and_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_command(monkeypatch, ZeroDivisionError("a bug"))
    with pytest.raises(ZeroDivisionError):
        cli.main(["fake"])


def test_interrupt_is_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    fake_command(monkeypatch, KeyboardInterrupt())
    assert cli.main(["fake"]) == 130
    assert capsys.readouterr().err == "clipwise: interrupted\n"


def test_reader_that_went_away_is_no_traceback() -> None:
    with subprocess.Popen(["true"], stdin=subprocess.PIPE) as reader:
        reader.wait(HANG)
        command = [sys.executable, "-m", "clipwise", "--version"]
        done = subprocess.run(command, stdout=reader.stdin, stderr=subprocess.PIPE, text=True, timeout=HANG)
    assert (done.returncode, done.stderr) == (141, "")


LATE = {
    "demo": (["demo"], "matplotlib"),
    "evaluate": (["evaluate", "{folder}/no-such.csv"], "matplotlib"),
    "epsilon": (["epsilon", "--paper", "snli", "--plot", "{folder}/curve.svg"], "matplotlib"),
    "ntk": (["ntk", "no-such.toml", "--output", "{folder}/ntk"], "matplotlib"),
    "train": (["train", "examples/digits.toml", "--output", "{folder}/run"], "safetensors"),
}
"""Commands that use an extra when their work is done, and a module of it."""


@pytest.mark.parametrize("name", LATE)
def test_a_missing_extra_is_named_before_the_work(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv, module = LATE[name]
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr("clipwise.data.load", lambda *_: pytest.fail("the work has begun"))
    monkeypatch.setattr("clipwise.accounting.privacy_panel", lambda *_, **__: pytest.fail("the work has begun"))
    assert cli.main([each.format(folder=tmp_path) for each in argv]) == 2
    captured = capsys.readouterr()
    assert re.search(rf"is made with {module}: pip install 'clipwise\[\w+\]'\.$", captured.err.strip())
    assert not captured.out and not [*tmp_path.iterdir()]


def test_columns_are_aligned() -> None:
    lines = table(["", "ECE"], [["long name", "1.0%"], ["x", "12.5%"]]).splitlines()
    assert [len(line) for line in lines] == [len(lines[1])] * 4
    assert lines[3].endswith("12.5%")


def test_ragged_rows_are_refused() -> None:
    with pytest.raises(ValueError):
        table(["a", "b"], [["1", "2", "3"]])
