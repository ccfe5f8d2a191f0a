"""`algorithm = "dp-sgd-jl"`: the loop of DP-SGD with norms that are estimated from random projections."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from clipwise.training.algorithms.dp_sgd import begin, carry_on
from clipwise.training.run.folder import Folder
from clipwise.training.run.job import Job, Trained
from clipwise.training.run.watch import Watch

__all__ = ["train"]


def train(job: Job, folder: Folder, watch: Watch, resume: bool) -> Trained:
    """Train `job.model` to the end of the plan, from the folder's checkpoint when asked to resume.

    Guarantees: as for dp-sgd, except for norms that were estimated too small, which are on the ledger as such.
    """

    def losses(model: nn.Module, batch: Any) -> Tensor:
        return job.losses(model, [tensor.to(job.config.device) for tensor in batch])

    def step(batch: Any) -> tuple[bool, float]:
        found = private.losses(batch)
        return private.step(found), float(found.detach().mean())

    optimizer = job.optimizer.build(job.parameters.values())
    private = begin(job, optimizer, folder, resume, losses)
    carry_on(job, folder, watch, resume, private, optimizer, step)
    return Trained(private.ledger, private.checked, private.looked)
