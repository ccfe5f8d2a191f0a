"""`algorithm = "dp-fedavg"` and `"dp-fedsgd"`: rounds of users in this process, measured and saved now and then."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Self

from torch import Tensor, nn
from torch.optim import Optimizer

from clipwise.clipping import Abadi, Flat
from clipwise.data import TensorRecords
from clipwise.federated import LocalGradient, LocalTraining, RoundReport, Server, Work, run
from clipwise.plan import Plan
from clipwise.training.algorithms._federation import Federation
from clipwise.training.algorithms._loop import Milestones, set_rate, took_up
from clipwise.training.algorithms.base import Algorithm
from clipwise.training.config import OptimizerChoice, TomlTable, read_optimizer
from clipwise.training.run import Folder, Job, Trained, Watch

if TYPE_CHECKING:
    from clipwise.training.config import Config

__all__ = ["FedAvg", "FedSGD", "FederatedAlgorithm"]


@dataclass(frozen=True)
class FederatedAlgorithm(Algorithm):
    """Rounds in which some users send an update; epsilon protects everything that a user has."""

    keys: ClassVar[tuple[str, ...]] = ("optimizer", "federated")

    optimizer: OptimizerChoice
    """The users' own."""
    federation: Federation

    @classmethod
    def read(cls, root: TomlTable) -> Self:
        return cls(read_optimizer(root.table("optimizer")), Federation.read(root.table("federated")))

    def check(self, config: Config, root: TomlTable) -> None:
        batches, name = config.batches, self.name
        if batches.sampling not in ("full-batch", "poisson") or batches.max_batch_size is not None:
            root.fail(
                "sampling" if batches.max_batch_size is None else "max_batch_size",
                f"{name} selects every user by its own coin: sampling = 'poisson' without max_batch_size, or "
                "'full-batch'.",
            )
        if batches.rate is not None:
            root.fail("rate", f"is not for {name} here: federated.users is a public number of users.")
        if batches.physical_batch_size is not None:
            root.fail("physical_batch_size", f"is not for {name}: users work one after the other.")
        if self.optimizer.learning_rate.over_R:
            root.table("optimizer").fail(
                "learning_rate",
                "is the users' own here, and a number. A rate that follows R is for the server: [federated.server] "
                "learning_rate = 'c / R'.",
            )
        if config.recalibration.private:
            root.table("recalibration").fail(
                "methods",
                f"{config.recalibration.private[0]} protects single records, and {name} whole users: there is no "
                "epsilon for both. Use recalibration on public records.",
            )
        flat = isinstance(config.clip, Flat) and isinstance(config.clip.rule, Abadi)
        if self.federation.quantile is not None and not flat:
            root.table("federated").fail("quantile", "adapts the norm of [clip] rule = 'Abadi', and no other clipping.")

    def units(self, records: int) -> int:
        return self.federation.users

    def plan(self, plan: Plan) -> Plan:
        return self.federation.plan(plan)

    def moves(self, plan: Plan, model: nn.Module) -> OptimizerChoice:
        return self.optimizer

    @abstractmethod
    def work(self, job: Job) -> Work:
        """What users do in a round."""

    def train(self, job: Job, folder: Folder, watch: Watch, resume: bool) -> Trained:
        """Train `job.model` to the end of the plan, from the folder's checkpoint when asked to resume.

        Guarantees: every round is charged in the folder before it is made, so a kill at any moment under-counts
        nothing; a seeded run that was killed and resumed ends with the weights of one that was not.
        """
        users, choice = self.federation.records_of_users(job.train), self.federation.server
        server = Server(job.plan, job.model, seed=job.draw_seed, witness=job.config.witness)
        optimizer = None if choice is None else choice.build(job.parameters.values())
        if resume:
            changed = folder.changed_data
            took_up(folder, server.resume(folder.checkpoint, job.model, optimizer, changed_data=changed))
        rounds = run(server, job.model, users, self.work(job), optimizer)
        milestones = Milestones(
            job,
            folder,
            watch,
            server,
            server.rounds_done,
            lambda extra: server.save(folder.checkpoint, job.model, optimizer, extra),
        )
        if not resume:
            milestones.save(0)
        while server.rounds_done < server.plan.steps:
            self._set_rate(job, server, optimizer)
            report = next(rounds)
            done = server.rounds_done
            milestones.ended(done, done * server.rate, partial(_statistics, report))
        return Trained(server.ledger, looked=server.looked)

    def _set_rate(self, job: Job, server: Server, optimizer: Optimizer | None) -> None:
        """The server's learning rate of the coming round, which may follow R."""
        if optimizer is not None and self.federation.server is not None:
            set_rate(optimizer, self.federation.server.learning_rate.at(server.style, list(job.parameters)))

    def described(self) -> dict[str, Any]:
        return {"federated": self.federation.described()}


@dataclass(frozen=True)
class FedAvg(FederatedAlgorithm):
    """Users train for some epochs of their own and send how far they came."""

    name: ClassVar[str] = "dp-fedavg"
    about: ClassVar[str] = "users train locally; whole users are protected"

    def work(self, job: Job) -> Work:
        size = self.federation.local_batch_size
        return LocalTraining(
            partial(_losses, job),
            self.optimizer.build,
            self.federation.local_epochs,
            32 if size is None else size,
            self.federation.clip_every,
            TensorRecords.collate,
            job.config.seed,
        )


@dataclass(frozen=True)
class FedSGD(FederatedAlgorithm):
    """Users send one gradient."""

    name: ClassVar[str] = "dp-fedsgd"
    about: ClassVar[str] = "users send one gradient; whole users are protected"

    @classmethod
    def read(cls, root: TomlTable) -> Self:
        table = root.table("federated")
        for name in ("local_epochs", "clip_every"):
            if name in table:
                table.fail(name, "is for dp-fedavg: with dp-fedsgd users send one gradient.")
        return super().read(root)

    def check(self, config: Config, root: TomlTable) -> None:
        super().check(config, root)
        if self.optimizer.name != "SGD" or self.optimizer.options:
            root.fail("optimizer", f"with dp-fedsgd users send one gradient: it is SGD, not {self.optimizer}.")

    def work(self, job: Job) -> Work:
        rate, size = self.optimizer.learning_rate.value, self.federation.local_batch_size
        return LocalGradient(partial(_losses, job), rate, size, TensorRecords.collate, job.config.seed)


def _losses(job: Job, model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    return job.losses(model, [tensor.to(job.config.device) for tensor in batch])


def _statistics(report: RoundReport) -> dict[str, Any]:
    return {
        "users_selected": report.selected,
        "users_in_the_sum": report.used,
        "updates_shortened_by_the_server": report.shortened,
    }
