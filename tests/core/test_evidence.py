"""Constants by where they come from, own batches, and a watched run that equals an unwatched one."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import clipwise as cw
from clipwise.entropy import Entropy
from clipwise.private.evidence import Checked, Checks, LossFn
from clipwise.private.evidence.collate import check_collate
from clipwise.private.evidence.records import Records, scaled, unreadable
from clipwise.private.evidence.sizes import refuse_sizes
from clipwise.private.evidence.traffic import BATCH
from clipwise.private.evidence.watch import Watch
from tests.core.common import classified
from tests.core.doubles import Remembering

N = 40


def points() -> TensorDataset:
    return classified(N, seed=0)


def mlp() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Dropout(0.3), nn.Linear(5, 3))


def private_of(model: nn.Module, sampling: Any = None, **options: Any) -> cw.Private:
    plan = cw.Plan(sampling or cw.Poisson(N, 8), 4, cw.Abadi(1.0), noise_multiplier=1.0)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    return cw.Private(plan, model, optimizer, **{"seed": 0, **options})


def losses_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, reduction="none")


def test_a_batch_of_three_is_checked_with_the_loss_function(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr("clipwise.private.evidence.checks.check_losses", lambda *given: asked.append(given[3]) or "")
    for size in (2, 3):
        model = mlp()
        private = private_of(model, cw.FullBatch(size), loss_fn=lambda model, batch: losses_of(model, *batch))
        for xb, yb in private.loader(TensorDataset(*(column[:size] for column in points().tensors))):
            private.step(losses_of(model, xb, yb))
    assert asked == [3]


def test_samples_that_mix_are_seen_beside_a_tensor_that_is_not_trained() -> None:
    model, shift = mlp(), torch.zeros(3, requires_grad=True)  # it is on the graph, and in no optimizer
    private = private_of(model)
    batches = iter(private.loader(points()))
    x, y = next(batches)
    losses = F.cross_entropy(model(x - x.mean(0)) + shift, y, reduction="none")
    with pytest.raises(cw.errors.NotSeparable, match="samples mix"):
        private.step(losses)


def test_a_watched_run_equals_an_unwatched_one_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = []
    for watched in (True, False):
        with monkeypatch.context() as patch:
            if not watched:
                patch.setattr(Checks, "is_due", lambda self, step, spared: False)
            model = mlp()
            private = private_of(model)
            for x, y in private.loader(points()):
                private.step(losses_of(model, x, y))
            assert bool(private.checked.steps) == watched
            weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(*weights)


def test_own_batches_are_checked_when_they_are_watched() -> None:
    x, y = points().tensors
    model = mlp()
    private = private_of(model, cw.FullBatch(N), own_batches=True)
    private.step(losses_of(model, x, y))
    assert str(private.checked) == "not checked"
    with private.watch((x, y)):
        losses = losses_of(model, x, y)
    private.step(losses)
    assert private.checked.steps == (1,)
    with private.watch((x, y)):
        losses = losses_of(model, x - x.mean(0), y)
    with pytest.raises(cw.NotSeparable, match="statistic of the batch"):
        private.step(losses)
    assert private.ledger.steps == 2


def averaged(teacher: nn.Module, model: nn.Module) -> None:
    with torch.no_grad():
        for kept, new in zip(teacher.parameters(), model.parameters(), strict=True):
            kept.lerp_(new, 0.1)


@pytest.mark.parametrize("declared", [True, False])
def test_a_teacher_that_changes_is_declared(declared: bool) -> None:
    model, teacher = mlp(), mlp().requires_grad_(False)
    private = private_of(model, constants=teacher if declared else ())

    def train() -> None:
        for x, y in private.loader(points()):
            with torch.no_grad():
                soft = teacher(x).softmax(1)
            private.step(losses_of(model, x, y) + (model(x).softmax(1) - soft).square().sum(1))
            averaged(teacher, model)

    if declared:
        train()
        assert private.checked.steps == (0, 1, 2)
    else:
        with pytest.raises(cw.NotSeparable, match="constants="):
            train()
        assert private.ledger.steps == 1


def test_the_memory_of_the_data_set_is_not_a_constant() -> None:
    dataset, model = points(), mlp()
    everybody = dataset.tensors[0]
    private = private_of(model)
    x, y = next(iterator := iter(private.loader(dataset)))
    losses = losses_of(model, x - everybody.mean(0), y)
    with pytest.raises(cw.NotSeparable, match="unknown origin"):
        private.step(losses)
    iterator.close()


class Propagated(nn.Module):
    """LightGCN: a table of embeddings that a constant graph propagates."""

    def __init__(self, rows: int, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(2)
        graph = (torch.rand(rows, rows) < 0.3).float() / 4
        self.table = nn.Parameter(0.3 * torch.randn(rows, 4))
        self.register_buffer("graph", graph.to_sparse() if sparse else graph)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        table = self.table + self.graph @ self.table
        return (table[user] * table[item]).sum(1)


@pytest.mark.parametrize("sparse", [True, False])
@pytest.mark.parametrize(("rows", "size"), [(20, 5), (24, 8), (8, 8)])
def test_a_table_that_a_constant_graph_propagates_is_shared(rows: int, size: int, sparse: bool) -> None:
    model = Propagated(rows, sparse)
    dataset = TensorDataset(torch.randint(rows, (N,)), torch.randint(rows, (N,)), torch.rand(N))
    private = private_of(model, cw.FixedSize(N, size))
    for user, item, y in private.loader(dataset):
        private.step((model(user, item) - y).square())
    assert private.ledger.steps == 4
    losses = model(dataset.tensors[0][:size], dataset.tensors[1][:size]).square()
    assert cw.per_sample_norms(losses, [model.table], constants=model).shape == (size,)


@pytest.mark.parametrize("size", [8, 64, 255])
def test_the_engine_alone_refuses_two_towers(size: int) -> None:
    user, item = nn.Embedding(60, 8), nn.Embedding(60, 8)
    scores = user(torch.randint(60, (size,))) @ item(torch.randint(60, (size,))).T
    losses = F.cross_entropy(scores, torch.arange(size), reduction="none")
    with pytest.raises(cw.NotSeparable):
        cw.clipped_gradients(losses, {"user": user.weight, "item": item.weight}, cw.Abadi(0.1))


def test_constants_are_tensors_and_modules() -> None:
    model = mlp()
    with pytest.raises(cw.InvalidLosses, match="constants="):
        cw.per_sample_norms(losses_of(model, *points().tensors), model.parameters(), constants=["table"])  # type: ignore[list-item]


def checked(model: nn.Module, losses: LossFn, x: Tensor, counted: bool = False) -> Checked:
    """What one watched pass over a batch shows."""
    checks = Checks(model, (), counted, Entropy(0))
    with checks.watching(x, len(x), 0):
        found = losses(model, x)
    params = list(model.parameters())
    checks.close(found, {id(p): k for k, p in enumerate(params)}, params)
    checks.accept(0)
    return checks.found


def a_batch(size: int = 6) -> Tensor:
    return torch.randn(size, 6, generator=torch.Generator().manual_seed(0))


def per_row(out: Tensor) -> Tensor:
    return out.flatten(1).square().sum(1)


def test_other_shapes_and_attributes_may_be_read_beside_a_value_whose_shape_follows_the_records() -> None:
    """Else the twins would tell nothing more, and samples that mix would pass for unclear."""

    def losses(model: nn.Module, x: Tensor, share: float = 0.0) -> Tensor:
        positive = x[x > 0]  # as many as there are
        out = model(x.view(x.shape))
        assert positive.dtype == out.dtype and out.size(1) == 3
        return per_row(out - share * x.mean())

    found = checked(nn.Linear(6, 3), losses, a_batch())
    assert found.unclear == ("gradients cannot be computed with other records",)
    with pytest.raises(cw.NotSeparable, match="the loss of sample"):
        checked(nn.Linear(6, 3), lambda model, x: losses(model, x, 1.0), a_batch())


def test_a_shape_that_follows_the_records_is_unclear_when_it_is_read() -> None:
    def losses(model: nn.Module, x: Tensor) -> Tensor:
        return per_row(model(x)) * x[x > 0].shape[0]

    assert "a shape that follows the records is read" in checked(nn.Linear(6, 3), losses, a_batch()).unclear


def test_a_copy_of_the_batch_is_the_batch() -> None:
    model = nn.Linear(6, 3)
    assert checked(model, lambda model, x: per_row(model(copy.deepcopy(x))), a_batch()).steps == (0,)
    with pytest.raises(cw.NotSeparable, match="statistic of the batch"):
        checked(model, lambda model, x: per_row(model(x) - copy.deepcopy(x).mean()), a_batch())
    x = a_batch()
    watch = Watch(Records.of(x, 6), [], lambda *_: True)
    assert watch.marks_of(watch.traffic.call(Tensor.__deepcopy__, (x, {}), {})) == BATCH  # whatever kernels are seen


def test_what_was_written_into_memory_stays_known_when_more_is_written() -> None:
    def losses(model: nn.Module, x: Tensor) -> Tensor:
        h = torch.zeros(len(x), 6)
        h[:, 0] = x.mean()
        h[:, 1] = x[:, 1]
        return per_row(model(h))

    with pytest.raises(cw.NotSeparable, match="samples mix"):
        checked(nn.Linear(6, 3), losses, a_batch())


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_small_losses_are_compared_as_closely_as_large_ones(scale: float) -> None:
    """A term of one part in a thousand that has no gradient: only the losses themselves show it."""
    model = nn.Linear(6, 3)

    def losses(model: nn.Module, x: Tensor, share: float = 0.0) -> Tensor:
        own = 1 + per_row(model(x))
        return scale * (own + share * x.mean())

    assert checked(model, losses, a_batch()).steps == (0,)
    with pytest.raises(cw.NotSeparable, match="the loss of sample"):
        checked(model, lambda model, x: losses(model, x, 1e-3), a_batch())


def test_a_public_number_may_equal_the_number_of_samples() -> None:
    """It is refused just after the size was read, and not at any time after."""
    x = a_batch(20)
    assert checked(nn.Linear(6, 3), lambda model, x: per_row(model(x).tanh()) / 20, x, counted=True).steps == (0,)
    with pytest.raises(cw.NotSeparable, match="number of samples"):
        checked(nn.Linear(6, 3), lambda model, x: per_row(model(x)) / len(x), x, counted=True)


def test_numbers_that_were_zero_or_change_their_sign_do_not_follow_the_size() -> None:
    place = (0, "mul.Tensor", "other")
    for before, value in ((0.0, 0.5), (-7.0, 8.0), (7.0, math.inf)):
        refuse_sizes((8, {place: value}, frozenset()), [(7, {place: before}, frozenset())])
    with pytest.raises(cw.NotSeparable, match="number of samples"):
        refuse_sizes((8, {place: 8.0}, frozenset()), [(7, {place: 7.0}, frozenset())])


def test_watched_steps_lie_about_as_far_apart_as_promised() -> None:
    """Three at first; the next one half to one and a half times 64 steps later."""
    gaps = set()
    for seed in range(600):
        checks = Checks(nn.Linear(1, 1), (), False, Entropy(seed))
        checks._number = 3
        checks._schedule(0)
        gaps.add(next(step for step in range(1000) if step >= 3 and checks.is_due(step)))
    assert min(gaps) == 32 and max(gaps) == 95


def test_a_collate_function_whose_structure_follows_the_records_is_not_checked() -> None:
    def collate(records: list[Any]) -> tuple[Tensor, ...]:
        x = torch.stack([record[0] for record in records])
        return (x, x.square()) if bool((x > 2).any()) else (x,)

    x = torch.zeros(9, 2)
    x[7] = 3.0  # the record that takes the others' places
    assert "another structure" in check_collate(collate, TensorDataset(x))


class Plain:
    def __init__(self, x: Tensor) -> None:
        self.x = x


class Slotted:
    __slots__ = ("x",)

    def __init__(self, x: Tensor) -> None:
        self.x = x


@pytest.mark.parametrize("kind", [Plain, Slotted])
def test_the_tensors_of_an_object_are_found(kind: Callable[[Tensor], object]) -> None:
    x = a_batch()
    records = Records.of([kind(x)], 6)
    assert len(records.tensors) == 1 and records.tensors[0] is x and not records.hidden


NESTS: dict[str, Callable[[Any], object]] = {
    "lists": lambda x: [x],
    "mappings": lambda x: {"x": x},
    "objects": Plain,
}


@pytest.mark.parametrize("nest", NESTS.values(), ids=NESTS)
def test_tensors_are_found_six_containers_deep(nest: Callable[[Any], object]) -> None:
    x = value = a_batch()
    for _ in range(6):
        value = nest(value)  # type: ignore[assignment]
    found = Records.of(value, 6)
    assert len(found.tensors) == 1 and found.tensors[0] is x


def test_a_record_is_scaled_also_where_its_values_share_memory() -> None:
    record = torch.ones(1).expand(3)
    assert torch.equal(scaled(record, 4.0), torch.full((3,), 4.0)) and torch.equal(record, torch.ones(3))


class Centred(Remembering):
    """Subtracts what is kept with the model."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x - self.kept)
        return out


