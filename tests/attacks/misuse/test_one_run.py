"""One checkpoint was continued by two runs: after its own process had read the file, or twice in one process.

A record lock (`lockf`) is gone when any descriptor of the file is closed, and the file itself is another one after
every save. Ledgers said 15 and 15 where 25 steps had been released.

What a second look found: frozen parts trained by hand, batches that nobody gave, one checkpoint continued twice.
"""

from __future__ import annotations

import copy
import errno
import gc
import os
import shutil
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import clipwise as cw
from clipwise import files
from clipwise.federated import Server
from clipwise.files import Lock
from tests.attacks.misuse.common import Setting
from tests.core.common import data, losses_of, mlp, plan, refused_elsewhere, sgd
from tests.federated.common import federated_plan

X, Y = data().tensors
SEEDS = [None, 3]

forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


def begun(path: Path, seed: int | None = None, steps: int = 5) -> cw.Private:
    model = mlp()
    private = cw.Private(plan(steps=40), model, sgd(model), seed=seed, own_batches=True)
    go_on(private, steps)
    private.save(path)
    return private


def resumed(path: Path) -> cw.Private:
    model = mlp()
    return cw.Private.resume(path, model, sgd(model))


def go_on(private: cw.Private, steps: int) -> None:
    for _ in range(steps):
        private.step(losses_of(private.model, X, Y))


def is_free(path: Path) -> bool:
    return not refused_elsewhere(lambda: Lock(path, cw.CheckpointError))


@forks
@pytest.mark.parametrize("seed", SEEDS)
def test_reading_the_file_does_not_let_another_process_in(seed: int | None, tmp_path: Path) -> None:
    private = begun(tmp_path / "b", seed)
    (tmp_path / "b").read_bytes()
    assert "another process continues" in refused_elsewhere(lambda: resumed(tmp_path / "b"))
    go_on(private, 1)
    private.save(tmp_path / "b")
    (tmp_path / "b").read_bytes()
    assert "another process continues" in refused_elsewhere(lambda: resumed(tmp_path / "b"))
    assert "another process continues" in refused_elsewhere(lambda: begun(tmp_path / "b"))  # a new run over it
    go_on(private, 1)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("saved", [False, True])
def test_the_second_of_two_in_one_process_ends_the_first(saved: bool, seed: int | None, tmp_path: Path) -> None:
    path = tmp_path / "b"
    begun(path, seed)
    first, second = resumed(path), resumed(path)
    if saved:
        second.save(path)  # another file now: the first one's descriptor would not see what is counted there
    go_on(second, 10)
    before = [p.clone() for p in first.model.parameters()]
    for refused in (lambda: go_on(first, 1), lambda: first.save(path), lambda: first.save(tmp_path / "c")):
        with pytest.raises(cw.CheckpointError, match="another run continues"):
            refused()
    assert all(map(torch.equal, before, first.model.parameters()))
    second.save(path)
    assert resumed(path).ledger.steps == 15 and not (tmp_path / "c").exists()


@forks
@pytest.mark.parametrize("seed", SEEDS)
def test_a_forked_child_neither_holds_nor_releases_the_lock(seed: int | None, tmp_path: Path) -> None:
    private = begun(tmp_path / "b", seed)
    weights = [p.clone() for p in private.model.parameters()]

    def steps() -> None:
        try:
            go_on(private, 1)
        finally:
            assert all(map(torch.equal, weights, private.model.parameters()))

    assert "was forked from the one that continues" in refused_elsewhere(steps)
    assert "was forked" in refused_elsewhere(lambda: private.save(tmp_path / "b"))
    lock = private._release._journal.lock  # type: ignore[union-attr]
    assert refused_elsewhere(lambda: lock.release()) == "" and not is_free(tmp_path / "b")
    go_on(private, 1)


