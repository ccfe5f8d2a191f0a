"""Nested values as JSON and raw tensors, and back: what a checkpoint holds, and what a digest is taken of."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from clipwise.errors import CheckpointError

__all__ = ["Packer", "tensor_bytes", "tensor_from", "unpacked"]


class Packer:
    """Python values as JSON with tags, tensors put aside; anything else is refused by its place.

    >>> packer = Packer()
    >>> packer.pack({"w": torch.ones(2), "at": (1, 2)}, "state")
    {'$dict': [['w', {'$tensor': 0}], ['at', {'$tuple': [1, 2]}]]}
    >>> packer.shapes()
    [{'dtype': 'float32', 'shape': [2]}]
    """

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self._known: dict[tuple[object, ...], int] = {}

    def pack(self, value: Any, place: str) -> Any:
        """The structure of `value`; `place` is its name in an error message."""
        if value is None or isinstance(value, (bool, int, str)):
            return value
        if isinstance(value, float):
            return value if math.isfinite(value) else {"$float": repr(value)}
        if isinstance(value, Tensor):
            return {"$tensor": self._tensor(value, place)}
        if isinstance(value, (list, tuple)):
            items = [self.pack(item, f"{place}[{i}]") for i, item in enumerate(value)]
            return items if isinstance(value, list) else {"$tuple": items}
        if isinstance(value, Mapping):
            pairs = [[self.pack(k, place), self.pack(v, f"{place}[{k!r}]")] for k, v in value.items()]
            return {"$dict": pairs}
        raise CheckpointError(
            f"{place} is a {type(value).__name__}, which cannot be saved without pickle. Numbers, strings, tensors, "
            "lists, tuples and dictionaries can."
        )

    def _tensor(self, tensor: Tensor, place: str) -> int:
        if tensor.layout is not torch.strided or tensor.is_meta:
            raise CheckpointError(f"{place} is a {tensor.layout} tensor on {tensor.device}; only dense ones are saved.")
        # Tied weights stand in a state_dict twice; their bytes are written once.
        key = (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        known = self._known.get(key)
        if known is None or tensor.numel() == 0:
            known = self._known[key] = len(self.tensors)
            self.tensors.append(tensor.detach())
        return known

    def shapes(self) -> list[dict[str, Any]]:
        """Type and shape of every tensor that was put aside."""
        return [{"dtype": str(t.dtype).removeprefix("torch."), "shape": list(t.shape)} for t in self.tensors]


def tensor_bytes(tensor: Tensor) -> bytes:
    """The numbers of a tensor, in order."""
    flat = tensor.to("cpu").contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def tensor_from(data: bytes, spec: Mapping[str, Any]) -> Tensor:
    """The tensor of these bytes, with the type and shape that `Packer.shapes` gave."""
    dtype = getattr(torch, str(spec["dtype"]), None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"the checkpoint has a tensor of unknown type {spec['dtype']!r}.")
    shape = [int(n) for n in spec["shape"]]
    if min(shape, default=1) < 0 or math.prod(shape) * dtype.itemsize != len(data):
        raise CheckpointError(f"the checkpoint has {len(data)} bytes of a tensor of shape {shape} and type {dtype}.")
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)


def unpacked(value: Any, tensors: list[Tensor]) -> Any:
    """What `Packer.pack` packed."""
    if isinstance(value, list):
        return [unpacked(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    ((tag, content),) = value.items()
    if tag == "$dict":
        return {unpacked(k, tensors): unpacked(v, tensors) for k, v in content}
    if tag == "$tuple":
        return tuple(unpacked(item, tensors) for item in content)
    if tag == "$tensor":
        return tensors[content]
    if tag == "$float":
        return float(content)
    raise CheckpointError(f"the checkpoint holds an unknown kind of value {tag!r}.")
