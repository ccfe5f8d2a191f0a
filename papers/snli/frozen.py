"""The frozen layers, once: pairs are tokenised, go through all encoder layers but the last, and are kept as float16.

A cache is a folder in the data folder (`CLIPWISE_DATA`), named by the weights and by a hash of everything that made it:
the pairs, the files of the weights and of the tokenizer, the longest length. It is written in shards, each whole or
not there, so that a process that was stopped continues with the next one.
"""

from __future__ import annotations

import shutil
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
from papers.snli.bert import frozen_layers
from papers.snli.states import states_of
from papers.snli.synthetic import synthetic_pairs
from papers.snli.tokens import PARTS, SHARD, places_of, tokens_of

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
