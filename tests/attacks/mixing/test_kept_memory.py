"""What was computed from a batch stays of unknown origin as long as it lives, whatever became of the pass.

Memory that an earlier batch left passed for memory from before the first one where that pass was refused, or ended in
an error, or was not watched; and where a permutation left the sum of its words as it was.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import clipwise as cw

from .test_mixing import modes
from .test_second_look import losses_of, mlp, points, private_of

N = 48
EIGHT = cw.FixedSize(N, 8)


# A first pass that comes to nothing


def of_another_shape(private: cw.Private, losses: Tensor) -> None:
    private.step(losses.mean())


def of_losses_that_mix(private: cw.Private, losses: Tensor) -> None:
    private.step(losses * torch.softmax(-losses.detach(), 0))


def refused_by_the_engine(private: cw.Private, losses: Tensor) -> None:
    hidden = losses * 1.0
    hidden.register_hook(lambda g: g / (g.norm() + 1e-6))
    private.step(hidden)


def without_a_graph(private: cw.Private, losses: Tensor) -> None:
    private.step(losses.detach())


def in_an_error(private: cw.Private, losses: Tensor) -> None:
    raise ZeroDivisionError


def left(private: cw.Private, losses: Tensor) -> None:
    pass


ENDS = [of_another_shape, of_losses_that_mix, refused_by_the_engine, without_a_graph, in_an_error, left]
each_end = pytest.mark.parametrize("end", ENDS, ids=lambda end: end.__name__)
End = Callable[[cw.Private, Tensor], None]


def first_pass(private: cw.Private, model: nn.Module, end: End, does: Callable[[Tensor], None]) -> Any:
    """One pass that is not accepted, and its batch."""
    for batch in private.loader(points()):
        with suppress(cw.ClipwiseError, ZeroDivisionError):
            does(batch[0])
            end(private, losses_of(model, batch))
        return batch
    raise AssertionError("there is no batch")


def train(private: cw.Private, model: nn.Module, centre: Callable[[], Tensor]) -> None:
    for x, y in private.loader(points()):
        private.step(losses_of(model, (x - centre(), y)))


class Kept:
    """Where a program keeps a statistic of the batch, and how it gets there."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.value, self.numbers = model, torch.zeros(6), torch.zeros(6)

    def in_a_variable(self, x: Tensor) -> None:
        self.value = x.mean(0)

    def in_memory_from_before(self, x: Tensor) -> None:
        self.value.copy_(x.mean(0))

    def behind_the_version_counter(self, x: Tensor) -> None:
        self.value.data[:] = x.mean(0)

    def with_numpy(self, x: Tensor) -> None:
        self.value.numpy()[:] = x.mean(0).numpy()

    def on_the_model(self, x: Tensor) -> None:
        self.model.centre = x.mean(0)

    def in_a_list_on_the_model(self, x: Tensor) -> None:
        self.model.centre = [torch.zeros(6), x.mean(0)]

    def in_memory_that_the_pass_made(self, x: Tensor) -> None:
        self.value = torch.zeros(6)
        self.value += x.mean(0)

    def of(self) -> Tensor:
        found = getattr(self.model, "centre", self.value)
        return found[1] if isinstance(found, list) else found  # type: ignore[return-value]


HOW = [
    Kept.in_a_variable, Kept.in_memory_from_before, Kept.behind_the_version_counter, Kept.with_numpy,
    Kept.on_the_model, Kept.in_a_list_on_the_model, Kept.in_memory_that_the_pass_made,
]  # fmt: skip


@pytest.mark.parametrize("how", HOW, ids=lambda how: how.__name__)
@each_end
def test_what_a_pass_kept_is_refused_whatever_became_of_it(end: End, how: Callable[[Kept, Tensor], None]) -> None:
    model = mlp()
    private, kept = private_of(model, 4, EIGHT), Kept(model)
    first_pass(private, model, end, lambda x: how(kept, x))
    with pytest.raises(cw.NotSeparable, match="unknown origin"):
        train(private, model, kept.of)
    assert private.steps_done == 0 and not modes()


