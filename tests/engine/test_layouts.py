"""Which row belongs to which sample: the plan is cached, and must never be used where it does not hold."""

from __future__ import annotations

from typing import NoReturn

import pytest
import torch
from torch import Tensor, nn

from clipwise.clipping import Abadi, Flat, Layerwise, Normalize
from clipwise.engine import Clipped, cache, check, clipped_gradients, passing, per_sample_gradients, per_sample_norms
from clipwise.engine.graph import walk
from clipwise.engine.layout import NARROW, Probe, candidates, drawn, owners_by_digits
from clipwise.engine.node import saved_axes
from clipwise.engine.ops import op_of
from clipwise.engine.owners import StalePlan
from clipwise.engine.routes import is_identity
from clipwise.errors import NotSeparable, UnsupportedNode
from tests.zoo import BY_NAME, named

from .reference import clipped_loop, flat, flat_sum, loop_gradients, norms_of, relative_errors, tolerance

SLICED = [
    "mlp_on_sequences",
    "embedding_tied_head",
    "lstm",
    "gru",
    "attention_sequence_first",
    "gpt2",
    "llama",
    "mamba",
]


@pytest.mark.parametrize("name", SLICED)
def test_sequence_lengths_may_change_from_batch_to_batch(name: str) -> None:
    case = BY_NAME[name]
    model = case.model()
    params = named(model)
    for batch, length in [(3, 4), (4, 4), (4, 3), (3, 2), (2, 4), (4, 1), (1, 3)]:
        data = {key: value[:, :length] for key, value in case.draw(batch, seed=length).items()}
        losses = case.loss(model, **data)
        loop = loop_gradients(losses, params)
        gradients = per_sample_gradients(losses, params)
        error = relative_errors(flat(gradients), flat(loop), norms_of(loop), torch.float64).max()
        assert error <= tolerance(case, losses, torch.float64)


@pytest.mark.parametrize("name", ["mlp_on_sequences", "transformer_encoder_sequence_first", "bert", "lstm", "conv2d"])
def test_batch_of_one_may_come_first_or_last(name: str) -> None:
    """The layout is never learnt from a batch of one, nor spoilt by one."""
    case = BY_NAME[name]
    for order in ((1, 4, 8), (8, 1, 4), (4, 8, 1)):
        model = case.model()
        params = named(model)
        for batch in order:
            losses = case.losses(model, batch)
            loop = loop_gradients(losses, params)
            norms = per_sample_norms(losses, params)
            assert relative_errors(norms, norms_of(loop), norms_of(loop), torch.float64).max() <= 1e-10


