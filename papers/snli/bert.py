"""A BERT in a folder of Hugging Face's format: its frozen layers, and the whole of it with a new head.

What `--quick` trains on: sentences that are made up and a BERT of random weights. Its numbers mean nothing."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from clipwise.data import Pairs, TextDataSet
from clipwise.errors import DataError, MissingExtra


@contextmanager
def quiet() -> Iterator[None]:
    """Without the progress bars of transformers and its words on a pooler that is left out or a head that is new."""
    try:
        from transformers.utils import logging
    except ImportError:
        raise MissingExtra("a BERT is loaded with transformers: pip install 'clipwise[hf]'.") from None
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        logging.enable_progress_bar()


def tokenizer(folder: Path) -> Any:
    """The tokenizer of the folder."""
    with quiet():
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def frozen_layers(folder: Path) -> Any:
    """Embeddings and all encoder layers but the last, without dropout."""
    with quiet():
        from transformers import AutoConfig, AutoModel

        kind = AutoConfig.from_pretrained(folder, local_files_only=True).model_type
        if kind != "bert":
            raise DataError(f"{folder} holds a model of the kind {kind!r}; a BERT (model_type 'bert') is needed.")
        model = AutoModel.from_pretrained(folder, local_files_only=True, add_pooling_layer=False).eval()
    model.encoder.layer = model.encoder.layer[:-1]
    return model


def classifier(folder: Path, classes: int) -> Any:
    """The whole network, with a head that is drawn from torch's generator."""
    with quiet():
        from transformers import AutoModelForSequenceClassification

        return AutoModelForSequenceClassification.from_pretrained(folder, num_labels=classes, local_files_only=True)


WHO = ("dog", "cat", "child", "woman", "man", "horse")
DOES = ("runs", "sleeps", "eats", "sings", "jumps")
WHERE = ("outside", "at home", "in the park", "on the beach")
CLASSES = ("entailment", "neutral", "contradiction")


def _pairs(count: int, seed: int) -> Pairs:
    """The second sentence leaves something out, adds something, or denies the first."""
    draw = random.Random(seed)
    first, second, labels = [], [], []
    for _ in range(count):
        who, does, where, label = draw.choice(WHO), draw.choice(DOES), draw.choice(WHERE), draw.randrange(3)
        first.append(f"a {who} {does}" if label == 1 else f"a {who} {does} {where}")
        second.append((f"a {who} {does}", f"a {who} {does} {where}", f"no {who} {does}")[label])
        labels.append(label)
    return Pairs(tuple(first), tuple(second), tuple(labels))


def synthetic_pairs(train: int = 240, test: int = 90) -> TextDataSet:
    """A few hundred pairs."""
    note = "Sentences that are made up by a rule: the numbers show that the code works, and nothing else."
    return TextDataSet("synthetic pairs", _pairs(train, 0), _pairs(test, 1), CLASSES, "made up here", note=note)


def write_tiny_bert(folder: Path, layers: int = 2) -> Path:
    """A folder in Hugging Face's format with a BERT of random weights, 16 wide, and its tokenizer."""
    folder.mkdir(parents=True)
    words = sorted({word for phrase in (*WHO, *DOES, *WHERE, "a", "no") for word in phrase.split()})
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    (folder / "vocab.txt").write_text("\n".join([*special, *words]) + "\n", encoding="utf-8")
    with torch.random.fork_rng(), quiet():
        from transformers import BertConfig, BertModel, BertTokenizerFast

        torch.manual_seed(0)
        config = BertConfig(
            vocab_size=len(special) + len(words),
            hidden_size=16,
            num_hidden_layers=layers,
            num_attention_heads=2,
            intermediate_size=32,
            max_position_embeddings=128,
            initializer_range=0.3,  # with the usual 0.02 it answers nearly the same to everything
        )
        BertTokenizerFast.from_pretrained(folder).save_pretrained(folder)
        BertModel(config).save_pretrained(folder)
    return folder
