"""Saving and resuming: exact, atomic, without pickle, and never a step forgotten."""

from __future__ import annotations

import builtins
import copy
import json
import math
import os
import shutil
import zipfile
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import clipwise as cw
from clipwise.clipping import Style
from clipwise.private import checkpoint
from clipwise.private.state import PrivateState
from tests.core.common import N, data, losses_of, mlp, plan, refused_elsewhere, same, sgd, train, weights
from tests.core.doubles import Own, Recorder
from tests.core.test_private import OPTIMIZERS

X, Y = data().tensors


def resume(path: Path, **options: Any) -> cw.Private:
    """Resume with a model and an optimizer made anew."""
    model = mlp()
    return cw.Private.resume(path, model, sgd(model), **options)


def run_for(steps: int, private: cw.Private, model: nn.Module, **options: Any) -> None:
    """Make `steps` more steps, then leave the loop."""
    end = private.steps_done + steps
    for x, y in private.loader(data(), **options):
        private.step(losses_of(model, x, y))
        if private.steps_done >= end:
            return


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_resumes_bit_for_bit(name: str, tmp_path: Path) -> None:
    def fresh() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = mlp(dropout=0.3)
        return model, OPTIMIZERS[name](model.parameters())

    p = plan(steps=6, sampling=cw.FixedSize(N, 10))
    model, optimizer = fresh()
    train(cw.Private(p, model, optimizer, seed=1), model, data(), physical_batch_size=4)
    expected, state = weights(model), copy.deepcopy(optimizer.state_dict())

    model, optimizer = fresh()
    private = cw.Private(p, model, optimizer, seed=1)
    run_for(3, private, model, physical_batch_size=4)
    private.save(tmp_path / "run.ckpt")
    torch.manual_seed(12345)
    model, optimizer = fresh()
    nn.init.zeros_(model[0].weight)  # type: ignore[index, arg-type]
    resumed = cw.Private.resume(tmp_path / "run.ckpt", model, optimizer)
    assert resumed.steps_done == 3 and resumed.plan == p
    train(resumed, model, data(), physical_batch_size=4)
    assert same(expected, weights(model)) and resumed.ledger.events == p.events
    for mine, theirs in zip(optimizer.state_dict()["state"].values(), state["state"].values(), strict=True):
        for key, value in theirs.items():
            assert torch.equal(mine[key], value) if isinstance(value, Tensor) else mine[key] == value
    assert str(optimizer.state_dict()["param_groups"]) == str(state["param_groups"])


@pytest.mark.parametrize(
    "sampling",
    [
        *(cw.Poisson(N, 1), cw.Poisson(N, 12.5), cw.Poisson(rate=0.2, batch_size=100 / 3), cw.Poisson(N, 10, 8)),
        *(cw.FullBatch(N), cw.Shuffled(N, 7), cw.BallsInBins(N, 12)),
    ],
)
def test_every_sampling_resumes_at_any_step(sampling: Any, tmp_path: Path) -> None:
    p = plan(sampling=sampling, steps=5, clip=cw.MixUp(cw.Abadi(0.1), cw.Abadi(2.0), switch_at=3))
    model = mlp()
    train(cw.Private(p, model, sgd(model), seed=2), model, data())
    expected = weights(model)
    for stop in range(1, 5):
        model = mlp()
        private = cw.Private(p, model, sgd(model), seed=2)
        run_for(stop, private, model)
        private.save(tmp_path / "run.ckpt")
        model = mlp(seed=9)
        resumed = cw.Private.resume(tmp_path / "run.ckpt", model, sgd(model))
        train(resumed, model, data())
        assert same(expected, weights(model)) and resumed.ledger.steps == 5


