"""What a row of the table is: an unmodified model of another package, its records and its per-sample losses.

The table: all rows by family. Importing it imports no package but torch.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from tests.zoo.case import Draw, regress

Records = Callable[[int, torch.Generator], list[Any]]


@dataclass(frozen=True, eq=False)
class Row:
    """One model.

    `package` is the module to import; a row whose package is missing is skipped. `records` draws that many records,
    `collate` makes a batch of them, and `losses(model, batch)` gives the losses, shape (B,). `mixes` says in words why
    a sample's loss depends on other samples, and is empty for honest models. `single` is for models that do not run in
    float64. `build` leaves the model in the mode in which it is to be trained.
    """

    name: str
    package: str
    build: Callable[[], nn.Module]
    records: Records
    losses: Callable[[nn.Module, Any], Tensor]
    mixes: str = ""
    collate: Callable[[list[Any]], Any] = default_collate
    single: bool = False
    spread: bool = True

    def model(self, dtype: torch.dtype, seed: int = 0) -> nn.Module:
        """A fresh model with seeded weights, moved off their first values: zero gates and std 0.02 hide errors."""
        torch.manual_seed(seed)
        model = self.build()
        model = model if dtype == torch.float32 else model.to(dtype)
        if self.spread:
            with torch.no_grad():
                for p in model.parameters():
                    if p.requires_grad and p.is_floating_point() and p.numel():
                        p.add_(0.05 * torch.randn_like(p))
        return model

    def draw(self, number: int, dtype: torch.dtype, seed: int = 0) -> list[Any]:
        """Records with floating point tensors in `dtype`."""
        generator = torch.Generator().manual_seed(100 + seed)
        return [as_dtype(record, dtype) for record in self.records(number, generator)]


def as_dtype(record: Any, dtype: torch.dtype) -> Any:
    """The same record with floating point tensors in `dtype`."""
    if isinstance(record, Tensor):
        return record.to(dtype) if record.is_floating_point() else record
    if isinstance(record, Mapping) and type(record) is dict:
        return {key: as_dtype(value, dtype) for key, value in record.items()}
    if isinstance(record, (list, tuple)):
        return type(record)(as_dtype(value, dtype) for value in record)
    if callable(getattr(record, "apply", None)):  # a graph
        return record.apply(lambda t: t.to(dtype) if t.is_floating_point() else t)
    return record


def columns(**draws: Draw) -> Records:
    """Records that are dictionaries of tensors, drawn by column as in the zoo."""

    def draw(number: int, generator: torch.Generator) -> list[Any]:
        drawn = {name: one(number, generator) for name, one in draws.items()}
        return [{name: value[k] for name, value in drawn.items()} for k in range(number)]

    return draw


def uniform(low: float, high: float, *shape: int) -> Draw:
    """Uniform tensors (B, *shape)."""
    return lambda batch, g: low + (high - low) * torch.rand(batch, *shape, generator=g, dtype=torch.float64)


def make(path: str, *args: Any, **options: Any) -> Callable[[], nn.Module]:
    """`package.module.Class(*args, **options)` in evaluation mode, imported when it is built."""

    def build() -> nn.Module:
        return thing(path)(*args, **options).eval()

    return build


def thing(path: str) -> Any:
    """The object behind a dotted path."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def first(out: Any) -> Tensor:
    """The main output: of a tuple, a mapping or an output object its first tensor."""
    while not isinstance(out, Tensor):
        out = next(iter(out.values())) if isinstance(out, Mapping) else out[0]
    return out


def on_x(model: nn.Module, batch: Any) -> Tensor:
    """The loss of models called as `model(x)`: squared distance from a fixed pattern."""
    return regress(first(model(batch["x"])))


def plain(name: str, path: str, *args: Any, records: Records, losses: Any = on_x, **options: Any) -> Row:
    """A row of one class called with the given arguments; options named like fields of `Row` go there."""
    fields = {key: options.pop(key) for key in ("mixes", "collate", "single", "spread") if key in options}
    package = options.pop("package", path.split(".")[0])
    return Row(name, package, make(path, *args, **options), records, losses, **fields)


FAMILIES = (
    "diffusion",
    "geometric",
    "sequence",
    "tables",
    "transformers_other",
    "transformers_text",
    "vision",
)


def rows(family: str) -> list[Row]:
    """The rows of one family."""
    found: list[Row] = importlib.import_module(f"{__package__}.models_{family}").ROWS
    return found


def table() -> dict[str, list[Row]]:
    """Family -> rows."""
    return {family: rows(family) for family in FAMILIES}
