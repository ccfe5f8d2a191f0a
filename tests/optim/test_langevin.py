"""DP-SGLD, SGHMC and SGNHT: the update, the posterior, the privacy, and what is refused.

The maps of section 4.4: the updates are equal, step by step, in both directions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import clipwise as cw
from clipwise import sgld
from clipwise.accounting._vacuous import least_epsilon
from clipwise.errors import DataError, InvalidPlan
from clipwise.optim import (
    SGNHT,
    FlatPrior,
    GaussianPrior,
    Langevin,
    LangevinOptimizer,
    LaplacePrior,
    Posterior,
    printed_temperature,
)
from clipwise.optim.sgld import SGLD, to_dp_sgd
from tests.optim.common import N, Remembered, data, flat, gradients_of_each, loss_fn, network, put


def chain_of(**changes: Any) -> Langevin:
    fields: dict[str, Any] = {
        "sampling": cw.Poisson(N, 8),
        "steps": 6,
        "clip": cw.Abadi(0.5),
        "learning_rate": 0.02,
        **changes,
    }
    return Langevin(**fields)


RULES = [cw.Abadi(0.5), cw.GlobalScaled(0.5, 2.0), cw.Automatic(0.5), cw.Global(1.5)]
PRIORS = [FlatPrior(), GaussianPrior(0.7), LaplacePrior(2.0)]


@pytest.mark.usefixtures("fine_grid")
@pytest.mark.parametrize("momentum", [0.0, 0.8])
@pytest.mark.parametrize(("rule", "prior"), list(zip(RULES, [*PRIORS, PRIORS[1]], strict=True)), ids=str)
def test_steps_equal_the_printed_formula_in_a_plain_loop(rule: Any, prior: Any, momentum: float) -> None:
    model, source = network(), Remembered()
    chain = chain_of(clip=rule, prior=prior, momentum=momentum, temperature=300.0)
    private = cw.Private(chain.plan(), model, LangevinOptimizer(model, chain), seed=3, noise=source)
    mirror = network()
    w, m = flat(mirror), torch.zeros(flat(mirror).numel(), dtype=torch.float64)
    eta, n, B, tau = 0.02, N, 8, 300.0
    for step, batch in enumerate(private.loader(data(), yield_empty=True)):
        put(mirror, w)
        each = gradients_of_each(mirror, batch)
        clipped = sum((float(rule(g.norm())) * g for g in each), torch.zeros_like(w))
        drift = clipped / B - prior.log_density_gradient(w) / n
        assert private.step(loss_fn(model, batch))
        noise = math.sqrt(2 * eta * (1 - momentum) * tau / n) * source.noise(3, step)
        m = momentum * m + drift + noise / eta
        w = w - eta * m
        torch.testing.assert_close(flat(model), w, rtol=1e-10, atol=1e-12)
    assert private.ledger.events == chain.plan().events


@pytest.mark.usefixtures("fine_grid")
@pytest.mark.parametrize("inertia", [None, 7.0])
def test_the_steps_of_sgnht_equal_the_formula_in_a_plain_loop(inertia: float | None) -> None:
    model, source = network(), Remembered()
    eta, n, B, tau, prior = 0.02, N, 8, 300.0, GaussianPrior(0.7)
    chain = SGNHT(cw.Poisson(N, 8), 9, cw.Abadi(0.5), eta, tau, 0.8, prior, inertia=inertia)
    optimizer = LangevinOptimizer(model, chain)
    private = cw.Private(chain.plan(), model, optimizer, seed=3, noise=source)
    mirror = network()
    w, m, mu = flat(mirror), torch.zeros(flat(mirror).numel(), dtype=torch.float64), 0.8
    Q, seen = inertia or 2 / (1 - 0.8) ** 2, []
    for step, batch in enumerate(private.loader(data(), yield_empty=True)):
        put(mirror, w)
        clipped = sum((min(1.0, 0.5 / float(g.norm())) * g for g in gradients_of_each(mirror, batch)), 0 * w)
        assert private.step(loss_fn(model, batch))
        noise = math.sqrt(2 * eta * (1 - 0.8) * tau / n) * source.noise(3, step)
        after = mu * m + clipped / B - prior.log_density_gradient(w) / n + noise / eta
        temperature = eta * n * float(((m + after) / 2).square().mean())
        m, w = after, w - eta * after
        mu = max(0.0, mu - (temperature / tau - 1) / Q)
        seen.append(mu)
        torch.testing.assert_close(flat(model), w, rtol=1e-10, atol=1e-12)
        assert optimizer.friction == pytest.approx(1 - mu, rel=1e-10)
    assert len(set(seen)) == 9
    assert private.ledger.events == chain.plan().events
    assert chain.noise_multiplier() == chain_of(momentum=0.8, temperature=tau).noise_multiplier()


def test_the_noise_multiplier_is_the_formula_and_the_map_of_section_4_4() -> None:
    chain = chain_of(clip=cw.Abadi(2.5), learning_rate=0.03, temperature=1.7)
    assert chain.noise_multiplier() == pytest.approx(math.sqrt(2 * 0.03 * 1.7 / N) * 8 / (0.03 * 2.5), rel=1e-12)
    section = to_dp_sgd(SGLD(2 * 0.03 / N, 8, N, 1.7), sensitivity=2.5)
    assert chain.noise_multiplier() == pytest.approx(section.noise_multiplier, rel=1e-12)
    assert section.learning_rate == pytest.approx(0.03, rel=1e-12)


def test_the_printed_form_has_noise_of_variance_eta() -> None:
    chain = chain_of(temperature=printed_temperature(N))
    per_step = chain.learning_rate * chain.noise_multiplier() * 0.5 / 8  # type: ignore[operator]
    assert per_step**2 == pytest.approx(0.02, rel=1e-12)


class Chains(nn.Module):
    """Many independent chains on one linear-Gaussian model: the losses of all are added."""

    def __init__(self, chains: int, features: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(chains, features, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w.T


def linear_gaussian(n: int = 40, s: float = 0.5) -> tuple[TensorDataset, Tensor, Tensor]:
    """Data with the mean and covariance of the posterior under a prior N(0, 1) and noise N(0, s^2)."""
    g = torch.Generator().manual_seed(5)
    x = torch.randn(n, 2, generator=g, dtype=torch.float64) @ torch.tensor([[1.0, 0.5], [0.0, 0.8]]).double()
    y = x @ torch.tensor([1.0, -2.0], dtype=torch.float64) + s * torch.randn(n, generator=g, dtype=torch.float64)
    covariance = torch.linalg.inv(x.T @ x / s**2 + torch.eye(2, dtype=torch.float64))
    return TensorDataset(x, y), covariance @ x.T @ y / s**2, covariance


def run_chains(R: float, momentum: float, temperature: float = 1.0) -> Tensor:
    """Draws after burn-in of 300 chains, shape (draws, 2)."""
    ds, _, _ = linear_gaussian()
    model = Chains(300, 2)
    chain = Langevin(
        cw.FullBatch(40), 260, cw.Abadi(R), 0.02 if momentum == 0 else 0.005, temperature, momentum, GaussianPrior(1.0),
        burn_in=200, thin=20,
    )  # fmt: skip
    optimizer = LangevinOptimizer(model, chain)
    private = cw.Private(chain.plan(accept_vacuous=True), model, optimizer, seed=1)
    for x, y in private.loader(ds):
        private.step((model(x) - y.unsqueeze(1)).square().sum(1) / (2 * 0.5**2))
    return torch.stack([sample["w"] for sample in optimizer.posterior]).reshape(-1, 2)


@pytest.mark.slow
@pytest.mark.parametrize("momentum", [0.0, 0.8])
def test_the_posterior_of_a_linear_gaussian_model_is_recovered_as_r_grows(momentum: float) -> None:
    _, mean, covariance = linear_gaussian()
    worst = []
    for R in (30.0, 100.0, 1e6):
        draws = run_chains(R, momentum)
        off_mean = float((draws.mean(0) - mean).abs().max() / covariance.diag().sqrt().min())
        off_spread = float((torch.cov(draws.T) - covariance).norm() / covariance.norm())
        worst.append((off_mean, off_spread))
    assert worst[0][0] > 1.0  # clipped gradients stop short of the mean
    assert worst[0][0] > 5 * max(worst[1][0], worst[2][0])
    assert worst[2][0] < 0.15 and worst[2][1] < 0.15


def test_temperature_scales_the_covariance() -> None:
    _, _, covariance = linear_gaussian()
    hot = torch.cov(run_chains(1e6, 0.0, temperature=printed_temperature(40)).T)
    torch.testing.assert_close(hot / 20, covariance, rtol=0.2, atol=0.1 * float(covariance.norm()))


def sampled(
    kind: type[Langevin], sampling: Any, noise: float = 1.0, momentum: float = 0.8, steps: int = 440
) -> tuple[Tensor, LangevinOptimizer]:
    """Draws of 300 chains that share a thermostat; `noise` times what the chain was planned with is added."""
    ds, _, _ = linear_gaussian()
    model = Chains(300, 2)
    chain = kind(
        sampling, steps, cw.Abadi(1e6), 0.02 if sampling == cw.FullBatch(40) else 0.005, 1.0, momentum,
        GaussianPrior(1.0), burn_in=200, thin=20,
    )  # fmt: skip
    optimizer = LangevinOptimizer(model, chain)
    plan = chain.plan(accept_vacuous=True)
    plan = replace(plan, noise_multiplier=noise * chain.noise_multiplier())
    private = cw.Private(plan, model, optimizer, seed=1)
    for x, y in private.loader(ds):
        private.step((model(x) - y.unsqueeze(1)).square().sum(1) / (2 * 0.5**2))
    return torch.stack([sample["w"] for sample in optimizer.posterior]).reshape(-1, 2), optimizer


def off(draws: Tensor) -> tuple[float, float, float]:
    """How far mean and covariance are from the posterior's, in its units; and the temperature of the draws."""
    _, mean, covariance = linear_gaussian()
    found = torch.cov(draws.T)
    off_mean = float((draws.mean(0) - mean).abs().max() / covariance.diag().sqrt().min())
    temperature = float((torch.linalg.inv(covariance) @ found).trace() / 2)
    return off_mean, float((found - covariance).norm() / covariance.norm()), temperature


