"""`algorithm = "dp-sgld"`: the loop of DP-SGD with a sampler as its optimizer; its samples predict together.

`"dp-sgnht"` has a thermostat besides, which absorbs the noise of batches.

```toml
algorithm = "dp-sgld"
[sgld]                # in place of [optimizer]: noise and temperature determine the learning rate
temperature = 1.0     # 1 is the posterior
momentum = 0.9        # Hamiltonian (SGHMC); default 0
prior_std = 1.0       # of every weight; without it the prior is flat
burn_in = 300         # steps before samples are kept; default: half of them
thin = 10             # steps from one sample to the next; default: for about thirty

algorithm = "dp-sgnht"
[sgnht]               # the same keys; momentum, by default 0.9, is that of the beginning
inertia = 200         # how slowly the momentum follows the temperature; default: 2 / (1 - momentum)^2
```
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

from torch import nn

from clipwise.accounting import Steps
from clipwise.errors import InvalidConfig
from clipwise.optim import SGNHT, FlatPrior, GaussianPrior, Langevin, LangevinOptimizer
from clipwise.optim.sgld import posterior_learning_rate
from clipwise.plan import Plan
from clipwise.training.algorithms.base import Algorithm, private_loop
from clipwise.training.config import LearningRate, OptimizerChoice, TomlTable
from clipwise.training.run import Folder, Job, Trained, Watch

if TYPE_CHECKING:
    from clipwise.training.config import Config

__all__ = ["AVERAGE", "PrivateSGLD", "PrivateSGNHT"]

AVERAGE = "posterior average"


@dataclass(frozen=True)
class PrivateSGLD(Algorithm):
    """Langevin dynamics whose own noise is the plan's: the weights of many steps are samples of a posterior."""

    name = "dp-sgld"
    about = "samples from a posterior, in place of an optimizer"
    keys = ("sgld",)
    dynamics: ClassVar[type[Langevin]] = Langevin

    temperature: float
    momentum: float
    prior_std: float | None
    burn_in: int | None
    thin: int | None

    @classmethod
    def read(cls, root: TomlTable) -> Self:
        (key,) = cls.keys
        if "optimizer" in root:
            root.fail(
                "optimizer",
                f"is not for {cls.name}: noise and temperature decide the learning rate; momentum is in [{key}].",
            )
        table = root.table(key)
        made = cls(**cls.choices(table))
        table.close()
        return made

    @classmethod
    def choices(cls, table: TomlTable) -> dict[str, Any]:
        """What the table of this algorithm says."""
        return {
            "temperature": table.number("temperature", 1.0),
            "momentum": table.number("momentum", cls.dynamics.momentum, below=1.0),
            "prior_std": table.number("prior_std", None),
            "burn_in": table.integer("burn_in", None, least=0),
            "thin": table.integer("thin", None),
        }

    def check(self, config: Config, root: TomlTable) -> None:
        if config.batches.rate is not None:
            root.fail("rate", f"is not for {self.name}: the posterior depends on the number of records.")

    def chain(self, plan: Plan, model: nn.Module) -> Langevin:
        """The chain whose own noise is the plan's, which decides the learning rate."""
        if not plan.noise_multiplier:
            raise InvalidConfig(
                f"{self.name} samples with its noise: it needs privacy.epsilon or privacy.noise_multiplier."
            )
        if isinstance(plan.noise_multiplier, Steps):
            raise InvalidConfig(f"{self.name} has one temperature: give one noise_multiplier, not a schedule of them.")
        own = {name: value for name, value in asdict(self).items() if name != "prior_std"}
        prior = FlatPrior() if self.prior_std is None else GaussianPrior(self.prior_std)
        chain = self.dynamics(plan.sampling, plan.steps, plan.clip, prior=prior, **own)
        at_one = posterior_learning_rate(
            plan.noise_multiplier, chain.sensitivity(model), plan.batch_size, chain.records, self.momentum
        )
        return replace(chain, learning_rate=self.temperature * at_one)

    def moves(self, plan: Plan, model: nn.Module) -> OptimizerChoice:
        rate = self.chain(plan, model).learning_rate
        assert rate is not None  # `chain` decides it
        chosen = {name: value for name, value in asdict(self).items() if value is not None}
        return OptimizerChoice(self.dynamics.__name__, LearningRate(rate), chosen)

    def train(self, job: Job, folder: Folder, watch: Watch, resume: bool) -> Trained:
        """Run the chain to its end; the model keeps the last weights, and the average of all samples is measured.

        Guarantees: as for dp-sgd, whose mechanism it is. Settings whose privacy is vacuous are refused.
        """
        if job.data.task != "classification":
            raise InvalidConfig(
                f"{self.name} averages class probabilities; for a regression use clipwise.optim in a loop."
            )
        chain = self.chain(job.plan, job.model)
        chain.plan(job.model)
        optimizer = LangevinOptimizer(job.model, chain)
        trained = private_loop(job, folder, watch, resume, optimizer)
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
        return replace(trained, further={AVERAGE: found.average})


@dataclass(frozen=True)
class PrivateSGNHT(PrivateSGLD):
    """The same with a thermostat, which finds the friction that keeps the temperature."""

    name = "dp-sgnht"
    about = "the same, at a temperature that a thermostat keeps"
    keys = ("sgnht",)
    dynamics = SGNHT

    inertia: float | None

    @classmethod
    def choices(cls, table: TomlTable) -> dict[str, Any]:
        return {**super().choices(table), "inertia": table.number("inertia", None)}
