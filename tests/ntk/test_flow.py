"""Gradient flows: against solutions in closed form, and against torch's own optimizers with small steps.

dL/dt = -(dL/df) H C (dL/df)^T and its layerwise form, against real small-step training.

The monitor in a training loop.
"""

from __future__ import annotations

import copy
import json
import math
import os
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import clipwise as cw
from clipwise.errors import DataError, InvalidLosses, InvalidPlan, NotConverged
from tests.ntk.common import Opaque, cross_entropy, gap, mlp, problem, squared_error


def half_square(outputs: Tensor, y: Tensor) -> Tensor:
    return (outputs.squeeze(1) - y).square() / 2


def line(w: float) -> tuple[nn.Module, Any, Tensor, Tensor]:
    """One weight, one sample with x = 1 and y = 0: the loss is w^2/2 and the gradient w."""
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.constant_(model.weight, w)
    return model, half_square, torch.ones(1, 1).double(), torch.zeros(1).double()


def test_clipped_gradient_descent_in_closed_form() -> None:
    """w = 3, R = 1: w falls with speed 1 until t = 2, then exponentially."""
    flow = cw.ntk.gradient_flow(*line(3.0), cw.Abadi(1.0), t_end=4.0, points=9)
    expected = [3 - t if t <= 2 else math.exp(-(t - 2)) for t in flow.t.tolist()]
    assert flow.weights[:, 0].tolist() == pytest.approx(expected, abs=1e-5)
    assert flow.loss.tolist() == pytest.approx([w * w / 2 for w in expected], abs=1e-5)
    assert flow.loss_rate.tolist() == pytest.approx([-w * min(w, 1.0) for w in expected], abs=1e-5)
    assert flow.speed.tolist() == pytest.approx([min(w, 1.0) for w in expected], abs=1e-5)


@pytest.mark.parametrize("r", [0.5, 2.0, 3.0])
def test_heavy_ball_in_closed_form(r: float) -> None:
    """w'' + r w' + w = 0 with w(0) = 1 and w'(0) = 0."""
    flow = cw.ntk.gradient_flow(*line(1.0), cw.NoClip(), 5.0, cw.ntk.HeavyBallFlow(r=r), points=6)
    root = torch.sqrt(torch.tensor(r * r / 4 - 1, dtype=torch.complex128))
    t = flow.t.to(torch.complex128)
    if abs(root) == 0:
        expected = ((1 + r * t / 2) * torch.exp(-r * t / 2)).real
    else:
        expected = (torch.exp(-r * t / 2) * (torch.cosh(root * t) + r / (2 * root) * torch.sinh(root * t))).real
    assert flow.weights[:, 0].tolist() == pytest.approx(expected.tolist(), abs=1e-5)


def test_nesterov_in_closed_form() -> None:
    """w'' + (3/t) w' + w = 0 with w(0) = 1 is 2 J_1(t)/t."""
    from scipy.special import j1

    flow = cw.ntk.gradient_flow(*line(1.0), cw.NoClip(), 8.0, "nesterov", points=9)
    t = flow.t[1:].numpy()
    assert flow.weights[1:, 0].tolist() == pytest.approx((2 * j1(t) / t).tolist(), abs=1e-5)


def test_constant_gradient_in_closed_form() -> None:
    """Far from the target, G = R for ever: the adaptive flows have elementary solutions."""
    R, t_end = 0.5, 2.0
    task, clip = line(1000.0), cw.Abadi(R)
    adagrad = cw.ntk.gradient_flow(*task, clip, t_end, cw.ntk.AdaGradFlow(xi=0.0, v0=1.0), points=2)
    assert 1000 - float(adagrad.weights[-1]) == pytest.approx(2 / R * (math.sqrt(1 + R * R * t_end) - 1), rel=1e-5)
    rmsprop = cw.ntk.gradient_flow(*task, clip, t_end, cw.ntk.RMSpropFlow(alpha=3.0, xi=0.0, v0=R * R), points=2)
    assert 1000 - float(rmsprop.weights[-1]) == pytest.approx(t_end, rel=1e-5)
    adam = cw.ntk.gradient_flow(*task, clip, t_end, cw.ntk.AdamFlow(0.7, 3.0, xi=0.0, v0=R * R), points=2)
    memory = 0.7 * (t_end - 0.7 * (1 - math.exp(-t_end / 0.7)))  # the integral of m/R = 0.7 (1 - exp(-t/0.7))
    assert 1000 - float(adam.weights[-1]) == pytest.approx(memory, rel=1e-5)