def rows_to_samples(layer: torch.nn.Linear, x: Tensor, order: Tensor, how: str) -> Tensor:
    """Losses of samples whose rows lie in `order`; only numbers, not the graph's structure, say which row is whose."""
    batch, length, width = x.shape
    out = torch.tanh(layer(x.reshape(-1, width)[order])).square().sum(1)
    back = order.argsort()
    if how == "index":
        out = out[back]
    elif how == "gather":
        out = out.gather(0, back)
    elif how == "index_select":
        out = out.index_select(0, back)
    elif how == "index_copy":
        out = torch.zeros_like(out).index_copy(0, order, out)
    elif how == "index_add":
        return torch.zeros(batch, dtype=x.dtype).index_add(0, order // length, out)
    elif how == "scatter_add":
        return torch.zeros(batch, dtype=x.dtype).scatter_add(0, order // length, out)
    elif how == "matrix":
        return torch.nn.functional.one_hot(order // length, batch).to(x.dtype).T @ out
    return out.view(batch, length).sum(1)


@pytest.mark.parametrize("how", ["index", "gather", "index_select", "index_copy", "index_add", "scatter_add", "matrix"])
def test_a_cached_plan_is_not_used_for_rows_that_lie_otherwise(how: str) -> None:
    """Same structure, other row-to-sample map: exact every time, or refused; never the old map."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(6, 3).double()
    params = named(layer)
    batch, length = 4, 3
    major = torch.arange(batch * length)
    minor = major.view(batch, length).T.reshape(-1)
    for order in (major, minor, major, torch.randperm(batch * length), torch.randperm(batch * length)):
        x = torch.randn(batch, length, 6, dtype=torch.float64)
        losses = rows_to_samples(layer, x, order, how)
        loop = loop_gradients(losses, params)
        try:
            norms = per_sample_norms(losses, params, retain_graph=True)
            clipped = clipped_gradients(losses, params, Abadi(0.1))
        except (UnsupportedNode, NotSeparable):
            continue
        expected = flat(clipped_loop(loop, Flat(Abadi(0.1)))).sum(0)
        assert torch.allclose(norms, norms_of(loop), rtol=1e-10)
        assert torch.allclose(flat_sum(clipped.gradients), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("batch", [1, 2, 15, 16, 17, 128, 129])
def test_no_two_samples_have_the_same_colours(batch: int) -> None:
    """One for two samples. Two have 64 combinations, four for each of 16 samples; three serve 128, then four."""
    colours = drawn(batch, torch.zeros((), dtype=torch.float64), NARROW).each
    assert len(colours) == 1 + (batch > 2) + (batch > 16) + (batch > 128)
    assert len(torch.stack(colours, 1).unique(dim=0)) == batch


@pytest.mark.parametrize("apart", [16, 17, 32])
def test_samples_that_mix_far_apart_are_refused(apart: int) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2).double()
    y = model(torch.randn(48, 3, dtype=torch.float64))
    with pytest.raises(NotSeparable):
        per_sample_norms((y.tanh() + y.roll(apart, 0)).square().sum(1), named(model))


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize(("shape", "axis"), [((40,), 0), ((40, 3), 0), ((3, 40), 1), ((2, 40, 3), 1), ((2, 3, 40), 2)])
def test_the_owner_of_each_position_is_read_off_its_colours(
    shape: tuple[int, ...], axis: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    batch, view = 20, [1] * len(shape)
    view[axis] = -1
    owners = torch.randint(batch, (40,))
    gradient, bad = torch.randn(shape, dtype=dtype), torch.zeros(batch, dtype=torch.bool)
    colours = drawn(batch, torch.zeros((), dtype=torch.float64))
    coloured = [gradient * colour[owners].view(view) for colour in colours.each]
    assert torch.equal(owners_by_digits(Probe(gradient, coloured, colours, bad), axis), owners)  # type: ignore[arg-type]
    neighbours = [gradient * (colour[owners] + colour[owners.flip(0)]).view(view) for colour in colours.each]
    assert owners_by_digits(Probe(2 * gradient, neighbours, colours, bad), axis) is None


@pytest.mark.parametrize("shift", [0, 1, 2, -1])
def test_losses_in_another_order_than_the_samples(shift: int) -> None:
    """Norms follow the losses, whatever rows they come from, or are refused; the structure does not tell the shift."""
    case = BY_NAME["mlp"]
    model = case.model()
    params, losses = named(model), case.losses(model, 5)
    loop = loop_gradients(losses, params)
    try:
        norms = per_sample_norms(losses.roll(shift, 0), params)
    except NotSeparable:
        assert shift != 0
        return
    assert torch.allclose(norms, norms_of(loop).roll(shift, 0), rtol=1e-10)


class Gated(torch.nn.Module):
    """Each token counts as far as its gate is open; batch first, or sequence first inside."""

    def __init__(self, sequence_first: bool) -> None:
        super().__init__()
        self.sequence_first = sequence_first
        self.layer = torch.nn.Linear(3, 2)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        if not self.sequence_first:
            return (torch.tanh(self.layer(x)) * gate.unsqueeze(-1)).square().sum((1, 2))
        return (torch.tanh(self.layer(x.transpose(0, 1))) * gate.T.unsqueeze(-1)).square().sum((0, 2))


GATES = {
    "closed_for_all": torch.zeros(2, 2),
    "fits_both_layouts": torch.eye(2),
    "fits_both_layouts_crossed": torch.eye(2).flip(0),
    "one_sample_only": torch.tensor([[0.0, 1.0], [0.0, 0.0]]),
    "first_tokens": torch.tensor([[1.0, 0.0], [1.0, 0.0]]),
}


@pytest.mark.parametrize("gate", GATES.values(), ids=GATES)
@pytest.mark.parametrize("sequence_first", [False, True], ids=["batch_first", "sequence_first"])
def test_a_first_batch_that_hides_the_layout_teaches_nothing_wrong(sequence_first: bool, gate: Tensor) -> None:
    """Two samples of two tokens, some without gradient: the layout cannot be told yet. Then all gates open."""
    torch.manual_seed(0)
    model = Gated(sequence_first).double()
    params = named(model)
    for step in (gate, gate, torch.ones(2, 2), torch.ones(2, 2), torch.ones(4, 2), torch.ones(2, 4)):
        losses = model(torch.randn(*step.shape, 3, dtype=torch.float64), step.double())
        loop = loop_gradients(losses, params)
        norms = per_sample_norms(losses, params, retain_graph=True)
        clipped = clipped_gradients(losses, params, Abadi(0.1))
        assert torch.allclose(norms, norms_of(loop), rtol=1e-10, atol=1e-12)
        expected = flat(clipped_loop(loop, Flat(Abadi(0.1)))).sum(0)
        assert torch.allclose(flat_sum(clipped.gradients), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("batch", [2, 4, 6, 12])
def test_a_constant_table_as_long_as_the_batch_is_exact_or_refused(batch: int) -> None:
    """Funnel multiplies a table of positions by a parameter: with as many rows as samples it could be a batch."""
    case = BY_NAME["funnel"]
    model = case.model()
    params = named(model)
    losses = case.losses(model, batch)
    loop = loop_gradients(losses, params)
    try:
        norms = per_sample_norms(losses, params)
    except NotSeparable:
        return
    assert torch.allclose(norms, norms_of(loop), rtol=1e-10)


def agree(losses: Tensor, params: dict[str, torch.nn.Parameter]) -> None:
    loop = loop_gradients(losses, params)
    assert torch.allclose(per_sample_norms(losses, params), norms_of(loop), rtol=1e-10)


def test_a_model_that_is_gone_leaves_no_plan_to_another() -> None:
    """Python gives a new tensor the identity of a freed one; a plan must not outlive its parameters that way."""
    for step in range(60):
        torch.manual_seed(step)
        model = torch.nn.Conv2d(2, 2 + step % 3, 3, padding=step % 2).double()
        losses = model(torch.randn(4, 2, 6, 6, dtype=torch.float64)).square().flatten(1).sum(1)
        agree(losses, named(model))
        del model, losses


def test_structure_that_changes_with_the_data() -> None:
    """A depth that the data decides: each structure has its own plan."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(4, 4).double()
    params = named(layer)
    for depth in (1, 3, 2, 3, 1, 2):
        h = torch.randn(3, 4, dtype=torch.float64)
        for _ in range(depth):
            h = torch.tanh(layer(h))
        losses = h.square().sum(1)
        agree(losses, params)


def packed(model: torch.nn.Linear, lengths: list[int], how: str) -> Tensor:
    """Losses of samples of different lengths whose rows lie one after the other, pooled in several ways."""
    h = model(torch.randn(sum(lengths), 6, dtype=torch.float64)).tanh()
    owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    member = owner[None] == torch.arange(len(lengths))[:, None]  # (B, rows)
    if how == "split":
        return torch.stack([part.square().sum() for part in h.split(lengths)])
    if how == "mask":
        return (member[:, :, None] * h[None]).square().sum((1, 2))
    if how == "where":
        return torch.where(member[:, :, None], h[None], 0).square().sum((1, 2))
    return torch.zeros(len(lengths), dtype=h.dtype).scatter_reduce(0, owner, h.square().sum(1), "sum")


@pytest.mark.parametrize("how", ["split", "mask", "where", "scatter_reduce"])
def test_a_plan_from_equal_lengths_is_not_used_for_unequal_ones(how: str) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 3).double()
    params = named(model)
    for lengths in ([3, 3, 3, 3], [1, 5, 2, 4], [3, 3, 3, 3], [4, 4, 2, 2]):
        losses = packed(model, lengths, how)
        agree(losses, params)


def test_views_of_a_batch_may_come_in_other_numbers() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 3).double()
    params = named(model)
    for views, length in ((1, 4), (2, 4), (4, 2), (2, 8), (1, 4)):
        losses = model(torch.randn(views, 4, length, 6, dtype=torch.float64)).square().sum((0, 2, 3))
        agree(losses, params)


def test_a_mixing_term_that_wakes_up_later_is_refused() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 3).double()
    params = named(model)
    x = torch.randn(5, 6, dtype=torch.float64)

    def losses(margin: float) -> Tensor:
        h = model(x)
        return h.square().sum(1) + torch.relu(margin - (h - h.roll(1, 0)).square().sum(1))

    per_sample_norms(losses(-1.0), params)
    with pytest.raises(NotSeparable):
        per_sample_norms(losses(100.0), params)