@pytest.mark.parametrize("how", ["a statistic of the last batch", "a number of the last batch"])
def test_what_earlier_batches_left_is_not_written_into_the_model(how: str) -> None:
    """Kept for a step outside the model, then written into a buffer after the losses: the next ones would read it."""
    model = Centred()
    private = private_of(model)
    kept: Any = None

    def train() -> None:
        nonlocal kept
        for x, _ in private.loader(points()):
            losses = per_row(model(x))
            with torch.no_grad():
                if isinstance(kept, Tensor):
                    model.kept.lerp_(kept, 0.1)
                elif kept is not None:
                    model.kept.fill_(kept)
                kept = x.mean(0) if "statistic" in how else float(x.mean())
            private.step(losses)

    with pytest.raises(cw.NotSeparable, match="unknown origin into 'kept'"):
        train()
    assert private.ledger.steps == 1


def test_a_declared_schedule_may_be_written_into_the_model() -> None:
    model, schedule = Centred(), torch.zeros(6)
    private = private_of(model, constants=schedule)
    for x, _ in private.loader(points()):
        losses = per_row(model(x))
        model.kept.copy_(schedule)
        private.step(losses)
        schedule += 0.1
    assert private.ledger.steps == 4


def test_the_extreme_records_are_the_largest_and_the_smallest() -> None:
    x = torch.tensor([[1.0, 2.0], [9.0, 9.0], [0.5, 0.0], [3.0, 1.0]])
    assert Records.of((x, torch.tensor([0, 1, 0, 1])), 4).extremes() == (1, 2)