def by_torch(task: tuple[Any, ...], clip: Any, make: Any, steps: int, prepare: Any = None) -> Tensor:
    """The weights after steps of a real optimizer on the clipped mean gradient that `Private` forms."""
    import copy

    model, loss_fn, x, y = copy.deepcopy(task[0]), *task[1:]
    optimizer = make(list(model.parameters()))
    if prepare is not None:
        prepare(optimizer)
    plan = cw.Plan(sampling=cw.FullBatch(len(x)), steps=steps, clip=clip, noise_multiplier=0.0)
    private = cw.Private(plan, model, optimizer, seed=0)
    for xb, yb in private.loader(TensorDataset(x, y)):
        private.step(loss_fn(model(xb), yb))
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach()


def second_moment(value: float, adam: bool = False) -> Any:
    def prepare(optimizer: torch.optim.Optimizer) -> None:
        for p in optimizer.param_groups[0]["params"]:
            name = "exp_avg_sq" if adam else "square_avg"
            optimizer.state[p] = {"step": torch.tensor(1e9), name: torch.full_like(p, value)}
            if adam:
                optimizer.state[p]["exp_avg"] = torch.zeros_like(p)

    return prepare


def optimizer_cases() -> list[Any]:
    """A flow, and the torch optimizer with step h whose limit it is."""
    ntk, optim = cw.ntk, torch.optim
    return [
        pytest.param(ntk.GdFlow(), lambda h: (lambda p: optim.SGD(p, lr=h), None), id="gd"),
        pytest.param(
            ntk.HeavyBallFlow(r=1.5),
            lambda h: (lambda p: optim.SGD(p, lr=h * h, momentum=1 - 1.5 * h), None),
            id="heavy_ball",
        ),
        pytest.param(
            ntk.AdaGradFlow(xi=0.0, v0=0.5),
            lambda h: (lambda p: optim.Adagrad(p, lr=h**0.5, initial_accumulator_value=0.5 / h, eps=0.0), None),
            id="adagrad",
        ),
        pytest.param(
            ntk.RMSpropFlow(alpha=2.0, xi=0.0, v0=0.5),
            lambda h: (lambda p: optim.RMSprop(p, lr=h, alpha=1 - h / 2.0, eps=0.0), second_moment(0.5)),
            id="rmsprop",
        ),
        pytest.param(
            ntk.AdamFlow(alpha1=0.8, alpha2=2.0, xi=0.0, v0=0.5),
            lambda h: (
                lambda p: optim.Adam(p, lr=0.8 * h, betas=(1 - h / 0.8, 1 - h / 2.0), eps=0.0),
                second_moment(0.5, adam=True),  # at a late step, so that there is no bias correction
            ),
            id="adam",
        ),
    ]  # fmt: skip


@pytest.mark.parametrize("clip", [cw.Abadi(0.5), cw.Layerwise(cw.Abadi(0.5))], ids=["flat", "layerwise"])
@pytest.mark.parametrize(("dynamics", "make"), optimizer_cases())
def test_torch_optimizers_converge_to_the_flow(dynamics: Any, make: Any, clip: Any) -> None:
    """First order: halving the step halves the distance."""
    task = problem("mlp", 1, "mse", n=4)
    end = cw.ntk.gradient_flow(*task, clip, 0.5, dynamics, points=2).weights[-1]
    errors = [
        float((by_torch(task, clip, make(0.5 / steps)[0], steps, make(0.5 / steps)[1]) - end).norm())
        for steps in (25, 50)
    ]
    assert errors[1] < 0.02 and 1.7 < errors[0] / errors[1] < 2.3


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gd", "heavy_ball", "nesterov", "adam", "adagrad", "rmsprop"])
def test_rate_is_the_slope_of_the_loss(name: str) -> None:
    task = problem("mlp", 3, "cross_entropy", n=5)
    flow = cw.ntk.gradient_flow(*task, cw.Abadi(0.3), 1.0, name, points=201, rtol=1e-8, atol=1e-10)
    slope = (flow.loss[2:] - flow.loss[:-2]) / (flow.t[2:] - flow.t[:-2])
    assert torch.allclose(slope[5:], flow.loss_rate[6:-1], rtol=2e-2, atol=2e-3)


