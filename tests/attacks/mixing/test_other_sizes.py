"""A plan made with some sizes, used with others: views must not lead to axes of other samples, and honest ones may."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import clipwise as cw
from clipwise.clipping import Abadi, Flat
from clipwise.engine import Clipper
from clipwise.engine.cache import Engine
from clipwise.engine.parameters import Parameters
from clipwise.errors import NotSeparable

Program = Callable[[nn.Module, Tensor, int], Tensor]  # losses of a batch, with a size of the program's own


def first(values: Tensor, batch_size: int) -> Tensor:
    """A loss that reads some of a sample's values."""
    rows = values.reshape(batch_size, -1)
    return (rows * torch.arange(1.0, 1 + rows.shape[1])).sum(1)


class Attack(NamedTuple):
    """A program that keeps samples apart with the first batch and size, and mixes them with the second."""

    program: Program
    honest: tuple[int, int]
    mixing: tuple[int, int]


def heads(model: nn.Module, x: Tensor, n: int) -> Tensor:
    """(B, 4, 4): the rows of each of n heads meet each other."""
    rows = model(x).reshape(-1, n, 4)
    return first((rows @ rows.transpose(1, 2)).softmax(-1), len(x))


def turned(model: nn.Module, x: Tensor, n: int) -> Tensor:
    rows = model(x).reshape(-1, n, 4).permute(0, 2, 1).reshape(-1, 4 * n)
    return first(rows.softmax(-1).sigmoid(), len(x))


ATTACKS: dict[str, Attack] = {
    "softmax of wider rows": Attack(lambda m, x, n: first(m(x).reshape(-1, n).softmax(1), len(x)), (8, 16), (8, 64)),
    "as many rows": Attack(lambda m, x, n: first(m(x).view(4, -1).softmax(1), len(x)), (4, 0), (8, 0)),
    "as many rows, in parts": Attack(lambda m, x, n: first(m(x).view(4, -1, 8).softmax(1), len(x)), (4, 0), (8, 0)),
    "three axes": Attack(lambda m, x, n: first(m(x).view(-1, n, 2).softmax(1), len(x)), (8, 8), (8, 16)),
    "heads": Attack(heads, (8, 4), (8, 8)),
    "permuted": Attack(turned, (8, 4), (8, 16)),
    "turned in place": Attack(
        lambda m, x, n: first(m(x).view(-1, n, 4).clone().transpose_(1, 2).softmax(2), len(x)), (8, 4), (8, 8)
    ),
    "sums of groups of channels": Attack(
        lambda m, x, n: first(m(x).view(-1, n, 4).mean(1, keepdim=True).expand(-1, n, 4), len(x)), (8, 4), (8, 16)
    ),
    "norm of groups of channels": Attack(
        lambda m, x, n: first(nn.functional.group_norm(m(x).view(-1, n, 4), 1), len(x)), (8, 4), (8, 8)
    ),
    "norm of rows": Attack(
        lambda m, x, n: first(nn.functional.layer_norm(m(x).view(-1, n), (n,)), len(x)), (8, 16), (8, 32)
    ),
    "pooling": Attack(
        lambda m, x, n: first(nn.functional.adaptive_avg_pool2d(m(x).view(-1, 1, n, 4), (3, 2)), len(x)), (8, 4), (8, 8)
    ),
    "sums along rows": Attack(lambda m, x, n: first(m(x).view(-1, n).cumsum(1), len(x)), (8, 16), (8, 32)),
    "a mask behind the view": Attack(
        lambda m, x, n: first((m(x).view(-1, n) * torch.full((n,), 2.0)).tanh().view(-1, n, 1).softmax(1), len(x)),
        (8, 16), (8, 32),
    ),
    "an axis that is squeezed away, or not": Attack(
        lambda m, x, n: first(m(x).view(-1, 2, 8).transpose(0, 1)[:n].squeeze().softmax(1), len(x)), (8, 1), (8, 2)
    ),
    "an axis that is put in front by expanding": Attack(
        lambda m, x, n: first(m(x).expand(*((n,) if n else ()), len(x), 16).softmax(1), len(x)), (8, 0), (8, 2)
    ),
    "an axis that is put in front by data": Attack(
        lambda m, x, n: first((m(x) * torch.ones(*((n,) if n else ()), len(x), 16)).softmax(1), len(x)),
        (8, 0), (8, 2),
    ),
    "a second view": Attack(
        lambda m, x, n: first(m(x).view(-1, 4).tanh().view(-1, n).sigmoid().view(-1, n).softmax(1), len(x)),
        (8, 16), (8, 64),
    ),
}  # fmt: skip


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(5, 16)