@forks
def test_a_child_that_outlives_its_parent_is_no_holder(tmp_path: Path) -> None:
    """A worker of a data loader, say, whose parent was killed."""
    path, (reader, writer) = tmp_path / "b", os.pipe()
    parent = os.fork()
    if parent == 0:
        private = begun(path)  # noqa: F841 - it holds the lock
        child = os.fork()
        if child == 0:
            os.read(os.pipe()[0], 1)  # waits for ever
        os.write(writer, str(child).encode())
        os.read(os.pipe()[0], 1)
    child = int(os.read(reader, 20))
    assert not is_free(path)
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    try:
        assert (tmp_path / ".b.lock").exists() and resumed(path).ledger.steps == 5
    finally:
        os.kill(child, signal.SIGKILL)


@forks
def test_a_run_that_is_dropped_lets_go(tmp_path: Path) -> None:
    gc.disable()
    try:
        private = begun(tmp_path / "b")
        assert not is_free(tmp_path / "b")
        del private
        assert is_free(tmp_path / "b") and os.listdir(tmp_path) == ["b"]
    finally:
        gc.enable()


@forks
def test_a_server_is_one_process_too(tmp_path: Path) -> None:
    p = federated_plan(cw.Poisson(20, 5), steps=9, clip=cw.Abadi(1.0), noise_multiplier=1.0)
    model = torch.nn.Linear(1, 1)
    first = Server(p, model)
    first.save(tmp_path / "b", model)
    (tmp_path / "b").read_bytes()
    second = Server(p, model)
    assert "another process continues" in refused_elsewhere(lambda: second.resume(tmp_path / "b", model))
    second.resume(tmp_path / "b", model)
    first.open(range(20))
    with pytest.raises(cw.CheckpointError, match="another run continues"):
        first.close([])


# Other names of the file, and others in its place


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("what", ["moved", "removed", "replaced"])
def test_a_step_is_not_made_when_the_file_is_not_in_its_place(what: str, seed: int | None, tmp_path: Path) -> None:
    private = begun(tmp_path / "b", seed)
    old = (tmp_path / "b").read_bytes()
    (tmp_path / "b").rename(tmp_path / "c")
    if what != "moved":
        (tmp_path / "c").unlink()
    if what == "replaced":
        (tmp_path / "b").write_bytes(old)
    before = [p.clone() for p in private.model.parameters()]
    with pytest.raises(cw.CheckpointError, match="moved, removed or replaced"):
        go_on(private, 1)
    assert all(map(torch.equal, before, private.model.parameters()))


def test_other_names_of_a_file_are_the_same_file(tmp_path: Path) -> None:
    begun(tmp_path / "b")
    (tmp_path / "link").symlink_to(tmp_path / "b")
    os.link(tmp_path / "b", tmp_path / "hard")
    first, second = resumed(tmp_path / "b"), resumed(tmp_path / "link")
    with pytest.raises(cw.CheckpointError, match="another run continues"):
        go_on(first, 1)
    third = resumed(tmp_path / "hard")
    go_on(third, 1)
    with pytest.raises(cw.CheckpointError, match="another run continues"):
        go_on(second, 1)
    third.save(tmp_path / "hard")
    with pytest.raises(cw.CheckpointError, match="replaced by a later"):
        resumed(tmp_path / "b")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes here")
def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(tmp_path: Path) -> None:
    begun(tmp_path / "b", seed=3)
    (tmp_path / "b.digests").unlink()
    for name, said in (("b.digests", "damaged"), ("b", "cannot be written")):
        (tmp_path / name).unlink(missing_ok=True)
        os.mkfifo(tmp_path / name)
        with pytest.raises(cw.CheckpointError, match=f"{said} .*not an ordinary file"):
            resumed(tmp_path / "b")


