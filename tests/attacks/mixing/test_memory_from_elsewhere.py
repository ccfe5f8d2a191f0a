"""Memory of earlier batches that passed for constant by the way in which it reached the losses.

Kernels that take memory instead of making it, numbers inside TorchScript, entries of one attribute, loss functions that
are checked after the batch was seen, and a run that is resumed. One record moved the clipped sum by 7 to 14 R.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import clipwise as cw

from .test_second_look import losses_of, mlp, points, private_of

EIGHT = cw.FixedSize(48, 8)
unknown = pytest.raises(cw.NotSeparable, match="memory of unknown origin")


# Kernels that take memory


class Bank:
    """A statistic of the batch before, kept where torch does not look."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "bank"
        self.mean = torch.zeros(6)
        self.put(torch.zeros(6))

    def put(self, mean: Tensor) -> None:
        """Keep it."""
        self.mean = mean

    def get(self) -> Tensor:
        """Read it in the forward pass."""
        raise NotImplementedError


class FromFile(Bank):
    def put(self, mean: Tensor) -> None:
        torch.from_file(str(self.path), shared=True, size=6, dtype=torch.float32).copy_(mean)

    def get(self) -> Tensor:
        return torch.from_file(str(self.path), shared=True, size=6, dtype=torch.float32)


class StorageOfFile(FromFile):
    def get(self) -> Tensor:
        storage = torch.UntypedStorage.from_file(str(self.path), True, 24)
        return torch.empty(0).set_(storage, 0, (6,))


class KeptStorage(Bank):
    def put(self, mean: Tensor) -> None:
        self.storage = mean.clone().untyped_storage()

    def get(self) -> Tensor:
        return torch.empty(0).set_(self.storage, 0, (6,))


class Mapped(Bank):
    def put(self, mean: Tensor) -> None:
        torch.save(mean, self.path)

    def get(self) -> Tensor:
        found: Tensor = torch.load(self.path, mmap=True)
        return found


class Pickled(Bank):
    """As the queues of `torch.multiprocessing` do."""

    def put(self, mean: Tensor) -> None:
        self.pickled = bytes(ForkingPickler.dumps(mean.clone().share_memory_()))

    def get(self) -> Tensor:
        found: Tensor = ForkingPickler.loads(self.pickled)
        return found


def centred(private: cw.Private, model: nn.Module, bank: Bank) -> Iterator[None]:
    for x, y in private.loader(points()):
        private.step(losses_of(model, (x - bank.get(), y)))
        bank.put(x.mean(0))
        yield


@pytest.mark.parametrize("kind", [FromFile, StorageOfFile, KeptStorage, Mapped, Pickled])
def test_memory_that_a_kernel_takes_is_not_its_own(kind: type[Bank], tmp_path: Path) -> None:
    model = mlp()
    with unknown:
        list(centred(private_of(model, 6, EIGHT), model, kind(tmp_path)))


def test_memory_that_the_pass_made_may_be_taken_again_and_copied() -> None:
    model = mlp()
    private = private_of(model, 6, EIGHT)
    for x, y in private.loader(points()):
        zeros = torch.zeros(6)
        taken = torch.empty(0).set_(zeros.untyped_storage(), 0, (6,))
        private.step(losses_of(model, (x - taken - taken.__deepcopy__({}), y)))
    assert private.checked.steps and not private.checked.unclear


# Numbers inside TorchScript, and whole numbers


@torch.jit.script
def advantage(losses: Tensor, baseline: Tensor) -> Tensor:
    return losses * (losses.detach() - baseline)


@torch.jit.script
def centre(x: Tensor, means: list[Tensor]) -> Tensor:
    return x - torch.stack(means)


def test_a_number_of_earlier_batches_inside_torchscript_is_refused() -> None:
    model, baseline = mlp(), torch.zeros(())
    private = private_of(model, 6, EIGHT)
    with unknown:
        for x, y in private.loader(points()):
            private.step(advantage(losses_of(model, (x, y)), baseline))
            baseline = 0.5 * baseline + 0.5 * x.abs().mean()


def test_so_is_a_list_of_them() -> None:
    model, means = mlp(), list(torch.zeros(6).unbind())
    private = private_of(model, 6, EIGHT)
    with unknown:
        for x, y in private.loader(points()):
            private.step(losses_of(model, (centre(x, means), y)))
            means = [mean.clone() for mean in x.mean(0).unbind()]


@pytest.mark.filterwarnings("ignore")
def test_numbers_that_torchscript_holds_may_be_used() -> None:
    model = mlp()
    halved = torch.jit.trace(lambda x: x * torch.tensor(0.37) + 1.5, torch.zeros(8, 6))
    private = private_of(model, 6, EIGHT)
    for x, y in private.loader(points()):
        private.step(losses_of(model, (halved(x), y)))
    assert private.checked.steps and not private.checked.unclear


