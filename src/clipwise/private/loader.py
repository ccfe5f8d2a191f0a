"""The loader: a plan's batches, cut into physical ones, through an ordinary `DataLoader`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from clipwise._validate import is_count
from clipwise.entropy import Entropy
from clipwise.errors import DataError, InvalidSampling
from clipwise.hashing import digest_of
from clipwise.private.digests import UNSTEADY, Digests
from clipwise.private.evidence.collate import unchanged_generators
from clipwise.private.evidence.records import Again, copied, magnitude, scaled
from clipwise.private.parts import PhysicalBatch, cut
from clipwise.sampling import Draws, Sampling

__all__ = ["Loader"]

_OURS = ("batch_size", "batch_sampler", "drop_last", "sampler", "shuffle")
_POOL = 32  # records among which the longest and the shortest are looked for


class Host(Protocol):
    """What a loader needs of the run it feeds."""

    @property
    def steps_done(self) -> int:
        """Steps on the ledger."""
        ...

    def open(self) -> int:
        """Begin an iteration: drop an unfinished logical batch, end older iterations."""
        ...

    def offer(self, iteration: int, part: PhysicalBatch, batch: Any, again: Again) -> None:
        """The next losses belong to this part. `again` makes its batch once more, of other records."""
        ...

    def leave_batch(self, iteration: int) -> None:
        """The loop has done with a batch, whatever it did with it."""
        ...

    def leave(self, iteration: int) -> None:
        """The loop was left, at its end, by a break or an error."""
        ...

    def empty_step(self, iteration: int, part: PhysicalBatch) -> None:
        """Make the noise-only step of an empty logical batch."""
        ...


class _PartIndices(list[int]):
    """Indices that know their step, so that a worker can be seeded for them, and which of them are new."""

    step: int = 0
    part: int = 0
    new: tuple[int, ...] = ()


class _Feed:
    """The batch sampler of the `DataLoader`, which may run ahead of training; `pending` says what it has handed out."""

    def __init__(self, draws: Callable[[], Draws], records: int, steps: int, physical_batch_size: int | None) -> None:
        self._draws, self._records, self.steps, self._size = draws, records, steps, physical_batch_size
        self.seen: set[int] | None = None
        """Records that need not be looked at any more; None: none is."""
        self._start = 0
        self.pending: deque[PhysicalBatch] = deque()

    def restart(self, step: int) -> deque[PhysicalBatch]:
        self._start, self.pending = step, deque()
        return self.pending

    def __iter__(self) -> Iterator[list[int]]:
        pending, draws = self.pending, self._draws()  # of the run as it is now: it may have been restored meanwhile
        for step in range(self._start, self.steps):
            for part in cut(draws.batch(step, self._records), step, self._size):
                pending.append(part)
                if part.size:
                    indices = _PartIndices(part.indices)
                    indices.step, indices.part = step, part.part
                    indices.new = () if self.seen is None else tuple(i for i in indices if i not in self.seen)
                    yield indices


class _SeededItems(Dataset[Any]):
    """A view of the data set that seeds the global generators before each physical batch is read (seeded runs only)."""

    def __init__(self, dataset: Dataset[Any], entropy: Entropy) -> None:
        self._dataset, self._entropy = dataset, entropy

    def __getitems__(self, indices: _PartIndices) -> list[Any]:
        self._entropy.seed_globals("item", indices.step, indices.part)
        many = getattr(self._dataset, "__getitems__", None)
        if many is not None:
            items: list[Any] = many(list(indices))
            return items
        return [self._dataset[i] for i in indices]


class _LookedItems(_SeededItems):
    """The same with the digests of the records that are drawn for the first time.

    A record is read once more for this, with random numbers of its own: so a random augmentation, which differs from
    step to step, makes the same of it whenever it is looked at. If that is not what the batch has, it is read a third
    time, to tell an augmentation from a record that does not read the same twice.
    """

    def __getitems__(self, indices: _PartIndices) -> Any:
        items = super().__getitems__(indices)
        if not indices.new:
            return items, {}
        with unchanged_generators():
            places = {i: k for k, i in enumerate(indices)} if isinstance(items, list) else {}
            drawn = {i: digest_of(items[places[i]]) if i in places else None for i in indices.new}
            return items, {i: self._digest(i, drawn[i]) for i in indices.new}

    def _digest(self, index: int, drawn: bytes | None) -> bytes:
        found = self._read(index)
        if found is None or (found != drawn and found != self._read(index)):
            return UNSTEADY
        return found

    def _read(self, index: int) -> bytes | None:
        self._entropy.seed_globals("look", index)
        return digest_of(self._dataset[index])


@dataclass(frozen=True)
class _LookedCollate:
    """A collate function for the items of `_LookedItems`."""

    collate: Callable[[Any], Any]

    def __call__(self, looked: tuple[Any, dict[int, bytes]]) -> tuple[Any, dict[int, bytes]]:
        items, digests = looked
        return self.collate(items), digests


class _Again:
    """The batch of a part once more, of other records."""

    def __init__(
        self, dataset: Dataset[Any], source: Dataset[Any], collate: Callable[[Any], Any], part: PhysicalBatch
    ) -> None:
        self._dataset, self._source, self._collate, self._part = dataset, source, collate, part

    def _items(self) -> list[Any]:
        indices = _PartIndices(self._part.indices)
        indices.step, indices.part = self._part.step, self._part.part
        many = getattr(self._source, "__getitems__", None)
        items = None if many is None else many(indices)
        if not isinstance(items, list) or len(items) != len(indices):  # no such method, or one that gives whole batches
            items = [self._dataset[i] for i in indices]
        return items

    def scaled(self, kept: list[bool], scale: float) -> Any:
        with unchanged_generators():
            items = zip(self._items(), kept, strict=True)
            return self._collate([item if stays else scaled(item, scale) for item, stays in items])

    def replaced(self, kept: list[bool], longest: bool) -> Any:
        with unchanged_generators():
            length = len(self._dataset)  # type: ignore[arg-type]
            pool = [self._dataset[i] for i in {length * k // _POOL for k in range(_POOL)}]
            other = (max if longest else min)(pool, key=magnitude)
            items = zip(self._items(), kept, strict=True)
            return self._collate([item if stays else copied(other) for item, stays in items])


class Loader:
    """Iterates over the physical batches of the steps that are still to be made; iterating again continues from there.

    An empty logical batch makes its noise-only step by itself, or with `yield_empty=True` is handed out as tensors of
    length zero. With a seed, the global generators are set before every physical batch, so that dropout and
    augmentation replay too. Leaving the loop in the middle of a logical batch drops what was gathered of it.
    """

    def __init__(
        self,
        host: Host,
        dataset: Dataset[Any],
        draws: Callable[[], Draws],
        entropy: Entropy,
        steps: int,
        physical_batch_size: int | None,
        yield_empty: bool,
        options: Mapping[str, Any],
        digests: Digests | None = None,
    ) -> None:
        self._host, self._entropy, self._yield_empty = host, entropy, yield_empty
        self._dataset = dataset
        self._feed = _Feed(draws, check_dataset(dataset, draws().sampling), steps, physical_batch_size)
        options = dict(options)
        self._collate: Callable[[Any], Any] = options.get("collate_fn") or default_collate
        self._source = source = dataset
        if entropy.seed is not None:
            self._source = source = _SeededItems(dataset, entropy.child("items"))
            if options.get("generator") is None:  # else the DataLoader would draw from the global generator
                options["generator"] = torch.Generator().manual_seed(entropy.seed & 0xFFFFFFFF)
        self._digests = digests
        if digests is not None:
            self._feed.seen = set()
            source = _LookedItems(dataset, entropy.child("items"))
            options["collate_fn"] = _LookedCollate(self._collate)
        self._dataloader: DataLoader[Any] = DataLoader(source, batch_sampler=self._feed, **options)
        self._template: Any = None

    def __len__(self) -> int:
        """The steps that are still to be made, which is public; a step may have no batch, or several physical ones."""
        return self._feed.steps - self._host.steps_done

    def __iter__(self) -> Iterator[Any]:
        iteration = self._host.open()
        pending = self._feed.restart(self._host.steps_done)
        try:
            for batch in self._dataloader:
                yield from self._empties(iteration, pending)
                yield self._hand_out(iteration, pending.popleft(), self._looked_at(batch))
                self._host.leave_batch(iteration)
            yield from self._empties(iteration, pending)
            self._host.leave_batch(iteration)
        finally:
            self._host.leave(iteration)

    def _empties(self, iteration: int, pending: deque[PhysicalBatch]) -> Iterator[Any]:
        while pending and pending[0].size == 0:
            part = pending.popleft()
            if self._yield_empty:
                yield self._hand_out(iteration, part, self._empty_batch())
            else:
                self._host.empty_step(iteration, part)

    def _looked_at(self, batch: Any) -> Any:
        """The batch, after its new records were compared with what is known of them."""
        if self._digests is None or self._feed.seen is None:
            return batch
        content, digests = batch
        self._digests.note(digests)
        self._feed.seen.update(digests)
        return content

    def _hand_out(self, iteration: int, part: PhysicalBatch, batch: Any) -> Any:
        self._host.offer(iteration, part, batch, _Again(self._dataset, self._source, self._collate, part))
        self._entropy.seed_globals("model", part.step, part.part)
        return batch

    def _empty_batch(self) -> Any:
        if self._template is None:
            if not len(self._dataset):  # type: ignore[arg-type]
                raise DataError("yield_empty=True shows what a batch looks like by a record, and there is none.")
            self._template = _emptied(self._collate([self._dataset[0]]))
        return self._template


def check_dataset(dataset: Dataset[Any], sampling: Sampling) -> int:
    """The number of records. Refuses data that cannot be sampled by index, or of another length than the plan's.

    Guarantees: where the rate is public, no message has that number.
    """
    if isinstance(dataset, DataLoader):
        raise DataError("this is a DataLoader, which draws its own batches: give the data set, loader.dataset.")
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise DataError(
            f"sampling needs a data set with a length and indices (map-style), got {type(dataset).__name__}. A stream "
            "cannot be sampled; load it first, or declare your own loader's sampling in the plan."
        )
    length = len(dataset)
    if sampling.sample_size is None:
        if sampling.largest is not None and length > sampling.largest:
            raise InvalidSampling(f"the data set has more records than largest={sampling.largest} of the plan.")
    elif length != sampling.sample_size:
        raise InvalidSampling(
            f"the plan samples from {sampling.sample_size} records, the data set has {length}. Make the plan with "
            f"sample_size={length}, or with a public rate: Poisson(rate=..., batch_size=...)."
        )
    return length


def not_declared(sampling: Sampling) -> InvalidSampling:
    """What to say of batches that are not the loader's, where they were not declared."""
    return InvalidSampling(
        f"these batches do not come from private.loader, which draws them as {sampling!r} says: epsilon holds for such "
        "batches only. Iterate over private.loader(dataset). If your own loader draws them so, declare it with "
        "Private(..., own_batches=True); ledger and report repeat it."
    )


