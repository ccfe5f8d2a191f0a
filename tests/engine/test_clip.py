"""From losses to a clipped sum, piece by piece: parameters, norms, the comparison with autograd, whose rows are met."""

from __future__ import annotations

import copy
import math
import weakref
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clipwise.clipping import Abadi, Flat, Layerwise
from clipwise.engine import Clipper, cache, clipped_gradients, per_sample_gradients, per_sample_norms, verify
from clipwise.engine.cache import CachedPlan
from clipwise.engine.grams import Doubts
from clipwise.engine.graph import Edge, walk
from clipwise.engine.history import History, first_difference
from clipwise.engine.layout import Colours, Probe
from clipwise.engine.lengths import Lengths
from clipwise.engine.norms import bad_samples, negligible_norm, working_dtype
from clipwise.engine.owners import Owners, _data_of, _same
from clipwise.engine.parameters import Parameters, validate
from clipwise.engine.verify import verify_against_autograd
from clipwise.errors import CheckFailed, InvalidLosses, NotSeparable, UnsupportedNode
from tests.zoo import named

from .reference import Times, loop_gradients, norms_of

B = 4


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


# Parameters.


def test_a_parameter_under_two_names_is_one_with_two_keys() -> None:
    a, b = leaf(2), leaf(3)
    parameters = Parameters({"first.weight": a, "bias": b, "second.weight": a})
    assert [id(p) for p in parameters.tensors] == [id(a), id(b)]
    assert parameters.names == ["first.weight", "bias"]
    values = parameters.keyed([torch.zeros(1), torch.ones(1)])
    assert list(values) == ["first.weight", "second.weight", "bias"]
    assert values["second.weight"] is values["first.weight"]
    assert [parameters.layer(0), parameters.layer(1)] == ["first", ""]
    with pytest.raises(ValueError, match="zip"):
        parameters.keyed([torch.zeros(1)])


def test_a_parameter_without_a_name_is_described_by_its_place_and_shape() -> None:
    parameters = Parameters([leaf(2), leaf(3, 4)])
    assert parameters.describe(1) == "#1 of shape (3, 4)"
    assert parameters.layer(1) == "#1"
    assert Parameters({"w": leaf(2)}).describe(0) == "w"


def test_groups_are_those_of_the_style_that_asks() -> None:
    parameters = Parameters({"a.weight": leaf(2), "a.bias": leaf(2), "b.weight": leaf(2)})
    flat, layers = Flat(Abadi(1.0)), Layerwise(Abadi(1.0))
    for style, expected in ((flat, [[0, 1, 2]]), (layers, [[0, 1], [2]]), (layers, [[0, 1], [2]]), (flat, [[0, 1, 2]])):
        assert list(parameters.groups(style).values()) == expected


def test_one_parameter_of_many_is_enough_to_refuse() -> None:
    good, frozen = leaf(3), torch.randn(3)
    losses = good.sum().expand(2).clone()
    for other, error, words in (
        ({"frozen": frozen}, InvalidLosses, "requires_grad=False.: frozen. Leave"),
        ({"c": torch.randn(2, dtype=torch.complex64, requires_grad=True)}, UnsupportedNode, "complex"),
        ({"s": torch.eye(2).to_sparse().requires_grad_()}, UnsupportedNode, "to_dense"),
    ):
        with pytest.raises(error, match=words):
            validate(losses, Parameters({"good": good, **other}))
    validate(losses, Parameters({"good": good}))
    validate(torch.zeros(0), Parameters({"good": good}))


@pytest.mark.parametrize("size", [1, 3])
def test_losses_of_any_number_must_reach_a_parameter(size: int) -> None:
    model, other = nn.Linear(3, 1), nn.Linear(3, 1)
    for question in (per_sample_norms, per_sample_gradients, lambda *of: clipped_gradients(*of, Abadi(1.0))):
        with pytest.raises(InvalidLosses, match="no parameter is reached"):
            question(model(torch.ones(size, 3)).squeeze(1), named(other))


# Norms, factors and what is bad.


