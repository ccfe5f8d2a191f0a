"""`algorithm = "dp-sgd"`: the ordinary loop with `Private` in it, measured and saved now and then."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from clipwise.clipping import Style
from clipwise.private import Private
from clipwise.private.evidence.closure import LossFn
from clipwise.sampling import public_size
from clipwise.training.config.datasets import Records
from clipwise.training.run.folder import Folder
from clipwise.training.run.job import Job, Trained
from clipwise.training.run.measure import measured_row, spent, step_statistics
from clipwise.training.run.watch import Progress, Watch

__all__ = ["begin", "by_losses", "carry_on", "train"]


def train(job: Job, folder: Folder, watch: Watch, resume: bool) -> Trained:
    """Train `job.model` to the end of the plan, from the folder's checkpoint when asked to resume.

    Guarantees: every step is charged in the folder before it is made, so a kill at any moment under-counts nothing; a
    seeded run that was killed and resumed ends with the weights of one that was not.
    """
    optimizer = job.optimizer.build(job.parameters.values())
    private = begin(Private, job, optimizer, folder, resume)
    carry_on(job, folder, watch, resume, private, optimizer, by_losses(job, private))
    return Trained(private.ledger, private.checked, private.looked)


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
        job.train, job.config.batches.physical_batch_size, yield_empty=True, collate_fn=Records.collate
    )
    first, begun = private.steps_done, time.monotonic() - folder.seconds

    def save() -> None:
        folder.seconds = time.monotonic() - begun
        private.save(folder.checkpoint, extra={"step": private.steps_done, "seconds": folder.seconds})

    if not resume:
        save()
    style: Style | None = None
    for batch in loader:
        step = private.steps_done + 1
        if style is not job.plan.style(step - 1):
            style = job.plan.style(step - 1)
            _set_rate(optimizer, job.optimizer.learning_rate.at(style, list(job.parameters)))
        measured = step % job.evaluate_every == 0 or step == job.plan.steps
        ended, loss = step_of(batch)
        if not ended:
            continue
        row = _row(job, private, loss) if measured else None
        if row is not None:
            folder.append(row)
        if step % job.checkpoint_every == 0 or step == job.plan.steps:
            save()
        watch(Progress(step, job.plan.steps, first, lambda: spent(job, private), row and row["test"]))


def begin(
    kind: type[Private], job: Job, optimizer: Optimizer, folder: Folder, resume: bool, loss_fn: LossFn | None = None
) -> Private:
    """The run's `Private`, new or from the folder's checkpoint."""
    losses = job.losses if loss_fn is None else loss_fn
    if not resume:
        return kind(job.plan, job.model, optimizer, seed=job.draw_seed, loss_fn=losses)
    private = kind.resume(folder.checkpoint, job.model, optimizer, plan=job.plan, loss_fn=losses)
    folder.cut_metrics(private.extra["step"])
    folder.seconds = float(private.extra["seconds"])
    return private


def _losses(job: Job, batch: Any) -> torch.Tensor:
    """One loss per sample; many networks cannot run on an empty batch."""
    device = job.config.device
    if not len(batch[-1]):
        return torch.zeros(0, device=device)
    return job.losses(job.model, [tensor.to(device) for tensor in batch])


def _set_rate(optimizer: Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def _row(job: Job, private: Private, loss: float) -> dict[str, Any]:
    step = private.steps_done
    epoch = step * job.plan.batch_size / public_size(job.plan.sampling)
    return measured_row(job, private, step, epoch, step_statistics(private.last, loss))