@pytest.mark.parametrize("affine", [True, False])
def test_batch_norm_switched_to_training_after_planning_is_refused(affine: bool) -> None:
    torch.manual_seed(0)
    norm = torch.nn.BatchNorm1d(4, affine=affine)
    model = torch.nn.Sequential(torch.nn.Linear(6, 4), norm.requires_grad_(False), torch.nn.Linear(4, 2)).double()
    x = torch.randn(5, 6, dtype=torch.float64)
    per_sample_norms(model.eval()(x).square().sum(1), named(model))
    with pytest.raises(NotSeparable):
        per_sample_norms(model.train()(x).square().sum(1), named(model))


def test_a_group_that_is_small_beside_another_is_still_clipped() -> None:
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(5, 1), "b": torch.nn.Linear(5, 1)})
    x = torch.randn(3, 5)
    losses = 1e8 * model["a"](x)[:, 0] + 20 * model["b"](x)[:, 0]
    clipped = clipped_gradients(losses, dict(model.named_parameters()), Layerwise(Abadi(1.0)))
    assert flat_sum(clipped.gradients).norm() <= 3 * 2**0.5 * (1 + 1e-5)


@pytest.mark.parametrize("batch", [1, 3])
def test_a_layer_whose_gradient_is_rounding_contributes_nothing(batch: int) -> None:
    """A shift before a normalization: its gradient is zero but for rounding, and points anywhere."""
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({"shift": torch.nn.Linear(1, 1), "out": torch.nn.Linear(5, 1)})
    h = torch.randn(batch, 5) + model["shift"](torch.ones(batch, 1))
    losses = model["out"](torch.nn.functional.layer_norm(h, (5,)))[:, 0].square()
    clipped = clipped_gradients(losses, dict(model.named_parameters()), Layerwise(Normalize(1.0)))
    assert isinstance(clipped.factors, dict)
    assert clipped.factors["out"].all() and not clipped.factors["shift"].any()


