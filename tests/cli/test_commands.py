"""`clipwise check`: a verdict, the rules, the memory, and errors that say where.

`clipwise demo`: short runs of the real thing; its words follow its numbers.

`clipwise evaluate`: anybody's probabilities are read as they are meant, or refused with all that is wrong.

The frame of the command line: exit codes, messages, pipes.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import clipwise
from clipwise.calibration import evaluate
from clipwise.cli import demo
from clipwise.cli import main as cli
from clipwise.cli.main import main
from clipwise.cli.terminal import table
from clipwise.data import read_predictions
from clipwise.errors import BudgetSpent, DataError, InvalidPlan
from clipwise.experiments import Arm
from clipwise.report import Run, arms_of
from clipwise.training import Config
from tests.conftest import HANG, without_drawing
from tests.experiments.test_runs import one_by_one
from tests.report.samples import made_run

USER_CODE = """
import torch
from torch import nn
from torch.nn import functional as F

def loss_fn(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="none")

def data():
    torch.manual_seed(0)
    return torch.randn(8, 1, 6, 6), torch.randint(0, 3, (8,))

def cnn():
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))
    return model, loss_fn, data()

def spare():
    model, loss, batch = cnn()
    model.register_parameter("spare", nn.Parameter(torch.zeros(5)))
    return model, loss, batch

def batch_norm():
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 3)), loss_fn, data()

def hidden_mixing():
    model = nn.Sequential(nn.BatchNorm2d(1, affine=False), nn.Flatten(), nn.Linear(36, 3))
    return model, loss_fn, data()

def pair():
    model, loss, batch = cnn()
    return loss(model, batch), dict(model.named_parameters())

def unnamed_pair():
    model, loss, batch = cnn()
    return loss(model, batch), list(model.parameters())

def mean_loss():
    model, loss, batch = cnn()
    return loss(model, batch).mean(), dict(model.named_parameters())

def broken():
    raise KeyError("no such layer")

def broken_loss():
    model, loss, batch = cnn()
    return model, lambda model, batch: 1 / 0, batch

def wrong():
    return 3
"""


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "user_models.py").write_text(USER_CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "user_models", raising=False)


def check(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = main(["check", *argv])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.usefixtures("user_module")
@pytest.mark.parametrize("target", ["user_models:cnn", "user_models.py:cnn"])
def test_supported_model(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = check(capsys, target)
    assert code == 0
    assert "can be trained privately" in out and "changed or removed" in out and "MiB" in out
    for parameter in ("0.weight", "0.bias", "3.weight", "3.bias"):
        assert parameter in out
    assert "ConvolutionBackward0" in out and "AddmmBackward0" in out


@pytest.mark.usefixtures("user_module")
def test_json_has_the_same_facts(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = check(capsys, "user_models:cnn", "--json")
    result = json.loads(out)
    assert code == 0 and result["ok"] and result["rerun"]
    assert result["batch_size"] == 8 and result["unreached"] == []
    named = {name for node in result["nodes"] for name in node["parameters"]}
    assert named == {"0.weight", "0.bias", "3.weight", "3.bias"}
    assert all(size > 0 for size in result["bytes"].values())


@pytest.mark.usefixtures("user_module")
@pytest.mark.parametrize("target", ["user_models:pair", "user_models:unnamed_pair"])
def test_losses_alone_say_what_was_not_checked(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = check(capsys, target)
    assert code == 0 and "as far as the graph shows" in out


@pytest.mark.usefixtures("user_module")
def test_unreached_parameter_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = check(capsys, "user_models:spare")
    assert code == 0 and "spare is reached by no sample" in out


@pytest.mark.usefixtures("user_module")
@pytest.mark.parametrize("target", ["user_models:batch_norm", "user_models:hidden_mixing"])
def test_mixing_samples_are_a_finding(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = check(capsys, target)
    assert code == 1 and "cannot be trained" in out and "NotSeparable" in out
    code, out, _ = check(capsys, target, "--json")
    result = json.loads(out)
    assert code == 1 and result["ok"] is False and result["error"] == "NotSeparable" and result["reason"]


@pytest.mark.usefixtures("user_module")
def test_reduced_loss_is_a_finding(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = check(capsys, "user_models:mean_loss")
    assert code == 1 and "reduction" in out


@pytest.mark.usefixtures("user_module")
@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("user_models:absent", "has no function absent"),
        ("user_models:wrong", "must return (model, loss_fn, batch) or (losses, params), got int"),
        ("user_models:broken", "broken() failed at user_models.py:"),
        ("user_models:broken_loss", "ZeroDivisionError"),
        ("no_such_module:f", "No module named 'no_such_module'"),
        ("no_such_file.py:f", "there is no file no_such_file.py"),
        ("not-a-target", "expected module:function"),
    ],
)
def test_unusable_function_is_2(target: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = check(capsys, target)
    assert code == 2 and message in err and out == ""


SHORT = {"steps": 6, "seeds": 2}
ARGUMENTS = ["demo", "--data", "digits", "--jobs", "1", *(f"--{name}={value}" for name, value in SHORT.items())]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a short demo, and what it printed."""
    folder, shown = tmp_path_factory.mktemp("demo"), io.StringIO()
    with contextlib.redirect_stdout(shown), pytest.MonkeyPatch.context() as patch:
        without_drawing(patch)
        patch.setattr("clipwise.experiments.runs.side_by_side", one_by_one)
        assert main([*ARGUMENTS, "--output", str(folder)]) == 0
    return folder, shown.getvalue()