class LastVelocity(LangevinOptimizer):
    """A wrong thermostat, with the last velocity instead of the mean of two."""

    def step(self, closure: Any = None) -> None:
        (group,) = self.param_groups
        momentum, chain = group["thermostat"], self._chain
        super().step()
        energy = sum(float(self.state[p]["momentum_buffer"].square().mean()) for p in group["params"])
        assert isinstance(chain, SGNHT)
        group["thermostat"] = chain.momentum_after(momentum, measured=group["lr"] * chain.records * energy)


@pytest.mark.parametrize(("momentum", "noise"), [(0.8, 1.0), (0.5, 1.0), (0.8, 2.0)])
def test_sgnht_recovers_the_posterior_whatever_the_size_of_the_noise(momentum: float, noise: float) -> None:
    """Noise of twice the planned size needs four times the friction, and the thermostat finds it."""
    draws, optimizer = sampled(SGNHT, cw.FullBatch(40), noise, momentum)
    off_mean, off_spread, temperature = off(draws)
    assert off_mean < 0.15 and off_spread < 0.12 and abs(temperature - 1) < 0.06
    assert optimizer.friction == pytest.approx((1 - momentum) * noise**2, rel=0.1)


def test_sghmc_with_the_wrong_friction_does_not() -> None:
    _, off_spread, temperature = off(sampled(Langevin, cw.FullBatch(40), 2.0)[0])
    assert off_spread > 2 and temperature == pytest.approx(4.0, rel=0.1)


