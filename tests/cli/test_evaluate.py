"""`clipwise evaluate`: anybody's probabilities are read as they are meant, or refused with all that is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from clipwise.calibration import evaluate
from clipwise.cli.main import main
from clipwise.data import read_predictions
from clipwise.errors import DataError
from clipwise.report import Run
from tests.report.samples import made_run

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
    ],
)
def test_one_column_or_some_of_many_are_enough(
    tmp_path: Path, text: str, options: dict[str, object], classes: tuple[str, str]
) -> None:
    found = read_predictions(written(tmp_path, text), **options)  # type: ignore[arg-type]
    assert found.classes == classes and found.probabilities[:, 1].tolist() == pytest.approx([0.9, 0.2])
    assert found.labels[0] == classes[1]


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