def test_an_unseeded_shuffled_epoch_goes_on_in_its_order(tmp_path: Path) -> None:
    p = plan(sampling=cw.Shuffled(N, 8), steps=10)  # two epochs of five batches
    numbered = TensorDataset(torch.arange(N), X)

    def go_on(private: cw.Private, steps: int) -> list[int]:
        seen: list[int] = []
        for _, (i, x) in zip(range(steps), private.loader(numbered), strict=False):
            seen += i.tolist()
            private.step(model(x).squeeze(1))
        return seen

    model = mlp()
    private = cw.Private(p, model, sgd(model))
    first = go_on(private, 2)
    private.save(tmp_path / "run.ckpt")
    lost = go_on(private, 1)
    model = mlp()
    resumed = cw.Private.resume(tmp_path / "run.ckpt", model, sgd(model))
    rest = go_on(resumed, 2)
    assert sorted(first + lost + rest) == list(range(N))
    assert sorted(go_on(resumed, 5)) == list(range(N)) and resumed.ledger.steps == 10


def test_a_save_in_the_middle_of_a_logical_batch_holds_nothing_of_it(tmp_path: Path) -> None:
    p = plan(sampling=cw.FullBatch(N), steps=2)
    model = mlp(dropout=0.3)
    train(cw.Private(p, model, sgd(model), seed=0), model, data(), physical_batch_size=8)
    expected = weights(model)
    model = mlp(dropout=0.3)
    private = cw.Private(p, model, sgd(model), seed=0)
    for k, (x, y) in enumerate(private.loader(data(), physical_batch_size=8)):
        private.step(losses_of(model, x, y))
        if k == 6:
            private.save(tmp_path / "run.ckpt")
            break
    record, begun, _ = checkpoint.read(tmp_path / "run.ckpt")
    assert begun == record["run"]["steps"] == 1
    model = mlp(dropout=0.3)
    resumed = cw.Private.resume(tmp_path / "run.ckpt", model, sgd(model))
    train(resumed, model, data(), physical_batch_size=8)
    assert same(expected, weights(model))


def test_what_the_loop_does_between_steps_does_not_disturb_a_replay(tmp_path: Path) -> None:
    def run(resume: bool) -> dict[str, Tensor]:
        model = mlp(dropout=0.5)
        private = cw.Private(plan(), model, sgd(model), seed=4)
        run_for(3, private, model)
        private.save(tmp_path / "run.ckpt")
        if resume:
            model = mlp(dropout=0.5)
            private = cw.Private.resume(tmp_path / "run.ckpt", model, sgd(model))
        else:
            torch.rand(17)  # an evaluation, say, that draws from the global generator
        train(private, model, data())
        return weights(model)

    assert same(run(False), run(True))


def test_with_own_batches_the_global_generator_is_restored(tmp_path: Path) -> None:
    def step(private: cw.Private, model: nn.Module) -> None:
        private.step(losses_of(model, X, Y))

    model = mlp(dropout=0.5)
    private = cw.Private(plan(steps=4), model, sgd(model), seed=4, own_batches=True)
    step(private, model)
    private.save(tmp_path / "run.ckpt")
    step(private, model)
    expected = weights(model)
    model = mlp(dropout=0.5)
    resumed = cw.Private.resume(tmp_path / "run.ckpt", model, sgd(model))
    step(resumed, model)
    assert same(expected, weights(model))


def test_an_unseeded_resume_charges_the_steps_begun_since_and_draws_fresh_noise(tmp_path: Path) -> None:
    path = tmp_path / "run.ckpt"
    model = mlp()
    optimizer = Recorder(model.parameters())
    private = cw.Private(plan(steps=10), model, optimizer, own_batches=True)
    for step in range(5):
        private.step(torch.zeros(0))
        if step == 1:
            private.save(path)
    noise = optimizer.seen[2:]
    model = mlp()
    optimizer = Recorder(model.parameters())
    resumed = cw.Private.resume(path, model, optimizer)
    assert resumed.steps_done == resumed.ledger.steps == 5
    assert [(e.steps, e.reason) for e in resumed.ledger.events] == [(2, "training"), (3, "interrupted")]  # type: ignore[union-attr]
    assert resumed.epsilon(1e-5) == private.epsilon(1e-5)
    resumed.step(torch.zeros(0))
    assert all(not torch.equal(optimizer.seen[0][0], old[0]) for old in noise)
    # A second crash at once: nothing is charged twice, nothing is lost.
    again = cw.Private.resume(path, model, optimizer)
    assert again.ledger.steps == 6
    again.save(path)
    assert cw.Private.resume(path, model, optimizer).ledger.steps == 6


