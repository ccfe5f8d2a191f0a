"""A clipping norm that is learnt in private: what is released, how far one record moves it, and where the norm goes."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import clipwise as cw
from clipwise.mechanisms import ProjectedNorms, Rounds
from clipwise.noise import GaussianNoise
from tests.core.common import N, data, losses_of, mlp, plan, same, sgd, train, weights

SAMPLINGS = [
    cw.Poisson(1_000, 50),
    cw.Poisson(1_000, 50, max_batch_size=80),
    cw.Poisson(rate=0.05, batch_size=50),
    cw.FullBatch(50),
    cw.FixedSize(1_000, 50),
    cw.Shuffled(1_000, 50),
    cw.CyclicPoisson(1_000, 50, bands=4),
]


class Given(nn.Module):
    """A sample's gradient is the sample itself, whatever the weights are."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))

    def forward(self, x_BD: Tensor) -> Tensor:
        return x_BD @ self.weight


def alone(p: cw.Plan, size: int, **options: Any) -> tuple[cw.Private, Given]:
    """A run on its own batches whose gradients are the rows that it is given."""
    model = Given(size)
    return cw.Private(p, model, sgd(model, lr=1.0), own_batches=True, **options), model


def adaptive(**changes: Any) -> cw.AdaptiveClip:
    return cw.AdaptiveClip(**{"R": 1.0, "quantile": 0.5, "floor": 1e-3, **changes})


def released(p: cw.Plan, model: Given, private: cw.Private, x: Tensor) -> tuple[Tensor, float]:
    """The noisy sum, and the noisy count as the movement of R shows it."""
    clip, before = p.clip, private.bound
    assert isinstance(clip, cw.AdaptiveClip) and before is not None
    private.backward(model(x))
    assert private.release() and private.bound is not None and model.weight.grad is not None
    share = clip.quantile - math.log(private.bound / before) / clip.learning_rate
    return model.weight.grad.double() * p.batch_size, (share - 0.5) * p.batch_size


# What is released


