"""When a plan is used again: never for another structure, always for other sizes and other scales."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clipwise.clipping import Abadi
from clipwise.engine import Clipper, cache, per_sample_gradients, routes
from clipwise.engine.graph import walk
from clipwise.engine.layout import Layout
from clipwise.engine.parameters import Parameters
from clipwise.engine.verify import verify_against_autograd
from clipwise.errors import CheckFailed, ClipwiseError, NotSeparable
from tests.zoo import named

from .reference import flat, loop_gradients, norms_of, relative_errors


def padded(out: Tensor, step: int) -> Tensor:
    """Rows (T, B) folded to samples: which rows are whose depends on where the padding is."""
    rows = F.pad(out, (0, 0, 4, 0) if step % 2 else (0, 0, 0, 4))
    return (rows.view(2, 4, -1) if step % 2 else rows.view(4, 2, -1).transpose(0, 1)).square().sum((0, 2))


def normalized(out: Tensor, step: int) -> Tensor:
    return F.layer_norm(out, out.shape[1:] if step % 2 else out.shape[-1:]).tanh().flatten(1).sum(1)


def shifted(out: Tensor, step: int) -> Tensor:
    """Padded along the features, then along the batch: every loss becomes its neighbour's."""
    return F.pad(out, (0, 0, 1, 1) if step > 2 else (1, 1))[: len(out)].square().sum(1) * torch.arange(1, 5)


def folded(out: Tensor, step: int) -> Tensor:
    """The same shapes by padding the features, then by padding the batch: a loss is then computed from two rows."""
    batch, width = out.shape
    return F.pad(out, (0, 0, 0, batch) if step > 2 else (0, width)).view(batch, 2 * width).tanh().sum(1)


def normalized_over_all(out: Tensor, step: int) -> Tensor:
    """Over the features, then over the whole batch: samples mix."""
    return F.layer_norm(out, out.shape if step > 2 else out.shape[1:]).tanh().flatten(1).sum(1)


def pooled(out: Tensor, step: int) -> Tensor:
    return F.avg_pool1d(out, 2 + step % 2, padding=step % 2).square().flatten(1).sum(1)


def p_norm(out: Tensor, step: int) -> Tensor:
    return torch.linalg.vector_norm(out.flatten(1), ord=2 + step % 2, dim=1)


def turned(out: Tensor, step: int) -> Tensor:
    h = out if step % 2 else out.flip(1)
    return torch.cat([h, h.cumsum(1 + step % 2)], 1 + step % 2).tanh().flatten(1).sum(1)


