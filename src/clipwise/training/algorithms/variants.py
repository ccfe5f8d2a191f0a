"""What `algorithm = "dp-sgld"` and `"dp-sgd-jl"` need besides.

```toml
algorithm = "dp-sgld"
[sgld]                # in place of [optimizer]: noise and temperature decide the learning rate
temperature = 1.0     # 1 is the posterior
momentum = 0.9        # Hamiltonian (SGHMC); left out, 0
prior_std = 1.0       # of every weight; left out, the prior is flat
burn_in = 300         # steps before samples are kept; left out, half of them
thin = 10             # steps from one sample to the next; left out, for about thirty
```

```toml
algorithm = "dp-sgd-jl"
projections = 256     # random directions for the norms of a step
```
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from torch import nn

from clipwise.errors import InvalidConfig
from clipwise.optim import FlatPrior, GaussianPrior, Langevin
from clipwise.optim.sgld import posterior_learning_rate
from clipwise.plan import Plan
from clipwise.training.config.optimizers import LearningRate, OptimizerChoice, read_optimizer
from clipwise.training.config.toml import Table

__all__ = ["JL", "SGLD", "Sampler", "read_projections", "read_steps"]

SGLD, JL = "dp-sgld", "dp-sgd-jl"


@dataclass(frozen=True)
class Sampler:
    """`[sgld]`: the chain without its plan."""

    temperature: float
    momentum: float
    prior_std: float | None
    burn_in: int | None
    thin: int | None

    def chain(self, plan: Plan, model: nn.Module) -> Langevin:
        """The chain whose own noise is the plan's, which decides the learning rate."""
        if not plan.noise_multiplier:
            raise InvalidConfig("dp-sgld samples with its noise: it needs privacy.epsilon or privacy.noise_multiplier.")
        prior = FlatPrior() if self.prior_std is None else GaussianPrior(self.prior_std)
        chain = Langevin(
            plan.sampling, plan.steps, plan.clip, None, self.temperature, self.momentum, prior, self.burn_in, self.thin
        )
        at_one = posterior_learning_rate(
            plan.noise_multiplier, chain.sensitivity(model), plan.batch_size, chain.records, self.momentum
        )
        return replace(chain, learning_rate=self.temperature * at_one)

    def optimizer(self, chain: Langevin) -> OptimizerChoice:
        """What a report says of the optimizer."""
        assert chain.learning_rate is not None
        return OptimizerChoice("Langevin", LearningRate(chain.learning_rate), self.described())

    def described(self) -> dict[str, Any]:
        """The choices that were made."""
        return {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) is not None}


def read_steps(root: Table, algorithm: str) -> tuple[OptimizerChoice | None, Sampler | None]:
    """How weights move: by `[optimizer]`, or for dp-sgld by `[sgld]`."""
    sgld = root.table("sgld")
    if algorithm != SGLD:
        if sgld.values:
            sgld.fail(None, f"is for algorithm = {SGLD!r} only.")
        return read_optimizer(root.table("optimizer")), None
    if "optimizer" in root:
        root.fail(
            "optimizer", f"is not for {SGLD}: noise and temperature decide the learning rate; momentum is in [sgld]."
        )
    sampler = Sampler(
        temperature=sgld.number("temperature", 1.0),
        momentum=sgld.number("momentum", 0.0, below=1.0),
        prior_std=sgld.number("prior_std", None),
        burn_in=sgld.integer("burn_in", None, least=0),
        thin=sgld.integer("thin", None),
    )
    sgld.close()
    return None, sampler


def read_projections(root: Table, algorithm: str) -> int | None:
    """The number of random directions: needed for dp-sgd-jl, refused otherwise."""
    if algorithm == JL:
        return root.integer("projections")
    if "projections" in root:
        root.fail("projections", f"is for algorithm = {JL!r} only.")
    return None
