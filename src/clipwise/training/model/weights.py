"""The weights of a network as a safetensors file: tensors, and nothing that could run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from clipwise.errors import DataError, MissingExtra
from clipwise.files import replacing

__all__ = ["Filled", "read_weights", "write_weights"]

_MOST_SHOWN = 20
"""Of the names in a message; the others are counted."""


@dataclass(frozen=True)
class Filled:
    """Which tensors of a network came from a file, by name; the others are as they were."""

    names: tuple[str, ...]
    others: tuple[str, ...] = ()

    def __str__(self) -> str:
        whole = f"{len(self.names)} of {len(self.names) + len(self.others)} tensors"
        return f"{whole}; new: {_listed(self.others)}" if self.others else whole


def write_weights(model: nn.Module, path: Path) -> None:
    """The weights, in a file that its owner alone can read."""
    from safetensors.torch import save_model

    with replacing(path, DataError) as file:
        save_model(model, file.name)  # into the file that is open: it is there, and private, before the first weight


def read_weights(model: nn.Module, path: str | os.PathLike[str], *, partial: bool = False) -> Filled:
    """Fill a network from a safetensors file by names and shapes. `partial` takes what fits and leaves the rest.

    Guarantees: a file that is damaged, is not safetensors, or does not fit is refused before any weight changes, with
    everything that does not fit in one message. Nothing is unpickled.
    """
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise MissingExtra("weights are read with safetensors: pip install 'clipwise[train]'.") from None
    try:
        with safe_open(os.fspath(path), framework="pt") as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - no mapping
            tensors = _tensors(model)
            chosen = _chosen(tensors, shapes)
            problems = [] if partial else _unfit(tensors, shapes, chosen)
            found = {name: file.get_tensor(source) for name, source in chosen.items()} if not problems else {}
    except OSError as error:
        raise DataError(f"the weights {os.fspath(path)} cannot be read: {error.strerror or error}.") from error
    except (SafetensorError, ValueError) as error:
        raise DataError(
            f"{os.fspath(path)} is damaged, or not a safetensors file: {error}. Copy it again; a file of another kind "
            "can be converted with safetensors.torch.save_file, and is never unpickled here."
        ) from error
    unlike = (name for name, value in found.items() if not _alike(tensors[name][0], value))
    problems += [f"{name!r} has another kind of numbers there" for name in unlike]
    if not problems and not found:
        problems = [f"it has none of {_listed(list(tensors))} in the same shape"]
    if problems:
        raise DataError(
            f"{os.fspath(path)} does not fit the model of this configuration: {_listed(problems, '; ')}. Name "
            "weights with the same names and shapes, such as those of a run with the same [model]."
        )
    with torch.no_grad():
        for name, value in found.items():
            tensors[name][0].copy_(value)
    return Filled(tuple(found), tuple(name for name in tensors if name not in found))


def _tensors(model: nn.Module) -> dict[str, tuple[Tensor, list[str]]]:
    """The tensors of a network by their first names, each with all its names: tied weights have several."""
    named: dict[int, tuple[Tensor, list[str]]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor):
            named.setdefault(id(tensor), (tensor, []))[1].append(name)
    return {names[0]: (tensor, names) for tensor, names in named.values()}


def _chosen(tensors: dict[str, tuple[Tensor, list[str]]], shapes: dict[str, tuple[int, ...]]) -> dict[str, str]:
    """For each tensor that the file has in the same shape, its name there."""
    found = {}
    for name, (tensor, names) in tensors.items():
        there = [each for each in names if shapes.get(each) == tuple(tensor.shape)]
        if there:
            found[name] = there[0]
    return found


def _unfit(
    tensors: dict[str, tuple[Tensor, list[str]]], shapes: dict[str, tuple[int, ...]], chosen: dict[str, str]
) -> list[str]:
    """Everything that is not the same in a file and a network."""
    found, known = [], set()
    for name, (tensor, names) in tensors.items():
        known.update(names)
        if name in chosen:
            continue
        there = [each for each in names if each in shapes]
        found.append(
            f"{name!r} is {shapes[there[0]]} there and {tuple(tensor.shape)} here" if there else f"{name!r} is missing"
        )
    return [*found, *(f"{name!r} is unknown here" for name in shapes if name not in known)]


def _alike(here: Tensor, there: Tensor) -> bool:
    kinds = [(each.is_floating_point(), each.is_complex(), each.dtype == torch.bool) for each in (here, there)]
    return kinds[0] == kinds[1]


def _listed(texts: Sequence[str], between: str = ", ") -> str:
    more = [f"and {len(texts) - _MOST_SHOWN} more"] if len(texts) > _MOST_SHOWN else []
    return between.join([*texts[:_MOST_SHOWN], *more])