PROGRAMS: dict[str, tuple[Callable[[Tensor, int], Tensor], tuple[int, ...]]] = {
    "padding": (padded, (4, 3)),
    "normalized_shape": (normalized, (4, 5, 3)),
    "padding_of_the_batch": (shifted, (4, 3)),
    "padding_folds_the_batch": (folded, (4, 3)),
    "normalized_batch": (normalized_over_all, (4, 5, 3)),
    "pooling": (pooled, (4, 5, 3)),
    "p_norm": (p_norm, (4, 5, 3)),
    "axes": (turned, (4, 5, 3)),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_plan_is_not_used_for_another_structure(name: str) -> None:
    """The same nodes with other integers, turn by turn: exact every time, or refused."""
    program, shape = PROGRAMS[name]
    torch.manual_seed(0)
    layer = nn.Linear(3, 6).double()
    params = named(layer)
    for step in range(6):
        losses = program(layer(torch.randn(*shape, dtype=torch.float64)), step)
        loop = loop_gradients(losses, params)
        try:
            got = per_sample_gradients(losses, params)
        except ClipwiseError:
            continue
        assert name != "normalized_batch" or step <= 2
        assert relative_errors(flat(got), flat(loop), norms_of(loop), torch.float64).max() <= 1e-10, step


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def test_sizes_and_scales_do_not_plan_again() -> None:
    """Annealed factors, margins and temperatures, other batch sizes and other lengths: one plan."""
    model = mlp()
    clipper = Clipper(named(model))
    for step in range(8):
        anneal = 0.9**step
        h = model(torch.randn(3 + step % 3, 2 + step, 4))
        h = F.leaky_relu(torch.add(h, h.tanh(), alpha=anneal), 0.1 * anneal) * anneal / (1 + anneal)
        h = h.clamp(-anneal * 5, 5) + F.elu(h, anneal) + F.softplus(h, beta=1 + anneal) + h.abs() ** (1.5 + anneal)
        losses = F.dropout(h, 0.5 * anneal).flatten(1).mean(1)
        clipper(losses, Abadi(1.0))
    assert clipper.planning.plans == 1 and clipper.planning.reasons == ()


def test_what_made_new_plans_is_told() -> None:
    model = mlp()
    clipper = Clipper(named(model))
    for step in range(4):
        h = model(torch.randn(4, 6, 4))
        clipper((h.cumsum(1) if step < 2 else h.cumsum(2)).flatten(1).square().sum(1), Abadi(1.0))
    assert clipper.planning.plans == 2
    assert clipper.planning.reasons == ("CumsumBackward0: dim 1 -> 2",)
    clipper(model(torch.randn(4, 6, 4)).tanh().flatten(1).square().sum(1), Abadi(1.0))
    assert clipper.planning.plans == 3 and "TanhBackward0 where CumsumBackward0 was" in clipper.planning.reasons[-1]


def test_more_than_a_handful_of_plans_is_reported_once_with_what_differs() -> None:
    model = mlp()
    clipper = Clipper(named(model))

    def step(depth: int) -> None:
        h = model(torch.randn(4, 4))
        for _ in range(depth):
            h = h.tanh()
        clipper(h.square().sum(1), Abadi(1.0))

    for depth in range(8):
        step(depth)
    with pytest.warns(UserWarning, match=r"9 different graphs.*What differed: .*TanhBackward0"):
        step(8)
    step(9)  # once is enough: warnings are errors here
    assert Clipper(named(model)).planning.plans == 0


def test_a_hook_on_a_parameter_is_noticed_at_the_next_step() -> None:
    """Autograd would apply it, the engine would not: refused, not found out a hundred steps later."""
    model = mlp()
    clipper = Clipper(named(model))
    x = torch.randn(4, 4)
    clipper(model(x).square().sum(1), Abadi(1.0))
    handle = model[0].weight.register_hook(lambda gradient: 3 * gradient)  # type: ignore[index, union-attr, operator]
    with pytest.raises(CheckFailed, match="hook"):
        clipper(model(x).square().sum(1), Abadi(1.0))
    handle.remove()
    clipper(model(x).square().sum(1), Abadi(1.0))
    assert clipper.planning.plans == 2


def test_which_ends_are_padded_is_structure_and_how_much_is_not() -> None:
    model = mlp()
    clipper = Clipper(named(model))
    for pad in ((1, 0, 0, 0), (3, 0, 0, 0), (0, 1, 0, 0), (0, 2, 0, 0), (0, 0, 1, 1), (0, 0, 4, 2)):
        clipper(F.pad(model(torch.randn(4, 6, 4)), pad).flatten(1).square().sum(1), Abadi(1.0))
    assert clipper.planning.plans == 3


class Add(torch.autograd.Function):
    """The function of a user, named like an operation of torch, that turns the batch around when told to."""

    turned = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.turned = Add.turned
        return x.flip(0) if Add.turned else x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient.flip(0) if ctx.turned else gradient


def test_the_function_of_a_user_is_not_trusted_for_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan was used again for a batch in another order, and every norm was another sample's."""
    torch.manual_seed(0)
    layer = nn.Linear(3, 3).double()
    params = named(layer)
    for step in range(4):
        monkeypatch.setattr(Add, "turned", step >= 2)
        out = Add.apply(layer(torch.randn(4, 3, dtype=torch.float64)))
        losses = (out * torch.arange(1, 5).unsqueeze(1)).tanh().sum(1)
        loop = loop_gradients(losses, params)
        found = per_sample_gradients(losses, params)
        assert relative_errors(flat(found), flat(loop), norms_of(loop), torch.float64).max() <= 1e-10


def test_the_probability_of_dropout_is_a_scale_and_the_power_of_a_distance_is_structure() -> None:
    def plans(losses: Callable[[Tensor, float], Tensor], *values: float) -> int:
        model = mlp()
        clipper = Clipper(named(model))
        for value in values:
            clipper(losses(model(torch.randn(4, 4)), value), Abadi(1.0))
        return clipper.planning.plans

    torch.manual_seed(0)
    centres = torch.randn(5, 3)
    assert plans(lambda out, p: torch.native_dropout(out, p, True)[0].square().sum(1), 0.1, 0.2, 0.3) == 1
    assert plans(lambda out, p: torch.cdist(out, centres, p).sum(1), 3.0, 1.5, 3.0) == 2


def test_a_plan_in_use_is_compared_with_autograd_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[int] = []
    done: list[object] = []

    def counted(*args: Any) -> bool:
        compared.append(len(done))
        return verify_against_autograd(*args)

    monkeypatch.setattr(cache, "verify_against_autograd", counted)
    monkeypatch.setattr(cache, "_VERIFY_EVERY", 3)
    model = mlp()
    clipper = Clipper(named(model))
    while len(done) < 8:
        done.append(clipper(model(torch.randn(4, 4)).square().sum(1), Abadi(1.0)))
    assert clipper.planning.plans == 1 and compared == [0, 3, 6]


def test_no_plan_is_made_of_losses_that_are_all_undefined() -> None:
    """Such a batch shows nothing of where samples go; its sum is zero, and the next batch is planned and refused."""
    model = mlp()
    clipper = Clipper(named(model))
    x = torch.full((4, 4), torch.nan)
    for mixed in (False, True):
        out = model(x)
        nothing = clipper((out - mixed * out.mean(0)).square().sum(1), Abadi(1.0))
        assert nothing.bad.all() and not any(gradient.any() for gradient in nothing.gradients.values())
        assert clipper.planning.plans == 0
    out = model(torch.randn(4, 4))
    with pytest.raises(NotSeparable):
        clipper((out - out.mean(0)).square().sum(1), Abadi(1.0))


def constant_written(h: Tensor) -> Tensor:
    return h.index_put((torch.arange(len(h)), torch.tensor(0)), torch.tensor(2.0)).scatter(1, PLACES, 1.0)


PLACES = torch.zeros(4, 1, dtype=torch.long)
KEEPING: dict[str, Callable[[Tensor], Tensor]] = {
    "layer_norm": lambda h: F.layer_norm(h, (3,)),
    "softmax": lambda h: h.softmax(1),
    "batch_norm_with_fixed_statistics": lambda h: F.batch_norm(h, torch.zeros(3), torch.ones(3)),
    "a constant is written": constant_written,
}


@pytest.mark.parametrize("keeps", KEEPING.values(), ids=KEEPING)
def test_what_keeps_samples_apart_by_its_axes_is_not_probed_at_every_step(keeps: Callable[[Tensor], Tensor]) -> None:
    model = mlp()
    losses = keeps(model(torch.randn(4, 4))).square().sum(1)
    with torch.no_grad():
        backward = cache.Engine().backward(losses, Parameters(named(model)), keep=False)
    assert not backward.plan.routed


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("training", [True, False])
def test_a_batch_norm_is_trusted_with_fixed_statistics_only(training: bool, axis: int) -> None:
    layer = nn.BatchNorm1d(3).train(training)
    graph = walk(layer(nn.Linear(4, 3)(torch.randn(4, 4))), {}, [])
    place = next(k for k, name in enumerate(graph.names) if "BatchNorm" in name)
    site = routes.Site(graph, place, lambda edge: Layout(axis), lambda k: True)
    expected = routes.Routing.NEVER if axis == 0 and not training else routes.Routing.MAYBE
    assert routes.batch_norm(site) is expected
