"""A zoo of unmodified models on which the engine must agree with the per-sample loop."""

from __future__ import annotations

from . import dense, direct, embedding, transformers_media, transformers_text
from .case import Case, Data, named, shared_model, under_autocast

__all__ = ["BY_NAME", "CASES", "Case", "Data", "named", "shared_model"]

_PLAIN: list[Case] = [
    *dense.CASES,
    *embedding.CASES,
    *direct.CASES,
    *transformers_text.CASES,
    *transformers_media.CASES,
]

_ROUNDED = ["mlp", "conv2d", "layer_norm", "embedding_tied_head", "attention_batch_first", "bert", "gpt2", "vit"]

CASES = [*_PLAIN, *(under_autocast(case) for case in _PLAIN if case.name in _ROUNDED)]
BY_NAME = {case.name: case for case in CASES}