@pytest.mark.parametrize("scripts", [False, True])
def test_a_whole_number_of_the_batch_before_is_refused(scripts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clipwise.private.evidence.memory.has_scripts", lambda: scripts)
    model, most = mlp(), torch.ones((), dtype=torch.long)
    private = private_of(model, 6, EIGHT)
    with unknown:
        for x, y in private.loader(points()):
            private.step(losses_of(model, (x / most, y)))
            most = 1 + (10 * x).abs().amax().long()


@torch.jit.script
def span(x: Tensor, most: int) -> Tensor:
    return torch.tensor(min(x.size(1), most))


def test_a_size_that_torchscript_gives_back_is_honest() -> None:
    """As DeBERTa cuts its relative positions."""
    model = mlp()
    private = private_of(model, 6, EIGHT)
    for x, y in private.loader(points()):
        table = torch.linspace(0.5, 1, 12)
        private.step(losses_of(model, (x * table[6 - span(x, 8) : 12 - span(x, 8)], y)))
    assert private.steps_done == 6


# Operations that are none of torch's

MEANS = [torch.zeros(6)]


@torch.library.custom_op("clipwise_tests::centre", mutates_args=())
def centre_by_hand(x: Tensor) -> Tensor:
    return x - MEANS[0]


def test_a_pass_with_operations_of_others_does_not_count_as_checked() -> None:
    model = mlp()
    private = private_of(model, 6, EIGHT)
    for x, y in private.loader(points()):
        private.step(losses_of(model, (centre_by_hand(x), y)))
        MEANS[0] = x.mean(0)
    assert not private.checked.steps
    assert private.checked.unclear == ("what clipwise_tests::centre reads besides its arguments",)


# What the model rewrites itself


class Rewriting(nn.Module):
    """Makes one entry at every step; `late` is called on the other."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.held = mlp(), {"ramp": torch.zeros(6), "mean": torch.zeros(6)}

    def forward(self, x: Tensor) -> Tensor:
        self.held["ramp"] = torch.linspace(0, 1, 6)
        out: Tensor = self.net(x - self.held["mean"] + self.held["ramp"])
        return out


def test_an_entry_that_the_model_rewrites_licenses_no_other() -> None:
    model = Rewriting()
    private = private_of(model, 6, EIGHT)
    with unknown:
        for x, y in private.loader(points()):
            private.step(F.cross_entropy(model(x), y, reduction="none"))
            model.held["mean"] = x.mean(0)


class Warming(nn.Module):
    """Zeros at first, later an average of batches, which are written by the same lines."""

    def __init__(self, begins: int) -> None:
        super().__init__()
        self.net, self.begins, self.count, self.mean = mlp(), begins, 0, torch.zeros(6)

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        out: Tensor = self.net(x - self.mean)
        self.mean = torch.zeros(6) if self.count < self.begins else 0.5 * self.mean + 0.5 * x.mean(0).detach()
        return out


def warmed(private: cw.Private, model: nn.Module) -> None:
    for x, y in private.loader(points()):
        private.step(F.cross_entropy(model(x), y, reduction="none"))


def test_a_pass_that_reads_and_writes_what_the_model_rewrites_is_refused_once_it_is_watched() -> None:
    model = Warming(begins=10)
    private = private_of(model, 120, EIGHT)
    with pytest.raises(cw.NotSeparable, match="memory of unknown origin into 'mean'"):
        warmed(private, model)
    assert max(private.checked.steps) < 9, "no step in which the average was used counts as checked"


# Loss functions that are checked with the batch at hand


def estimating(model: nn.Module, loss_fn: Callable[[nn.Module, Any], Tensor], steps: int = 6) -> cw.Private:
    plan = cw.Plan(cw.Poisson(48, 24), steps, cw.Abadi(1.0), 2.0, mechanism=cw.mechanisms.ProjectedNorms(50))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    return cw.Private(plan, model, optimizer, loss_fn=loss_fn, seed=0)


@pytest.mark.parametrize("late", [False, True], ids=["of this batch", "of the batch before"])
def test_estimated_norms_know_what_was_there_before_the_batch(late: bool) -> None:
    model, held = mlp(), {"mean": torch.zeros(6)}
    private = estimating(model, lambda model, batch: losses_of(model, (batch[0] - held["mean"], batch[1])))
    with unknown:
        for batch in private.loader(points()):
            if not late:
                held["mean"] = batch[0].mean(0)
            private.step(private.losses(batch))
            held["mean"] = batch[0].mean(0)
    assert private.steps_done == late


def test_with_estimated_norms_a_model_may_make_tables_at_its_first_call() -> None:
    class Lazy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.table = mlp(), None

        def forward(self, x: Tensor) -> Tensor:
            self.table = torch.linspace(-1, 1, 6) if self.table is None else self.table
            out: Tensor = self.net(x + self.table)
            return out

    model = Lazy()
    private = estimating(model, lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], reduction="none"))
    for batch in private.loader(points()):
        private.step(private.losses(batch))
    assert private.checked.steps == (0, 1, 2)


# A run that is resumed


def test_what_a_run_left_is_of_unknown_origin_after_a_resume_in_the_same_process(tmp_path: Path) -> None:
    model = mlp()
    private, mean = private_of(model, 8, EIGHT), torch.zeros(6)
    for x, y in private.loader(points()):
        private.step(losses_of(model, (x, y)))
        mean = 0.5 * mean + 0.5 * x.mean(0)
        if private.steps_done == 4:
            break
    private.save(tmp_path / "run.pt")
    again = cw.Private.resume(tmp_path / "run.pt", model, private.optimizer)
    with unknown:
        for x, y in again.loader(points()):
            again.step(losses_of(model, (x - mean, y)))


def test_a_resumed_run_goes_on_with_what_was_constant(tmp_path: Path) -> None:
    model, shift = mlp(), torch.linspace(0, 1, 6)
    private = private_of(model, 8, EIGHT)
    for x, y in private.loader(points()):
        private.step(losses_of(model, (x + shift, y)))
        if private.steps_done == 4:
            break
    private.save(tmp_path / "run.pt")
    again = cw.Private.resume(tmp_path / "run.pt", model, private.optimizer)
    for x, y in again.loader(points()):
        again.step(losses_of(model, (x + shift, y)))
    assert again.steps_done == 8 and again.checked.steps and not again.checked.unclear
