"""`algorithm = "dp-fedavg"` and `"dp-fedsgd"`: rounds of users in this process, measured and saved now and then.

```toml
algorithm = "dp-fedavg"   # or "dp-fedsgd": one gradient of each user
steps = 100               # rounds
batch_size = 50           # expected users in a round
optimizer.learning_rate = 0.1   # the users' own

[federated]
users = 1000
split = "shards"          # who holds which records: "shards" of one class each, "dirichlet", "uniform"
local_epochs = 1
local_batch_size = 20

[federated.server]        # an optimizer for the server; without it, updates are added as they are
learning_rate = "0.5 / R"
```
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from clipwise.data import TensorRecords
from clipwise.errors import InvalidConfig
from clipwise.federated import LocalGradient, LocalTraining, RoundReport, Server, Work, dirichlet, run, shards, uniform
from clipwise.mechanisms import Rounds
from clipwise.plan import Plan
from clipwise.training.algorithms.base import Algorithm, Milestones, set_rate, took_up
from clipwise.training.config import OptimizerChoice, TomlTable, read_optimizer
from clipwise.training.run import Folder, Job, Trained, Watch

if TYPE_CHECKING:
    from clipwise.training.config import Config

__all__ = ["FedAvg", "FedSGD", "FederatedAlgorithm", "Federation"]

SPLITS = ("dirichlet", "shards", "uniform")


@dataclass(frozen=True)
class Federation:
    """The users of a federated run, their work, and the server's optimizer."""

    users: int
    split: str
    shards_per_user: int
    concentration: float
    split_seed: int
    local_epochs: int
    local_batch_size: int | None
    clip_every: Literal["round", "batch"]
    weight_cap: float
    total_weight: float | None
    server: OptimizerChoice | None

    @classmethod
    def read(cls, table: TomlTable) -> Federation:
        """Read the table.

        >>> from clipwise.training.config import TomlText
        >>> Federation.read(TomlText.parse("users = 10").root()).split
        'shards'
        """
        split = table.text("split", "shards", SPLITS)
        for name, owner in (("shards_per_user", "shards"), ("concentration", "dirichlet")):
            if name in table and split != owner:
                table.fail(name, f"is for split = {owner!r} only.")
        if "quantile" in table:
            table.fail("quantile", "is in [clip] now: rule = 'AdaptiveClip', with R and quantile.")
        server = table.table("server")
        made = cls(
            users=table.integer("users"),
            split=split,
            shards_per_user=table.integer("shards_per_user", 2),
            concentration=table.number("concentration", 0.5),
            split_seed=table.integer("split_seed", 0, least=0),
            local_epochs=table.integer("local_epochs", 1),
            local_batch_size=table.integer("local_batch_size", None),
            clip_every="batch" if table.text("clip_every", "round", ("batch", "round")) == "batch" else "round",
            weight_cap=table.number("weight_cap", 1.0),
            total_weight=table.number("total_weight", None),
            server=read_optimizer(server) if server.values else None,
        )
        table.close()
        return made

    def plan(self, plan: Plan) -> Plan:
        """The same plan, over users."""
        return replace(plan, mechanism=Rounds(self.weight_cap, self.total_weight))

    def records_of_users(self, records: TensorRecords) -> list[TensorRecords]:
        """The records of each user."""
        labels = records.tensors[-1]
        if self.split == "uniform":
            parts = uniform(len(records), self.users, self.split_seed)
        elif labels.is_floating_point():
            raise InvalidConfig(f"federated.split = {self.split!r} is by classes, and these records have none.")
        elif self.split == "shards":
            parts = shards(labels, self.users, self.shards_per_user, self.split_seed)
        else:
            parts = dirichlet(labels, self.users, self.concentration, self.split_seed)
        return [TensorRecords(*(tensor[torch.from_numpy(part)] for tensor in records.tensors)) for part in parts]

    def described(self) -> dict[str, Any]:
        """What a report says of it."""
        hidden = {"shards": {"concentration"}, "dirichlet": {"shards_per_user"}}
        left_out = hidden.get(self.split, {"concentration", "shards_per_user"})
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in left_out}
        return {name: str(v) if name == "server" else v for name, v in values.items() if v is not None}


@dataclass(frozen=True)
class FederatedAlgorithm(Algorithm):
    """Rounds in which some users send an update; epsilon protects everything that a user has."""

    keys = ("optimizer", "federated")

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

    name = "dp-fedavg"
    about = "users train locally; whole users are protected"

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

    name = "dp-fedsgd"
    about = "users send one gradient; whole users are protected"

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