def test_an_unseeded_run_ends_with_the_plan_even_after_losses(tmp_path: Path) -> None:
    path = tmp_path / "run.ckpt"
    model = mlp()
    private = cw.Private(plan(steps=6), model, sgd(model))
    private.save(path)
    run_for(2, private, model)
    model = mlp()
    resumed = cw.Private.resume(path, model, sgd(model))
    train(resumed, model, data())
    assert resumed.ledger.steps == 6
    with pytest.raises(cw.BudgetSpent):
        resumed.step(losses_of(model, X, Y))


def test_the_charge_is_on_disk_before_the_noise_is_drawn(tmp_path: Path) -> None:
    path = tmp_path / "run.ckpt"
    seen: list[int] = []

    class Watching:
        def fill_(self, buffer: Tensor, entropy: Any, step: int, piece: int) -> None:
            seen.append(checkpoint.read(path)[1])
            buffer.zero_()

    model = mlp()
    private = cw.Private(plan(), model, sgd(model), noise=Watching(), own_batches=True)
    private.save(path)
    for _ in range(3):
        private.step(torch.zeros(0))
    assert seen == [1, 2, 3]


def test_a_step_that_cannot_be_charged_on_disk_is_not_released(tmp_path: Path) -> None:
    path = tmp_path / "run.ckpt"
    model = mlp()
    optimizer = Recorder(model.parameters())
    private = cw.Private(plan(), model, optimizer, own_batches=True)
    private.save(path)
    assert private._release._journal is not None
    private._release._journal.close()
    with pytest.raises(cw.CheckpointError, match=r"Bad file descriptor"):
        private.step(losses_of(model, X, Y))
    assert not optimizer.seen and private.ledger.steps == 1 and all(p.grad is None for p in model.parameters())


def test_no_key_of_an_unseeded_run_is_ever_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[bytes] = []
    real = os.urandom

    def remember(size: int) -> bytes:
        drawn.append(real(size))
        return drawn[-1]

    monkeypatch.setattr(os, "urandom", remember)
    model = mlp()
    private = cw.Private(plan(), model, sgd(model))
    run_for(3, private, model)
    private.save(tmp_path / "run.ckpt")
    content = (tmp_path / "run.ckpt").read_bytes()
    state = private.state_dict()
    assert len(drawn) >= 6
    for secret in drawn:
        assert secret[:16] not in content and secret[:16].hex().encode() not in content
    for name in ("seed", "label", "generator", "loader", "order", "weights"):
        assert state[name] is None
    assert os.stat(tmp_path / "run.ckpt").st_mode & 0o077 == 0


