"""Mixing in gradients that are small beside others, and memory that is read in the backward pass alone.

A sum of gradients hides small ones; clipped by `Normalize`, or by a bound of their own, they count as much as large
ones. Hooks and custom functions read memory of earlier batches after the forward pass has ended.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

import clipwise as cw

from .test_second_look import N, losses_of, mlp, points, train

SIZE = cw.FixedSize(N, 16)
Centred = Callable[[Tensor], Tensor]


def run(body: Any, model: nn.Module, clip: Any, steps: int = 3) -> cw.Private:
    plan = cw.Plan(SIZE, steps, clip, noise_multiplier=1.0)
    private = cw.Private(plan, model, torch.optim.SGD(model.parameters(), lr=0.1), seed=0)
    for step, batch in enumerate(private.loader(points())):
        private.step(body(model, batch, step))
    return private


def by_the_batch(x: Tensor) -> Tensor:
    return x - x.mean(0)


def by_a_constant(x: Tensor) -> Tensor:
    return x - 0.3


# Small gradients beside large ones


def some_small(centred: Centred, share: float = 1e-6) -> Any:
    """Samples without a label have losses whose gradients are tiny; theirs mix."""

    def body(model: nn.Module, batch: Any, step: int) -> Tensor:
        small = share * (model(centred(batch[0])) - 1).square().sum(1)
        return torch.where(batch[0][:, 1].abs() > 0.7, losses_of(model, batch), 3 + small)

    return body


@pytest.mark.parametrize("share", [1e-4, 1e-6, 1e-9])
@pytest.mark.parametrize("clip", [cw.Normalize(1.0), cw.Abadi(1e-9)], ids=["normalize", "tiny_bound"])
def test_small_gradients_do_not_mix_behind_large_ones(share: float, clip: cw.Rule) -> None:
    with pytest.raises(cw.NotSeparable, match="samples mix: when"):
        run(some_small(by_the_batch, share), mlp(), clip)


@pytest.mark.parametrize("share", [1e-4, 1e-6, 1e-9])
def test_small_gradients_are_honest(share: float) -> None:
    assert run(some_small(by_a_constant, share), mlp(), cw.Normalize(1.0)).checked.steps == (0, 1, 2)


def test_why_small_gradients_count() -> None:
    """Other records of one sample move the clipped sum of the others by far more than R."""
    x, y = points()[:]
    labelled = x[:, 1].abs() > 0.7
    other = x.clone()
    other[0] *= 100

    def total(x: Tensor) -> Tensor:
        model = mlp()
        small = 1e-6 * (model(by_the_batch(x)) - 1).square().sum(1)
        losses = torch.where(labelled, losses_of(model, (x, y)), 3 + small)
        found = cw.clipped_gradients(losses, dict(model.named_parameters()), cw.Normalize(1.0)).gradients
        return torch.cat([g.flatten() for g in found.values()])

    assert float((total(x) - total(other)).norm()) > 5


# A group of parameters that is clipped by itself


class Heads(nn.Module):
    """A main network and an auxiliary head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.main, self.beside = mlp(), nn.Linear(6, 1)


APART = {
    "normalized": cw.Groupwise({"beside.*": cw.Normalize(1.0), "*": cw.Abadi(1.0)}),
    "tiny_bound": cw.Groupwise({"beside.*": cw.Abadi(1e-6), "*": cw.Abadi(1.0)}, noise="per_layer"),
    "layerwise": cw.Layerwise(cw.Normalize(1.0)),
}


def beside(centred: Centred, weight: float) -> Any:
    def body(model: Any, batch: Any, step: int) -> Tensor:
        return losses_of(model.main, batch) + weight * F.softplus(-model.beside(centred(batch[0])).squeeze(1))

    return body


def beside_some(centred: Centred, weight: float) -> Any:
    """The head has a large honest gradient from half of the samples, and a tiny one from the others."""

    def body(model: Any, batch: Any, step: int) -> Tensor:
        honest, small = (model.beside(x).squeeze(1) for x in (batch[0], centred(batch[0])))
        return losses_of(model.main, batch) + torch.where(batch[0][:, 1] > 0, honest, weight * F.softplus(-small))

    return body


BESIDE: dict[str, Any] = {"all": beside, "some": beside_some}


