"""A BERT in a folder of Hugging Face's format: its frozen layers, and the whole of it with a new head."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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
