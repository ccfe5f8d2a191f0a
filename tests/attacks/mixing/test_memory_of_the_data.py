"""The data set's own memory in the loop: it was there before the first batch, and is of all records all the same.

It passed for constant in every data set that was not a list or had tensors of another length than itself. One record
moved the clipped sum by 8.17 R, and the run was called checked.
"""

from __future__ import annotations

import gc
from collections import UserDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import chain
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, Dataset, StackDataset, Subset, TensorDataset

import clipwise as cw
from clipwise.private.evidence import held_records, memory

from .test_second_look import mlp, points, private_of

EIGHT = cw.FixedSize(48, 8)
unknown = pytest.raises(cw.NotSeparable, match="unknown origin")
Data = Dataset[Any]
Made = tuple[Any, Tensor]  # a data set, and memory of its records


def columns() -> tuple[Tensor, Tensor]:
    x, y = points().tensors
    return x, y


class Holding(Dataset[Any]):
    """Records by a function that is told what the data set holds."""

    def __init__(self, item: Callable[[Any, int], Any], count: int = 48, **held: Any) -> None:
        self.item, self.count = item, count
        vars(self).update(held)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return self.item(self, index)


def by_columns(self: Any, i: int) -> Any:
    return self.data["x"][i], self.data["y"][i]


def mapping() -> Made:
    x, y = columns()
    return Holding(by_columns, data={"x": x, "y": y}), x


def mapping_of_the_user() -> Made:
    x, y = columns()
    return Holding(by_columns, data=UserDict(x=x, y=y)), x


def mapping_that_is_read_only() -> Made:
    x, y = columns()
    return Holding(by_columns, data=MappingProxyType({"x": x, "y": y})), x


def split() -> Made:
    x, y = columns()
    x, y = torch.cat([x, x]), torch.cat([y, y])
    keep = torch.randperm(96)[:48].tolist()
    return Holding(lambda self, i: (self.x[self.keep[i]], self.y[self.keep[i]]), x=x, y=y, keep=keep), x


def two_parts() -> Made:
    x, y = columns()
    a, b = x[:20].clone(), x[20:].clone()
    return ConcatDataset([TensorDataset(a, y[:20].clone()), TensorDataset(b, y[20:].clone())]), b


def parts_of_a_class_of_their_own() -> Made:
    class Part:
        def __init__(self, x: Tensor, y: Tensor) -> None:
            self.x, self.y = x, y

        def __len__(self) -> int:
            return len(self.x)

        def __getitem__(self, index: int) -> Any:
            return self.x[index], self.y[index]

    x, y = columns()
    a, b = x[:20].clone(), x[20:].clone()
    return ConcatDataset([Part(a, y[:20].clone()), Part(b, y[20:].clone())]), a  # type: ignore[list-item]


def stacked() -> Made:
    x, y = columns()
    data: Any = StackDataset(x=x, y=y)
    return Holding(lambda self, i: tuple(self.data[i].values()), data=data), x


def by_number() -> Made:
    x, y = columns()
    held = {i: (x[i].clone(), y[i].clone()) for i in range(48)}
    return Holding(lambda self, i: self.held[i], held=held), held[47][0]


