"""`algorithm = "dp-sgd"`: the ordinary loop with `Private` in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from clipwise.plan import Plan
from clipwise.training.algorithms._loop import private_loop
from clipwise.training.algorithms.base import Algorithm
from clipwise.training.config import OptimizerChoice, TomlTable, read_optimizer
from clipwise.training.run import Folder, Job, Trained, Watch

__all__ = ["PrivateSGD"]


@dataclass(frozen=True)
class PrivateSGD(Algorithm):
    """Clipped gradients of a batch, summed, with noise; then a step of any optimizer."""

    name: ClassVar[str] = "dp-sgd"
    about: ClassVar[str] = "clipped gradients with noise, and any optimizer"
    keys: ClassVar[tuple[str, ...]] = ("optimizer",)

    optimizer: OptimizerChoice

    @classmethod
    def read(cls, root: TomlTable) -> PrivateSGD:
        return cls(read_optimizer(root.table("optimizer")))

    def moves(self, plan: Plan, model: nn.Module) -> OptimizerChoice:
        return self.optimizer

    def train(self, job: Job, folder: Folder, watch: Watch, resume: bool) -> Trained:
        """Train `job.model` to the end of the plan, from the folder's checkpoint when asked to resume.

        Guarantees: every step is charged in the folder before it is made, so a kill at any moment under-counts
        nothing; a seeded run that was killed and resumed ends with the weights of one that was not.
        """
        return private_loop(job, folder, watch, resume, job.optimizer.build(job.parameters.values()))