def test_an_array_of_the_batch_that_comes_back_as_a_tensor_is_not_checked() -> None:
    """Nobody saw what became of it outside torch: here its rows are those of the samples in another order."""

    def losses(model: nn.Module, x: Tensor) -> Tensor:
        return per_row(model(torch.tensor(x.numpy()[::-1].copy())).flip(0))

    found = checked(nn.Linear(6, 3), losses, a_batch())
    assert "a tensor was made from values of the batch that are not tensors" in found.unclear


def test_a_shift_that_is_computed_from_the_batch_is_refused() -> None:
    def losses(model: nn.Module, x: Tensor) -> Tensor:
        return per_row(model(x.roll(int(x.sum(0).argmax()), 1)))

    with pytest.raises(cw.NotSeparable, match="samples mix"):
        checked(nn.Linear(6, 3), losses, a_batch())


def test_what_is_written_into_a_list_of_tensors_is_followed() -> None:
    """Such a kernel returns nothing that could be followed instead."""

    def losses(model: nn.Module, x: Tensor) -> Tensor:
        count = torch.zeros((), dtype=torch.long)
        torch._foreach_add_([count], [(x.abs() > 1).sum()])
        return per_row(model(x)) * count

    with pytest.raises(cw.NotSeparable, match="the loss of sample"):
        checked(nn.Linear(6, 3), losses, a_batch())


