"""The loader: logical batches in physical pieces, and no way to lose or double one."""

from __future__ import annotations

import copy
import itertools
import math
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

import clipwise as cw
from clipwise.hashing import digest_of, whole
from clipwise.private.evidence.records import copied
from clipwise.private.loader import _Again
from clipwise.private.parts import PhysicalBatch
from tests.core.common import N, data, loop_sum, losses_of, mlp, plan, same, sgd, train, weights
from tests.core.doubles import Constant, Recorder, Unlabelled


class Numbered(Dataset[Any]):
    """Item i is (i, random augmentation from all three global generators)."""

    def __init__(self, n: int = N) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> tuple[int, float]:
        return i, float(torch.rand(())) + float(np.random.rand()) + random.random()  # noqa: NPY002


def numbers_model() -> nn.Module:
    return nn.Linear(1, 1)


def numbers_losses(model: nn.Module, i: Tensor, a: Tensor) -> Tensor:
    return model((i + a).float().unsqueeze(1)).squeeze(1)


def private_for(p: cw.Plan | None = None, seed: int | None = 0, **options: Any) -> tuple[cw.Private, nn.Module]:
    model = mlp()
    return cw.Private(p or plan(), model, sgd(model), seed=seed, **options), model


@pytest.mark.parametrize(
    "sampling", [cw.Poisson(N, 10), cw.FullBatch(N), cw.Shuffled(N, 16), cw.FixedSize(N, 10), cw.BallsInBins(N, 9)]
)
@pytest.mark.parametrize("size", [None, 7])
def test_pieces_make_up_the_logical_batches(sampling: Any, size: int | None) -> None:
    private = cw.Private(plan(sampling=sampling), model := numbers_model(), sgd(model), seed=0)
    logical: list[list[int]] = [[]]
    for i, a in private.loader(Numbered(), physical_batch_size=size, yield_empty=True):
        assert size is None or len(i) <= size
        logical[-1] += i.tolist()
        if private.step(numbers_losses(model, i, a)):
            logical.append([])
    draws = private._position.draws()
    drawn = [draws.batch(t).tolist() for t in range(6)]
    assert [sorted(batch) for batch in logical] == [*(sorted(batch) for batch in drawn), []]
    assert size is not None or logical == [*drawn, []]
    assert private.ledger.steps == 6


def test_the_result_does_not_depend_on_the_physical_batch_size() -> None:
    results = []
    for size in (None, 1, 4):
        private, model = private_for(noise=Unlabelled())
        train(private, model, data(), physical_batch_size=size)
        results.append(weights(model))
    for other in results[1:]:
        for name in other:
            torch.testing.assert_close(results[0][name], other[name])


def test_empty_batches_are_noise_only_steps_that_the_user_never_sees() -> None:
    p = plan(sampling=cw.Poisson(N, 1), steps=60, noise_multiplier=1.0)
    model = mlp()
    optimizer = Recorder(model.parameters())
    private = cw.Private(p, model, optimizer, seed=3, noise=Constant(1.0))
    sizes = []
    for x, y in private.loader(data()):
        sizes.append(len(x))
        assert private.step(losses_of(model, x, y))
    empties = sum(all(torch.equal(g, torch.ones_like(g)) for g in seen) for seen in optimizer.seen)
    assert min(sizes) > 0 and empties == 60 - len(sizes) > 5
    assert private.ledger.steps == len(optimizer.seen) == 60
    # Leading and trailing empty batches too: the first and the last step of some seed are empty.
    lengths = [len(private._position.draws().batch(t)) for t in range(60)]
    assert lengths.count(0) == empties


def test_a_run_of_nothing_but_empty_batches_still_ends() -> None:
    p = plan(sampling=cw.Poisson(10_000, 1), steps=1)
    records = TensorDataset(torch.zeros(10_000))
    runs = (private_for(p, seed=seed)[0] for seed in range(50))
    private = next(run for run in runs if not len(run.loader(records)._feed._draws().batch(0)))
    assert list(private.loader(records)) == []
    assert private.ledger.steps == 1