def test_a_witness_that_is_named_by_a_link_stays_on_the_other_storage(tmp_path: Path) -> None:
    """The link was replaced by a file in the run's own folder, and put back together with it."""
    run, other, model = tmp_path / "run", tmp_path / "other", mlp()
    run.mkdir()
    other.mkdir()
    (run / "witness").symlink_to(other / "witness")
    private = cw.Private(plan(steps=40), model, sgd(model), own_batches=True, witness=run / "witness")
    go_on(private, 2)
    private.save(run / "b")
    shutil.copytree(run, tmp_path / "old", symlinks=True)
    go_on(private, 3)
    private.save(run / "b")
    del private
    assert (run / "witness").is_symlink() and (other / "witness").is_file()
    shutil.rmtree(run)
    (tmp_path / "old").rename(run)
    with pytest.raises(cw.CheckpointError, match="an older copy was put back"):
        resumed(run / "b")


# The lock itself


@pytest.mark.parametrize("seed", SEEDS)
def test_a_run_whose_lock_was_removed_ends(seed: int | None, tmp_path: Path) -> None:
    """Others can lock the name then: a cleaner of old files let a second process continue a seeded run."""
    private = begun(tmp_path / "b", seed)
    (tmp_path / ".b.lock").unlink()
    before = [p.clone() for p in private.model.parameters()]
    for refused in (lambda: go_on(private, 1), lambda: private.save(tmp_path / "b")):
        with pytest.raises(cw.CheckpointError, match=r"the lock beside .* was moved or removed"):
            refused()
    assert all(map(torch.equal, before, private.model.parameters()))
    assert resumed(tmp_path / "b").ledger.steps == 5


def no_locks(*_: object) -> None:
    raise OSError(errno.ENOLCK, "No locks available")


def test_where_there_are_no_locks_nothing_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun(tmp_path / "b")
    monkeypatch.setattr("fcntl.flock", no_locks)
    for refused in (lambda: resumed(tmp_path / "b"), lambda: begun(tmp_path / "new")):
        with pytest.raises(
            cw.CheckpointError, match=r"cannot be locked \(.*No locks available\).*file system with loc"
        ):
            refused()
    monkeypatch.setitem(sys.modules, "fcntl", None)
    with pytest.raises(cw.CheckpointError, match="this platform has no locks"):
        resumed(tmp_path / "b")
    assert not (tmp_path / "new").exists()


def test_windows_locks_a_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = set[tuple[int, int]]()

    def locking(handle: int, mode: int, size: int) -> None:
        file = os.fstat(handle)
        if (mode, size) != (2, 1) or (file.st_dev, file.st_ino) in held:
            raise PermissionError(errno.EACCES, "Permission denied")
        held.add((file.st_dev, file.st_ino))

    monkeypatch.setitem(sys.modules, "msvcrt", SimpleNamespace(locking=locking, LK_NBLCK=2))
    monkeypatch.setattr(files, "sys", SimpleNamespace(platform="win32"))
    lock = Lock(tmp_path / "b")
    assert lock.is_held and len(held) == 1
    files._LOCKS.clear()  # as another process sees it
    with pytest.raises(cw.ClipwiseError, match="another process continues"):
        Lock(tmp_path / "b")


