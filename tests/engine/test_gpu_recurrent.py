"""Recurrent layers of a GPU: torch's nodes, with kernels of the CPU behind them (`standins.py`). No GPU was used."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, TypeAlias

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.data import TensorDataset

from clipwise import Abadi, CheckFailed, FixedSize, Flat, NotSeparable, Plan, Private, UnsupportedNode
from clipwise.engine import check, clipped_gradients, per_sample_norms
from clipwise.engine.cache import ENGINE
from clipwise.engine.cost import Way
from clipwise.engine.graph import node_entry, unrecorded
from clipwise.engine.layout import Layout
from clipwise.engine.parameters import Parameters
from clipwise.engine.rules.recurrent import CELL_STATES

from .reference import assert_agrees_with_the_loop, clipped_loop, flat_sum, loop_gradients, norms_of
from .standins import KERNELS, Stacked, Unrolled, standing_in, weights_of

KINDS: dict[str, Callable[..., nn.RNNBase]] = {
    "LSTM": nn.LSTM,
    "GRU": nn.GRU,
    "tanh": nn.RNN,
    "relu": lambda *sizes, **options: nn.RNN(*sizes, nonlinearity="relu", **options),
}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "times first": {"batch_first": False},
    "no biases": {"bias": False},
    "both directions": {"bidirectional": True},
    "three layers": {"num_layers": 3},
    "two layers in both directions, times first": {"num_layers": 2, "bidirectional": True, "batch_first": False},
    "two layers in both directions, no biases": {"num_layers": 2, "bidirectional": True, "bias": False},
}
Program: TypeAlias = Callable[["Model", Tensor], Tensor]


@pytest.fixture(autouse=True)
def kernels() -> Iterator[None]:
    """In double precision, which the kernels of a GPU have too."""
    torch.set_default_dtype(torch.float64)
    with standing_in():
        yield
    torch.set_default_dtype(torch.float32)


class Model(nn.Module):
    """A recurrent layer between others, and a state that is learned."""

    def __init__(self, kind: str = "LSTM", kernel: str = "_cudnn_rnn", **options: Any) -> None:
        super().__init__()
        options = {"batch_first": True, **options}
        self.rnn = Stacked(KINDS[kind](4, 5, **options), kernel)
        width = 5 * (1 + self.rnn.layer.bidirectional)
        self.other = Stacked(KINDS[kind](width, 5, batch_first=True), kernel)
        if kind in ("LSTM", "GRU"):
            self.cells = Unrolled(KINDS[kind](4, 5))
        self.state = nn.Parameter(torch.randn(5))
        self.enter = nn.Linear(4, 4)

    def read(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Samples first, whatever the layer has first."""
        if self.rnn.layer.batch_first:
            return self.rnn(x)
        out, states = self.rnn(x.transpose(0, 1).contiguous())
        return out.transpose(0, 1), states


def everything(model: Model, x: Tensor) -> Tensor:
    out, states = model.read(model.enter(x))
    return torch.cat([out.square().sum(1), *(state.transpose(0, 1).tanh().flatten(1) for state in states)], 1)


def learned(model: Model, x: Tensor) -> Tensor:
    states = [
        model.state.expand(1, len(x), 5).contiguous() * (k + 1)
        for k in range(2 if model.rnn.layer.mode == "LSTM" else 1)
    ]
    return model.rnn(x, tuple(states))[0][:, -1]


def beside(model: Model, x: Tensor) -> Tensor:
    """A way around a layer: the values below it are reached with and without it."""
    below = model.enter(x)
    out = model.rnn(below)[0]
    return model.other(out)[1][0][-1] + out.tanh().sum(1) + below.square().sum((1, 2)).unsqueeze(1)


def handed_on(model: Model, x: Tensor) -> Tensor:
    out, states = model.rnn(x)
    return model.other(out.tanh(), states)[0][:, -1]


