"""kill -9 anywhere: the budget is never under-counted, and a seeded run ends as if nothing had happened."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.core.common import same
from tests.core.crash_runs import STEPS, live

ROOT = Path(__file__).parents[2]
KILLS = 27

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and SIGKILL")


def killed_run(folder: Path, seed: str) -> dict[str, Any]:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.core.crash_runs", str(folder), seed, str(KILLS)]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stderr
    found: dict[str, Any] = json.loads(run.stdout)
    return found


def test_a_seeded_run_survives_sigkill_bit_for_bit(tmp_path: Path) -> None:
    whole, crashed = tmp_path / "whole", tmp_path / "crashed"
    whole.mkdir()
    crashed.mkdir()
    live(whole, seed=7, log=False)
    found = killed_run(crashed, "7")
    assert found["killed"] >= 25
    assert found["ledger"] == STEPS and found["interrupted"] == 0
    # Steps were repeated, but each is one release: the same noisy gradient every time.
    assert found["releases"] >= found["steps_released"] == STEPS
    assert found["different_releases_of_a_step"] == 1
    assert same(torch.load(whole / "final.pt"), torch.load(crashed / "final.pt"))


def test_an_unseeded_run_never_under_counts(tmp_path: Path) -> None:
    found = killed_run(tmp_path, "none")
    assert found["killed"] >= 25 and found["under_counted"] == 0
    assert found["ledger"] == STEPS and found["interrupted"] > 0
    assert found["releases"] <= STEPS
    assert found["different_releases_of_a_step"] == 1  # no step number is ever used for two releases
    content = (tmp_path / "run.ckpt").read_bytes()
    assert all(b'["%s", null]' % name in content for name in (b"seed", b"label", b"generator", b"loader"))
