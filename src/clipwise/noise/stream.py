"""The random bits of a piece of noise: numpy's SFC64, started from a key of our own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from clipwise.errors import ClipwiseError

__all__ = ["KEY_BYTES", "Stream", "check_numpy"]

KEY_BYTES = 24
"""192 bits, a fresh key for every piece of every step."""


class Stream:
    """numpy's SFC64 generator, started from 192 bits of our own; these and a counter are its whole state."""

    def __init__(self) -> None:
        self._words = np.array([0, 0, 0, 1], dtype=np.uint64)
        self._key = self._words.data.cast("B")[:KEY_BYTES]
        self._bits = np.random.SFC64(0)
        self._state = self._bits.state
        self._state["state"]["state"] = self._words
        self._generator = np.random.Generator(self._bits)

    def start(self, key: bytes) -> np.random.Generator:
        """The generator at the beginning of the stream of this key."""
        self._key[:] = key
        self._bits.state = self._state
        self._key[:] = bytes(KEY_BYTES)  # the generator has its copy; keep no second one
        return self._generator


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
