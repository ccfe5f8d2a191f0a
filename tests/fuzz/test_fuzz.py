"""A thousand damaged files for every reader; and the judge notices each kind of defect."""

from __future__ import annotations

import json
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clipwise.cli.main import main
from clipwise.errors import DataError
from tests.fuzz.__main__ import RESULTS, damaged, verdicts
from tests.fuzz.judge import CPU_SECONDS, LONGEST, MEMORY, judge
from tests.fuzz.readers import READERS

COUNT = 1_000


@pytest.mark.parametrize("name", READERS)
def test_a_damaged_file_is_read_or_refused(name: str, tmp_path: Path) -> None:
    kinds = {"accepted": 0, "refused": 0}
    for number, verdict in verdicts(name, seed=1, first=0, count=COUNT, folder=tmp_path):
        again = f"python -m tests.fuzz --reader {name} --first {number} --count 1"
        assert verdict.kind != "DEFECT", f"{verdict.detail} ({again})"
        kinds[verdict.kind] += 1
    assert min(kinds.values()) > 0, "files that are all read, or all refused, try nothing"


def test_damage_is_a_function_of_reader_seed_and_number(tmp_path: Path) -> None:
    reader = READERS["csv"](tmp_path)
    files = [damaged(reader, "csv", seed, number) for seed, number in ((1, 5), (1, 5), (1, 6), (2, 5))]
    assert files[0] == files[1] and len(set(files)) == 3


def _raise(error: BaseException) -> None:
    raise error


def _refuse_for_lack_of_memory() -> None:
    try:
        bytearray(2 * MEMORY)
    except MemoryError as error:
        raise DataError("too large") from error


def _spin() -> None:
    end = time.process_time() + 20 * CPU_SECONDS
    while time.process_time() < end:
        pass


@pytest.mark.parametrize(
    ("do", "detail"),
    [
        (lambda: _raise(ValueError("mine")), "ValueError at"),
        (lambda: _raise(DataError("")), "0 characters"),
        (lambda: warnings.warn("mind", UserWarning, stacklevel=1), "a warning: UserWarning: mind"),
        (lambda: bytearray(2 * MEMORY), "MemoryError"),
        (_refuse_for_lack_of_memory, "memory asked for in vain"),
        (lambda: np.ones(MEMORY // 32).sum(), ""),
        (lambda: sys.exit(3), "SystemExit"),
    ],
)
def test_the_judge_notices_defects(do: Any, detail: str) -> None:
    verdict = judge(lambda data: do(), b"")
    assert (verdict.kind == "DEFECT" and detail in verdict.detail) if detail else verdict.kind == "accepted"


def test_the_judge_notices_a_reader_that_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.fuzz.judge.CPU_SECONDS", 0.2)
    assert "processor time" in judge(lambda data: _spin(), b"").detail


def test_the_judge_knows_a_refusal() -> None:
    verdict = judge(lambda data: _raise(DataError(f"column '\x1b[31m' {'x' * 10 * LONGEST}")), b"")
    assert verdict.kind == "refused" and "\\x1b" in verdict.detail


def test_results_are_of_these_readers_and_without_defects() -> None:
    kept = json.loads(RESULTS.read_text(encoding="utf-8"))
    assert set(kept["readers"]) == set(READERS)
    assert all(not row["defects"] for row in kept["readers"].values())
    assert kept["limits"] == {"cpu_seconds": CPU_SECONDS, "memory_bytes": MEMORY}


TROUBLE = {
    "toml": ("train", "config.toml", b"steps = " + b"9" * 5_000),
    "set": ("train", "config.toml", b"steps = 5", "--set", "steps=" + "9" * 5_000),
    "csv": ("train", "table.csv", b"x,y\n1,\x002\n"),
    "npz": ("train", "table.npz", b"PK\x03\x04"),
    "ledger": ("epsilon", "ledger.json", b"[" * 100_000, "--delta", "1e-5"),
    "report": ("report", "result.json", b"\xff"),
}


@pytest.mark.parametrize("name", TROUBLE)
def test_the_command_line_says_it_in_one_line(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command, file, content, *options = TROUBLE[name]
    path = tmp_path / file
    path.write_bytes(content)
    given = path
    if path.suffix in (".csv", ".npz"):
        given = tmp_path / "of_data.toml"
        given.write_text(
            f"steps = 2\nbatch_size = 2\ndata = {{ source = '{path}', task = 'regression' }}\nmodel.source = 'mlp'\n"
            "clip = { rule = 'Abadi', R = 1.0 }\noptimizer.learning_rate = 0.1\nprivacy.noise_multiplier = 1.0\n"
        )
    arguments = ["--ledger", str(path)] if command == "epsilon" else [str(tmp_path if command == "report" else given)]
    assert main([command, *arguments, *options]) == 2
    said = capsys.readouterr().err
    assert said.startswith("clipwise: error: ") and said.count("\n") == 1
    assert path.name in said or "--set" in said
