"""What takes the place of data and weights that are not on this machine, when a tutorial is only tried out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import clipwise as cw
from clipwise.errors import DataError

RECORDS = 400


def adult(folder: Path) -> Any:
    """A table with columns of Adult, of which one says something about the income."""
    import pandas as pd

    random = np.random.default_rng(0)
    table = {
        "age": random.integers(17, 91, RECORDS),
        "education-num": (learnt := random.integers(1, 17, RECORDS)),
        "capital-gain": random.integers(0, 99_999, RECORDS),
        "hours-per-week": random.integers(1, 100, RECORDS),
        "marital-status": random.choice(["Divorced", "Widowed"], RECORDS),
        "occupation": random.choice(["?", "Sales"], RECORDS),
        "sex": random.choice(["Female", "Male"], RECORDS),
        "income-per-year": np.where(learnt > 8, ">50K", "<=50K"),
    }
    pd.DataFrame(table).to_csv(folder / "adult.csv", index=False)
    return SimpleNamespace(paths={"adult.csv": folder / "adult.csv"})


def mnist(folder: Path) -> Any:
    """scikit-learn's digits, at the size of MNIST's."""
    digits = cw.data.load("digits")
    grown = [TensorDataset(F.interpolate(x, 28), y) for x, y in (digits.train.tensors, digits.test.tensors)]
    return cw.data.DataSet("mnist", "classification", *grown, digits.classes)


WORDS = {"negative": ("bad", "dull", "slow"), "positive": ("good", "bright", "quick")}


def _texts(name: str, classes: tuple[str, ...], second: bool) -> Any:
    """Texts of a few words, half of which say the class."""
    random = np.random.default_rng(0)
    labels = tuple(int(label) for label in random.integers(0, 2, RECORDS))
    words = [*WORDS.values()]
    texts = tuple(f"film {k} was {random.choice(words[label])} and long" for k, label in enumerate(labels))
    pairs = cw.data.Pairs(texts, texts if second else (), labels)
    return cw.data.TextDataSet(name, pairs, pairs, classes)


def imdb(folder: Path) -> Any:
    """Reviews of one sentence, of which one word says what was thought."""
    return _texts("imdb", ("negative", "positive"), second=False)


def snli(folder: Path) -> Any:
    """The same short sentences twice instead of captions."""
    return _texts("snli", ("entailment", "neutral", "contradiction"), second=True)


def _tokenizer(folder: Path) -> int:
    """Write a tokenizer that knows the words of the texts, and return how many there are."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = (
        "[PAD]",
        "[UNK]",
        "[END]",
        "film",
        "was",
        "and",
        "long",
        *(word for some in WORDS.values() for word in some),
    )
    tokenizer = Tokenizer(models.WordLevel({word: k for k, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    named = {"pad_token": "[PAD]", "unk_token": "[UNK]", "eos_token": "[END]"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=512, **named).save_pretrained(folder)
    return len(words)


def distilbert(folder: Path) -> Any:
    """A random network of its form, six layers of 16 numbers."""
    from transformers import DistilBertConfig, DistilBertModel

    size = _tokenizer(folder / "distilbert")
    config = DistilBertConfig(vocab_size=size, dim=16, hidden_dim=16, n_layers=6, n_heads=2)
    DistilBertModel(config).save_pretrained(folder / "distilbert")
    return cw.data.Weights("distilbert", folder / "distilbert")


def smollm2(folder: Path) -> Any:
    """A random network of its form, two layers of 16 numbers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    size = _tokenizer(folder / "smollm2")
    config = LlamaConfig(
        vocab_size=size, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        bos_token_id=None, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder / "smollm2")
    return cw.data.Weights("smollm2", folder / "smollm2")


STAND_INS: dict[str, Callable[[Path], Any]] = {
    each.__name__: each for each in (adult, distilbert, imdb, mnist, smollm2, snli)
}


@contextmanager
def stand_ins(folder: Path, say: Callable[[str], object]) -> Iterator[None]:
    """Let the loaders of `cw.data` return a stand-in for what they do not find, and `say` so."""

    def or_stand_in(loader: Callable[..., Any]) -> Callable[..., Any]:
        def load(wanted: Any, *arguments: Any) -> Any:
            try:
                return loader(wanted, *arguments)
            except DataError:
                name = wanted if isinstance(wanted, str) else wanted.name
                say(f"{name} is not in the cache folder: {STAND_INS[name].__doc__}")
                return STAND_INS[name](folder)

        return load

    with ExitStack() as stack:
        for name in ("load", "load_text", "load_weights", "obtain"):
            stack.enter_context(patch.object(cw.data, name, or_stand_in(getattr(cw.data, name)), create=True))
        yield
