"""`[federated]`: who the users are, and how the server uses their updates.

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

from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch

from clipwise.clipping import Abadi, Flat
from clipwise.data import TensorRecords
from clipwise.errors import InvalidConfig
from clipwise.federated import dirichlet, shards, uniform
from clipwise.mechanisms import AdaptiveClip, Rounds
from clipwise.plan import Plan
from clipwise.training.config import OptimizerChoice, TomlTable, read_optimizer

__all__ = ["Federation"]

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
            quantile=table.number("quantile", None, below=1.0),
            server=read_optimizer(server) if server.values else None,
        )
        table.close()
        return made

    def plan(self, plan: Plan) -> Plan:
        """The same plan, over users."""
        clip = plan.clip
        if self.quantile is not None:
            assert isinstance(clip, Flat) and isinstance(clip.rule, Abadi)  # checked when it was read
            clip = AdaptiveClip(clip.rule.R, self.quantile)
        return replace(plan, clip=clip, mechanism=Rounds(self.weight_cap, self.total_weight))

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
