"""The frozen layers, once: pairs are tokenised, go through all encoder layers but the last, and are kept as float16.

A cache is a folder in the data folder (`CLIPWISE_DATA`), named by the weights and by a hash of everything that made it:
the pairs, the files of the weights and of the tokenizer, the longest length. It is written in shards, each whole or
not there, so that a process that was stopped continues with the next one.
"""

from __future__ import annotations

import shutil
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from clipwise.data import DataSet, TextDataSet, Weights, load_text, load_weights
from clipwise.errors import DataError
from papers.cache import cache_folder, digests_of_files, fill, kept
from papers.snli.bert import frozen_layers, synthetic_pairs, tokenizer

FORMAT = 1


@dataclass(frozen=True)
class Choice:
    """What decides the hidden states; the options of `[data]` and `[model]` alike."""

    weights: str
    """A name of `clipwise.data.load_weights`, or a folder in Hugging Face's format with a BERT in it."""
    text: str = "snli"
    """Or "synthetic": made up, for trying things out."""
    records: int | None = None
    """The first training pairs only."""
    max_length: int = 128


@dataclass(frozen=True, eq=False)
class Hidden:
    """A complete cache: where every record's states are, and the states."""

    places: dict[str, Tensor]
    """Of each part, (n, 4): shard, first row, rows, checksum of the tokens."""
    labels: dict[str, Tensor]
    shards: tuple[np.ndarray[Any, np.dtype[np.float16]], ...]
    """Memory-mapped, (tokens, width) each."""
    text: TextDataSet
    weights: Weights
    key: str

    def batch(self, places_B4: Tensor) -> tuple[Tensor, Tensor]:
        """The states of records, padded to the longest of them, and the mask (1 where there is a token)."""
        rows = places_B4.tolist()
        longest = max(count for _, _, count, _ in rows)
        hidden_BTD = np.zeros((len(rows), longest, self.shards[0].shape[1]), dtype=np.float16)
        for k, (shard, first, count, _) in enumerate(rows):
            hidden_BTD[k, :count] = self.shards[shard][first : first + count]
        mask_BT = torch.arange(longest) < places_B4[:, 2:3]
        return torch.from_numpy(hidden_BTD).float(), mask_BT

    def data(self) -> DataSet:
        """The records as `clipwise train` takes them: places in, classes out."""
        parts = [TensorDataset(self.places[part], self.labels[part]) for part in PARTS]
        return DataSet(
            name=self.text.name,
            task="classification",
            train=parts[0],
            test=parts[1],
            classes=self.text.classes,
            source=f"{self.text.source}; states of {self.weights.name} ({self.weights.source}), cache {self.key}",
            licence=self.text.licence,
            note=f"{self.text.note} The weights, {self.weights.name}: {self.weights.note}".strip(),
        )


def data(**options: Any) -> DataSet:
    """The function that `[data]` names."""
    return hidden(Choice(**options)).data()


@lru_cache(maxsize=1)
def hidden(choice: Choice) -> Hidden:
    """The cache of a choice, computed as far as it is missing."""
    text = synthetic_pairs() if choice.text == "synthetic" else load_text(choice.text)
    if choice.records is not None and choice.records < len(text.train):
        text = text.subset(choice.records, len(text.test))
    weights = load_weights(choice.weights)
    made_of = [FORMAT, SHARD, text.fingerprint, digests_of_files(weights.folder), choice.max_length]
    folder = cache_folder("snli-states", weights.name, made_of)
    tokens = tokens_of(folder, text, weights, choice.max_length)
    where = places_of(tokens)
    _compute(folder, tokens, where, weights)
    return Hidden(
        places={part: torch.from_numpy(where[part]) for part in PARTS},
        labels={part: torch.from_numpy(tokens[f"{part}_labels"]) for part in PARTS},
        shards=tuple(_shard(path) for path in _shard_paths(folder, where)),
        text=text,
        weights=weights,
        key=folder.name.rpartition("-")[2],
    )


def _check_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise DataError(
            f"the hidden states need {needed / 1e9:.1f} GB, but {folder} has {free / 1e9:.1f} GB left. Let "
            "CLIPWISE_DATA name a folder on another disk."
        )


def _shard(path: Path) -> np.ndarray[Any, np.dtype[np.float16]]:
    with kept(path):
        return np.load(path, mmap_mode="r")


def _shard_paths(folder: Path, where: dict[str, Any]) -> list[Path]:
    return [folder / f"{k:05d}.npy" for k in range(int(where["test"][-1, 0]) + 1)]


