"""Sources of standard normal numbers, in float64 and with a tail.

torch's own CPU normals are float32, made from 24 bits, and end at 5.77 standard deviations: a record that lies on one
coordinate then makes outputs that are impossible without it. The law of the default is derived in `ziggurat`, for short
pieces of noise, and in `polar`, for long ones.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from torch import Tensor

from clipwise.entropy import Entropy
from clipwise.errors import InvalidPlan, MissingExtra
from clipwise.noise.polar import PolarNormals
from clipwise.noise.ziggurat import ZigguratNormals

__all__ = ["DefaultNormals", "Normals", "SecureNormals", "check_source"]

LONG_PIECE = 12_000
"""From so many numbers on, pairs take less time than the ziggurat: the 17 calls of numpy that they need pay off."""


class Normals(Protocol):
    """A source of standard normal numbers: one stream for every piece of every step."""

    def fill_(self, buffer: Tensor, entropy: Entropy, step: int, piece: int) -> None:
        """Fill a one-dimensional float64 CPU tensor with the independent numbers of this piece of this step.

        Several threads may call at once, each with a piece of its own. For an entropy with a seed, equal calls must
        give equal numbers: a resumed run counts a repeated step with the same sums as the same release.
        """
        ...


class DefaultNormals:
    """`ZigguratNormals` for short pieces and `PolarNormals` for long ones: whichever takes less time.

    Both draw in float64 on SFC64, with a key of 192 bits for every piece of every step, and a tail that ends nowhere.
    Statistically sound; not a cryptographic generator.

    >>> import torch
    >>> numbers = torch.empty(1000, dtype=torch.float64)
    >>> DefaultNormals().fill_(numbers, Entropy(seed=1), step=0, piece=0)
    >>> bool(abs(numbers.std() - 1) < 0.1)
    True
    """

    def __init__(self) -> None:
        self._short, self._long = ZigguratNormals(), PolarNormals()

    def fill_(self, buffer: Tensor, entropy: Entropy, step: int, piece: int) -> None:
        """Fill a one-dimensional float64 CPU tensor with the numbers of this piece of this step."""
        source = self._short if buffer.numel() < LONG_PIECE else self._long
        source.fill_(buffer, entropy, step, piece)


class SecureNormals:
    """AES-256 in counter mode and Box-Muller in float64: a cryptographic generator. Needs the extra `secure`.

    The radius is made from 128 bits, so the tail reaches 13.4 standard deviations. It costs three to four times as much
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
