"""Recurrent layers over packed sequences: one product for all times, and one plan for all lengths."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from clipwise import Abadi, NotSeparable
from clipwise.engine import check, clipped_gradients, per_sample_gradients, per_sample_norms
from clipwise.engine.cache import ENGINE
from clipwise.engine.fold import folded
from clipwise.engine.graph import walk
from clipwise.engine.layout import NARROW, WIDE, Probe, drawn, owners_by_digits
from clipwise.engine.node import RECURRENCE

from .reference import assert_agrees_with_the_loop, flat, loop_gradients, norms_of, relative_errors

Program: TypeAlias = Callable[["Packed", Tensor, Tensor], Tensor]


class Packed(nn.Module):
    """A recurrent layer, a layer before it, and a parameter."""

    def __init__(self, kind: type[nn.RNNBase] = nn.LSTM, **options: Any) -> None:
        super().__init__()
        self.enter = nn.Linear(4, 4)
        self.rnn = kind(4, 5, batch_first=True, **options)
        self.scale = nn.Parameter(torch.rand(5))
        self.double()

    def packed(self, x: Tensor, lengths: Tensor) -> PackedSequence:
        return pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)

    def states(self, x: Tensor, lengths: Tensor) -> Tensor:
        """Of all layers and directions, of sample after sample."""
        states = self.rnn(self.packed(x, lengths))[1]
        return torch.cat(states if isinstance(states, tuple) else [states], 2).transpose(0, 1).flatten(1)

    def outputs(self, x: Tensor, lengths: Tensor) -> Tensor:
        """Of all times."""
        return pad_packed_sequence(self.rnn(self.packed(x, lengths))[0], batch_first=True)[0].flatten(1)


def sorted_before(model: Packed, x: Tensor, lengths: Tensor) -> Tensor:
    order = lengths.argsort(descending=True)
    out, states = model.rnn(pack_padded_sequence(x[order], lengths[order], batch_first=True))
    return pad_packed_sequence(out, batch_first=True)[0].sum(1) + states[0][-1]


PROGRAMS: dict[str, tuple[Program, type[nn.RNNBase], dict[str, Any]]] = {
    "LSTM": (Packed.states, nn.LSTM, {}),
    "LSTM, outputs": (Packed.outputs, nn.LSTM, {}),
    "LSTM, sorted before": (sorted_before, nn.LSTM, {}),
    "LSTM, two layers and directions": (Packed.states, nn.LSTM, {"num_layers": 2, "bidirectional": True}),
    "LSTM, no biases": (Packed.states, nn.LSTM, {"bias": False}),
    "LSTM, after a layer": (lambda m, x, n: m.states(m.enter(x), n), nn.LSTM, {"num_layers": 2, "dropout": 0.5}),
    "LSTM, and what it reads": (
        lambda m, x, n: torch.cat([m.states(e := m.enter(x), n), e.sum(1).tanh()], 1), nn.LSTM, {"num_layers": 2},
    ),
    "GRU": (Packed.states, nn.GRU, {}),
    "GRU, no biases, both directions": (Packed.outputs, nn.GRU, {"bias": False, "bidirectional": True}),
    "GRU, two layers after another": (lambda m, x, n: m.states(m.enter(x), n), nn.GRU, {"num_layers": 2}),
    "RNN": (Packed.states, nn.RNN, {}),
    "RNN, rectified": (Packed.outputs, nn.RNN, {"nonlinearity": "relu"}),
}  # fmt: skip
LENGTHS = ([6, 3, 5, 3], [6, 3, 5, 3], [2, 4, 7, 4], [5, 5, 5, 5], [9, 4, 4, 8, 6])


def losses_of(program: Program, model: Packed, lengths: list[int], scale: float = 1.0) -> Tensor:
    x = scale * torch.randn(len(lengths), max(lengths), 4, dtype=torch.float64)
    return program(model, x, torch.tensor(lengths)).square().sum(1)


def chains(losses: Tensor, model: Packed) -> int:
    parameters = list(model.parameters())
    return folded(walk(losses, {id(p): k for k, p in enumerate(parameters)}, parameters)).names.count(RECURRENCE)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_folded_layer_agrees_with_the_loop(name: str, streaming: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the lengths; for some of them all samples are equally long."""
    if streaming:
        monkeypatch.setattr("clipwise.engine.plan._SMALL", 0)
    program, kind, options = PROGRAMS[name]
    torch.manual_seed(0)
    model = Packed(kind, **options)
    params = dict(model.named_parameters())
    for lengths in LENGTHS:
        losses = losses_of(program, model, lengths)
        assert RECURRENCE in {node.name for node in check(losses, params).nodes}
        assert_agrees_with_the_loop(losses, params, 1e-10)