def test_norms_are_trusted_in_the_precision_of_everything() -> None:
    single, double = torch.zeros(1), torch.zeros(1, dtype=torch.float64)
    for losses, params, expected in (
        (double, [double, double], torch.float64), (double, [double, single], torch.float32),
        (single, [double], torch.float32), (single, [single], torch.float32), (double, [single], torch.float32),
    ):  # fmt: skip
        assert working_dtype(losses, params) == expected


def test_norms_whose_squares_run_out_of_exponents_are_negligible() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        assert negligible_norm(dtype) == pytest.approx(2.0 ** ((-126 + 23) / 2))
    assert negligible_norm(torch.float64) == pytest.approx(2.0 ** ((-1022 + 52) / 2))


def test_a_sample_is_bad_by_its_own_loss_or_norm() -> None:
    norms = torch.tensor([1.0, 1.0, torch.nan, torch.inf, 1.8e19, 1.9e19, 0.0], dtype=torch.float64)
    losses = torch.tensor([1.0, torch.nan, 1.0, 1.0, 1.0, 1.0, -torch.inf])
    found = bad_samples(norms, losses, torch.float32)
    assert found.tolist() == [False, True, True, True, False, True, True]


def test_squares_beyond_float32_are_found_again_for_each_sample_alone() -> None:
    """Two of them side by side: neither norm holds anything of the other's."""
    torch.manual_seed(0)
    layer = nn.Linear(3, 2, bias=False)
    x = torch.randn(B, 5, 3) * torch.tensor([1.0, 1e19, 1e19, 1.0]).view(B, 1, 1)
    norms = per_sample_norms(layer(x).sum((1, 2)), named(layer))
    torch.testing.assert_close(norms.double(), norms_of(loop_gradients(layer(x).sum((1, 2)), named(layer))))


def test_a_batch_without_a_finite_loss_has_no_norms_and_no_sum() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    for style in (Flat(Abadi(1.0)), Layerwise(Abadi(1.0))):
        found = clipped_gradients(model(torch.full((B, 3), torch.nan)).squeeze(1), named(model), style)
        factors = found.factors.values() if isinstance(found.factors, dict) else [found.factors]
        assert found.bad.all() and found.norms.isnan().all() and not any(part.any() for part in factors)
        assert found.squared.keys() == found.gradients.keys() == named(model).keys()
        assert all(part.shape == (B,) and part.isnan().all() for part in found.squared.values())
        assert not found.without_gradients().gradients


def test_squared_norms_are_those_of_each_parameter() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 1)), torch.randn(B, 3)
    spare = {**named(model), "spare": nn.Parameter(torch.ones(2))}
    for rows in (x, x[:1]):
        found = clipped_gradients(model(rows).squeeze(1).square(), spare, Abadi(0.1))
        loop = loop_gradients(model(rows).squeeze(1).square(), spare)
        for name, part in found.squared.items():
            torch.testing.assert_close(part.double(), loop[name].double().flatten(1).square().sum(1))
        assert found.gradients["spare"].tolist() == [0, 0]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_batches_of_a_few_samples(size: int) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 1)), torch.randn(size, 3)

    def losses() -> Tensor:
        return model(x).squeeze(1).square()

    loop = loop_gradients(losses(), named(model))
    torch.testing.assert_close(per_sample_norms(losses(), named(model)).double(), norms_of(loop))
    for name, gradients in per_sample_gradients(losses(), named(model)).items():
        torch.testing.assert_close(gradients, loop[name])


# The comparison with autograd.


