"""The same checks where the losses are a function: it can be called again, with fewer samples and with other shapes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from clipwise.engine import walk
from clipwise.errors import InvalidLosses, NotSeparable
from clipwise.private.evidence.memory import Memory
from clipwise.private.evidence.records import Again, Records, unreadable
from clipwise.private.evidence.twin import Twin
from clipwise.private.evidence.verdict import judge
from clipwise.private.evidence.watch import Watch

Batch: TypeAlias = Any  # a tensor, or a tuple, list or mapping of tensors whose first axis is the batch
LossFn: TypeAlias = Callable[[nn.Module, Batch], Tensor]
_FEWEST = 3
_SLACK = 16  # times the rounding that was measured


def check_model(model: nn.Module, loss_fn: LossFn, batch: Batch) -> None:
    """Watch the forward pass with other records, and repeat it with one sample removed: no other loss may move.

    Sees what the graph of the losses cannot: statistics of the batch on the raw input, detached statistics, a division
    by the batch size, and values of the batch that are written into buffers. `loss_fn(model, batch)` returns losses of
    shape (B,); `batch` is a tensor, or a tuple, list or mapping of tensors whose first axis is the batch. Whatever the
    program holds when this is called counts as constant: a statistic of this batch that was taken before is not seen.
    Buffers and random generators are left as they were. Losses that draw random numbers draw others for a batch of
    another size or length: then other batches are tried in evaluation mode, and not at all when losses are random there
    too.

    >>> check_model(nn.Linear(3, 1), lambda model, x: model(x).squeeze(1) ** 2, torch.randn(4, 3))
    >>> check_model(nn.BatchNorm1d(3), lambda model, x: model(x).sum(1), torch.randn(4, 3))
    Traceback (most recent call last):
        ...
    clipwise.errors.NotSeparable: samples mix: ...
    """
    check_losses(Memory(model, ()), loss_fn, batch, batch_size(batch), None)


def check_losses(memory: Memory, loss_fn: LossFn, batch: Batch, size: int, again: Again | None, step: int = 0) -> str:
    """`check_model`, also for batches that are not in rows; says what could not be checked, if anything.

    `memory` knows what there was before the batches. `again` makes the batch of longer and shorter records.
    """
    model = memory.model
    if size < _FEWEST:
        raise InvalidLosses(f"check_model needs a batch of at least three samples, got {size}.")
    with _unchanged(model) as run:
        _watched(memory, loss_fn, batch, size, run, step)
        repeat = _Repeated(model, loss_fn, batch, size, run)
        why = "" if again is None else unreadable(again, Records.of(batch, size))
        why = why and f"the records of a batch cannot be read again ({why})"
        others = repeat.with_others(again) if again is not None and not why else {}
        comparable = {what: each for what, each in others.items() if not repeat.draws_others(each[0])}
        repeat.demand_all(comparable)
        later = {what: each for what, each in others.items() if what not in comparable}
        if repeat.settled(model):
            repeat.demand_all(later)
            if len(Records.of(batch, size).tensors) and _in_rows(batch, size):
                repeat.demand_without()
        elif later:
            why = "the losses draw random numbers in evaluation mode too"
    return why and f"longer and shorter records in loss_fn: {why}"


def _in_rows(batch: Batch, size: int) -> bool:
    records = Records.of(batch, size)
    return len(records.rows) == len(records.tensors) and not records.opaque


def _watched(memory: Memory, loss_fn: LossFn, batch: Batch, size: int, run: Run, step: int) -> None:
    """One pass with twins, as `Private` watches the passes of a loop."""
    model, records = memory.model, Records.of(batch, size)
    memory.begin(step)
    watch = Watch(records, [Twin(change) for change in records.changes(0)], memory.familiar)

    def forward() -> Tensor:
        watch.start()
        try:
            with torch.enable_grad():
                losses = loss_fn(model, batch)
        finally:
            watch.stop()
        memory.leave(watch)
        demand_losses(losses, size)
        parameters, end = [p for p in model.parameters() if p.requires_grad], partial(memory.end, watch)
        if losses.grad_fn is None:
            end()
        else:
            judge(watch, losses, walk(losses, {id(p): k for k, p in enumerate(parameters)}, parameters), end)
        return losses.detach()

    run(forward, 0)


def demand_losses(losses: Any, size: int) -> None:
    """Refuse losses that are not one finite number per sample."""
    if not isinstance(losses, Tensor) or losses.shape != (size,):
        got = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
        raise InvalidLosses(f"loss_fn must return losses of shape ({size},), got {got}.")
    if not bool(torch.isfinite(losses).all()):
        raise InvalidLosses("check_model needs finite losses; leave out samples whose loss is not finite.")


class _Repeated:
    """Repeats the losses on other batches, in double precision where the model allows it."""

    def __init__(self, model: nn.Module, loss_fn: LossFn, batch: Batch, size: int, run: Run) -> None:
        self._model, self._loss_fn, self._batch, self._size, self._run = model, loss_fn, batch, size, run
        self._wide = self._widened()
        self._base = self.losses(batch)
        self._rounding = self._measured()

    def _widened(self) -> nn.Module | None:
        try:
            wide = copy.deepcopy(self._model).double()
            with torch.no_grad():
                losses = self._run(partial(self._loss_fn, wide, _double(self._batch)), 0)
            return wide if losses.dtype == torch.float64 and losses.shape == (self._size,) else None
        except Exception:  # whatever a model does not do in double precision
            return None

    def losses(self, batch: Batch, draws: int = 0) -> Tensor:
        if self._wide is None:
            return self._run(partial(self._loss_fn, self._model, batch), draws)
        return self._run(partial(self._loss_fn, self._wide, _double(batch)), draws)

    def _measured(self) -> float:
        """How far rounding alone moves losses: the same samples in another order, relative to the losses' size."""
        if not _in_rows(self._batch, self._size):
            return 0.0
        backwards = torch.arange(self._size, device="cpu").flip(0)
        moved = (self.losses(take(self._batch, backwards)).flip(0) - self._base).abs()
        eps = torch.finfo(self._base.dtype).eps
        return min(float((moved / _size_of(self._base).clamp(min=1e-12)).max()), 1e4 * eps)

    def demand(self, what: str, batch: Batch, ours: Tensor, theirs: Tensor) -> None:
        """The losses `theirs` of another batch must be the losses `ours` of this one."""
        moved = self.moved(self.losses(batch)[theirs], ours)
        if bool(moved.any()):
            raise NotSeparable(
                f"{what} by {float(moved.max()):.3g}: samples mix, though the graph may not show it. Typical causes: "
                "padding that is not masked, BatchNorm in training mode (affine or not), statistics of the batch, a "
                "loss divided by the batch size."
            )

    def with_others(self, again: Again) -> dict[str, tuple[Batch, Tensor]]:
        """Batches with longer, shorter and larger records in place of all samples but one, and that one."""
        found = {}
        for sample in (self._size // 2, 0):
            kept, itself = [i == sample for i in range(self._size)], torch.tensor([sample], device="cpu")
            others = {
                "longer": again.replaced(kept, longest=True),
                "shorter": again.replaced(kept, longest=False),
                "larger": again.scaled(kept, 4.0),
            }
            for how, other in others.items():
                found[f"putting {how} records in place of all others moves the loss of sample {sample}"] = other, itself
        return found

    def demand_all(self, others: Mapping[str, tuple[Batch, Tensor]]) -> None:
        """The loss of the sample that stayed must stay."""
        for what, (other, itself) in others.items():
            self.demand(what, other, itself, itself)

    def draws_others(self, batch: Batch) -> bool:
        """Whether another batch gets other random numbers, such as those of dropout: it is padded to another length."""
        return self._is_random and _shapes(batch) != _shapes(self._batch)

    def moved(self, losses: Tensor, ours: Tensor) -> Tensor:
        """By how much losses differ from the losses `ours` of this batch, where it is more than rounding."""
        finfo = torch.finfo(self._base.dtype)
        rounding = max(_SLACK * self._rounding, 256 * finfo.eps)
        moved = (losses - self._base[ours]).abs()
        return torch.where(moved > rounding * _size_of(self._base)[ours] + finfo.tiny, moved, 0)

    def settled(self, model: nn.Module) -> bool:
        """Whether the losses are the same for other random numbers, at least in evaluation mode, which is then on."""
        if not self._is_random:
            return True
        for module in (model, *([self._wide] if self._wide is not None else [])):
            module.eval()
        self._base = self.losses(self._batch)
        self._rounding = self._measured()
        return not self._drawn()

    @cached_property
    def _is_random(self) -> bool:
        """Whether the losses were drawn at random before anything was switched off."""
        return self._drawn()

    def _drawn(self) -> bool:
        return bool(self.moved(self.losses(self._batch, draws=1), torch.arange(self._size, device="cpu")).any())

    def demand_without(self) -> None:
        """Remove samples, one at a time."""
        everybody = torch.arange(self._size, device="cpu")
        for sample in {self._size - 1, 0, *Records.of(self._batch, self._size).extremes()}:
            rest = everybody[everybody != sample]
            what = f"removing sample {sample} moves another sample's loss"
            self.demand(what, take(self._batch, rest), rest, torch.arange(self._size - 1, device="cpu"))


def _size_of(losses: Tensor) -> Tensor:
    """What the rounding of each loss is relative to.

    A loss near zero is a difference of larger numbers, rounded as these are: a typical loss of the batch is added.
    """
    return losses.abs() + losses.abs().median()


def batch_size(batch: Batch) -> int:
    """The length of the first axis that all tensors of a batch share."""
    if isinstance(batch, Tensor):
        if not batch.dim():
            raise InvalidLosses("a batch holds a tensor of shape (), which has no axis of samples; keep it in loss_fn.")
        return batch.shape[0]
    values = batch.values() if isinstance(batch, Mapping) else batch
    sizes = {batch_size(value) for value in values if isinstance(value, (Tensor, Mapping, tuple, list))}
    if len(sizes) != 1:
        raise InvalidLosses(f"the tensors of a batch must share their first axis, got sizes {sorted(sizes)}.")
    return sizes.pop()


def take(batch: Batch, index: Tensor) -> Batch:
    """These samples of a batch."""
    return _mapped(batch, lambda tensor: tensor[index.to(tensor.device)])


def _shapes(batch: Batch) -> list[torch.Size]:
    found: list[torch.Size] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor.shape)
        return tensor

    _mapped(batch, note)
    return found


