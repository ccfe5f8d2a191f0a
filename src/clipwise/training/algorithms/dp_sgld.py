"""`algorithm = "dp-sgld"`: the loop of DP-SGD with a sampler as its optimizer; its samples predict together."""

from __future__ import annotations

from clipwise.errors import InvalidConfig
from clipwise.optim import LangevinOptimizer
from clipwise.private import Private
from clipwise.training.algorithms.dp_sgd import begin, by_losses, carry_on
from clipwise.training.run.folder import Folder
from clipwise.training.run.job import Job, Trained
from clipwise.training.run.watch import Watch

__all__ = ["AVERAGE", "train"]

AVERAGE = "posterior average"


def train(job: Job, folder: Folder, watch: Watch, resume: bool) -> Trained:
    """Run the chain to its end; the model keeps the last weights, and the average of all samples is measured.

    Guarantees: as for dp-sgd, whose mechanism it is. Settings whose privacy is vacuous are refused.
    """
    if job.data.task != "classification":
        raise InvalidConfig("dp-sgld averages class probabilities; for a regression use clipwise.optim in a loop.")
    assert job.config.sampler is not None  # the configuration has one for this algorithm
    chain = job.config.sampler.chain(job.plan, job.model)
    chain.plan(job.model)
    optimizer = LangevinOptimizer(job.model, chain)
    private = begin(Private, job, optimizer, folder, resume)
    carry_on(job, folder, watch, resume, private, optimizer, by_losses(job, private))
    settings, (*inputs, labels) = job.config.evaluation, job.test.tensors
    found = optimizer.posterior.evaluate(
        job.model,
        inputs,
        labels,
        bins=settings.bins,
        resamples=settings.resamples,
        forward=lambda model, *x: job.outputs(model, [each.to(job.config.device) for each in x]).cpu(),
        batch_size=settings.batch_size,
    )
    return Trained(private.ledger, private.checked, private.looked, {AVERAGE: found.average})
