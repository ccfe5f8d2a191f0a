"""A fused layer of an LSTM: gradients of samples from what its kernel saved, whichever of its outputs are used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor, nn

from clipwise import Abadi, NotSeparable, UnsupportedNode
from clipwise.engine import check, clipped_gradients, per_sample_norms
from clipwise.engine.cache import ENGINE
from clipwise.engine.graph import unrecorded
from clipwise.engine.layout import Layout
from clipwise.engine.parameters import Parameters
from clipwise.engine.rules.recurrent import STATES

from .reference import assert_agrees_with_the_loop

NODE = "MkldnnRnnLayerBackward0"
Program: TypeAlias = Callable[["Recurrent", Tensor], Tensor]


class Recurrent(nn.Module):
    """An LSTM, another that may follow it, a state that is learned."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.one = nn.LSTM(4, 5, **{"batch_first": True, **options})
        self.other = nn.LSTM(5, 5, batch_first=True)
        self.state = nn.Parameter(torch.randn(1, 1, 5))
        self.enter = nn.Linear(4, 4)


def everything(model: Recurrent, x: Tensor) -> Tensor:
    out, (hidden, cell) = model.one(x)
    return torch.cat([out.sum(1), hidden[-1], cell[0]], 1)


def handed_on(model: Recurrent, x: Tensor) -> Tensor:
    out, states = model.one(x)
    return model.other(out.tanh(), states)[0][:, -1]


def learned(model: Recurrent, x: Tensor) -> Tensor:
    state = model.state.expand(1, len(x), 5).contiguous()
    return model.one(x, (state, state.tanh()))[1][1][0]


def several_sequences_of_a_sample(model: Recurrent, x: Tensor) -> Tensor:
    return model.one(x.reshape(-1, 3, 4))[1][0][-1].reshape(len(x), -1)


def beside(model: Recurrent, x: Tensor) -> Tensor:
    """A way around a layer: the values below it are reached with and without it."""
    below = model.enter(x)
    out = model.one(below)[0]
    return model.other(out)[1][0][-1] + out.tanh().sum(1) + below.square().sum((1, 2)).unsqueeze(1)


PROGRAMS: dict[str, tuple[Program, dict[str, Any]]] = {
    "last output": (lambda m, x: m.one(x)[0][:, -1], {}),
    "all outputs": (lambda m, x: m.one(x)[0], {}),
    "last hidden state": (lambda m, x: m.one(x)[1][0][-1], {}),
    "last cell": (lambda m, x: m.one(x)[1][1][-1], {}),
    "everything, both directions of two layers": (everything, {"num_layers": 2, "bidirectional": True}),
    "no biases, backwards": (lambda m, x: m.one(x)[1][0][1], {"bias": False, "bidirectional": True}),
    "times first": (lambda m, x: m.one(x.transpose(0, 1))[0][-1], {"batch_first": False}),
    "states of another": (handed_on, {}),
    "a learned first state": (learned, {}),
    "used twice": (lambda m, x: m.one(x)[0][:, -1] + m.one(x.flip(1))[1][0][0], {}),
    "last hidden state of three layers": (lambda m, x: m.one(m.enter(x))[1][0][-1], {"num_layers": 3, "dropout": 0.5}),
    "first hidden state of two layers": (lambda m, x: m.one(m.enter(x))[1][0][0], {"num_layers": 2}),
    "a layer and what lies below it": (beside, {}),
    "several sequences of a sample": (several_sequences_of_a_sample, {}),
}


