"""A witness on other storage: an older copy is not continued, and no death at any moment loses a charge."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import clipwise as cw
from clipwise.federated import Server, apply
from clipwise.noise import GaussianNoise
from tests.core.common import data, losses_of, mlp, plan, same, sgd, weights
from tests.federated.common import federated_plan

X, Y = data().tensors
STEPS = 12


class Run:
    """A run of `Private`, or of a server, in a folder, with its witness elsewhere."""

    def __init__(self, place: Path, seed: int | None = None, every: int = 4, federated: bool = False) -> None:
        self.path, self.seed, self.federated = place / "folder" / "run", seed, federated
        self.witness = cw.Witness(place / "other" / "witness", every)
        for folder in (self.path.parent, Path(self.witness.path).parent):
            folder.mkdir(exist_ok=True)
        self.model: nn.Module = mlp(dropout=0.2)
        self.run: cw.Private | Server | None = None

    @property
    def ledger(self) -> cw.Ledger:
        assert self.run is not None
        return self.run.ledger

    @property
    def done(self) -> int:
        return self.run.steps_done if isinstance(self.run, cw.Private) else self.run.rounds_done  # type: ignore[union-attr]

    def begin(self, **options: Any) -> Run:
        """A new one, or the saved one; as after the death of the process before."""
        self.run, self.model = None, mlp(dropout=0.2)
        if self.federated:
            p = federated_plan(cw.Poisson(20, 5), steps=STEPS, clip=cw.Abadi(1.0), noise_multiplier=1.0)
            self.run = Server(p, self.model, seed=self.seed, witness=self.witness)
            if self.path.exists():
                self.run.resume(self.path, self.model)
        elif self.path.exists():
            self.run = cw.Private.resume(self.path, self.model, sgd(self.model), **options)
        else:
            p = plan(steps=STEPS)
            self.run = cw.Private(
                p, self.model, sgd(self.model), seed=self.seed, own_batches=True, witness=self.witness
            )
        return self

    def save(self) -> None:
        if isinstance(self.run, Server):
            self.run.save(self.path, self.model)
        else:
            assert self.run is not None
            self.run.save(self.path)

    def step(self, count: int = 1) -> Run:
        for _ in range(count):
            if isinstance(self.run, Server):
                self.run.open(range(20))
                apply(self.model, self.run.close([]))
            else:
                assert self.run is not None
                self.run.step(losses_of(self.model, X, Y))
        return self

    def known(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(Path(self.witness.path).read_text())
        return found


def reasons(ledger: cw.Ledger) -> list[tuple[str, int]]:
    return [(event.reason, event.count) for event in ledger.events]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


# Charged ahead


def test_steps_are_charged_ahead_in_blocks_and_what_was_not_made_is_on_the_ledger(run: Run) -> None:
    run.begin().save()
    assert run.known()["begun"] == 0
    for made, charged in ((1, 4), (2, 4), (4, 4), (5, 8), (10, 12), (12, 12)):
        run.step(made - run.done)
        assert run.known()["begun"] == charged
    shutil.rmtree(run.path.parent)  # another one, that dies in its second block
    Path(run.witness.path).unlink()
    run.path.parent.mkdir()
    run.begin().save()
    run.step(5)
    assert reasons(run.begin().ledger) == [("interrupted", 5), ("charged ahead", 3)] and run.done == 8
    assert run.ledger.epsilon(1e-5) == plan(steps=8).epsilon(1e-5)
    run.step(4)
    assert run.ledger.steps == STEPS
    with pytest.raises(cw.BudgetSpent):
        run.step()


def test_a_save_gives_back_what_was_charged_ahead(run: Run) -> None:
    run.begin().step(2).save()
    assert run.known()["begun"] == 2
    assert reasons(run.begin().ledger) == [("training", 2)]


def test_with_every_1_nothing_is_charged_in_vain(tmp_path: Path) -> None:
    run = Run(tmp_path, every=1).begin()
    run.save()
    assert reasons(run.step(5).begin().ledger) == [("interrupted", 5)]


# An older copy


@pytest.mark.parametrize("federated", [False, True])
@pytest.mark.parametrize("seed", [None, 5])
def test_an_older_copy_of_the_folder_is_refused(seed: int | None, federated: bool, tmp_path: Path) -> None:
    run = Run(tmp_path, seed, federated=federated).begin()
    run.step(2).save()
    shutil.copytree(run.path.parent, tmp_path / "copy")
    run.step(4).save()
    shutil.rmtree(run.path.parent)
    shutil.copytree(tmp_path / "copy", run.path.parent)
    with pytest.raises(cw.CheckpointError, match=r"save 1, but the witness .* knows of save 2: an older copy"):
        run.begin()


def test_an_older_count_of_the_same_save_is_charged_up_to_the_witness(run: Run, tmp_path: Path) -> None:
    run.begin().save()
    old = run.path.read_bytes()
    run.step(6)
    run.run = None
    run.path.write_bytes(old)  # its journal says 0
    assert reasons(run.begin().ledger) == [("charged ahead", 8)]


def test_a_copy_elsewhere_cannot_go_on_beside_the_run(run: Run, tmp_path: Path) -> None:
    run.begin().save()
    run.step(1)
    shutil.copytree(run.path.parent, tmp_path / "copy")
    other = mlp(dropout=0.2)
    copy = cw.Private.resume(tmp_path / "copy" / "run", other, sgd(other))
    before = weights(run.model)
    with pytest.raises(cw.CheckpointError, match="changed by others"):
        run.step()
    assert same(before, weights(run.model)) and copy.ledger.steps == 4  # all that the run may have made


def test_a_seeded_run_makes_the_steps_again(tmp_path: Path) -> None:
    whole = Run(tmp_path / "", 5).begin().step(STEPS)
    expected = weights(whole.model)
    (tmp_path / "second").mkdir()
    run = Run(tmp_path / "second", 5).begin()
    run.save()
    run.step(6)
    assert run.begin().step(STEPS).ledger.steps == STEPS and reasons(run.ledger) == [("training", STEPS)]
    assert same(expected, weights(run.model))


# A witness that is not there, or not this run's


def refused(run: Run, match: str) -> None:
    before = weights(run.model)
    with pytest.raises(cw.CheckpointError, match=match):
        run.step()
    assert same(before, weights(run.model)) and all(p.grad is None for p in run.model.parameters())


@pytest.mark.parametrize("federated", [False, True])
def test_without_its_witness_a_run_stops_before_the_next_release(federated: bool, tmp_path: Path) -> None:
    run = Run(tmp_path, federated=federated).begin().step()
    Path(run.witness.path).unlink()
    refused(run, r"witness .* cannot be read")


def test_a_witness_that_cannot_be_written_stops_the_run_before_the_release(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.begin().step(4)
    monkeypatch.setattr(os, "fsync", lambda handle: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    refused(run, r"witness .* cannot be written \(.*No space left")
    monkeypatch.undo()
    shutil.rmtree(Path(run.witness.path).parent)
    refused(run, r"witness .* cannot be read")


def test_a_witness_is_cut_or_edited_nowhere_unnoticed(run: Run) -> None:
    run.begin().step(2).save()
    run.run, path = None, Path(run.witness.path)
    good = path.read_bytes()
    for cut in range(len(good) - 1):  # without its last line break it is whole
        path.write_bytes(good[:cut])
        with pytest.raises(cw.CheckpointError, match="cannot be read"):
            run.begin()
    for changed in (good.replace(b'"begun": 2', b'"begun": 1'), good.replace(b"witness", b"whitness", 1), b"[]", b"{}"):
        path.write_bytes(changed)
        with pytest.raises(cw.CheckpointError, match="cannot be read"):
            run.begin()
    path.write_bytes(good)
    assert run.begin().done == 2


def test_a_resume_needs_the_witness_of_its_run(run: Run, tmp_path: Path) -> None:
    run.begin().step().save()
    run.run, moved = None, tmp_path / "moved"
    shutil.move(run.witness.path, moved)
    with pytest.raises(cw.CheckpointError, match=r"witness .* cannot be read"):
        run.begin()
    (tmp_path / "another").mkdir()
    Run(tmp_path / "another").begin().step()
    with pytest.raises(cw.CheckpointError, match="is that of another run"):
        run.begin(witness=tmp_path / "another" / "other" / "witness")
    run.begin(witness=moved).step(4)
    assert json.loads(moved.read_text())["begun"] == STEPS  # a path alone counts ahead by a hundred


def test_a_new_run_does_not_count_in_the_witness_of_another(run: Run, tmp_path: Path) -> None:
    run.begin().step()
    other = cw.Private(plan(), model := mlp(), sgd(model), own_batches=True, witness=run.witness)
    with pytest.raises(cw.CheckpointError, match="counts the steps of another run"):
        other.step(losses_of(model, X, Y))
    assert run.known()["begun"] == 4


def test_a_run_without_a_witness_can_be_given_one(run: Run, tmp_path: Path) -> None:
    model = mlp(dropout=0.2)
    private = cw.Private(plan(steps=STEPS), model, sgd(model), own_batches=True)
    private.step(losses_of(model, X, Y))
    private.save(run.path)
    run.begin(witness=run.witness).step()
    assert run.known()["begun"] == 5
    run.save()
    assert run.begin().known()["settled"] == 1


@pytest.mark.parametrize("wrong", [0, -1, 2.5, True])
def test_blocks_are_whole_numbers(wrong: Any) -> None:
    with pytest.raises(cw.InvalidPlan, match="every must be a positive integer"):
        cw.Witness("file", wrong)
    with pytest.raises(cw.InvalidPlan, match="path of a file"):
        cw.Witness(3)  # type: ignore[arg-type]


# Death at every moment at which the disk is asked for something


class Died(BaseException):
    """The end of the process."""


@contextmanager
def dying_at(moment: int, drawn: list[tuple[int, bytes]]) -> Iterator[Callable[[], int]]:
    """Die when the disk is asked for the `moment`-th time; releases are noted before they can be used."""
    asked = 0
    with pytest.MonkeyPatch.context() as patch:

        def counting(name: str, real: Callable[..., Any]) -> None:
            def request(*arguments: Any, **options: Any) -> Any:
                nonlocal asked
                asked += 1
                if asked == moment:
                    raise Died
                return real(*arguments, **options)

            patch.setattr(os, name, request)

        counting("fsync", lambda handle: None)  # what is written stays: it is the process that dies
        for name in ("replace", "write"):
            counting(name, getattr(os, name))
        release = GaussianNoise.release

        def noted(self: GaussianNoise, sums: Any, deviations: Any, scale: Any, number: int, *rest: Any) -> Any:
            released = release(self, sums, deviations, scale, number, *rest)
            drawn.append((number, b"".join(tensor.numpy().tobytes() for tensor in released)))
            return released

        patch.setattr(GaussianNoise, "release", noted)
        yield lambda: asked


def live(run: Run) -> None:
    """Five steps, with saves before the first, and after the second."""
    run.begin()
    if not run.path.exists():
        run.save()
    while run.done < 5:
        run.step()
        if run.done == 2:
            run.save()


@pytest.mark.parametrize("federated", [False, True])
@pytest.mark.parametrize("seed", [None, 5])
def test_a_death_at_any_moment_loses_no_charge(
    seed: int | None, federated: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    expected: dict[str, torch.Tensor] | None = None
    moment, requests = 0, 1
    while moment <= requests:
        run = Run(tmp_path_factory.mktemp("death"), seed, every=3, federated=federated)
        drawn: list[tuple[int, bytes]] = []
        with dying_at(moment, drawn) as asked:
            try:
                live(run)
                requests = asked()
            except Died:
                run.run = None
            if run.path.exists():
                assert run.begin().ledger.steps >= len({n for n, _ in drawn}) or seed is not None, moment
            live(run)
        assert run.ledger.steps >= 5 and run.ledger.steps >= len(set(drawn)), moment
        numbers = [number for number, _ in drawn]
        if seed is None:
            assert len(set(numbers)) == len(numbers), moment  # no step is released twice
        else:
            assert len(set(drawn)) == run.ledger.steps == 5, moment  # once more, but the same
            expected = weights(run.model) if expected is None else expected
            assert same(expected, weights(run.model)), moment
        moment += 1
    assert moment > 30
