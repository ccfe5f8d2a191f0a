"""Sources of standard normal numbers, in float64 and with a tail.

torch's own CPU normals are float32, made from 24 bits, and end at 5.77 standard deviations: a record that lies on one
coordinate then makes outputs that are impossible without it. `ZigguratNormals` (the default) draws numpy's float64
ziggurat instead. Its law, derived from the algorithm:

- Up to r = 3.654 a number is k w with k of 52 bits: within 2^-48 of the exact one, after all roundings.
- Beyond r it is r + a/r with a, b ~ Exp(1) and 2b > (a/r)^2 (Marsaglia, 1964), which is the normal tail exactly. Both
  are the logarithms of 53-bit numbers, at most 53 log 2, so no number lies beyond r + sqrt(106 log 2) = 12.226. The
  normal law has 2.3e-34 there.
- The release rounds to a grid of std/1024 or a little less. The probability of a point of the grid is that of the
  normal law up to a factor 1 +- 2^-35 within r, 1e-9 at 6 deviations, 1e-6 at 8, 2e-3 at 10.

What this makes of delta is in `docs/decisions/0012-noise.md`, and a test computes it for the paper's experiments.
"""

from __future__ import annotations

import threading
from functools import lru_cache
from typing import Protocol

import numpy as np
from torch import Tensor

from clipwise.errors import ClipwiseError, InvalidPlan, MissingExtra
from clipwise.noise.entropy import Entropy

__all__ = ["Normals", "SecureNormals", "ZigguratNormals", "check_source"]

_KEY_BYTES = 24
_KNOWN = ((566, 1132, 1698), {0: 1.1884051473228406e-15, 9: -4.433226202343878, 63: -1.0835774767948474})


class Normals(Protocol):
    """A source of standard normal numbers: one stream for every piece of every step."""

    def fill_(self, buffer: Tensor, entropy: Entropy, step: int, piece: int) -> None:
        """Fill a one-dimensional float64 CPU tensor with the independent numbers of this piece of this step.

        Several threads may call at once, each with a piece of its own.
        """
        ...


class _Stream:
    """numpy's SFC64 generator, started from 192 bits of our own; these are its whole state but for a counter."""

    def __init__(self) -> None:
        self._words = np.zeros(4, dtype=np.uint64)
        self._bits = np.random.SFC64(0)
        self._state = self._bits.state
        self._state["state"]["state"] = self._words
        self._generator = np.random.Generator(self._bits)

    def start(self, key: bytes) -> np.random.Generator:
        self._words[:3] = np.frombuffer(key, dtype=np.uint64)
        self._words[3] = 1
        self._bits.state = self._state
        self._words[:] = 0  # the generator has its copy; keep no second one
        return self._generator


@lru_cache(maxsize=1)
def _check_numpy() -> None:
    """numpy may change how it draws: compare with known numbers, one of them from the tail."""
    key, known = _KNOWN
    drawn = _Stream().start(np.array(key, dtype=np.uint64).tobytes()).standard_normal(64)
    if not all(np.isclose(drawn[i], value, rtol=1e-12, atol=0.0) for i, value in known.items()):
        raise ClipwiseError(
            f"numpy {np.__version__} draws normal numbers in another way than the one whose tail clipwise knows. Use "
            "noise=SecureNormals(), or a numpy version that clipwise was tested with."
        )


class ZigguratNormals:
    """numpy's float64 ziggurat on SFC64, with a key of 192 bits for every piece of every step (the default).

    Statistically sound, with a tail to 12.2 standard deviations; not a cryptographic generator.

    >>> import torch
    >>> numbers = torch.empty(1000, dtype=torch.float64)
    >>> ZigguratNormals().fill_(numbers, Entropy(seed=1), step=0, piece=0)
    >>> bool(abs(numbers.std() - 1) < 0.1)
    True
    """

    def __init__(self) -> None:
        _check_numpy()
        self._mine = threading.local()  # a generator serves one thread

    def fill_(self, buffer: Tensor, entropy: Entropy, step: int, piece: int) -> None:
        """Fill a one-dimensional float64 CPU tensor with the numbers of this piece of this step."""
        stream: _Stream | None = getattr(self._mine, "stream", None)
        if stream is None:
            stream = self._mine.stream = _Stream()
        stream.start(entropy.take(_KEY_BYTES, "noise", step, piece)).standard_normal(out=buffer.numpy())


class SecureNormals:
    """AES-256 in counter mode and Box-Muller in float64: a cryptographic generator. Needs the extra `secure`.

    The radius is made from 128 bits, so the tail goes on to 13.4 standard deviations. Costs about three times as much
    as the default, so it is asked for: `Private(..., noise=SecureNormals())`. It takes no seed: numbers that can be
    repeated are not secure.
    """

    def __init__(self) -> None:
        try:
            from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
        except ImportError as error:
            raise MissingExtra("SecureNormals needs cryptography: pip install 'clipwise[secure]'.") from error
        self._cipher, self._aes, self._ctr = Cipher, algorithms.AES, modes.CTR

    def fill_(self, buffer: Tensor, entropy: Entropy, step: int, piece: int) -> None:
        """Fill a one-dimensional float64 CPU tensor with the numbers of this piece of this step."""
        check_source(self, entropy)
        size = buffer.numel()
        pairs = (size + 1) // 2
        drawn = np.frombuffer(self._keystream(entropy.take(32, "secure noise", step, piece), 24 * pairs), np.uint64)
        high, low, turn = drawn.reshape(3, pairs)
        # From 2^-129 to 1: never 0, and with 53 bits of its own however small it is.
        uniform = (high.astype(np.float64) + (low.astype(np.float64) + 0.5) * 2.0**-64) * 2.0**-64
        radius = np.sqrt(-2.0 * np.log(uniform))
        angle = (turn >> np.uint64(11)) * (2.0 * np.pi * 2.0**-53)
        numbers = buffer.numpy()
        np.multiply(radius, np.cos(angle), out=numbers[:pairs])
        np.multiply(radius[: size - pairs], np.sin(angle[: size - pairs]), out=numbers[pairs:])

    def _keystream(self, key: bytes, size: int) -> bytes:
        return self._cipher(self._aes(key), self._ctr(bytes(16))).encryptor().update(bytes(size))


def check_source(source: Normals, entropy: Entropy) -> None:
    """Refuse a secure source in a run that can be repeated."""
    if isinstance(source, SecureNormals) and entropy.seed is not None:
        raise InvalidPlan(
            "SecureNormals() takes no seed: noise that a seed can repeat is not secure. Omit `seed` for a real "
            "release, or omit `noise` for an experiment that can be repeated."
        )
