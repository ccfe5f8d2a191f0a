"""Kernels of a watched pass: what is marked, what twins compute, and why one can tell nothing more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from clipwise.engine import IN_PLACE_WRITE, memory_of, walk
from clipwise.private.evidence.modes import Modes
from clipwise.private.evidence.records import Change, Records
from clipwise.private.evidence.traffic import BATCH, CARRIED, PLACE
from clipwise.private.evidence.twin import Twin
from clipwise.private.evidence.watch import Watch

aten = torch.ops.aten
SIZE = 4
KEPT = torch.tensor([True, False, True, False])


def batch() -> Tensor:
    return torch.arange(1.0, 13.0).reshape(SIZE, 3) / 10


def watched(x: Any, twins: int = 1, unknown: Tensor | None = None, **options: Any) -> Watch:
    change = Change.of(KEPT, 0, "", **{"scale": 4.0} | options)
    return Watch(Records.of(x, SIZE), [Twin(change) for _ in range(twins)], lambda tensor, _: tensor is not unknown)


def run(watch: Watch, body: Callable[[], Any]) -> Any:
    watch.start()
    try:
        return body()
    finally:
        watch.stop()


def theirs(x: Tensor) -> Tensor:
    return torch.where(KEPT[:, None], x, 4 * x[0])


# Marks


def test_what_is_computed_from_the_batch_is_marked_and_nothing_else() -> None:
    x, w = batch(), torch.ones(3)
    watch = watched(x)

    def body() -> tuple[Tensor, ...]:
        buffer = torch.zeros(3)
        buffer[0] = x[0, 0]
        named = torch.add(w, w, alpha=2, out=torch.empty(3))
        return x @ w, w * 2, buffer, torch.zeros_like(x), named, torch.add(torch.ones(4, 3), other=x)

    computed, constant, buffer, like, named, keyword = run(watch, body)
    marks = [watch.marks_of(t) for t in (computed, constant, buffer, like, named, keyword)]
    assert marks == [BATCH, 0, BATCH, 0, 0, BATCH]
    assert watch.made_here(memory_of(constant)) and not watch.made_here(memory_of(w))
    assert not watch.made_here(memory_of(computed)) and not watch.made_here(memory_of(torch.ones(1)))


def test_memory_of_unknown_origin_is_carried() -> None:
    x, bank = batch(), torch.ones(3)
    watch = watched(x, unknown=bank)
    both, alone = run(watch, lambda: (x + bank, bank * 2))
    assert watch.marks_of(both) == BATCH | CARRIED and watch.marks_of(alone) == watch.marks_of(bank) == CARRIED
    assert watch.held_marks(memory_of(bank)) == CARRIED and watch.held_marks(memory_of(torch.ones(1))) == 0
    assert watch.knows(memory_of(bank)) and not watch.knows(memory_of(torch.ones(1)))


def test_shapes_that_follow_the_records_make_their_likes_theirs() -> None:
    x = batch()
    watch = watched(x)
    ones, plain = run(watch, lambda: (torch.ones_like(x[x > 0.45]), torch.ones_like(x)))
    assert watch.marks_of(ones) == BATCH and not watch.marks_of(plain)
    assert watch.twins[0].of(ones).sum() != ones.sum()


def test_constants_that_are_still_held_are_known() -> None:
    x = batch()
    watch = watched(x)
    kept = run(watch, lambda: (torch.ones(3) * 2, x * 2, (torch.ones(5) * 3).sum().item()))
    alive = [memory_of(tensor) for tensor in watch.constants_alive()]
    assert memory_of(kept[0]) in alive and memory_of(kept[1]) not in alive and memory_of(x) not in alive
    assert len(alive) == 1


def test_random_constants_are_known_as_such() -> None:
    x = batch()
    watch = watched(x)
    drawn, computed, plain = run(watch, lambda: ((r := torch.rand(3)), r * 2, torch.ones(3)))
    assert memory_of(drawn) in watch.drawn and memory_of(computed) in watch.drawn
    assert memory_of(plain) not in watch.drawn


def test_kernels_are_numbered_and_what_they_wrote_is_known() -> None:
    x, table = batch(), torch.zeros(4, 3)
    watch = watched(x)

    def body() -> Tensor:
        first = x * 2
        table.add_(x)
        return first

    first = run(watch, body)
    assert watch.last_written(memory_of(first)) == 1 and watch.last_written(memory_of(table)) == 2 == watch.count
    assert watch.last_written(memory_of(torch.ones(1))) == 0 and watch.written == {memory_of(table)}
    other = torch.zeros(3)
    run(watch, lambda: other.add_(1))
    assert watch.written == {memory_of(table), memory_of(other)}


def test_running_statistics_are_written() -> None:
    x, norm = batch(), nn.BatchNorm1d(3)
    watch = watched(x)
    run(watch, lambda: norm(x))
    for buffer in (norm.running_mean, norm.running_var):
        assert buffer is not None and watch.marks_of(buffer) == BATCH and memory_of(buffer) in watch.written


# Twins


def test_twins_compute_what_would_be() -> None:
    x = batch()
    watch = watched(x, twins=2)
    y, z = run(watch, lambda: ((y := x.tanh() + 1), y.mul_(2).sum(0)))
    for twin in watch.twins:
        assert torch.equal(twin.of(x), theirs(x)) and torch.equal(twin.of(y), (theirs(x).tanh() + 1) * 2)
        assert torch.equal(twin.of(z), ((theirs(x).tanh() + 1) * 2).sum(0))
    assert torch.equal(y, (x.tanh() + 1) * 2)


@pytest.mark.parametrize("generator", [None, torch.Generator()])
def test_twins_draw_the_same_random_numbers(generator: torch.Generator | None) -> None:
    x = batch()
    (generator or torch).manual_seed(3)  # type: ignore[union-attr]
    expected = torch.normal(x, 1.0, generator=generator)
    following = torch.rand(2, generator=generator)
    (generator or torch).manual_seed(3)  # type: ignore[union-attr]
    watch = watched(x, twins=2)
    found = run(watch, lambda: torch.normal(x, 1.0, generator=generator))
    assert torch.equal(found, expected) and torch.equal(torch.rand(2, generator=generator), following)
    for twin in watch.twins:
        assert torch.allclose(twin.of(found) - theirs(x), found - x)


BREAKING: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "poisson": (torch.poisson, "what poisson does follows the records"),
    "packed": (
        lambda x: nn.utils.rnn.pack_padded_sequence(x[..., None], (x[:, 0] * 2).long() % 3 + 1, True, False),
        "what _pack_padded_sequence does follows the records",
    ),
    "error": (lambda x: torch.ones(4)[(x[:2] * 5).long()], "index does not take the other records (IndexError)"),
    "sparse": (lambda x: x.to_sparse(), "_to_sparse gives a sparse tensor"),
    "quantized": (
        lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
        "quantize_per_tensor gives a quantized tensor",
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize(("body", "why"), BREAKING.values(), ids=BREAKING)
def test_why_a_twin_can_tell_nothing_more(body: Callable[[Tensor], Any], why: str) -> None:
    x = batch()
    watch = watched(x, twins=2)
    watch.twins[1].broken = "it was before"
    run(watch, lambda: body(x))
    assert watch.twins[0].broken == why and watch.twins[1].broken == "it was before"


def pair(watch: Watch, ours: list[Tensor], others: list[Tensor], func: Any = aten.mul.Tensor) -> Twin:
    watch._pair(watch.twins[0], func, ours, others)
    return watch.twins[0]


def test_results_are_paired_one_by_one() -> None:
    x = batch()
    ours, others = [x * 2, x[:2] * 3], [x * 4, x[:3] * 5]
    twin = pair(watched(x), ours, others)
    assert not twin.broken and torch.equal(twin.of(ours[0]), others[0])
    assert twin.is_odd(ours[1]) and twin.of(ours[1]) is others[1]
    again = [ours[1] * 1, ours[0]]
    twin.pair_odd(again[0], torch.ones(7))
    watch = watched(x)
    watch.twins[0] = twin
    pair(watch, again, [again[0] + 1, ours[0] + 50])
    assert torch.equal(twin.of(again[0]), again[0] + 1), "what followed the records is followed on"
    assert torch.equal(twin.of(ours[0]), others[0]), "memory that has a twin was written by it"


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:torch.quantize_per_tensor")
def test_results_that_cannot_be_paired_are_named() -> None:
    x = batch()
    more = pair(watched(x), [x * 2], [x * 2, x * 3])
    assert more.broken == "the number of results of mul follows the records"
    nested = torch.nested.nested_tensor([x[0], x[1]])
    quantized = torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)
    for odd, why in (
        (nested, "a nested tensor"),
        (quantized, "a quantized tensor"),
        (x.to_sparse(), "a sparse tensor"),
    ):
        assert pair(watched(x), [odd], [odd]).broken == f"mul gives {why}"
    assert pair(watched(x), [x * 2], [x.to_sparse()]).broken == "mul gives a sparse tensor"


def test_the_first_operation_that_moves_a_kept_row_is_remembered() -> None:
    x = batch()
    watch = watched(x)
    here = [x * 2, x + 1, x + 2, x.sum(0)]
    twin = pair(watch, here[:1], [theirs(x) * 2])
    assert twin.moved is None, "only rows of other records moved"
    pair(watch, here[3:], [x.sum(0) + 9], aten.sum.dim_IntList)
    assert twin.moved is None, "not in rows"
    pair(watch, here[1:2], [x + 5], aten.add.Tensor)
    assert twin.moved is not None and twin.moved[0] == "add" and twin.moved[1].startswith("test_watch.py:")
    pair(watch, here[2:3], [x + 9], aten.sub.Tensor)
    assert twin.moved[0] == "add"


def test_plain_results_that_would_be_others_are_noted() -> None:
    x = batch()
    watch = watched(x)
    assert run(watch, lambda: torch.equal(x, x.clone()))
    assert not watch.twins[0].left
    run(watch, lambda: torch.allclose(x[1], torch.full((3,), 0.5), atol=0.2))
    assert any("plain value" in why or "number" in why for _, why in watch.twins[0].left)


def test_a_rigid_twin_looks_up_other_records() -> None:
    numbers = torch.tensor([1, 2, 3, 0])
    table = torch.arange(8.0).reshape(4, 2)
    watch = watched(numbers, rigid=True)
    found, computed = run(watch, lambda: (F.embedding(numbers, table), numbers + 1))
    twin = watch.twins[0]
    assert torch.equal(twin.of(found), table[torch.tensor([1, 1, 3, 1])]) and twin.of(computed) is computed


# Places


PLACES = torch.arange(float(SIZE))[:, None]
MEETS: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "added": (lambda x: x + torch.arange(float(len(x)))[:, None], True),
    "from the program": (lambda x: x * PLACES, True),
    "random": (lambda x: x + torch.rand(len(x))[:, None], False),
    "the same for all": (lambda x: x + torch.ones(len(x))[:, None], False),
    "beside": (lambda x: torch.cat([x, PLACES], 1), True),
    "below": (lambda x: torch.cat([x, PLACES.expand(4, 3)]), False),
    "for every feature": (lambda x: x + torch.arange(3.0), False),
    "of whole numbers": (lambda x: (x * 10).long() + torch.arange(len(x))[:, None], False),
    "in a product": (lambda x: x @ torch.arange(12.0).reshape(3, 4), False),
    "overwritten": (lambda x: PLACES.repeat(1, 3).copy_(x), False),
}


@pytest.mark.parametrize(("body", "meets"), MEETS.values(), ids=MEETS)
def test_samples_that_meet_their_place_are_marked(body: Callable[[Tensor], Tensor], meets: bool) -> None:
    x = batch()
    watch = watched(x)
    out = run(watch, lambda: body(x))
    assert bool(watch.marks_of(out) & PLACE) is meets and bool(watch.place) is meets
    assert watch.marks_of(out) & BATCH
    if meets:
        assert watch.place.startswith("test_watch.py:")


# The graph


class Doubled(torch.autograd.Function):
    """A custom function of several kernels, the first of which reads constants alone."""

    @staticmethod
    def forward(ctx: Any, w: Tensor, x: Tensor) -> Tensor:  # type: ignore[override]
        return (w * 2).sum() * x.sum(1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return gradient.sum() * torch.ones(3), None


def node_marks(watch: Watch, body: Callable[[], Tensor], *parameters: Tensor) -> dict[str, int]:
    losses = run(watch, body)
    graph = walk(losses, {id(p): k for k, p in enumerate(parameters)}, list(parameters))
    return dict(zip(graph.names, watch.node_marks(graph), strict=True))


def test_nodes_have_the_marks_of_their_kernels() -> None:
    x, w, bank = batch(), torch.ones(3, requires_grad=True), torch.ones(3)
    found = node_marks(watched(x), lambda: (w * bank).tanh().mul(x).sum(1), w)
    assert (found["TanhBackward0"], found["SumBackward1"]) == (0, BATCH)
    before = w.exp()
    found = node_marks(watched(x), lambda: (before + x).sum(1), w)
    assert found["ExpBackward0"] == CARRIED, "computed before the batch was there"
    found = node_marks(watched(x, unknown=bank), lambda: (w.exp() * bank).mul(x).sum(1), w)
    assert found["ExpBackward0"] == 0 and found["SumBackward1"] == BATCH | CARRIED


def test_a_custom_function_has_the_marks_of_all_its_kernels() -> None:
    x, w = batch(), torch.ones(3, requires_grad=True)
    found = node_marks(watched(x), lambda: Doubled.apply(w.exp(), x) + 1, w)  # type: ignore[no-untyped-call]
    assert found["DoubledBackward"] == BATCH and found["ExpBackward0"] == 0


def test_a_write_in_place_has_the_marks_of_its_kernel() -> None:
    x, w = batch(), torch.ones(3, requires_grad=True)

    def body(value: Tensor) -> Tensor:
        table = w.exp().repeat(4, 1)
        table[:, 0] += value
        return (table * x).sum(1)

    for value, marks in ((torch.ones(4), 0), (x[:, 0], BATCH)):
        found = node_marks(watched(x), lambda value=value: body(value), w)
        assert found[IN_PLACE_WRITE] == marks and found["ExpBackward0"] == 0


def test_leaves_that_are_not_trained_are_asked_for() -> None:
    x, w, other = batch(), torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    for unknown, marks in ((None, 0), (other, CARRIED)):
        losses = run(watch := watched(x, unknown=unknown), lambda: (w * other * x).sum(1))
        graph = walk(losses, {id(w): 0}, [w])
        leaves = [watch.node_marks(graph)[k] for k, place in graph.leaf_parameter.items() if place < 0]
        assert leaves == [marks]


def test_modes_of_others_above_the_watching_ones_stay() -> None:
    class Other(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    class Silent:
        def kernel(self, func: Any, args: Any, kwargs: Any) -> Any:
            return func(*args, **kwargs)

        call = kernel

    modes, others = Modes(Silent()), [Other(), Other()]
    modes.enter()
    for other in others:
        other.__enter__()
    modes.leave()
    assert _get_current_dispatch_mode_stack()[-2:] == others
    for other in reversed(others):
        other.__exit__(None, None, None)
