"""What every algorithm says of itself: the keys it reads, the plan it follows, and how it trains.

What the loops of all of them share: a checkpoint and a row of metrics now and then, and the loop of `Private`.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Self

from torch import Tensor, nn
from torch.optim import Optimizer

from clipwise.clipping import Style
from clipwise.data import TensorRecords
from clipwise.federated import Server
from clipwise.plan import Plan
from clipwise.private import Private
from clipwise.sampling import public_size
from clipwise.training.config import OptimizerChoice, TomlTable
from clipwise.training.run import Folder, Job, Progress, Trained, Watch, measured_row, spent, step_statistics

if TYPE_CHECKING:
    from clipwise.training.config import Config

__all__ = ["Algorithm", "Milestones", "private_loop", "set_rate", "took_up"]


class Algorithm(ABC):
    """A frozen value: what a configuration's `algorithm` names, with the choices that are this algorithm's own.

    A further one is a class in a file of this folder, its place in `ALGORITHMS`, and a row in
    `tests/training/test_algorithms.py`.
    """

    name: ClassVar[str]
    about: ClassVar[str]
    """A line for the documentation."""
    keys: ClassVar[tuple[str, ...]]
    """The keys and tables of a configuration that are read by this algorithm; some may be shared with others."""

    @classmethod
    @abstractmethod
    def read(cls, root: TomlTable) -> Self:
        """Read `keys` from the top of a configuration."""

    def check(self, config: Config, root: TomlTable) -> None:  # noqa: B027 - most goes with everything
        """Refuse what makes no sense together; `root` knows where it was written."""

    def units(self, records: int) -> int:
        """How many there are of those whose privacy is protected: the records, or those who hold them."""
        return records

    def plan(self, plan: Plan) -> Plan:
        """The same plan, with what this algorithm releases in a step."""
        return plan

    @abstractmethod
    def moves(self, plan: Plan, model: nn.Module) -> OptimizerChoice:
        """How the weights move, for the loop and the report."""

    @abstractmethod
    def train(self, job: Job, folder: Folder, watch: Watch, resume: bool) -> Trained:
        """Train `job.model` to the end of the plan, from the folder's checkpoint when asked to resume."""

    def described(self) -> dict[str, Any]:
        """What a report says of it beside the plan and the optimizer."""
        return {}


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
        self._folder.begun = True
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


def private_loop(job: Job, folder: Folder, watch: Watch, resume: bool, optimizer: Optimizer) -> Trained:
    """The ordinary loop with `Private` in it, to the end of the plan."""
    private = _begin(job, folder, resume, optimizer)
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
        if style is not private.style:
            style = private.style
            set_rate(optimizer, job.optimizer.learning_rate.at(style, list(job.parameters)))
        losses = private.losses(batch)
        if private.step(losses):
            epoch = step * job.plan.batch_size / public_size(job.plan.sampling)
            milestones.ended(step, epoch, partial(_statistics, private, losses.detach()))
    return Trained(private.ledger, private.checked, private.looked)


def _begin(job: Job, folder: Folder, resume: bool, optimizer: Optimizer) -> Private:
    """The run's `Private`, new or from the folder's checkpoint."""
    losses = partial(_losses, job)
    if not resume:
        return Private(job.plan, job.model, optimizer, seed=job.draw_seed, loss_fn=losses, witness=job.config.witness)
    private = Private.resume(
        folder.checkpoint,
        job.model,
        optimizer,
        plan=job.plan,
        loss_fn=losses,
        witness=job.config.witness,
        changed_data=folder.changed_data,
    )
    took_up(folder, private.extra)
    return private


def _statistics(private: Private, losses: Tensor) -> dict[str, Any]:
    return step_statistics(private.last, float(losses.mean()))


def _losses(job: Job, model: nn.Module, batch: Any) -> Tensor:
    """One loss per sample, on the device of the run."""
    return job.losses(model, [tensor.to(job.config.device) for tensor in batch])