def test_a_hidden_layer_may_have_its_rows_in_another_order_than_the_data() -> None:
    """Batch first, then sequence first, before an operation that is probed at every step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 5)).double()
    for _ in range(2):
        hidden = model[1](model[0](torch.randn(4, 3, 4, dtype=torch.float64)).tanh().transpose(0, 1))
        losses = torch.special.i0e(hidden).sum((0, 2))
        loop = loop_gradients(losses, named(model))
        found = per_sample_gradients(losses, named(model))
        assert relative_errors(flat(found), flat(loop), norms_of(loop), torch.float64).max() <= 1e-10


def test_a_projected_table_of_positions_is_shared() -> None:
    """Its length is a multiple of the batch size, but nothing brings its rows together."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(3, 5, dtype=torch.float64))
    table = torch.sin(torch.arange(24.0, dtype=torch.float64)).view(8, 3)
    losses = (2 * (table @ weight).tanh() + torch.randn(4, 8, 5, dtype=torch.float64)).square().sum((1, 2))
    loop = loop_gradients(losses, {"w": weight})
    found = per_sample_gradients(losses, {"w": weight})
    assert relative_errors(flat(found), flat(loop), norms_of(loop), torch.float64).max() <= 1e-10


def test_a_table_of_positions_is_shared_also_where_a_bad_sample_fills_its_gradient() -> None:
    """Else nobody's gradient would reach the table in the first batch."""

    def clipped(x: Tensor) -> Tensor:
        torch.manual_seed(0)
        model = nn.ModuleDict({"positions": nn.Embedding(3, 4), "layer": nn.Linear(4, 2)})
        out = model["layer"]((x + model["positions"](torch.arange(3))).tanh())
        return flat_sum(clipped_gradients(out.square().sum((1, 2)), named(model), Abadi(1.0)).gradients)

    x = torch.randn(4, 3, 4, generator=torch.Generator().manual_seed(0))
    spoilt = x.clone()
    spoilt[1] = torch.nan
    torch.testing.assert_close(clipped(spoilt), clipped(x[[0, 2, 3]]))


