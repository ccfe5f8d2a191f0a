"""The private step: what the optimizer sees, what the ledger says, and what is refused."""

from __future__ import annotations

import copy
import math
import pickle
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor, nn

import clipwise as cw
from clipwise.clipping import Style
from clipwise.engine import run
from tests.core.common import N, data, loop_sum, losses_of, mlp, plan, same, sgd, train, weights
from tests.core.doubles import Constant, Recorder, Tied

X, Y = data().tensors


def test_an_ordinary_loop_trains_and_keeps_the_ledger() -> None:
    model, ds = mlp(), data()
    private = cw.Private(plan(steps=30, noise_multiplier=0.5), model, sgd(model), seed=0)
    before = float(losses_of(model, X, Y).detach().mean())
    train(private, model, ds)
    assert float(losses_of(model, X, Y).detach().mean()) < before
    assert private.steps_done == private.ledger.steps == 30
    assert private.ledger.events == private.plan.events
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("expected_size", [10, 12.5])
@pytest.mark.parametrize("size", [None, 3, 1])
def test_the_step_is_clipped_sum_plus_noise_over_the_expected_batch_size(
    size: int | None, expected_size: float
) -> None:
    model, ds = mlp(), data()
    optimizer, source = Recorder(model.parameters()), Constant(1.0)
    p = plan(noise_multiplier=0.7, clip=cw.Abadi(0.3), sampling=cw.Poisson(N, expected_size))
    private = cw.Private(p, model, optimizer, seed=1, noise=source)
    batches: list[list[tuple[Tensor, Tensor]]] = [[]]
    for x, y in private.loader(ds, physical_batch_size=size, yield_empty=True):
        batches[-1].append((x, y))
        if private.step(losses_of(model, x, y)):
            batches.append([])
    assert len(optimizer.seen) == 6 and source.steps == list(range(6))
    for seen, parts in zip(optimizer.seen, batches, strict=False):
        x, y = (torch.cat(column) for column in zip(*parts, strict=True))
        expected = [(s + 0.7 * 0.3) / expected_size for s in loop_sum(model, x, y, cw.Abadi(0.3))]
        for got, want in zip(seen, expected, strict=True):
            torch.testing.assert_close(got, want)


def test_the_noise_has_the_planned_standard_deviation() -> None:
    model = mlp()
    optimizer = Recorder(model.parameters())
    p = plan(steps=400, noise_multiplier=1.3, clip=cw.Abadi(0.5), sampling=cw.FullBatch(N))
    private = cw.Private(p, model, optimizer, seed=0, own_batches=True)
    for _ in range(400):
        private.step(losses_of(model, X, Y) * 0)
    noise = torch.cat([g.reshape(-1) for seen in optimizer.seen for g in seen]).double() * N / (1.3 * 0.5)
    assert stats.kstest(noise.numpy(), "norm").pvalue > 1e-4
    assert stats.chi2(noise.numel()).sf(float(noise.square().sum())) > 1e-4


@dataclass(frozen=True)
class Ramp:
    """R grows with every step, and a fresh object is handed out at every question."""

    def at(self, step: int, steps: int) -> Style:
        return cw.Flat(cw.Abadi(0.01 * (step + 1)))


@pytest.mark.usefixtures("fine_grid")
@pytest.mark.parametrize(
    "clip", [cw.MixUp(cw.Abadi(0.01), cw.Abadi(2.0), switch_at=0.5), Ramp()], ids=["mixup", "ramp"]
)
def test_noise_and_clipping_agree_at_every_step_of_a_schedule(clip: Any) -> None:
    model = mlp()
    optimizer = Recorder(model.parameters())
    p = plan(steps=8, clip=clip, noise_multiplier=1.5, sampling=cw.FullBatch(1))
    quiet = cw.Private(
        plan(steps=8, clip=clip, noise_multiplier=0.0, sampling=cw.FullBatch(1)), model, optimizer, own_batches=True
    )
    noisy = cw.Private(p, model, optimizer, noise=Constant(1.0), own_batches=True)
    x, y = X[:1], Y[:1] + 1000  # one sample, huge loss: the gradient is clipped for sure
    for step in range(8):
        bound = p.style(step).rule.sensitivity  # type: ignore[union-attr]
        quiet.step(losses_of(model, x, y))
        noisy.step(losses_of(model, x, y))
        signal, total = optimizer.seen[-2], optimizer.seen[-1]
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in signal))
        assert norm == pytest.approx(bound, rel=1e-5)
        for s, t in zip(signal, total, strict=True):
            torch.testing.assert_close(t - s, torch.full_like(s, 1.5 * bound), rtol=1e-4, atol=1e-6)


