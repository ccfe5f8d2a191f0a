"""`algorithm = "dp-sgd"`, the ordinary loop with `Private` in it, and its relatives.

`"dp-ftrl"` has the noise of a tree over each epoch, `"dp-sgd-jl"` estimated norms.

```toml
algorithm = "dp-sgd"
correlation = { kind = "banded", bands = 8 }    # noise that takes back part of earlier noise

algorithm = "dp-sgd-jl"
projections = 256     # random directions for the norms of a step
```
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import nn

from clipwise.correlation import Correlation, Tree
from clipwise.mechanisms import ProjectedNorms
from clipwise.plan import Plan
from clipwise.training.algorithms.base import Algorithm, private_loop
from clipwise.training.config import OptimizerChoice, TomlTable, read_correlation, read_optimizer
from clipwise.training.run import Folder, Job, Trained, Watch

__all__ = ["PrivateFTRL", "PrivateSGD", "ProjectedSGD"]


@dataclass(frozen=True)
class _Descent(Algorithm):
    """The loop of `Private` with an optimizer of the configuration's choice."""

    optimizer: OptimizerChoice

    def moves(self, plan: Plan, model: nn.Module) -> OptimizerChoice:
        return self.optimizer

    def train(self, job: Job, folder: Folder, watch: Watch, resume: bool) -> Trained:
        """Train `job.model` to the end of the plan, from the folder's checkpoint when asked to resume.

        Guarantees: every step is charged in the folder before it is made, so a kill at any moment under-counts
        nothing; a seeded run that was killed and resumed ends with the weights of one that was not.
        """
        return private_loop(job, folder, watch, resume, job.optimizer.build(job.parameters.values()))


@dataclass(frozen=True)
class PrivateSGD(_Descent):
    """Clipped gradients of a batch, summed, with noise; then a step of any optimizer."""

    name = "dp-sgd"
    about = "clipped gradients with noise, and any optimizer"
    keys: ClassVar[tuple[str, ...]] = ("optimizer", "correlation")

    correlation: Correlation

    @classmethod
    def read(cls, root: TomlTable) -> PrivateSGD:
        return cls(read_optimizer(root.table("optimizer")), read_correlation(root.table("correlation")))

    def plan(self, plan: Plan) -> Plan:
        return replace(plan, correlation=self.correlation)


@dataclass(frozen=True)
class PrivateFTRL(PrivateSGD):
    """DP-SGD with the noise of a tree over each epoch, which needs no amplification."""

    name = "dp-ftrl"
    about = "noise of a tree over each epoch of shuffled batches"
    keys = ("optimizer",)

    @classmethod
    def read(cls, root: TomlTable) -> PrivateFTRL:
        return cls(read_optimizer(root.table("optimizer")), Tree())


@dataclass(frozen=True)
class ProjectedSGD(_Descent):
    """DP-SGD that clips by estimated norms; those that were estimated too small are on the ledger as such."""

    name = "dp-sgd-jl"
    about = "norms estimated from random projections"
    keys = ("optimizer", "projections")

    projections: int

    @classmethod
    def read(cls, root: TomlTable) -> ProjectedSGD:
        return cls(read_optimizer(root.table("optimizer")), root.integer("projections"))

    def plan(self, plan: Plan) -> Plan:
        return replace(plan, mechanism=ProjectedNorms(self.projections))
