"""Every test draws the same numbers from the global generators, whatever ran before it or made what it uses."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch


@pytest.fixture(scope="module")
def shared() -> float:
    return random.random()


@pytest.mark.parametrize("turn", range(2))
def test_the_generators_start_anew(turn: int, shared: float) -> None:
    assert shared == random.Random(1).random()
    assert random.random() == random.Random(0).random()
    assert np.random.random() == np.random.RandomState(0).random_sample()  # noqa: NPY002
    assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(0)))
