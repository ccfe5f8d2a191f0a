"""How many tensors become pieces of noise: small ones packed together, large ones cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

__all__ = ["PIECE_ELEMENTS", "Piece", "Stretch", "cut"]

PIECE_ELEMENTS = 1 << 16
"""A piece has at most this many numbers: half a megabyte, which stays in the processor's cache."""


class Stretch(NamedTuple):
    """The elements from `start` to `stop` of a tensor."""

    tensor: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        """Numbers in the part."""
        return self.stop - self.start


@dataclass(frozen=True)
class Piece:
    """What one stream of noise serves."""

    number: int
    parts: tuple[Stretch, ...]

    @cached_property
    def size(self) -> int:
        """Numbers in the piece."""
        return sum(part.size for part in self.parts)


def cut(sizes: Sequence[int], kinds: Sequence[object]) -> list[Piece]:
    """The pieces of tensors with so many elements: every element is in one, and those of a piece are of one kind.

    >>> found = cut([3, 0, 70_000, 5, 2], ["a", "a", "a", "a", "b"])
    >>> [[(part.tensor, part.start, part.stop) for part in piece.parts] for piece in found]
    [[(0, 0, 3)], [(2, 0, 65536)], [(2, 65536, 70000), (3, 0, 5)], [(4, 0, 2)]]
    """
    pieces: list[list[Stretch]] = []
    last, room = None, 0
    for tensor, (size, kind) in enumerate(zip(sizes, kinds, strict=True)):
        for start in range(0, size, PIECE_ELEMENTS):
            part = Stretch(tensor, start, min(start + PIECE_ELEMENTS, size))
            if part.size > room or kind != last:
                pieces.append([])
                last, room = kind, PIECE_ELEMENTS
            pieces[-1].append(part)
            room -= part.size
    return [Piece(number, tuple(parts)) for number, parts in enumerate(pieces)]