@pytest.mark.usefixtures("fine_grid")
@pytest.mark.parametrize("noise", ["joint", "per_layer"])
def test_layerwise_noise_keeps_the_noise_multiplier_of_the_whole_vector(noise: Any) -> None:
    model = mlp()
    optimizer = Recorder(model.parameters())
    rules = {"0": cw.Abadi(3.0), "3": cw.Abadi(4.0)}
    p = plan(clip=cw.Layerwise(rules, noise=noise), noise_multiplier=2.0)
    cw.Private(p, model, optimizer, noise=Constant(1.0), own_batches=True).step(torch.zeros(0))
    stds = [float(g.reshape(-1)[0]) * 10 for g in optimizer.seen[0]]
    assert stds[0] == stds[1] and stds[2] == stds[3]
    if noise == "joint":
        assert stds == pytest.approx([2.0 * 5.0] * 4)
    else:
        assert stds == pytest.approx([2.0 * math.sqrt(2) * r for r in (3.0, 3.0, 4.0, 4.0)])
    ratio = 1 / math.sqrt((3.0 / stds[0]) ** 2 + (4.0 / stds[2]) ** 2)
    assert ratio == pytest.approx(2.0)


@pytest.mark.usefixtures("fine_grid")
def test_groupwise_noise_goes_to_the_groups_of_the_names() -> None:
    model = mlp()
    optimizer = Recorder(model.parameters())
    clip = cw.Groupwise({"*.bias": cw.Abadi(1.0), "*": cw.Abadi(2.0)}, noise="per_layer")
    cw.Private(plan(clip=clip), model, optimizer, noise=Constant(1.0), own_batches=True).step(torch.zeros(0))
    stds = [float(g.reshape(-1)[0]) * 10 / math.sqrt(2) for g in optimizer.seen[0]]
    assert stds == pytest.approx([2.0, 1.0, 2.0, 1.0])


@pytest.mark.parametrize("rule", [cw.Abadi(0.1), cw.Normalize(0.1), cw.Automatic(0.1, 0.01), cw.Global(0.1)], ids=repr)
@pytest.mark.parametrize("scale", [1.0, 2.0**16, 2.0**-16])
def test_no_loss_scale_gets_past_the_bound(rule: Any, scale: float) -> None:
    model = mlp()
    optimizer = Recorder(model.parameters())
    private = cw.Private(plan(noise_multiplier=0.0, clip=rule), model, optimizer, own_batches=True)
    for i in range(5):
        private.step(losses_of(model, X[i : i + 1], Y[i : i + 1]) * scale)
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in optimizer.seen[-1]))
        assert norm * 10 <= 0.1 * (1 + 1e-5)


def test_normalised_gradients_do_not_know_the_loss_scale() -> None:
    model = mlp()
    optimizer = Recorder(model.parameters())
    private = cw.Private(plan(noise_multiplier=0.0, clip=cw.Normalize()), model, optimizer, own_batches=True)
    private.step(losses_of(model, X, Y))
    private.step(losses_of(model, X, Y) * 2.0**16)
    for a, b in zip(*optimizer.seen, strict=True):
        torch.testing.assert_close(a, b)