@pytest.mark.parametrize("name", ["LSTM", "LSTM, outputs", "LSTM, two layers and directions", "GRU", "RNN"])
def test_one_plan_serves_all_lengths(name: str) -> None:
    program, kind, options = PROGRAMS[name]
    model = Packed(kind, **options)
    before = ENGINE.plans
    for _ in range(6):
        lengths = [4, 9, *torch.randint(3, 10, (4,)).tolist()]
        per_sample_norms(losses_of(program, model, lengths), dict(model.named_parameters()))
    assert ENGINE.plans == before + 1


def test_a_bad_sample_spoils_no_other() -> None:
    torch.manual_seed(1)
    model = Packed()
    params = dict(model.rnn.named_parameters())
    x, lengths = torch.randn(5, 6, 4, dtype=torch.float64), torch.tensor([3, 6, 4, 6, 5])
    expected = clipped_gradients(model.states(x[:4], lengths[:4]).square().sum(1), params, Abadi(1.0))
    x[4, 2, 1] = torch.nan
    for _ in range(2):
        found = clipped_gradients(model.states(x, lengths).square().sum(1), params, Abadi(1.0))
        assert found.bad.tolist() == [False] * 4 + [True]
        for name, gradient in expected.gradients.items():
            assert torch.allclose(found.gradients[name], gradient)


MIXING: dict[str, Program] = {
    "states of a neighbour": lambda m, x, n: (h := m.states(x, n)) + h.roll(1, 0),
    "a mean of the inputs": lambda m, x, n: m.states((e := m.enter(x)) - e.mean(0), n),
    "a mean of the outputs": lambda m, x, n: (o := m.outputs(x, n)) * o.mean(0),
}


@pytest.mark.parametrize("name", MIXING)
def test_samples_that_mix_are_refused_also_after_an_honest_step(name: str) -> None:
    model, lengths = Packed(), [6, 3, 5, 3]
    params = dict(model.named_parameters())
    per_sample_norms(losses_of(Packed.states, model, lengths), params)
    for _ in range(2):
        with pytest.raises(NotSeparable):
            per_sample_norms(losses_of(MIXING[name], model, lengths), params)


def test_rows_that_begin_to_move_between_samples_are_refused() -> None:
    """The graphs of both steps have one structure, and so one plan: only what is read at every step tells."""
    model, lengths = Packed(), [6, 3, 5, 3]
    params = dict(model.named_parameters())

    def picked(index: list[int]) -> Program:
        return lambda m, x, n: (h := m.states(x, n)) + 2 * h.index_select(0, torch.tensor(index))

    per_sample_norms(losses_of(picked([0, 1, 2, 3]), model, lengths), params)
    with pytest.raises(NotSeparable):
        per_sample_norms(losses_of(picked([1, 0, 2, 3]), model, lengths), params)