def test_a_checkpoint_that_was_replaced_elsewhere_cannot_be_resumed_without_a_seed(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for seed in (None, 0):
        model = mlp()
        private = cw.Private(plan(), model, sgd(model), seed=seed, own_batches=True)
        private.save(first)
        private.step(losses_of(model, X, Y))
        private.save(second)
        private.step(losses_of(model, X, Y))
        if seed is None:
            with pytest.raises(cw.CheckpointError, match="replaced by a later"):
                resume(first)
            assert resume(second).ledger.steps == 2
        else:  # the same releases again: going back is a replay
            assert resume(first).ledger.steps == 0


@pytest.mark.parametrize("where", ["fsync", "replace"])
def test_a_failed_save_leaves_the_old_file(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.ckpt"
    model = mlp()
    private = cw.Private(plan(), model, sgd(model), seed=0, own_batches=True)
    private.step(losses_of(model, X, Y))
    private.save(path)
    old = path.read_bytes()
    private.step(losses_of(model, X, Y))
    with monkeypatch.context() as patch:
        patch.setattr(os, where, lambda *_: (_ for _ in ()).throw(OSError("disk full")))
        with pytest.raises(cw.CheckpointError, match=r"cannot be written \(disk full\)"):
            private.save(path)
    assert path.read_bytes() == old
    assert sorted(os.listdir(tmp_path)) == [".run.ckpt.lock", "run.ckpt", "run.ckpt.digests"]
    with pytest.raises(cw.CheckpointError, match="cannot be written"):
        private.save(tmp_path / "nowhere" / "run.ckpt")


def saved(tmp_path: Path, seed: int | None = 0, steps: int = 2) -> Path:
    model = mlp()
    private = cw.Private(plan(), model, sgd(model, momentum=0.9), seed=seed)
    run_for(steps, private, model)
    private.save(tmp_path / "run.ckpt")
    return tmp_path / "run.ckpt"


def test_a_member_that_claims_more_than_the_file_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a"
    checkpoint.write(path, {"x": torch.ones(3)}, 0)
    content = bytearray(path.read_bytes())
    entry = content.index(b"PK\x01\x02")  # of manifest.json in the directory: the sizes are 20 and 24 bytes further
    content[entry + 20 : entry + 28] = (3 << 30).to_bytes(4, "little") * 2
    path.write_bytes(content)
    with pytest.raises(cw.CheckpointError, match=r"manifest\.json claims more than the file has"):
        checkpoint.read(path)


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    path = saved(tmp_path)
    good = path.read_bytes()
    members = zipfile.ZipFile(path).infolist()
    inside = members[3].header_offset + 30 + len(members[3].filename) + 2  # within a tensor's bytes
    flipped = bytearray(good)
    flipped[inside] ^= 1
    damaged = {
        "cut": good[:-100],
        "short": good[:10],
        "empty": b"",
        "other": b"PK" + good[2:],
        "flipped": bytes(flipped),
        "counter": good.replace(b"begun 0", b"begun x"),
    }
    for name, content in damaged.items():
        bad = tmp_path / name
        bad.write_bytes(content)
        model = mlp()
        before = weights(model)
        with pytest.raises(cw.CheckpointError):
            cw.Private.resume(bad, model, sgd(model, momentum=0.9))
        assert same(before, weights(model)) and bad.read_bytes() == content
    with pytest.raises(cw.CheckpointError, match="missing"):
        resume(tmp_path / "nothing")


def test_another_model_optimizer_plan_or_data_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    path = saved(tmp_path)

    def refused(model: nn.Module, optimizer: torch.optim.Optimizer, match: str, **options: Any) -> None:
        before = weights(model)
        with pytest.raises(cw.CheckpointError, match=match):
            cw.Private.resume(path, model, optimizer, **options)
        assert same(before, weights(model)) and not optimizer.state

    wide = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Dropout(0.0), nn.Linear(5, 1))
    refused(wide, sgd(wide, momentum=0.9), "model differs")
    short = nn.Sequential(nn.Linear(3, 4))
    refused(short, sgd(short, momentum=0.9), "model differs")
    frozen = mlp()
    frozen[0].requires_grad_(False)  # type: ignore[index]
    refused(frozen, sgd(frozen, momentum=0.9), "model differs")
    buffered = mlp()
    buffered.register_buffer("extra", torch.ones(1))
    refused(buffered, sgd(buffered, momentum=0.9), "extra")
    refused(model := mlp(), torch.optim.Adam(model.parameters()), "optimizer is SGD")
    model = mlp()
    groups = [{"params": [p]} for p in model.parameters()]
    refused(model, torch.optim.SGD(groups, lr=0.1, momentum=0.9), "groups")
    refused(model := mlp(), sgd(model, momentum=0.9), "another plan", plan=plan(steps=7))
    model = mlp()
    resumed = cw.Private.resume(path, model, sgd(model, momentum=0.9))
    with pytest.raises(cw.CheckpointError, match="data changed"):
        resumed.loader(data(seed=5))
    with pytest.raises(cw.InvalidSampling):
        resumed.loader(data(N + 1))


def test_a_rule_of_ones_own_is_resumed_with_its_plan(tmp_path: Path) -> None:
    p = plan(clip=Own(2.0))
    model = mlp()
    private = cw.Private(p, model, sgd(model), seed=0, own_batches=True)
    private.step(losses_of(model, X, Y))
    private.save(tmp_path / "run.ckpt")
    with pytest.raises(cw.InvalidPlan, match="give the plan itself"):
        resume(tmp_path / "run.ckpt")
    with pytest.raises(cw.CheckpointError, match="another plan"):
        resume(tmp_path / "run.ckpt", plan=plan(clip=Own(3.0)))
    assert resume(tmp_path / "run.ckpt", plan=p).steps_done == 1


def test_the_loops_own_state_goes_along(tmp_path: Path) -> None:
    model = mlp()
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    private = cw.Private(plan(), model, optimizer, seed=0, own_batches=True)
    private.step(losses_of(model, X, Y))
    scheduler.step()
    private.save(tmp_path / "run.ckpt", extra={"scheduler": scheduler.state_dict()})
    model = mlp()
    resumed = cw.Private.resume(tmp_path / "run.ckpt", model, sgd(model))
    assert resumed.extra == {"scheduler": scheduler.state_dict()}
    with pytest.raises(cw.CheckpointError, match=r"checkpoint\['extra'\]\['f'\].*without pickle"):
        resumed.save(tmp_path / "run.ckpt", extra={"f": print})


def test_reading_never_unpickles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pickle

    path = saved(tmp_path)
    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, lambda *_: pytest.fail("unpickled"))
    monkeypatch.setattr(torch, "load", lambda *_: pytest.fail("torch.load"))
    monkeypatch.setattr(builtins, "eval", lambda *_: pytest.fail("eval"))
    cw.Private.resume(path, model := mlp(), sgd(model, momentum=0.9))