@each_end
def test_what_is_computed_from_the_batch_after_its_pass_is_refused(end: End) -> None:
    model = mlp()
    private = private_of(model, 4, EIGHT)
    batch = first_pass(private, model, end, lambda x: None)
    centre = batch[0].mean(0)
    with pytest.raises(cw.NotSeparable, match="unknown origin"):
        train(private, model, lambda: centre)
    assert private.steps_done == 0


@each_end
def test_what_is_written_into_a_cache_after_its_pass_is_refused(end: End) -> None:
    """The pass made the memory without the batch."""
    model, cache = mlp(), SimpleNamespace()
    private = private_of(model, 4, EIGHT)
    batch = first_pass(private, model, end, lambda x: setattr(cache, "table", torch.zeros(6)))
    cache.table.copy_(batch[0].mean(0))
    with pytest.raises(cw.NotSeparable, match="unknown origin"):
        train(private, model, lambda: cache.table)


def test_what_a_refused_pass_kept_is_refused_in_the_same_loop() -> None:
    """Where every refused batch is mended, as the documents advise."""
    model, kept, refused = mlp(), [], 0
    private = private_of(model, 4, EIGHT)
    for x, y in private.loader(points()):
        kept.append(x.mean(0))
        try:
            private.step(losses_of(model, (x - kept[0], y)) / (1.0 if refused else x.abs().max()))
        except cw.NotSeparable:
            refused += 1
            with private.watch((x, y)):
                losses = losses_of(model, (x, y))
            private.step(losses)
    assert refused == private.steps_done == 4


# Passes that are not watched


@pytest.mark.parametrize("how", HOW, ids=lambda how: how.__name__)
def test_what_an_unwatched_step_kept_is_refused_at_the_next_watched_one(how: Callable[[Kept, Tensor], None]) -> None:
    """It was accepted with a note, looked at twice, and constant from then on."""
    model = mlp()
    private, kept = private_of(model, 120, EIGHT), Kept(model)
    model.centre = torch.zeros(6)
    if "model" not in how.__name__:
        del model.centre

    def run() -> None:
        for step, (x, y) in enumerate(private.loader(points())):
            if step == 4:
                how(kept, x)
            private.step(losses_of(model, (x - kept.of(), y)))

    with pytest.raises(cw.NotSeparable, match="unknown origin"):
        run()
    assert private.checked.steps == (0, 1, 2) and 35 <= private.steps_done < 100


def test_a_statistic_of_a_first_batch_of_one_is_refused() -> None:
    """Such a batch is not watched."""
    model = mlp()
    plan = cw.Plan(EIGHT, 4, cw.Abadi(1.0), noise_multiplier=1.0)
    private = cw.Private(plan, model, torch.optim.SGD(model.parameters(), lr=0.1))
    centre = next(iter(private.loader(points(), physical_batch_size=1)))[0].mean(0)
    with pytest.raises(cw.NotSeparable, match="unknown origin"):
        train(private, model, lambda: centre)


def test_own_batches_from_before_are_not_kept_for_later_ones() -> None:
    model, kept = mlp(), []
    plan = cw.Plan(EIGHT, 4, cw.Abadi(1.0), noise_multiplier=1.0)
    private = cw.Private(plan, model, torch.optim.SGD(model.parameters(), lr=0.1), own_batches=True)
    data = points()

    def run() -> None:
        for step in range(4):
            x, y = (tensor[8 * step : 8 * step + 8].clone() for tensor in data.tensors)
            kept.append(x)
            with private.watch((x, y)):
                losses = losses_of(model, (x - 0.1 * kept[0].flip(0) if step else x, y))
            private.step(losses)

    with pytest.raises(cw.NotSeparable, match="unknown origin"):
        run()
    assert private.steps_done == 1


# The same words in other places


