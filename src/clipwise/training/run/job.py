"""What a configuration asks for, made ready: records, network, plan."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from clipwise.accounting import Event, Ledger, account, default_delta
from clipwise.calibration import CalibrationResult, PrivateTemperatureScaling
from clipwise.data import DataSet, TensorRecords
from clipwise.entropy import arm_seed
from clipwise.errors import InvalidConfig
from clipwise.plan import Plan, accept_delta
from clipwise.private import Checked, Looked
from clipwise.training.config import Config, OptimizerChoice, freeze, guarded
from clipwise.training.run.begun import Begun, begin

__all__ = ["Job", "Trained", "prepare", "private_scaling"]

SPLIT_SEED = 20
_LEAST_LEFT = 0.01
"""Of a target epsilon, for the steps; about seven times the noise of a run that has all of it."""


@dataclass(frozen=True, eq=False)
class Job:
    """One run, ready to start. Nothing in it changes but the weights of `model`."""

    config: Config
    data: DataSet
    train: TensorRecords
    test: TensorRecords
    public: TensorRecords | None
    """Held-out records for recalibration; none of them is in `test`."""
    aside: TensorRecords | None
    """Private records that are not trained on, for recalibration."""
    model: nn.Module
    parameters: dict[str, nn.Parameter]
    """What is trained."""
    plan: Plan
    optimizer: OptimizerChoice
    """How the weights move; of the users, where it is federated."""
    delta: float | None
    warnings: tuple[str, ...]
    charged: tuple[Event, ...] = ()
    """What was released of the records before the run, for their schema or by an earlier run: part of its epsilon."""
    begun: Begun | None = None
    """Where its first weights come from; None: they are new."""

    @property
    def public_records(self) -> int | None:
        """The number of training records, where it may be shown: with a public rate it may not."""
        return None if self.config.batches.rate is not None else len(self.train)

    @property
    def draw_seed(self) -> int | None:
        """The seed of coins and noise, derived from the configuration's seed and name: no two arms share it."""
        return arm_seed(self.config.seed, self.config.name)

    @property
    def evaluate_every(self) -> int:
        """Steps between evaluations."""
        return self.config.evaluation.every or max(1, self.plan.steps // 10)

    @property
    def checkpoint_every(self) -> int:
        """Steps between checkpoints."""
        return self.config.checkpoint_every or self.evaluate_every

    def outputs(self, model: nn.Module, inputs: Sequence[Tensor]) -> Tensor:
        """Logits (B, K), or predictions (B,), as the network returns them."""
        outputs: Tensor = guarded("the model's forward pass", lambda: self.config.model.forward(model, inputs))
        expected = (len(inputs[0]), self.data.outputs)
        if self.data.task == "regression" and outputs.dim() == 1:
            outputs = outputs.unsqueeze(1)
        if tuple(outputs.shape) != expected:
            raise InvalidConfig(
                f"the model returns {tuple(outputs.shape)} for a batch of {expected[0]}, but {self.data.name} needs "
                f"{expected}."
            )
        return outputs if self.data.task == "classification" else outputs.squeeze(1)

    def losses(self, model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        """One loss per sample: cross-entropy, or the squared error, of targets from -1 to 1 where they have bounds."""
        *inputs, targets = batch
        outputs = self.outputs(model, inputs)
        if self.data.task == "classification":
            return F.cross_entropy(outputs, targets, reduction="none")
        bounds = self.data.target_bounds
        return (outputs - (targets if bounds is None else bounds.scaled(targets))).square()

    def predict(self, records: TensorDataset) -> Tensor:
        """Logits for many records, without dropout, or predictions in the target's own unit."""
        *inputs, _ = records.tensors
        size, was_training = self.config.evaluation.batch_size, self.model.training
        self.model.eval()
        try:
            with torch.no_grad():
                parts = [
                    self.outputs(self.model, [x[k : k + size].to(self.config.device) for x in inputs]).cpu()
                    for k in range(0, len(records), size)
                ]
        finally:
            self.model.train(was_training)
        outputs, bounds = torch.cat(parts), self.data.target_bounds
        return outputs if bounds is None else bounds.restored(outputs)


@dataclass(frozen=True)
class Trained:
    """What an algorithm leaves behind, beside the weights: what it released, and what else it can predict with."""

    ledger: Ledger
    checked: Checked | None = None
    """What the run's own checks for samples that mix have shown; None where samples are not clipped one by one."""
    looked: Looked = field(default_factory=lambda: Looked("not compared"))
    """Whether the records stayed the same while a seeded run was made."""
    further: Mapping[str, CalibrationResult] = field(default_factory=dict)
    """On the held-out records, under names for the report."""


def prepare(
    config: Config, data: DataSet | None = None, charged: tuple[Event, ...] | None = None, *, resumed: bool = False
) -> Job:
    """Load the data (unless they are given), build the network with its first weights, find the noise.

    `charged` was released of the records before; None: what the configuration's columns cost. The weights of a run
    that is `resumed` come from its checkpoint.
    """
    data = config.data.load() if data is None else data
    train, aside = _split(data.train, config.recalibration.private_share)
    test, public = _split(data.test, config.recalibration.share if config.recalibration.public else None)
    if config.seed is None:
        torch.seed()
    else:
        torch.manual_seed(config.seed)
    model = config.model.build(data).to(config.device)
    model.train()
    begun = None if resumed else begin(model, config, data)
    trained = {id(p) for p in freeze(model, config.trainable)}
    parameters = {name: p for name, p in model.named_parameters() if id(p) in trained}
    if config.recalibration.methods and data.task == "regression":
        raise InvalidConfig("recalibration.methods are for classification.")
    if config.evaluation.std is not None and data.task == "classification":
        raise InvalidConfig("evaluation.std is for a regression.")
    delta = None
    units = config.algorithm.units(len(train))
    if config.privacy.is_private:
        delta = default_delta(units) if config.privacy.delta is None else config.privacy.delta
    charged = config.data.charged() if charged is None else charged
    charged = charged if config.privacy.is_private else ()
    if not resumed:
        _check_left(config, delta, charged)
    _check_delta(config, units, delta)
    plan = _plan(config, units, delta, charged)
    optimizer = config.algorithm.moves(plan, model)
    for step in (0, plan.steps - 1):  # a rule that cannot be followed is reported now, not when its step comes
        optimizer.learning_rate.at(plan.style(step), list(parameters))
    return Job(
        config,
        data,
        train,
        test,
        public,
        aside,
        model,
        parameters,
        plan,
        optimizer,
        delta,
        (data.note,) if data.note else (),
        charged,
        begun,
    )


def _split(part: TensorDataset, share: float | None) -> tuple[TensorRecords, TensorRecords | None]:
    """The records that stay, and those put aside: chosen at random, but the same ones in every run."""
    if share is None:
        return TensorRecords(*part.tensors), None
    count = round(share * len(part))
    if not 0 < count < len(part):
        raise InvalidConfig(f"[recalibration]: a share of {share:g} of {len(part)} records leaves one side empty.")
    order = torch.randperm(len(part), generator=torch.Generator().manual_seed(SPLIT_SEED), device="cpu")
    aside, stay = order[:count].sort().values, order[count:].sort().values
    return TensorRecords(*(t[stay] for t in part.tensors)), TensorRecords(*(t[aside] for t in part.tensors))


def private_scaling(config: Config) -> PrivateTemperatureScaling | None:
    """Recalibration on private records, with the event that it will put on the ledger; None without."""
    choice = config.recalibration
    if choice.noise_multiplier is None:
        return None
    seed = arm_seed(config.seed, config.name)
    return PrivateTemperatureScaling(choice.noise_multiplier, choice.private_share is not None, seed=seed)


def _plan(config: Config, sample_size: int, delta: float | None, charged: tuple[Event, ...]) -> Plan:
    sampling = config.batches.scheme(sample_size)
    steps, noise = config.batches.count(sampling), config.privacy.noise_multiplier
    plan = config.algorithm.plan(Plan(sampling, steps, config.clip, noise))
    if config.privacy.epsilon is not None and delta is not None:
        scaling = private_scaling(config)
        fixed = (*charged, *(() if scaling is None else (scaling.event,)))
        with warnings.catch_warnings():
            if config.privacy.allow_large_delta:
                warnings.filterwarnings("ignore", "delta = .* is over 1/n")
            plan = plan.calibrate(config.privacy.epsilon, delta, fixed=fixed)
    accept_delta(plan)  # one over 1/n was asked for, and the report warns of it
    return plan


def _check_left(config: Config, delta: float | None, charged: tuple[Event, ...]) -> None:
    """Refuse a target epsilon that is spent already, or all but spent: the steps would be nothing but noise."""
    target = config.privacy.epsilon
    if target is None or delta is None or not charged:
        return
    spent = account(charged, delta)
    if spent.epsilon <= (1 - _LEAST_LEFT) * target:
        return
    by = "the columns" if config.continue_from is None else str(config.continue_from)
    raise InvalidConfig(
        f"privacy.epsilon = {target:g} is the total, and {spent.printed} of it is spent by {by} (delta {delta:g}): "
        "what is left is next to nothing, and the steps would be nothing but noise. Give a larger total, such as "
        f"--set privacy.epsilon={spent.epsilon * 4 / 3:.2g}."
    )


def _check_delta(config: Config, units: int, delta: float | None) -> None:
    """Refuse a delta over 1/n, unless it was asked for.

    With a public rate n is not public, and neither a refusal nor its message may depend on it: the number of records
    that rate and expected batch size speak of takes its place.
    """
    rate, size = config.batches.rate, config.batches.batch_size
    records = units if rate is None or size is None else size / rate
    if delta is None or delta <= 1 / records or config.privacy.allow_large_delta:
        return
    number = f"{records:,.0f}{'' if rate is None else ', as rate and batch_size say'}"
    raise InvalidConfig(
        f"privacy.delta = {delta:g} is over 1/n = {1 / records:.3g} (n = {number}): such a promise allows publishing a "
        "whole record. Give a smaller delta; --allow-large-delta (privacy.allow_large_delta = true) accepts this one."
    )
