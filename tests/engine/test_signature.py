"""When a plan is used again: never for another structure, always for other sizes and other scales."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clipwise.clipping import Abadi
from clipwise.engine import Clipper, per_sample_gradients
from clipwise.errors import CheckFailed, ClipwiseError
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