def test_a_layout_is_seen_behind_a_closed_gate_by_a_part_of_each_sample() -> None:
    layer, gate = nn.Linear(4, 5), nn.Parameter(torch.zeros(()))
    losses = (gate * layer(torch.randn(4, 3, 4))[:, 0, :2]).sum(1)
    found = check(losses, {"gate": gate, **named(layer)})
    assert "no gradient in this batch" not in {node.layout for node in found.nodes}


def test_a_batch_that_contradicts_its_own_plan_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def stale(*args: object, **options: object) -> NoReturn:
        raise StalePlan

    monkeypatch.setattr(cache, "Backward", stale)
    model = nn.Linear(3, 2)
    losses = model(torch.randn(4, 3)).sum(1)
    with pytest.raises(NotSeparable, match="no layout holds for all samples"):
        per_sample_norms(losses, model.parameters())


def test_rows_that_data_moved_are_found_past_a_bad_sample() -> None:
    """Its loss is finite and its gradient is not, which hides whose its row is: it is left out, and nobody else."""

    def clipped(x: Tensor) -> Clipped[dict[str, Tensor]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 5, bias=False), nn.Tanh(), nn.Linear(5, 2, bias=False))
        order = x[:, 0].argsort()
        out = model(x[order])[order.argsort()]
        return clipped_gradients(out.square().sum(1).sqrt(), named(model), Abadi(0.1))

    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    x[3] = 0.0
    found = clipped(x)
    assert found.bad.tolist() == [False, False, False, True, False, False]
    torch.testing.assert_close(flat_sum(found.gradients), flat_sum(clipped(x[[0, 1, 2, 4, 5]]).gradients))


def test_the_regular_layouts_of_an_axis_are_those_that_divide_it() -> None:
    assert [layout.inner for layout in candidates((12,), 2)] == [None, 1, 2, 3]
    assert [layout.axis for layout in candidates((2, 3, 2), 2)] == [0, 2]


def test_a_sum_over_everything_names_no_axes() -> None:
    x = torch.ones(2, 3, requires_grad=True)
    assert saved_axes(x.sum().grad_fn) is None
    assert saved_axes(x.sum(-1).grad_fn) == [-1]
    assert saved_axes(x.cumsum(1).grad_fn) == [1]


def test_an_index_is_the_identity_where_it_counts_the_rows() -> None:
    x = torch.ones(3, 2, requires_grad=True)
    for index, expected in (
        (torch.arange(3), True), (torch.arange(3).view(3, 1), True), (torch.tensor([0, 2, 1]), False),
        (torch.arange(2), False), (torch.tensor([True] * 3), False), (torch.tensor(0), False),
    ):  # fmt: skip
        picked = torch.ops.aten.index(x, [index])
        graph = walk(picked, {id(x): 0}, [x])
        assert is_identity(graph, graph.names.index("IndexBackward0")) is expected, index