# state_dict and load_state_dict


def test_a_state_dict_survives_json_and_goes_on(tmp_path: Path) -> None:
    model = mlp()
    optimizer = sgd(model, momentum=0.9)
    private = cw.Private(plan(), model, optimizer, seed=0)
    run_for(3, private, model)
    state, model_state, optimizer_state = private.state_dict(), weights(model), copy.deepcopy(optimizer.state_dict())
    train(private, model, data())
    expected = weights(model)

    model = mlp(seed=3)
    optimizer = sgd(model, momentum=0.9)
    again = cw.Private(plan(), model, optimizer, seed=0)
    text = json.dumps({k: v for k, v in state.items() if k != "generator"})
    again.load_state_dict({**json.loads(text), "generator": state["generator"]})
    model.load_state_dict(model_state)
    optimizer.load_state_dict(optimizer_state)
    assert again.steps_done == 3 and again.ledger == cw.Ledger([cw.GaussianSteps(plan().sampling, 1.0, 3)])
    train(again, model, data())
    assert same(expected, weights(model))


def test_a_seeded_replay_from_other_weights_is_refused() -> None:
    model = mlp()
    private = cw.Private(plan(), model, sgd(model), seed=0, own_batches=True)
    private.step(losses_of(model, X, Y))
    state = private.state_dict()
    other = mlp(seed=8)
    again = cw.Private(plan(), other, sgd(other), seed=0, own_batches=True)
    again.load_state_dict(state)
    with pytest.raises(cw.CheckpointError, match="same noise"):
        again.step(losses_of(other, X, Y))
    assert again.ledger.steps == 1
    other.load_state_dict(model.state_dict())
    assert again.step(losses_of(other, X, Y))