def runs_of_arm(folder: Path, arm: str) -> list[Run]:
    name = Arm(demo.NAMES[arm]).slug
    return [Run.load(folder / "runs" / f"{name}-{seed}") for seed in range(SHORT["seeds"])]


def test_every_arm_is_a_run_that_train_could_have_made(made: tuple[Path, str]) -> None:
    runs = [Run.load(folder) for folder in sorted((made[0] / "runs").iterdir())]
    assert sorted({run.name for run in runs}) == sorted(demo.NAMES.values()) and len(runs) == 8
    epsilons = {run.guarantees["exact"].epsilon for run in runs if run.is_private}
    assert len(epsilons) == 1, "the private arms have one and the same epsilon"
    assert [run.is_private for run in runs].count(False) == 2
    c = demo.SETTINGS["digits"].rate
    assert {run.name: run.choices.learning_rate for run in runs} == {
        demo.NAMES["small"]: c / demo.SMALL,
        demo.NAMES["large"]: c / demo.LARGE,
        demo.NAMES["mix-up"]: f"{c:g} / R",
        demo.NAMES["non-private"]: c / demo.LARGE,
    }
    assert {len(run.curves) for run in runs} == {SHORT["steps"]}
    assert all("chosen by looking at these data" in run.warnings[-1] for run in runs), "told by every page on them"


def test_it_prints_a_table_both_epsilons_and_the_page(made: tuple[Path, str]) -> None:
    folder, shown = made
    for text in (
        *demo.NAMES.values(),
        " to ",
        "95 % intervals over 2 seeds",
        "numerically exact",
        "approximation, no bound",
    ):
        assert text in shown
    assert f"report: {folder / 'report.html'}" in shown
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert all(name in page for name in demo.NAMES.values())


def test_the_printed_numbers_are_those_of_the_runs(made: tuple[Path, str]) -> None:
    folder, shown = made
    runs = runs_of_arm(folder, "large")
    mean = 100 * (runs[0].test.accuracy + runs[1].test.accuracy) / 2  # type: ignore[union-attr]
    (row,) = (line for line in shown.splitlines() if line.strip().startswith(demo.NAMES["large"]))
    assert f"{mean:.2f} (" in row