@pytest.mark.parametrize("momentum", [0.8, 0.5])
def test_a_thermostat_on_the_last_velocity_fails_the_same_test(
    monkeypatch: pytest.MonkeyPatch, momentum: float
) -> None:
    monkeypatch.setitem(sampled.__globals__, "LangevinOptimizer", LastVelocity)
    assert off(sampled(SGNHT, cw.FullBatch(40), 1.0, momentum)[0])[2] < 0.94


@pytest.mark.slow
def test_the_thermostat_absorbs_the_noise_of_batches() -> None:
    """Batches of four: their noise makes SGHMC a third too hot, by the trace; the thermostat keeps the mean at 1."""
    hot = off(sampled(Langevin, cw.Poisson(40, 4), steps=1_800)[0])[2]
    kept, optimizer = sampled(SGNHT, cw.Poisson(40, 4), steps=1_800)
    assert hot > 1.25
    assert abs(off(kept)[2] - 1) < 0.1
    assert optimizer.friction > 0.22


@pytest.mark.usefixtures("fine_grid")
@pytest.mark.parametrize("clip", [cw.Abadi(0.3), cw.Layerwise(cw.Abadi(0.3)), cw.Groupwise({"*": cw.Abadi(0.3)})])
def test_every_style_gives_every_weight_the_same_noise(clip: Any) -> None:
    model, source = network(), Remembered()
    chain = chain_of(clip=clip, sampling=cw.FullBatch(N), temperature=50.0)
    before = flat(model)
    private = cw.Private(
        chain.plan(model), model, LangevinOptimizer(model, chain), seed=0, noise=source, own_batches=True
    )
    private.step(loss_fn(model, data().tensors) * 0)
    spread = (flat(model) - before) / source.noise(0, 0)
    torch.testing.assert_close(spread, torch.full_like(spread, -math.sqrt(2 * 0.02 * 50.0 / N)))


