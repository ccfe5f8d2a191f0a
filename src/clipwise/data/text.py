"""Pairs of sentences (SNLI) and single texts (IMDB): text, and the tensors that a tokenizer makes of it."""

from __future__ import annotations

import csv
import io
import json
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from clipwise.data.dataset import DataSet
from clipwise.errors import DataError
from clipwise.hashing import digest

__all__ = ["IMDB_CLASSES", "SNLI_CLASSES", "Pairs", "TextDataSet", "imdb", "snli", "snli_from_zip", "trim"]

IMDB_CLASSES = ("negative", "positive")
SNLI_CLASSES = ("entailment", "neutral", "contradiction")

Tokenizer = Callable[..., Mapping[str, Any]]


@dataclass(frozen=True)
class Pairs:
    """First sentences, second sentences and the number of the class of each pair; single texts have no second ones."""

    first: tuple[str, ...]
    second: tuple[str, ...]
    labels: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.labels)

    def head(self, count: int) -> Pairs:
        """The first `count` pairs."""
        return Pairs(self.first[:count], self.second[:count], self.labels[:count])


@dataclass(frozen=True, eq=False)
class TextDataSet:
    """Pairs of sentences, or texts, to train on and others held out; `tokenised` makes a `DataSet` of them.

    >>> pairs = Pairs(("A dog runs.",), ("An animal moves.",), (0,))
    >>> data = TextDataSet("toy", pairs, pairs, classes=("follows", "does not"))
    >>> len(data.train), len(data.fingerprint)
    (1, 64)
    """

    name: str
    train: Pairs
    test: Pairs
    classes: tuple[str, ...]
    source: str = ""
    licence: str = ""
    note: str = ""

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of every pair and label."""
        return digest([[p.first, p.second, p.labels] for p in (self.train, self.test)] + [self.classes])

    def subset(self, train: int, test: int) -> TextDataSet:
        """The first pairs of both parts; the note says so."""
        note = f"{self.note} The first {train:,} training and {test:,} test pairs.".strip()
        return replace(self, train=self.train.head(train), test=self.test.head(test), note=note)

    def tokenised(self, tokenizer: Tokenizer, max_length: int = 128) -> DataSet:
        """Token numbers, attention mask and (if the tokenizer has them) token types, then the class.

        `tokenizer` is called like one of transformers. Each part is padded to its longest pair, `max_length` at most;
        `trim` as `collate_fn` cuts a batch to its own longest.
        """
        parts = [_tokens(pairs, tokenizer, max_length) for pairs in (self.train, self.test)]
        return DataSet(
            name=self.name,
            task="classification",
            train=parts[0],
            test=parts[1],
            classes=self.classes,
            source=self.source,
            licence=self.licence,
            note=self.note,
        )


def _tokens(pairs: Pairs, tokenizer: Tokenizer, max_length: int) -> TensorDataset:
    texts = [list(pairs.first), *([list(pairs.second)] if pairs.second else [])]
    made = tokenizer(*texts, truncation=True, max_length=max_length, padding=True, return_tensors="pt")
    if "input_ids" not in made or "attention_mask" not in made:
        raise DataError(f"the tokenizer returned {', '.join(made)}; input_ids and attention_mask are needed.")
    names = ["input_ids", "attention_mask", *(["token_type_ids"] if "token_type_ids" in made else [])]
    return TensorDataset(*(made[name] for name in names), torch.tensor(pairs.labels))


def trim(samples: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Samples of a tokenised set as a batch without the columns that are padding in all of them.

    The first tensors of a sample are token numbers and mask, the last is its class; padding is on the right.

    >>> ids, mask, label = torch.tensor([7, 8, 0, 0]), torch.tensor([1, 1, 0, 0]), torch.tensor(2)
    >>> trim([(ids, mask, label)])
    [tensor([[7, 8]]), tensor([[1, 1]]), tensor([2])]
    """
    *inputs, labels = (torch.stack(list(column)) for column in zip(*samples, strict=True))
    longest = max(1, int(inputs[1].sum(dim=1).max()))
    return [*(tensor[:, :longest] for tensor in inputs), labels]


def _pairs(lines: Iterable[str]) -> Pairs:
    """Pairs with an agreed label; those without one ("-") are left out, as in all published results."""
    number = {name: k for k, name in enumerate(SNLI_CLASSES)}
    first, second, labels = [], [], []
    for line in lines:
        record = json.loads(line)
        if record["gold_label"] in number:
            first.append(record["sentence1"])
            second.append(record["sentence2"])
            labels.append(number[record["gold_label"]])
    return Pairs(tuple(first), tuple(second), tuple(labels))


def snli(train: bytes, test: bytes) -> tuple[Pairs, Pairs]:
    """Training and test pairs, from the JSON lines of SNLI."""
    return _pairs(io.TextIOWrapper(io.BytesIO(train), "utf-8")), _pairs(io.TextIOWrapper(io.BytesIO(test), "utf-8"))


def snli_from_zip(content: bytes) -> tuple[Pairs, Pairs]:
    """Training and test pairs, from the archive at the usual address."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        train, test = (archive.read(f"snli_1.0/snli_1.0_{part}.jsonl") for part in ("train", "test"))
    return snli(train, test)


def imdb(text: bytes) -> tuple[Pairs, Pairs]:
    """Film reviews, each once and without marks for new lines; a fifth held out."""
    rows = csv.DictReader(io.TextIOWrapper(io.BytesIO(text), "utf-8", newline=""))
    labels = {row["review"].replace("<br />", " "): IMDB_CLASSES.index(row["sentiment"]) for row in rows}
    reviews = list(labels)
    order = np.random.default_rng(0).permutation(len(reviews))
    parts = np.split(order, [len(order) - round(0.2 * len(order))])
    chosen = [tuple(reviews[k] for k in part) for part in parts]
    train, test = (Pairs(part, (), tuple(map(labels.__getitem__, part))) for part in chosen)
    return train, test
