"""Gaussian noise, and where its bits come from.

Every random choice of a run (which samples, which noise) asks `Entropy` for bytes under a purpose and a step number.
Without a seed they come from the operating system each time, so no key lives on between steps and none can be
saved. With a seed they are a function of seed, purpose and step, so a resumed run needs no generator state.

torch's CPU generator keeps only 32 bits of the number it is seeded with, few enough to be tried one by one. So the
whole state of the generator (19,937 bits) is written instead, anew for every piece of noise: from the operating
system, or from the run's seed. What remains is a Mersenne Twister and float32 Box-Muller: statistically sound, not a
cryptographic generator, and never beyond 5.8 standard deviations. `SecureNormals` is one, with the tail in full.
Like all floating-point noise, both are Gaussian up to rounding only.
"""

from __future__ import annotations

import hashlib
import os
import random
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from clipwise.errors import ClipwiseError, InvalidPlan, MissingExtra

__all__ = ["Entropy", "GaussianNoise", "Normals", "SecureNormals", "TorchNormals"]

BUFFER_ELEMENTS = 1 << 18
"""Noise is made in pieces of at most this many numbers, so its buffers stay small beside a large model."""

_MOST_LANES = 16

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
    """A source of standard normal numbers: one stream for every piece of every step."""

    def fill_(self, buffer: Tensor, entropy: Entropy, step: int, piece: int) -> None:
        """Fill a one-dimensional tensor with the independent standard normal numbers of this piece of this step.

        Several threads may call at once, each with a piece of its own.
        """
        ...


class _Twister:
    """torch's CPU generator, started from 624 words of our own, all of them still to be twisted."""

    def __init__(self) -> None:
        state = np.zeros(_MT_STATE_BYTES, dtype=np.uint8)
        state[:24] = _MT_HEADER.view(np.uint8)
        self._words = state[24 : 24 + 8 * _MT_WORDS].view(np.uint64)
        self._state = torch.from_numpy(state)
        self._generator = torch.Generator()

    def start(self, words: bytes) -> torch.Generator:
        self._words[:] = np.frombuffer(words, dtype=np.uint32)
        self._generator.set_state(self._state)
        self._words[:] = 0  # the generator has its copy; keep no second one
        return self._generator


@lru_cache(maxsize=1)
def _check_mt_layout() -> None:
    """No layout of the state is documented: compare with NumPy's Mersenne Twister started from the same words."""
    words = Entropy(0).take(4 * _MT_WORDS, "layout")
    if torch.Generator().get_state().numel() == _MT_STATE_BYTES:
        ours = _Twister().start(words)
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
    """torch's own generator, given its whole state for every piece of every step (the default).

    >>> numbers = torch.empty(1000)
    >>> TorchNormals().fill_(numbers, Entropy(seed=1), step=0, piece=0)
    >>> bool(abs(numbers.std() - 1) < 0.1)
    True
    """

    def __init__(self) -> None:
        _check_mt_layout()
        self._mine = threading.local()  # a generator serves one thread

    def fill_(self, buffer: Tensor, entropy: Entropy, step: int, piece: int) -> None:
        """Fill a one-dimensional tensor with the numbers of this piece of this step."""
        device = buffer.device
        if device.type == "cpu":
            buffer.normal_(generator=self._twister().start(entropy.take(4 * _MT_WORDS, "noise", step, piece)))
            return
        place = -1 if device.index is None else device.index
        seed = int.from_bytes(entropy.take(8, "noise", step, piece, place), "little")
        buffer.normal_(generator=torch.Generator(device).manual_seed(seed))  # Philox takes all 64 bits

    def _twister(self) -> _Twister:
        found: _Twister | None = getattr(self._mine, "twister", None)
        if found is None:
            found = self._mine.twister = _Twister()
        return found


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

    def fill_(self, buffer: Tensor, entropy: Entropy, step: int, piece: int) -> None:
        """Fill a one-dimensional tensor with the numbers of this piece of this step."""
        pairs = (buffer.numel() + 1) // 2
        key = entropy.take(32, "secure noise", step, piece)
        bits = np.frombuffer(self._keystream(key, 16 * pairs), dtype=np.uint64) >> np.uint64(11)
        radius = np.sqrt(-2.0 * np.log((bits[:pairs] + 1.0) * 2.0**-53))  # from (0, 1]: never infinite
        angle = bits[pairs:] * (2.0 * np.pi * 2.0**-53)
        normals = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[: buffer.numel()]
        buffer.copy_(torch.from_numpy(normals))

    def _keystream(self, key: bytes, size: int) -> bytes:
        return self._cipher(self._aes(key), self._ctr(bytes(16))).encryptor().update(bytes(size))


@dataclass(frozen=True)
class _Piece:
    """What one filling of a buffer serves: whole tensors, or some rows of a large one."""

    number: int
    buffer: Tensor
    members: tuple[int, ...]
    views: tuple[Tensor, ...]
    rows: tuple[int, int] | None

    def targets(self, sums: Sequence[Tensor]) -> list[Tensor]:
        if self.rows is None:
            return [sums[i] for i in self.members]
        return [sums[self.members[0]].narrow(0, *self.rows)]