class Fields(NamedTuple):
    x: Tensor
    text: str


class Structured(Dataset[Any]):
    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> Any:
        return {"x": torch.ones(3), "pair": (torch.ones(2), i), "fields": Fields(torch.ones(1), "word")}


def test_empty_batches_can_be_handed_out_with_their_structure() -> None:
    private, _ = private_for(plan(sampling=cw.Poisson(N, 1), steps=30), seed=3)
    empties = [b for b in private.loader(Structured(), yield_empty=True) if len(b["x"]) == 0]
    assert len(empties) > 2
    batch = empties[0]
    assert batch["x"].shape == (0, 3) and batch["pair"][0].shape == (0, 2) and batch["pair"][1].shape == (0,)
    assert batch["fields"].x.shape == (0, 1) and len(batch["fields"].text) == 0
    assert private.ledger.steps == 0


def test_yield_empty_steps_with_losses_of_length_zero() -> None:
    private, model = private_for(plan(sampling=cw.Poisson(N, 1), steps=30), seed=3)
    assert train(private, model, data(), yield_empty=True) == private.ledger.steps == 30


@pytest.mark.parametrize("more", [object(), "a name", 3], ids=["object", "text", "number"])
def test_a_collate_that_cannot_be_emptied_is_refused(more: object) -> None:
    """Also where only a part cannot: the whole would lose its structure."""
    private, _ = private_for(plan(sampling=cw.Poisson(N, 1), steps=30), seed=3)
    with pytest.raises(cw.DataError, match="collate_fn"):
        list(private.loader(data(), yield_empty=True, collate_fn=lambda items: (torch.ones(len(items)), more)))


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # on a machine with one core
def test_seeded_batches_and_augmentation_do_not_depend_on_the_workers() -> None:
    def run(workers: int) -> tuple[list[list[float]], Tensor]:
        model = numbers_model()
        nn.init.ones_(model.weight)  # type: ignore[arg-type]
        nn.init.zeros_(model.bias)  # type: ignore[arg-type]
        private = cw.Private(plan(), model, sgd(model), seed=5)
        seen = []
        for i, a in private.loader(Numbered(), physical_batch_size=4, num_workers=workers):
            seen.append((i + a).tolist())
            private.step(numbers_losses(model, i, a))
        assert private.ledger.steps == 6
        return seen, model.weight.detach()  # type: ignore[return-value]

    zero, two = run(0), run(2)
    assert zero[0] == two[0] and torch.equal(zero[1], two[1])


def test_seeded_dropout_does_not_depend_on_the_workers() -> None:
    def run(workers: int) -> dict[str, Tensor]:
        model = mlp(dropout=0.5)
        private = cw.Private(plan(steps=3), model, sgd(model), seed=5)
        torch.manual_seed(workers)
        train(private, model, data(), physical_batch_size=4, num_workers=workers)
        return weights(model)

    assert same(run(0), run(1))


def test_workers_learn_neither_the_seed_nor_the_run() -> None:
    private, _ = private_for(seed=123)
    loader = private.loader(Numbered())
    assert loader._dataloader.dataset._entropy.seed not in (None, 123)  # type: ignore[attr-defined]
    unseeded, _ = private_for(seed=None)
    dataset = Numbered()
    assert unseeded.loader(dataset)._dataloader.dataset is dataset


def test_workers_that_stay_alive_do_not_carry_batches_over() -> None:
    def run(**options: Any) -> dict[str, Tensor]:
        private, model = private_for(plan(sampling=cw.FixedSize(N, 10)))
        loader = private.loader(data(), physical_batch_size=4, **options)
        for stop in (4, 100):  # the first time in the middle of a logical batch, with others prefetched
            for k, (x, y) in enumerate(loader):
                if k == stop:
                    break
                private.step(losses_of(model, x, y))
        assert private.ledger.steps == 6
        return weights(model)

    assert same(run(), run(num_workers=1, persistent_workers=True))


