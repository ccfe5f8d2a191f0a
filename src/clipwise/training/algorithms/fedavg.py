"""`algorithm = "dp-fedavg"` and `"dp-fedsgd"`: rounds of users in this process, measured and saved now and then."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from clipwise.federated import RoundReport, Server, run
from clipwise.training.run.folder import Folder
from clipwise.training.run.job import Job, Trained
from clipwise.training.run.measure import measured_row, spent
from clipwise.training.run.watch import Progress, Watch

__all__ = ["train"]


def train(job: Job, folder: Folder, watch: Watch, resume: bool) -> Trained:
    """Train `job.model` to the end of the plan, from the folder's checkpoint when asked to resume.

    Guarantees: every round is charged in the folder before it is made, so a kill at any moment under-counts nothing; a
    seeded run that was killed and resumed ends with the weights of one that was not.
    """
    federation = job.config.federated
    assert federation is not None  # the configuration has one for these algorithms
    users = federation.records_of_users(job.train)
    server = Server(federation.plan(job.plan), job.model, seed=job.draw_seed)
    optimizer = None if federation.server is None else federation.server.build(job.parameters.values())
    if resume:
        _resume(job, folder, server, optimizer)
    first, begun = server.rounds_done, time.monotonic() - folder.seconds
    rounds = run(server, job.model, users, federation.work(job.config, _losses(job)), optimizer)

    def save() -> None:
        folder.seconds = time.monotonic() - begun
        extra = {"step": server.rounds_done, "seconds": folder.seconds}
        server.save(folder.checkpoint, job.model, optimizer, extra)

    if not resume:
        save()
    while server.rounds_done < server.plan.rounds:
        _set_rate(job, server, optimizer)
        report = next(rounds)
        done = server.rounds_done
        last = done == server.plan.rounds
        row = _row(job, server, report) if last or done % job.evaluate_every == 0 else None
        if row is not None:
            folder.append(row)
        if last or done % job.checkpoint_every == 0:
            save()
        watch(Progress(done, server.plan.rounds, first, lambda: spent(job, server), row and row["test"]))
    return Trained(server.ledger, looked=server.looked)


def _resume(job: Job, folder: Folder, server: Server, optimizer: Optimizer | None) -> None:
    extra = server.resume(folder.checkpoint, job.model, optimizer)
    folder.cut_metrics(extra["step"])
    folder.seconds = float(extra["seconds"])


def _losses(job: Job) -> Any:
    def losses(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        return job.losses(model, [tensor.to(job.config.device) for tensor in batch])

    return losses


def _set_rate(job: Job, server: Server, optimizer: Optimizer | None) -> None:
    """The server's learning rate of the coming round, which may follow R."""
    federation = job.config.federated
    if optimizer is None or federation is None or federation.server is None:
        return
    style = server.plan.style(server.rounds_done, server.bound)
    for group in optimizer.param_groups:
        group["lr"] = federation.server.learning_rate.at(style, list(job.parameters))


def _row(job: Job, server: Server, report: RoundReport) -> dict[str, Any]:
    done = server.rounds_done
    private = {
        "users_selected": report.selected,
        "users_in_the_sum": report.used,
        "updates_shortened_by_the_server": report.shortened,
    }
    return measured_row(job, server, done, done * server.plan.rate, private)
