"""What memory holds, as a few bytes: equal for equal content, and others after any change.

Memory is read in rows of 1,024 words of 64 bits. Four sums of each row are kept, modulo 2^64: of its words and of their
upper halves, each times two sequences of odd numbers, which are drawn once for the process. A product modulo 2^64
forgets as many upper bits of its number as the other factor ends in zeros. So the words alone would not do: two signs
of float64 that change cancel. A difference in a lower half ends in at most 31 zeros, and so does one of upper halves.

- One word that changed is always seen: an odd number times a difference is not zero.
- Two words that were exchanged are always seen: the numbers of a sequence differ modulo 2^33.
- Anything else is missed with a chance of at most 2^-64, whatever the data are: 2^-32 for each of two sequences, whose
  numbers have 63 drawn bits, less the 31.

The sums are whole numbers, so their order does not matter. They are compared within a process and written nowhere.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from clipwise.entropy import Entropy

__all__ = ["checksum", "content", "pieces"]

_PIECE = 1 << 20  # bytes that stay in the cache
_ROW = 1024  # words
_SEQUENCES = 2
_SHORT = 33  # bits


def pieces(storage: torch.UntypedStorage, size: int) -> tuple[Tensor, ...]:
    """The bytes of a storage, so many at a time."""
    flat = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    found: tuple[Tensor, ...] = flat.split(size)
    return found


def checksum(storage: torch.UntypedStorage) -> bytes:
    """Of all bytes of a storage, wherever a tensor begins in it.

    >>> same, swapped = torch.arange(9), torch.tensor([0, 2, 1, 3, 4, 5, 6, 7, 8])
    >>> checksum(torch.arange(9).untyped_storage()) == checksum(same.untyped_storage())
    True
    >>> checksum(swapped.untyped_storage()) == checksum(same.untyped_storage())
    False
    """
    size = storage.nbytes()
    if size and not storage.data_ptr():
        raise RuntimeError("a storage without memory")
    sums = [each for piece in pieces(storage, _PIECE) for rows in _rows(piece) for each in _sums(rows)]
    found = hashlib.blake2b(size.to_bytes(8, "little"), digest_size=16)
    if sums:
        found.update(torch.cat(sums).cpu().numpy().tobytes())
    return found.digest()


def content(tensor: Tensor) -> object:
    """What a tensor's memory holds, of a sparse one also the places; if it cannot be read, how often it was written."""
    try:
        return tuple(checksum(part.untyped_storage()) for part in _parts(tensor))
    except (NotImplementedError, RuntimeError):
        return tensor._version


def _parts(tensor: Tensor) -> tuple[Tensor, ...]:
    if tensor.layout is torch.strided:
        return (tensor,)
    if tensor.layout is torch.sparse_coo:
        return tensor._values(), tensor._indices()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.values(), tensor.crow_indices(), tensor.col_indices()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.values(), tensor.ccol_indices(), tensor.row_indices()
    return (tensor.values(),)


def _rows(piece: Tensor) -> Iterator[Tensor]:
    """The words of a piece, (rows, words): whole rows, then what is left as a shorter one, filled up with zeros."""
    whole = piece.numel() // (8 * _ROW) * 8 * _ROW
    if whole:
        yield piece[:whole].view(torch.int64).view(-1, _ROW)
    if whole < piece.numel():
        yield F.pad(piece[whole:], (0, -piece.numel() % 8)).view(torch.int64)[None]


def _sums(words: Tensor) -> Iterator[Tensor]:
    """Both halves of the words of each row times each sequence of numbers, (rows,) each."""
    for half, numbers in zip((words, words >> 32), _numbers(words.device)[:, :, : words.shape[1]], strict=True):
        for sequence in numbers:  # a product of whole numbers has no kernel on other devices
            yield torch.mv(half, sequence) if words.is_cpu else (half * sequence).sum(1)


@cache
def _numbers(device: torch.device) -> Tensor:
    """What the words of a row are multiplied with, (halves, sequences, words)."""
    return torch.from_numpy(_drawn()).to(device)


@cache
def _drawn() -> np.ndarray:
    while True:
        drawn = np.frombuffer(Entropy().take(2 * _SEQUENCES * _ROW * 8, "content"), dtype=np.int64) | 1
        if len(np.unique(drawn % (1 << _SHORT))) == drawn.size:
            return drawn.reshape(2, _SEQUENCES, _ROW)