def test_a_lock_that_its_holder_has_just_removed_is_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the opening of the file and its lock the other process may let go, and a third one begin."""
    taken: list[Lock] = []
    lock = files._lock

    def slow(handle: int) -> None:
        monkeypatch.undo()
        (tmp_path / ".b.lock").unlink()
        taken.append(Lock(tmp_path / "b"))
        files._LOCKS.clear()  # as another process sees it
        lock(handle)

    monkeypatch.setattr(files, "_lock", slow)
    with pytest.raises(cw.ClipwiseError, match="another process continues"):
        Lock(tmp_path / "b")
    assert taken[0].is_held


def test_a_frozen_part_is_not_trained_beside_the_run() -> None:
    """The head first, in private; then the body by hand, on the same records."""
    s = Setting()
    body, head = s.model[0], s.model[2]  # type: ignore[index]
    body.requires_grad_(False)
    private = cw.Private(s.plan, s.model, torch.optim.SGD(head.parameters(), lr=0.1))
    s.private.close()
    for x, y in private.loader(s.records):
        private.step(s.losses(x, y))
        break
    body.requires_grad_(True)
    by_hand = torch.optim.Adam(body.parameters())
    before = s.weights()
    s.losses(s.x, s.y).mean().backward()
    with pytest.raises(cw.UnaccountedUpdate, match=r"Adam\.step\(\) was called on parameters of a private run"):
        by_hand.step()
    assert torch.equal(before, s.weights())


def test_two_runs_train_the_parts_of_one_model() -> None:
    s = Setting()
    s.private.close()
    body, head = s.model[0], s.model[2]  # type: ignore[index]
    body.requires_grad_(False)
    first = cw.Private(s.plan, s.model, torch.optim.SGD(head.parameters(), lr=0.1))
    for x, y in first.loader(s.records):
        first.step(s.losses(x, y))
    body.requires_grad_(True)
    head.requires_grad_(False)
    second = cw.Private(s.plan, s.model, torch.optim.SGD(body.parameters(), lr=0.1))
    for x, y in second.loader(s.records):
        second.step(s.losses(x, y))
    assert first.ledger.steps == second.ledger.steps == s.plan.steps


def test_batches_that_nobody_gave_do_not_end_in_epsilon_zero() -> None:
    """A copy of the model learns from the private batches, and no gradient is ever on the run's own parameters."""
    s = Setting()
    student = copy.deepcopy(s.model)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.5)
    for x, y in s.batches():
        optimizer.zero_grad()
        F.cross_entropy(student(x), y).backward()
        optimizer.step()
    with pytest.raises(cw.UnaccountedUpdate, match=r"losses of none were given to private\.step"):
        s.private.epsilon(1e-5)


def test_looking_at_a_batch_before_training_is_allowed() -> None:
    s = Setting()
    next(iter(s.batches()))
    assert s.private.epsilon(1e-5) == 0.0
    for x, y in s.batches():
        s.private.step(s.losses(x, y))
    assert s.private.epsilon(1e-5) > 0.0


def test_the_step_after_the_last_release_is_guarded_too() -> None:
    s = Setting(cw.FullBatch(24), steps=1, own_batches=True)
    s.private.backward(s.losses(s.x, s.y))
    assert s.private.release()
    (1000 * s.losses(s.x, s.y).mean()).backward()
    with pytest.raises(cw.UnaccountedUpdate, match=r"not what private\.release\(\) wrote"):
        s.optimizer.step()


def test_after_the_last_release_and_its_step_the_model_is_the_users() -> None:
    s = Setting(cw.FullBatch(24), steps=1, own_batches=True)
    s.private.backward(s.losses(s.x, s.y))
    assert s.private.release()
    for _ in range(2):  # the released step, and one on public data
        s.optimizer.step()
        s.optimizer.zero_grad()
        s.losses(s.x, s.y).mean().backward()


def resumed_run(path: Path) -> tuple[cw.Private, Setting, nn.Module]:
    s = Setting()
    s.private.close()
    return cw.Private.resume(path, s.model, s.optimizer), s, s.model


def step_once(private: cw.Private, s: Setting) -> None:
    for x, y in private.loader(s.records):
        private.step(s.losses(x, y))
        return


@pytest.mark.parametrize("copied", [False, True])
def test_one_checkpoint_is_continued_once(copied: bool, tmp_path: Path) -> None:
    """Also in one process, and after the file was read, which drops the lock of the system."""
    s = Setting()
    step_once(s.private, s)
    s.private.save(tmp_path / "run")
    if copied:
        shutil.copy(tmp_path / "run", tmp_path / "backup")
    first, a, _ = resumed_run(tmp_path / "run")
    step_once(first, a)
    before = s.weights()
    with pytest.raises(cw.CheckpointError, match="another run continues"):
        step_once(s.private, s)
    assert torch.equal(before, s.weights())
    step_once(first, a)
    assert first.ledger.steps == 3
