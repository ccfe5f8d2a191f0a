"""A run that begins with given weights: they fit or are refused, and nobody takes their epsilon for part of its own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from clipwise.accounting import Ledger
from clipwise.errors import CheckpointError, DataError, InvalidConfig
from clipwise.report import Run, RunFolder, card
from clipwise.training import prepare, train

from .common import TINY, config

pytestmark = pytest.mark.usefixtures("exact_only")

UNSEEDED = TINY.replace("seed = 3\n", "")


@pytest.fixture
def others(tmp_path: Path) -> str:
    """A setting for other records, of the same shape as the digits."""
    return records(tmp_path / "others.npz", 0)


def records(path: Path, seed: int) -> str:
    random = np.random.default_rng(seed)
    x, y = random.random((200, 1, 8, 8), dtype=np.float32), np.arange(200) % 10
    np.savez(path, x_train=x[:150], y_train=y[:150], x_test=x[150:], y_test=y[150:])
    return f"data={{source='{path}', classes={list(map(str, range(10)))}}}"


def made(folder: Path, *overrides: str, **options: Any) -> Run:
    return train(config(*overrides, text=UNSEEDED), output=folder, page=False, **options)[0]


def weights_of(path: Path) -> str:
    return f"model.weights='{path}'"


def test_a_run_begins_with_the_weights_of_a_file(finished: tuple[Run, Path], tmp_path: Path) -> None:
    file = tmp_path / "plain.safetensors"
    shutil.copy(finished[1] / "model.safetensors", file)
    told: list[str] = []
    run = made(tmp_path / "run", weights_of(file), "steps=1", "optimizer.learning_rate=1e-30", tell=told.append)
    old, new = (load_file(path) for path in (file, tmp_path / "run" / "model.safetensors"))
    assert all(torch.equal(old[name], new[name]) for name in old)
    said = "begins with the weights of the file plain.safetensors: what they were trained on is not known here"
    assert said in told[0] and "4 of 4 tensors" in told[0] and said in run.warnings[0]
    text = card(run)
    assert "the file plain.safetensors (4 of 4 tensors), which this epsilon does not cover" in text and said in text
    assert run.provenance["first_weights"]["sha256"] and Run.load(tmp_path / "run") == run


def test_all_that_does_not_fit_is_in_one_message(tmp_path: Path) -> None:
    there = {"hidden1.weight": torch.zeros(8, 64), "hidden1.bias": torch.zeros(9), "head": torch.zeros(2)}
    save_file(there, tmp_path / "w.safetensors")
    with pytest.raises(DataError) as refused:
        prepare(config(weights_of(tmp_path / "w.safetensors")))
    for said in (
        *("'hidden1.bias' is (9,) there and (8,) here", "'output.weight' is missing", "'output.bias' is missing"),
        "'head' is unknown here",
    ):
        assert said in str(refused.value)
    assert "hidden1.weight" not in str(refused.value)


def test_what_fits_is_taken_when_that_is_asked_for(tmp_path: Path) -> None:
    there = {"hidden1.weight": torch.ones(8, 64), "hidden1.bias": torch.zeros(9), "head": torch.zeros(2)}
    save_file(there, tmp_path / "w.safetensors")
    new = prepare(config()).model.state_dict()
    job = prepare(config(weights_of(tmp_path / "w.safetensors"), "model.weights_partial=true"))
    found = job.model.state_dict()
    assert torch.equal(found["hidden1.weight"], there["hidden1.weight"])
    assert all(torch.equal(found[name], new[name]) for name in ("hidden1.bias", "output.weight", "output.bias"))
    assert job.begun is not None
    assert job.begun.about["tensors"] == "1 of 4 tensors; new: hidden1.bias, output.weight, output.bias"
    save_file({"head": torch.zeros(2)}, tmp_path / "none.safetensors")
    with pytest.raises(DataError, match=r"it has none of hidden1\.weight, .* in the same shape"):
        prepare(config(weights_of(tmp_path / "none.safetensors"), "model.weights_partial=true"))


@pytest.mark.parametrize("kind", ["pickle", "cut", "integers", "nan", "missing"])
def test_weights_that_cannot_be_used_are_refused(kind: str, tmp_path: Path) -> None:
    file, model = tmp_path / "w.safetensors", prepare(config()).model.state_dict()
    if kind == "pickle":
        torch.save(model, file)
    elif kind == "integers":
        save_file({name: tensor.long() for name, tensor in model.items()}, file)
    elif kind != "missing":
        save_file({**model, "output.bias": torch.full((10,), torch.nan)}, file)
    if kind == "cut":
        file.write_bytes(file.read_bytes()[:-5])
    said = {
        "pickle": "not a safetensors file.*never unpickled",
        "cut": "is damaged",
        "integers": "'hidden1.weight' has another kind of numbers",
        "nan": "not finite in 'output.bias'",
        "missing": "cannot be read",
    }
    with pytest.raises(DataError, match=said[kind]):
        prepare(config(weights_of(file)))


def test_the_guarantee_of_a_run_on_other_records_is_named_and_not_added(
    finished: tuple[Run, Path], tmp_path: Path, others: str
) -> None:
    run = made(tmp_path / "later", others, weights_of(finished[1]))
    alone = made(tmp_path / "alone", others)
    assert run.guarantees["exact"].epsilon == alone.guarantees["exact"].epsilon
    text = card(run)
    assert "the run 'tiny' on digits (4 of 4 tensors), which this epsilon does not cover" in text
    assert f"epsilon = {finished[0].guarantees['exact'].printed} at delta 0.0001" in text
    assert "For a record that is in both data sets both count" in text


@pytest.mark.parametrize("named", ["", "model.safetensors"])
@pytest.mark.parametrize("way", [(), ("data={source='digits', std=2.0}",)])
def test_a_run_on_the_same_records_is_to_be_continued(
    finished: tuple[Run, Path], tmp_path: Path, named: str, way: tuple[str, ...]
) -> None:
    """By the digest, or by the source, whatever is done to the records."""
    with pytest.raises(DataError, match=r"trained on these records.*Use --continue-from .* instead of model\.weights"):
        made(tmp_path / "later", weights_of(finished[1] / named), *way)
    assert not (tmp_path / "later").exists()


def test_the_same_records_under_another_name_are_known_by_their_digest(tmp_path: Path) -> None:
    first, second = (records(tmp_path / name, 0) for name in ("a.npz", "b.npz"))
    made(tmp_path / "first", first)
    with pytest.raises(DataError, match="--continue-from"):
        made(tmp_path / "later", second, weights_of(tmp_path / "first"))


def test_records_that_were_trained_on_further_back_are_refused(
    finished: tuple[Run, Path], tmp_path: Path, others: str
) -> None:
    """Digits, then others: whoever trains on digits again pays for the first run, whatever is in between."""
    made(tmp_path / "b", others, weights_of(finished[1]))
    with pytest.raises(DataError, match="on the way to them these records were trained on"):
        made(tmp_path / "c", weights_of(tmp_path / "b"))
    # A continuation charges b, not what b began with ...
    back = ("data={source='digits'}", f"continue_from='{tmp_path / 'b'}'")
    with pytest.raises(DataError, match="on the way to them"):
        made(tmp_path / "c", *back, changed_data=True)
    # ... and hands on what is known of it.
    run = made(tmp_path / "c", others, f"continue_from='{tmp_path / 'b'}'")
    assert any("the run 'tiny' on digits" in text for text in run.warnings)
    with pytest.raises(DataError, match="on the way to them"):
        made(tmp_path / "d", weights_of(tmp_path / "c"))


def test_records_of_a_continued_run_are_known_to_whoever_begins_with_its_weights(tmp_path: Path, others: str) -> None:
    third = records(tmp_path / "third.npz", 1)
    made(tmp_path / "a", others)
    made(tmp_path / "b", third, f"continue_from='{tmp_path / 'a'}'", changed_data=True)
    with pytest.raises(DataError, match="on the way to them"):
        made(tmp_path / "c", others, weights_of(tmp_path / "b"))


@pytest.mark.parametrize("clip", ["{rule='NoClip'}", "{rule='Unclipped', noise_std=5.0}"])
def test_a_run_that_is_not_private_protects_nobody(tmp_path: Path, others: str, clip: str) -> None:
    open_ = ("privacy={private=false}", f"clip={clip}")
    made(tmp_path / "public", others, *open_)
    run = made(tmp_path / "later", weights_of(tmp_path / "public"))
    assert "that run is not private, so nothing protects its records" in run.warnings[0]
    with pytest.raises(DataError, match="nothing protects them any more: begin with other weights"):
        made(tmp_path / "again", others, weights_of(tmp_path / "public"))
    made(tmp_path / "open", others, weights_of(tmp_path / "public"), *open_)  # it promises nothing
    with pytest.raises(DataError, match="nothing protects them"):
        made(tmp_path / "again", others, weights_of(tmp_path / "open"))


def test_another_ledger_or_other_weights_in_the_run_are_noticed(
    finished: tuple[Run, Path], tmp_path: Path, others: str
) -> None:
    shutil.copytree(finished[1], tmp_path / "run")
    assert finished[0].ledger is not None
    same = Ledger(finished[0].ledger.events)  # of another run
    (tmp_path / "run" / "ledger.json").write_text(same.to_json())
    with pytest.raises(DataError, match="is not the ledger that the weights beside it were saved with"):
        made(tmp_path / "later", others, weights_of(tmp_path / "run"))
    made(tmp_path / "cheap", "steps=1")
    (tmp_path / "run" / "model.safetensors").write_bytes((tmp_path / "cheap" / "model.safetensors").read_bytes())
    with pytest.raises(DataError, match="does not hold the weights"):
        made(tmp_path / "later", others, weights_of(tmp_path / "run"))
    with pytest.raises(DataError, match="not that of a finished run"):
        made(tmp_path / "later", others, weights_of(tmp_path))


def test_different_weights_share_no_coins_and_no_noise(tmp_path: Path) -> None:
    """A seeded run is labelled with what it begins with."""
    drawn = []
    for value in (0.0, 1e-30):
        fresh = prepare(config()).model.state_dict()
        save_file({**fresh, "output.bias": torch.full((10,), value)}, tmp_path / "w.safetensors")
        train(config(weights_of(tmp_path / "w.safetensors")), output=tmp_path / f"{value}", page=False)
        drawn.append(load_file(tmp_path / f"{value}" / "model.safetensors")["hidden1.weight"])
    assert not torch.equal(*drawn)


class Killed(BaseException):
    pass


def test_an_interrupted_run_goes_on_without_the_file(tmp_path: Path) -> None:
    file, asked = tmp_path / "w.safetensors", (weights_of(tmp_path / "w.safetensors"), "checkpoint_every=1")
    save_file({name: torch.zeros_like(t) for name, t in prepare(config()).model.state_dict().items()}, file)

    def kill(progress: Any) -> None:
        if progress.step == 3:
            raise Killed

    whole, _ = train(config(*asked), output=tmp_path / "whole", page=False)
    with pytest.raises(Killed):
        train(config(*asked), output=tmp_path / "run", page=False, watch=kill)
    file.unlink()
    kept = (tmp_path / "run" / "begun_with.json").read_bytes()
    (tmp_path / "run" / "begun_with.json").unlink()
    with pytest.raises(CheckpointError, match="does not say any more what its weights came from"):
        train(config(*asked), output=tmp_path / "run", page=False, resume=True)
    (tmp_path / "run" / "begun_with.json").write_bytes(kept)
    run, _ = train(config(*asked), output=tmp_path / "run", page=False, resume=True)
    assert run.warnings == whole.warnings and run.provenance["first_weights"] == whole.provenance["first_weights"]
    mine, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("run", "whole"))
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_an_edited_note_is_refused(finished: tuple[Run, Path], tmp_path: Path, others: str) -> None:
    made(tmp_path / "b", others, weights_of(finished[1]))
    place = tmp_path / "b" / "begun_with.json"
    assert place.stat().st_mode & 0o777 == 0o600
    body = json.loads(place.read_text())
    body["uncharged"] = {"digests": [], "sources": []}
    place.write_text(json.dumps(body))
    with pytest.raises(DataError, match="does not say any more what its run was begun with"):
        made(tmp_path / "c", weights_of(tmp_path / "b"))
    assert RunFolder(tmp_path / "b").files()[1] == set()


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("model.weights_partial=true",), "weights_partial: goes with weights"),
        (("model.weights=''",), "is an empty string"),
        (("model.weights='a.safetensors'", "continue_from='b'"), "continue_from: begins with the weights of that run"),
    ],
)
def test_choices_that_do_not_go_together(overrides: tuple[str, ...], said: str) -> None:
    with pytest.raises(InvalidConfig, match=said):
        config(*overrides)
