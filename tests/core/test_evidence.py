"""Constants by where they come from, own batches, and a watched run that equals an unwatched one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import clipwise as cw
from clipwise.private.evidence import Checks

N = 40


def points() -> TensorDataset:
    torch.manual_seed(0)
    return TensorDataset(torch.randn(N, 6), torch.randint(3, (N,)))


def mlp() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Dropout(0.3), nn.Linear(5, 3))


def private_of(model: nn.Module, sampling: Any = None, **options: Any) -> cw.Private:
    plan = cw.Plan(sampling or cw.Poisson(N, 8), 4, cw.Abadi(1.0), noise_multiplier=1.0)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    return cw.Private(plan, model, optimizer, **{"seed": 0, **options})


def losses_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, reduction="none")


def test_a_watched_run_equals_an_unwatched_one_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = []
    for watched in (True, False):
        with monkeypatch.context() as patch:
            if not watched:
                patch.setattr(Checks, "is_due", lambda self, step: False)
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
