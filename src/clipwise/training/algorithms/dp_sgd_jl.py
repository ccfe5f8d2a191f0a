"""`algorithm = "dp-sgd-jl"`: the loop of DP-SGD with norms that are estimated from random projections."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, nn

from clipwise.optim import ProjectedPrivate
from clipwise.training.algorithms.dp_sgd import begin, carry_on
from clipwise.training.run.folder import Folder
from clipwise.training.run.job import Job, Trained
from clipwise.training.run.watch import Watch

__all__ = ["train"]


def train(job: Job, folder: Folder, watch: Watch, resume: bool) -> Trained:
    """Train `job.model` to the end of the plan, from the folder's checkpoint when asked to resume.

    Guarantees: as for dp-sgd, except for norms that were estimated too small, which are on the ledger as such.
    """
    optimizer = job.optimizer.build(job.parameters.values())
    last = math.nan

    def losses(model: nn.Module, batch: Any) -> Tensor:
        nonlocal last
        found = job.losses(model, [tensor.to(job.config.device) for tensor in batch])
        last = float(found.detach().mean())
        return found

    private = begin(ProjectedPrivate, job, optimizer, folder, resume, losses)
    carry_on(job, folder, watch, resume, private, optimizer, lambda batch: (private.step(batch), last))
    return Trained(private.ledger, private.checked, private.looked)