@pytest.mark.parametrize("clip", APART.values(), ids=APART)
@pytest.mark.parametrize("body", BESIDE.values(), ids=BESIDE)
@pytest.mark.parametrize("weight", [1e-4, 5e-6])
def test_a_small_group_does_not_mix(clip: Any, body: Any, weight: float) -> None:
    with pytest.raises(cw.NotSeparable, match="samples mix"):
        run(body(by_the_batch, weight), Heads(), clip)


def a_little_by_the_batch(x: Tensor) -> Tensor:
    return x + 3e-4 * x.abs().max()


@pytest.mark.parametrize("clip", [APART["normalized"], APART["layerwise"]], ids=["normalized", "layerwise"])
def test_a_small_group_does_not_mix_a_little_either(clip: Any) -> None:
    """Less than the rounding of the whole gradient is a percent of the head's: 15 R with a thousand samples."""
    with pytest.raises(cw.NotSeparable, match="samples mix"):
        run(beside(a_little_by_the_batch, 1e-5), Heads(), clip)


@pytest.mark.parametrize("clip", APART.values(), ids=APART)
@pytest.mark.parametrize("body", BESIDE.values(), ids=BESIDE)
@pytest.mark.parametrize("weight", [1e-4, 5e-6, 1e-9])
def test_a_small_group_is_honest(clip: Any, body: Any, weight: float) -> None:
    assert run(body(by_a_constant, weight), Heads(), clip).checked.steps == (0, 1, 2)


class Attention(nn.Module):
    """The bias of its keys, and that before the last normalization, have gradients that are zero up to rounding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.place, self.keys = nn.Linear(1, 8), nn.Linear(8, 24)
        self.mixed, self.out = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.keys(self.place(x[:, :, None])).chunk(3, -1)
        h = self.mixed(F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])[:, 0])
        logits: Tensor = self.out(h.mean(1))
        return logits.log_softmax(1)


@pytest.mark.parametrize("clip", [cw.Abadi(1.0), cw.Layerwise(cw.Normalize(1.0))], ids=["flat", "layerwise"])
def test_parameters_without_a_gradient_are_honest(clip: Any) -> None:
    assert run(losses_of, Attention(), clip, steps=6).checked.steps[:3] == (0, 1, 2)


def test_samples_without_a_gradient_are_honest() -> None:
    def body(model: nn.Module, batch: Any, step: int) -> Tensor:
        return losses_of(model, batch) * (batch[0][:, 0] > 0)

    assert run(body, mlp(), cw.Normalize(1.0)).checked.steps == (0, 1, 2)


def test_a_sample_whose_gradient_is_zero_does_not_get_a_small_one_from_others() -> None:
    def body(model: nn.Module, batch: Any, step: int) -> Tensor:
        x = batch[0]
        small = 1e-7 * F.relu(x.abs().max() - 8) * model(x)[:, 0]
        return torch.where(x[:, 1].abs() > 0.7, losses_of(model, batch), 3 + small)

    with pytest.raises(cw.NotSeparable, match="samples mix: when"):
        run(body, mlp(), cw.Normalize(1.0))


# Memory that is read in the backward pass alone


class Scaled(torch.autograd.Function):
    """The identity, whose gradient is multiplied with what the owner holds then."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, owner: Any) -> Tensor:
        ctx.owner = owner
        return h.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return gradient * ctx.owner.scale, None


class Owner:
    """Keeps a statistic of every batch for the next one, or nothing of it."""

    def __init__(self, scale: Tensor, keeps: bool) -> None:
        self.scale, self.keeps = scale, keeps

    def after(self, hidden: Tensor) -> None:
        if self.keeps:
            found = hidden.detach().mean(0) * 3
            self.scale = found if self.scale.dim() else found.abs().max()


def by_a_function(owner: Owner, model: Any, h: Tensor) -> Tensor:
    return Scaled.apply(h, owner)  # type: ignore[no-any-return]


def by_a_hook(owner: Owner, model: Any, h: Tensor) -> Tensor:
    h.register_hook(lambda gradient: gradient * owner.scale)
    return h


def by_a_hook_without_a_line(owner: Owner, model: Any, h: Tensor) -> Tensor:
    h.register_hook(partial(torch.mul, owner.scale))
    return h


def by_a_builtin(owner: Owner, model: Any, h: Tensor) -> Tensor:
    h.register_hook(owner.scale.mul)
    return h


def in_place(owner: Owner, model: Any, h: Tensor) -> Tensor:
    h.register_hook(lambda gradient: operator.imul(gradient.clone(), owner.scale))
    return h


