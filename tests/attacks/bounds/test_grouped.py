"""Grouped products in half precision: their factors and sums are float32, as everybody's are."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clipwise.clipping import Abadi
from clipwise.engine import clipped_gradients


@pytest.mark.parametrize("batch", [1, 64, 2048])
def test_one_sample_of_many_experts_adds_no_more_than_its_bound(batch: int) -> None:
    """The sum of 2,048 samples was rounded to bfloat16, where one more moved it by 4 R; a single one had 1.0025 R."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(2, 16, 16, dtype=torch.bfloat16) * 0.3)

    def losses(x: Tensor, cotangent: Tensor) -> Tensor:
        offsets = torch.tensor([(len(x) + 1) // 2, len(x)], dtype=torch.int32)
        return (F.grouped_mm(x.bfloat16(), weight, offs=offsets).float() * cotangent).sum(1)

    def clipped(counted: Tensor) -> Tensor:
        x, cotangent = torch.ones(batch + 1, 16), torch.ones(batch + 1, 16)
        found = clipped_gradients(losses(x, cotangent) * counted, {"weight": weight}, Abadi(1.0))
        return found.gradients["weight"].double()

    clipped_gradients(losses(torch.randn(8, 16), torch.randn(8, 16)), {"weight": weight}, Abadi(1.0))
    sums = [clipped(torch.arange(batch + 1) >= left_out) for left_out in range(min(batch, 8) + 1)]
    assert max(float((a - b).norm()) for a, b in pairwise(sums)) <= 1 + 1e-4
