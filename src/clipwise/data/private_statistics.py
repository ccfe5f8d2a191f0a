"""What a table looks like, under differential privacy: kinds, bounds and categories of its columns, and moments.

Everything is a noisy count or sum over cells that are fixed in advance: a public grid of numbers, and for text the tree
of all texts, which is entered byte by byte. So nothing appears because one record has it, and no probability of failure
is added to delta. The event is on the ledger, and in its file, before any noise is drawn.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from clipwise.accounting import Ledger, PrivateStatistics, noise_scale
from clipwise.data.readers import Table, is_missing, numbers, texts
from clipwise.data.schema import Category, Kind, Number, Schema
from clipwise.entropy import Entropy
from clipwise.errors import DataError, InvalidPlan
from clipwise.noise import GaussianNoise

__all__ = ["PrivateMoments", "PrivateSchema"]

_STEPS = (1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0)
_POSITIVE = [step * 10.0**power for power in range(-6, 13) for step in _STEPS] + [1e13]
EDGES = np.array([*(-edge for edge in reversed(_POSITIVE)), 0.0, *_POSITIVE])
"""The public grid: bin k has the numbers from edge k - 1 up to edge k; the first and the last bin are open."""
BINS = len(EDGES) + 1
MISSING, TEXT, CELLS = BINS, BINS + 1, BINS + 2
"""The two cells after the bins, and how many there are for a column."""
LENGTH = 32
"""Bytes of the longest category that can be found."""
END, BYTES = 256, 257
"""A text ends here; children of a node of the tree."""
MOST_CATEGORIES = 100
_STRAY = 0.05
"""The chance, for each release, that noise alone passes for a count somewhere."""


@dataclass(frozen=True)
class PrivateSchema:
    """A schema under differential privacy, by the Gaussian mechanism with `noise_multiplier` for the whole of it.

    The first release counts, for every column, the cells in each bin of the grid, the missing ones and those that are
    text. The 32 others count, for every column that is mostly text, how the texts continue that were frequent so far.
    What is far above the noise becomes bounds and categories; all else is post-processing. Column names are public.

    Guarantees: one record more or less changes the counts of a release by at most sqrt(columns) in the Euclidean norm,
    whatever its cells; noise of sqrt(33 * columns) * noise_multiplier on each is the same as one Gaussian mechanism
    with `noise_multiplier`. The event is on the ledger before any noise is drawn.

    >>> table = {"age": ["30", "41", "28", "35"] * 500, "job": ["cook", "cook", "clerk", ""] * 500}
    >>> schema = PrivateSchema(noise_multiplier=1.0, seed=0).propose(table, None, ledger := Ledger())
    >>> [(column.name, column.kind) for column in schema.columns]
    [('age', 'number'), ('job', 'category')]
    >>> ledger.epsilon(1e-5) < 5
    True
    """

    noise_multiplier: float
    seed: int | None = None

    def __post_init__(self) -> None:
        _check_noise(self.noise_multiplier)

    @classmethod
    def within(cls, epsilon: float, delta: float) -> PrivateSchema:
        """With the least noise that spends at most this much."""
        return cls(noise_scale([PrivateStatistics(1.0)], epsilon, delta))

    @property
    def event(self) -> PrivateStatistics:
        """What goes on the ledger."""
        releases = 1 + LENGTH
        return PrivateStatistics(self.noise_multiplier * math.sqrt(releases), releases)

    def propose(
        self, table: Table, target: str | None, ledger: Ledger, path: str | os.PathLike[str] | None = None
    ) -> Schema:
        """Charge the ledger (and save it at `path`), then look. Gaps are allowed in every column that is found."""
        return self.proposed(table, target, ledger, path)[0]

    def proposed(
        self, table: Table, target: str | None, ledger: Ledger, path: str | os.PathLike[str] | None = None
    ) -> tuple[Schema, dict[str, float]]:
        """`propose`, and for every column of numbers how many records are surely within its bounds, or missing.

        These are the noisy counts that the bounds were found by, less two deviations of their noise.
        """
        columns = {name: column for name, column in table.items() if name != target}
        if not columns:
            raise DataError("there is no column to describe.")
        try:
            cells = {name: texts(column) for name, column in columns.items()}
        except ValueError as error:
            raise DataError(f"only tables of numbers and text have a schema; there is {error}.") from None
        lengths = {len(column) for column in cells.values()}
        if len(lengths) > 1:
            raise DataError(f"the columns have different lengths, {sorted(lengths)}.")
        release = _Releases(self.event, self.seed, ledger, path)
        counts, least = release(histogram([cells[name] for name in columns]), math.sqrt(len(columns)))
        deviation, rows = self.event.noise_multiplier * math.sqrt(len(columns)), dict(zip(columns, counts, strict=True))
        kinds: dict[str, Kind | None] = {name: _number(name, row, least) for name, row in rows.items()}
        worded = [name for name, row in rows.items() if _is_text(row, least)]
        found = _categories([Counter(cells[name]) for name in worded], release)
        kinds |= {
            name: Category(name, tuple(sorted(words)), missing=True) if words else None
            for name, words in zip(worded, found, strict=True)
        }
        made: list[Kind] = [kind for name in columns if (kind := kinds[name]) is not None]
        if not made:
            raise DataError("no column stands out of the noise: more records, or a larger epsilon, are needed.")
        return Schema(tuple(made)), {
            kind.name: _surely(rows[kind.name], least, deviation) for kind in made if isinstance(kind, Number)
        }


@dataclass(frozen=True)
class PrivateMoments:
    """Mean and standard deviation of encoded features, under differential privacy.

    Guarantees: features within [-1, 1] are clipped to it, so a record's part in count, sums and sums of squares has a
    Euclidean norm of at most sqrt(1 + 2 * features); the noise has `noise_multiplier` times that. The event is on the
    ledger before any noise is drawn.

    >>> x = torch.linspace(-1, 1, 20_000).reshape(-1, 1)
    >>> mean, deviation = PrivateMoments(noise_multiplier=1.0, seed=0).find(x, Ledger())
    >>> abs(float(mean)) < 0.01, abs(float(deviation) - 0.577) < 0.01
    (True, True)
    """

    noise_multiplier: float
    seed: int | None = None

    def __post_init__(self) -> None:
        _check_noise(self.noise_multiplier)

    @property
    def event(self) -> PrivateStatistics:
        """What goes on the ledger."""
        return PrivateStatistics(self.noise_multiplier)

    def find(self, x: Tensor, ledger: Ledger, path: str | os.PathLike[str] | None = None) -> tuple[Tensor, Tensor]:
        """Charge the ledger (and save it at `path`), then give mean and deviation of every feature."""
        if x.dim() != 2 or not x.is_floating_point():
            raise DataError(f"moments are of a table of features, not of {x.dtype} of shape {tuple(x.shape)}.")
        width = x.shape[1]
        release = _Releases(self.event, self.seed, ledger, path)
        noisy, _ = release(moments(x), math.sqrt(1 + 2 * width))
        count = max(1.0, float(noisy[0]))
        mean = torch.from_numpy(noisy[1 : 1 + width] / count).clamp(-1.0, 1.0)
        square = torch.from_numpy(noisy[1 + width :] / count)
        return mean.float(), (square - mean.square()).clamp(0.0, 1.0).sqrt().float()


def _check_noise(noise: float) -> None:
    if not PrivateStatistics(noise).noise_multiplier > 0:
        raise InvalidPlan("noise_multiplier must be positive; Schema.propose looks without noise.")


class _Releases:
    """The releases of one event, charged when this is made; one that was not announced is refused."""

    def __init__(
        self, event: PrivateStatistics, seed: int | None, ledger: Ledger, path: str | os.PathLike[str] | None
    ) -> None:
        self._event, self._entropy = event, Entropy(seed).child("statistics")
        # Another number for every release of this ledger: a seed must not repeat the noise of an earlier one.
        self._next = sum(each.count for each in ledger.events if isinstance(each, PrivateStatistics))
        self._stop = self._next + event.releases
        ledger.record(event)
        if path is not None:
            ledger.save(path)

    def __call__(self, counts: NDArray[np.float64], sensitivity: float) -> tuple[NDArray[np.float64], float]:
        """The counts with noise, and what one of them has to exceed so as not to be noise."""
        if self._next >= self._stop:
            raise InvalidPlan("more releases than are on the ledger.")
        sums, std = torch.from_numpy(counts.copy()), self._event.noise_multiplier * sensitivity
        noise = GaussianNoise([sums], self._entropy)
        (noisy,) = noise.release([sums], [std], 1.0, self._next, b"private statistics")
        self._next += 1
        return noisy.numpy(), std * math.sqrt(2 * math.log(counts.size / _STRAY))


def histogram(columns: Sequence[Sequence[str]]) -> NDArray[np.float64]:
    """For every column the number of cells in each bin, of missing ones, and of texts.

    Guarantees: a record is in exactly one cell of every column.

    >>> histogram([["0.5", "?", "cook"]])[:, [MISSING, TEXT]]
    array([[1., 1.]])
    """
    counts = np.zeros((len(columns), CELLS))
    for row, column in zip(counts, columns, strict=True):
        found = numbers(list(column))
        place = np.searchsorted(EDGES, np.where(np.isnan(found.values), 0.0, found.values), side="right")
        place = np.where(found.missing, MISSING, np.where(found.wrong, TEXT, place))
        row += np.bincount(place, minlength=CELLS)
    return counts


def continuations(columns: Sequence[Mapping[str, int]], live: Sequence[Sequence[bytes]]) -> NDArray[np.float64]:
    """How often each text that is alive is continued by each byte, or ends; (texts of all columns, 257).

    `columns` have how often each cell occurs; the texts alive in a column are all of one length.

    Guarantees: a record is in at most one cell of every column, because of texts of one length only one can begin it.
    """
    counts = np.zeros((sum(map(len, live)), BYTES))
    first = 0
    for column, prefixes in zip(columns, live, strict=True):
        place: Mapping[bytes, int] = {prefix: first + k for k, prefix in enumerate(prefixes)}
        length = len(prefixes[0]) if prefixes else 0
        for cell, often in column.items():
            word = cell.encode(errors="surrogatepass")
            at = place.get(word[:length])
            if at is not None and not is_missing(cell):
                counts[at, word[length] if len(word) > length else END] += often
        first += len(prefixes)
    return counts


def moments(x_NF: Tensor) -> NDArray[np.float64]:
    """The number of records, the sums of their features and of their squares; what is not finite counts 0."""
    x_NF = torch.nan_to_num(x_NF.double(), nan=0.0, posinf=0.0, neginf=0.0).clamp(-1.0, 1.0)
    return np.concatenate([[float(len(x_NF))], x_NF.sum(dim=0).numpy(), x_NF.square().sum(dim=0).numpy()])


def _is_text(row: NDArray[np.float64], least: float) -> bool:
    """Whether a column is mostly text, by its noisy counts."""
    bins = row[:BINS]
    return bool(row[TEXT] > least and row[TEXT] > bins[bins > least].sum())


def _number(name: str, row: NDArray[np.float64], least: float) -> Number | None:
    """The bounds of a column of numbers, by its noisy counts; None where none stand out."""
    filled = np.flatnonzero(row[:BINS] > least)
    if not len(filled):
        return None
    edges = np.concatenate([EDGES[:1], EDGES, EDGES[-1:]])
    low, high = float(edges[filled[0]]), float(edges[filled[-1] + 1])
    return Number(name, low, high, missing=True) if low < high else None


def _surely(row: NDArray[np.float64], least: float, deviation: float) -> float:
    """How many records stand out of the noise in a column of numbers, or are missing, less what noise may add."""
    counted = [*(row[:BINS][row[:BINS] > least]), row[MISSING]]
    return max(0.0, float(sum(counted)) - 2 * deviation * math.sqrt(len(counted)))


def _categories(columns: Sequence[Mapping[str, int]], release: _Releases) -> list[list[str]]:
    """The frequent texts of each column, found byte by byte from noisy counts alone."""
    live: list[list[bytes]] = [[b""] for _ in columns]
    found: list[list[bytes]] = [[] for _ in columns]
    for _ in range(LENGTH):
        if not any(live):
            break
        noisy, least = release(continuations(columns, live), math.sqrt(len(columns)))
        rows = iter(noisy)
        for k, prefixes in enumerate(live):
            ended, longer = [], []
            for prefix, row in zip(prefixes, rows, strict=False):
                ended += [prefix] if row[END] > least else []
                longer += [(float(row[byte]), prefix + bytes([byte])) for byte in np.flatnonzero(row[:END] > least)]
            found[k] += ended
            live[k] = [prefix for _, prefix in sorted(longer, reverse=True)[:MOST_CATEGORIES]]
    return [[word for each in words if (word := _word(each))] for words in found]


def _word(text: bytes) -> str:
    """A category's name; nothing where noise made bytes that are not text."""
    word = text.decode("utf-8", errors="ignore").strip()
    return word if word.isprintable() and word.encode() == text else ""