def by_its_number(owner: Owner, model: Any, h: Tensor) -> Tensor:
    h.register_hook(lambda gradient: gradient * (owner.scale.max() * 0.9).item())
    return h


def written_into_another(owner: Owner, model: Any, h: Tensor) -> Tensor:
    def hook(gradient: Tensor) -> Tensor:
        table = torch.zeros(5)
        table[:3].copy_(owner.scale[:3] if owner.scale.dim() else owner.scale)
        return gradient * table

    h.register_hook(hook)
    return h


def beside_another_way(owner: Owner, model: Any, h: Tensor) -> Tensor:
    return h * 0.5 + by_a_function(owner, model, h)


class Given(torch.autograd.Function):
    """Its gradient is the owner's memory itself."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, owner: Any) -> Tensor:
        ctx.owner = owner
        return h * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return ctx.owner.scale, None


def by_a_hook_of_a_node(owner: Owner, model: Any, h: Tensor) -> Tensor:
    assert h.grad_fn is not None
    h.grad_fn.register_prehook(lambda gradients: (gradients[0] * owner.scale,))
    return h


def by_a_hook_of_the_module(owner: Owner, model: Any, h: Tensor) -> Tensor:
    if not model[1]._backward_hooks:
        model[1].register_full_backward_hook(lambda module, ins, outs: (ins[0] * owner.scale,))
    return h


WAYS: dict[str, Any] = {
    "function": by_a_function,
    "hook": by_a_hook,
    "partial": by_a_hook_without_a_line,
    "builtin": by_a_builtin,
    "in_place": in_place,
    "item": by_its_number,
    "written": written_into_another,
    "beside": beside_another_way,
    "node": by_a_hook_of_a_node,
    "module": by_a_hook_of_the_module,
}


def scaling(way: Any, owner: Owner) -> Any:
    def body(model: Any, batch: Any, step: int) -> Tensor:
        h = way(owner, model, model[1](model[0](batch[0])))
        return F.cross_entropy(model[2](h), batch[1], reduction="none")

    return body


def keeping(way: Any, owner: Owner) -> cw.Private:
    model, body = mlp(), scaling(way, owner)
    plan = cw.Plan(SIZE, 3, cw.Abadi(1.0), noise_multiplier=1.0)
    private = cw.Private(plan, model, torch.optim.SGD(model.parameters(), lr=0.1), seed=0)
    for step, batch in enumerate(private.loader(points())):
        private.step(body(model, batch, step))
        owner.after(model[0](batch[0]))
    return private


@pytest.mark.parametrize("number", [False, True], ids=["row", "number"])
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_statistic_of_an_earlier_batch_is_not_read_in_the_backward_pass(way: Any, number: bool) -> None:
    owner = Owner(torch.ones(()) if number else torch.ones(5), keeps=True)
    with pytest.raises(cw.NotSeparable, match=r"backward pass .* reads memory of unknown origin"):
        keeping(way, owner)


@pytest.mark.parametrize("number", [False, True], ids=["row", "number"])
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_constants_may_be_read_in_the_backward_pass(way: Any, number: bool) -> None:
    owner = Owner(torch.full(() if number else (5,), 0.7), keeps=False)
    assert keeping(way, owner).checked.steps == (0, 1, 2)


def test_a_gradient_that_is_kept_memory_itself_is_refused() -> None:
    class Rows(Owner):
        def after(self, hidden: Tensor) -> None:
            self.scale = hidden.detach().tanh()

    with pytest.raises(cw.NotSeparable):
        keeping(lambda owner, model, h: Given.apply(h, owner), Rows(torch.ones(16, 5), keeps=True))


@pytest.mark.parametrize("in_place", [False, True])
def test_a_log_of_gradients_is_honest(in_place: bool) -> None:
    """An average of their lengths, which no gradient is computed from."""
    owner = Owner(torch.zeros(()), keeps=False)

    def noted(gradient: Tensor) -> None:
        if in_place:
            owner.scale.mul_(0.9).add_(gradient.norm(), alpha=0.1)
        else:
            owner.scale = 0.9 * owner.scale + 0.1 * gradient.norm()
        assert float(owner.scale) >= 0

    def body(model: Any, batch: Any, step: int) -> Tensor:
        h = model[1](model[0](batch[0]))
        h.register_hook(noted)
        return F.cross_entropy(model[2](h), batch[1], reduction="none")

    assert train(body).checked.steps == (0, 1, 2)


def test_the_message_names_the_line() -> None:
    with pytest.raises(cw.NotSeparable, match=r"mul \(test_hidden_gradients\.py:\d+\)"):
        keeping(by_a_function, Owner(torch.ones(5), keeps=True))


class Straight(torch.autograd.Function):
    """Rounds, and lets gradients through where they are not too far out: reads what the forward pass saved."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, most: Tensor) -> Tensor:
        ctx.save_for_backward(h)
        ctx.most = most
        return h.round(decimals=2)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> Any:
        table = torch.tensor([1.0, 0.0])
        mask = torch.where(ctx.saved_tensors[0].abs() < ctx.most, table[0], table[1])
        return gradient * mask * torch.linspace(0.5, 1.0, 5), None


