"""The maps of section 4.4: the updates are equal, step by step, in both directions."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import clipwise as cw
from clipwise import sgld
from clipwise.errors import InvalidPlan

DP = sgld.DPSGD(learning_rate=0.07, noise_multiplier=1.3, sensitivity=5.0, batch_size=16, sample_size=160)


def normal(seed: int, size: int = 6) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_dp_sgd_is_sgld() -> None:
    """w' - w = -(eta/B)(sum g + sigma R z), which is the SGLD update with noise -z."""
    chain, total, z = sgld.from_dp_sgd(DP), normal(0), normal(1)
    moved = -DP.learning_rate * DP.update(total, z)
    assert torch.allclose(moved, chain.update(total, -z), rtol=1e-12)
    assert torch.allclose(moved, -0.07 / 16 * (total + 1.3 * 5.0 * z), rtol=1e-12)


@pytest.mark.parametrize("given", [{"sensitivity": 4.0}, {"noise_multiplier": 0.7}])
def test_sgld_is_dp_sgd(given: dict[str, float]) -> None:
    chain = sgld.SGLD(learning_rate=3e-4, batch_size=16, sample_size=160, temperature=0.8)
    dp = sgld.to_dp_sgd(chain, **given)  # type: ignore[call-overload]
    total, z = normal(2), normal(3)
    assert torch.allclose(-dp.learning_rate * dp.update(total, z), chain.update(total, -z), rtol=1e-12)
    back = sgld.from_dp_sgd(dp)
    assert (back.learning_rate, back.temperature) == pytest.approx((chain.learning_rate, chain.temperature))


def test_the_condition_of_the_paper() -> None:
    """At temperature 1, eta = eta' n/2 and sigma R n/(2B) = 1/sqrt(eta')."""
    dp = sgld.to_dp_sgd(sgld.SGLD(learning_rate=2e-3, batch_size=10, sample_size=500), sensitivity=3.0)
    assert dp.learning_rate == pytest.approx(2e-3 * 500 / 2)
    assert dp.noise_multiplier * dp.sensitivity * 500 / (2 * 10) == pytest.approx(1 / math.sqrt(2e-3))


def test_heavy_ball_is_sghmc_over_many_steps() -> None:
    dp = sgld.DPSGD(0.05, 1.1, 2.0, batch_size=8, sample_size=80, momentum=0.9)
    chain = sgld.from_dp_heavy_ball(dp)
    momentum, velocity = torch.zeros(6, dtype=torch.float64), torch.zeros(6, dtype=torch.float64)
    for step in range(20):
        total, z = normal(step), normal(100 + step)
        momentum = dp.update(total, z, momentum)
        velocity = chain.update(total, -z, velocity)
        assert torch.allclose(-dp.learning_rate * momentum, velocity, rtol=1e-10, atol=1e-14)
    back = sgld.to_dp_heavy_ball(chain, noise_multiplier=1.1)
    assert (back.learning_rate, back.sensitivity, back.momentum) == pytest.approx((0.05, 2.0, 0.9))


def test_without_momentum_sghmc_is_sgld() -> None:
    langevin, hamiltonian = sgld.from_dp_sgd(DP), sgld.from_dp_heavy_ball(DP)
    total, z = normal(4), normal(5)
    assert torch.allclose(langevin.update(total, z), hamiltonian.update(total, z), rtol=1e-12)
    assert langevin.temperature == pytest.approx(hamiltonian.temperature)


class Recorded:
    """Normal numbers that are remembered as they were drawn."""

    def __init__(self) -> None:
        self.drawn: list[Tensor] = []

    def fill_(self, buffer: Tensor, entropy: object, step: int, piece: int) -> None:
        buffer.copy_(normal(step, buffer.numel()).view_as(buffer))
        self.drawn.append(buffer.clone())


@pytest.mark.usefixtures("fine_grid")
@pytest.mark.parametrize("momentum", [0.0, 0.8])
def test_private_training_makes_these_updates(momentum: float) -> None:
    """The steps of `Private` with torch's SGD and a large R, from the noise that it drew."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1, bias=False).double()
    data = TensorDataset(torch.randn(12, 3).double(), torch.randn(12).double())
    R, sigma, lr = 100.0, 0.05, 0.02
    plan = cw.Plan(sampling=cw.FullBatch(12), steps=4, clip=cw.Abadi(R), noise_multiplier=sigma)
    optimizer, noise = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum), Recorded()
    private = cw.Private(plan, model, optimizer, seed=1, noise=noise)
    chain = sgld.from_dp_heavy_ball(sgld.DPSGD(lr, sigma, R, batch_size=12, sample_size=12, momentum=momentum))
    velocity = torch.zeros(1, 3, dtype=torch.float64)
    for x, y in private.loader(data):
        before = model.weight.detach().clone()
        losses = (model(x).squeeze(1) - y).square()
        (total,) = torch.autograd.grad(losses.sum(), model.weight, retain_graph=True)
        private.step(losses)
        assert private.last is not None and private.last.fraction_clipped == 0.0
        velocity = chain.update(total, -noise.drawn[-1].view(1, 3), velocity)
        assert torch.allclose(velocity, model.weight.detach() - before, rtol=1e-9, atol=1e-12)
    assert len(noise.drawn) == 4


def test_temperature_one_samples_the_posterior() -> None:
    """Losses (w - x_i)^2/2 with mean zero: the posterior has variance 1/n, the chain that over 1 - eta' n/4."""
    n, rate = 100, 1e-3
    chain = sgld.SGLD(learning_rate=rate, batch_size=n, sample_size=n)
    w, seen = torch.zeros(64, dtype=torch.float64), []
    for step in range(600):
        w = w + chain.update(n * w, normal(step, 64))
        if step > 100:
            seen.append(w)
    assert float(torch.stack(seen).square().mean()) == pytest.approx(1 / n / (1 - rate * n / 4), rel=0.1)


@pytest.mark.parametrize(
    "call",
    [
        lambda: sgld.DPSGD(0.0, 1.0, 1.0, 1, 10),
        lambda: sgld.DPSGD(0.1, 1.0, 1.0, 1, 10, momentum=1.0),
        lambda: sgld.SGHMC(0.1, 1.5, 1, 10),
        lambda: sgld.SGLD(math.nan, 1, 10),
        lambda: sgld.from_dp_sgd(sgld.DPSGD(0.1, 1.0, 1.0, 1, 10, momentum=0.5)),
        lambda: sgld.to_dp_sgd(sgld.SGLD(0.1, 1, 10)),  # type: ignore[call-overload]
        lambda: sgld.to_dp_sgd(sgld.SGLD(0.1, 1, 10), sensitivity=1.0, noise_multiplier=1.0),  # type: ignore[call-overload]
        lambda: sgld.posterior_learning_rate(0.0, 1.0, 1, 10),
    ],
)
def test_what_makes_no_sense_is_refused(call: object) -> None:
    with pytest.raises(InvalidPlan):
        call()  # type: ignore[operator]
