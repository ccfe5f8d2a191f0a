"""A run that is killed at any moment goes on with --resume, and its budget is never under-counted."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import clipwise as cw
from clipwise.cli.main import main
from clipwise.data import DataSet
from clipwise.errors import CheckpointError, DataError, InvalidConfig
from clipwise.report import RunFolder, arms_of, warnings_of
from clipwise.report.warnings import ended_early
from clipwise.training import Progress, train
from tests.conftest import HANG

from .common import TINY, config
from .crash_runs import FEDERATED

ROOT = Path(__file__).parents[2]
STEPS = 40


pytestmark = pytest.mark.usefixtures("exact_only")


def killed_run(folder: Path, seeded: str) -> dict[str, Any]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.training.crash_runs", str(folder), seeded]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=HANG, check=False)
    assert run.returncode == 0, run.stderr
    found: dict[str, Any] = json.loads(run.stdout)
    return found


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and SIGKILL")
def test_a_seeded_run_survives_kills_bit_for_bit(tmp_path: Path) -> None:
    found = killed_run(tmp_path, "seeded")
    assert found["killed"] >= 7
    assert found["events"] == [[["training", STEPS]]] * 2
    assert found["steps"][0] == found["steps"][1] == list(range(5, STEPS + 1, 5))
    assert found["rows"][0] == found["rows"][1]
    whole, crashed = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "crashed"))
    assert all(torch.equal(whole[name], crashed[name]) for name in whole)
    assert "checkpoint" not in found["files"] and not any(name.startswith(".") for name in found["files"])


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and SIGKILL")
def test_an_unseeded_run_pays_for_every_step_that_it_began(tmp_path: Path) -> None:
    found = killed_run(tmp_path, "unseeded")
    assert found["killed"] >= 7
    charged = dict.fromkeys(("training", "interrupted"), 0)
    for reason, count in found["events"][1]:
        charged[reason] += count
    assert sum(charged.values()) == STEPS and charged["interrupted"] > 0
    steps = [step for step, _ in found["seen"]]
    assert len(steps) == len(set(steps)) <= STEPS, "no step is released twice"


def interrupted(folder: Path, text: str = TINY, at: int = 5, **options: Any) -> None:
    """Begin or continue a run, and stop it by Ctrl-C after step 5; the last checkpoint is of step 4."""

    def stop(progress: Progress) -> None:
        if progress.step == at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(config(text=text), output=folder, page=False, watch=stop, **options)


def test_an_interrupted_run_is_resumed_only_as_it_was_begun(tmp_path: Path) -> None:
    interrupted(tmp_path / "run")
    with pytest.raises(DataError, match=r"holds an interrupted run\. Use --resume"):
        train(config(), output=tmp_path / "run")
    with pytest.raises(InvalidConfig, match=r"another configuration \(clip.R, model.activation differ\)"):
        train(config("clip.R=2", "model.activation=relu"), output=tmp_path / "run", resume=True)
    steps: list[tuple[int, int]] = []
    run, _ = train(
        config(), output=tmp_path / "run", resume=True, page=False, watch=lambda p: steps.append((p.first, p.step))
    )
    assert steps[0] == (4, 5) and [row["step"] for row in run.curves] == [4, 8, 12]
    assert run.provenance["seconds"] > 0


@pytest.mark.parametrize("seed", ["", "seed = 3\n"])
def test_an_interrupted_epoch_of_balls_in_bins_is_left_unless_it_can_be_repeated(seed: str, tmp_path: Path) -> None:
    text = TINY.replace("seed = 3\n", seed).replace("batch_size = 64", 'batch_size = 480\nsampling = "balls-in-bins"')
    interrupted(tmp_path / "run", text)
    steps: list[int] = []
    run, _ = train(
        config(text=text), output=tmp_path / "run", resume=True, page=False, watch=lambda p: steps.append(p.step)
    )
    sampling = cw.BallsInBins(1_437, 480)
    assert sampling.batches_per_epoch == 3 and run.ledger is not None and run.ledger.steps == 12
    assert steps[0] == (5 if seed else 7) and steps[-1] == 12
    whole = cw.GaussianSteps(sampling, 1.0, 12)
    assert run.guarantees["exact"].epsilon == cw.Ledger([whole]).epsilon(run.guarantees["exact"].delta)
    assert run.guarantees["exact"].kind == "upper bound"


def test_other_data_than_those_of_the_beginning_are_refused(tmp_path: Path) -> None:
    interrupted(tmp_path / "run")
    changed = config().data.load()
    changed.train.tensors[0][0] += 1.0
    with pytest.raises(CheckpointError, match="the data changed"):
        train(config(), output=tmp_path / "run", resume=True, data=changed)


def edited() -> DataSet:
    """The records of the configuration, one of them changed."""
    data = config().data.load()
    data.train.tensors[0][0] += 1.0
    return data


@pytest.mark.parametrize("base", [TINY, FEDERATED], ids=["dp-sgd", "dp-fedavg"])
def test_without_a_seed_other_data_are_refused_or_named_on_the_ledger_and_the_page(base: str, tmp_path: Path) -> None:
    text, folder = base.replace("seed = 3\n", ""), tmp_path / "run"
    interrupted(folder, text)
    with pytest.raises(CheckpointError, match=r"the data changed: .* --changed-data"):
        train(config(text=text), output=folder, resume=True, data=edited())
    assert os.stat(folder / "data.digest").st_mode & 0o077 == 0
    interrupted(folder, text, at=9, resume=True, data=edited(), changed_data=True)
    # A crash later the records are the same as before it: the steps that follow are marked as well.
    with pytest.raises(CheckpointError, match="the data changed"):
        train(config(text=text), output=folder, resume=True)
    run, _ = train(config(text=text), output=folder, resume=True, data=edited(), page=False)
    assert run.ledger is not None and run.ledger.steps == 12
    reasons = [(event.reason, event.count) for event in run.ledger.events]
    assert reasons == [
        (reasons[0][0], 4),
        ("interrupted", 1),
        ("changed data", 3),
        ("interrupted", 1),
        ("changed data", 3),
    ]
    assert any("Records were changed" in warned.text for warned in warnings_of(arms_of([run])))


def test_a_seeded_run_cannot_go_on_with_other_data(tmp_path: Path) -> None:
    interrupted(tmp_path / "run")
    with pytest.raises(CheckpointError, match="Start again with another seed"):
        train(config(), output=tmp_path / "run", resume=True, data=edited(), changed_data=True)


def test_a_run_whose_digest_is_gone_may_have_other_data(tmp_path: Path) -> None:
    text = TINY.replace("seed = 3\n", "")
    interrupted(tmp_path / "run", text)
    (tmp_path / "run" / "data.digest").unlink()
    with pytest.raises(CheckpointError, match="the data changed"):
        train(config(text=text), output=tmp_path / "run", resume=True)
    run, _ = train(config(text=text), output=tmp_path / "run", resume=True, page=False, changed_data=True)
    assert run.ledger is not None and run.ledger.events[-1].reason == "changed data"


@pytest.mark.parametrize("base", [TINY, FEDERATED], ids=["dp-sgd", "dp-fedavg"])
def test_a_witness_keeps_an_older_copy_of_the_folder_from_being_resumed(base: str, tmp_path: Path) -> None:
    text = f'witness = "{tmp_path / "witness"}"\nwitness_every = 2\n' + base.replace("seed = 3\n", "")
    folder = tmp_path / "run"
    interrupted(folder, text)
    shutil.copytree(folder, tmp_path / "copy")
    interrupted(folder, text, at=9, resume=True)
    with pytest.raises(CheckpointError, match="an older copy was put back"):
        train(config(text=text), output=tmp_path / "copy", resume=True)
    run, _ = train(config(text=text), output=folder, resume=True, page=False)
    assert run.ledger is not None and run.ledger.steps == 12 and not (tmp_path / "witness").exists()
    assert sum(event.count for event in run.ledger.events if event.reason == "charged ahead") == 2
    with pytest.raises(CheckpointError, match=r"witness .* cannot be read"):  # the run is over
        train(config(text=text), output=tmp_path / "copy", resume=True)


@pytest.mark.parametrize("base", [TINY, FEDERATED], ids=["dp-sgd", "dp-fedavg"])
def test_what_an_interrupted_run_has_spent_can_be_seen(
    base: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guarantees: the ledger has every step that a run without a seed has begun, also after the checkpoint."""
    folder, delta = tmp_path / "run", 1e-4
    interrupted(folder, base.replace("seed = 3\n", ""))  # after step 5; the checkpoint is of step 4
    assert sum(event.count for event in RunFolder(folder).spent().ledger.events) == RunFolder(folder).spent().steps == 5
    epsilons = []
    for path in (folder, folder / "ledger.json"):
        assert main(["epsilon", "--ledger", str(path), "--delta", str(delta), "--accountant", "exact", "--json"]) == 0
        said = capsys.readouterr()
        assert "5 steps are spent of 12 planned (so far)" in said.err
        epsilons.append(json.loads(said.out)["accountants"]["exact"]["epsilon"])
    told: list[str] = []
    text = base.replace("seed = 3\n", "")
    resumed, _ = train(config(text=text), output=folder, resume=True, page=False, tell=told.append)
    assert "of 12 steps 5 are spent, 1 of them in vain" in told[0]
    assert any("1 of the steps were interrupted" in text for text in ended_early(resumed))
    assert resumed.ledger is not None and epsilons[0] == epsilons[1] < resumed.ledger.epsilon(delta)
    assert main(["epsilon", "--ledger", str(folder), "--delta", str(delta), "--accountant", "exact", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["accountants"]["exact"]["epsilon"] == resumed.ledger.epsilon(delta)


def test_a_witness_that_is_charged_ahead_counts_in_what_is_spent(tmp_path: Path) -> None:
    text = f'witness = "{tmp_path / "witness"}"\nwitness_every = 3\n' + TINY.replace("seed = 3\n", "")
    interrupted(tmp_path / "run", text)
    spent = RunFolder(tmp_path / "run").spent().ledger
    run, _ = train(config(text=text), output=tmp_path / "run", resume=True, page=False)
    assert run.ledger is not None
    resumed_with = sum(event.count for event in run.ledger.events if event.reason in ("interrupted", "charged ahead"))
    assert spent.steps >= 4 + resumed_with, "less must not be shown than the resumed run counts"


def test_an_interrupted_run_says_how_it_is_finished(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    interrupted(folder)
    for command in (["predict", str(folder), "new.csv"], ["report", str(folder)]):
        assert main(command) == 2
        said = capsys.readouterr().err
        assert (
            f"clipwise train {folder}/config.toml --output {folder} --resume" in said and "Train it again" not in said
        )
        assert "Of its 12 steps 4 are spent" in said and f"clipwise epsilon --ledger {folder}" in said
    assert main(["epsilon", "--ledger", str(folder), "--delta", "1e-4", "--accountant", "exact"]) == 0
    assert "it has a seed, and makes later steps again" in capsys.readouterr().err


def test_force_begins_anew(tmp_path: Path) -> None:
    interrupted(tmp_path / "run")
    run, folder = train(config("clip.R=2"), output=tmp_path / "run", force=True, page=False)
    assert run.ledger is not None and run.ledger.steps == 12 and not (folder / "checkpoint").exists()
