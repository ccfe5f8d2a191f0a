"""DP-SGLD, DP-SGHMC and DP-SGNHT: private training that samples from a posterior.

For the posterior p(w | data) ~ p(w) exp(-sum_i l_i(w)) of n records, at temperature tau:

    SGLD    w' = w - eta (1/B sum_i C_i g_i - 1/n grad log p(w)) + N(0, 2 eta tau/n)
    SGHMC   m' = mu m + (1/B sum_i C_i g_i - 1/n grad log p(w)) + N(0, 2 (1 - mu) tau/(eta n)),   w' = w - eta m'
    SGNHT   as SGHMC, with the noise of the plan's mu, but each step has its own mu' = mu - (T/tau - 1)/Q,
            where T = eta n |(m + m')/2|^2/d is the temperature at which the d weights have just moved

The noise that sampling needs is Gaussian noise on a clipped sum: that of DP-SGD at the noise multiplier
sqrt(2 eta (1 - mu) tau/n) B/(eta R). So `Private` makes the steps and keeps the ledger as always, its noise is the
sampler's, and the optimizer adds the prior. `cw.sgld` has the maps between the two in full.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from clipwise._validate import is_count, is_number, is_positive
from clipwise.accounting import Relation, refuse_vacuous
from clipwise.accounting import noise_multiplier as noise_for
from clipwise.clipping import Clip, Flat, Groupwise, Layerwise, Rule, Style, as_clip, is_private
from clipwise.errors import InvalidPlan
from clipwise.optim.posterior import FlatPrior, Posterior, Prior
from clipwise.optim.sgld import SGHMC, posterior_learning_rate, to_dp_heavy_ball
from clipwise.plan import Plan
from clipwise.sampling import Sampling

__all__ = ["SGNHT", "Langevin", "LangevinOptimizer", "printed_temperature"]

_USUAL_SAMPLES = 30


def printed_temperature(sample_size: int) -> float:
    """The temperature of DP-SGLD as the paper prints it, with noise of variance eta: n/2, not the posterior's 1.

    >>> printed_temperature(100)
    50.0
    """
    return sample_size / 2


@dataclass(frozen=True)
class Langevin:
    """A chain: how it samples batches, clips, moves, and which of the weights it visits are kept.

    `temperature` 1 is the posterior of `prior` and losses (negative log-likelihoods), up to the error of a finite
    step, of batches and of clipping; the smaller it is, the nearer to plain optimization. `momentum` above 0 makes it
    SGHMC. After `burn_in` steps (half of all, by default) every `thin`-th sample is kept (by default so that there
    are about thirty).

    Guarantees: the privacy of the chain is that of its `plan`, whatever the optimizer does.

    >>> import clipwise as cw
    >>> chain = Langevin(cw.Poisson(1_000, 100), steps=200, clip=cw.Abadi(1.0), learning_rate=0.01)
    >>> round(chain.noise_multiplier(), 3)
    44.721
    >>> model = nn.Linear(2, 1)
    >>> private = cw.Private(chain.plan(), model, LangevinOptimizer(model, chain))
    """

    sampling: Sampling
    steps: int
    clip: Clip | Rule
    learning_rate: float | None = None
    temperature: float = 1.0
    momentum: float = 0.0
    prior: Prior = FlatPrior()  # noqa: RUF009 - a frozen value
    burn_in: int | None = None
    thin: int | None = None

    def __post_init__(self) -> None:
        Plan(self.sampling, self.steps, self.clip)  # refuses what no plan can have
        if self.sampling.sample_size is None:
            raise InvalidPlan(
                "the posterior depends on the number of records, so a chain needs it: sampling with sample_size=, not "
                "rate=."
            )
        object.__setattr__(self, "clip", as_clip(self.clip))
        _check_style(self.clip)
        for name in ("learning_rate", "temperature"):
            value = getattr(self, name)
            if value is not None and not is_positive(value):
                raise InvalidPlan(f"{type(self).__name__}({name}=...) must be a positive finite number, got {value!r}.")
        if not (is_number(self.momentum) and 0 <= self.momentum < 1):
            raise InvalidPlan(f"momentum must be in [0, 1), got {self.momentum!r}.")
        if not isinstance(self.prior, Prior):
            raise InvalidPlan(f"expected a prior such as GaussianPrior(std=1.0), got {self.prior!r}.")
        if self.burn_in is None:
            object.__setattr__(self, "burn_in", self.steps // 2)
        if not (is_count(self.burn_in, least=0) and self.first < self.steps):
            raise InvalidPlan(f"burn_in must be an integer from 0 to steps - 1 = {self.steps - 1}, got {self.burn_in}.")
        if self.thin is None:
            object.__setattr__(self, "thin", max(1, (self.steps - self.first) // _USUAL_SAMPLES))
        if not (is_count(self.thin, least=0) and 1 <= self.every <= self.steps - self.first):
            raise InvalidPlan(
                f"thin must be from 1 to the {self.steps - self.first} steps after burn_in, got {self.thin!r}: else no "
                "sample is kept."
            )

    @property
    def records(self) -> int:
        """The public number of records."""
        assert self.sampling.sample_size is not None
        return self.sampling.sample_size

    @property
    def first(self) -> int:
        """Steps before the first one whose weights can be kept."""
        assert self.burn_in is not None
        return self.burn_in

    @property
    def every(self) -> int:
        """Steps from one kept sample to the next."""
        assert self.thin is not None
        return self.thin

    def keeps(self, steps_done: int) -> bool:
        """Whether the weights after this many steps are kept as a sample."""
        return steps_done > self.first and (steps_done - self.first) % self.every == 0

    def sensitivity(self, model: nn.Module | None = None) -> float:
        """R, the most that one record can move a sum; styles with groups need the model, whose layers they count."""
        style = _check_style(self.clip)
        if isinstance(style, Flat):
            return style.sensitivity()
        if model is None:
            raise InvalidPlan(f"the noise for {type(style).__name__} clipping depends on the layers: pass the model.")
        names = [name for name, p in model.named_parameters() if p.requires_grad]
        return style.sensitivity(list(style.groups(names)))

    def noise_multiplier(self, model: nn.Module | None = None) -> float:
        """What the sampler's own noise amounts to: sqrt(2 eta (1 - mu) tau/n) B/(eta R)."""
        if self.learning_rate is None:
            raise InvalidPlan("the chain has no learning_rate yet: chain.calibrate(epsilon=..., delta=...) finds one.")
        n, B = self.records, self.sampling.batch_size
        dynamics = SGHMC(self.learning_rate / n, 1.0 - self.momentum, B, n, self.temperature)
        return to_dp_heavy_ball(dynamics, sensitivity=self.sensitivity(model)).noise_multiplier

    def calibrate(
        self,
        epsilon: float,
        delta: float,
        model: nn.Module | None = None,
        accountant: str = "exact",
        *,
        relation: Relation | None = None,
    ) -> Self:
        """The same chain with the largest learning rate that keeps the whole of it within (epsilon, delta).

        Larger steps need less noise against the gradient to stay at the same temperature, so they are less private.

        >>> import clipwise as cw
        >>> chain = Langevin(cw.Poisson(1_000, 100), steps=200, clip=cw.Abadi(1.0)).calibrate(epsilon=3.0, delta=1e-4)
        >>> round(chain.plan().epsilon(1e-4), 2)
        3.0
        """
        noise = noise_for(epsilon, delta, self.sampling, self.steps, accountant, relation=relation)
        sampling, R = self.sampling, self.sensitivity(model)
        at_one = posterior_learning_rate(noise, R, sampling.batch_size, self.records, self.momentum)
        return replace(self, learning_rate=self.temperature * at_one)

    def plan(self, model: nn.Module | None = None, *, accept_vacuous: bool = False) -> Plan:
        """The plan for `clipwise.Private`, with the sampler's noise as its noise multiplier.

        At a low temperature that noise is often far too little to protect anyone. A plan with an epsilon over 50 at
        delta = 1/n is refused with the number; `accept_vacuous=True` accepts it, for a chain on public data.
        """
        noise = self.noise_multiplier(model)
        plan = Plan(self.sampling, self.steps, self.clip, noise)
        if not accept_vacuous:
            refuse_vacuous(
                plan.events,
                f"the chain's own noise has multiplier {noise:.3g} (learning rate {self.learning_rate:.3g}, "
                f"temperature {self.temperature:.3g}, R {self.sensitivity(model):.3g})",
                "Lower the learning rate, R or the number of steps, or raise the temperature; chain.calibrate(epsilon="
                "..., delta=...) finds the learning rate, and plan(accept_vacuous=True) is for public data.",
            )
        return plan


