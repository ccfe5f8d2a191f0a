"""`algorithm = "dp-sgd-jl"`: the loop of DP-SGD with norms that are estimated from random projections.

```toml
algorithm = "dp-sgd-jl"
projections = 256     # random directions for the norms of a step
```
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import nn

from clipwise.mechanisms import ProjectedNorms
from clipwise.plan import Plan
from clipwise.training.algorithms._loop import private_loop
from clipwise.training.algorithms.base import Algorithm
from clipwise.training.config import OptimizerChoice, TomlTable, read_optimizer
from clipwise.training.run import Folder, Job, Trained, Watch

__all__ = ["ProjectedSGD"]


@dataclass(frozen=True)
class ProjectedSGD(Algorithm):
    """DP-SGD that clips by estimated norms."""

    name: ClassVar[str] = "dp-sgd-jl"
    about: ClassVar[str] = "norms estimated from random projections"
    keys: ClassVar[tuple[str, ...]] = ("optimizer", "projections")

    optimizer: OptimizerChoice
    projections: int

    @classmethod
    def read(cls, root: TomlTable) -> ProjectedSGD:
        return cls(read_optimizer(root.table("optimizer")), root.integer("projections"))

    def plan(self, plan: Plan) -> Plan:
        return replace(plan, mechanism=ProjectedNorms(self.projections))

    def moves(self, plan: Plan, model: nn.Module) -> OptimizerChoice:
        return self.optimizer

    def train(self, job: Job, folder: Folder, watch: Watch, resume: bool) -> Trained:
        """Train `job.model` to the end of the plan, from the folder's checkpoint when asked to resume.

        Guarantees: as for dp-sgd, except for norms that were estimated too small, which are on the ledger as such.
        """
        return private_loop(job, folder, watch, resume, job.optimizer.build(job.parameters.values()))