def test_workers_without_a_seed() -> None:
    private, model = private_for(plan(steps=4), seed=None)
    train(private, model, data(), num_workers=1, physical_batch_size=5)
    assert private.ledger.steps == 4


def test_leaving_the_loop_and_coming_back_goes_on() -> None:
    whole, model = private_for(plan(steps=8))
    train(whole, model, data())
    expected = weights(model)
    private, model = private_for(plan(steps=8))
    for stop in (3, 2, 100):
        for done, (x, y) in enumerate(private.loader(data())):
            if done == stop:
                break
            private.step(losses_of(model, x, y))
    assert private.ledger.steps == 8 and same(expected, weights(model))


def test_leaving_in_the_middle_of_a_logical_batch_drops_its_part() -> None:
    def run(interrupt: bool) -> dict[str, Tensor]:
        private, model = private_for(plan(sampling=cw.FullBatch(N), steps=3))
        if interrupt:
            for x, y in private.loader(data(), physical_batch_size=8):
                assert not private.step(losses_of(model, x, y))
                break
            assert private.ledger.steps == 0
        train(private, model, data(), physical_batch_size=8)
        assert private.ledger.steps == 3
        return weights(model)

    assert same(run(False), run(True))


def test_one_batch_by_hand() -> None:
    private, model = private_for()
    batches = iter(private.loader(data()))
    x, y = next(batches)
    assert private.step(losses_of(model, x, y)) and private.ledger.steps == 1


def test_looking_at_batches_costs_nothing() -> None:
    private, _ = private_for(plan(sampling=cw.FixedSize(N, 10)))
    first = [x for x, _ in private.loader(data())]
    again = [x for x, _ in private.loader(data())]
    assert len(first) == 6 and all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert private.ledger.steps == 0


def after_a_step() -> tuple[cw.Private, nn.Module, Iterator[Any], list[Tensor]]:
    """A run after its first step, the loader that is not at its end, and the batch of the step."""
    private, model = private_for()
    batches = iter(private.loader(data()))
    batch = next(batches)
    private.step(losses_of(model, *batch))
    return private, model, batches, batch


def test_a_batch_cannot_count_twice() -> None:
    private, model, _batches, (x, y) = after_a_step()
    with pytest.raises(cw.InvalidSampling, match="given once"):
        private.step(losses_of(model, x, y))
    private, model = private_for(plan(sampling=cw.FullBatch(N)))
    for x, y in itertools.islice(private.loader(data(), physical_batch_size=8), 1):
        private.backward(losses_of(model, x, y))
        with pytest.raises(cw.InvalidSampling, match="given once"):
            private.backward(losses_of(model, x, y))
    assert private.ledger.steps == 0


@pytest.mark.parametrize("skipped", [0, 2, 4])
def test_a_piece_cannot_be_left_out(skipped: int) -> None:
    private, model = private_for(plan(sampling=cw.FullBatch(N), steps=2))
    with pytest.raises(cw.InvalidSampling, match="skipped"):  # noqa: PT012 - where in the loop is what matters
        for k, (x, y) in enumerate(private.loader(data(), physical_batch_size=8)):
            if k != skipped:
                private.step(losses_of(model, x, y))
    assert private.ledger.steps == 0


def test_backward_then_step_in_a_loader_loop() -> None:
    private, model = private_for(plan(sampling=cw.FullBatch(N), steps=4))
    done = []
    for x, y in private.loader(data(), physical_batch_size=16):
        private.backward(losses_of(model, x, y))
        done.append((len(x), private.step()))
    sizes = [[7, 5, 7, 6, 15], [6, 7, 5, 16, 6], [7, 6, 7, 16, 4], [16, 16, 8]]  # of 40
    assert done == [(size, k == len(step) - 1) for step in sizes for k, size in enumerate(step)]
    reference, other = private_for(plan(sampling=cw.FullBatch(N), steps=4))
    train(reference, other, data(), physical_batch_size=16)
    assert same(weights(model), weights(other))


