"""The parameters of a call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from clipwise.clipping import Style
from clipwise.errors import InvalidLosses


class Parameters:
    """The parameters of a call: distinct, in order, with their names and layers."""

    def __init__(self, params: Iterable[Tensor] | Mapping[str, Tensor]) -> None:
        named = isinstance(params, Mapping)
        pairs: list[tuple[str, Any]] = (
            list(params.items()) if isinstance(params, Mapping) else [("", p) for p in params]
        )
        for name, p in pairs:
            if not isinstance(p, Tensor):
                raise InvalidLosses(f"params must be tensors or a mapping name -> tensor, got {type(p).__name__}.")
            if not p.is_leaf:
                raise InvalidLosses(
                    f"params must be the parameters themselves, but {name or 'one'} of shape {tuple(p.shape)} is "
                    "computed from others. Pass those, or detach it and call requires_grad_() before it is used."
                )
        self.keys: list[list[Any]] = []
        self.tensors: list[Tensor] = []
        self.names: list[str] = []
        self.position: dict[int, int] = {}
        for name, p in pairs:
            place = self.position.get(id(p))
            if place is None:
                place = self.position[id(p)] = len(self.tensors)
                self.tensors.append(p)
                self.names.append(name)
                self.keys.append([])
            self.keys[place].append(name if named else p)
        self.identity = tuple(self.position)
        self._grouped: tuple[Style, dict[str, list[int]]] | None = None

    def describe(self, place: int) -> str:
        """A parameter as an error message names it."""
        return self.names[place] or f"#{place} of shape {tuple(self.tensors[place].shape)}"

    def layer(self, place: int) -> str:
        """The module that owns a parameter: its name before the last dot, or itself when it has no name."""
        name = self.names[place]
        return name.rpartition(".")[0] if name else f"#{place}"

    def keyed(self, values: Sequence[Tensor]) -> dict[Any, Tensor]:
        """Values in order of the parameters, keyed as the caller gave them."""
        return {key: value for keys, value in zip(self.keys, values, strict=True) for key in keys}

    def groups(self, style: Style) -> dict[str, list[int]]:
        """Clipping groups of a style and the places of their parameters."""
        if self._grouped is None or self._grouped[0] is not style:
            groups: dict[str, list[int]] = {}
            for place, name in enumerate(self.names):
                groups.setdefault(style.group_of(self.layer(place), name), []).append(place)
            self._grouped = style, groups
        return self._grouped[1]