def test_calibration_meets_the_target_at_the_temperature() -> None:
    chain = Langevin(cw.Poisson(1_000, 50), 100, cw.Abadi(0.4), temperature=0.5, momentum=0.9)
    chain = chain.calibrate(epsilon=2.0, delta=1e-4)
    assert 1.99 < chain.plan().epsilon(1e-4) <= 2.0
    assert chain.temperature == 0.5
    thermostat = SGNHT(cw.Poisson(1_000, 50), 100, cw.Abadi(0.4), temperature=0.5).calibrate(epsilon=2.0, delta=1e-4)
    assert isinstance(thermostat, SGNHT) and thermostat.plan() == chain.plan()
    with pytest.raises(InvalidPlan, match="no learning_rate yet"):
        chain_of(learning_rate=None).plan()


def test_the_ledger_charges_the_equivalent_noise_and_vacuous_chains_are_refused() -> None:
    chain = chain_of(sampling=cw.Poisson(10_000, 100), steps=1_000, clip=cw.Abadi(10.0), learning_rate=0.01)
    noise = chain.noise_multiplier()
    assert noise == pytest.approx(math.sqrt(2 / (10_000 * 0.01)) * 10, rel=1e-12)
    assert chain.plan().epsilon(1e-5) == cw.epsilon(noise, cw.Poisson(10_000, 100), 1_000, 1e-5)
    with pytest.raises(InvalidPlan, match=r"multiplier 0\.0141 .*epsilon is at least \d.* at delta 0\.0001"):
        chain_of(sampling=cw.Poisson(10_000, 100), steps=1_000, clip=cw.Abadi(1_000.0), learning_rate=0.01).plan()
    with pytest.raises(InvalidPlan, match=r"multiplier 0\.5 .*epsilon is \d"):
        chain_of(sampling=cw.FullBatch(100), steps=30, clip=cw.Abadi(20.0), learning_rate=2.0).plan()
    with pytest.raises(InvalidPlan, match=r"multiplier 0 .*epsilon is infinite"):
        chain_of(temperature=1e-300, learning_rate=1e-300).plan()
    open_chain = chain_of(clip=cw.Abadi(1e6))
    assert open_chain.plan(accept_vacuous=True).noise_multiplier == open_chain.noise_multiplier()


