"""Memory that a pass made or rewrote without the batch, and that something other than torch then writes the batch into.

It was learned with what it held at the end of the pass, also where no kernel had written that.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import clipwise as cw

from .test_second_look import N, losses_of, mlp, points, private_of

SIXTEEN = cw.FixedSize(N, 16)


class Centred(nn.Module):
    """Has a buffer that it rewrites without the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()
        self.register_buffer("c", torch.linspace(0.1, 0.6, 6))
        self.array = self.c.numpy()  # type: ignore[operator]

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x - self.c)  # type: ignore[no-any-return, operator]


def mean(x: Tensor) -> np.ndarray:
    return x.numpy().mean(0)  # type: ignore[no-any-return]


def after_a_kernel(m: Any, x: Tensor) -> None:
    m.c.mul_(0.1)
    m.c.numpy()[:] += 0.9 * mean(x)


def by_an_array_from_before(m: Any, x: Tensor) -> None:
    m.c.mul_(0.1)
    m.array[:] += 0.9 * mean(x)


def before_a_kernel(m: Any, x: Tensor) -> None:
    m.c.numpy()[:] += mean(x)
    m.c.mul_(0.5)


def between_kernels(m: Any, x: Tensor) -> None:
    m.c.mul_(0.1)
    m.array[:] += mean(x)
    m.c.mul_(0.5)


def by_an_alias(m: Any, x: Tensor) -> None:
    m.c.mul_(0.1)
    torch.from_numpy(m.array).add_(x.mean(0))


def at_later_steps_alone(m: Any, x: Tensor) -> None:
    m.steps = getattr(m, "steps", 0) + 1
    if m.steps > 1:
        m.array[:] += mean(x)
    m.c.mul_(0.5)


BUFFERS = [
    after_a_kernel, by_an_array_from_before, before_a_kernel, between_kernels, by_an_alias, at_later_steps_alone,
]  # fmt: skip


def train(write: Callable[[Any, Tensor], None], first: bool) -> cw.Private:
    model = Centred()
    private = private_of(model, 4, SIXTEEN)
    for x, y in private.loader(points()):
        if first:
            write(model, x)
        losses = losses_of(model, (x, y))
        if not first:
            write(model, x)
        private.step(losses)
    return private


@pytest.mark.parametrize("first", [False, True], ids=["after", "before"])
@pytest.mark.parametrize("write", BUFFERS, ids=lambda write: write.__name__)
def test_a_buffer_is_not_written_behind_its_kernels(write: Callable[[Any, Tensor], None], first: bool) -> None:
    with pytest.raises(cw.NotSeparable, match=r"unknown origin|other than torch"):
        train(write, first)


def scaled(m: Any, x: Tensor) -> None:
    m.c.mul_(0.9)


def logged(m: Any, x: Tensor) -> None:
    m.c.mul_(0.9)
    assert m.c.numpy().sum() > 0 and m.array.sum() > 0
    m.c.add_(0.1)


@pytest.mark.parametrize("first", [False, True], ids=["after", "before"])
@pytest.mark.parametrize("write", [scaled, logged], ids=lambda write: write.__name__)
def test_a_buffer_that_is_only_looked_at_is_honest(write: Callable[[Any, Tensor], None], first: bool) -> None:
    private = train(write, first)
    assert private.checked.steps == (0, 1, 2) and not private.checked.unclear


# Memory of the program


def as_an_array(x: Tensor) -> Tensor:
    new = torch.zeros(6)
    new.numpy()[:] = mean(x)
    return new


def as_the_result(x: Tensor) -> Tensor:
    new = torch.zeros(6)
    np.mean(x.numpy(), axis=0, out=new.numpy())
    return new


def by_its_address(x: Tensor) -> Tensor:
    new, found = torch.zeros(6), x.mean(0)
    ctypes.memmove(new.data_ptr(), found.data_ptr(), 24)
    return new


def of_an_array(x: Tensor) -> Tensor:
    array = np.zeros(6, dtype=np.float32)
    new = torch.from_numpy(array)
    array[:] = mean(x)
    return new


def of_an_alias(x: Tensor) -> Tensor:
    new = torch.zeros(6)
    torch.from_numpy(new.numpy()).copy_(x.mean(0))
    return new


def before_another_kernel(x: Tensor) -> Tensor:
    new = torch.zeros(6)
    new.numpy()[:] = mean(x)
    return new.mul_(0.9)


MADE = [as_an_array, as_the_result, by_its_address, of_an_array, of_an_alias, before_another_kernel]


def keep(make: Callable[[Tensor], Tensor]) -> cw.Private:
    model, centre = mlp(), torch.zeros(6)
    private = private_of(model, 4, SIXTEEN)
    for x, y in private.loader(points()):
        losses = losses_of(model, (x - centre, y))
        centre = make(x)
        private.step(losses)
    return private


@pytest.mark.parametrize("make", MADE, ids=lambda make: make.__name__)
def test_what_a_pass_made_is_not_constant_with_what_others_wrote_into_it(make: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(cw.NotSeparable, match="unknown origin"):
        keep(make)


@pytest.mark.parametrize("make", MADE, ids=lambda make: make.__name__)
def test_the_same_pass_is_never_called_checked(make: Callable[[Tensor], Tensor]) -> None:
    model = mlp()
    private = private_of(model, 4, SIXTEEN)
    try:
        for x, y in private.loader(points()):
            private.step(losses_of(model, (x - make(x), y)))
    except cw.NotSeparable:
        return
    assert not private.checked.steps and private.checked.unclear


def looked_at(x: Tensor) -> Tensor:
    new = torch.linspace(0.1, 0.6, 6)
    assert new.numpy().sum() > 0 and new.data_ptr()
    return new.add_(1)


def of_a_sine(x: Tensor) -> Tensor:
    return torch.from_numpy(np.sin(torch.arange(6.0).numpy()))


@pytest.mark.parametrize("make", [looked_at, of_a_sine], ids=lambda make: make.__name__)
def test_what_is_only_looked_at_is_constant(make: Callable[[Tensor], Tensor]) -> None:
    private = keep(make)
    assert private.checked.steps == (0, 1, 2) and not private.checked.unclear


def test_what_is_declared_may_be_written_by_anything() -> None:
    model, teacher = mlp(), torch.zeros(6)
    plan = cw.Plan(SIXTEEN, 4, cw.Abadi(1.0), noise_multiplier=1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    private = cw.Private(plan, model, optimizer, seed=0, constants=[teacher])
    for x, y in private.loader(points()):
        teacher.mul_(0.5)
        teacher.numpy()[:] += 0.1
        private.step(losses_of(model, (x - teacher.mul_(0.9), y)))
    assert private.checked.steps == (0, 1, 2) and not private.checked.unclear
