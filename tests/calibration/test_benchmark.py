"""The benchmark of the calibration page: its parts run, and the page's tables are those of the kept numbers."""

from __future__ import annotations

import json

import pytest
from benchmarks import calibration


@pytest.mark.parametrize("part", ["stream", "coverage", "private"])
def test_the_tables_are_those_of_the_numbers(part: str) -> None:
    report = json.loads((calibration.HERE / "calibration.json").read_text(encoding="utf-8"))
    kept = (calibration.HERE / f"calibration_{part}.md").read_text(encoding="utf-8")
    assert calibration._tables(report)[part] == kept


def test_a_million_rows_of_a_thousand_classes_were_streamed_in_bounded_memory() -> None:
    report = json.loads((calibration.HERE / "calibration.json").read_text(encoding="utf-8"))
    assert {(row["samples"], row["classes"]) for row in report["stream"]} == {(1_000_000, 1_000)}
    assert max(row["added_memory_mb"] for row in report["stream"]) < 0.06 * report["stream"][0]["input_mb_float32"]


def test_the_parts_run() -> None:
    assert calibration.stream(2_000, 10, 100, "probabilities")["samples"] == 2_000
    assert calibration.intervals(200, 3, 100)["seconds"] > 0
    row = calibration.private(300, noise_multiplier=5.0, fits=1)
    assert row["ece_private"] < row["ece_before"]