def _check_style(clip: object) -> Style:
    """The one style of the chain; what would give different weights or steps different temperatures is refused."""
    if not isinstance(clip, (Flat, Layerwise, Groupwise)):
        raise InvalidPlan(f"a chain needs one clipping style: the schedule {clip!r} would change its temperature.")
    if not is_private(clip):
        raise InvalidPlan(f"{clip!r} does not bound what a record contributes. Use a rule with a large R instead.")
    if not isinstance(clip, Flat) and clip.noise != "joint":
        raise InvalidPlan(f'noise="{clip.noise}" gives every layer its own temperature; use noise="joint".')
    return clip


@dataclass(frozen=True)
class SGNHT(Langevin):
    """A chain with a Nose-Hoover thermostat (Ding et al., 2014): SGHMC whose friction follows the temperature.

    The noise of the plan is that of SGHMC with this `momentum`, and the chain begins with it. Batches add noise of a
    size that nobody knows, so SGHMC samples at too high a temperature. Here the momentum falls while the weights move
    at a higher temperature than `temperature`, and rises while they move at a lower one, so noise of any size is
    absorbed, as long as it is alike for all weights. The temperature is measured with the mean of the velocities before
    and after a step: the last velocity alone would make the posterior too narrow, by half the friction.

    The momentum changes by (measured/temperature - 1)/`inertia` in a step, and never falls below 0. By default the
    inertia is 2/(1 - momentum)^2, with which the thermostat follows as fast as it can without ringing; that of the
    authors' discretization is n/learning_rate. With fewer than about ten weights, give a larger one.

    Guarantees: as for `Langevin`: the thermostat sees nothing but the noisy gradients.

    >>> import clipwise as cw
    >>> chain = SGNHT(cw.Poisson(1_000, 100), steps=200, clip=cw.Abadi(1.0), learning_rate=0.01)
    >>> round(chain.noise_multiplier(), 3), chain.momentum_after(0.9, measured=2.0)
    (14.142, 0.895)
    >>> model = nn.Linear(2, 1)
    >>> private = cw.Private(chain.plan(), model, LangevinOptimizer(model, chain))
    """

    momentum: float = 0.9
    inertia: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.momentum:
            raise InvalidPlan("SGNHT(momentum=...) must be over 0: a thermostat acts on a velocity. Langevin has none.")
        if self.inertia is not None and not is_positive(self.inertia):
            raise InvalidPlan(f"SGNHT(inertia=...) must be a positive finite number, got {self.inertia!r}.")

    def momentum_after(self, momentum: float, measured: float) -> float:
        """The momentum of the step after one at this momentum and temperature."""
        inertia = 2 / (1 - self.momentum) ** 2 if self.inertia is None else self.inertia
        return max(0.0, momentum - (measured / self.temperature - 1) / inertia)


