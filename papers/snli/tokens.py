"""Tokens of the pairs, and where the hidden states of every pair are kept."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import numpy as np

from clipwise.data import TextDataSet, Weights
from papers.cache import fill, kept
from papers.snli.bert import tokenizer

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