@pytest.mark.slow
def test_two_processes_make_the_same_runs(made: tuple[Path, str], tmp_path: Path) -> None:
    args = argparse.Namespace(**{**SHORT, "seeds": 1}, output=str(tmp_path), jobs=2)
    for run, arm in zip(demo._experiment("digits", args), demo.NAMES, strict=True):
        other = runs_of_arm(made[0], arm)[0]
        assert run.name == other.name and run.test == other.test and run.ledger == other.ledger


def test_the_numbers_as_json(made: tuple[Path, str]) -> None:
    runs = [run for arm in demo.NAMES for run in runs_of_arm(made[0], arm)]
    result = json.loads(json.dumps(demo._result("digits", "", arms_of(runs), made[0] / "report.html", 1.0)))
    assert list(result["arms"]) == list(demo.NAMES.values()) and result["seeds"] == 2
    private = {value for name, value in result["epsilon"].items() if name != demo.NAMES["non-private"]}
    assert private == {result["accountants"]["exact"]} and result["epsilon"][demo.NAMES["non-private"]] is None


def test_digits_are_used_when_mnist_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    fetch = demo._fetch

    def without_mnist(name: str) -> None:
        if name == "mnist":
            raise DataError("no network.")
        fetch(name)

    monkeypatch.setattr(demo, "_fetch", without_mnist)
    name, note = demo._choose_data(None)
    assert name == "digits" and "no network." in note and "too small to see" in note
    with pytest.raises(DataError, match="no network"):
        demo._choose_data("mnist")  # asked for by name: no replacement


@pytest.mark.parametrize("argv", [["--seeds", "0"], ["--steps", "-1"], ["--data", "imagenet"]])
def test_bad_option_is_2(argv: list[str]) -> None:
    assert main(["demo", *argv]) == 2


def test_the_folder_has_a_configuration_that_train_takes(made: tuple[Path, str]) -> None:
    config = Config.load(made[0] / "config.toml")
    own = Config.load(made[0] / "runs" / f"{Arm(demo.NAMES['small']).slug}-0" / "config.toml")
    assert (config.clip, config.algorithm, config.privacy) == (own.clip, own.algorithm, own.privacy)


def test_a_folder_that_cannot_be_made_is_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main([*ARGUMENTS, "--output", str(tmp_path / "file" / "demo")]) == 2
    assert "Name another with --output." in capsys.readouterr().err


ROWS = "cat,dog,label\n0.9,0.1,cat\n0.4,0.6,cat\n0.3,0.7,dog\n0.2,0.8,dog\n"


def written(folder: Path, text: str, name: str = "predictions.csv") -> Path:
    path = folder / name
    path.write_text(text)
    return path


@pytest.mark.usefixtures("figures_in_words")
def test_the_numbers_are_those_of_evaluate_and_a_page_goes_beside_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, ROWS)
    assert main(["evaluate", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    expected = evaluate(
        [[0.9, 0.1], [0.4, 0.6], [0.3, 0.7], [0.2, 0.8]], [0, 0, 1, 1], bins=15, resamples=1000
    ).to_dict()
    assert {name: found[name] for name in ("accuracy", "nll", "ece", "intervals")} == {
        name: expected[name] if name != "intervals" else {k: list(v) for k, v in expected[name].items()}
        for name in ("accuracy", "nll", "ece", "intervals")
    }
    page = (tmp_path / "predictions-evaluation" / "report.html").read_text()
    assert found["report"].endswith("predictions-evaluation/report.html") and "not known here" in page
    assert "Trained without noise" not in page and "do not publish" not in page
    assert main(["evaluate", str(path), "--name", "theirs"]) == 0  # a second time, over the first
    assert Run.load(tmp_path / "predictions-evaluation").name == "theirs"
    assert "75.00 %" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "options", "classes"),
    [
        ("p,y\n0.9,yes\n0.2,no\n", {"label": "y", "positive": "yes"}, ("no", "yes")),
        ("yes,y\n0.9,yes\n0.2,no\n", {"label": "y"}, ("no", "yes")),
        ("p,label\n0.9,1\n0.2,0\n", {}, ("0", "1")),
        ("'=no,yes,label\n0.1,0.9,yes\n0.8,0.2,=no\n", {}, ("=no", "yes")),
        ("id,no,yes,label\n7,0.1,0.9,yes\n8,0.8,0.2,no\n", {"classes": ["no", "yes"]}, ("no", "yes")),
        ("id,p_no,p_yes,label\n7,0.1,0.9,yes\n8,0.8,0.2,no\n", {"prefix": "p_"}, ("no", "yes")),
    ],
)
def test_one_column_or_some_of_many_are_enough(
    tmp_path: Path, text: str, options: dict[str, object], classes: tuple[str, str]
) -> None:
    found = read_predictions(written(tmp_path, text), **options)  # type: ignore[arg-type]
    assert found.classes == classes and found.probabilities[:, 1].tolist() == pytest.approx([0.9, 0.2])
    assert found.labels[0] == classes[1]


