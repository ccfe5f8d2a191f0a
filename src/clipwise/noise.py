"""Gaussian noise, and where its bits come from.

Every random choice of a run (which samples, which noise) asks `Entropy` for bytes under a purpose and a step number.
Without a seed they come from the operating system each time, so no key lives on between steps and none can be
saved. With a seed they are a function of seed, purpose and step, so a resumed run needs no generator state.

torch's CPU generator keeps only 32 bits of the number it is seeded with, few enough to be tried one by one. So the
whole state of the generator (19,937 bits) is written instead, anew for every step: from the operating system, or
from the run's seed. What remains is a Mersenne Twister and float32 Box-Muller: statistically sound, not a
cryptographic generator, and never beyond 5.8 standard deviations. `SecureNormals` is one, with the tail in full.
Like all floating-point noise, both are Gaussian up to rounding only.
"""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from clipwise.errors import ClipwiseError, InvalidPlan, MissingExtra

__all__ = ["Entropy", "GaussianNoise", "Normals", "SecureNormals", "TorchNormals"]

BUFFER_ELEMENTS = 1 << 21
"""Noise is made in pieces of at most this many numbers, so its buffer stays small beside a large model."""

_MT_WORDS = 624
_MT_STATE_BYTES = 5056
_MT_HEADER = np.array([0, (1 << 32) | 1, 0], dtype=np.uint64)  # seed unused; left = 1 and seeded = 1; next = 0


@dataclass(frozen=True)
class Entropy:
    """Bytes for a purpose: from the operating system, or derived from `seed` (SHAKE-256).

    Guarantees: without a seed two calls share nothing; with a seed equal calls give equal bytes, and different
    purposes or counters independent ones.

    >>> Entropy(7).take(4, "noise", 3) == Entropy(7).take(4, "noise", 3)
    True
    >>> Entropy(None).take(16, "noise", 3) == Entropy(None).take(16, "noise", 3)
    False
    """

    seed: int | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        seed = self.seed
        if seed is not None and (not isinstance(seed, int) or isinstance(seed, bool) or seed < 0):
            raise InvalidPlan(f"seed must be a non-negative integer or None (operating system entropy), got {seed!r}.")

    def take(self, size: int, purpose: str, *counters: int) -> bytes:
        """`size` bytes for this purpose and these counters."""
        if self.seed is None:
            return os.urandom(size)
        label = "/".join(["clipwise", str(self.seed), purpose, *map(str, counters)])
        return hashlib.shake_256(label.encode()).digest(size)

    def child(self, purpose: str) -> Entropy:
        """An entropy for somebody who must not learn this one's seed."""
        return self if self.seed is None else Entropy(int.from_bytes(self.take(16, purpose), "little"))

    def generator(self, purpose: str, *counters: int) -> np.random.Generator:
        """A NumPy generator (Philox, 128-bit key) for this purpose and these counters."""
        return np.random.Generator(np.random.Philox(key=int.from_bytes(self.take(16, purpose, *counters), "little")))

    def seed_globals(self, purpose: str, *counters: int) -> None:
        """With a seed, set the global generators of torch, NumPy and Python, so dropout and augmentation replay."""
        if self.seed is None:
            return
        words = np.frombuffer(self.take(16, purpose, *counters), dtype=np.uint32)
        # torch.manual_seed also formats a stack trace for devices that are not there: too slow for every batch.
        torch.default_generator.manual_seed(int(words[0]))
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(int(words[0]))
        np.random.seed(int(words[1]))  # noqa: NPY002 - the global generator that augmentation code draws from
        random.seed(words[2:].tobytes())


class Normals(Protocol):
    """A source of standard normal numbers that is keyed anew for every step."""

    def key(self, entropy: Entropy, step: int) -> None:
        """Forget everything, and start the stream of this step."""
        ...

    def fill_(self, buffer: Tensor) -> None:
        """Fill a one-dimensional tensor with independent standard normal numbers."""
        ...


class _TwisterState:
    """The state of torch's CPU generator with 624 words of our own, all of them still to be twisted."""

    def __init__(self) -> None:
        state = np.zeros(_MT_STATE_BYTES, dtype=np.uint8)
        state[:24] = _MT_HEADER.view(np.uint8)
        self._words = state[24 : 24 + 8 * _MT_WORDS].view(np.uint64)
        self._state = torch.from_numpy(state)

    def load(self, generator: torch.Generator, words: bytes) -> None:
        self._words[:] = np.frombuffer(words, dtype=np.uint32)
        generator.set_state(self._state)
        self._words[:] = 0  # the generator has its copy; keep no second one