def test_a_kernel_that_cannot_take_other_records_is_named() -> None:
    def losses(model: nn.Module, x: Tensor) -> Tensor:
        places = x.abs().mul(3).long()
        return per_row(model(x)) + torch.ones(int(places.max()) + 1)[places].sum(1)

    assert "index does not take the other records (IndexError)" in checked(nn.Linear(6, 3), losses, a_batch()).unclear


def test_gradients_are_compared_where_losses_do_not_move() -> None:
    def losses(model: nn.Module, x: Tensor) -> Tensor:
        pull = model(x).sum(1) * x.mean()
        return per_row(model(x)) + pull - pull.detach()

    with pytest.raises(cw.NotSeparable, match="the gradient of sample"):
        checked(nn.Linear(6, 3), losses, a_batch())


class ReadAgain:
    """A batch whose records become zeros where they are not kept."""

    def __init__(self, x: Tensor) -> None:
        self._x = x

    def scaled(self, kept: list[bool], scale: float) -> Tensor:
        return self._x * torch.tensor(kept).unsqueeze(1)

    def replaced(self, kept: list[bool], longest: bool) -> Tensor:
        return self.scaled(kept, 1.0)


def test_records_are_read_again_as_they_are() -> None:
    x = a_batch()
    assert unreadable(ReadAgain(x), Records.of(x, 6)) == ""
    assert unreadable(ReadAgain(x + 1), Records.of(x, 6)) == "they are others the second time"


@pytest.mark.parametrize("more", [0, 1])
def test_a_collate_function_may_put_the_records_into_columns_if_there_are_as_many(more: int) -> None:
    def collate(records: list[Any]) -> Tensor:
        return F.pad(torch.stack([record[0] for record in records], 1), (0, more))  # as many numbers as records

    dataset = TensorDataset(a_batch(20))
    if more:
        with pytest.raises(cw.NotSeparable, match="mixes records"):
            check_collate(collate, dataset)
    else:
        assert check_collate(collate, dataset) == ""


def test_padding_that_nobody_can_check_is_warned_of_where_the_loader_is_made() -> None:
    class Ragged(torch.utils.data.Dataset[Tensor]):
        def __len__(self) -> int:
            return N

        def __getitem__(self, place: int) -> Tensor:
            return torch.arange(4.0 * (1 + place % 5)).view(-1, 4) + place

    def pad(records: list[Tensor]) -> Tensor:
        return nn.utils.rnn.pad_sequence(records, batch_first=True)

    model = nn.Linear(4, 1)
    with pytest.warns(UserWarning, match=r"not checked: records are padded .* loss_fn=.* must be masked") as warned:
        private_of(model, cw.FullBatch(N)).loader(Ragged(), collate_fn=pad)
    assert warned[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss_fn = lambda m, x: m(x).sum((1, 2))  # noqa: E731
        private_of(model, cw.FullBatch(N), loss_fn=loss_fn).loader(Ragged(), collate_fn=pad)
