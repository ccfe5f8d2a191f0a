"""What a program is: a small model, its records, and the body of an everyday training loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset, default_collate

Body = Callable[..., Any]
Builder = Callable[[], nn.Module]
Records = Callable[[], Dataset[Any]]

PROGRAMS: dict[str, Program] = {}


@dataclass(frozen=True, eq=False)
class Program:
    """One training program.

    `losses(model, batch)` is everything between getting a batch and `private.step`, `after(model, batch)` what comes
    next in the loop. With `state`, a factory of what the loop keeps, both take it as a third argument. `mixes` says
    whether one record can move another record's gradient. `batch_size` is the expected size of a Poisson batch, None
    takes all records. `refused_by` is the step that must be refused at the latest. `mended(model, batch)` is an honest
    loss for the same model and batches. `others` makes records that the data set does not hold but could.

    `only_with_loss_fn`: the mixing happens outside torch, where only another call with other records can show it.
    `presence`: what matters is not the other records' values but that they are there. `dtype` is the best precision in
    which the model runs.
    """

    name: str
    build: Builder
    dataset: Records
    losses: Body
    mixes: bool
    collate_fn: Callable[[list[Any]], Any] | None = None
    state: Callable[[], Any] | None = None
    after: Body | None = None
    batch_size: int | None = 8
    physical_batch_size: int | None = None
    refused_by: int = 1
    mended: Body | None = None
    others: Records | None = None
    only_with_loss_fn: bool = False
    presence: bool = False
    slow: bool = False
    dtype: torch.dtype = torch.float64

    def records(self, seed: int = 0) -> Dataset[Any]:
        """The data set; another seed gives other records of the same kind."""
        with seeded(seed):
            return self.others() if seed and self.others else self.dataset()

    def start(self) -> Loop:
        """A fresh model with fresh state."""
        with seeded(0):
            return Loop(self, self.build(), None if self.state is None else self.state())

    @property
    def options(self) -> dict[str, Any]:
        """Keywords for the loader."""
        options = {"collate_fn": self.collate_fn, "physical_batch_size": self.physical_batch_size}
        return {name: value for name, value in options.items() if value is not None}

    def collate(self, records: list[Any]) -> Any:
        """A batch of records, as a `DataLoader` makes it."""
        return (self.collate_fn or default_collate)(records)


@dataclass(frozen=True, eq=False)
class Loop:
    """A running program."""

    program: Program
    model: nn.Module
    state: Any

    def losses(self, batch: Any) -> Tensor:
        """The losses of a batch, (B,)."""
        losses: Tensor = self.program.losses(self.model, batch, *self._kept)
        return losses

    def after(self, batch: Any) -> None:
        """What the loop does after the step."""
        if self.program.after is not None:
            self.program.after(self.model, batch, *self._kept)

    @property
    def _kept(self) -> tuple[Any, ...]:
        return () if self.program.state is None else (self.state,)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Random numbers from `seed` inside, as before outside."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def _register(mixes: bool, options: dict[str, Any]) -> Callable[[Body], Body]:
    def put(losses: Body) -> Body:
        name = options.pop("name", None) or losses.__name__
        assert name not in PROGRAMS, f"two programs are called {name}"
        PROGRAMS[name] = Program(name, losses=losses, mixes=mixes, **{"build": mlp, "dataset": points()} | options)
        return losses

    return put


def mixing(**options: Any) -> Callable[[Body], Body]:
    """Enter a function into the table as the losses of a program that mixes; a network on points if nothing is said."""
    on_points = not {"build", "dataset", "collate_fn"} & options.keys()
    return _register(True, {"mended": plain if on_points else None} | options)


def honest(**options: Any) -> Callable[[Body], Body]:
    """Enter a function into the table as the losses of a program that does not mix."""
    return _register(False, options)


def on_inputs(enter: Callable[..., Callable[[Body], Body]], **changes: Callable[[Tensor], Tensor]) -> None:
    """Enter classifiers whose inputs are changed first, by name: `enter` is `mixing` or `honest`."""
    for name, change in changes.items():
        enter(name=name)(partial(_losses_on, change))


def _losses_on(change: Callable[[Tensor], Tensor], model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return cross_entropy(model(change(x)), y)


# Records


def points(n: int = 48, d: int = 6, classes: int = 3) -> Records:
    """Vectors with labels."""
    return lambda: TensorDataset(torch.randn(n, d), torch.randint(classes, (n,)))


def regression(n: int = 48, d: int = 6) -> Records:
    """Vectors with a number each."""
    return lambda: TensorDataset(torch.randn(n, d), torch.randn(n))


def images(n: int = 48, channels: int = 2, side: int = 6, classes: int = 3) -> Records:
    """Small images with labels."""
    return lambda: TensorDataset(torch.randn(n, channels, side, side), torch.randint(classes, (n,)))


def series(n: int = 48, length: int = 7, d: int = 4, classes: int = 3) -> Records:
    """Sequences of one length with labels."""
    return lambda: TensorDataset(torch.randn(n, length, d), torch.randint(classes, (n,)))


def tokens(n: int = 48, length: int = 6, vocabulary: int = 20, classes: int = 3) -> Records:
    """Sequences of token ids with labels; 0 is left for padding."""
    return lambda: TensorDataset(torch.randint(1, vocabulary, (n, length)), torch.randint(classes, (n,)))


def id_pairs(n: int = 48, high: int = 60) -> Records:
    """Users and the items they chose."""
    return lambda: TensorDataset(torch.randint(high, (n,)), torch.randint(high, (n,)))


def vector_pairs(n: int = 48, d: int = 6) -> Records:
    """Two vectors that belong together."""
    return lambda: TensorDataset(torch.randn(n, d), torch.randn(n, d))


class Listed(Dataset[Any]):
    """Records in a list: dictionaries, strings, tensors of different lengths."""

    def __init__(self, records: list[Any]) -> None:
        self.records = records

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, i: int) -> Any:
        return self.records[i]


# Models


def mlp(d: int = 6, hidden: int = 5, out: int = 3) -> nn.Module:
    """The smallest network worth the name."""
    return nn.Sequential(nn.Linear(d, hidden), nn.Tanh(), nn.Linear(hidden, out))


def scorer() -> nn.Module:
    """A network with one output."""
    return mlp(out=1)


def convnet() -> nn.Module:
    """A network for small images."""
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))


class Parts(nn.Module):
    """Named layers that the loop puts together itself."""

    def __init__(self, **layers: nn.Module) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)


def parts(**layers: Callable[[], nn.Module]) -> Builder:
    """A builder of `Parts`."""
    return lambda: Parts(**{name: make() for name, make in layers.items()})


class Formula(nn.Module):
    """Bare parameters and constant buffers for a loop that writes out its arithmetic."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], **buffers: Tensor) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(0.5 * torch.randn(shape)))
        for name, value in buffers.items():
            self.register_buffer(name, value)


def memory(**values: Callable[[], Any]) -> Callable[[], SimpleNamespace]:
    """A factory of what a loop keeps between batches."""
    return lambda: SimpleNamespace(**{name: make() for name, make in values.items()})


# Losses


def cross_entropy(logits: Tensor, y: Tensor, **options: Any) -> Tensor:
    """One cross entropy per sample."""
    return F.cross_entropy(logits, y, reduction="none", **options)


def plain(model: nn.Module, batch: Any) -> Tensor:
    """The loop without any trick."""
    x, y = batch
    return cross_entropy(model(x), y)