def test_a_finished_logical_batch_must_be_stepped() -> None:
    private, model = private_for(plan(sampling=cw.FullBatch(N), steps=2))
    batches = iter(private.loader(data()))
    x, y = next(batches)
    with pytest.raises(cw.InvalidSampling, match="was not given"):
        private.step()
    private.backward(losses_of(model, x, y))
    x, y = next(batches)
    with pytest.raises(cw.InvalidSampling, match="skipped"):
        private.backward(losses_of(model, x, y))


def test_one_loss_per_sample() -> None:
    private, model = private_for()
    for x, y in private.loader(data()):
        for wrong in (losses_of(model, x, y).repeat(2), losses_of(model, x, y)[:-1]):
            with pytest.raises(cw.InvalidLosses, match="one loss per sample"):
                private.step(wrong)
        assert private.step(losses_of(model, x, y))
        break
    assert private.ledger.steps == 1


def test_an_older_iteration_is_over_once_a_new_one_begins() -> None:
    private, model = private_for()
    old, new = iter(private.loader(data())), iter(private.loader(data()))
    next(old)
    x, y = next(new)
    with pytest.raises(cw.InvalidSampling, match="newer iteration"):
        next(old)
    assert private.step(losses_of(model, x, y))


def test_own_batches_cannot_be_mixed_in_once_a_loader_is_used() -> None:
    private, model, _batches, _ = after_a_step()
    with pytest.raises(cw.InvalidSampling, match="do not belong"):
        private.step(losses_of(model, *data().tensors))


@pytest.mark.parametrize("option", ["batch_size", "shuffle", "sampler", "batch_sampler", "drop_last"])
def test_options_that_change_the_sampling_are_refused(option: str) -> None:
    private, _ = private_for()
    with pytest.raises(cw.InvalidSampling, match=option):
        private.loader(data(), **{option: None})


def test_other_options_pass_through_or_fail_at_once() -> None:
    private, _ = private_for()
    x, _ = next(iter(private.loader(data(), collate_fn=lambda items: (len(items), None))))
    assert isinstance(x, int)
    with pytest.raises(TypeError):
        private.loader(data(), nmu_workers=2)
    with pytest.raises(cw.InvalidSampling, match="in_order"):
        private.loader(data(), in_order=False)
    for size in (0, -1, 2.0, True):
        with pytest.raises(cw.InvalidSampling, match="physical_batch_size"):
            private.loader(data(), physical_batch_size=size)  # type: ignore[arg-type]


def test_data_that_is_not_what_was_planned_is_refused() -> None:
    private, _ = private_for()
    with pytest.raises(cw.InvalidSampling, match=f"from {N} records, the data set has {N - 1}"):
        private.loader(data(N - 1))

    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(())

    with pytest.raises(cw.DataError, match="map-style"):
        private.loader(Stream())
    with pytest.raises(cw.DataError, match=r"give the data set, loader\.dataset"):
        private.loader(DataLoader(data(N)))  # type: ignore[arg-type]


def test_a_seeded_run_keeps_to_its_data() -> None:
    private, _ = private_for(seed=1)
    private.loader(data())
    private.loader(data())
    with pytest.raises(cw.CheckpointError, match="data changed"):
        private.loader(data(seed=1))
    with pytest.raises(cw.CheckpointError, match="physical_batch_size differs"):
        private.loader(data(), physical_batch_size=3)
    unseeded, _ = private_for(seed=None)
    unseeded.loader(data())
    unseeded.loader(data(seed=1), physical_batch_size=3)


class Images:
    """As an image of another library: its bytes, and little else."""

    def __init__(self, content: bytes) -> None:
        self.content = content

    def tobytes(self) -> bytes:
        return self.content


class Holder:
    def __init__(self, value: Any) -> None:
        self.value = value


