"""A zoo of unmodified models on which the engine must agree with the per-sample loop."""

from __future__ import annotations

from . import convolution, dense, direct, embedding, recurrent, transformers_media, transformers_text
from .case import Case, Data, named, shared_model

__all__ = ["CASES", "Case", "Data", "named", "shared_model"]

CASES: list[Case] = [
    *dense.CASES,
    *convolution.CASES,
    *embedding.CASES,
    *recurrent.CASES,
    *direct.CASES,
    *transformers_text.CASES,
    *transformers_media.CASES,
]