@lru_cache(maxsize=1)
def _check_mt_layout() -> None:
    """No layout of the state is documented: compare with NumPy's Mersenne Twister started from the same words."""
    words = Entropy(0).take(4 * _MT_WORDS, "layout")
    ours = torch.Generator()
    if ours.get_state().numel() == _MT_STATE_BYTES:
        _TwisterState().load(ours, words)
        twister = np.random.MT19937()
        twister.state = {
            "bit_generator": "MT19937",
            "state": {"key": np.frombuffer(words, dtype=np.uint32), "pos": _MT_WORDS},
        }
        expected = twister.random_raw(1000) % (1 << 20)
        got = torch.empty(1000, dtype=torch.int64).random_(0, 1 << 20, generator=ours)
        if np.array_equal(got.numpy(), expected.astype(np.int64)):
            return
    raise ClipwiseError(
        f"the generator of torch {torch.__version__} keeps its state in another layout than clipwise knows, so it "
        "cannot be given enough entropy. Use noise=SecureNormals(), or a torch version that clipwise was tested with."
    )


class TorchNormals:
    """torch's own generator, given its whole state at every step (the default).

    >>> source, numbers = TorchNormals(), torch.empty(1000)
    >>> source.key(Entropy(seed=1), step=0); source.fill_(numbers)
    >>> bool(abs(numbers.std() - 1) < 0.1)
    True
    """

    def __init__(self) -> None:
        _check_mt_layout()
        self._generators: dict[torch.device, torch.Generator] = {}
        self._twister = _TwisterState()
        self._current: tuple[Entropy, int] = (Entropy(None), 0)

    def key(self, entropy: Entropy, step: int) -> None:
        """Start the stream of this step on every device."""
        self._current = (entropy, step)
        for device, generator in self._generators.items():
            self._start(device, generator)

    def fill_(self, buffer: Tensor) -> None:
        """Fill a one-dimensional tensor with independent standard normal numbers."""
        generator = self._generators.get(buffer.device)
        if generator is None:
            generator = self._generators[buffer.device] = torch.Generator(buffer.device)
            self._start(buffer.device, generator)
        buffer.normal_(generator=generator)

    def _start(self, device: torch.device, generator: torch.Generator) -> None:
        entropy, step = self._current
        if device.type == "cpu":
            self._twister.load(generator, entropy.take(4 * _MT_WORDS, "noise", step))
        else:  # Philox on accelerators takes all 64 bits
            place = -1 if device.index is None else device.index
            generator.manual_seed(int.from_bytes(entropy.take(8, "noise", step, place), "little"))


class SecureNormals:
    """AES-256 in counter mode and Box-Muller in float64: a cryptographic generator. Needs the extra `secure`.

    The radius is made from 53 bits, so the tail goes on to 8.5 standard deviations. Costs about eight times as much
    as `TorchNormals`, so it is asked for: `Private(..., noise=SecureNormals())`.
    """

    def __init__(self) -> None:
        try:
            from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
        except ImportError as error:
            raise MissingExtra("SecureNormals needs cryptography: pip install 'clipwise[secure]'.") from error
        self._cipher, self._aes, self._ctr = Cipher, algorithms.AES, modes.CTR
        self.key(Entropy(None), 0)

    def key(self, entropy: Entropy, step: int) -> None:
        """Start the stream of this step under a key of its own."""
        key = entropy.take(32, "secure noise", step)
        self._stream = self._cipher(self._aes(key), self._ctr(bytes(16))).encryptor()

    def fill_(self, buffer: Tensor) -> None:
        """Fill a one-dimensional tensor with independent standard normal numbers."""
        pairs = (buffer.numel() + 1) // 2
        bits = np.frombuffer(self._stream.update(bytes(16 * pairs)), dtype=np.uint64) >> np.uint64(11)
        radius = np.sqrt(-2.0 * np.log((bits[:pairs] + 1.0) * 2.0**-53))  # from (0, 1]: never infinite
        angle = bits[pairs:] * (2.0 * np.pi * 2.0**-53)
        normals = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[: buffer.numel()]
        buffer.copy_(torch.from_numpy(normals))


@dataclass(frozen=True)
class _Piece:
    """What one filling of the buffer serves: whole tensors, or some rows of a large one."""

    buffer: Tensor
    members: tuple[int, ...]
    views: tuple[Tensor, ...]
    rows: tuple[int, int] | None

    def targets(self, sums: Sequence[Tensor]) -> list[Tensor]:
        if self.rows is None:
            return [sums[i] for i in self.members]
        return [sums[self.members[0]].narrow(0, *self.rows)]