def test_digests_see_the_content_of_every_kind_of_record() -> None:
    records: list[Any] = [
        {"a": "text", "b": [1, 2]}, {"a": "text", "b": [1, 3]}, np.ones(2), np.zeros(2), np.ones((2, 1)), None, b"x",
        ("ab", "c"), ("a", "bc"), ["a", "bc"], {"x", "y"}, {"x", "z"}, torch.ones(2), torch.ones(2).bfloat16(),
        torch.ones(2, 1), torch.empty(0), Images(b"1"), Images(b"2"), Holder(torch.ones(1)), Holder(torch.zeros(1)),
        Fields(torch.ones(1), "a"), 1, 1.0, True, "1", np.array(["a", None], dtype=object), Holder(Holder(3)),
    ]  # fmt: skip
    found = [digest_of(record) for record in records]
    assert None not in found and len(set(found)) == len(records)
    assert found == [digest_of(record) for record in copy.deepcopy(records)]
    cyclic: list[Any] = []
    cyclic.append(cyclic)
    assert [digest_of(value) for value in (iter(()), lambda: 0, cyclic, object(), [object()])] == [None] * 5


def test_only_tensors_in_memory_have_a_digest_of_all_records() -> None:
    assert whole(data()) == whole(data()) != whole(data(seed=1))
    assert whole(Numbered()) is None and whole(Subset(Numbered(), [1, 2])) is None
    assert whole(Subset(data(), [1, 2])) == whole(Subset(data(), [1, 2])) != whole(Subset(data(), [1, 3]))

    class Augmented(TensorDataset):
        def __getitem__(self, index: Any) -> Any:
            return tuple(t[index] + 1 for t in self.tensors)

    assert whole(Augmented(torch.ones(3))) is None