class Doubled(Times):
    """A backward that is not linear: a small sample that comes alone counts twice."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        (x,) = ctx.saved_tensors
        alone = (grads[0] != 0).any(1)
        factor = 2.0 if alone.sum() == 1 and x[alone].norm() < 0.1 else 1.0
        return None, factor * (grads[0] * x).sum(0)


def test_an_error_in_a_small_gradient_is_seen_beside_large_ones() -> None:
    torch.manual_seed(0)
    x = torch.rand(B, 3) + 0.5
    for size, fails in ((1.0, False), (1e-4, True)):
        w = nn.Parameter(torch.rand(3) + 0.5)
        x[2] *= size
        with pytest.raises(CheckFailed, match="parameter w disagree with autograd") if fails else nullcontext():
            per_sample_norms(Doubled.apply(x, w).sum(1), {"w": w})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("wrong", [False, True])
def test_gradients_that_are_rounding_alone_agree_with_autograd(wrong: bool, dtype: torch.dtype) -> None:
    """A student beside the copy of itself, whose gradients cancel: they are others with every factor."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)
    teacher, x = copy.deepcopy(model), torch.randn(64, 6, dtype=dtype)
    if wrong:
        model[0].weight.register_hook(lambda gradient: 2 * gradient)
    losses = F.cross_entropy(model(x), teacher(x).softmax(1).detach(), reduction="none")
    with pytest.raises(CheckFailed, match="disagree with autograd") if wrong else nullcontext():
        assert float(per_sample_norms(losses, named(model)).max()) < 1e-5


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_a_difference_counts_relative_to_the_gradients(scale: float) -> None:
    for factor, fails in ((1.001, False), (1.004, True)):
        model = nn.Linear(4, 3, bias=False)
        model.weight.register_hook(lambda gradient, factor=factor: factor * gradient)
        losses = scale * model(torch.eye(4)).square().sum(1)
        words = r"Nothing was released\. The parameter has a hook"
        with pytest.raises(CheckFailed, match=words) if fails else nullcontext():
            per_sample_norms(losses, named(model))


def test_the_largest_norm_is_compared_with_its_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(4, 3, bias=False), torch.randn(B, 4)
    real = Lengths.squared

    def grown(lengths: Lengths, doubts: Doubts) -> dict[Edge, Tensor]:
        found = real(lengths, doubts)
        for norms in found.values():
            norms[norms.argmax()] *= 1.02
        return found

    per_sample_norms(model(x).square().sum(1), named(model))
    monkeypatch.setattr(Lengths, "squared", grown)
    with pytest.raises(CheckFailed, match=r"the per-sample norm of parameter weight is .*Please report the model"):
        per_sample_norms(nn.functional.linear(x, model.weight).tanh().sum(1), named(model))


def test_gradients_that_are_all_zero_agree() -> None:
    model = nn.Linear(3, 2)
    assert not per_sample_norms((0 * model(torch.randn(B, 3))).sum(1), named(model)).any()


def test_what_could_not_be_compared_is_compared_at_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[int] = []
    step = 0

    def counted(*given: Any) -> bool:
        compared.append(step)
        return verify_against_autograd(*given)

    monkeypatch.setattr(cache, "verify_against_autograd", counted)
    model = nn.Linear(3, 2)
    clipper = Clipper(named(model))
    for step in range(4):
        x = torch.randn(B, 3)
        x[1] = torch.nan if step == 0 else 1.0
        clipper(model(x).square().sum(1), Abadi(1.0))
    assert clipper.planning.plans in (1, 2)
    assert compared[:2] == [0, 1] and 3 not in compared


def test_distances_are_measured_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "_PIECE", 3)
    torch.manual_seed(0)
    a, b = torch.randn(4, 2), torch.randn(4, 2)
    assert verify.distance(a, b) == pytest.approx(float((a - b).norm()))
    assert verify.distance(a, None) == verify.distance(None, a) == pytest.approx(float(a.norm()))
    assert verify.distance(a, b.to_sparse()) == pytest.approx(float((a - b).norm()))
    assert verify.distance(None, None) == 0


@pytest.mark.parametrize("odd", [math.inf, math.nan])
def test_the_distance_of_the_same_numbers_is_zero_only_if_they_are_finite(odd: float) -> None:
    a = torch.tensor([3.0, odd])
    assert math.isnan(verify.distance(a, a.clone())) and verify.distance(a[:1], a[:1].clone()) == 0
    assert verify.distance(torch.full((4,), 3e38), torch.full((4,), 3e38)) == 0  # though their sum overflows
    assert verify.distance(a[:1], a[:1].double()) == 0 and verify.distance(a[:1], a[:1].to_sparse()) == 0