def by_hand(model: Packed, x: Tensor, cell: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Packed rows of three times, with some of the weights of the first layer."""
    weight, bias = model.rnn.weight_hh_l0[:5].clone(), model.rnn.bias_hh_l0[:5].clone()
    times = x[:, :3].transpose(0, 1).flatten(0, 1)
    rows = nn.functional.linear(times, model.rnn.weight_ih_l0[:5].clone(), model.rnn.bias_ih_l0[:5].clone())
    h = torch.zeros(len(x), 5, dtype=x.dtype)
    steps = []
    for t in range(3):
        h = cell(torch.addmm(bias, h, weight.t()), rows[t * len(x) : (t + 1) * len(x)]).tanh()
        steps.append(h)
    return torch.cat(steps).view(3, len(x), 5).sum(0)


APART: dict[str, tuple[int, Program]] = {
    "plain": (1, lambda m, x, n: by_hand(m, x, torch.add)),
    "a parameter in every step": (0, lambda m, x, n: by_hand(m, x, lambda z, r: z * m.scale + r)),
    "an operation that is not known inside": (0, lambda m, x, n: by_hand(m, x, lambda z, r: (z + r).exp())),
    "rows that are read twice": (0, lambda m, x, n: by_hand(m, x, lambda z, r: z + r + r.flip(1)[:, [4, 3, 2, 1, 0]])),
    "a first state that is computed": (
        0, lambda m, x, n: m.rnn(m.packed(x, n), (s := m.enter(x[:, 0])[None, :, [0, 1, 2, 3, 3]], s))[1][0][0],
    ),
    "the same layer twice": (0, lambda m, x, n: m.states(x, n) + m.states(x.flip(2), n)),
}  # fmt: skip


@pytest.mark.parametrize("name", APART)
def test_what_is_more_than_a_chain_of_products_is_not_folded(name: str) -> None:
    torch.manual_seed(2)
    count, program = APART[name]
    model = Packed()
    losses = losses_of(program, model, [6, 6, 5, 4])
    params = dict(model.named_parameters())
    assert chains(losses, model) == count
    loop = loop_gradients(losses, params)
    found = per_sample_gradients(losses, params)
    assert relative_errors(flat(found), flat(loop), norms_of(loop), torch.float64).max() <= 1e-10


@pytest.mark.parametrize("exponents", [NARROW, WIDE])
def test_owners_are_read_in_either_palette(exponents: range) -> None:
    torch.manual_seed(3)
    owners, plain = torch.randint(1100, (300,)), torch.randn(300, 7)
    colours = drawn(1100, plain, exponents)
    coloured = [plain * colour[owners].unsqueeze(1) for colour in colours.each]
    probe = Probe(plain, coloured, colours, torch.zeros(1100, dtype=torch.bool))
    assert torch.equal(owners_by_digits(probe, 0), owners)
    coloured[-1][5, 3] *= 1.001
    assert owners_by_digits(probe, 0) is None


def test_a_layer_that_reads_no_sample_is_shared_by_all() -> None:
    """Such as one over the names of classes: nothing is folded, whichever plan is used."""
    torch.manual_seed(4)
    model, names, lengths = Packed(), torch.randn(3, 5, 4, dtype=torch.float64), torch.tensor([5, 2, 4])
    params = dict(model.named_parameters())
    for size in (4, 4, 5):
        x = torch.randn(size, 10, dtype=torch.float64)
        losses = (x @ model.states(names, lengths).T).square().sum(1)
        loop = loop_gradients(losses, params)
        found = per_sample_gradients(losses, params)
        assert relative_errors(flat(found), flat(loop), norms_of(loop), torch.float64).max() <= 1e-10


def test_the_same_rows_read_for_different_samples_are_refused() -> None:
    """Two layers that read the same data in different orders: a loss would be computed from two samples."""
    one, other = Packed(), Packed()
    params = {**{f"one.{k}": p for k, p in one.rnn.named_parameters()}}
    params.update({f"other.{k}": p for k, p in other.rnn.named_parameters()})
    x, lengths = torch.randn(4, 6, 4, dtype=torch.float64), torch.tensor([6, 5, 5, 3])
    packed = pack_padded_sequence(x, lengths, batch_first=True)
    honest = one.rnn(packed)[1][0][0] + other.rnn(packed)[1][0][0]
    per_sample_norms(honest.square().sum(1), params)
    with pytest.raises(NotSeparable):
        per_sample_norms((one.rnn(packed)[1][0][0] + other.rnn(packed)[1][0][0].flip(0)).square().sum(1), params)


@pytest.mark.parametrize("lengths", [[6, 4, 4, 2], [5, 5, 3, 3], [7, 5, 3, 1]])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_plan_of_equal_lengths_tells_other_lengths(kind: type[nn.RNNBase], lengths: list[int]) -> None:
    """Sorted, and as many rows as before: only what is read at every step tells whose rows they are."""
    torch.manual_seed(5)
    model = Packed(kind)
    params = dict(model.rnn.named_parameters())
    for each in ([4, 4, 4, 4], lengths):
        x = torch.randn(4, max(each), 4, dtype=torch.float64)
        packed = pack_padded_sequence(x, torch.tensor(each), batch_first=True)
        losses = pad_packed_sequence(model.rnn(packed)[0], batch_first=True)[0].square().sum((1, 2))
        loop = loop_gradients(losses, params)
        assert torch.allclose(per_sample_norms(losses, params), norms_of(loop), rtol=1e-10)


INSIDE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a row added to all": lambda z, r: z + r + z[:1],
    "a row times all": lambda z, r: z * z[:1] + r,
}


@pytest.mark.parametrize("name", INSIDE)
def test_samples_that_begin_to_mix_inside_a_folded_layer_are_refused(name: str) -> None:
    """What lies between the products is no part of the structure."""
    model = Packed()
    params = dict(model.rnn.named_parameters())
    per_sample_norms(losses_of(lambda m, x, n: by_hand(m, x, torch.add), model, [6, 6, 5, 4]), params)
    mixed = losses_of(lambda m, x, n: by_hand(m, x, INSIDE[name]), model, [6, 6, 5, 4])
    assert chains(mixed, model) == 1
    with pytest.raises(NotSeparable):
        per_sample_norms(mixed, params)


@pytest.mark.parametrize("frozen", ["weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0", "weight_ih_l1"])
def test_frozen_weights_are_no_part_of_a_folded_layer(frozen: str) -> None:
    torch.manual_seed(6)
    model = Packed(num_layers=2)
    model.rnn.get_parameter(frozen).requires_grad_(False)
    params = {name: p for name, p in model.rnn.named_parameters() if p.requires_grad}
    for lengths in ([7, 7, 6, 3, 1], [1 + k % 7 for k in range(35)]):
        losses = losses_of(Packed.states, model, lengths)
        assert torch.allclose(per_sample_norms(losses, params), norms_of(loop_gradients(losses, params)), rtol=1e-10)