def test_model_is_unchanged_and_weights_can_be_read() -> None:
    model, loss_fn, x, y = problem("mlp", 1, "mse")
    model.float().train()
    before = torch.nn.utils.parameters_to_vector(model.parameters()).clone()
    flow = cw.ntk.gradient_flow(model, loss_fn, x.float(), y.float(), cw.Abadi(1.0), 0.3, points=3)
    assert torch.equal(torch.nn.utils.parameters_to_vector(model.parameters()), before) and model.training
    assert all(p.grad is None for p in model.parameters())
    assert torch.allclose(flow.weights[0], before.double())
    model.load_state_dict(flow.at(2), strict=False)
    assert float(loss_fn(model(x.float()), y.float()).mean().detach()) == pytest.approx(float(flow.loss[-1]), rel=1e-5)


def test_error_control_is_the_users() -> None:
    task = problem("mlp", 1, "mse")
    loose = cw.ntk.gradient_flow(*task, cw.Abadi(0.5), 2.0, points=2, rtol=1e-3, atol=1e-5)
    tight = cw.ntk.gradient_flow(*task, cw.Abadi(0.5), 2.0, points=2, rtol=1e-9, atol=1e-12, method="DOP853")
    assert loose.evaluations < tight.evaluations
    assert 0 < float((loose.weights - tight.weights).abs().max()) < 1e-2


def test_refusals() -> None:
    task = problem("mlp", 1, "mse")
    with pytest.raises(DataError, match="optimizer must be one of"):
        cw.ntk.gradient_flow(*task, cw.Abadi(1.0), 1.0, "lion")
    for t_end, points in ((-1.0, 2), (math.inf, 2), (True, 2), (1.0, 1), (1.0, True)):
        with pytest.raises(DataError, match="t_end"):
            cw.ntk.gradient_flow(*task, cw.Abadi(1.0), t_end, points=points)
    with pytest.raises(DataError, match="alpha1"):
        cw.ntk.AdamFlow(alpha1=0.0)
    with pytest.raises(NotConverged, match="more than 20 gradients"):
        cw.ntk.gradient_flow(*task, cw.Abadi(1.0), 50.0, max_evaluations=20)


TASKS = [("mlp", 1, "mse"), ("mlp", 3, "mse"), ("mlp", 3, "cross_entropy"), ("mlp", 2, "other"), ("cnn", 1, "mse"),
         ("cnn", 4, "cross_entropy"), ("transformer", 1, "mse"), ("transformer", 3, "cross_entropy")]  # fmt: skip
CLIPS = {
    "none": cw.NoClip(),
    "batch": cw.BatchClip(1.0),
    "abadi": cw.Abadi(0.3),
    "automatic": cw.Automatic(0.5, 0.1),
    "normalize": cw.Normalize(0.5),
    "global": cw.Global(3.0),
    "global scaled": cw.GlobalScaled(0.5, 3.0),
    "layerwise": cw.Layerwise(cw.Abadi(0.2)),
    "groupwise": cw.Groupwise({"*bias": cw.Abadi(0.1), "*": cw.Normalize(0.4)}),
}


def trained_rate(task: tuple[Any, ...], clip: Any, step: float) -> float:
    """(L after one step of full-batch training by `Private`, without noise, minus L before) over the step."""
    model, loss_fn, x, y = task
    model = copy.deepcopy(model).eval()
    before = float(loss_fn(model(x), y).mean().detach())
    optimizer = torch.optim.SGD(model.parameters(), lr=step)
    plan = cw.Plan(sampling=cw.FullBatch(len(x)), steps=1, clip=clip, noise_multiplier=0.0)
    private = cw.Private(plan, model, optimizer, seed=0)
    for xb, yb in private.loader(TensorDataset(x, y)):
        private.step(loss_fn(model(xb), yb))
    return (float(loss_fn(model(x), y).mean().detach()) - before) / step


@pytest.mark.parametrize("clip", [CLIPS["none"], CLIPS["abadi"], CLIPS["layerwise"]], ids=["none", "flat", "layerwise"])
@pytest.mark.parametrize(("kind", "outputs", "loss"), TASKS)
def test_the_formula_is_what_training_does(kind: str, outputs: int, loss: str, clip: Any) -> None:
    task = problem(kind, outputs, loss)
    formula = cw.ntk.analyse(*task, clip).loss_rate
    h = 1e-4
    seen = 2 * trained_rate(task, clip, h / 2) - trained_rate(task, clip, h)  # the error of order h cancels
    assert formula == pytest.approx(seen, rel=1e-5)
    assert formula == pytest.approx(cw.ntk.measured_loss_rate(*task, clip, step=1e-5), rel=1e-5)
    assert formula == pytest.approx(cw.ntk.loss_rate(*task, clip), rel=1e-10)