def test_neighbouring_data_sets_have_the_same_denominator() -> None:
    model = mlp()
    optimizer = Recorder(model.parameters())
    rule = cw.Abadi(0.1)
    private = cw.Private(plan(noise_multiplier=0.0, clip=rule), model, optimizer, own_batches=True)
    private.step(losses_of(model, X, Y))
    private.step(losses_of(model, X[:-1], Y[:-1]))
    moved = math.sqrt(sum(float((a - b).double().square().sum()) for a, b in zip(*optimizer.seen, strict=True)))
    assert moved * 10 <= 0.1 * (1 + 1e-4)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_one_bad_sample_contributes_nothing_and_is_counted(poison: float) -> None:
    model = mlp()
    optimizer = Recorder(model.parameters())
    private = cw.Private(plan(noise_multiplier=0.0), model, optimizer, own_batches=True)
    x = X.clone()
    x[7] = poison
    good = torch.arange(N) != 7
    private.step(losses_of(model, x, Y))
    assert private.last is not None and private.last.bad_samples == 1 and private.last.batch_size == N
    private.step(losses_of(model, X[good], Y[good]))
    assert private.last.bad_samples == 0
    for a, b in zip(*optimizer.seen, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.usefixtures("fine_grid")
def test_an_empty_batch_is_noise_alone_and_is_charged() -> None:
    model = mlp()
    optimizer = Recorder(model.parameters())
    private = cw.Private(plan(), model, optimizer, noise=Constant(1.0), own_batches=True)
    assert private.step(torch.zeros(0)) and private.ledger.steps == 1
    for g in optimizer.seen[0]:
        torch.testing.assert_close(g, torch.full_like(g, 0.1))
    assert private.last is not None and private.last.batch_size == 0 and math.isnan(private.last.norm_quantiles[2])


@pytest.mark.parametrize("sampling", [cw.Shuffled(N, 10), cw.FixedSize(N, 10), cw.Poisson(N, 5, max_batch_size=10)])
def test_an_own_batch_larger_than_the_plan_says_is_refused(sampling: Any) -> None:
    model = mlp()
    private = cw.Private(plan(sampling=sampling), model, sgd(model), own_batches=True)
    assert private.step(losses_of(model, X[:10], Y[:10]))
    private.backward(losses_of(model, X[:6], Y[:6]))
    with pytest.raises(cw.InvalidSampling, match="11 samples"):
        private.backward(losses_of(model, X[:5], Y[:5]))
    assert private.step(losses_of(model, X[:4], Y[:4])) and private.ledger.steps == 2


def test_a_model_that_changes_its_precision_goes_on() -> None:
    model = mlp()
    optimizer = Recorder(model.parameters())
    private = cw.Private(plan(), model, optimizer, seed=0, own_batches=True)
    private.step(losses_of(model, X, Y))
    model.double()
    private.step(losses_of(model, X.double(), Y.double()))
    assert [g.dtype for seen in optimizer.seen for g in seen] == [torch.float32] * 4 + [torch.float64] * 4


def test_a_parameter_that_grows_gets_independent_noise_in_every_row() -> None:
    """Noise for the old shape would be broadcast: the same number in every row cancels out in their differences."""

    class Summed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = nn.Parameter(torch.zeros(1, 3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.rows.sum(0)

    model = Summed()
    private = cw.Private(plan(), model, sgd(model), seed=0, own_batches=True)
    x = torch.randn(4, 3)
    private.step(model(x))
    model.rows.data = torch.zeros(5, 3)
    private.backward(model(x))
    model.rows.data = torch.zeros(6, 3)
    with pytest.raises(cw.InvalidPlan, match="resized"):
        private.step(model(x))
    model.rows.data = torch.zeros(5, 3)
    private.step()
    assert model.rows.unique().numel() == 15


def test_backward_gathers_and_step_ends_an_own_logical_batch() -> None:
    model = mlp()
    optimizer = Recorder(model.parameters())
    private = cw.Private(plan(noise_multiplier=0.0), model, optimizer, own_batches=True)
    private.backward(losses_of(model, X[:5], Y[:5]))
    assert not optimizer.seen and private.ledger.steps == 0 and all(p.grad is None for p in model.parameters())
    private.step(losses_of(model, X[5:9], Y[5:9]))
    private.backward(losses_of(model, X[:9], Y[:9]))
    assert private.step() and private.ledger.steps == 2
    for a, b, want in zip(*optimizer.seen, loop_sum(model, X[:9], Y[:9], cw.Abadi(1.0)), strict=True):
        torch.testing.assert_close(a, b)
        torch.testing.assert_close(a, want / 10)


def test_the_budget_ends_and_a_further_step_changes_nothing() -> None:
    model = mlp()
    private = cw.Private(plan(steps=2), model, sgd(model), seed=0)
    train(private, model, data())
    before, ledger = weights(model), private.ledger.to_json()
    for spend in (lambda: private.step(losses_of(model, X, Y)), lambda: private.step(), lambda: private.backward(X)):
        with pytest.raises(cw.BudgetSpent, match="all 2 steps"):
            spend()
    assert same(before, weights(model)) and private.ledger.to_json() == ledger
    assert list(private.loader(data())) == []


def test_an_error_in_the_engine_changes_nothing_and_can_be_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model = mlp()
    optimizer = Recorder(model.parameters())
    old = torch.ones(4, 3)
    model[0].weight.grad = old  # type: ignore[index, union-attr]
    private = cw.Private(plan(noise_multiplier=0.0), model, optimizer, own_batches=True)
    private.backward(losses_of(model, X[:5], Y[:5]))
    losses = losses_of(model, X[5:], Y[5:])
    for bad in (losses.mean(), losses.detach(), model(X), "losses"):
        with pytest.raises(cw.InvalidLosses):
            private.step(bad)  # type: ignore[arg-type]
    with monkeypatch.context() as patch:
        patch.setattr(private, "_clip", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            private.step(losses_of(model, X[5:], Y[5:]))
    assert private.ledger.steps == 0 and model[0].weight.grad is old and not optimizer.seen  # type: ignore[index, union-attr]
    private.step(losses_of(model, X[5:], Y[5:]))
    for got, want in zip(optimizer.seen[0], loop_sum(model, X, Y, cw.Abadi(1.0)), strict=True):
        torch.testing.assert_close(got, want / 10)


def fail(*args: object, **kwargs: object) -> Any:
    raise RuntimeError("out of memory")


@pytest.mark.parametrize("where", ["noise", "optimizer"])
def test_an_error_after_the_charge_leaves_the_step_charged(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = mlp()
    optimizer = sgd(model)
    old = torch.ones(4, 3)
    model[0].weight.grad = old  # type: ignore[index, union-attr]
    private = cw.Private(plan(), model, optimizer, seed=0, own_batches=True)
    before = weights(model)
    with monkeypatch.context() as patch:
        patch.setattr(
            private._release._noise if where == "noise" else optimizer, "release" if where == "noise" else "step", fail
        )
        with pytest.raises(RuntimeError, match="out of memory"):
            private.step(losses_of(model, X, Y))
    assert private.ledger.steps == private.steps_done == 1
    assert same(before, weights(model)) and model[0].weight.grad is old  # type: ignore[index, union-attr]
    # The sum that was charged is gone: the next step holds its own samples only.
    assert private._batch.sums is None
    private.step(losses_of(model, X, Y))
    assert private.ledger.steps == 2


def test_the_ledger_is_charged_before_the_noise_is_drawn() -> None:
    model = mlp()
    charged: list[int] = []

    class Watching(Constant):
        def fill_(self, buffer: Tensor, entropy: Any, step: int, piece: int) -> None:
            charged.append(private.ledger.steps)
            super().fill_(buffer, entropy, step, piece)

    private = cw.Private(plan(), model, sgd(model), noise=Watching(), own_batches=True)
    for _ in range(3):
        private.step(losses_of(model, X, Y))
    assert charged == [1, 2, 3]


@pytest.mark.parametrize(
    ("wrong", "remedy"),
    [
        (lambda losses: losses.mean(), r"got \(\).*reduction='none'.*Hugging Face.*`logits`"),
        (lambda losses: losses[:, None], r"got \(10, 1\).*losses\.squeeze\(1\)"),
        (lambda losses: losses[:, None].repeat(1, 3), r"got \(10, 3\).*flatten\(1\)\.mean\(1\)"),
        (lambda losses: [losses], "got list.*reduction='none'"),
    ],
)
def test_losses_of_another_shape_are_refused_with_what_to_write(wrong: Any, remedy: str) -> None:
    model = mlp()
    private = cw.Private(plan(), model, sgd(model), own_batches=True)
    losses = losses_of(model, X[:10], Y[:10])
    for give in (private.step, lambda given: cw.check(given, model.parameters())):
        with pytest.raises(cw.InvalidLosses, match=remedy):
            give(wrong(losses))


def test_the_same_losses_cannot_count_twice() -> None:
    model = mlp()
    private = cw.Private(plan(), model, sgd(model), own_batches=True)
    losses = losses_of(model, X[:3], Y[:3])
    private.backward(losses)
    with pytest.raises(cw.InvalidLosses, match="twice"):
        private.step(losses)
    assert private.ledger.steps == 0
    assert private.step(losses_of(model, X[3:5], Y[3:5]))  # what was gathered before is still there
    assert private.last is not None and private.last.batch_size == 5


def test_a_gradient_from_before_the_run_is_replaced_not_added_to() -> None:
    model = mlp()
    optimizer = Recorder(model.parameters())
    losses_of(model, X, Y).sum().backward()
    private = cw.Private(plan(noise_multiplier=0.0), model, optimizer, own_batches=True)
    private.step(losses_of(model, X[:3], Y[:3]))
    for got, want in zip(optimizer.seen[0], loop_sum(model, X[:3], Y[:3], cw.Abadi(1.0)), strict=True):
        torch.testing.assert_close(got, want / 10)


def test_nothing_is_left_on_the_model() -> None:
    model = mlp()
    private = cw.Private(plan(), model, sgd(model), own_batches=True)
    before = {name: set(vars(m)) for name, m in model.named_modules()}, list(model.state_dict())
    private.step(losses_of(model, X, Y))
    with pytest.raises(cw.InvalidLosses):
        private.step(losses_of(model, X, Y).sum())
    assert before == ({name: set(vars(m)) for name, m in model.named_modules()}, list(model.state_dict()))
    for module in model.modules():
        assert not module._forward_hooks and not module._backward_hooks and not module._forward_pre_hooks
    for p in model.parameters():
        assert not vars(p) and not p._backward_hooks


def test_seeded_runs_repeat_and_others_do_not() -> None:
    def run(seed: int | None) -> dict[str, Tensor]:
        model = mlp(dropout=0.5)
        private = cw.Private(plan(), model, sgd(model), seed=seed)
        torch.manual_seed(0 if seed is None else 99)  # the global generator must not matter
        train(private, model, data(), physical_batch_size=4)
        return weights(model)

    assert same(run(1), run(1))
    assert not same(run(1), run(2))
    assert not same(run(None), run(None))


@pytest.mark.usefixtures("fine_grid")
def test_the_same_noise_never_comes_back() -> None:
    model = mlp()
    for seed in (None, 0):
        optimizer = Recorder(model.parameters())
        private = cw.Private(plan(steps=20), model, optimizer, seed=seed, own_batches=True)
        for _ in range(20):
            private.step(torch.zeros(0))
        noise = torch.stack([torch.cat([g.reshape(-1) for g in seen]) for seen in optimizer.seen])
        correlations = torch.corrcoef(noise) - torch.eye(20)
        assert correlations.abs().max() < 0.95
        assert len(noise.unique()) == noise.numel()


def test_two_parameters_with_one_gradient_get_independent_noise() -> None:
    class TwoBiases(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.zeros(50)), nn.Parameter(torch.zeros(50))

        def forward(self, x: Tensor) -> Tensor:
            return (x + self.a + self.b).sum(1)

    model = TwoBiases()
    optimizer = Recorder(model.parameters())
    private = cw.Private(plan(), model, optimizer, seed=0, own_batches=True)
    private.step(model(torch.randn(5, 50)))
    a, b = optimizer.seen[0]
    assert abs(float(torch.corrcoef(torch.stack([a, b]))[0, 1])) < 0.6
    assert 0.05 < float(a.std()) < 0.2


def test_aliased_gradients_of_an_engine_are_kept_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(3, 3)
    optimizer = Recorder([model.bias, model.weight])

    def aliasing(losses: Tensor, clip: Any, evidence: Any, onto: Any) -> cw.Clipped[Any]:
        memory = torch.ones(3)
        gradients = {"weight": memory.expand(3, 3), "bias": memory}
        squared = dict.fromkeys(gradients, losses.detach().square())
        return cw.Clipped(gradients, losses.detach(), losses.detach(), losses.detach().bool(), squared, clip)

    private = cw.Private(plan(clip=cw.Abadi(1.0)), model, optimizer, seed=0, own_batches=True)
    monkeypatch.setattr(private, "_clip", aliasing)
    private.step(model(X).sum(1))
    values = torch.cat([g.reshape(-1) for g in optimizer.seen[0]])
    assert len(values.unique()) == 12


def test_half_precision_sums_and_noise_are_made_in_float32() -> None:
    model = mlp().to(torch.bfloat16)
    optimizer = Recorder(model.parameters())
    private = cw.Private(plan(clip=cw.Abadi(1e-3)), model, optimizer, noise=Constant(1.0), own_batches=True)
    private.backward(losses_of(model, X.bfloat16(), Y.bfloat16()))
    assert private._batch.sums is not None and all(s.dtype == torch.float32 for s in private._batch.sums)
    private.step()
    assert all(g.dtype == torch.bfloat16 for g in optimizer.seen[0])


OPTIMIZERS: dict[str, Any] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "HeavyBall": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    **{
        name: (lambda p, name=name: getattr(torch.optim, name)(p))
        for name in ("ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop")
    },
    "Rprop": lambda p: torch.optim.Rprop(p),
    "Adam(amsgrad)": lambda p: torch.optim.Adam(p, amsgrad=True, weight_decay=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_sees_the_private_gradient(name: str) -> None:
    ours, theirs = mlp(), mlp()
    optimizer, reference = OPTIMIZERS[name](ours.parameters()), OPTIMIZERS[name](theirs.parameters())
    private = cw.Private(plan(noise_multiplier=0.0), ours, optimizer, own_batches=True)
    for _ in range(3):
        private.step(losses_of(ours, X, Y))
        for p, g in zip(theirs.parameters(), loop_sum(theirs, X, Y, cw.Abadi(1.0)), strict=True):
            p.grad = g / 10
        reference.step()
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_optimizers_that_cannot_be_private_are_refused() -> None:
    model = mlp()
    with pytest.raises(cw.InvalidPlan, match="several times within one step"):
        cw.Private(plan(), model, torch.optim.LBFGS(model.parameters()))
    with pytest.raises(cw.InvalidPlan, match="noise is dense"):
        cw.Private(plan(), model, torch.optim.SparseAdam(list(model.parameters())))
    with pytest.raises(cw.InvalidPlan, match=r"torch\.optim"):
        cw.Private(plan(), model, "sgd")  # type: ignore[arg-type]


def test_the_optimizer_must_hold_exactly_the_trainable_parameters() -> None:
    model = mlp()
    with pytest.raises(cw.InvalidPlan, match=r"missing in the optimizer: 3\.weight"):
        cw.Private(plan(), model, torch.optim.SGD([*model[0].parameters(), model[3].bias], lr=0.1))  # type: ignore[index]
    with pytest.raises(cw.InvalidPlan, match="not parameters of the model"):
        cw.Private(plan(), model, torch.optim.SGD([*model.parameters(), nn.Parameter(torch.ones(2))], lr=0.1))
    for p in model.parameters():
        p.requires_grad_(False)
    with pytest.raises(cw.InvalidPlan, match="no trainable"):
        cw.Private(plan(), model, sgd(model))
    with pytest.raises(cw.InvalidPlan, match="Module"):
        cw.Private(plan(), lambda x: x, sgd(model))  # type: ignore[arg-type]


def test_parameter_groups_and_tied_weights() -> None:
    model = Tied()
    groups = [{"params": [model.a.weight], "lr": 0.5}, {"params": [model.a.bias, model.b.bias]}]
    private = cw.Private(plan(noise_multiplier=0.0), model, torch.optim.SGD(groups, lr=0.1), own_batches=True)
    before = weights(model)
    private.step(model(X).squeeze(1))
    assert all(not torch.equal(before[k], v) for k, v in weights(model).items())
    assert model.b.weight is model.a.weight


def test_frozen_parameters_stay_and_can_be_unfrozen_between_steps() -> None:
    model = mlp()
    model[0].requires_grad_(False)  # type: ignore[index]
    private = cw.Private(plan(), model, sgd(model), own_batches=True)
    before = weights(model)
    private.step(losses_of(model, X, Y))
    after = weights(model)
    assert torch.equal(before["0.weight"], after["0.weight"]) and not torch.equal(before["3.weight"], after["3.weight"])
    model[0].requires_grad_(True)  # type: ignore[index]
    private.step(losses_of(model, X, Y))
    assert not torch.equal(after["0.weight"], weights(model)["0.weight"])
    private.backward(losses_of(model, X, Y))
    model[0].requires_grad_(False)  # type: ignore[index]
    with pytest.raises(cw.InvalidPlan, match="within a logical batch"):
        private.backward(losses_of(model, X, Y))


def test_parameters_and_gradients_cannot_slip_in_beside_the_step() -> None:
    model = mlp()
    model[0].requires_grad_(False)  # type: ignore[index]
    optimizer = sgd(model)
    private = cw.Private(plan(), model, optimizer, own_batches=True)
    model[0].weight.grad = torch.ones(4, 3)  # type: ignore[index, union-attr]
    with pytest.raises(cw.InvalidPlan, match=r"frozen parameter '0\.weight' has a gradient"):
        private.step(losses_of(model, X, Y))
    model[0].weight.grad = None  # type: ignore[index, union-attr]
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    with pytest.raises(cw.InvalidPlan, match="not parameters of the model"):
        private.step(losses_of(model, X, Y))
    assert private.ledger.steps == 0


class Normed(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(1, 2, 1), norm

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x.unsqueeze(1))).sum((1, 2))


@pytest.mark.parametrize(
    "norm",
    [
        nn.BatchNorm1d(2),
        nn.BatchNorm1d(2, affine=False),
        nn.SyncBatchNorm(2),
        nn.BatchNorm1d(2, track_running_stats=False).eval(),
        nn.InstanceNorm1d(2, track_running_stats=True),
    ],
    ids=["BatchNorm", "not affine", "SyncBatchNorm", "no running stats", "InstanceNorm with running stats"],
)
def test_layers_that_mix_or_keep_statistics_are_refused_at_every_step(norm: nn.Module) -> None:
    model = Normed(norm)
    private = cw.Private(plan(), model, sgd(model), own_batches=True)
    model.train(norm.training)
    with pytest.raises(cw.NotSeparable, match="norm"):
        private.step(model.conv(X.unsqueeze(1)).sum((1, 2)))
    assert private.ledger.steps == 0


def test_batch_norm_in_eval_mode_works_until_it_is_switched_on() -> None:
    model = Normed(nn.BatchNorm1d(2))
    private = cw.Private(plan(), model, sgd(model), own_batches=True)
    model.norm.eval()
    assert private.step(model(X))
    model.train()
    with pytest.raises(cw.NotSeparable, match="training mode"):
        private.step(model(X))
    assert private.ledger.steps == 1


def test_a_layer_that_is_replaced_between_loops_is_looked_at_again() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4, elementwise_affine=False), nn.Linear(4, 1))
    private = cw.Private(plan(), model, sgd(model), seed=0)
    for x, y in private.loader(data()):
        private.step(losses_of(model, x, y))
        break
    model[1] = nn.BatchNorm1d(4, affine=False)
    with pytest.raises(cw.NotSeparable, match="training mode"):
        train(private, model, data())


def test_a_plan_without_noise_is_refused_and_one_with_zero_noise_says_infinite() -> None:
    model = mlp()
    with pytest.raises(cw.InvalidPlan, match="calibrate"):
        cw.Private(plan(noise_multiplier=None), model, sgd(model), own_batches=True)
    with pytest.raises(cw.InvalidPlan, match=r"clipwise\.Plan"):
        cw.Private({"steps": 3}, model, sgd(model), own_batches=True)  # type: ignore[arg-type]
    private = cw.Private(plan(noise_multiplier=0.0, clip=cw.NoClip()), model, sgd(model), own_batches=True)
    private.step(losses_of(model, X, Y))
    assert private.epsilon(delta=1e-5) == math.inf


def test_a_schedule_that_turns_unbounded_is_stopped_before_the_release() -> None:
    @dataclass(frozen=True)
    class Unbounded:
        steps: tuple[int, ...]

        def at(self, step: int, steps: int) -> Style:
            return cw.Flat(cw.NoClip() if step in self.steps else cw.Abadi(1.0))

    for late in (5, 0):  # the ends are seen in time
        with pytest.raises(cw.InvalidPlan, match="does not bound"):
            plan(clip=Unbounded((late,)))
    model = mlp()
    private = cw.Private(plan(clip=Unbounded((1,))), model, sgd(model), own_batches=True)
    private.step(losses_of(model, X, Y))
    with pytest.raises(cw.InvalidPlan, match="does not bound"):
        private.step(losses_of(model, X, Y))
    assert private.ledger.steps == 1


def test_statistics_of_the_last_step() -> None:
    model = mlp()
    private = cw.Private(plan(clip=cw.Abadi(0.5)), model, sgd(model, lr=0.0), own_batches=True)
    assert private.last is None
    norms = cw.per_sample_norms(losses_of(model, X, Y), model.parameters())
    private.backward(losses_of(model, X[:10], Y[:10]))
    assert private.last is None
    private.step(losses_of(model, X[10:], Y[10:]))
    last = private.last
    assert last is not None and last.step == 0 and last.batch_size == N
    assert last.norm_quantiles == pytest.approx(torch.quantile(norms, torch.tensor([0, 0.25, 0.5, 0.75, 1.0])).tolist())
    assert last.fraction_clipped == pytest.approx(float((norms > 0.5).double().mean()))
    assert "Not covered by epsilon" in str(cw.StepStatistics.__doc__)


@pytest.mark.parametrize("size", [1, 6])
@pytest.mark.parametrize("clip", [cw.Flat(cw.Abadi(0.5)), cw.Layerwise(cw.Abadi(0.1))], ids=["flat", "layerwise"])
def test_the_statistics_of_each_layer_are_those_of_its_own_gradients(clip: Any, size: int) -> None:
    model = mlp()
    private = cw.Private(plan(clip=clip, noise_multiplier=0.0), model, sgd(model), own_batches=True)
    gradients = cw.per_sample_gradients(losses_of(model, X[:size], Y[:size]), dict(model.named_parameters()))
    private.step(losses_of(model, X[:size], Y[:size]))
    assert private.last is not None
    layers: dict[str, list[Tensor]] = {}
    for name, gradient in gradients.items():
        layers.setdefault(name.rpartition(".")[0], []).append(gradient.flatten(1))
    assert private.last.layers.keys() == layers.keys()
    whole = torch.cat([g for parts in layers.values() for g in parts], 1).norm(dim=1)
    for layer, parts in layers.items():
        norms = torch.cat(parts, 1).norm(dim=1)
        clipped = (whole > 0.5) if isinstance(clip, cw.Flat) else (norms > 0.1)
        found = private.last.layers[layer]
        assert found.norm_quantiles[-1] == pytest.approx(float(norms.max()), rel=1e-5)
        assert found.norm_quantiles[2] == pytest.approx(float(norms.quantile(0.5)), rel=1e-5)
        assert found.fraction_clipped == pytest.approx(float(clipped.double().mean()))


def test_epsilon_is_of_the_steps_made() -> None:
    model = mlp()
    private = cw.Private(plan(sampling=cw.FullBatch(N), noise_multiplier=5.0), model, sgd(model), own_batches=True)
    assert private.epsilon(delta=1e-5) == 0
    private.step(losses_of(model, X, Y))
    one = private.epsilon(delta=1e-5)
    assert one == pytest.approx(cw.epsilon(5.0, cw.FullBatch(N), 1, 1e-5)) and one > 0
    private.step(losses_of(model, X, Y))
    assert private.epsilon(delta=1e-5) > one


def test_a_run_cannot_be_copied_or_pickled() -> None:
    private = cw.Private(plan(), model := mlp(), sgd(model))
    for duplicate in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="one ledger"):
            duplicate(private)


def test_a_schedulers_order_warning_stays_away() -> None:
    model = mlp()
    optimizer = sgd(model)
    private = cw.Private(plan(), model, optimizer, own_batches=True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    assert private.step(losses_of(model, X, Y))
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.05


def test_an_embedding_that_rewrites_its_rows_is_refused() -> None:
    model = nn.Sequential(nn.Embedding(5, 3, max_norm=1.0), nn.Flatten(), nn.Linear(6, 1))
    plan = cw.Plan(cw.FullBatch(4), steps=1, clip=cw.Abadi(1.0), noise_multiplier=1.0)
    with pytest.raises(cw.InvalidPlan, match="max_norm"):
        cw.Private(plan, model, torch.optim.SGD(model.parameters(), lr=0.1))


# Copies without batch statistics


def normalised() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.Flatten(), nn.Linear(24, 4), nn.BatchNorm1d(4))
    model(torch.randn(32, 1, 4, 4))  # gathers statistics
    with torch.no_grad():
        model[1].weight.uniform_(0.5, 2.0)
    return model


@pytest.mark.parametrize("frozen", [False, True])
def test_a_copy_without_batch_norms_can_be_trained_and_the_model_stays(frozen: bool) -> None:
    model, x = normalised(), torch.randn(5, 1, 4, 4)
    before = copy.deepcopy(model.state_dict())
    made, lines = cw.without_batchnorm(model, frozen=frozen)
    assert [line.split(":")[0] for line in lines] == ["'1'", "'4'"] and ("FrozenNorm" in lines[0]) is frozen
    assert [name for name, _ in made.named_parameters()] == [name for name, _ in model.named_parameters()]
    assert torch.equal(made[1].weight, model[1].weight) and made[1].weight is not model[1].weight
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    if frozen:
        assert made.training and torch.allclose(made(x), model.eval()(x))
    buffers = copy.deepcopy(dict(made.named_buffers()))
    cw.check_model(made, lambda model, x: model(x).square().sum(1), x)
    private = cw.Private(
        cw.Plan(cw.FullBatch(5), 1, cw.Abadi(1.0), 1.0), made, torch.optim.SGD(made.parameters(), lr=0.1)
    )
    for (batch,) in private.loader(torch.utils.data.TensorDataset(x)):
        assert private.step(made(batch).square().sum(1))
    assert all(torch.equal(value, buffers[name]) for name, value in made.named_buffers())


def test_one_batch_norm_under_two_names_stays_one_module() -> None:
    shared = nn.BatchNorm1d(4)
    made, lines = cw.without_batchnorm(nn.ModuleDict({"a": shared, "b": nn.Sequential(shared)}))
    assert made["a"] is made["b"][0] and len(lines) == 1  # type: ignore[index]
    alone, _ = cw.without_batchnorm(nn.BatchNorm2d(7, affine=False))
    assert isinstance(alone, nn.GroupNorm) and alone.num_groups == 1 and alone.weight is None


class OwnNorm(nn.BatchNorm1d):
    pass


def hooked() -> nn.Module:
    module = nn.BatchNorm1d(4)
    module.register_forward_hook(lambda *_: None)
    return module


@pytest.mark.parametrize(
    ("module", "options", "message"),
    [
        (OwnNorm(4), {}, "not a BatchNorm of torch"),
        (nn.LazyBatchNorm1d(), {}, "has no sizes yet"),
        (hooked(), {}, "has hooks"),
        (nn.BatchNorm1d(4, track_running_stats=False), {"frozen": True}, "no statistics to keep"),
        (nn.BatchNorm1d(1), {}, "one feature"),
        (nn.BatchNorm1d(4), {"groups": 0}, "groups must be a positive integer"),
    ],
    ids=["own", "lazy", "hooked", "no statistics", "one feature", "no groups"],
)
def test_a_batch_norm_that_cannot_be_replaced_faithfully_is_refused(
    module: nn.Module, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(cw.InvalidPlan, match=message):
        cw.without_batchnorm(nn.Sequential(module), **options)


def test_the_refusal_of_a_batch_norm_names_the_remedy() -> None:
    model, x = normalised(), torch.randn(5, 1, 4, 4)
    private = cw.Private(
        cw.Plan(cw.FullBatch(5), 1, cw.Abadi(1.0), 1.0), model, torch.optim.SGD(model.parameters(), lr=0.1)
    )
    (batch,) = next(iter(private.loader(torch.utils.data.TensorDataset(x))))
    with pytest.raises(cw.NotSeparable, match=r"model, replaced = cw\.without_batchnorm\(model\) gives a copy"):
        private.step(model(batch).square().sum(1))


@pytest.mark.parametrize("memory", [-1, 1.5, True, "1 GB"])
def test_memory_is_a_number_of_bytes(memory: object) -> None:
    model = nn.Linear(3, 1)
    with pytest.raises(cw.InvalidPlan, match="memory must be a number of bytes or None"):
        cw.Private(plan(), model, sgd(model), memory=memory)  # type: ignore[arg-type]


@pytest.mark.parametrize("memory", [None, 0, 12_345])
def test_the_cost_model_is_told_the_memory(memory: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    told, truly = [], run.kept

    def kept(graph: Any, plan: Any, batch_size: int, memory: int | None) -> Any:
        told.append(memory)
        return truly(graph, plan, batch_size, memory)

    monkeypatch.setattr(run, "kept", kept)
    monkeypatch.setattr("clipwise.engine.plan._SMALL", 0)  # a small graph holds everything anyway
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    private = cw.Private(plan(), model, sgd(model), own_batches=True, memory=memory)
    private.step(model(torch.randn(5, 3)).square().squeeze(1))
    assert set(told) == {memory}