def _compute(folder: Path, tokens: dict[str, Any], where: dict[str, Any], weights: Weights) -> None:
    """Write the shards that are missing."""
    paths = _shard_paths(folder, where)
    missing = [k for k, path in enumerate(paths) if not path.is_file()]
    if not missing:
        return
    model = frozen_layers(weights.folder)
    tokens_left = sum(int(where[part][np.isin(where[part][:, 0], missing), 2].sum()) for part in PARTS)
    _check_space(folder, tokens_left * int(model.config.hidden_size) * 2)

    def make(k: int, file: BinaryIO) -> None:
        part = "train" if k <= where["train"][-1, 0] else "test"
        records = np.flatnonzero(where[part][:, 0] == k)
        np.save(file, states_of(model, tokens, part, records))

    fill("shards of hidden states", paths, make)


TOKENS_AT_ONCE = 1024


def states_of(model: torch.nn.Module, tokens: dict[str, Any], part: str, records: Any) -> Any:
    """The float16 states of consecutive records, one after the other; records of like lengths are run together."""
    lengths = tokens[f"{part}_lengths"]
    base = int(lengths[: records[0]].sum())
    counts = lengths[records]
    starts = np.cumsum(counts) - counts
    states = None
    for chosen in _alike(counts):
        longest = int(counts[chosen].max())
        mask = np.arange(longest) < counts[chosen][:, None]
        rows = (starts[chosen][:, None] + np.arange(longest))[mask]
        inputs = []
        for name in ("ids", "types"):
            padded = np.zeros(mask.shape, dtype=np.int64)
            padded[mask] = tokens[f"{part}_{name}"][base + rows]
            inputs.append(torch.from_numpy(padded))
        with torch.inference_mode():
            made = model(
                input_ids=inputs[0], token_type_ids=inputs[1], attention_mask=torch.from_numpy(mask.astype(np.int64))
            ).last_hidden_state
        if states is None:
            states = np.empty((int(counts.sum()), made.shape[2]), dtype=np.float16)
        states[rows] = made.numpy()[mask]
    return states


def _alike(counts: Any) -> Iterator[Any]:
    """Records in groups of like length, each of about `TOKENS_AT_ONCE` tokens."""
    order = np.argsort(counts, kind="stable")
    group: list[int] = []
    for k in order:
        if group and (len(group) + 1) * counts[k] > TOKENS_AT_ONCE:
            yield np.array(group)
            group = []
        group.append(int(k))
    yield np.array(group)


SHARD = 4096
"""Records of a shard: about half a minute of work, 80 MB of MiniLM's states."""
PARTS = ("train", "test")


def tokens_of(folder: Path, text: TextDataSet, weights: Weights, max_length: int) -> dict[str, Any]:
    """Token numbers without padding, from the cache or from the tokenizer; test pairs by length, so that few pad."""
    path = folder / "tokens.npz"
    fill("files of tokens", [path], lambda _, file: np.savez(file, **_tokenised(text, weights, max_length)))
    with kept(path), open(path, "rb") as file, np.load(file, allow_pickle=False) as arrays:
        return dict(arrays)


def _tokenised(text: TextDataSet, weights: Weights, max_length: int) -> dict[str, Any]:
    made = text.tokenised(tokenizer(weights.folder), max_length)
    tokens = {}
    for part, records in zip(PARTS, (made.train, made.test), strict=True):
        *inputs, labels = (tensor.numpy() for tensor in records.tensors)
        ids, mask, types = inputs if len(inputs) == 3 else (*inputs, np.zeros_like(inputs[0]))
        order = np.argsort(mask.sum(1), kind="stable") if part == "test" else np.arange(len(mask))
        real = mask[order].astype(bool)
        tokens[f"{part}_ids"] = ids[order][real].astype(np.int32)
        tokens[f"{part}_types"] = types[order][real].astype(np.int8)
        tokens[f"{part}_lengths"] = real.sum(1)
        tokens[f"{part}_labels"] = labels[order]
    return tokens


def places_of(tokens: dict[str, Any]) -> dict[str, Any]:
    """Shard, first row, rows and checksum of every record; a part begins with a shard of its own."""
    places, shards = {}, 0
    for part in PARTS:
        lengths, ids = tokens[f"{part}_lengths"], tokens[f"{part}_ids"]
        shard = np.arange(len(lengths)) // SHARD
        ends = np.cumsum(lengths)
        starts = ends - lengths
        checks = [zlib.crc32(ids[a:b].tobytes()) for a, b in zip(starts, ends, strict=True)]
        places[part] = np.stack([shard + shards, starts - starts[shard * SHARD], lengths, checks], axis=1)
        shards += int(shard[-1]) + 1
    return places