def mixes(attack: Attack, model: nn.Module, batch: tuple[int, int]) -> bool:
    x = torch.randn(batch[0], 5)
    x.requires_grad_()
    reached = torch.autograd.grad(attack.program(model, x, batch[1])[-1], x)[0]
    return bool(reached[:-1].any())


@pytest.mark.parametrize("name", ATTACKS)
def test_sizes_that_bring_samples_together_are_refused_after_others_did_not(name: str) -> None:
    """Guarantees: where it is true, and every operation is trusted for its layouts, no sample's loss depends on an
    element of a value that another sample has."""
    attack, model = ATTACKS[name], linear()
    assert not mixes(attack, model, attack.honest) and mixes(attack, model, attack.mixing)
    clipper = Clipper(model.parameters())
    for batch_size, n in (attack.honest, attack.honest):
        clipper(attack.program(model, torch.randn(batch_size, 5), n), Flat(Abadi(1.0)))
    with pytest.raises(NotSeparable):
        clipper(attack.program(model, torch.randn(attack.mixing[0], 5), attack.mixing[1]), Flat(Abadi(1.0)))


@pytest.mark.parametrize("name", ["softmax of wider rows", "heads"])
def test_a_private_run_refuses_them_too(name: str) -> None:
    attack, model, size = ATTACKS[name], linear(), 8
    records = TensorDataset(torch.randn(64, 5))
    plan = cw.Plan(sampling=cw.FixedSize(64, size), steps=8, clip=Abadi(1.0), noise_multiplier=1.0)
    private = cw.Private(plan, model, torch.optim.SGD(model.parameters(), lr=0.1), seed=0)
    batches = iter(private.loader(records))
    for _ in range(5):
        private.step(attack.program(model, next(batches)[0], attack.honest[1]))
    losses = attack.program(model, next(batches)[0], attack.mixing[1])
    with pytest.raises(NotSeparable):
        private.step(losses)


@pytest.mark.parametrize("seed", range(12))
def test_a_view_whose_sides_contradict_each_other_is_not_trusted(seed: int) -> None:
    """Of two samples one time each is read: rows of all times seem to be theirs, half and half."""
    torch.manual_seed(seed)
    times, model = 4, nn.Linear(5, 6)

    def losses(x: Tensor, read: Tensor) -> Tensor:  # x (T, B, N, D), times first
        return (model(x).tanh() * read.view(times, -1, 1, 1)).square().sum((0, 2, 3))

    clipper = Clipper(model.parameters())
    one = torch.arange(times).view(times, 1) == torch.randint(times, (2,))
    clipper(losses(torch.randn(times, 2, 3, 5), one), Flat(Abadi(1.0)))
    x, every = torch.randn(times, 16, 3, 5), torch.ones(times, 16)
    alone = [losses(x[:, i : i + 1], every[:, :1]) for i in range(16)]
    expected = [torch.cat([g.flatten() for g in torch.autograd.grad(a, list(model.parameters()))]) for a in alone]
    sums = clipper(losses(x, every), Flat(Abadi(1.0)))
    clipped = torch.stack([g / max(1.0, float(g.norm())) for g in expected]).sum(0)
    torch.testing.assert_close(torch.cat([s.flatten() for s in sums.gradients.values()]), clipped)