def _double(batch: Batch) -> Batch:
    return _mapped(batch, lambda tensor: tensor.double() if tensor.is_floating_point() else tensor)


def _mapped(batch: Batch, function: Callable[[Tensor], Tensor]) -> Batch:
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        return type(batch)({key: _mapped(value, function) for key, value in batch.items()})  # type: ignore[call-arg]
    if isinstance(batch, (tuple, list)):
        taken = [_mapped(value, function) for value in batch]
        return type(batch)(*taken) if hasattr(batch, "_fields") else type(batch)(taken)
    return batch


Run: TypeAlias = Callable[[Callable[[], Tensor], int], Tensor]


@contextmanager
def _unchanged(model: nn.Module) -> Iterator[Run]:
    """Run forward passes from the same memory and random state each, without dropout; restore all at the end.

    The second argument of `run` is how many random numbers are drawn before: losses that move then are random.
    """
    held = {name: buffer.clone() for name, buffer in (*model.named_buffers(), *model.named_parameters())}
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.is_cuda})
    modes = {module: module.training for module in model.modules()}

    def restore() -> None:
        with torch.no_grad():
            for name, tensor in (*model.named_buffers(), *model.named_parameters()):
                if name in held and held[name].shape == tensor.shape and not torch.equal(tensor, held[name]):
                    tensor.copy_(held[name])

    def run(forward: Callable[[], Tensor], draws: int) -> Tensor:
        with torch.no_grad(), torch.random.fork_rng(devices=devices):
            for device in (torch.device("cpu"), *(torch.device("cuda", i) for i in devices)):
                torch.rand(draws, device=device)
            losses = forward()
            restore()
        return losses

    try:
        for module in modes:
            if isinstance(module, nn.modules.dropout._DropoutNd):
                module.training = False
        yield run
    finally:
        for module, mode in modes.items():
            module.training = mode
        restore()