def test_states_that_do_not_fit_are_refused() -> None:
    model = mlp()
    private = cw.Private(plan(), model, sgd(model), seed=0, own_batches=True)
    private.step(losses_of(model, X, Y))
    state = private.state_dict()

    def fresh(p: cw.Plan | None = None, seed: int | None = 0, model: nn.Module | None = None) -> cw.Private:
        model = model or mlp()
        return cw.Private(p or plan(), model, sgd(model), seed=seed, own_batches=True)

    cases = [
        (private, state, "cannot be forgotten"),
        (fresh(plan(steps=7)), state, "another plan"),
        (fresh(plan(noise_multiplier=1.1)), state, "another plan"),
        (fresh(seed=1), state, "another seed"),
        (fresh(seed=None), state, "another seed"),
        (fresh(model=nn.Linear(3, 1)), state, "model differs"),
        (fresh(), {**state, "version": 9}, "version"),
        (fresh(), {**state, "stepps": 1}, "keys"),
        (fresh(), {k: v for k, v in state.items() if k != "ledger"}, "keys"),
        (fresh(), {**state, "steps": 3}, "edited"),
        (fresh(), {**state, "plan": 3}, "'plan' that makes sense"),
    ]
    for target, broken, match in cases:
        done = target.steps_done
        with pytest.raises(cw.CheckpointError, match=match):
            target.load_state_dict(broken)
        assert target.steps_done == target.ledger.steps == done
    target = fresh()
    with pytest.raises(cw.LedgerError):
        target.load_state_dict({**state, "ledger": state["ledger"].replace('"steps": 1', '"steps": 0')})
    assert target.steps_done == 0


def test_the_memory_of_a_run_is_kept_since_it_decides_how_sums_are_rounded(tmp_path: Path) -> None:
    for seed in (None, 0):
        model = mlp()
        private = cw.Private(plan(), model, sgd(model), seed=seed, own_batches=True, memory=1 << 20)
        private.step(losses_of(model, X, Y))
        state = private.state_dict()
        private.save(tmp_path / "run.ckpt")
        other = mlp()
        again = cw.Private.resume(tmp_path / "run.ckpt", other, sgd(other))
        assert again.state_dict()["memory"] == 1 << 20
        third = cw.Private(plan(), model, sgd(model), seed=seed, own_batches=True)
        if seed is None:
            third.load_state_dict(state)
        else:
            with pytest.raises(cw.CheckpointError, match="memory=1048576 and a seed"):
                third.load_state_dict(state)
        with pytest.raises(cw.CheckpointError, match="no 'memory' that makes sense"):
            cw.Private(plan(), model, sgd(model), seed=seed, own_batches=True).load_state_dict({**state, "memory": -1})


def test_a_state_without_a_plan_is_refused() -> None:
    for saved in ({}, {"plan": 3}, {"plan": None}):
        with pytest.raises(cw.CheckpointError, match="has no plan"):
            PrivateState.plan_of(saved)


# The file format


def test_values_and_tensors_come_back_as_they_were(tmp_path: Path) -> None:
    value = {
        "numbers": [1, -2.5, math.inf, -math.inf, 10**30, True, None, "text"],
        "tuple": (1, (2.0, ())),
        "keys": {1: "int", "a": "str", (1, 2): "tuple", None: 0},
        "$tensor": {"$dict": [1]},
        "tensors": [
            torch.randn(3, 4).t(),
            torch.tensor(2.5, dtype=torch.float64),
            torch.arange(6, dtype=torch.int8).reshape(2, 3),
            torch.empty(0, 5),
            torch.randn(4, dtype=torch.bfloat16),
            torch.tensor([True, False]),
            torch.randn(2, dtype=torch.complex64),
        ],
    }
    checkpoint.write(tmp_path / "file", value, begun=3).close()
    again, begun, live = checkpoint.read(tmp_path / "file")
    assert (begun, live) == (3, True)
    for a, b in zip(again.pop("tensors"), value.pop("tensors"), strict=True):  # type: ignore[arg-type]
        assert a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    assert again == value
    assert math.isnan(roundtrip(tmp_path, {"x": math.nan})["x"])