class LangevinOptimizer(Optimizer):
    """The moves of a chain, as an optimizer for `clipwise.Private`, which supplies the noise; keeps the samples.

    The samples are part of the optimizer's state, so `private.save` and `Private.resume` keep them too.

    >>> import clipwise as cw
    >>> model = nn.Linear(2, 1)
    >>> chain = Langevin(cw.FullBatch(4), 6, cw.Abadi(1.0), learning_rate=0.01, burn_in=2, thin=2)
    >>> optimizer = LangevinOptimizer(model, chain)
    >>> private = cw.Private(chain.plan(), model, optimizer, own_batches=True)
    >>> for _ in range(6):
    ...     done = private.step(model(torch.ones(4, 2)).squeeze(1).square())
    >>> len(optimizer.posterior)
    2
    """

    def __init__(self, model: nn.Module, chain: Langevin) -> None:
        if not isinstance(chain, Langevin):
            raise InvalidPlan(f"chain must be a clipwise.optim.Langevin or SGNHT, got {type(chain).__name__}.")
        if chain.learning_rate is None:
            raise InvalidPlan("the chain has no learning_rate yet: chain.calibrate(epsilon=..., delta=...) finds one.")
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._names, self._chain = tuple(named), chain
        settings = {"lr": chain.learning_rate, "momentum": chain.momentum, "steps": 0}
        if isinstance(chain, SGNHT):
            settings["thermostat"] = chain.momentum
        super().__init__(list(named.values()), settings)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """One move, from the noisy mean gradient in `p.grad`."""
        (group,) = self.param_groups
        self._check(group)
        rate, n, chain = group["lr"], self._chain.records, self._chain
        momentum = group.get("thermostat", chain.momentum)
        energy, weights = 0.0, 0
        for p in group["params"]:
            if p.grad is None:
                continue
            drift = p.grad - chain.prior.log_density_gradient(p) / n
            if chain.momentum:
                before = self.state[p].get("momentum_buffer")
                if isinstance(chain, SGNHT):
                    mean = drift / 2 if before is None else before.mul((1 + momentum) / 2).add_(drift, alpha=0.5)
                    energy, weights = energy + _square(mean), weights + mean.numel()
                drift = drift if before is None else before.mul_(momentum).add_(drift)
                self.state[p]["momentum_buffer"] = drift
            p.sub_(drift, alpha=rate)
        if isinstance(chain, SGNHT) and weights:
            group["thermostat"] = chain.momentum_after(momentum, measured=rate * n * energy / weights)
        group["steps"] += 1
        if chain.keeps(group["steps"]):
            for p in group["params"]:
                self.state[p].setdefault("samples", []).append(p.detach().clone())

    def _check(self, group: dict[str, Any]) -> None:
        chain, rate = self._chain, group["lr"]
        if (rate, group["momentum"]) != (chain.learning_rate, chain.momentum):
            raise InvalidPlan(
                f"learning rate {rate!r} and momentum {group['momentum']!r} are not the chain's "
                f"({chain.learning_rate!r}, {chain.momentum!r}): the noise was planned for those, and a "
                "schedule would change the temperature. Use the chain's own."
            )
        if ("thermostat" in group) != isinstance(chain, SGNHT):
            raise InvalidPlan(
                f"the state of this optimizer was saved by another kind of chain than {type(chain).__name__}: of "
                "Langevin and SGNHT, one has a thermostat. Continue with the chain that the run began with."
            )

    @property
    def friction(self) -> float:
        """1 - momentum, of the coming step. Of `SGNHT` it is what the thermostat found; at 1 it cannot cool further.

        >>> import clipwise as cw
        >>> chain = SGNHT(cw.FullBatch(4), 6, cw.Abadi(1.0), learning_rate=0.01, momentum=0.75)
        >>> LangevinOptimizer(nn.Linear(2, 1), chain).friction
        0.25
        """
        momentum: float = self.param_groups[0].get("thermostat", self._chain.momentum)
        return 1 - momentum

    @property
    def posterior(self) -> Posterior:
        """The samples kept so far."""
        tensors = [self.state[p].get("samples", []) for p in self.param_groups[0]["params"]]
        return Posterior(tuple(dict(zip(self._names, each, strict=True)) for each in zip(*tensors, strict=True)))


def _square(velocity: Tensor) -> float:
    return float(velocity.double().square().sum())