class Ordered(nn.Module):
    """Takes the features in an order, each with a sign."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()
        self.register_buffer("order", torch.arange(6))
        self.register_buffer("signs", torch.tensor([1.0, -1.0] * 3, dtype=torch.float64))
        self.register_buffer("rows", torch.arange(12.0).view(2, 6) - 6)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x[:, self.order] * self.signs.float() + self.rows[0])
        return out


def order_by_the_batch(model: Any, x: Tensor) -> None:
    model.order.copy_(x.mean(0).argsort())


def order_by_the_batch_with_numpy(model: Any, x: Tensor) -> None:
    model.order.numpy()[:] = x.mean(0).argsort().numpy()


def signs_by_the_batch(model: Any, x: Tensor) -> None:
    model.signs.copy_(torch.where(x[:, :6].mean(0) > x.mean(), 1.0, -1.0).sort()[0][[0, 5, 1, 4, 2, 3]])


def rows_by_the_batch(model: Any, x: Tensor) -> None:
    model.rows.copy_(model.rows[(x.sum() > 0).long() * torch.tensor([1, -1]) + torch.tensor([0, 1])].flip(0))


PERMUTATIONS = [order_by_the_batch, order_by_the_batch_with_numpy, signs_by_the_batch, rows_by_the_batch]


@pytest.mark.parametrize("when", ["in the pass", "after the step"])
@pytest.mark.parametrize("permute", PERMUTATIONS, ids=lambda permute: permute.__name__)
def test_a_permutation_by_the_batch_is_seen(permute: Callable[[Any, Tensor], None], when: str) -> None:
    model: Any = Ordered()
    private = private_of(model, 4, EIGHT)

    def run() -> None:
        for x, y in private.loader(points()):
            losses = losses_of(model, (x, y))
            if when == "in the pass":
                permute(model, x)
            private.step(losses)
            permute(model, x)

    with pytest.raises(cw.NotSeparable, match=r"unknown origin|writes values computed from the batch|other than torch"):
        run()
    assert private.steps_done <= 2


# Honest relatives


@each_end
def test_tables_that_were_there_before_are_constant_whenever_they_are_met(end: End) -> None:
    """Also where the pass that came to nothing did not get as far."""
    model, table = mlp(), torch.linspace(-1, 1, 6)
    private = private_of(model, 4, EIGHT)
    first_pass(private, model, end, lambda x: None)
    train(private, model, lambda: table)
    assert private.steps_done == 4 and private.checked.steps == (0, 1, 2)


@each_end
def test_a_cache_that_such_a_pass_made_without_the_batch_is_constant(end: End) -> None:
    model = mlp()
    private = private_of(model, 4, EIGHT)

    @cache
    def table() -> Tensor:
        return torch.linspace(-1, 1, 6)

    def remember(x: Tensor) -> None:
        model.centre = table() * 2

    first_pass(private, model, end, remember)
    train(private, model, lambda: table() + model.centre)
    assert private.steps_done == 4


def test_a_cache_of_the_model_may_grow_in_steps_that_are_not_watched() -> None:
    """Seen to be made without the batch once, it may be made again: tables of positions, masks."""

    class Growing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.tables = mlp(), {0: torch.zeros(6)}

        def forward(self, x: Tensor, length: int) -> Tensor:
            if length not in self.tables:
                self.tables[length] = torch.linspace(-1, 1, 6) * length
            out: Tensor = self.net(x + self.tables[length])
            return out

    model = Growing()
    private = private_of(model, 120, EIGHT)
    for step, (x, y) in enumerate(private.loader(points())):
        length = 1 if step < 4 else 2 + step % 3
        private.step(nn.functional.cross_entropy(model(x, length), y, reduction="none"))
    assert len(private.checked.steps) > 3 and not private.checked.unclear


def test_a_layer_may_be_frozen_between_steps() -> None:
    """What it holds was released."""
    model: Any = mlp()
    private = private_of(model, 120, EIGHT)
    for step, (x, y) in enumerate(private.loader(points())):
        if step == 20:
            private.model[0].requires_grad_(False)  # type: ignore[index, operator]
            private.optimizer.param_groups[0]["params"] = [p for p in model.parameters() if p.requires_grad]
        private.step(losses_of(model, (x, y)))
    assert len(private.checked.steps) > 3


def test_a_look_at_a_batch_before_the_loop_is_honest() -> None:
    model, weights = mlp(), torch.tensor([1.0, 2.0, 3.0])
    private = private_of(model, 4, EIGHT)
    assert next(iter(private.loader(points())))[0].shape == (8, 6)
    for x, y in private.loader(points()):
        private.step(losses_of(model, (x, y)) * weights[y])
    assert private.checked.steps == (0, 1, 2)
