"""Half precision is only ever read: norms, sums and noise are kept in float32 at least."""

from __future__ import annotations

import torch
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)


def widened(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums: half precision would round them beyond what one sample may move them.

    >>> widened(torch.bfloat16), widened(torch.float64)
    (torch.float32, torch.float64)
    """
    return torch.float32 if dtype in HALF else dtype


def in_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """`tensor.to(dtype)`, which takes a microsecond where there is nothing to do: a small step has dozens of them."""
    return tensor if tensor.dtype == dtype else tensor.to(dtype)
