"""A run that continues a finished one: no step of either is missing from its epsilon, whatever is done to folders."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from clipwise.accounting import EARLIER, GaussianSteps, PrivateCalibration, account
from clipwise.data import DataSet
from clipwise.errors import CheckpointError, ClipwiseError, DataError, InvalidConfig, NotSeparable
from clipwise.report import Run, RunFolder
from clipwise.training import load, train
from clipwise.training.algorithms.dp_sgd import PrivateSGD
from tests.training.common import TINY, config

UNSEEDED = TINY.replace("seed = 3\n", "")
OTHER_DATA = "the data are not those of the run"


def first(folder: Path, *overrides: str) -> Run:
    return train(config(*overrides, text=UNSEEDED), output=folder, page=False)[0]


def later(earlier: Path, folder: Path, *overrides: str, **options: Any) -> Run:
    asked = config("steps=5", f"continue_from='{earlier}'", *overrides, text=UNSEEDED)
    return train(asked, output=folder, page=False, **options)[0]


@pytest.fixture
def earlier(tmp_path: Path, finished_once: Path) -> Path:
    shutil.copytree(finished_once, tmp_path / "earlier")
    return tmp_path / "earlier"


@pytest.fixture(scope="module")
def finished_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("continued") / "earlier"
    first(folder)
    return folder


def test_epsilon_is_that_of_both_runs_and_is_told_before(earlier: Path, tmp_path: Path) -> None:
    told: list[str] = []
    run = later(earlier, tmp_path / "later", tell=told.append)
    (step,) = {event.repeated(1) for event in Run.load(earlier).ledger.events}  # type: ignore[union-attr]
    both = account([step.repeated(12 + 5)], 1e-4)
    assert run.guarantees["exact"].epsilon == pytest.approx(both.epsilon, rel=1e-9)
    assert "which has spent" in told[0] and f"{both.printed} in total, at delta 0.0001" in told[0]
    assert run.curves[-1]["epsilon"] == pytest.approx(both.epsilon, rel=1e-9)
    assert Run.load(tmp_path / "later") == run and run.plan.steps == 5
    assert [event.reason for event in run.ledger.events] == ["training", EARLIER]  # type: ignore[union-attr]


def test_it_begins_with_the_weights_of_the_earlier_run(earlier: Path, tmp_path: Path) -> None:
    later(earlier, tmp_path / "later", "steps=1", "optimizer.learning_rate=1e-30")
    old, new = (load(folder).predict_proba(torch.ones(1, 1, 8, 8)) for folder in (earlier, tmp_path / "later"))
    assert torch.equal(torch.as_tensor(old), torch.as_tensor(new))


def test_a_target_is_the_total(earlier: Path, tmp_path: Path) -> None:
    spent = Run.load(earlier).guarantees["exact"].epsilon
    target = f"privacy={{epsilon={spent + 0.5}}}"
    run = later(earlier, tmp_path / "later", target)
    assert spent < run.guarantees["exact"].epsilon <= spent + 0.5
    with pytest.raises(ClipwiseError):
        later(tmp_path / "later", tmp_path / "more", f"privacy={{epsilon={0.9 * spent}}}")


def test_a_chain_of_runs_keeps_every_step(earlier: Path, tmp_path: Path) -> None:
    later(earlier, tmp_path / "b")
    run = later(tmp_path / "b", tmp_path / "c")
    assert run.ledger is not None and run.ledger.steps == 12 + 5 + 5


def test_a_run_is_continued_once(earlier: Path, tmp_path: Path) -> None:
    later(earlier, tmp_path / "later")
    shutil.rmtree(tmp_path / "later")  # what it has spent stays spent
    with pytest.raises(DataError, match="was continued already"):
        later(earlier, tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_two_processes_cannot_both_mark_it(earlier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one marks it between the first look and the mark."""
    monkeypatch.setattr("clipwise.training.run.train._announced", lambda *_: (earlier / "continued").write_text("x"))
    with pytest.raises(DataError, match="was continued already"):
        later(earlier, tmp_path / "later")
    assert (earlier / "continued").read_text() == "x" and not (tmp_path / "later").exists()


