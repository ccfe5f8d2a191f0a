"""`[federated]`: who the users are, what they do in a round, and how the server uses their updates.

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

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from clipwise.clipping import Abadi, Clip, Flat
from clipwise.errors import InvalidConfig
from clipwise.federated import (
    AdaptiveClip,
    FederatedPlan,
    LocalGradient,
    LocalTraining,
    Work,
    dirichlet,
    shards,
    uniform,
)
from clipwise.plan import Plan
from clipwise.training.config.datasets import Records
from clipwise.training.config.optimizers import OptimizerChoice, read_optimizer
from clipwise.training.config.toml import Table

if TYPE_CHECKING:
    from clipwise.training.config import Config

__all__ = ["FEDERATED", "Federation", "check", "read_federation"]

FEDERATED = ("dp-fedavg", "dp-fedsgd")
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
    quantile: float | None
    """With it the clipping norm adapts, starting from that of `[clip]`."""
    server: OptimizerChoice | None

    def plan(self, plan: Plan) -> FederatedPlan:
        """The plan over users, in its federated form."""
        clip: Clip | AdaptiveClip = plan.clip  # type: ignore[assignment]  # a plan has made it a schedule
        if self.quantile is not None:
            assert isinstance(clip, Flat) and isinstance(clip.rule, Abadi)  # checked when it was read
            clip = AdaptiveClip(clip.rule.R, self.quantile)
        return FederatedPlan(
            sampling=plan.sampling,  # type: ignore[arg-type]  # checked when it was read
            rounds=plan.steps,
            clip=clip,
            noise_multiplier=plan.noise_multiplier,
            weight_cap=self.weight_cap,
            total_weight=self.total_weight,
        )

    def records_of_users(self, records: Records) -> list[Records]:
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
        return [Records(*(tensor[torch.from_numpy(part)] for tensor in records.tensors)) for part in parts]

    def work(self, config: Config, losses: Callable[[nn.Module, Sequence[Tensor]], Tensor]) -> Work:
        """What users do in a round."""
        assert config.optimizer is not None  # the users' own, which is read for these algorithms
        if config.algorithm == "dp-fedsgd":
            rate, size = config.optimizer.learning_rate.value, self.local_batch_size
            return LocalGradient(losses, rate, size, Records.collate, config.seed)
        return LocalTraining(
            losses,
            config.optimizer.build,  # type: ignore[arg-type]  # the model's tensors are parameters
            self.local_epochs,
            32 if self.local_batch_size is None else self.local_batch_size,
            self.clip_every,
            Records.collate,
            config.seed,
        )

    def described(self) -> dict[str, Any]:
        """What a report says of it."""
        hidden = {"shards": {"concentration"}, "dirichlet": {"shards_per_user"}}
        left_out = hidden.get(self.split, {"concentration", "shards_per_user"})
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in left_out}
        return {name: str(v) if name == "server" else v for name, v in values.items() if v is not None}


def read_federation(table: Table, algorithm: str) -> Federation | None:
    """The table of a federated algorithm; for others there must be none.

    >>> from clipwise.training.config.toml import Source
    >>> read_federation(Source.parse("users = 10").root(), "dp-fedavg").split
    'shards'
    """
    if algorithm not in FEDERATED:
        if table.values:
            table.fail(None, f"is for algorithm = {' or '.join(map(repr, FEDERATED))} only.")
        return None
    split = table.text("split", "shards", SPLITS)
    for name, owner in (("shards_per_user", "shards"), ("concentration", "dirichlet")):
        if name in table and split != owner:
            table.fail(name, f"is for split = {owner!r} only.")
    if algorithm == "dp-fedsgd":
        for name in ("local_epochs", "clip_every"):
            if name in table:
                table.fail(name, "is for dp-fedavg: with dp-fedsgd users send one gradient.")
    server = table.table("server")
    clip_every: Any = table.text("clip_every", "round", ("batch", "round"))
    made = Federation(
        users=table.integer("users"),
        split=split,
        shards_per_user=table.integer("shards_per_user", 2),
        concentration=table.number("concentration", 0.5),
        split_seed=table.integer("split_seed", 0, least=0),
        local_epochs=table.integer("local_epochs", 1),
        local_batch_size=table.integer("local_batch_size", None),
        clip_every=clip_every,
        weight_cap=table.number("weight_cap", 1.0),
        total_weight=table.number("total_weight", None),
        quantile=table.number("quantile", None, below=1.0),
        server=read_optimizer(server) if server.values else None,
    )
    table.close()
    return made


def check(config: Config) -> None:
    """Refuse what makes no sense together with `[federated]`."""
    federated, batches = config.federated, config.batches
    if federated is None or config.optimizer is None:
        return
    if batches.sampling not in ("full-batch", "poisson") or batches.max_batch_size is not None:
        raise InvalidConfig(
            f"{config.algorithm} selects every user by its own coin: sampling = 'poisson' without max_batch_size, or "
            "'full-batch'."
        )
    if batches.physical_batch_size is not None:
        raise InvalidConfig(f"physical_batch_size is not for {config.algorithm}: users work one after the other.")
    if config.optimizer.learning_rate.over_R:
        raise InvalidConfig(
            "optimizer.learning_rate is the users' own here, and a number. A rate that follows R is for the server: "
            "[federated.server] learning_rate = 'c / R'."
        )
    plain = config.optimizer.name == "SGD" and not config.optimizer.options
    if config.algorithm == "dp-fedsgd" and not plain:
        raise InvalidConfig(f"with dp-fedsgd users send one gradient: the optimizer is SGD, not {config.optimizer}.")
    if config.recalibration.private:
        raise InvalidConfig(
            f"{config.recalibration.private[0]} protects single records, and {config.algorithm} whole users: there is "
            "no epsilon for both. Use recalibration on public records."
        )
    flat = isinstance(config.clip, Flat) and isinstance(config.clip.rule, Abadi)
    if federated.quantile is not None and not flat:
        raise InvalidConfig("federated.quantile adapts the norm of [clip] rule = 'Abadi', and no other clipping.")