@pytest.mark.usefixtures("figures_in_words")
def test_rounded_probabilities_are_taken_and_others_when_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rounded = written(tmp_path, "a,b,c,label\n0.33,0.33,0.33,a\n0.18,0.18,0.65,c\n")
    found = read_predictions(rounded)
    assert found.probabilities.sum(axis=1) == pytest.approx(1) and found.off == pytest.approx(0.01)
    assert main(["evaluate", str(rounded), "--resamples", "0"]) == 0
    said = capsys.readouterr().err
    assert "note: Rows added up to 1 within 0.01" in said and "infinite" not in said
    sure = written(tmp_path, "a,b,label\n0,1,a\n0,1,b\n", "sure.csv")
    assert main(["evaluate", str(sure), "--resamples", "0"]) == 0
    assert "NLL is infinite, since a true class got probability 0" in capsys.readouterr().err
    for name, text in (("predictions", "Rows added up to 1 within 0.01"), ("sure", "NLL is infinite, since a true")):
        for file in ("report.html", "card.md"):
            assert text in (tmp_path / f"{name}-evaluation" / file).read_text(), "not on the terminal alone"
    assert main(["evaluate", str(sure), "--resamples", "0", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["warnings"][0].startswith("NLL is infinite")
    for row in ("0.33,0.33,0.3,a", "0.33,0.333,0.33,a", "0.3,0.3,0.3,a"):  # more than the decimals explain
        with pytest.raises(DataError, match=r"do not add up to 1 within rounding\..* --normalise divides each row"):
            read_predictions(written(tmp_path, f"a,b,c,label\n{row}\n"))
    scores = written(tmp_path, "a,b,c,label\n0.3,0.2,0.5,a\n0.3,0.1,0.1,a\n")
    assert read_predictions(scores, normalise=True).probabilities[1].tolist() == pytest.approx([0.6, 0.2, 0.2])
    with pytest.raises(DataError, match="row 1: the probabilities do not add up to 1"):
        read_predictions(written(tmp_path, "a,b,label\n0,0,a\n"), normalise=True)


def test_columns_with_other_names_than_the_labels_are_listed_and_every_hint_stands_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(written(tmp_path, "p_low,p_high,label\n0.9,0.1,low\n0.9,0.3,high\n"))
    assert main(["evaluate", path]) == 2
    message = capsys.readouterr().err
    assert "none of the 2 classes, which are the columns p_low, p_high.\n" in message and "--prefix p_" in message
    assert (
        message.count("--classes") == message.count("--normalise") == 1
        and "do not add up to 1 within rounding.\n" in message
    )
    assert main(["evaluate", path, "--label", "lable"]) == 2
    message = capsys.readouterr().err
    assert "It has p_low, p_high, label. Did you mean 'label'? Name it with --label." in message
    assert "--show-values" not in message  # there is nothing more to show


def test_case_and_percentages_are_hinted_at(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def said(text: str, *options: str) -> str:
        assert main(["evaluate", str(written(tmp_path, text)), *options]) == 2
        return capsys.readouterr().err

    single = "p,label\n0.9,yes\n0.2,no\n"
    found = said(single, "--positive", "Yes")
    assert "'Yes' is none of the 2 labels. Upper and lower case count. --positive names one of them." in found
    assert "no, yes" in said(single, "--positive", "Yes", "--show-values")
    assert "Upper and lower" not in said(single, "--positive", "ja")
    named = "p_Cat,p_Dog,label\n0.9,0.1,cat\n0.2,0.8,dog\n"
    assert "Upper and lower case count." in said(named, "--prefix", "p_")
    assert "Upper and lower" not in said(named)
    assert "If these are percentages, divide them by 100." in said("cat,dog,label\n91.9,8.1,cat\n25.7,74.3,dog\n")
    assert "If these are" not in said("cat,dog,label\n3.1,-0.2,cat\n-1.5,0.3,dog\n")


def test_labels_may_be_in_another_file(tmp_path: Path) -> None:
    predictions, labels = written(tmp_path, "a,b\n0.5,0.5\n1,0\n"), written(tmp_path, "x,y\n3,a\n4,b\n", "test.csv")
    assert read_predictions(predictions, "y", labels_file=labels).labels == ("a", "b")
    with pytest.raises(DataError, match=r"has 2 rows, but .*one.csv has 1 labels"):
        read_predictions(predictions, "y", labels_file=written(tmp_path, "y\na\n", "one.csv"))


def test_all_problems_are_in_one_message_and_no_record_is_quoted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = "yes,no,label\n0.3,0.7,no\n1.7,0,yes\n,0.1,yes\n0.1,secret,no\n0.1,0.9,mybe\n0.5,0.4,yes\n"
    path = str(written(tmp_path, rows))
    assert main(["evaluate", path]) == 2
    message = capsys.readouterr().err
    for problem in (
        "has 5 problems",
        "column 'yes', row 3: the value is missing",
        "column 'yes', row 2: the value is not from 0 to 1",
        "column 'no', row 4: the value is not a number",
        "column 'label', row 5: the label is none of the 2 classes",
        "row 6: the probabilities do not add up to 1",
    ):
        assert problem in message
    assert "secret" not in message and "mybe" not in message and not (tmp_path / "predictions-evaluation").exists()
    assert main(["evaluate", path, "--show-values"]) == 2 and "secret" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("p,label\n0.9,yes\n0.2,no\n", {}, "--positive"),
        ("yes,label\n0.9,yes\n0.2,no\n0.2,other\n", {}, "3 classes, but only one column"),
        (ROWS, {"positive": "cat"}, "goes with a single column"),
        (ROWS, {"label": "kind"}, "no column 'kind' of labels"),
        (ROWS, {"classes": ["cat", "bird"]}, "no column 'bird'"),
        ("label\na\n", {}, "of probabilities"),
    ],
)
def test_what_cannot_be_known_is_refused(tmp_path: Path, text: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_predictions(written(tmp_path, text), **options)  # type: ignore[arg-type]


def test_the_result_of_a_training_run_is_never_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made_run().save(tmp_path / "run")
    assert main(["evaluate", str(written(tmp_path, ROWS)), "--output", str(tmp_path / "run")]) == 2
    assert "folder of a training run" in capsys.readouterr().err
    assert Run.load(tmp_path / "run").is_private


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


WRITES_A_FILE = {("predict",), ("data", "schema")}
"""Their standard output is a CSV or TOML file, for programs as it is."""
ACTIONS = [("data", action) for action in ("list", "get", "verify", "schema")]
CALLED = [*((name,) for name in cli.COMMANDS if name not in dict(ACTIONS)), *ACTIONS]


@pytest.mark.parametrize("called", CALLED, ids=" ".join)
def test_every_command_follows_the_convention(called: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    command = cli._load(called[0])
    assert called[0] == command.NAME and command.HELP
    assert cli.main([*called, "--help"]) == 0
    assert ("--json" in capsys.readouterr().out) is (called not in WRITES_A_FILE)


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