def losses_of(program: Program, model: Recurrent, x: Tensor) -> Tensor:
    return program(model, x).flatten(1).square().sum(1)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_fused_layer_agrees_with_the_loop(name: str, streaming: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first batch makes the plan, the others use it; one of them has as many samples as times."""
    if streaming:
        monkeypatch.setattr("clipwise.engine.plan._SMALL", 0)
    program, options = PROGRAMS[name]
    torch.manual_seed(0)
    model = Recurrent(**options)
    params = dict(model.named_parameters())
    for size, times in ((3, 6), (3, 6), (6, 6), (2, 9)):
        x = torch.randn(size, times, 4)
        losses = losses_of(program, model, x)
        assert NODE in {node.name for node in check(losses, params).nodes}
        assert_agrees_with_the_loop(losses, params, 1e-5)


@pytest.mark.parametrize("name", ["last output", "last hidden state", "everything, both directions of two layers"])
def test_its_layouts_are_not_probed_at_every_step(name: str) -> None:
    program, options = PROGRAMS[name]
    model = Recurrent(**options)
    losses = losses_of(program, model, torch.randn(4, 6, 4))
    parameters = Parameters(dict(model.named_parameters()))
    with unrecorded():
        plan = ENGINE.backward(losses, parameters, keep=True).plan
    assert plan.decided and plan.cacheable and not plan.routed


@pytest.mark.parametrize(("name", "stages"), [
    ("last output", 1),
    ("last hidden state of three layers", 4),
    ("states of another", 2),
    ("a layer and what lies below it", 3),
])  # fmt: skip
def test_the_kernels_own_backward_never_runs(name: str, stages: int) -> None:
    program, options = PROGRAMS[name]
    model = Recurrent(**options)
    params = dict(model.named_parameters())
    x = torch.randn(4, 6, 4)
    per_sample_norms(losses_of(program, model, x), params)  # plans, and checks with autograd
    losses = losses_of(program, model, x)
    with unrecorded(), torch.profiler.profile(record_shapes=True) as profile:
        plan = ENGINE.backward(losses, Parameters(params), keep=False).plan
    assert plan.stages.count == stages
    calls = [event.input_shapes for event in profile.events() if event.name == "aten::mkldnn_rnn_layer_backward"]
    assert not any(any(shapes[10:13]) for shapes in calls)  # without gradients, on the way to a joint, it does nothing


def test_a_bad_sample_spoils_no_other() -> None:
    torch.manual_seed(1)
    model, x = Recurrent(), torch.randn(5, 6, 4)
    params = dict(model.one.named_parameters())
    program = PROGRAMS["last cell"][0]
    expected = clipped_gradients(losses_of(program, model, x[:4]), params, Abadi(1.0))
    x[4, 2, 1] = torch.nan
    found = clipped_gradients(losses_of(program, model, x), params, Abadi(1.0))
    assert found.bad.tolist() == [False] * 4 + [True]
    for name, gradient in expected.gradients.items():
        assert torch.allclose(found.gradients[name], gradient, atol=1e-6)


@pytest.mark.parametrize("program", [lambda m, x: m.one(x)[0].mean(1), lambda m, x: m.one(x)[0][:, -1]])
def test_samples_that_are_read_as_times_are_refused(program: Program) -> None:
    model = Recurrent(batch_first=False)
    with pytest.raises(NotSeparable, match="batch_first"):
        per_sample_norms(losses_of(program, model, torch.randn(4, 6, 4)), dict(model.one.named_parameters()))


def test_a_state_that_all_samples_share_without_a_broadcast_is_refused() -> None:
    """It has a row for every sample of this batch: whose is it in the next one?"""
    model = Recurrent()
    state = nn.Parameter(torch.randn(1, 4, 5))
    params = {"state": state, **dict(model.one.named_parameters())}
    losses = model.one(torch.randn(4, 6, 4), (state, torch.zeros(1, 4, 5)))[0][:, -1].square().sum(1)
    with pytest.raises((UnsupportedNode, NotSeparable)):
        per_sample_norms(losses, params)


def test_a_state_has_the_layout_of_the_layer_without_its_times() -> None:
    assert STATES.layout(None, Layout(1, exact=True), 0) == Layout(1, exact=True)
    assert STATES.layout(None, Layout(1, exact=True), 1) == Layout(0, exact=True)
    assert STATES.layout(None, Layout(0, exact=True), 2) is None