def straight(model: Any, batch: Any, step: int) -> Tensor:
    h = Straight.apply(model[1](model[0](batch[0])), torch.full((), 0.8))
    return F.cross_entropy(model[2](h), batch[1], reduction="none")


def recomputed(model: Any, batch: Any, step: int) -> Tensor:
    def inner(x: Tensor) -> Tensor:
        return F.dropout(model[1](model[0](x)) * torch.tensor([0.5, 1, 1, 1, 2]), 0.2)

    h = checkpoint(inner, batch[0], use_reentrant=False)
    return F.cross_entropy(model[2](h), batch[1], reduction="none")


def kept_elsewhere(model: Any, batch: Any, step: int) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(Tensor.clone, Tensor.clone):
        return losses_of(model, batch)


def scaled_by_what_a_hook_makes(model: Any, batch: Any, step: int) -> Tensor:
    h = model[1](model[0](batch[0]))
    h.register_hook(lambda gradient: gradient * torch.ones(5).mul(2))
    return F.cross_entropy(model[2](h), batch[1], reduction="none")


HONEST: dict[str, Any] = {
    "straight_through": straight,
    "checkpoint": recomputed,
    "saved_elsewhere": kept_elsewhere,
    "made_in_a_hook": scaled_by_what_a_hook_makes,
}


@pytest.mark.parametrize("body", HONEST.values(), ids=HONEST)
def test_what_hooks_and_functions_make_themselves_is_honest(body: Any) -> None:
    assert train(body).checked.steps == (0, 1, 2)