def roundtrip(tmp_path: Path, value: dict[str, Any]) -> dict[str, Any]:
    checkpoint.write(tmp_path / "file", value, begun=0).close()
    return checkpoint.read(tmp_path / "file")[0]


def test_shared_memory_is_written_once(tmp_path: Path) -> None:
    shared = torch.randn(100_000)
    roundtrip(tmp_path, {"a": shared, "b": shared.view_as(shared), "c": shared[:5]})
    assert (tmp_path / "file").stat().st_size < 100_000 * 4 * 1.1


@pytest.mark.parametrize(
    "value", [print, object(), {1, 2}, b"bytes", torch.ones(2).to_sparse()], ids=lambda value: type(value).__name__
)
def test_what_would_need_pickle_is_refused(value: object, tmp_path: Path) -> None:
    with pytest.raises(cw.CheckpointError):
        checkpoint.write(tmp_path / "file", {"x": value}, begun=0)
    assert not list(tmp_path.iterdir())


def test_the_journal_counts_in_place(tmp_path: Path) -> None:
    path = tmp_path / "file"
    journal = checkpoint.write(path, {"x": torch.ones(3)}, begun=2)
    size = path.stat().st_size
    for begun in (3, 4, 10**12):
        journal.charge(begun)
        assert checkpoint.read(path)[1:] == (begun, True)
    journal.retire(10**12)
    assert checkpoint.read(path)[1:] == (10**12, False) and path.stat().st_size == size
    with pytest.raises(cw.CheckpointError, match="cannot be written"):
        checkpoint.Journal(tmp_path / "absent")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_file_that_another_run_continues_is_not_replaced(tmp_path: Path) -> None:
    """The lock comes before the writing; and a forked process has none."""
    path = tmp_path / "file"
    journal = checkpoint.write(path, {"x": 1}, begun=2)
    assert "another process" in refused_elsewhere(lambda: checkpoint.write(path, {"x": 2}, begun=0))
    assert checkpoint.read(path) == ({"x": 1}, 2, True)
    assert "was forked from the one that continues" in refused_elsewhere(lambda: journal.charge(3))
    journal.charge(3)
    assert checkpoint.read(path)[1] == 3


def test_a_file_that_was_replaced_before_it_was_locked_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, other = tmp_path / "file", tmp_path / "other"
    for target in (path, other):
        checkpoint.write(target, {"x": 1}, begun=2).lock.release()
    lock = checkpoint.Lock

    def late(*args: Any) -> Any:
        os.replace(other, path)
        return lock(*args)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "Lock", late)
        with pytest.raises(cw.CheckpointError, match="moved, removed or replaced"):
            checkpoint.Journal(path)
    checkpoint.Journal(path)


def test_a_count_that_was_not_written_whole_is_no_charge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = checkpoint.write(tmp_path / "file", {"x": 1}, begun=2)
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda handle, line: len(line) - 1)
        with pytest.raises(cw.CheckpointError, match=r"the step cannot be counted in .*No space left"):
            journal.charge(3)
    journal.charge(3)
    assert journal.begun() == 3


def summed(words: bytes) -> bytes:
    return b"%s %08x\n" % (words, zlib.crc32(words))


GOOD = summed(b"begun 00000000000000000002 live")
GARBLED = {
    "other_word": summed(b"began 00000000000000000002 live"),
    "no_number": summed(b"begun 0000000000000000000x live"),
    "negative": summed(b"begun -0000000000000000002 live"),
    "two_words": summed(b"begun 00000000000000000002_live"),
    "no_number_at_all": summed(b"begun                      live"),
    "five_words": summed(b"begun 00000000000000000002 li e"),
    "other_state": summed(b"begun 00000000000000000002 lime"),
    "spaces": summed(b"begun  0000000000000000002 live"),
    "short": b"begun 2 live\n" + b" " * (len(GOOD) - len("begun 2 live\n")),
    "no_end": GOOD[:-1] + b" ",
    "zeros": bytes(len(GOOD)),
    "fewer_steps": GOOD.replace(b"02 live", b"01 live"),
    "not_past": summed(b"begun 00000000000000000002 past").replace(b"past", b"live"),
    "other_sum": GOOD[:-2] + (b"0\n" if GOOD[-2:] != b"0\n" else b"1\n"),
}