def attention(model: nn.Module, x: Tensor, n: int) -> Tensor:
    """(B, T, 16) in n heads."""
    batch_size, times, width = (h := model(x)).shape
    q = h.view(batch_size, times, n, width // n).transpose(1, 2)
    scores = (q @ q.transpose(2, 3)).softmax(-1) @ q
    return first(scores.transpose(1, 2).reshape(batch_size, times, width).tanh(), batch_size)


def attention_by_heads(model: nn.Module, x: Tensor, n: int) -> Tensor:
    """Times first, the heads beside the samples, as in `nn.MultiheadAttention`."""
    times, batch_size, width = (h := model(x.transpose(0, 1))).shape
    q = h.reshape(times, batch_size * n, width // n).transpose(0, 1)
    rows = torch.bmm(torch.bmm(q, q.transpose(1, 2)).softmax(-1), q)
    rows = rows.transpose(0, 1).reshape(times * batch_size, width).tanh().view(times, batch_size, width)
    return first(rows.transpose(0, 1), batch_size)


def windows(model: nn.Module, x: Tensor, n: int) -> Tensor:
    """(B, T, T', C) in windows of n x n, as in Swin; back again."""
    batch_size, times, width = (h := model(x)).shape
    images = h.view(batch_size, times // n, n, width // n, n)
    rows = images.permute(0, 1, 3, 2, 4).reshape(-1, n * n).softmax(-1)
    back = rows.view(batch_size, times // n, width // n, n, n).permute(0, 1, 3, 2, 4)
    return first(back.reshape(batch_size, times * width), batch_size)


IN_TIME = [(4, 3, 4), (4, 5, 4), (6, 3, 4), (3, 7, 2), (8, 2, 8)]
WINDOWS = [(4, 4, 2), (6, 4, 4), (4, 8, 4), (3, 8, 2)]
HONEST: dict[str, Program] = {
    "flatten": lambda m, x, n: first(m(x).flatten(1).softmax(1), len(x)),
    "rows": lambda m, x, n: first(m(x).reshape(-1, 16).softmax(1).view(len(x), -1, 16), len(x)),
    "rows of their own length": lambda m, x, n: first(m(x).reshape(-1, n).log_softmax(1), len(x)),
    "channels in groups": lambda m, x, n: first(m(x).view(len(x), -1, n, 16 // n).mean(2), len(x)),
    "times first, turned in place": lambda m, x, n: first(m(x.transpose(0, 1)).clone().transpose_(0, 1).softmax(1)
                                                          .reshape(-1, n).tanh(), len(x)),
    "heads": attention,
    "windows": windows,
    "heads beside the samples": attention_by_heads,
    "times first": lambda m, x, n: first(m(x.transpose(0, 1)).reshape(-1, 16).softmax(1)
                                         .view(-1, len(x), 16).transpose(0, 1), len(x)),
    "heads of times first": lambda m, x, n: first(m(x.transpose(0, 1)).reshape(-1, 4).softmax(1)
                                                  .view(-1, len(x), 16).transpose(0, 1), len(x)),
    "unfold": lambda m, x, n: first(m(x).unflatten(2, (-1, n)).flatten(0, 1).softmax(1).view(len(x), -1), len(x)),
}  # fmt: skip


def alone(model: nn.Module, program: Program, x: Tensor, n: int) -> Tensor:
    losses = [program(model, x[i : i + 1], n)[0] for i in range(len(x))]
    norms = [torch.cat([g.flatten() for g in torch.autograd.grad(a, list(model.parameters()))]).norm() for a in losses]
    return torch.stack(norms)


@pytest.mark.parametrize("name", HONEST)
def test_one_plan_serves_honest_programs_of_all_sizes(name: str) -> None:
    model, engine = linear(), Engine()
    for batch_size, times, n in WINDOWS if name == "windows" else IN_TIME:
        x = torch.randn(batch_size, times, 5)
        backward = engine.backward(HONEST[name](model, x, n), Parameters(dict(model.named_parameters())), keep=True)
        found = torch.stack(list(backward.squared_norms().values())).sum(0).sqrt()
        torch.testing.assert_close(found, alone(model, HONEST[name], x, n).to(found.dtype), rtol=1e-4, atol=1e-6)
        assert not backward.plan.routed
    assert engine.plans == 1
