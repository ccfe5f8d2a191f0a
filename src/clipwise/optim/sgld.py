"""Differentially private training as Bayesian sampling: the maps of section 4.4, in both directions.

Where no gradient is clipped, a step of DP-SGD is a step of stochastic gradient Langevin dynamics (SGLD), and one of
DP-HeavyBall a step of stochastic gradient Hamiltonian Monte Carlo (SGHMC):

    DP-SGD         w' - w = -(eta/B) (sum_i g_i + sigma R z)
    SGLD           w' - w = -(eta' n/(2B)) sum_i g_i + sqrt(T eta') z
    DP-HeavyBall   m' = mu m + (sum_i g_i + sigma R z)/B     w' - w = -eta m'
    SGHMC          v' = (1 - alpha) v - (eta' n/B) sum_i g_i + sqrt(2 T alpha eta') z     w' - w = v'

with z standard normal. At temperature T = 1 they sample the posterior, up to the error of a finite step and of batches.
Every DP-SGD is an SGLD at some temperature; the paper's condition sigma R n/(2B) = 1/sqrt(eta') says that it is 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import overload

from torch import Tensor

from clipwise.errors import InvalidPlan

__all__ = ["DPSGD", "SGHMC", "SGLD", "from_dp_heavy_ball", "from_dp_sgd", "posterior_learning_rate", "to_dp_heavy_ball",
           "to_dp_sgd"]  # fmt: skip


@dataclass(frozen=True)
class _Numbers:
    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            lowest_is_fine = f.name in ("momentum", "temperature", "noise_multiplier") and value == 0
            if not (math.isfinite(value) and (value > 0 or lowest_is_fine)):
                raise InvalidPlan(f"{type(self).__name__}({f.name}=...) must be positive and finite, got {value!r}.")
        if not getattr(self, "momentum", 0.0) < 1:
            raise InvalidPlan(f"momentum must be below 1, got {getattr(self, 'momentum', None)!r}.")
        if not getattr(self, "friction", 1.0) <= 1:
            raise InvalidPlan(f"friction must be at most 1, got {getattr(self, 'friction', None)!r}.")


@dataclass(frozen=True)
class DPSGD(_Numbers):
    """DP-SGD, and with momentum DP-HeavyBall, as `torch.optim.SGD(lr=learning_rate, momentum=momentum)` runs it.

    `sensitivity` is R, the joint one of the clipping style; `batch_size` the expected one, B; `sample_size` n.
    """

    learning_rate: float
    noise_multiplier: float
    sensitivity: float
    batch_size: float
    sample_size: int
    momentum: float = 0.0

    @property
    def noise_per_step(self) -> float:
        """The standard deviation of what noise adds to a weight in one step (before momentum), eta sigma R/B."""
        return self.learning_rate * self.noise_multiplier * self.sensitivity / self.batch_size

    def update(self, gradient_sum: Tensor, normal: Tensor, momentum: Tensor | float = 0.0) -> Tensor:
        """The momentum m' after this step; the weights move by -learning_rate * m'."""
        noisy = gradient_sum + self.noise_multiplier * self.sensitivity * normal
        return self.momentum * momentum + noisy / self.batch_size


@dataclass(frozen=True)
class SGLD(_Numbers):
    """Stochastic gradient Langevin dynamics (Welling and Teh, 2011) with a flat prior, in the form of section 4.4."""

    learning_rate: float
    batch_size: float
    sample_size: int
    temperature: float = 1.0

    def update(self, gradient_sum: Tensor, normal: Tensor) -> Tensor:
        """The change of the weights in one step."""
        drift = self.learning_rate * self.sample_size / (2 * self.batch_size) * gradient_sum
        return math.sqrt(self.temperature * self.learning_rate) * normal - drift


@dataclass(frozen=True)
class SGHMC(_Numbers):
    """Stochastic gradient Hamiltonian Monte Carlo (Chen, Fox and Guestrin, 2014, equation 15, no noise estimate)."""

    learning_rate: float
    friction: float
    batch_size: float
    sample_size: int
    temperature: float = 1.0

    def update(self, gradient_sum: Tensor, normal: Tensor, velocity: Tensor | float = 0.0) -> Tensor:
        """The velocity after this step, which is the change of the weights."""
        drift = self.learning_rate * self.sample_size / self.batch_size * gradient_sum
        spread = math.sqrt(2 * self.temperature * self.friction * self.learning_rate)
        return (1 - self.friction) * velocity - drift + spread * normal


def from_dp_sgd(dp: DPSGD) -> SGLD:
    """The SGLD whose steps are those of a DP-SGD that clips nothing, at the temperature that its noise amounts to.

    eta' = 2 eta/n and T = eta sigma^2 R^2 n/(2 B^2).

    >>> from_dp_sgd(DPSGD(learning_rate=0.01, noise_multiplier=1.0, sensitivity=2.0, batch_size=100, sample_size=1000))
    SGLD(learning_rate=2e-05, batch_size=100, sample_size=1000, temperature=0.002)
    """
    if dp.momentum:
        raise InvalidPlan("DP-SGD with momentum is no SGLD: from_dp_heavy_ball gives its SGHMC.")
    learning_rate = 2 * dp.learning_rate / dp.sample_size
    return SGLD(learning_rate, dp.batch_size, dp.sample_size, dp.noise_per_step**2 / learning_rate)


@overload
def to_dp_sgd(sgld: SGLD, *, sensitivity: float) -> DPSGD: ...
@overload
def to_dp_sgd(sgld: SGLD, *, noise_multiplier: float) -> DPSGD: ...
def to_dp_sgd(sgld: SGLD, *, sensitivity: float | None = None, noise_multiplier: float | None = None) -> DPSGD:
    """The DP-SGD whose steps are those of an SGLD where nothing is clipped; only the product sigma R matters.

    eta = eta' n/2 and sigma R = (2B/n) sqrt(T/eta').

    >>> to_dp_sgd(SGLD(learning_rate=1e-4, batch_size=100, sample_size=1000), sensitivity=10.0)
    DPSGD(learning_rate=0.05, noise_multiplier=2.0, sensitivity=10.0, batch_size=100, sample_size=1000, momentum=0.0)
    """
    learning_rate = sgld.learning_rate * sgld.sample_size / 2
    noise = math.sqrt(sgld.temperature * sgld.learning_rate) * sgld.batch_size / learning_rate
    sigma, R = _factored(noise, sensitivity, noise_multiplier)
    return DPSGD(learning_rate, sigma, R, sgld.batch_size, sgld.sample_size)


def from_dp_heavy_ball(dp: DPSGD) -> SGHMC:
    """The SGHMC whose steps are those of a DP-HeavyBall that clips nothing, with velocity -eta m.

    alpha = 1 - mu, eta' = eta/n and T = eta sigma^2 R^2 n/(2 (1 - mu) B^2).

    >>> from_dp_heavy_ball(DPSGD(0.01, 1.0, 2.0, batch_size=100, sample_size=1000, momentum=0.9)).temperature
    0.02
    """
    learning_rate, friction = dp.learning_rate / dp.sample_size, 1 - dp.momentum
    temperature = dp.noise_per_step**2 / (2 * friction * learning_rate)
    return SGHMC(learning_rate, friction, dp.batch_size, dp.sample_size, temperature)


@overload
def to_dp_heavy_ball(sghmc: SGHMC, *, sensitivity: float) -> DPSGD: ...
@overload
def to_dp_heavy_ball(sghmc: SGHMC, *, noise_multiplier: float) -> DPSGD: ...
def to_dp_heavy_ball(sghmc: SGHMC, *, sensitivity: float | None = None, noise_multiplier: float | None = None) -> DPSGD:
    """The DP-HeavyBall whose steps are those of an SGHMC where nothing is clipped.

    >>> chain = SGHMC(learning_rate=1e-5, friction=0.1, batch_size=100, sample_size=1000)
    >>> back = from_dp_heavy_ball(to_dp_heavy_ball(chain, noise_multiplier=1.5))
    >>> round(back.friction, 12), round(back.temperature, 12)
    (0.1, 1.0)
    """
    learning_rate = sghmc.learning_rate * sghmc.sample_size
    spread = math.sqrt(2 * sghmc.temperature * sghmc.friction * sghmc.learning_rate)
    sigma, R = _factored(spread * sghmc.batch_size / learning_rate, sensitivity, noise_multiplier)
    return DPSGD(learning_rate, sigma, R, sghmc.batch_size, sghmc.sample_size, 1 - sghmc.friction)


def _factored(noise: float, sensitivity: float | None, noise_multiplier: float | None) -> tuple[float, float]:
    """Noise multiplier and sensitivity whose product is `noise`, one of them given."""
    if (sensitivity is None) == (noise_multiplier is None):
        raise InvalidPlan("give either sensitivity= or noise_multiplier=: their product is fixed by the sampler.")
    if sensitivity is not None:
        return noise / sensitivity, sensitivity
    assert noise_multiplier is not None
    return noise_multiplier, noise / noise_multiplier


def posterior_learning_rate(
    noise_multiplier: float, sensitivity: float, batch_size: float, sample_size: int, momentum: float = 0.0
) -> float:
    """The learning rate at which DP-SGD (or DP-HeavyBall) that clips nothing has temperature 1.

    It solves the paper's condition sigma R n/(2B) = 1/sqrt(eta') for the learning rate.

    >>> rate = posterior_learning_rate(noise_multiplier=1.0, sensitivity=2.0, batch_size=100, sample_size=1000)
    >>> rate, round(from_dp_sgd(DPSGD(rate, 1.0, 2.0, 100, 1000)).temperature, 12)
    (5.0, 1.0)
    """
    sampled = from_dp_heavy_ball(DPSGD(1.0, noise_multiplier, sensitivity, batch_size, sample_size, momentum))
    if not sampled.temperature:
        raise InvalidPlan("without noise the temperature is 0 at every learning rate.")
    return 1.0 / sampled.temperature