@pytest.mark.parametrize("garbled", GARBLED.values(), ids=GARBLED)
def test_a_garbled_count_is_no_count(garbled: bytes, tmp_path: Path) -> None:
    """A number read out of rubbish would be steps that nobody is charged for."""
    path = tmp_path / "file"
    journal = checkpoint.write(path, {"x": torch.ones(3)}, begun=2)
    content = path.read_bytes()
    assert content.count(GOOD) == 1 and len(garbled) == len(GOOD)
    with open(path, "r+b") as file:  # in place, under the open journal
        file.seek(content.index(GOOD))
        file.write(garbled)
    for look in (lambda: checkpoint.read(path), journal.begun, lambda: journal.charge(3)):
        with pytest.raises(cw.CheckpointError, match="does not say how many steps"):
            look()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_two_processes_cannot_go_on_from_one_file(tmp_path: Path) -> None:
    """Each would count its own steps over the other's, and both release."""
    model = mlp()
    private = cw.Private(plan(), model, sgd(model))
    private.save(tmp_path / "run")
    assert "another process" in refused_elsewhere(lambda: cw.Private.resume(tmp_path / "run", model, sgd(model)))
    assert train(private, model, data()) > 0


def test_a_schedule_style_survives(tmp_path: Path) -> None:
    style: Style = cw.Layerwise({"0": cw.Abadi(1.0), "3": cw.Automatic(0.5)}, noise="per_layer")
    p = plan(clip=style)
    model = mlp()
    private = cw.Private(p, model, sgd(model), seed=0)
    private.save(tmp_path / "run.ckpt")
    assert cw.Private.resume(tmp_path / "run.ckpt", model, sgd(model)).plan == p


def test_a_file_that_was_written_before_the_redesign_goes_on(tmp_path: Path) -> None:
    """By revision 8ba8f1b, whose count had no checksum: ten unseeded steps, saved after four, killed after seven."""
    path = tmp_path / "run"
    shutil.copy(Path(__file__).with_name("saved_by_8ba8f1b.ckpt"), path)
    model = nn.Linear(4, 2)
    private = cw.Private.resume(path, model, sgd(model))
    saved = [[-0.015327883, 0.28327307, -0.39208898, -0.3991707], [-0.18351957, 0.16108063, 0.01266421, 0.41678166]]
    torch.testing.assert_close(model.weight, torch.tensor(saved), rtol=1e-6, atol=0)
    kind = cw.Poisson(40, 8)
    before = (cw.GaussianSteps(kind, 1.0, 4), cw.GaussianSteps(kind, 1.0, 3, reason="interrupted"))
    assert private.ledger.events == before
    for x, y in private.loader(TensorDataset(torch.randn(40, 4), torch.randint(2, (40,)))):
        private.step(nn.functional.cross_entropy(model(x), y, reduction="none"))
    assert private.ledger.events == (*before, cw.GaussianSteps(kind, 1.0, 3))
    assert path.read_bytes().startswith(b"clipwise checkpoint 1\nbegun 00000000000000000010 live\nPK")
    private.save(path)
    assert path.read_bytes().startswith(b"clipwise checkpoint 2\n" + summed(b"begun 00000000000000000010 live") + b"PK")


def test_a_file_of_a_later_version_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    path = saved(tmp_path)
    later = path.read_bytes().replace(b"checkpoint 2", b"checkpoint 3", 1)
    path.write_bytes(later)
    model = mlp()
    for read in (lambda: cw.Private.resume(path, model, sgd(model)), lambda: checkpoint.read(path)):
        with pytest.raises(cw.CheckpointError, match="written by another version of clipwise"):
            read()
    assert path.read_bytes() == later