@pytest.mark.parametrize("share", [0.01, 0.3])
def test_sum_and_count_have_the_noise_that_they_should_have_and_no_other(share: float) -> None:
    """z R / sqrt(1 - share) on every number of the sum, z / (2 sqrt(share)) on the count, independent of each other.

    R is where it stood in the same step: the noise follows it up and down.
    """
    z, size, steps, B = 1.5, 8, 1_000, 40
    clip = adaptive(R=2.0, learning_rate=0.4, share=share, quantile=0.9)
    p = plan(sampling=cw.FullBatch(B), steps=steps, clip=clip, noise_multiplier=z)
    private, model = alone(p, size, seed=0)
    x = torch.zeros(B, size)
    x[: B // 2, 0] = 3.0  # half of them at length 3: R ends between the two
    units, counts, bounds = [], [], []
    for _ in range(steps):
        R = private.bound
        assert R is not None
        total, count = released(p, model, private, x)
        exact = torch.zeros(size, dtype=torch.float64)
        exact[0] = B // 2 * min(3.0, R)
        bits = B / 2 if R >= 3.0 else 0.0
        units.append((total - exact) / R)
        counts.append(count - bits)
        bounds.append(R)
    noise, second = torch.stack(units), torch.tensor(counts, dtype=torch.float64)
    assert max(bounds) > 1.3 * min(bounds)  # it did move
    tolerance = 4 / math.sqrt(2 * steps)
    assert noise.std(0) / (z / math.sqrt(1 - share)) == pytest.approx(torch.ones(size), rel=tolerance)
    assert float(second.std()) == pytest.approx(z / (2 * math.sqrt(share)), rel=tolerance)
    both = torch.cat([noise, second.unsqueeze(1)], 1)
    assert (both.mean(0) / both.std(0)).abs().max() < 4.5 / math.sqrt(steps)
    correlation = torch.corrcoef(both.T) - torch.eye(size + 1)
    assert correlation.abs().max() < 4.5 / math.sqrt(steps)


def test_the_split_is_that_of_andrew_and_others() -> None:
    """z_delta = (z^-2 - (2 sigma_b)^-2)^(-1/2), for every z and share."""
    for z, share in itertools.product((0.3, 1.0, 40.0), (1e-4, 0.01, 0.5, 0.99)):
        gradient, count = adaptive(share=share).split(z)
        assert gradient == pytest.approx((z**-2 - (2 * count) ** -2) ** -0.5, rel=1e-9)


@pytest.mark.parametrize("z", [0.7, 3.0])
def test_a_record_moves_sum_and_count_together_by_no_more_than_one_deviation_of_z(z: float) -> None:
    """In units of the noise that is really drawn: 1/z for a record that is blanked, added or removed, 2/z for another.

    Records are anything: long, short, zero, not finite, at the edge of R.
    """
    g = torch.Generator().manual_seed(0)
    R, size = 0.8, 5
    p = plan(sampling=cw.FullBatch(9), clip=adaptive(R=R, share=0.1), noise_multiplier=z, steps=500)
    private, model = alone(p, size)
    edge = torch.nn.functional.normalize(torch.randn(1, size, generator=g), dim=1) * R
    records = [
        *(torch.randn(1, size, generator=g) * scale for scale in (1e-30, 1e-3, 0.3, 1.0, 50.0, 1e18, 1e30)),
        *(edge * factor for factor in (1.0, 1 - 1e-6, 1 + 1e-6, -1.0, -9.0)),
        torch.zeros(1, size),
        torch.full((1, size), math.nan),
        torch.full((1, size), math.inf),
    ]
    rest = torch.randn(8, size, generator=g)

    def vector(*more: Tensor) -> Tensor:
        """Sum and count in units of their noise."""
        private.backward(model(torch.cat([rest, *more])))
        scaled, total = private._release._scaled, private._batch.sums
        assert scaled is not None and total is not None and scaled[0] is private.style
        sums, count = scaled[2]
        found = torch.cat([total[0].double() / sums, torch.tensor([private._batch.within / count])])
        private._batch.forget()
        return found

    without = vector()
    contributions = [vector(record) - without for record in records]
    lengths = [float(torch.linalg.vector_norm(each)) for each in contributions]
    assert max(lengths) <= 1 / z * (1 + 1e-5)
    assert max(lengths) >= 1 / z * (1 - 1e-5)  # and not less either: nothing is given away
    assert lengths[-2:] == [0.0, 0.0]
    apart = [float(torch.linalg.vector_norm(a - b)) for a, b in itertools.combinations(contributions, 2)]
    assert 1 / z < max(apart) <= 2 / z * (1 + 1e-5)


def test_noise_and_clipping_read_the_same_norm_at_the_same_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the norm of a step is known before its first sample."""
    drawn, made = [], GaussianNoise.release

    def noted(self: GaussianNoise, sums: Any, stds: Any, *more: Any) -> Any:
        drawn.append(list(stds))
        return made(self, sums, stds, *more)

    monkeypatch.setattr(GaussianNoise, "release", noted)
    z, clip = 1.2, adaptive(learning_rate=1.0)
    p = plan(sampling=cw.Poisson(N, 6), steps=30, clip=clip, noise_multiplier=cw.Steps({0: z, 10: 2 * z}))
    model = mlp()
    private = cw.Private(p, model, sgd(model), seed=0)
    norms = []
    for x, y in private.loader(data(), physical_batch_size=2, yield_empty=True):
        style = private.style
        norms += [style.sensitivity(1)] if not private._batch.parts else []
        assert norms[-1] == private.bound == style.sensitivity(1)
        private.step(losses_of(model, x, y))
        assert all(part.style is style for part in private._batch.parts)
    assert len(set(norms)) > 25  # they move; the lowest and the highest may be met twice
    for step, (stds, R) in enumerate(zip(drawn, norms, strict=True)):
        gradient, count = clip.split(z if step < 10 else 2 * z)
        assert stds == [gradient * R] * 4 + [count]
    assert private.ledger.events == p.events


def test_the_norm_of_a_step_depends_on_earlier_releases_and_on_nothing_else() -> None:
    """Without noise the exact counts show it: what a step sees moves the next norm, and only that."""
    p = plan(sampling=cw.FullBatch(4), clip=adaptive(learning_rate=0.5), noise_multiplier=0.0, steps=6)
    seen: dict[int, list[float]] = {}
    for changed in range(6):
        private, model = alone(p, 2)
        seen[changed] = []
        for step in range(6):
            seen[changed].append(private.style.sensitivity(1))
            private.step(model(torch.full((4, 2), 0.01 if step == changed else 7.0)))
    for changed, norms in seen.items():
        for other, others in seen.items():
            first = min(changed, other)
            assert norms[: first + 1] == others[: first + 1]
            assert changed == other or first == 5 or norms[first + 1] != others[first + 1]


# What it costs


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=repr)
def test_a_plan_costs_what_the_plain_one_costs(sampling: Any) -> None:
    plain = plan(sampling=sampling, noise_multiplier=20.0)
    p = replace(plain, clip=adaptive())
    assert p.events == plain.events and p.epsilon(1e-4) == plain.epsilon(1e-4)
    for relation in ("add_remove", "replace_one", "zero_out"):
        try:
            expected = plain.epsilon(1e-4, relation=relation)  # type: ignore[arg-type]
        except cw.ClipwiseError:
            with pytest.raises(cw.ClipwiseError):
                p.epsilon(1e-4, relation=relation)  # type: ignore[arg-type]
        else:
            assert p.epsilon(1e-4, relation=relation) == expected  # type: ignore[arg-type]
    record = json.loads(json.dumps(p.to_dict()))
    assert cw.Plan.from_dict(record) == p and cw.Plan.from_dict(record).to_dict() == p.to_dict()


def test_noise_is_found_for_a_target_as_for_the_plain_plan() -> None:
    plain = plan(sampling=cw.Poisson(1_000, 50), noise_multiplier=None)
    found = replace(plain, clip=adaptive()).calibrate(2.0, 1e-4)
    assert found.clip == adaptive() and 0.998 * 2 < found.epsilon(1e-4) <= 2
    assert found.noise_multiplier == plain.calibrate(2.0, 1e-4).noise_multiplier
    shaped = replace(found, noise_multiplier=cw.Steps({0: 2.0, 3: 1.0})).calibrate(2.0, 1e-4)
    assert 0.998 * 2 < shaped.epsilon(1e-4) <= 2


def test_a_run_has_one_event_per_step_and_ends_with_its_plan() -> None:
    p = plan(clip=adaptive())
    model = mlp()
    private = cw.Private(p, model, sgd(model))
    for done, (x, y) in enumerate(private.loader(data(), yield_empty=True)):
        assert private.ledger.steps == done
        private.step(losses_of(model, x, y))
    assert private.ledger.events == (cw.GaussianSteps(p.sampling, 1.0, 6),)
    bound, before = private.bound, weights(model)
    with pytest.raises(cw.BudgetSpent):
        private.step(losses_of(model, *data().tensors))
    assert private.bound == bound and same(weights(model), before) and private.ledger.steps == 6


# Where the norm goes


@pytest.mark.parametrize("quantile", [0.2, 0.5, 0.9])
def test_the_norm_finds_the_quantile_of_norms(quantile: float) -> None:
    """From far above and from far below, under Poisson sampling and noise."""
    g = torch.Generator().manual_seed(1)
    x = torch.nn.functional.normalize(torch.randn(400, 3, generator=g), dim=1)
    norms = torch.exp(torch.randn(400, 1, generator=g))
    expected = float(norms.quantile(quantile))
    dataset = TensorDataset(x * norms)
    for start in (0.02, 50.0):
        clip = adaptive(R=start, quantile=quantile, floor=1e-3, learning_rate=0.7)
        p = plan(sampling=cw.Poisson(400, 200), steps=110, clip=clip, noise_multiplier=1.0)
        model = Given(3)
        private, late = cw.Private(p, model, sgd(model, lr=0.01), seed=3), []
        for (batch,) in private.loader(dataset):
            private.step(model(batch))
            late += [math.log(private.bound or 0.0)] if private.steps_done > 60 else []
        assert math.exp(sum(late) / len(late)) == pytest.approx(expected, rel=0.15)


def test_the_norm_never_falls_below_its_floor_and_the_noise_stays_with_it() -> None:
    p = plan(sampling=cw.FullBatch(50), clip=adaptive(floor=0.25, learning_rate=1.0), steps=300)
    private, model = alone(p, 4)
    bounds, noise = [], []
    for _ in range(300):
        assert private.bound is not None
        bounds.append(private.bound)
        private.backward(model(torch.zeros(50, 4)))
        private.release()
        assert model.weight.grad is not None
        noise.append(model.weight.grad.double() * 50 / bounds[-1])
    assert min(bounds) == bounds[-1] == 0.25  # the floor itself, to the last bit
    assert float(torch.stack(noise[20:]).std()) == pytest.approx(1 / math.sqrt(0.99), rel=0.1)


def test_the_norm_stays_within_what_numbers_can_be() -> None:
    for R in (1e-30, 1.0, 1e29, 1e300):
        clip = cw.AdaptiveClip(R)
        assert clip.move(R, -1e300) == clip.highest and clip.move(R, 1e300) == clip.lowest == clip.floor
        assert R / 101 < clip.lowest <= R <= clip.highest <= max(R, 1e30)
        cw.Flat(cw.Abadi(clip.highest))
    tiny = torch.finfo(torch.float32).tiny
    assert cw.AdaptiveClip(tiny).lowest == tiny
    assert cw.AdaptiveClip(2.0).floor == 0.02 and cw.AdaptiveClip(2.0, 0.5, 2.0).floor == 2.0


# Batches


@pytest.mark.parametrize("physical", [1, 3, 7])
def test_the_counts_of_physical_batches_are_added(physical: int) -> None:
    """Without noise the norm is an exact function of the counts."""
    p = plan(clip=adaptive(quantile=0.3, learning_rate=0.7), noise_multiplier=0.0, steps=20)
    bounds: list[list[float | None]] = []
    for size in (None, physical):
        model = mlp()
        private = cw.Private(p, model, sgd(model, lr=0.01), seed=4)
        bounds.append([])
        for x, y in private.loader(data(), physical_batch_size=size):
            if private.step(losses_of(model, x, y)):
                bounds[-1].append(private.bound)
    assert bounds[0] == bounds[1] and len(set(bounds[0])) > 10


def test_an_empty_batch_counts_as_one_without_samples() -> None:
    """It moves the norm by a share of 1/2, which is what a centred count of nothing says, and draws its noise."""
    clip = adaptive(quantile=0.3, learning_rate=0.7)
    p = plan(sampling=cw.Poisson(N, 0.001), clip=clip, noise_multiplier=0.0, steps=3)
    model = mlp()
    private = cw.Private(p, model, sgd(model), seed=0)
    assert not list(private.loader(data())) and private.steps_done == 3
    assert private.bound == pytest.approx(math.exp(-3 * 0.7 * (0.5 - 0.3)))
    noisy = cw.Private(replace(p, noise_multiplier=1.0), model, sgd(model), seed=0)
    assert not list(noisy.loader(data())) and noisy.ledger.steps == 3 and noisy.bound != private.bound
    own, given = alone(replace(p, sampling=cw.Poisson(N, 4)), 2)
    own.step(given(torch.zeros(0, 2)))
    assert own.bound == pytest.approx(math.exp(-0.7 * (0.5 - 0.3)))


def test_samples_that_are_not_finite_count_for_nothing() -> None:
    p = plan(sampling=cw.FullBatch(8), clip=adaptive(), noise_multiplier=0.0)
    x = torch.tensor([[0.1, 0.0]] * 3 + [[5.0, 0.0]] * 2)
    bad = torch.tensor([[math.nan, 0.0], [math.inf, 1.0], [-math.inf, math.nan]])
    found = []
    for batch in (x, torch.cat([x, bad]), bad, bad[:1], x[:1]):
        private, model = alone(p, 2)
        private.step(model(batch))
        assert model.weight.isfinite().all()
        found.append(private.bound)
    assert found[0] == found[1] == pytest.approx(math.exp(-0.2 * 0.5 / 8))
    assert found[2] == found[3] == 1.0
    norms, left_out = torch.tensor([0.5, 0.5, 9.0, 9.0, math.nan]), torch.tensor([False, True, False, True, False])
    assert cw.AdaptiveClip.centred(norms, left_out, 1.0) == 0.0  # a finite norm of a loss that is not finite, too
    assert cw.AdaptiveClip.centred(norms[:2], left_out[:2], 1.0) == 0.5
    assert found[4] == pytest.approx(math.exp(-0.2 * 0.5 / 8))


def test_half_precision_counts_as_well() -> None:
    p = plan(sampling=cw.FullBatch(4), clip=adaptive(), noise_multiplier=0.0)
    model = Given(2).to(torch.bfloat16)
    private = cw.Private(p, model, sgd(model), own_batches=True)
    private.step(model(torch.tensor([[0.5, 0.0], [0.25, 0.0], [9.0, 0.0], [0.0, 0.5]], dtype=torch.bfloat16)))
    assert private.bound == pytest.approx(math.exp(-0.2 * 1 / 4))


# Saving


def seeded(p: cw.Plan, stop: int, path: Path | None = None, at: int = 0) -> tuple[nn.Module, cw.Private]:
    """A seeded run up to a step, saved before another one."""
    model = mlp(dropout=0.2)
    private = cw.Private(p, model, sgd(model), seed=5)
    for x, y in private.loader(data(), physical_batch_size=4):
        if private.step(losses_of(model, x, y)):
            if path is not None and private.steps_done == at:
                private.save(path)
            if private.steps_done == stop:
                break
    return model, private


def test_a_seeded_run_resumes_with_its_norm_bit_for_bit(tmp_path: Path) -> None:
    p = plan(clip=adaptive(learning_rate=0.9), steps=10)
    whole, reference = seeded(p, 10)
    seeded(p, 7, tmp_path / "run", at=4)  # and dies three steps later
    model = mlp(dropout=0.2)
    private = cw.Private.resume(tmp_path / "run", model, sgd(model))
    _, there = seeded(p, 4)
    assert private.bound == there.bound != adaptive().R
    train(private, model, data(), physical_batch_size=4)
    assert private.bound == reference.bound and same(weights(model), weights(whole))
    assert private.ledger.events == reference.ledger.events


def test_steps_whose_count_was_lost_stay_charged_and_leave_the_norm_where_it_was_saved(tmp_path: Path) -> None:
    p = plan(clip=adaptive(learning_rate=0.9), steps=10)
    model = mlp()
    private = cw.Private(p, model, sgd(model))
    bounds = [private.bound]
    for x, y in private.loader(data(), yield_empty=True):
        private.step(losses_of(model, x, y))
        bounds.append(private.bound)
        if private.steps_done == 4:
            private.save(tmp_path / "run")
        if private.steps_done == 7:
            break
    again = mlp()
    resumed = cw.Private.resume(tmp_path / "run", again, sgd(again))
    assert resumed.steps_done == 7 and resumed.bound == bounds[4] != bounds[7]
    assert [(e.reason, e.count) for e in resumed.ledger.events] == [("training", 4), ("interrupted", 3)]
    train(resumed, again, data())
    assert resumed.ledger.steps == 10 and resumed.epsilon(1e-4) == p.epsilon(1e-4)


def test_a_step_whose_noise_failed_is_spent_and_its_count_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    private, model = alone(plan(sampling=cw.FullBatch(4), clip=adaptive()), 2)
    private.step(model(torch.ones(4, 2)))
    bound = private.bound
    with monkeypatch.context() as patch:
        patch.setattr(GaussianNoise, "_release", lambda *given: (_ for _ in ()).throw(RuntimeError("no numbers")))
        with pytest.raises(RuntimeError, match="no numbers"):
            private.step(model(torch.ones(4, 2)))
    assert private.bound == bound and private.ledger.steps == private.steps_done == 2
    private.step(model(torch.ones(4, 2)))
    assert private.bound != bound and private.ledger.steps == 3


def test_the_norm_is_part_of_the_position() -> None:
    p = plan(clip=adaptive(floor=0.5))
    model = mlp()
    saved = cw.Private(p, model, sgd(model)).state_dict()
    assert saved["bound"] == 1.0
    for bound in (0.0, -1.0, 0.49, 1.1e6, math.inf, math.nan, "1.0", True, None):
        with pytest.raises(cw.CheckpointError, match="bound"):
            cw.Private(p, model, sgd(model)).load_state_dict({**saved, "bound": bound})
    with pytest.raises(cw.CheckpointError, match="keys"):
        cw.Private(p, model, sgd(model)).load_state_dict({k: v for k, v in saved.items() if k != "bound"})
    private = cw.Private(p, model, sgd(model))
    private.load_state_dict({**saved, "bound": 0.5})
    assert private.bound == 0.5 and private.style == cw.Flat(cw.Abadi(0.5))
    fixed = cw.Private(plan(), model, sgd(model))
    assert fixed.bound is None and "bound" not in fixed.state_dict() and fixed.style == cw.Flat(cw.Abadi(1.0))


# What is refused


def linear_chain() -> object:
    return cw.optim.Langevin(cw.FullBatch(10), 6, adaptive(), 0.01)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: plan(clip=adaptive(), sampling=cw.CyclicPoisson(N, 4, bands=4), correlation=cw.Banded(4)), "no proof"),
        (lambda: plan(clip=adaptive(), sampling=cw.Shuffled(N, 4), correlation=cw.Tree()), "no proof"),
        (lambda: plan(clip=adaptive(), mechanism=ProjectedNorms(60)), "no proof"),
        (lambda: cw.Layerwise(adaptive()), "expected a clipping rule"),  # type: ignore[arg-type]
        (lambda: cw.Groupwise({"*": adaptive()}), "expected a clipping rule"),  # type: ignore[dict-item]
        (lambda: cw.Flat(adaptive()), "expected a clipping rule"),  # type: ignore[arg-type]
        (lambda: cw.MixUp(adaptive(), cw.Abadi(1.0), 0.5), "got the schedule"),  # type: ignore[arg-type]
        (linear_chain, "one clipping style"),
        (lambda: cw.AdaptiveClip(1.0, 0.5, 1.1), "floor"),
        (lambda: cw.AdaptiveClip(1.0, 0.5, 0.0), "floor"),
        (lambda: cw.AdaptiveClip(1.0, 0.5, -1.0), "floor"),
        (lambda: cw.AdaptiveClip(1.0, 0.5, 1e-40), "floor"),
        (lambda: cw.AdaptiveClip(1.0, 0.5, math.nan), "floor"),
        (lambda: cw.AdaptiveClip(1.0, 0.5, True), "floor"),
        (lambda: cw.AdaptiveClip(1.0, 0.5, "1"), "floor"),  # type: ignore[arg-type]
    ],
)
def test_what_has_no_proof_is_refused(make: Callable[[], object], reason: str) -> None:
    with pytest.raises(cw.InvalidPlan, match=reason):
        make()


def test_steps_and_rounds_move_one_and_the_same_norm() -> None:
    """One class: the same gradients, as a batch of samples and as updates of users, move it alike."""
    clip, x = adaptive(learning_rate=0.5, quantile=0.3), torch.tensor([[0.2, 0.0], [0.0, 3.0], [0.5, 0.5]])
    p = plan(sampling=cw.FullBatch(3), clip=clip, noise_multiplier=0.0, steps=5)
    private, model = alone(p, 2)
    server = cw.federated.Server(replace(p, mechanism=Rounds()), Given(2))
    for _ in range(5):
        assert private.style == server.style and private.bound == server.bound
        before = model.weight.detach().clone()
        private.step(model(x))
        opened = server.open(range(3))
        update = server.close(
            [
                (k, cw.federated.Reply({"weight": g}, 1, within=float(g.norm()) <= opened.style.sensitivity(1)))
                for k, g in enumerate(x)
            ]
        )
        assert torch.allclose(update["weight"], before - model.weight)  # the server shortens what is too long
    assert private.bound == server.bound != 1.0


def test_a_norm_at_the_bound_is_within_it_and_a_bound_at_its_limit_is_the_limit() -> None:
    norms, none_bad = torch.tensor([1.0, 1.0, 2.0]), torch.zeros(3, dtype=torch.bool)
    assert cw.AdaptiveClip.centred(norms, none_bad, 1.0) == 0.5
    for floor in (0.1, 0.3, 0.7):  # exp(log(x)) is not x for some of them
        clip = cw.AdaptiveClip(1.0, quantile=0.5, floor=floor)
        assert clip.move(floor, within=0.5) == floor