class BatchCentred(nn.Module):
    """Subtracts the mean of the batch from the raw input: no parameter before it, so no graph shows it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x - x.mean(0)).squeeze(1)


def test_the_first_batch_is_checked_when_there_is_a_loss_function() -> None:
    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        calls.append(len(batch[0]))
        return (model(batch[0]).view(-1) - batch[1]).square()

    calls: list[int] = []
    model: nn.Module = BatchCentred()
    private = cw.Private(plan(), model, sgd(model), seed=0, loss_fn=loss_fn)
    with pytest.raises(cw.NotSeparable):
        next(iter(private.loader(data())))
    assert private.ledger.steps == 0 and calls
    calls.clear()
    private, model = private_for(loss_fn=loss_fn)
    train(private, model, data())
    once = len(calls)
    assert 0 < once < 24 and private.ledger.steps == 6
    reference, other = private_for()
    train(reference, other, data())
    assert same(weights(model), weights(other))


def test_the_loader_follows_the_poisson_law() -> None:
    steps = 400
    private = cw.Private(plan(steps=steps), model := numbers_model(), sgd(model, lr=0.0), seed=11)
    counts: Counter[int] = Counter()
    for i, a in private.loader(Numbered(), physical_batch_size=6):
        counts.update(i.tolist())
        private.step(numbers_losses(model, i, a))
    deviation = [(counts[i] - steps / 4) / math.sqrt(steps * 0.25 * 0.75) for i in range(N)]
    assert max(map(abs, deviation)) < 4 and abs(sum(deviation)) / math.sqrt(N) < 4


def test_a_capped_batch_is_divided_by_the_expected_size() -> None:
    sampling = cw.Poisson(N, 10, max_batch_size=4)
    model = mlp()
    optimizer = Recorder(model.parameters())
    private = cw.Private(plan(sampling=sampling, noise_multiplier=0.0), model, optimizer, seed=0)
    for x, y in private.loader(data()):
        assert len(x) <= 4
        private.step(losses_of(model, x, y))
        for got, want in zip(optimizer.seen[-1], loop_sum(model, x, y, cw.Abadi(1.0)), strict=True):
            torch.testing.assert_close(got, want / 10)
    assert private.ledger.events[0].sampling == sampling  # type: ignore[union-attr]


def test_workers_of_different_seeds_draw_different_numbers() -> None:
    seeds = []
    for seed in (1, 2):
        model = mlp()
        private = cw.Private(plan(), model, sgd(model), seed=seed)
        seeds.append(private.loader(data())._dataloader.generator.initial_seed())
    assert seeds[0] != seeds[1]


class Whole(Dataset[Any]):
    """Gives the records of a batch at once, in a form of its own."""

    def __init__(self, form: Any) -> None:
        self.form = form

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> Tensor:
        return torch.full((2,), float(i))

    def __getitems__(self, indices: list[int]) -> Any:
        return self.form([self[i] for i in indices])


def again_of(dataset: Dataset[Any], indices: tuple[int, ...] = (5, 30, 7)) -> _Again:
    return _Again(dataset, dataset, torch.stack, PhysicalBatch(0, 0, len(indices), True, indices))


def test_a_batch_is_made_again_of_other_records() -> None:
    class OneByOne(Whole):
        __getitems__ = None  # type: ignore[assignment]

    for dataset in (Whole(list), OneByOne(list)):
        again = again_of(dataset)
        assert again.scaled([True, False, True], 4.0)[:, 0].tolist() == [5.0, 120.0, 7.0]
        # The longest and the shortest of 32 records from all over the data set.
        assert again.replaced([False, True, False], longest=True)[:, 0].tolist() == [38.0, 30.0, 38.0]
        assert again.replaced([True, True, False], longest=False)[:, 0].tolist() == [5.0, 30.0, 0.0]


@pytest.mark.parametrize("form", [tuple, torch.stack, lambda items: items[1:], lambda items: [*items, items[0]]])
def test_records_of_a_data_set_of_whole_batches_are_exchanged_one_by_one(form: Any) -> None:
    again = again_of(Whole(form))
    assert again.scaled([True, False, True], 4.0)[:, 0].tolist() == [5.0, 120.0, 7.0]
    assert again.replaced([False, True, False], longest=True)[:, 0].tolist() == [38.0, 30.0, 38.0]


def test_a_record_is_copied_without_the_table_that_it_is_a_row_of() -> None:
    """Each copy of a row of a large table was as large as the table."""
    table = torch.randn(1_000, 3)
    record = {"x": table[7], "more": [(table[8], "text", 2.0)]}
    found = copied(record)
    assert torch.equal(found["x"], table[7]) and torch.equal(found["more"][0][0], table[8])
    assert found["x"].untyped_storage().nbytes() == found["more"][0][0].untyped_storage().nbytes() == 3 * 4
    assert found["more"][0][1:] == ("text", 2.0)


def test_an_empty_batch_of_no_records_has_no_form() -> None:
    nobody = TensorDataset(torch.zeros(0, 3), torch.zeros(0))
    private, _ = private_for(plan(sampling=cw.Poisson(rate=0.1, batch_size=4)), seed=None)
    with pytest.raises(cw.DataError, match="there is none"):
        next(iter(private.loader(nobody, yield_empty=True)))
    for _ in private.loader(nobody):
        raise AssertionError("a batch of nobody")
    assert private.ledger.steps == 6


def test_the_losses_of_an_empty_batch_are_none() -> None:
    model = nn.Linear(3, 1, bias=False)
    called: list[int] = []

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        called.append(len(batch[0]))
        return losses_of(model, *batch)

    p = plan(sampling=cw.Poisson(N, 1), steps=12)
    private = cw.Private(p, model, sgd(model), seed=8, loss_fn=loss_fn)
    lengths = []
    for batch in private.loader(data(), yield_empty=True):
        losses = private.losses(batch)
        assert losses.shape == (len(batch[0]),) and losses.dtype == torch.float32
        lengths.append(len(losses))
        private.step(losses)
    assert 0 in lengths and max(lengths) > 0 and 0 not in called and private.ledger.steps == 12