def by_user() -> Made:
    x, y = columns()
    held = {user: (x[4 * user :][:4].clone(), y[4 * user :][:4].clone()) for user in range(12)}
    return Holding(lambda self, i: tuple(each[i % 4] for each in self.held[i // 4]), held=held), held[11][0]


def by_class() -> Made:
    x, y = columns()
    held = [[(row.clone(), label.clone()) for row, label in zip(x, y, strict=True) if label == k] for k in range(3)]
    places = [(k, i) for k in range(3) for i in range(len(held[k]))]
    return Holding(lambda self, i: self.held[places[i][0]][places[i][1]], held=held), held[2][0][0]


def in_slots() -> Made:
    class Store:
        __slots__ = ("x", "y")

    x, y = columns()
    store: Any = Store()
    store.x, store.y = x, y
    return Holding(lambda self, i: (self.store.x[i], self.store.y[i]), store=store), x


def wrapped() -> Made:
    """Longer than what it holds."""
    x, y = columns()
    x = x[:24].clone()
    return Holding(lambda self, i: self.inner[i // 2], inner=TensorDataset(x, y[:24].clone())), x


def wrapped_twice() -> Made:
    x, y = columns()
    x = x[:24].clone()
    inner = Holding(lambda self, i: self.base[i], 24, base=TensorDataset(x, y[:24]))
    return Holding(lambda self, i: self.parts["a"][i // 2], parts={"a": inner}), x


def subset() -> Made:
    x, y = columns()
    x, y = torch.cat([x, x]), torch.cat([y, y])
    return Subset(TensorDataset(x, y), list(range(0, 96, 2))), x


def corpus() -> Made:
    """Windows of one long row of numbers."""
    long = torch.randn(200, generator=torch.Generator().manual_seed(3))
    return Holding(lambda self, i: (self.long[4 * i : 4 * i + 6], torch.tensor(i % 3)), long=long), long


def records_as_objects() -> Made:
    @dataclass
    class Record:
        x: Tensor
        y: Tensor

    x, y = columns()
    held = [Record(row.clone(), label) for row, label in zip(x, y, strict=True)]
    return Holding(lambda self, i: (self.held[i].x, self.held[i].y), held=held), held[47].x


def records_as_named_tuples() -> Made:
    Record = namedtuple("Record", "x y")
    x, y = columns()
    held = tuple(Record(row.clone(), {"label": label}) for row, label in zip(x, y, strict=True))
    return Holding(lambda self, i: (self.held[i].x, self.held[i].y["label"]), held=held), held[47].x


def objects_of_an_array() -> Made:
    x, y = columns()
    held = np.empty(48, dtype=object)
    held[:] = [row.clone() for row in x]
    return Holding(lambda self, i: (self.held[i], self.y[i]), held=held, y=y), held[47]


def whole_array() -> Made:
    """The data set has a part of it."""
    x, y = columns()
    whole = np.concatenate([x[:2].numpy(), x.numpy()])
    return Holding(lambda self, i: (torch.from_numpy(self.x[i]), self.y[i]), x=whole[2:], y=y), torch.from_numpy(whole)


def data_frame() -> Made:
    pandas = pytest.importorskip("pandas")
    x, y = columns()
    rows = np.asfortranarray(x.numpy())
    frame = pandas.DataFrame(rows, copy=False)
    assert np.shares_memory(frame.to_numpy(), rows)
    return Holding(lambda self, i: (torch.tensor(self.frame.iloc[i].to_numpy()), y[i]), frame=frame), torch.from_numpy(
        rows
    )


def closure() -> Made:
    x, y = columns()
    return Holding(lambda self, i: (x[i], y[i])), x


def defaults() -> Made:
    x, y = columns()
    return Holding(partial(lambda self, i, held: (held[0][i], held[1][i]), held=(x, y))), x


def of_the_class() -> Made:
    x, y = columns()

    class Fixed(Dataset[Any]):
        features, labels = x, y

        def __len__(self) -> int:
            return 48

        def __getitem__(self, index: int) -> Any:
            return self.features[index], self.labels[index]

    return Fixed(), x


_X, _Y = columns()


def by_a_name() -> Made:
    """A global variable."""

    class Named(Dataset[Any]):
        def __len__(self) -> int:
            return 48

        def __getitem__(self, index: int) -> Any:
            return _X[index], _Y[index]

    return Named(), _X


def sparse() -> Made:
    x, y = columns()
    held = x.to_sparse()
    return Holding(lambda self, i: (self.held[i].to_dense(), self.y[i]), held=held, y=y), held


FORMS = [
    mapping, mapping_of_the_user, mapping_that_is_read_only, split, two_parts, parts_of_a_class_of_their_own, stacked,
    by_number, by_user, by_class, in_slots, wrapped, wrapped_twice, subset, corpus, records_as_objects,
    records_as_named_tuples, objects_of_an_array, whole_array, data_frame, closure, defaults, of_the_class, by_a_name,
    sparse,
]  # fmt: skip
each_form = pytest.mark.parametrize("made", FORMS, ids=lambda made: made.__name__)


def shift_by(memory: Tensor) -> Tensor:
    """A statistic of records, computed in the loop."""
    if memory.layout is torch.sparse_coo:
        return torch.sparse.sum(memory, 0).to_dense()
    return memory.float().reshape(-1, memory.shape[-1]).mean(0)[-6:] if memory.dim() > 1 else memory[-6:] * 1.0


def train(private: cw.Private, model: nn.Module, data: Data, shift: Callable[[], Tensor]) -> None:
    for x, y in private.loader(data):
        private.step(F.cross_entropy(model(x - shift()), y, reduction="none"))


@each_form
def test_the_memory_of_records_is_not_constant(made: Callable[[], Made]) -> None:
    model = mlp()
    private = private_of(model, 4, EIGHT)
    data, records = made()
    with unknown:
        train(private, model, data, lambda: shift_by(records))
    assert private.steps_done == 0


@each_form
def test_tables_beside_it_are(made: Callable[[], Made]) -> None:
    model, table = mlp(), torch.linspace(-1, 1, 6)
    private = private_of(model, 4, EIGHT)
    train(private, model, made()[0], lambda: table)
    assert private.checked.steps and not private.checked.unclear


# Public tables of a data set


class WithTables(Dataset[Any]):
    """Records, and what is known of them publicly."""

    def __init__(self) -> None:
        self.x, self.y = columns()
        self.mean, self.weights = torch.linspace(-1, 1, 6), torch.tensor([1.0, 2.0, 0.5])
        self.vocabulary = {"words": torch.linspace(-1, 1, 47 * 6).view(47, 6), "more": [torch.ones(30), torch.ones(3)]}
        self.long = torch.linspace(-1, 1, 100 * 6).view(100, 6)
        self.transform = partial(torch.sub, other=self.mean)

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> Any:
        return self.transform(self.x[index]), self.y[index]


def test_tables_with_fewer_rows_than_records_are_constant() -> None:
    model, data = mlp(), WithTables()
    private = private_of(model, 4, EIGHT)
    for x, y in private.loader(data):
        words: Any = data.vocabulary["words"]
        losses = F.cross_entropy(model(x - data.mean + words[y]), y, reduction="none")
        private.step(losses * data.weights[y] * data.vocabulary["more"][0][3])
    assert private.checked.steps and not private.checked.unclear


def test_a_longer_table_is_refused_and_can_be_declared() -> None:
    data = WithTables()
    for constants in ([], [data.long]):
        model = mlp()
        plan = cw.Plan(EIGHT, 4, cw.Abadi(1.0), noise_multiplier=1.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        private = cw.Private(plan, model, optimizer, seed=0, constants=constants)
        if not constants:
            with pytest.raises(cw.NotSeparable, match=r"as many rows as there are records.*constants=\[\.\.\.\]"):
                train(private, model, data, lambda: data.long[99])
        else:
            train(private, model, data, lambda: data.long[99])
            assert private.checked.steps and not private.checked.unclear


def test_what_all_records_share_is_not_of_one_of_them() -> None:
    """Their transform, say. A tensor in the records themselves is theirs in any case."""

    class Scaling:
        def __init__(self) -> None:
            self.mean = torch.linspace(-1, 1, 6)

    model, scaling, (x, y) = mlp(), Scaling(), columns()
    held = [(row.clone(), label.clone(), scaling) for row, label in zip(x, y, strict=True)]
    private = private_of(model, 4, EIGHT)
    train(private, model, Holding(lambda self, i: self.held[i][:2], held=held), lambda: scaling.mean)
    assert private.checked.steps and not private.checked.unclear


def test_a_data_set_may_hold_the_model() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.wide = mlp(), torch.nn.Linear(6, 60).requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.net(self.wide(x)[:, :6])
            return out

    model, (x, y) = Wide(), columns()
    private = private_of(model, 4, EIGHT)
    train(private, model, Holding(lambda self, i: (x[i], y[i]), model=model), lambda: torch.zeros(6))
    assert private.checked.steps and not private.checked.unclear


# Many


def many() -> list[tuple[Tensor, Tensor]]:
    x, y = columns()
    return [(x[i % 48].clone(), y[i % 48].clone()) for i in range(2000)]


@pytest.mark.parametrize("place", [0, -1])
def test_all_records_of_a_long_list_are_known(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In whatever order the garbage collector lists them."""
    held, model = many(), mlp()
    listed = memory._tensors_of_the_process
    monkeypatch.setattr(memory, "_MOST", 100)
    monkeypatch.setattr(memory, "_tensors_of_the_process", lambda: chain([held[place][0]], listed()))
    private = private_of(model, 4, cw.FixedSize(2000, 8))
    with unknown:
        train(private, model, Holding(lambda self, i: self.held[i], 2000, held=held), lambda: held[place][0])


def test_records_do_not_displace_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that were made after many records were not looked at any more."""
    gc.collect()
    monkeypatch.setattr(memory, "_MOST", sum(1 for _ in memory._tensors_of_the_process()) + 40)
    held, model = many(), mlp()
    tables = [torch.linspace(-1, 1, 6) * k for k in range(20)]
    private = private_of(model, 4, cw.FixedSize(2000, 8))
    train(private, model, Holding(lambda self, i: self.held[i], 2000, held=held), lambda: tables[19] + tables[0])
    assert private.checked.steps and not private.checked.unclear


def test_a_data_set_of_too_many_objects_is_not_called_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    held, model = many(), mlp()
    data = Holding(lambda self, i: self.held[i], 2000, held=held)
    private = private_of(model, 4, cw.FixedSize(2000, 8))
    monkeypatch.setattr(held_records, "_MOST", 300)
    train(private, model, data, lambda: torch.zeros(6))
    assert private.checked.unclear == ("the memory of the data set: it refers to too many objects",)