def several_sequences_of_a_sample(model: Model, x: Tensor) -> Tensor:
    return model.rnn(x.reshape(-1, 3, 4))[1][0][-1].reshape(len(x), -1)


PROGRAMS: dict[str, Program] = {
    "last output": lambda m, x: m.rnn(x)[0][:, -1],
    "last hidden state": lambda m, x: m.rnn(m.enter(x))[1][0][-1],
    "a learned first state": learned,
    "used twice": lambda m, x: m.rnn(x)[0][:, -1] + m.rnn(x.flip(1))[1][0][0],
    "states of another": handed_on,
    "a layer and what lies below it": beside,
    "several sequences of a sample": several_sequences_of_a_sample,
}


def losses_of(program: Program, model: nn.Module, x: Tensor) -> Tensor:
    return program(model, x).flatten(1).square().sum(1)  # type: ignore[arg-type]


def agrees(program: Program, model: nn.Module, name: str) -> None:
    """The first batch makes the plan, the others use it; one of them has as many samples as times."""
    params = dict(model.named_parameters())
    for size, times in ((3, 6), (3, 6), (6, 6), (2, 3)):
        losses = losses_of(program, model, torch.randn(size, times, 4))
        assert name in {node.name for node in check(losses, params).nodes}
        assert_agrees_with_the_loop(losses, params, 1e-10)


def plan_of(losses: Tensor, model: nn.Module) -> Any:
    with unrecorded():
        return ENGINE.backward(losses, Parameters(dict(model.named_parameters())), keep=True).plan