@pytest.mark.parametrize("noise", [0.1, 0.2, 0.5, 2.0])
@pytest.mark.parametrize("sampling", [cw.Poisson(1_000, 50), cw.FullBatch(1_000), cw.Shuffled(1_000, 50)], ids=repr)
def test_the_lower_end_of_epsilon_is_one(noise: float, sampling: Any) -> None:
    event = cw.GaussianSteps(sampling, noise, 30)
    least, found = least_epsilon(event, 1e-3), cw.Ledger([event]).epsilon(1e-3)
    assert 0 <= least <= found * (1 + 1e-9)
    assert least > 40 or noise > 0.1


@pytest.mark.parametrize("kind", [Langevin, SGNHT])
def test_samples_are_kept_after_burn_in_and_thinning_and_survive_a_resume(kind: Any, tmp_path: Path) -> None:
    chain = kind(
        cw.Poisson(N, 8), 11, cw.Abadi(0.5), 0.02, burn_in=3, thin=2, momentum=0.5, temperature=100.0
    )  # fmt: skip

    def begin() -> tuple[nn.Module, LangevinOptimizer]:
        model = network()
        return model, LangevinOptimizer(model, chain)

    model, optimizer = begin()
    private = cw.Private(chain.plan(), model, optimizer, seed=4)
    visited = []
    for batch in private.loader(data(), yield_empty=True):
        private.step(loss_fn(model, batch))
        visited.append(flat(model))
    torch.testing.assert_close(optimizer.posterior.matrix(), torch.stack(visited[4::2]), rtol=0, atol=0)

    model, first = begin()
    private = cw.Private(chain.plan(), model, first, seed=4)
    for batch in private.loader(data(), yield_empty=True):
        private.step(loss_fn(model, batch))
        if private.steps_done == 6:
            private.save(tmp_path / "run.ckpt")
            break
    model, second = begin()
    private = cw.Private.resume(tmp_path / "run.ckpt", model, second)
    for batch in private.loader(data()):
        private.step(loss_fn(model, batch))
    assert len(second.posterior) == 4
    torch.testing.assert_close(second.posterior.matrix(), optimizer.posterior.matrix(), rtol=0, atol=0)
    assert second.friction == optimizer.friction
    assert (second.friction == 0.5) is (kind is Langevin)


def test_the_state_of_one_kind_of_chain_is_refused_by_the_other() -> None:
    kinds = [SGNHT, Langevin]
    for kind, other in (kinds, kinds[::-1]):
        chains = [each(cw.FullBatch(N), 6, cw.Abadi(0.5), 0.02, 100.0, 0.5) for each in (kind, other)]
        model = network()
        saved = LangevinOptimizer(model, chains[0]).state_dict()
        optimizer = LangevinOptimizer(model, chains[1])
        optimizer.load_state_dict(saved)
        with pytest.raises(InvalidPlan, match=f"another kind of chain than {other.__name__}"):
            optimizer.step()


def test_friction_is_at_most_one_and_comes_back() -> None:
    """A chain that begins far away moves fast; the thermostat brakes, and does not turn the weights round."""
    chain = SGNHT(cw.FullBatch(N), 6, cw.Abadi(0.5), 0.02, momentum=0.9)
    assert chain.momentum_after(0.9, measured=1e12) == 0.0
    assert chain.momentum_after(0.0, measured=0.0) == pytest.approx(0.1**2 / 2)
    assert replace(chain, temperature=4.0).momentum_after(0.9, measured=4.0) == 0.9


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"momentum": 0.0}, "acts on a velocity"),
        ({"momentum": 1.0}, "momentum"),
        ({"inertia": 0.0}, "inertia"),
        ({"inertia": math.inf}, "inertia"),
        ({"temperature": -1.0}, r"SGNHT\(temperature"),
        ({"clip": cw.MixUp(cw.Abadi(0.1), cw.Abadi(2.0), 0.5)}, "schedule"),
        ({"clip": cw.NoClip()}, "does not bound"),
        ({"sampling": cw.Poisson(rate=0.1, batch_size=8)}, "needs it"),
    ],
)
def test_thermostats_that_make_no_sense_are_refused(changes: dict[str, Any], message: str) -> None:
    fields: dict[str, Any] = {"sampling": cw.Poisson(N, 8), "steps": 6, "clip": cw.Abadi(0.5), **changes}
    with pytest.raises(InvalidPlan, match=message):
        SGNHT(**fields)


