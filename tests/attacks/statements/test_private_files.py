"""What others on the machine, the readers of a log and the readers of a page must not see of private records."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import numpy as np
import pytest

from clipwise.calibration import evaluate
from clipwise.cli.main import main
from clipwise.data import from_file
from clipwise.errors import DataError, InvalidConfig
from clipwise.files import private_folder, replacing
from clipwise.report import Choices, Run, write
from clipwise.training import Progress, train
from clipwise.training.run import train as train_module
from tests.report.samples import made_run
from tests.training.common import config, exact_panel

SECRET = "Jane Roe"
HOME = "/srv/roe/clinic"


def modes(folder: Path) -> dict[str, int]:
    return {each.name: stat.S_IMODE(each.stat().st_mode) for each in (folder, *folder.rglob("*"))}


@pytest.mark.skipif(os.name == "nt", reason="no modes of files here")
def test_everything_that_a_run_writes_is_its_owners_alone(
    tmp_path: Path, open_mask: None, figures_in_words: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it trains and afterwards: weights, curves, checkpoint, digests, page and figures."""
    monkeypatch.setattr(train_module, "guarantees_of", exact_panel)
    folder, seen = tmp_path / "run", {}

    def watch(_: Progress) -> None:
        seen.update(modes(folder))

    train(config(), output=folder, watch=watch)
    assert {"checkpoint", "checkpoint.digests", "metrics.jsonl", "config.toml"} <= seen.keys()
    seen |= modes(folder)
    assert {"model.safetensors", "result.json", "ledger.json", "data.digest", "report.html", "figures"} <= seen.keys()
    assert {name for name, mode in seen.items() if mode not in (0o600, 0o700)} == set()
    assert {name for name, mode in seen.items() if mode == 0o700} == {"run", "figures"}


@pytest.mark.skipif(os.name == "nt", reason="no modes of files here")
def test_a_file_is_private_before_its_first_byte(tmp_path: Path, open_mask: None) -> None:
    with replacing(private_folder(tmp_path / "new") / "file") as file:
        assert stat.S_IMODE(os.stat(file.name).st_mode) == 0o600 and not os.stat(file.name).st_size
        Path(file.name).write_bytes(b"by name")  # as a library does that takes no open file
    assert (tmp_path / "new" / "file").read_bytes() == b"by name"
    assert modes(tmp_path / "new") == {"new": 0o700, "file": 0o600}


TABLES = {
    "not a number": f"x,y\n1.0,a\n{SECRET},b\n2.0,a\n",
    "too large": "x,y\n1.0,a\n6.02214e77,b\n2.0,a\n",
    "an unknown class": f"x,y\n1.0,a\n2.0,{SECRET}\n3.0,a\n",
    "a single class": f"x,y\n1.0,{SECRET}\n2.0,{SECRET}\n",
    "no header": f"6.02214,{SECRET}\n1.0,b\n",
    "no header, twice the same": f"{SECRET},{SECRET}\n1.0,b\n",
    "no header, another delimiter": f"6.02214;{SECRET}\n1.0;b\n",
}


@pytest.mark.parametrize(("kind", "text"), TABLES.items(), ids=TABLES)
def test_a_message_about_a_table_names_the_place_and_not_the_value(tmp_path: Path, kind: str, text: str) -> None:
    path = tmp_path / "table.csv"
    path.write_text(text)
    with pytest.raises(DataError) as caught:
        from_file(path, classes=["a", "b"] if kind == "an unknown class" else None, test=1)
    message = str(caught.value)
    assert SECRET not in message and "6.02214" not in message and "table.csv" in message
    assert SECRET in caught.value.found or "6.02214" in caught.value.found
    if "header" not in kind and kind != "a single class":
        assert "row 2" in message and "column" in message


def test_the_command_shows_a_value_only_when_it_is_asked_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("table.csv").write_text(TABLES["not a number"])
    Path("mine.py").write_text(f"def load():\n    raise KeyError('{SECRET}')\n")
    Path("run.toml").write_text(config().text.replace('"digits"', '"table.csv"'))
    for source in ("table.csv", "mine.py:load"):
        command = ["train", "run.toml", "--set", f"data.source={source}"]
        assert main(command) == 2
        assert SECRET not in (hidden := capsys.readouterr().err) and "--show-values shows it" in hidden
        assert main([*command, "--show-values"]) == 2
        assert SECRET in capsys.readouterr().err


def test_messages_about_scores_and_labels_name_rows() -> None:
    scores, labels = np.full((4, 2), 0.5), np.array([0, 1, 0, 1])
    with pytest.raises(DataError, match="row 2") as caught:
        evaluate(np.where(np.arange(4)[:, None] == 2, 0.123, scores), labels)
    assert "0.123" not in str(caught.value) and "0.123" in caught.value.found
    with pytest.raises(DataError, match="that of row 3 is not") as caught:
        evaluate(scores, np.where(labels == 1, [0, 1, 0, 777], labels))
    assert "777" not in str(caught.value) and caught.value.found == "777"


def test_a_publishable_page_has_no_path_of_the_machine(tmp_path: Path, figures_in_words: None) -> None:
    provenance = {
        "command": f"clipwise train {HOME}/run.toml",
        "data": {"name": f"{HOME}/load.py:patients", "source": f"{HOME}/load.py", "note": f"read from {HOME}/a.csv."},
        "model": f"HuggingFace(folder='{HOME} of mine/bert')",
    }
    run = made_run(
        provenance=provenance,
        config=f"output = '{HOME}'",
        choices=Choices(0.1, f"mine(path='{HOME}/sgd.py')", further={"weights": f"~roe/clinic{HOME}/w.pt"}),
        warnings=(f"Recalibration failed in {HOME}/x.py.",),
    )
    write(Run.load(run.save(tmp_path / "run")), tmp_path / "page", publishable=True)
    files = [each for each in (tmp_path / "page").rglob("*") if each.is_file()]
    assert len(files) > 5
    for each in files:
        text = each.read_text(encoding="utf-8")
        assert "roe" not in text.lower() and "clinic" not in text.lower(), each
    page = (tmp_path / "page" / "report.html").read_text(encoding="utf-8")
    assert "load.py:patients" in page and "bert" in page


@pytest.mark.parametrize("name", ["../../x", "a/../..", "/tmp/x", "..", ".", "a\x1b[2Jb", "a\nb", "a\0b", "a\u202eb"])
def test_a_name_stays_in_its_folder_and_on_its_line(name: str) -> None:
    text = config().text.replace('name = "tiny"\n', "")
    escaped = "".join(f"\\u{ord(c):04x}" for c in name)
    with pytest.raises(InvalidConfig, match=r"name: .*(leads out of runs|control character)"):
        config(text=f'name = "{escaped}"\n{text}')
    if not name.isprintable():
        with pytest.raises(InvalidConfig, match="output: has a control character"):
            config(text=f'output = "{escaped}"\n{text}')
        with pytest.raises(DataError, match="a name of one line"):
            made_run(name)


def test_names_that_are_only_unusual_are_kept() -> None:
    for name in ("R = 1, rate 2 / R", "é", "a.b", "...", "x/y"):
        assert config(f"name={name}").output == Path("runs", name)