def test_a_probe_sees_all_that_a_saturated_softmax_brings_together() -> None:
    """Its own gradient is zero: what arrives at one element must show at all others of the axis, and only there."""
    x = torch.tensor([[0.0, 200.0, 0.0], [200.0, 0.0, 0.0]], requires_grad=True)
    node = x.softmax(1).grad_fn
    arrived = torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]])
    seen = passing.softmax(node, 0, torch.zeros(2, 3), arrived)
    assert bool(seen[0].all()) and not bool(seen[1].any())


def test_a_probe_passes_no_number_that_is_not_finite() -> None:
    spoilt = torch.tensor([1.0, torch.nan, torch.inf, -torch.inf])
    node = torch.ones(4, requires_grad=True).exp().grad_fn
    for elsewhere in (torch.ones(3), torch.zeros(4)):  # of another shape: nothing may take its place
        assert passing.pointwise(node, 0, spoilt, elsewhere).tolist() == [1, 0, 0, 0]


def test_a_probe_leaves_a_dead_kernel_as_it_is() -> None:
    """Other weights show the images behind a convolution, and nothing of its kernel."""
    x, kernel = torch.ones(2, 3, 5, 5, requires_grad=True), torch.zeros(4, 3, 3, 3, requires_grad=True)
    node = torch.nn.functional.conv2d(x, kernel).grad_fn
    passes, arrived = op_of("ConvolutionBackward0").passing, torch.zeros(2, 4, 3, 3)
    arrived[1] = 1
    images = passes(node, 0, torch.zeros_like(x), arrived)
    assert bool(images[1].all()) and not bool(images[0].any())
    assert not bool(passes(node, 1, torch.zeros_like(kernel), arrived).any())


def put_back(how: str, rows: Tensor, order: Tensor) -> Tensor:
    """Rows that were computed in `order`, in their places again."""
    back, none = order.argsort(), torch.zeros_like(rows)
    return {
        "embedding": lambda: nn.functional.embedding(back, rows),
        "embedding_bag": lambda: nn.functional.embedding_bag(back.unsqueeze(1), rows, mode="sum"),
        "index": lambda: rows[back],
        "index_select": lambda: rows.index_select(0, back),
        "gather": lambda: rows.gather(0, back.unsqueeze(1).expand_as(rows)),
        "index_add": lambda: none.index_add(0, order, rows),
        "index_copy": lambda: none.index_copy(0, order, rows),
        "index_put": lambda: none.index_put((order,), rows),
    }[how]()


@pytest.mark.parametrize(
    "how",
    ["embedding", "embedding_bag", "index", "index_select", "gather", "index_add", "index_copy", "index_put"],
)
def test_two_layers_may_read_the_samples_in_different_orders(how: str) -> None:
    """An index brings them together again: no loss is computed from two samples."""
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(4, 3), nn.Linear(4, 3)]).double()
    for _ in range(3):
        x, order = torch.randn(5, 4, dtype=torch.float64), torch.tensor([2, 0, 3, 4, 1])
        other = put_back(how, model[1](x[order]).sigmoid(), order)
        losses = (model[0](x).tanh() + other).square().sum(1)
        loop = loop_gradients(losses, named(model))
        found = per_sample_gradients(losses, named(model))
        assert relative_errors(flat(found), flat(loop), norms_of(loop), torch.float64).max() <= 1e-10


def test_rows_of_several_lengths_beside_rows_of_one() -> None:
    """As many rows, but other samples': a mask puts those of several lengths into a table."""
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(4, 3), nn.Linear(4, 3)]).double()
    mask = torch.arange(3) < torch.tensor([1, 3, 2, 2]).unsqueeze(1)
    for _ in range(2):
        rows, others = torch.randn(2, 8, 4, dtype=torch.float64)
        hidden = model[1](others).sigmoid()
        ragged = torch.zeros(4, 3, 3, dtype=torch.float64).masked_scatter(mask.unsqueeze(2), hidden)
        losses = (model[0](rows).tanh().view(4, 2, 3).sum(1) + ragged.sum(1)).square().sum(1)
        loop = loop_gradients(losses, named(model))
        found = per_sample_gradients(losses, named(model))
        assert relative_errors(flat(found), flat(loop), norms_of(loop), torch.float64).max() <= 1e-10
