"""`clipwise report`: folders in, a page out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from clipwise.cli.main import main
from tests.report.samples import comparison, made_run


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for run in comparison(seeds=2):
        run.save(tmp_path / "runs" / f"{run.name} {run.seed}")
    return tmp_path / "runs"


pytestmark = pytest.mark.usefixtures("figures_in_words")


def test_one_run_gets_its_page_in_its_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made_run("mine").save(tmp_path / "mine")
    assert main(["report", str(tmp_path / "mine")]) == 0
    out = capsys.readouterr().out
    assert (tmp_path / "mine" / "report.html").is_file() and (tmp_path / "mine" / "card.md").is_file()
    assert "1.563" in out and out.endswith("report.html\n")


def test_a_folder_of_runs_is_compared_also_a_second_time(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        assert main(["report", str(runs)]) == 0
        out = capsys.readouterr().out
        assert "ECE" in out and str(runs / "report.html") in out
        assert [line.split("  ")[1] for line in out.splitlines()[2:5]] == ["not private", "R = 1", "R = 10"]
    assert json.loads((runs / "result.json").read_text())["format"] == "clipwise comparison"


def test_publishable_goes_to_a_folder_of_its_own(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(runs), "--publishable", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["report"] == str(runs / "publishable" / "report.html")
    assert set(printed["estimates"]) == {"R = 1", "R = 10"}
    assert printed["epsilon"]["R = 1"] == pytest.approx(1.563, abs=1e-3)
    assert not (runs / "report.html").exists()


def test_output_names_the_page_or_its_folder(runs: Path, tmp_path: Path) -> None:
    one = str(runs / "R = 1 0")
    assert main(["report", one, "--output", str(tmp_path / "a" / "page.html")]) == 0
    assert main(["report", one, one, "--output", str(tmp_path / "b")]) == 0
    assert (tmp_path / "a" / "page.html").is_file() and (tmp_path / "b" / "report.html").is_file()


def test_runs_without_a_common_folder_need_an_output(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("os.path.commonpath", lambda paths: Path(runs.anchor))
    assert main(["report", str(runs / "R = 1 0"), str(runs / "R = 10 0")]) == 2
    assert "say with --output" in capsys.readouterr().err


def test_what_is_no_run_is_one_line_and_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 2
    assert "neither a finished run" in capsys.readouterr().err
    (tmp_path / "result.json").write_text("{")
    assert main(["report", str(tmp_path)]) == 2
    assert "not JSON as clipwise writes it" in capsys.readouterr().err
    assert main(["report"]) == 2