def test_weights_of_half_precision_are_powers_of_two() -> None:
    norms, signs = torch.tensor([3.0, 1e-3, 500.0, 1.0]), torch.tensor([0.3, -0.2, 1.0, 0.5])
    seen = torch.tensor([True, True, True, False])
    weights = verify._exact_weights(signs, norms, seen)
    assert set(torch.frexp(weights[:3]).mantissa.tolist()) == {0.5, -0.5}
    assert weights[3] == 0 and torch.equal(weights[:3].sign(), signs[:3].sign())
    lengths = weights[:3].abs() * norms[:3]
    assert lengths.min() >= 2**-0.5 and lengths.max() <= 2**0.5


# Plans in the cache, and why they were made.


def test_a_plan_belongs_to_the_very_parameters_and_shapes() -> None:
    a, b, c = leaf(2), leaf(3), leaf(3)
    plan: Any = None
    entry = CachedPlan(plan, (weakref.ref(a), weakref.ref(b)), (a.shape, b.shape))
    assert entry.belongs_to([a, b])
    assert not entry.belongs_to([a, c]) and not entry.belongs_to([b, a])
    assert not CachedPlan(plan, entry.owners, (a.shape, torch.Size([4]))).belongs_to([a, b])
    assert not CachedPlan(plan, entry.owners, (torch.Size([4]), b.shape)).belongs_to([a, b])


def test_what_differs_between_two_graphs_is_said() -> None:
    w, v = leaf(3, 3), leaf(3, 3)
    position = {id(w): 0, id(v): 1}

    def difference(before: Tensor, after: Tensor) -> str:
        return first_difference(walk(before, position, [w, v]).signature, walk(after, position, [w, v]))

    assert difference(w.tanh(), w.tanh()) == "the same structure again: its layout stayed open"
    assert difference(w.tanh(), w.exp()) == "ExpBackward0 where TanhBackward0 was"
    assert difference(w.tanh(), w.exp().tanh()) == "ExpBackward0 where a parameter was"
    assert difference(w.exp().tanh(), w.tanh()) == "a parameter where ExpBackward0 was"
    assert difference(w.tanh(), v.tanh()) == "a parameter where a parameter was"
    assert difference(w.sum(0), w.sum(1)) == "SumBackward1: dim (0,) -> (1,)"
    assert difference(w * w, w * v) == "inputs of MulBackward0"
    long, short = walk(w.tanh() + v, position, [w, v]), walk(w.tanh(), position, [w, v])
    assert first_difference(long.signature[:2], long) == f"{len(long.signature) - 2} nodes more"
    assert first_difference((*short.signature, 7), short) == "1 nodes less"


def test_the_latest_reasons_are_remembered_for_each_set_of_parameters() -> None:
    history, w = History(), leaf(3)
    graphs = [walk(make(w), {id(w): 0}, [w]) for make in (torch.tanh, torch.exp)]
    assert history.of((1,)).plans == 0 and history.of((1,)).reasons == ()
    for step in range(12):
        history.record((1,), graphs[step % 2], stale=step == 11)
    assert history.of((1,)).plans == 12 and len(history.of((1,)).reasons) == 8
    assert history.of((1,)).reasons[-2:] == (
        "TanhBackward0 where ExpBackward0 was", "rows or sizes that the plan did not fit",
    )  # fmt: skip
    for number in range(2, 300):
        history.record((number,), graphs[0], stale=False)
    assert history.of((299,)).plans == 1 and history.of((1,)).plans == 0  # the oldest are forgotten
    assert history.of((299,)).reasons == ()


# Whose rows are read.


def test_what_a_node_reads_and_whether_two_read_the_same() -> None:
    data = torch.arange(6.0).view(3, 2)
    assert _data_of(SimpleNamespace(_saved_mat1=data)) is data
    assert _data_of(SimpleNamespace(_saved_self=None, _saved_input=data)) is data
    assert _data_of(SimpleNamespace(_saved_self=torch.ones(3, 2))) is None  # rows that are all alike
    assert _data_of(SimpleNamespace(_saved_self=torch.tensor([[1.0, 2.0], [1.0, 3.0]]))) is not None
    assert _data_of(SimpleNamespace()) is None
    for a, b, copies, expected in (
        (data, data.view(3, 2), False, True), (data, data.clone(), True, True), (data, data.clone(), False, False),
        (data, data + 1, True, False), (None, data, True, False), (data, None, True, False), (None, None, True, False),
    ):  # fmt: skip
        assert _same(a, b, copies) is expected