class GaussianNoise:
    """Adds N(0, std_r^2) to a list of tensors, through kept buffers, on as many threads as torch uses.

    `like` gives the shapes and devices of the tensors to come, `dtypes` their types. The numbers do not depend on how
    many threads there are.

    Guarantees: every number of every tensor gets independent noise of the standard deviation asked for, and no step
    repeats another's.

    >>> sums = [torch.zeros(2000), torch.zeros(1000)]
    >>> noise = GaussianNoise(sums, [torch.float32] * 2, Entropy(seed=0))
    >>> noised = noise.scaled(sums, stds=[1.0, 5.0], scale=0.5, step=0)
    >>> [0.9 < float(part.std()) / std < 1.1 for part, std in zip(noised, (0.5, 2.5))]
    [True, True]
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
        self._lanes = _cut(like, dtypes, min(torch.get_num_threads(), _MOST_LANES))
        self._pool = ThreadPoolExecutor(len(self._lanes), "noise") if len(self._lanes) > 1 else None

    def scaled(self, sums: list[Tensor], stds: Sequence[float], scale: float, step: int) -> list[Tensor]:
        """(sums + noise) * scale, with the noise of step `step` and one standard deviation per tensor.

        `sums` are used up.
        """
        if not all(std > 0 for std in stds):
            raise InvalidPlan(f"noise needs positive standard deviations, got {min(stds)!r}.")
        if len(self._lanes) == 1 and len(self._lanes[0]) == 1 and len(self._lanes[0][0].members) == len(sums):
            return self._small(self._lanes[0][0], sums, stds, scale, step)

        def serve(lane: Sequence[_Piece]) -> None:
            for piece in lane:
                self._fill(piece, stds, scale, step)
                targets = piece.targets(sums)
                torch._foreach_mul_(targets, scale)
                torch._foreach_add_(targets, piece.views)

        if self._pool is None:
            serve([piece for lane in self._lanes for piece in lane])
        else:
            list(self._pool.map(serve, self._lanes))
        return sums

    def _small(self, piece: _Piece, sums: list[Tensor], stds: Sequence[float], scale: float, step: int) -> list[Tensor]:
        """All tensors in one piece: fewer operations, which is what counts for a small model."""
        self._fill(piece, stds, scale, step)
        return list(torch._foreach_add(piece.views, sums, alpha=scale))

    def _fill(self, piece: _Piece, stds: Sequence[float], scale: float, step: int) -> None:
        """Noise of the piece's standard deviations, times `scale`, into its buffer."""
        self._source.fill_(piece.buffer, self._entropy, step, piece.number)
        own = {stds[i] for i in piece.members}
        if len(own) == 1:
            piece.buffer.mul_(own.pop() * scale)
        else:
            torch._foreach_mul_(piece.views, [stds[i] * scale for i in piece.members])


@dataclass
class _Span:
    """Tensors, or rows of one, that go together into a piece."""

    members: list[int]
    rows: tuple[int, int] | None
    size: int


def _cut(like: Sequence[Tensor], dtypes: Sequence[torch.dtype], lanes: int) -> list[list[_Piece]]:
    """Pack small tensors together, cut large ones by rows, and deal the pieces to lanes, each with its own buffer."""
    kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for i, (tensor, dtype) in enumerate(zip(like, dtypes, strict=True)):
        if tensor.numel():
            kinds.setdefault((tensor.device, dtype), []).append(i)
    dealt: list[list[_Piece]] = [[] for _ in range(lanes)]
    number = 0
    for (device, dtype), members in kinds.items():
        spans = _spans(like, members)
        size = max(span.size for span in spans)
        buffers = [torch.empty(size, device=device, dtype=dtype) for _ in range(min(lanes, len(spans)))]
        for k, span in enumerate(spans):
            lane = k % len(buffers)
            dealt[lane].append(_piece(number, span, buffers[lane][: span.size], like))
            number += 1
    return [lane for lane in dealt if lane]


def _spans(like: Sequence[Tensor], members: Sequence[int]) -> list[_Span]:
    spans: list[_Span] = []
    for i in members:
        size = like[i].numel()
        if size > BUFFER_ELEMENTS and like[i].shape[0] > 1:
            spans += [_Span([i], rows, n) for rows, n in _rows(like[i])]
        elif spans and spans[-1].rows is None and spans[-1].size + size <= BUFFER_ELEMENTS:
            spans[-1].members.append(i)
            spans[-1].size += size
        else:
            spans.append(_Span([i], None, size))
    return spans


def _piece(number: int, span: _Span, buffer: Tensor, like: Sequence[Tensor]) -> _Piece:
    shapes = [like[i].shape for i in span.members]
    if span.rows is not None:
        shapes = [torch.Size((span.rows[1], *shapes[0][1:]))]
    parts = torch.split(buffer, [shape.numel() for shape in shapes])
    views = tuple(part.view(shape) for part, shape in zip(parts, shapes, strict=True))
    return _Piece(number, buffer, tuple(span.members), views, span.rows)


def _rows(tensor: Tensor) -> list[tuple[tuple[int, int], int]]:
    """((first row, row count), elements) pieces of a tensor with more elements than the buffer."""
    inner = tensor.numel() // tensor.shape[0]
    count = max(1, BUFFER_ELEMENTS // inner)
    starts = range(0, tensor.shape[0], count)
    return [((a, min(count, tensor.shape[0] - a)), min(count, tensor.shape[0] - a) * inner) for a in starts]
