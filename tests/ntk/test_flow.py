"""Gradient flows: against solutions in closed form, and against torch's own optimizers with small steps."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import clipwise as cw
from clipwise.errors import DataError, NotConverged
from tests.ntk.common import problem


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
    with pytest.raises(DataError, match="t_end"):
        cw.ntk.gradient_flow(*task, cw.Abadi(1.0), -1.0)
    with pytest.raises(DataError, match="alpha1"):
        cw.ntk.AdamFlow(alpha1=0.0)
    with pytest.raises(NotConverged, match="more than 20 gradients"):
        cw.ntk.gradient_flow(*task, cw.Abadi(1.0), 50.0, max_evaluations=20)
