"""What the loops of all algorithms share: a checkpoint and a row of metrics now and then, and the loop of `Private`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from clipwise.clipping import Style
from clipwise.federated import Server
from clipwise.private import Private
from clipwise.private.evidence.closure import LossFn
from clipwise.sampling import public_size
from clipwise.training.config import TensorRecords
from clipwise.training.run import Folder, Job, Progress, Watch, measured_row, spent, step_statistics

__all__ = ["Milestones", "begin", "by_losses", "carry_on", "set_rate", "took_up"]


class Milestones:
    """After every step: measure, save and report progress, each when it is due."""

    def __init__(
        self,
        job: Job,
        folder: Folder,
        watch: Watch,
        run: Private | Server,
        done: int,
        save: Callable[[dict[str, Any]], None],
    ) -> None:
        """`done` steps are behind; `save` writes a checkpoint with what it is given."""
        self._job, self._folder, self._watch, self._run, self._save = job, folder, watch, run, save
        self._first, self._begun = done, time.monotonic() - folder.seconds

    def save(self, step: int) -> None:
        """Write a checkpoint."""
        self._folder.seconds = time.monotonic() - self._begun
        self._save({"step": step, "seconds": self._folder.seconds})

    def ended(self, step: int, epoch: float, statistics: Callable[[], Mapping[str, Any]]) -> None:
        """A step has been made; `statistics` of its batch are asked for when it is measured."""
        job, steps = self._job, self._job.plan.steps
        last, row = step == steps, None
        if last or step % job.evaluate_every == 0:
            row = measured_row(job, self._run, step, epoch, statistics())
            self._folder.append(row)
        if last or step % job.checkpoint_every == 0:
            self.save(step)
        self._watch(Progress(step, steps, self._first, lambda: spent(job, self._run), row and row["test"]))


def took_up(folder: Folder, extra: Mapping[str, Any]) -> None:
    """Bring the folder to where its checkpoint is."""
    folder.cut_rows(extra["step"])
    folder.seconds = float(extra["seconds"])


def set_rate(optimizer: Optimizer, rate: float) -> None:
    """The learning rate of the coming step."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def begin(
    kind: type[Private], job: Job, optimizer: Optimizer, folder: Folder, resume: bool, loss_fn: LossFn | None = None
) -> Private:
    """The run's `Private`, new or from the folder's checkpoint."""
    losses = job.losses if loss_fn is None else loss_fn
    if not resume:
        return kind(job.plan, job.model, optimizer, seed=job.draw_seed, loss_fn=losses)
    private = kind.resume(folder.checkpoint, job.model, optimizer, plan=job.plan, loss_fn=losses)
    took_up(folder, private.extra)
    return private


def by_losses(job: Job, private: Private) -> Callable[[Any], tuple[bool, float]]:
    """The step of an ordinary loop: the losses of a batch, given to `private.step`."""

    def step(batch: Any) -> tuple[bool, float]:
        losses = _losses(job, batch)
        return private.step(losses), float(losses.detach().mean())

    return step


def carry_on(
    job: Job,
    folder: Folder,
    watch: Watch,
    resume: bool,
    private: Private,
    optimizer: Optimizer,
    step_of: Callable[[Any], tuple[bool, float]],
) -> None:
    """The loop, with measuring and saving; `step_of` a batch says whether it ended a step, and the mean loss."""
    # Empty batches are handed out too, so that every step gets its own learning rate.
    loader = private.loader(
        job.train, job.config.batches.physical_batch_size, yield_empty=True, collate_fn=TensorRecords.collate
    )
    milestones = Milestones(
        job, folder, watch, private, private.steps_done, lambda extra: private.save(folder.checkpoint, extra)
    )
    if not resume:
        milestones.save(0)
    style: Style | None = None
    for batch in loader:
        step = private.steps_done + 1
        if style is not job.plan.style(step - 1):
            style = job.plan.style(step - 1)
            set_rate(optimizer, job.optimizer.learning_rate.at(style, list(job.parameters)))
        ended, loss = step_of(batch)
        if ended:
            epoch = step * job.plan.batch_size / public_size(job.plan.sampling)
            milestones.ended(step, epoch, partial(_statistics, private, loss))


def _statistics(private: Private, loss: float) -> dict[str, Any]:
    return step_statistics(private.last, loss)


def _losses(job: Job, batch: Any) -> torch.Tensor:
    """One loss per sample; many networks cannot run on an empty batch."""
    device = job.config.device
    if not len(batch[-1]):
        return torch.zeros(0, device=device)
    return job.losses(job.model, [tensor.to(device) for tensor in batch])