class GaussianNoise:
    """Adds N(0, std_r^2) to a list of tensors in place, through a kept buffer.

    `like` gives the shapes and devices of the tensors to come, `dtypes` their types.

    Guarantees: every number of every tensor gets independent noise of the standard deviation asked for, and no step
    repeats another's.

    >>> sums = [torch.zeros(2000), torch.zeros(1000)]
    >>> GaussianNoise(sums, [torch.float32] * 2, Entropy(seed=0)).add_(sums, stds=[1.0, 5.0], step=0)
    >>> round(float(sums[0].std()), 1), round(float(sums[1].std()))
    (1.0, 5)
    """

    def __init__(
        self,
        like: Sequence[Tensor],
        dtypes: Sequence[torch.dtype],
        entropy: Entropy,
        source: Normals | None = None,
    ) -> None:
        self._entropy = entropy
        self._source = TorchNormals() if source is None else source
        self._pieces = _cut(like, dtypes)

    def add_(self, sums: Sequence[Tensor], stds: Sequence[float], step: int) -> None:
        """Add the noise of step `step`; `stds` has one standard deviation per tensor."""
        common = self._start(stds, step)
        for piece in self._pieces:
            self._source.fill_(piece.buffer)
            targets = piece.targets(sums)
            if common is not None:
                torch._foreach_add_(targets, piece.views, alpha=common)
            else:
                torch._foreach_mul_(piece.views, [stds[i] for i in piece.members])
                torch._foreach_add_(targets, piece.views)

    def scaled(self, sums: list[Tensor], stds: Sequence[float], scale: float, step: int) -> list[Tensor]:
        """(sums + noise) * scale; `sums` are used up. In fewer operations than `add_` where everything is small."""
        if len(self._pieces) != 1 or len(self._pieces[0].members) != len(sums):
            self.add_(sums, stds, step)
            torch._foreach_mul_(sums, scale)
            return sums
        piece = self._pieces[0]
        common = self._start(stds, step)
        self._source.fill_(piece.buffer)
        if common is None:
            torch._foreach_mul_(piece.views, [std * scale for std in stds])
        else:
            piece.buffer.mul_(common * scale)
        return list(torch._foreach_add(piece.views, sums, alpha=scale))

    def _start(self, stds: Sequence[float], step: int) -> float | None:
        """Key the source for this step; the standard deviation that all tensors share, if they do."""
        if not all(std > 0 for std in stds):
            raise InvalidPlan(f"noise needs positive standard deviations, got {min(stds)!r}.")
        self._source.key(self._entropy, step)
        return stds[0] if len(set(stds)) == 1 else None


def _cut(like: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> list[_Piece]:
    """Pack small tensors together and cut large ones by rows; pieces of a kind share one buffer."""
    kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for i, (tensor, dtype) in enumerate(zip(like, dtypes, strict=True)):
        if tensor.numel():
            kinds.setdefault((tensor.device, dtype), []).append(i)
    pieces: list[_Piece] = []
    for (device, dtype), members in kinds.items():
        spans: list[tuple[list[int], tuple[int, int] | None, int]] = []
        for i in members:
            size = like[i].numel()
            if size > BUFFER_ELEMENTS and like[i].shape[0] > 1:
                spans += [([i], rows, n) for rows, n in _rows(like[i])]
            elif spans and spans[-1][1] is None and spans[-1][2] + size <= BUFFER_ELEMENTS:
                spans[-1] = ([*spans[-1][0], i], None, spans[-1][2] + size)
            else:
                spans.append(([i], None, size))
        buffer = torch.empty(max(n for _, _, n in spans), device=device, dtype=dtype)
        for ids, rows, n in spans:
            shapes = [like[i].shape for i in ids] if rows is None else [(rows[1], *like[ids[0]].shape[1:])]
            sizes = [like[i].numel() for i in ids] if rows is None else [n]
            views = tuple(v.view(s) for v, s in zip(torch.split(buffer[:n], sizes), shapes, strict=True))
            pieces.append(_Piece(buffer[:n], tuple(ids), views, rows))
    return pieces


def _rows(tensor: Tensor) -> list[tuple[tuple[int, int], int]]:
    """((first row, row count), elements) pieces of a tensor with more elements than the buffer."""
    inner = tensor.numel() // tensor.shape[0]
    count = max(1, BUFFER_ELEMENTS // inner)
    starts = range(0, tensor.shape[0], count)
    return [((a, min(count, tensor.shape[0] - a)), min(count, tensor.shape[0] - a) * inner) for a in starts]