@pytest.mark.parametrize("name", CLIPS)
def test_every_rule_and_style(name: str) -> None:
    task, clip = problem("mlp", 2, "mse"), CLIPS[name]
    found = cw.ntk.analyse(*task, clip)
    assert found.loss_rate == pytest.approx(cw.ntk.loss_rate(*task, clip), rel=1e-10)
    if name != "global":  # a factor that jumps has no derivative to compare with, though none jumps here
        assert found.loss_rate == pytest.approx(cw.ntk.measured_loss_rate(*task, clip, step=1e-5), rel=1e-5)


@pytest.mark.parametrize("name", CLIPS)
def test_factors_follow_from_the_kernel(name: str) -> None:
    """|g_i|^2 = (dl_i/df_i) H_ii (dl_i/df_i)^T, for the whole and for every group."""
    model, loss_fn, x, y = problem("mlp", 2, "mse")
    found = cw.ntk.analyse(model, loss_fn, x, y, CLIPS[name])
    n, K = len(x), 2
    slope = (n * found.output_gradient).view(n, K)
    layers = cw.ntk.layer_kernels(model, x)

    def norms(H: Tensor) -> Tensor:
        blocks = torch.stack([H[K * i : K * i + K, K * i : K * i + K] for i in range(n)])
        return torch.einsum("ik,ikl,il->i", slope, blocks, slope).sqrt()

    if isinstance(found.factors, Tensor):
        assert torch.allclose(found.factors, found.clip.rule_of("")(norms(sum(layers.values()))), rtol=1e-9)
    elif name == "layerwise":
        for layer, H in layers.items():
            assert torch.allclose(found.factors[layer], found.clip.rule_of(layer)(norms(H)), rtol=1e-9)
    else:
        assert set(found.factors) == {"*bias", "*"}


def test_mse_of_section_3() -> None:
    """dL/dt = -4 (f - y)^T H (f - y)/n^2 for squared errors without clipping."""
    model, loss_fn, x, y = problem("mlp", 1, "mse")
    r = (model(x) - y).detach().flatten()
    expected = -4 * float(r @ cw.ntk.kernel(model, x) @ r) / len(x) ** 2
    assert cw.ntk.loss_rate(model, loss_fn, x, y, cw.NoClip()) == pytest.approx(expected, rel=1e-10)


def test_analysis_says_what_it_is_of() -> None:
    task = problem("mlp", 3, "cross_entropy")
    flat = cw.ntk.analyse(*task, cw.Abadi(0.1))
    assert isinstance(flat.factors, Tensor) and flat.factors.shape == (6,) and flat.fraction_clipped == 1.0
    H = cw.ntk.kernel(task[0], task[2])
    assert gap(flat.matrix, H @ torch.diag(flat.factors.repeat_interleave(3))) < 1e-12
    assert not flat.symmetric and flat.positive_eigenvalues and flat.min_eigenvalue >= -flat.tolerance
    large = cw.ntk.analyse(*task, cw.Layerwise(cw.Abadi(1e6)))
    assert gap(large.matrix, H) < 1e-12 and large.fraction_clipped == 0.0
    assert large.symmetric and large.positive_quadratic and large.positive_eigenvalues


def test_descent_compares_clipped_and_true_gradient() -> None:
    task = problem("mlp", 1, "mse")
    free = cw.ntk.descent(*task, cw.NoClip())
    assert free.alignment == pytest.approx(1.0) and free.loss_rate == pytest.approx(free.unclipped_rate)
    clipped = cw.ntk.descent(*task, cw.Abadi(0.1))
    assert -1.0 <= clipped.alignment < 1.0 and clipped.fraction_clipped == 1.0
    length = sum(float(g.square().sum()) for g in clipped.clipped.values()) ** 0.5
    assert clipped.loss_rate == pytest.approx(-clipped.alignment * length * (-clipped.unclipped_rate) ** 0.5)


def test_gradients_sample_by_sample_where_the_engine_has_no_rule() -> None:
    torch.manual_seed(0)
    task = Opaque().double(), squared_error, torch.randn(5, 3).double(), torch.randn(5, 2).double()
    for clip in (cw.Abadi(0.2), cw.Layerwise(cw.Abadi(0.2))):
        found = cw.ntk.analyse(*task, clip)
        assert found.loss_rate == pytest.approx(cw.ntk.measured_loss_rate(*task, clip, step=1e-5), rel=1e-5)