def test_a_scale_that_is_declared_may_change() -> None:
    owner = Owner(torch.ones(5), keeps=False)
    model, body = mlp(), scaling(by_a_hook, owner)
    plan = cw.Plan(SIZE, 3, cw.Abadi(1.0), noise_multiplier=1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    private = cw.Private(plan, model, optimizer, seed=0, constants=[owner.scale])
    for step, batch in enumerate(private.loader(points())):
        owner.scale.mul_(0.5)
        private.step(body(model, batch, step))
    assert private.checked.steps == (0, 1, 2)


def test_memory_is_looked_at_where_no_other_records_can_be_followed() -> None:
    """A twin that cannot be followed says nothing, and hooks read what they read."""
    owner = Owner(torch.ones(5), keeps=True)

    def unclear(owner: Owner, model: Any, h: Tensor) -> Tensor:
        h.register_hook(lambda gradient: gradient * owner.scale)
        return h + torch.poisson(h.detach().abs()) * 0

    with pytest.raises(cw.NotSeparable, match="backward pass"):
        keeping(unclear, owner)


# Numbers that a hook takes from memory without a kernel, or puts where a kernel reads none


class Listing(nn.Module):
    """Multiplies gradients with numbers of the last batch, or with constants from before the first one."""

    def __init__(self, build: Any, keeps: bool) -> None:
        super().__init__()
        self.net, self.build, self.keeps = mlp(), build, keeps
        self.norms = [torch.tensor(0.3 + 0.1 * k) for k in range(5)]

    def forward(self, x: Tensor) -> Tensor:
        h, norms = self.net[1](self.net[0](x)), self.norms
        h.register_hook(lambda g: g * self.build(g, norms))
        if self.keeps:
            self.norms = [column.abs().max() for column in h.detach().unbind(1)]
        return self.net[2](h)  # type: ignore[no-any-return]


class Held:
    """A sequence of no usual type."""

    def __init__(self, items: list[Tensor]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, place: int) -> Tensor:
        return self.items[place]


LISTS: dict[str, Any] = {
    "tensor": lambda g, n: torch.tensor(n),
    "nested": lambda g, n: torch.tensor([[[[[[[[[[[n]]]]]]]]]]]).flatten(),
    "deque": lambda g, n: torch.tensor(deque(n)),
    "sequence": lambda g, n: torch.as_tensor(Held(n)),
    "new_tensor": lambda g, n: g.new_tensor(n),
    "new": lambda g, n: g.new(n),
    "type": lambda g, n: torch.Tensor(n),
    "double_type": lambda g, n: torch.DoubleTensor(n).float(),
    "sparse": lambda g, n: torch.sparse_coo_tensor([list(range(5))], n, (5,), check_invariants=True).to_dense(),
    "new_full": lambda g, n: g.new_full(g.shape, n[0]),
    "full_like": lambda g, n: torch.full_like(g, float(n[0])),
    "list_of_numbers": lambda g, n: torch.tensor([t.item() for t in n]),
    "tolist": lambda g, n: torch.tensor([t.tolist() for t in n]),
    "numpy": lambda g, n: torch.from_numpy(np.array([t.numpy() * 2 for t in n])),
    "array": lambda g, n: float(n[0].numpy()),
}


def listing(build: Any, keeps: bool) -> cw.Private:
    return run(lambda m, b, k: losses_of(m, b), Listing(build, keeps), cw.Normalize(1.0))


@pytest.mark.parametrize("build", LISTS.values(), ids=LISTS)
def test_numbers_of_an_earlier_batch_are_not_read_in_the_backward_pass(build: Any) -> None:
    with pytest.raises(cw.NotSeparable, match=r"backward pass .* reads memory of unknown origin"):
        listing(build, keeps=True)


@pytest.mark.parametrize("build", LISTS.values(), ids=LISTS)
def test_constant_numbers_may_be_read_in_the_backward_pass(build: Any) -> None:
    assert listing(build, keeps=False).checked.steps == (0, 1, 2)


MADE: dict[str, Any] = {
    "table": lambda g, n: torch.tensor([0.5, 1.0, 2.0, 1.0, 0.5]),
    "of_its_type": lambda g, n: n[0].new_tensor([0.5, 1.0, 2.0, 1.0, 0.5]),
    "of_its_shape": lambda g, n: torch.full_like(n[0], 0.7) * torch.ones_like(g),
    "logged": lambda g, n: torch.full_like(g, 0.7) + 0 * len([float(t) for t in n]),
}


@pytest.mark.parametrize("build", MADE.values(), ids=MADE)
def test_tables_made_beside_numbers_of_an_earlier_batch_are_honest(build: Any) -> None:
    assert listing(build, keeps=True).checked.steps == (0, 1, 2)


def test_an_operation_is_not_known_by_the_end_of_its_name() -> None:
    """Only those that read nothing but a shape."""

    @torch.library.custom_op("clipwise_tests::scale_like", mutates_args=())
    def scale_like(scale: Tensor, g: Tensor) -> Tensor:
        return g * scale

    with pytest.raises(cw.NotSeparable, match=r"backward pass .* reads memory of unknown origin"):
        listing(lambda g, n: scale_like(n[0], torch.ones_like(g)), keeps=True)


# The same in the forward pass

CONSTRUCTORS: dict[str, Any] = {
    "type": torch.Tensor,
    "double_type": lambda n: torch.DoubleTensor(n).float(),
    "new": lambda n: torch.ones(1).new(n),
    "deque": lambda n: torch.tensor(deque(n)),
    "nested": lambda n: torch.tensor([[[[[[[[[[[n]]]]]]]]]]]).flatten(),
    "sparse": lambda n: torch.sparse_coo_tensor([list(range(6))], n, (6,), check_invariants=True).to_dense(),
}


def centred_by(constructor: Any, centre: Callable[[Tensor], Tensor]) -> Any:
    return lambda m, b, k: losses_of(m, (b[0] - constructor(list(centre(b[0]))), b[1]))


@pytest.mark.parametrize("constructor", CONSTRUCTORS.values(), ids=CONSTRUCTORS)
def test_a_list_of_statistics_of_the_batch_is_never_called_checked(constructor: Any) -> None:
    try:
        private = train(centred_by(constructor, lambda x: x.mean(0)))
    except cw.NotSeparable:
        return
    assert not private.checked.steps and private.checked.unclear


@pytest.mark.parametrize("constructor", CONSTRUCTORS.values(), ids=CONSTRUCTORS)
def test_a_list_of_constants_is_honest(constructor: Any) -> None:
    private = train(centred_by(constructor, lambda x: torch.linspace(0.3, 0.6, 6)))
    assert private.checked.steps == (0, 1, 2) and not private.checked.unclear
