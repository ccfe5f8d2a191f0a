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

from tests.conftest import HANG
from tests.core.common import same
from tests.core.crash_runs import STEPS, live
from tests.core.switch_runs import NOISE
from tests.core.switch_runs import STEPS as SWITCH_STEPS

ROOT = Path(__file__).parents[2]
KILLS = 27

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and SIGKILL")


def program(*arguments: str) -> Any:
    """What a program of this folder found."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, "-m", *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=HANG
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


SEEDS = ("7", "none")


@pytest.fixture(scope="module")
def crashed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, dict[str, Any]]]:
    """A seeded run and one without a seed that were killed again and again: their folders, and what was found."""
    folder = tmp_path_factory.mktemp("crashed")
    return folder, program("tests.core.crash_runs", str(folder), str(KILLS), "mix-up", *SEEDS)


def test_a_seeded_run_survives_sigkill_bit_for_bit(
    crashed: tuple[Path, dict[str, dict[str, Any]]], tmp_path: Path
) -> None:
    live(tmp_path, seed=7, log=False)
    found = crashed[1]["7"]
    assert found["killed"] >= 25
    assert found["ledger"] == STEPS and found["interrupted"] == 0
    # Steps were repeated, but each is one release: the same noisy gradient every time.
    assert found["releases"] >= found["steps_released"] == STEPS
    assert found["different_releases_of_a_step"] == 1
    assert same(torch.load(tmp_path / "final.pt"), torch.load(crashed[0] / "7" / "final.pt"))


def test_an_unseeded_run_never_under_counts(crashed: tuple[Path, dict[str, dict[str, Any]]]) -> None:
    found = crashed[1]["none"]
    assert found["killed"] >= 25 and found["under_counted"] == 0
    assert found["ledger"] == STEPS and found["interrupted"] > 0
    assert found["releases"] <= STEPS
    assert found["different_releases_of_a_step"] == 1  # no step number is ever used for two releases
    content = (crashed[0] / "none" / "run.ckpt").read_bytes()
    assert all(b'["%s", null]' % name in content for name in (b"seed", b"label", b"generator", b"loader"))


@pytest.mark.slow
def test_an_adaptive_norm_survives_sigkill_with_its_run(tmp_path: Path) -> None:
    """Seeded, it ends where it would have ended. Unseeded, the steps whose count was lost stay charged."""
    whole = tmp_path / "whole"
    whole.mkdir()
    bound = live(whole, seed=7, log=False, clip="adaptive").bound
    both = program("tests.core.crash_runs", str(tmp_path), "9", "adaptive", *SEEDS)
    found = both["7"]
    assert found["killed"] >= 8 and found["ledger"] == STEPS and found["interrupted"] == 0
    assert found["bound"] == bound and found["different_releases_of_a_step"] == 1
    assert same(torch.load(whole / "final.pt"), torch.load(tmp_path / "7" / "final.pt"))
    found = both["none"]
    assert found["killed"] >= 8 and found["under_counted"] == 0
    assert found["ledger"] == STEPS and found["interrupted"] > 0 and found["bound"] > 0


@pytest.mark.parametrize("seed", ["none", pytest.param("7", marks=pytest.mark.slow)])
def test_a_kill_around_a_switch_of_noise_charges_every_step_with_its_own(seed: str, tmp_path: Path) -> None:
    truth = [NOISE.at(step) for step in range(SWITCH_STEPS)]
    for found in program("tests.core.switch_runs", str(tmp_path), seed):
        assert found["died"] or (seed == "7" and found["case"].endswith(("counting", "counted"))), found
        assert found["charged"] == truth, found  # no step more, no step less, none with the noise of another
        assert all(noise == truth[step] for step, noise in found["released"]), found
        steps = [step for step, _ in found["released"]]
        if seed == "none":
            assert len(set(steps)) == len(steps), found  # no step number is released twice
        else:
            assert set(found["reasons"]) == {"training"} and set(steps) == set(range(SWITCH_STEPS)), found
