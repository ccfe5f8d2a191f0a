"""The random bits of a piece of noise: numpy's SFC64, started from a key of our own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from torch import Tensor

from clipwise.entropy import Entropy
from clipwise.errors import ClipwiseError

__all__ = ["Stream", "StreamNormals", "check_numpy"]

Draw: TypeAlias = Callable[[np.random.Generator, npt.NDArray[Any]], object]  # fills the array from the generator

_KEY_BYTES = 24  # 192 bits


class Stream:
    """numpy's SFC64 generator, started from 192 bits of our own; these and a counter are its whole state."""

    def __init__(self) -> None:
        self._words = np.array([0, 0, 0, 1], dtype=np.uint64)
        self._key = self._words.data.cast("B")[:_KEY_BYTES]
        self._bits = np.random.SFC64(0)
        self._state = self._bits.state
        self._state["state"]["state"] = self._words
        self._generator = np.random.Generator(self._bits)

    def start(self, key: bytes) -> np.random.Generator:
        """The generator at the beginning of the stream of this key."""
        self._key[:] = key
        self._bits.state = self._state
        self._key[:] = bytes(_KEY_BYTES)  # the generator has its copy; keep no second one
        return self._generator


class StreamNormals:
    """A source that draws every piece of every step from the stream of a fresh key.

    `room` makes what one thread draws with, such as a function with buffers of its own.
    """

    def __init__(self, room: Callable[[], Draw]) -> None:
        self._room = room
        self._mine = threading.local()  # a generator serves one thread

    def fill_(self, buffer: Tensor, entropy: Entropy, step: int, piece: int) -> None:
        """Fill a one-dimensional float64 CPU tensor with the numbers of this piece of this step."""
        mine: tuple[Stream, Draw] | None = getattr(self._mine, "drawing", None)
        if mine is None:
            mine = self._mine.drawing = Stream(), self._room()
        stream, draw = mine
        draw(stream.start(entropy.take(_KEY_BYTES, "noise", step, piece)), buffer.numpy())


def check_numpy(
    key: tuple[int, int, int], known: Mapping[int, float], draw: Callable[[np.random.Generator], npt.NDArray[Any]]
) -> None:
    """numpy may change how it draws: refuse one whose numbers for a key are not those that are known."""
    drawn = draw(Stream().start(np.array(key, dtype=np.uint64).tobytes()))
    if not all(np.isclose(drawn[i], value, rtol=1e-12, atol=0.0) for i, value in known.items()):
        raise ClipwiseError(
            f"numpy {np.__version__} draws random numbers in another way than the one whose tail clipwise knows. Use "
            "noise=SecureNormals(), or a numpy version that clipwise was tested with."
        )
