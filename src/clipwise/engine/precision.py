"""Half precision is only ever read: norms, sums and noise are kept in float32 at least."""

from __future__ import annotations

import torch

HALF = (torch.float16, torch.bfloat16)


def widened(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums: half precision would round them beyond what one sample may move them.

    >>> widened(torch.bfloat16), widened(torch.float64)
    (torch.float32, torch.float64)
    """
    return torch.float32 if dtype in HALF else dtype