def test_by_default_half_is_burn_in_and_thirty_samples_are_kept() -> None:
    chain = chain_of(steps=1_000)
    assert (chain.first, chain.every) == (500, 16)
    assert sum(map(chain.keeps, range(1, 1_001))) == 31
    assert [step for step in range(1, 7) if chain_of().keeps(step)] == [4, 5, 6]


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.drop, self.layer = nn.Dropout(0.9), nn.Linear(3, 2).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.drop(x))


def test_the_average_over_the_posterior_beside_the_point_estimate() -> None:
    torch.manual_seed(0)
    model = Classifier()
    x, labels = torch.randn(50, 3).double(), torch.arange(50) % 2
    samples = tuple(
        {name: torch.randn_like(p) for name, p in model.named_parameters()} for _ in range(4)
    )  # fmt: skip
    posterior = Posterior(samples)
    before = flat(model)
    by_hand = torch.stack([(x @ s["layer.weight"].T + s["layer.bias"]).softmax(1) for s in samples]).mean(0)
    torch.testing.assert_close(posterior.probabilities(model, x), by_hand)
    found = posterior.evaluate(model, x, labels, batch_size=7)
    assert found.average == cw.calibration.evaluate(by_hand, labels)
    assert found.point == cw.calibration.evaluate(model.layer(x).softmax(1).detach(), labels)
    assert found.samples == 4
    assert torch.equal(flat(model), before)
    assert model.training and model.drop.training
    halved = posterior.outputs(model, x, forward=lambda m, x: m(x) / 2)
    torch.testing.assert_close(halved, posterior.outputs(model, x) / 2)
    with pytest.raises(DataError, match="no sample yet"):
        Posterior(()).probabilities(model, x)


@dataclass(frozen=True)
class NotAPrior:
    std: float = 1.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"clip": cw.MixUp(cw.Abadi(0.1), cw.Abadi(2.0), 0.5)}, "schedule"),
        ({"clip": cw.NoClip()}, "does not bound"),
        ({"clip": cw.Layerwise(cw.Abadi(1.0), noise="per_layer")}, "its own temperature"),
        ({"learning_rate": -1.0}, "learning_rate"),
        ({"temperature": 0.0}, "temperature"),
        ({"momentum": 1.0}, "momentum"),
        ({"prior": NotAPrior()}, "expected a prior"),
        ({"burn_in": 6}, "burn_in"),
        ({"burn_in": 4, "thin": 3}, "thin"),
        ({"steps": 0}, "steps"),
    ],
)
def test_chains_that_make_no_sense_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidPlan, match=message):
        chain_of(**changes)


def test_layerwise_noise_needs_the_model() -> None:
    with pytest.raises(InvalidPlan, match="pass the model"):
        chain_of(clip=cw.Layerwise(cw.Abadi(1.0))).plan()


def test_a_scheduler_that_would_change_the_temperature_is_noticed() -> None:
    model, chain = network(), chain_of(sampling=cw.FullBatch(N), temperature=100.0)
    optimizer = LangevinOptimizer(model, chain)
    private = cw.Private(chain.plan(), model, optimizer, seed=0, own_batches=True)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    private.step(loss_fn(model, data().tensors))
    scheduler.step()
    before = flat(model)
    with pytest.raises(InvalidPlan, match="change the temperature"):
        private.step(loss_fn(model, data().tensors))
    assert torch.equal(flat(model), before)
    assert private.ledger.steps == 2


@pytest.mark.parametrize(("kind", "name"), [(GaussianPrior, "std"), (LaplacePrior, "scale")])
def test_priors_need_a_positive_scale(kind: Any, name: str) -> None:
    with pytest.raises(InvalidPlan, match=name):
        kind(0.0)


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