def test_a_run_that_was_refused_before_its_first_step_is_no_continuation(
    earlier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        assert RunFolder(earlier).continued.exists()
        raise NotSeparable("samples mix")

    with monkeypatch.context() as patch:
        patch.setattr(PrivateSGD, "train", refuse)
        with pytest.raises(NotSeparable):
            later(earlier, tmp_path / "later")
    assert not RunFolder(earlier).continued.exists()
    later(earlier, tmp_path / "later")


class Killed(BaseException):
    pass


def killed(earlier: Path, folder: Path) -> None:
    def kill(progress: Any) -> None:
        if progress.step == 3:
            raise Killed

    with pytest.raises(Killed):
        later(earlier, folder, "checkpoint_every=1", watch=kill)


def test_a_continuation_that_lost_what_was_charged_before_is_not_resumed(earlier: Path, tmp_path: Path) -> None:
    killed(earlier, tmp_path / "later")
    (tmp_path / "later" / "charged.json").unlink()
    with pytest.raises(CheckpointError, match=r"charged\.json is gone"):
        later(earlier, tmp_path / "later", "checkpoint_every=1", resume=True)


def test_a_killed_continuation_resumes_with_what_it_was_begun_with(earlier: Path, tmp_path: Path) -> None:
    killed(earlier, tmp_path / "later")
    shutil.rmtree(earlier)
    first(earlier, "steps=1")  # a cheaper run in the place of the earlier one
    run = later(earlier, tmp_path / "later", "checkpoint_every=1", resume=True)
    assert run.ledger is not None and run.ledger.steps >= 12 + 5
    assert "not found any more" in run.warnings[-1]


def test_calibration_records_of_the_earlier_run_are_trained_on_now(tmp_path: Path) -> None:
    method = "recalibration={methods=['private-temperature'],noise_multiplier=20.0,private_share=0.3}"
    first(tmp_path / "earlier", method)
    run = later(tmp_path / "earlier", tmp_path / "later")
    assert run.ledger is not None
    found = [event for event in run.ledger.events if isinstance(event, PrivateCalibration)]
    assert [event.disjoint for event in found] == [False]
    with pytest.raises(InvalidConfig, match="does not go with recalibration"):
        config("continue_from='x'", method)


def test_other_records_have_to_be_asked_for(earlier: Path, tmp_path: Path) -> None:
    whole = config().data.load()
    x, y = whole.train.tensors
    other: DataSet = replace(whole, train=type(whole.train)(x[:-1], y[:-1]))
    with pytest.raises(CheckpointError, match=OTHER_DATA):
        later(earlier, tmp_path / "later", data=other)
    run = later(earlier, tmp_path / "later", data=other, changed_data=True)
    assert run.ledger is not None and run.ledger.steps == 17
    assert any("Records were changed" in warning for warning in run.guarantees["exact"].warnings)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (["privacy={private=false}"], "is not private"),
        (["sampling='shuffled'", "batch_size=50"], "shuffled batches"),
        (["sampling='balls-in-bins'"], "balls in bins"),
    ],
)
def test_runs_that_have_no_joint_epsilon_are_not_continued(tmp_path: Path, made: list[str], message: str) -> None:
    first(tmp_path / "earlier", *made)
    with pytest.raises(DataError, match=message):
        later(tmp_path / "earlier", tmp_path / "later")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("privacy={private=false}",), "needs noise"),
        (("sampling='shuffled'",), "two sequences of epochs"),
        (("sampling='balls-in-bins'",), "two sequences of epochs"),
    ],
)
def test_continuations_that_have_no_joint_epsilon_are_refused(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(InvalidConfig, match=message):
        config("continue_from='x'", *overrides)


def edited_ledger(folder: Path) -> None:
    path = folder / "ledger.json"
    path.write_text(path.read_text().replace('"steps": 12', '"steps": 2'))


def unfinished(folder: Path) -> None:
    (folder / "result.json").unlink()


def other_weights(folder: Path) -> None:
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (folder / "model.safetensors").write_bytes(bytes(content))


@pytest.mark.parametrize("change", [edited_ledger, unfinished, other_weights])
def test_a_folder_that_is_not_as_it_was_left_is_not_continued(
    earlier: Path, tmp_path: Path, change: Callable[[Path], None]
) -> None:
    change(earlier)
    with pytest.raises(ClipwiseError):
        later(earlier, tmp_path / "later")
    assert not RunFolder(earlier).continued.exists() and not (tmp_path / "later").exists()


def test_other_classes_are_not_continued(earlier: Path, tmp_path: Path) -> None:
    whole = config().data.load()
    named = replace(whole, classes=tuple(f"digit {name}" for name in whole.classes))
    with pytest.raises(DataError, match="other classes, columns or target bounds"):
        later(earlier, tmp_path / "later", data=named, changed_data=True)


def test_steps_of_an_earlier_run_do_not_stand_for_steps_of_the_plan(earlier: Path, tmp_path: Path) -> None:
    """A ledger whose own steps are called earlier has fewer of its plan; its epsilon is the same."""
    run = later(earlier, tmp_path / "later")
    assert run.ledger is not None
    moved = [event.changed(reason=EARLIER) for event in run.ledger.events]
    assert account(moved, 1e-4).epsilon == pytest.approx(run.guarantees["exact"].epsilon, rel=1e-12)
    assert all(isinstance(event, GaussianSteps) for event in moved)


def test_a_seed_of_the_earlier_run_is_not_forgotten(tmp_path: Path) -> None:
    """Its noise can be removed by whoever guesses the seed, and the page of the later run said nothing of it."""
    train(config(), output=tmp_path / "earlier", page=False)
    killed(tmp_path / "earlier", tmp_path / "later")
    run = later(tmp_path / "earlier", tmp_path / "later", "checkpoint_every=1", resume=True)
    assert run.seed is None and any("Trained with a fixed seed" in warning for warning in run.warnings)
    further = later(tmp_path / "later", tmp_path / "further")
    assert any("Trained with a fixed seed" in warning for warning in further.publishable().warnings)


def test_what_was_read_off_the_records_stays_read_off(tmp_path: Path) -> None:
    rows = "".join(f"{k % 7},{k % 5},{'ab'[k % 2]}\n" for k in range(300))
    (tmp_path / "table.csv").write_text(f"u,v,y\n{rows}")
    columns = "{u={kind='number',low=0,high=6},v={kind='number',low=0,high=4}}"
    given = f"source='{tmp_path / 'table.csv'}',target='y',classes=['a','b'],columns={columns}"
    first(tmp_path / "earlier", f"data={{{given},columns_public=false}}")
    run = later(tmp_path / "earlier", tmp_path / "later", f"data={{{given}}}")
    assert any("were read off the records" in warning for warning in run.warnings)


def test_a_run_is_not_continued_in_its_own_folder(earlier: Path) -> None:
    """Its ledger was removed before the first step of the other."""
    with pytest.raises(DataError, match="not continued in its own folder"):
        later(earlier, earlier, force=True)
    assert Run.load(earlier).ledger is not None


@pytest.mark.parametrize("share", [1.0, 1.005, 0.9])
def test_a_target_that_is_spent_already_is_refused_and_uses_up_no_continuation(
    share: float, earlier: Path, tmp_path: Path
) -> None:
    """The same configuration once more: 3 of 3 was spent, and 320 steps were made with a noise multiplier of 134."""
    spent = Run.load(earlier).guarantees["exact"]
    with pytest.raises(InvalidConfig, match=rf"is the total, and {spent.printed} of it is spent by .*privacy\.epsilon"):
        later(earlier, tmp_path / "later", f"privacy={{epsilon={share * spent.epsilon}}}")
    assert not RunFolder(earlier).continued.exists() and not (tmp_path / "later").exists()
    later(earlier, tmp_path / "later", f"privacy={{epsilon={1.1 * spent.epsilon}}}")


def test_the_message_of_a_spent_target_proposes_one_that_works(earlier: Path, tmp_path: Path) -> None:
    spent = Run.load(earlier).guarantees["exact"].epsilon
    with pytest.raises(InvalidConfig) as refused:
        later(earlier, tmp_path / "later", f"privacy={{epsilon={spent}}}")
    proposed = str(refused.value).rpartition("--set privacy.epsilon=")[2].rstrip(".")
    assert later(earlier, tmp_path / "later", f"privacy={{epsilon={proposed}}}").guarantees["exact"].epsilon > spent


def test_a_map_that_is_not_continued_is_named(tmp_path: Path) -> None:
    """The temperature of the earlier run was dropped without a word."""
    methods = "recalibration={methods=['temperature']}"
    for name in ("a", "b"):
        first(tmp_path / name, methods)
    told: list[str] = []
    run = later(tmp_path / "a", tmp_path / "later", tell=told.append)
    for said in (told[1], run.warnings[-1]):
        assert "was recalibrated (temperature). That map is not continued" in said
    told.clear()
    run = later(tmp_path / "b", tmp_path / "again", methods, tell=told.append)
    assert len(told) == 1 and not any("not continued" in warning for warning in run.warnings)


def test_a_map_that_is_not_continued_is_named_after_a_crash(tmp_path: Path) -> None:
    first(tmp_path / "earlier", "recalibration={methods=['temperature']}")
    killed(tmp_path / "earlier", tmp_path / "later")
    run = later(tmp_path / "earlier", tmp_path / "later", "checkpoint_every=1", resume=True)
    assert any("That map is not continued" in warning for warning in run.warnings)


def test_the_same_name_is_not_answered_by_force(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first natural try advised --force, which removes the run that is to be continued."""
    monkeypatch.chdir(tmp_path)
    train(config(text=UNSEEDED), page=False)
    with pytest.raises(DataError, match=r"not continued in its own folder.*--set name=tiny-more") as refused:
        train(config("continue_from='runs/tiny'", text=UNSEEDED), page=False)
    assert "--force" not in str(refused.value)