def check_options(physical_batch_size: object, options: Mapping[str, Any]) -> None:
    """Refuse physical batches of no size, and the DataLoader keywords that would change the sampling."""
    size = physical_batch_size
    if size is not None and not is_count(size):
        raise InvalidSampling(f"physical_batch_size must be a positive integer or None, got {size!r}.")
    ours = [name for name in _OURS if name in options]
    if ours:
        raise InvalidSampling(
            f"{', '.join(ours)} cannot be given: the plan's sampling decides which samples make a batch. Use "
            "physical_batch_size to limit memory."
        )
    if not options.get("in_order", True):
        raise InvalidSampling("in_order=False would mix the pieces of different logical batches.")


def _emptied(batch: Any) -> Any:
    """The same structure with a batch axis of length zero."""
    if isinstance(batch, Tensor):
        return batch[:0]
    if isinstance(batch, Mapping):
        return {key: _emptied(value) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(_emptied, batch))
    if isinstance(batch, (list, tuple)):
        plain = all(isinstance(item, (str, bytes, int, float)) for item in batch)
        return type(batch)([] if plain else map(_emptied, batch))
    raise DataError(
        f"yield_empty=True cannot make an empty {type(batch).__name__}; use a collate_fn that gives tensors, or leave "
        "it off."
    )