def test_what_is_no_loss_per_sample_is_refused() -> None:
    model, _, x, y = problem("mlp", 2, "mse")
    with pytest.raises(InvalidLosses, match="one loss per sample"):
        cw.ntk.analyse(model, lambda f, y: (f - y).square().mean(), x, y, cw.Abadi(1.0))
    with pytest.raises(InvalidPlan, match="schedule"):
        cw.ntk.loss_rate(model, lambda f, y: (f - y).square().sum(1), x, y, cw.MixUp(cw.Abadi(1.0), cw.Abadi(2.0), 0.5))


def trained(monitored: bool) -> tuple[torch.Tensor, cw.ntk.NTKMonitor | None]:
    """Twelve private steps, with and without a monitor."""
    torch.manual_seed(0)
    model = mlp(3)
    data = TensorDataset(torch.randn(40, 4), torch.randint(0, 3, (40,)))
    plan = cw.Plan(sampling=cw.Poisson(40, 8), steps=12, clip=cw.Abadi(0.5), noise_multiplier=1.0)
    private = cw.Private(plan, model, torch.optim.SGD(model.parameters(), lr=0.5), seed=3)
    x, y = torch.randn(5, 4), torch.randint(0, 3, (5,))
    monitor = cw.ntk.NTKMonitor(model, cross_entropy, x, y, plan.clip, every=5) if monitored else None
    for xb, yb in private.loader(data, physical_batch_size=4):
        if private.step(cross_entropy(model(xb), yb)) and monitor is not None:
            monitor.update()
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach(), monitor


def test_training_is_the_same_with_a_monitor() -> None:
    watched, monitor = trained(True)
    alone, _ = trained(False)
    assert torch.equal(watched, alone)
    assert monitor is not None and [record.step for record in monitor.records] == [0, 5, 10]


def test_records_are_what_the_analysis_says() -> None:
    model, loss_fn, x, y = problem("mlp", 3, "cross_entropy")
    seen: list[cw.ntk.NTKRecord] = []
    style = cw.Layerwise(cw.Abadi(0.2))
    monitor = cw.ntk.NTKMonitor(model, loss_fn, x, y, style, every=1, on_record=seen.append)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.1
    record = monitor.update()
    assert record is not None and seen == list(monitor.records) and seen[0] != record
    found, at = cw.ntk.analyse(model, loss_fn, x, y, style), cw.ntk.descent(model, loss_fn, x, y, style)
    assert record.loss_rate == pytest.approx(found.loss_rate, rel=1e-9)
    assert (record.loss, record.alignment, record.unclipped_rate) == (at.loss, at.alignment, at.unclipped_rate)
    assert (record.min_quadratic, record.min_eigenvalue) == (found.min_quadratic, found.min_eigenvalue)
    assert record.fraction_clipped == found.fraction_clipped == 1.0
    assert monitor.seconds >= record.seconds > 0


@pytest.mark.parametrize("public", [False, True])
def test_private_probes_are_marked(public: bool, tmp_path: Path) -> None:
    model, loss_fn, x, y = problem("mlp", 1, "mse")
    options = {"public": True} if public else {}
    monitor = cw.ntk.NTKMonitor(model, loss_fn, x, y, cw.Abadi(1.0), **options)
    monitor.save(tmp_path / "monitor.json")
    assert os.name == "nt" or stat.S_IMODE((tmp_path / "monitor.json").stat().st_mode) == 0o600  # private numbers
    saved = json.loads((tmp_path / "monitor.json").read_text())
    assert saved["covered_by_epsilon"] is monitor.covered_by_epsilon is public
    assert (saved["note"] == cw.ntk.NOT_COVERED) is not public
    assert saved["records"][0]["step"] == 0


def test_a_schedule_is_followed() -> None:
    model, loss_fn, x, y = problem("mlp", 1, "mse")
    clip = cw.MixUp(small=cw.Abadi(1e-3), large=cw.Abadi(1e6), switch_at=0.5)
    with pytest.raises(DataError, match="steps="):
        cw.ntk.NTKMonitor(model, loss_fn, x, y, clip)
    monitor = cw.ntk.NTKMonitor(model, loss_fn, x, y, clip, every=1, steps=4)
    for _ in range(4):
        monitor.update()
    assert [record.fraction_clipped for record in monitor.records] == [1.0, 1.0, 0.0, 0.0, 0.0]
    assert [record.symmetric for record in monitor.records] == [False, False, True, True, True]


def test_every_must_be_positive() -> None:
    model, loss_fn, x, y = problem("mlp", 1, "mse")
    with pytest.raises(DataError, match="every"):
        cw.ntk.NTKMonitor(model, loss_fn, x, y, cw.Abadi(1.0), every=0)