DATA = torch.arange(6.0).view(3, 2)
FIRST, TURNED, TWO, ONE = [0, 1, 2], [2, 1, 0], [0, -1, 1], [-1, -1, 2]


@pytest.mark.parametrize(
    ("before", "after", "data", "indexed", "refused"),
    [
        (FIRST, FIRST, DATA, False, False),
        (FIRST, TURNED, DATA, False, True),
        (FIRST, TURNED, DATA + 1, False, True),  # all samples, and nothing moved them
        (FIRST, TURNED, DATA + 1, True, False),  # an index moved them
        (FIRST, TURNED, DATA.clone(), True, True),  # but these are the same numbers
        (FIRST, TURNED, DATA, True, True),
        (FIRST, [0, 2, 1, 0], DATA, False, False),  # of another length
        (TWO, [0, 1, 1], DATA + 1, False, False),  # not all samples are in it
        (TWO, [0, 1, 1], DATA, False, False),  # nobody knows whose the row is
        (TWO, [1, -1, 1], DATA, False, True),
        (TWO, [1, -1, 1], DATA.clone(), False, False),  # a single sample's
        (TWO, [1, -1, 0], DATA.clone(), False, True),
        (ONE, [-1, -1, 1], DATA, False, True),
        (ONE, [-1, -1, 1], DATA.clone(), False, False),
        (ONE, [-1, 1, -1], DATA, False, False),
    ],
)
def test_the_same_data_is_not_read_for_two_samples(
    before: list[int], after: list[int], data: Tensor, indexed: bool, refused: bool
) -> None:
    nodes: Any = [SimpleNamespace(_saved_self=DATA), SimpleNamespace(_saved_self=data), SimpleNamespace()]
    graph: Any = SimpleNamespace(
        nodes=nodes, names=["MmBackward0", "MmBackward0", "x"], computes_in=lambda dtype: False
    )
    plan: Any = SimpleNamespace(data_meetings={0, 1}, indexed=indexed)
    owners = Owners(torch.zeros(3), graph, plan)
    known = {2: torch.tensor(TURNED), 0: torch.tensor(before), 1: torch.tensor(after)}
    words = "the same data is read for two different samples"
    with pytest.raises(NotSeparable, match=words) if refused else nullcontext():
        owners._refuse_two_samples_in_one_loss(known)


def test_when_a_gradient_does_not_tell_whose_a_bad_number_is() -> None:
    one, nan = torch.ones(2), torch.tensor([1.0, torch.nan])
    for gradient, kept, expected in (
        (one, one, False), (nan, one, True), (one, nan, False), (0 * one, one, False), (0 * one, nan, True),
    ):  # fmt: skip
        node = type("Node", (), {"_saved_self": kept, "_saved_other": one})()
        graph: Any = SimpleNamespace(nodes=[node])
        probe = Probe(gradient, [gradient], Colours([one]), torch.zeros(2, dtype=torch.bool))
        nothing: Any = None
        assert Owners(torch.zeros(2), graph, nothing)._hides_whose(0, probe) is expected


def test_the_zero_of_a_sum_is_in_the_dtype_of_its_parameter() -> None:
    model = nn.Linear(3, 1).to(torch.bfloat16)
    spare = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    for size in (1, B):
        losses = model(torch.randn(size, 3, dtype=torch.bfloat16)).squeeze(1).float()
        found = clipped_gradients(losses, {**named(model), "spare": spare}, Abadi(1.0))
        assert {part.dtype for part in found.gradients.values()} == {torch.float32}


def test_what_weights_are_computed_from_is_there_for_a_second_call() -> None:
    """The graph between parameters and shared values is kept with the rest."""
    w, scale = (torch.randn(3, 2, requires_grad=True) for _ in range(2))
    losses = (torch.randn(4, 3) @ (w * scale.exp())).square().sum(1)
    params = {"w": w, "scale": scale}
    first, second = (
        clipped_gradients(losses, params, Abadi(1.0), retain_graph=True, way="bookkeeping").gradients for _ in range(2)
    )
    assert all(torch.equal(first[name], second[name]) for name in params)