# A stack of layers in one node.


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_stack_agrees_with_the_loop(kind: str, variant: str) -> None:
    agrees(everything, Model(kind, **VARIANTS[variant]), "CudnnRnnBackward0")


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_whatever_is_made_of_a_stack(name: str, kind: str, streaming: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if streaming:
        monkeypatch.setattr("clipwise.engine.plan._SMALL", 0)
    agrees(PROGRAMS[name], Model(kind), "CudnnRnnBackward0")


@pytest.mark.parametrize("kind", KINDS)
def test_the_stack_of_another_maker_agrees_with_the_loop(kind: str) -> None:
    model = Model(kind, "miopen_rnn", num_layers=2, bidirectional=True)
    agrees(everything, model, "MiopenRnnBackward0")


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_the_layer_itself(kind: str) -> None:
    """Against torch's own layer, without any kernel that stands in."""
    options = {"num_layers": 2, "bidirectional": True, "batch_first": True}
    model, x = Stacked(KINDS[kind](4, 5, **options)), torch.randn(4, 6, 4)
    params = dict(model.layer.named_parameters())
    found = clipped_gradients(model(x)[0].square().sum((1, 2)), params, Abadi(0.5))
    with torch.backends.mkldnn.flags(enabled=False):  # type: ignore[no-untyped-call]
        expected = clipped_gradients(model.layer(x)[0].square().sum((1, 2)), params, Abadi(0.5))
    assert torch.allclose(found.norms, expected.norms, rtol=1e-10)
    for name, gradient in expected.gradients.items():
        assert torch.allclose(found.gradients[name], gradient, atol=1e-12)


def test_weights_in_one_piece_of_memory() -> None:
    model = Model("GRU", num_layers=2)
    model.rnn.flatten()
    agrees(everything, model, "CudnnRnnBackward0")


@pytest.mark.parametrize("way", ["bookkeeping", "second_backward"])
@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
@pytest.mark.parametrize("program", [everything, lambda m, x: m.cells(x)[0]])
def test_both_ways_of_forming_the_sum(program: Program, kind: str, way: Way) -> None:
    model = Model(kind, num_layers=2)
    params = dict(model.named_parameters())
    for size in (4, 4, 5):
        losses = losses_of(program, model, torch.randn(size, 6, 4))
        loop = loop_gradients(losses, params)
        found = clipped_gradients(losses, params, Abadi(0.5), way=way)
        assert torch.allclose(found.norms, norms_of(loop), rtol=1e-10)
        expected = {name: rows.sum(0) for name, rows in clipped_loop(loop, Flat(Abadi(0.5))).items()}
        assert torch.allclose(flat_sum(found.gradients), flat_sum(expected), atol=1e-10)


@pytest.mark.parametrize("options", [{}, {"batch_first": False}, {"num_layers": 2, "bidirectional": True}])
def test_its_layouts_are_not_probed_at_every_step(options: dict[str, Any]) -> None:
    model = Model("GRU", **options)
    plan = plan_of(losses_of(everything, model, torch.randn(4, 6, 4)), model)
    assert plan.decided and plan.cacheable and not plan.routed


def test_the_kernels_own_backward_never_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Model("LSTM"), torch.randn(4, 6, 4)
    params = dict(model.named_parameters())
    per_sample_norms(losses_of(beside, model, x), params)  # plans, and checks with autograd
    calls, kernel = [], KERNELS["_cudnn_rnn_backward"]

    def counted(*given: Any) -> Any:
        calls.append(any(gradient is not None for gradient in given[7:10]))
        return kernel(*given)

    monkeypatch.setitem(KERNELS, "_cudnn_rnn_backward", counted)
    per_sample_norms(losses_of(beside, model, x), params)
    assert not any(calls)  # without gradients, on the way to a joint, it does nothing


def test_half_precision_is_widened() -> None:
    model, x = Model("GRU").bfloat16(), torch.randn(4, 6, 4).bfloat16()
    losses = losses_of(lambda m, x: m.rnn(x)[0].float(), model, x)
    assert torch.isfinite(per_sample_norms(losses, dict(model.named_parameters()))).all()


def test_a_bad_sample_spoils_no_other() -> None:
    model, x = Model("GRU", num_layers=2), torch.randn(5, 6, 4)
    params = dict(model.rnn.named_parameters())
    program = PROGRAMS["last output"]
    expected = clipped_gradients(losses_of(program, model, x[:4]), params, Abadi(1.0))
    x[4, 2, 1] = torch.nan
    found = clipped_gradients(losses_of(program, model, x), params, Abadi(1.0))
    assert found.bad.tolist() == [False] * 4 + [True]
    for name, gradient in expected.gradients.items():
        assert torch.allclose(found.gradients[name], gradient, atol=1e-12)


# Packed sequences.


class Packed(nn.Module):
    """Sequences of several lengths, and a layer before them."""

    def __init__(self, kind: str, **options: Any) -> None:
        super().__init__()
        self.rnn, self.enter = Stacked(KINDS[kind](4, 5, **options)), nn.Linear(4, 4)

    def forward(self, x: Tensor, lengths: Tensor, outputs: bool = False, sort: bool = True) -> Tensor:
        packed = pack_padded_sequence(self.enter(x), lengths, batch_first=True, enforce_sorted=not sort)
        rows, states = self.rnn(packed.data, None, packed.batch_sizes.tolist())
        if outputs:
            padded: Tensor = pad_packed_sequence(packed._replace(data=rows), batch_first=True)[0]
            return padded.square().sum((1, 2))
        last = torch.cat([state if not sort else state[:, packed.unsorted_indices] for state in states])
        return last.transpose(0, 1).square().sum((1, 2))


LENGTHS = (torch.tensor([2, 6, 1, 4]), torch.tensor([6, 1, 3, 5]), torch.tensor([3, 3, 3, 3]), torch.tensor([5, 1, 2]))


@pytest.mark.parametrize("outputs", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize(
    "options", [{}, {"num_layers": 2, "bidirectional": True}, {"bias": False, "batch_first": True}]
)
@pytest.mark.parametrize("kind", KINDS)
def test_packed_sequences_agree_with_the_loop(kind: str, options: dict[str, Any], outputs: bool) -> None:
    """One plan serves all lengths where the graph is the same; samples are located at every step."""
    model = Packed(kind, **options)
    params = dict(model.named_parameters())
    for lengths in LENGTHS:
        losses = model(torch.randn(len(lengths), 6, 4), lengths, outputs)
        assert plan_of(losses, model).routed
        assert_agrees_with_the_loop(losses, params, 1e-10)


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_packed_sequences_in_another_order_at_every_step(kind: str) -> None:
    """Sorted as they come, the rows look regular: the plan must not take the order for granted."""
    model = Packed(kind)
    model.enter.requires_grad_(False)
    params = dict(model.rnn.named_parameters())
    for order in (torch.arange(4), torch.tensor([2, 0, 3, 1]), torch.arange(4)):
        x, lengths = torch.randn(4, 6, 4), torch.tensor([6, 4, 3, 1])
        packed = pack_padded_sequence(x, lengths, batch_first=True)
        rows = model.rnn(packed.data, None, packed.batch_sizes.tolist())[1][0][-1]
        losses = (rows.square().sum(1) * torch.eye(4)[order]).sum(1)  # in the order of a permutation
        assert_agrees_with_the_loop(losses, params, 1e-10)


def test_packed_and_padded_sequences_have_plans_of_their_own() -> None:
    model = Model("GRU", batch_first=False)
    params = dict(model.rnn.named_parameters())
    seen = []
    for x, sizes in ((torch.randn(6, 5, 4), []), (torch.randn(12, 4), [5, 4, 3]), (torch.randn(9, 4), [5, 3, 1])):
        states = model.rnn(x, None, sizes)[1]
        assert states[0].grad_fn is not None
        seen.append(node_entry(states[0].grad_fn, "", ()))
        assert_agrees_with_the_loop(states[0][-1].square().sum(1), params, 1e-10)
    assert seen[0] != seen[1] == seen[2]


def test_packed_sequences_of_which_few_count() -> None:
    """Only the longest reach the last time, and nothing tells whose the others are: they contribute nothing."""
    model = Packed("GRU")
    packed = pack_padded_sequence(torch.randn(4, 6, 4), LENGTHS[0], batch_first=True, enforce_sorted=False)
    for _ in range(2):
        rows = model.rnn(packed.data, None, packed.batch_sizes.tolist())[0]
        out = pad_packed_sequence(packed._replace(data=rows), batch_first=True)[0]
        assert_agrees_with_the_loop(out[:, -1].square().sum(1), dict(model.rnn.named_parameters()), 1e-10)


def test_packed_samples_that_mix_are_refused() -> None:
    model, x = Packed("LSTM"), torch.randn(4, 6, 4)
    losses = model(x - model.enter(x).mean(0), LENGTHS[0])
    with pytest.raises(NotSeparable):
        per_sample_norms(losses, dict(model.named_parameters()))


class Classifier(nn.Module):
    """Two layers in both directions, or cells, with weights as a GPU has them."""

    def __init__(self, kind: str, cells: bool, mixes: bool) -> None:
        super().__init__()
        layer = KINDS[kind](4, 5, batch_first=True, **({} if cells else {"num_layers": 2, "bidirectional": True}))
        self.enter, self.head, self.mixes = nn.Linear(4, 4), nn.Linear(5 if cells else 10, 3), mixes
        self.rnn = Unrolled(layer) if cells else Stacked(layer).flatten()

    def forward(self, x: Tensor) -> Tensor:
        below = self.enter(x)
        out: Tensor = self.head(self.rnn(below - below.detach().mean(0) if self.mixes else below)[0][:, -1])
        return out


@pytest.mark.parametrize("mixes", [False, True])
@pytest.mark.parametrize("cells", [False, True])
@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_a_private_run(kind: str, cells: bool, mixes: bool) -> None:
    """Passes are watched: a statistic that leaves no trace in gradients is seen behind these nodes too."""
    torch.manual_seed(0)
    model, data = Classifier(kind, cells, mixes), TensorDataset(torch.randn(64, 6, 4), torch.randint(3, (64,)))
    plan = Plan(FixedSize(64, 16), 4, Abadi(1.0), noise_multiplier=1.0)
    private = Private(plan, model, torch.optim.SGD(model.parameters(), lr=0.1), seed=1)
    with pytest.raises(NotSeparable) if mixes else nullcontext():
        for x, y in private.loader(data):
            private.step(F.cross_entropy(model(x), y, reduction="none"))
    assert private.ledger.steps == (0 if mixes else 4)


# What is refused.


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_a_kernel_with_another_order_of_gates_is_noticed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Autograd has the last word on the first step: a difference is an error, never a wrong sum."""
    order = torch.arange(20 if kind == "LSTM" else 15).roll(5)
    forward, backward = KERNELS["_cudnn_rnn"], KERNELS["_cudnn_rnn_backward"]

    def turned(x: Any, weights: Any, *rest: Any) -> Any:
        return forward(x, [weight[order] for weight in weights], *rest)

    def turned_back(x: Any, weights: Any, *rest: Any) -> Any:
        *others, found = backward(x, [weight[order] for weight in weights], *rest)
        return *others, [torch.empty_like(gradient).index_copy_(0, order, gradient) for gradient in found]

    monkeypatch.setitem(KERNELS, "_cudnn_rnn", turned)
    monkeypatch.setitem(KERNELS, "_cudnn_rnn_backward", turned_back)
    model = Model(kind)
    losses = losses_of(PROGRAMS["last output"], model, torch.randn(4, 6, 4))
    with pytest.raises(CheckFailed, match="disagree with autograd"):
        clipped_gradients(losses, dict(model.rnn.named_parameters()), Abadi(1.0))


REFUSED: dict[str, tuple[dict[str, Any], Program, str]] = {
    "dropout": ({"num_layers": 2, "dropout": 0.5}, PROGRAMS["last output"], "dropout=0"),
    "projections": ({"proj_size": 3}, lambda m, x: m.rnn(x)[1][0][-1], "proj_size.*cudnn.flags"),
    "projections, all outputs": ({"proj_size": 3}, lambda m, x: m.rnn(x)[0], "proj_size.*cudnn.flags"),
    "evaluation": ({}, lambda m, x: m.eval().rnn(x)[0], r"\.train\(\)"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_computed_again_is_refused(name: str) -> None:
    options, program, words = REFUSED[name]
    model = Model("LSTM", **options)
    losses = losses_of(program, model, torch.randn(4, 6, 4))
    with pytest.raises(UnsupportedNode, match=words):
        per_sample_norms(losses, dict(model.rnn.named_parameters()))


def test_dropout_is_refused_when_it_begins_later() -> None:
    """Its rate is no part of the structure: a plan that was made without it is met again."""
    model = Model("GRU", num_layers=2)
    params = dict(model.rnn.named_parameters())
    x = torch.randn(4, 6, 4)
    per_sample_norms(losses_of(PROGRAMS["last output"], model, x), params)
    model.rnn.layer.dropout = 0.5
    with pytest.raises(UnsupportedNode, match="dropout=0"):
        per_sample_norms(losses_of(PROGRAMS["last output"], model, x), params)


def test_dropout_of_a_single_layer_drops_nothing() -> None:
    with pytest.warns(UserWarning, match="non-zero dropout"):
        model = Model("GRU", dropout=0.5)
    agrees(PROGRAMS["last output"], model, "CudnnRnnBackward0")


@pytest.mark.parametrize("batch_first", [True, False])
def test_samples_that_are_read_as_times_are_refused(batch_first: bool) -> None:
    model = Model(batch_first=not batch_first)
    x = torch.randn(4, 6, 4) if batch_first else torch.randn(6, 4, 4)
    losses = model.rnn(x)[0].sum(1 if batch_first else 0).square().sum(1)
    with pytest.raises(NotSeparable):
        per_sample_norms(losses, dict(model.rnn.named_parameters()))


MIXING: dict[str, Program] = {
    "the state of a neighbour": lambda m, x: m.rnn(x, tuple(s.roll(1, 1) for s in m.rnn(x)[1]))[0][:, -1],
    "the mean of the batch": lambda m, x: m.rnn(x - m.enter(x).mean(0))[0][:, -1],
    "the outputs of a neighbour": lambda m, x: m.rnn(x)[0][:, -1] + m.rnn(x)[0][:, 0].roll(1, 0).tanh(),
}


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
@pytest.mark.parametrize("name", MIXING)
def test_samples_that_mix_are_refused(name: str, kind: str) -> None:
    model = Model(kind)
    with pytest.raises(NotSeparable):
        per_sample_norms(losses_of(MIXING[name], model, torch.randn(4, 6, 4)), dict(model.named_parameters()))


def test_a_state_that_all_samples_share_without_a_broadcast_is_refused() -> None:
    """It has a row for every sample of this batch: whose is it in the next one?"""
    model = Model("GRU")
    state = nn.Parameter(torch.randn(1, 4, 5))
    losses = model.rnn(torch.randn(4, 6, 4), (state,))[0][:, -1].square().sum(1)
    with pytest.raises((UnsupportedNode, NotSeparable)):
        per_sample_norms(losses, {"state": state, **dict(model.rnn.named_parameters())})


def test_frozen_layers_are_passed() -> None:
    """Nothing meets the batch in them, so nothing is asked of them."""
    model = Model("GRU", num_layers=2, dropout=0.5)
    model.rnn.requires_grad_(False)
    params = dict(model.enter.named_parameters())
    torch.manual_seed(0)
    assert_agrees_with_the_loop(losses_of(PROGRAMS["last hidden state"], model, torch.randn(4, 6, 4)), params, 1e-10)


# One cell at one time.


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_cells_agree_with_the_loop(kind: str, bias: bool, streaming: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if streaming:
        monkeypatch.setattr("clipwise.engine.plan._SMALL", 0)
    model = Unrolled(KINDS[kind](4, 5, bias=bias, batch_first=True))
    agrees(lambda m, x: torch.cat([m(x)[0].sum(1), m(x)[1][1]], 1), model, "MmBackward0")


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_several_rows_of_a_sample_in_a_cell(kind: str) -> None:
    model = Unrolled(KINDS[kind](4, 5, batch_first=True))
    name = {"LSTM": "ThnnFusedLstmCellBackward0", "GRU": "ThnnFusedGruCellBackward0"}[kind]
    agrees(lambda m, x: m(x.reshape(-1, 3, 4))[0].reshape(len(x), -1), model, name)


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_cells_are_not_probed_at_every_step(kind: str) -> None:
    model = Unrolled(KINDS[kind](4, 5, batch_first=True))
    plan = plan_of(model(torch.randn(4, 6, 4))[0].square().sum((1, 2)), model)
    assert plan.decided and plan.cacheable and not plan.routed


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_closed_gates_hide_no_layout(kind: str) -> None:
    model = Unrolled(KINDS[kind](4, 5, batch_first=True))
    with torch.no_grad():
        weights_of(model.layer)[2].fill_(1e4)
    plan = plan_of(model(torch.randn(4, 6, 4))[0].sum((1, 2)) * torch.ones(4), model)
    assert plan.decided and not plan.routed


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_cells_of_neighbours_are_refused(kind: str) -> None:
    model = Unrolled(KINDS[kind](4, 5, batch_first=True))
    losses = (model(torch.randn(4, 6, 4))[0] * model(torch.randn(4, 6, 4))[0].roll(1, 0)).sum((1, 2))
    with pytest.raises(NotSeparable):
        per_sample_norms(losses, dict(model.named_parameters()))


def test_the_states_of_a_cell_have_its_rows() -> None:
    assert CELL_STATES.layout(None, Layout(0, exact=True), 1) == Layout(0, exact=True)
    assert CELL_STATES.layout(None, Layout(1, exact=True), 1) is None
