"""Colours that leap over folded layers: only where rows are proven to keep their slots, and never with an old map."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from clipwise import NotSeparable
from clipwise.engine import per_sample_norms
from clipwise.engine.cache import ENGINE
from clipwise.engine.fold import folded
from clipwise.engine.graph import Graph, walk
from clipwise.engine.node import Node, Recurrence
from clipwise.engine.origin import Declared
from clipwise.engine.parameters import Parameters
from clipwise.engine.probing import AutogradProber

from .reference import assert_agrees_with_the_loop, loop_gradients, norms_of
from .test_packed import PROGRAMS, Packed, by_hand, losses_of

KINDS = [nn.LSTM, nn.GRU, nn.RNN]


def graph_of(losses: Tensor, model: nn.Module) -> Graph:
    parameters = list(model.parameters())
    return folded(walk(losses, {id(p): k for k, p in enumerate(parameters)}, parameters))


def layers_of(losses: Tensor, model: nn.Module) -> list[Node]:
    return [node for node in graph_of(losses, model).nodes if isinstance(node, Recurrence)]


def leaps(losses: Tensor, model: nn.Module) -> bool:
    """Whether the plan of this graph leaps, which it is made for if need be."""
    parameters = Parameters(dict(model.named_parameters()))
    with torch.no_grad():
        entry = ENGINE.entry(losses, ENGINE.graph(losses, parameters), parameters, Declared(()))
    return entry.plan.leaps is not None


def assert_norms(losses: Tensor, model: nn.Module) -> None:
    params = dict(model.named_parameters())
    expected = norms_of(loop_gradients(losses, params))
    assert torch.allclose(per_sample_norms(losses, params), expected, rtol=1e-10)


@pytest.mark.parametrize("name", PROGRAMS)
def test_warm_steps_send_no_colour_through_a_layer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program, kind, options = PROGRAMS[name]
    torch.manual_seed(0)
    model = Packed(kind, **options)
    params = dict(model.named_parameters())
    per_sample_norms(losses_of(program, model, [6, 3, 5, 3]), params)

    def refuse(*_: object) -> None:
        raise AssertionError("colours went all the way")

    monkeypatch.setattr(AutogradProber, "gradients", refuse)
    for lengths in ([6, 3, 5, 3], [3, 3, 6, 5], [5, 6, 3, 3]):
        assert_norms(losses_of(program, model, lengths), model)


@pytest.mark.parametrize("lengths", [[6, 3, 5, 3], [4, 4, 4, 4], [9, 1, 1, 1], [5, 4, 3, 2]])
@pytest.mark.parametrize("options", [{}, {"bidirectional": True}])
@pytest.mark.parametrize("kind", KINDS)
def test_slots_are_those_of_the_batch_sizes(
    kind: type[nn.RNNBase], options: dict[str, bool], lengths: list[int]
) -> None:
    model = Packed(kind, **options)
    losses = losses_of(Packed.outputs, model, lengths)
    sizes = [sum(length > t for length in lengths) for t in range(max(lengths))]
    expected = torch.cat([torch.arange(size) for size in sizes])
    for node in layers_of(losses, model):
        assert torch.equal(node.slots.rows, expected)
        assert torch.equal(node.slots.left[: len(expected)], expected)  # a state may follow


@pytest.mark.parametrize("name", ["LSTM", "LSTM, outputs", "LSTM, sorted before", "GRU", "RNN, rectified"])
def test_other_orders_of_the_same_lengths_are_told_apart(name: str) -> None:
    """All have as many rows at every time, and one plan: only whose they are differs."""
    program, kind, options = PROGRAMS[name]
    torch.manual_seed(1)
    model = Packed(kind, **options)
    for lengths in list(permutations([6, 5, 3, 2]))[::3]:
        assert_norms(losses_of(program, model, list(lengths)), model)


@pytest.mark.parametrize("kind", KINDS)
def test_as_many_rows_with_other_lengths(kind: type[nn.RNNBase]) -> None:
    torch.manual_seed(2)
    model = Packed(kind)
    for lengths in ([5, 3, 3, 3], [4, 4, 3, 3], [5, 4, 3, 2], [3, 3, 3, 5], [6, 3, 3, 2], [11, 1, 1, 1]):
        assert_norms(losses_of(Packed.outputs, model, lengths), model)


def stacked(model: nn.ModuleList, x: Tensor, lengths: Tensor, moved: Callable[[Tensor], Tensor]) -> Tensor:
    """Two layers, between which rows are moved by the user."""
    packed = pack_padded_sequence(x, lengths, batch_first=True)
    between = model[0](packed)[0]
    again = PackedSequence(moved(between.data), between.batch_sizes)
    return pad_packed_sequence(model[1](again)[0], batch_first=True)[0].square().sum((1, 2))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_the_user_moves_between_layers(kind: type[nn.RNNBase]) -> None:
    """By one order at all times they are other samples' rows as a whole. At one time alone they mix."""
    torch.manual_seed(3)
    model = nn.ModuleList([kind(4, 5, batch_first=True), kind(5, 5, batch_first=True)]).double()
    params = dict(model.named_parameters())
    x, lengths = torch.randn(4, 5, 4, dtype=torch.float64), torch.full((4,), 5)
    for order in ([0, 1, 2, 3], [2, 0, 3, 1], [3, 2, 1, 0]):
        rows = torch.cat([torch.tensor(order) + 4 * t for t in range(5)])
        assert_norms(stacked(model, x, lengths, lambda r, rows=rows: r[rows]), model)  # type: ignore[misc]
    for time in (0, 2, 4):
        rows = torch.arange(20)
        rows[4 * time : 4 * time + 4] = rows[4 * time : 4 * time + 4].flip(0)
        with pytest.raises(NotSeparable):
            per_sample_norms(stacked(model, x, lengths, lambda r, rows=rows: r[rows]), params)  # type: ignore[misc]


CELLS: dict[str, tuple[bool, Callable[[Tensor, Tensor], Tensor]]] = {
    "cut and joined in order": (True, lambda z, r: torch.cat([z[:2], z[2:]]) + r),
    "columns": (True, lambda z, r: torch.cat([z, z])[:4] + r[:, :5]),
    "rows that roll": (False, lambda z, r: torch.cat([z[1:], z[:1]]) + r),
    "two that change places": (False, lambda z, r: torch.cat([z[:2], z[3:], z[2:3]]) + r),
    "one row for all": (False, lambda z, r: z[:1] * torch.ones(4, 1, dtype=z.dtype) + r),
    "one row among all": (False, lambda z, r: z + r[1:2]),
    "a row over its neighbour": (False, lambda z, r: torch.cat([z[:1], z[:1], z[2:]]) + r),
}


@pytest.mark.parametrize("name", CELLS)
def test_rows_that_change_slots_inside_are_never_leapt_over(name: str) -> None:
    """After an honest step whose plan leaps, and whose structure is the same."""
    keeps, cell = CELLS[name]
    torch.manual_seed(4)
    model = Packed()
    params = dict(model.named_parameters())
    lengths = [6, 6, 5, 4]
    honest = losses_of(lambda m, x, n: by_hand(m, x, torch.add), model, lengths)
    assert leaps(honest, model)
    for _ in range(2):
        losses = losses_of(lambda m, x, n: by_hand(m, x, cell), model, lengths)
        assert keeps or all(layer.slots is None for layer in layers_of(losses, model))
        if keeps:
            assert_norms(losses, model)
        else:
            with pytest.raises(NotSeparable):
                per_sample_norms(losses, params)


HOOKS: dict[str, Callable[[Tensor], Tensor]] = {
    "moves rows": lambda g: g.flip(0),
    "scales": lambda g: 0.5 * g,
}


@pytest.mark.parametrize("name", HOOKS)
def test_hooks_inside_a_layer_are_seen_by_its_plan(name: str) -> None:
    """Where rows move inside, no plan leaps, and nothing is told that autograd does not tell."""
    torch.manual_seed(5)
    model = Packed()

    def hooked(z: Tensor, r: Tensor) -> Tensor:
        h = z + r
        h.register_hook(HOOKS[name])
        return h

    losses = losses_of(lambda m, x, n: by_hand(m, x, hooked), model, [6, 6, 5, 4])
    assert all(layer.slots is not None for layer in layers_of(losses, model))  # autograd does not show hooks
    try:
        assert_norms(losses, model)
    except NotSeparable:
        assert name == "moves rows"


def test_read_rows_that_roll_are_never_leapt_over() -> None:
    """Each sample reads the rows of its neighbour and nobody else's."""
    torch.manual_seed(8)
    model = Packed()
    for roll in (False, True):
        losses = losses_of(
            lambda m, x, n, roll=roll: by_hand(  # type: ignore[misc]
                m, x, lambda z, r: z + (torch.cat([r[1:], r[:1]]) if roll else r)
            ),
            model,
            [6, 6, 5, 4],
        )
        assert all((layer.slots is None) == roll for layer in layers_of(losses, model))
        assert_norms(losses, model)


@pytest.mark.parametrize("layers", [1, 2])
def test_hooks_on_what_leaves_a_layer_are_called_once(layers: int) -> None:
    torch.manual_seed(6)
    model = Packed(num_layers=layers)

    def program(m: Packed, x: Tensor, n: Tensor) -> Tensor:
        out, (state, _) = m.rnn(m.packed(m.enter(x), n))
        out.data.register_hook(HOOKS["scales"])
        return pad_packed_sequence(out, batch_first=True)[0].sum(1) + state.sum(0)

    for lengths in ([6, 3, 5, 3], [3, 6, 5, 3]):
        assert_norms(losses_of(program, model, lengths), model)


def test_a_function_of_the_users_above_what_is_also_read_elsewhere() -> None:
    """Its backward is called by autograd alone: colours go all the way."""

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return 2 * x

        @staticmethod
        def backward(ctx: object, gradient: Tensor) -> Tensor:  # type: ignore[override]
            return 2 * gradient

    torch.manual_seed(7)
    model = Packed()
    params = dict(model.named_parameters())
    for lengths in ([6, 3, 5, 3], [4, 6, 6, 2]):
        losses = losses_of(
            lambda m, x, n: torch.cat([m.states(e := m.enter(x), n), Twice.apply(e).sum(1)], 1), model, lengths
        )
        assert_agrees_with_the_loop(losses, params, 1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_without_a_gradient_contradict_no_layout(kind: type[nn.RNNBase]) -> None:
    """Rows of samples 0 1 0 0, the last of which nobody reads, may be taken for 0 1 0 1: nothing is lost by it."""
    torch.manual_seed(0)
    model = kind(3, 4).double()
    for lengths in ([3, 1], [3, 1], [2, 2], [1, 3]):
        packed = pack_padded_sequence(torch.randn(3, 2, 3).double(), torch.tensor(lengths), enforce_sorted=False)
        losses = pad_packed_sequence(model(packed)[0])[0][:2].square().sum((0, 2))
        assert_norms(losses, model)
