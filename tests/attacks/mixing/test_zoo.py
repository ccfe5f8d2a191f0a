"""Every model of the zoo is honest: it trains in a plain loop, and is checked or says why not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

import clipwise as cw
from tests.engine.reference import precision
from tests.zoo import CASES, Case
from tests.zoo.case import Data

from .test_mixing import modes


class Rows(Dataset[Any]):
    """A case's data, record by record."""

    def __init__(self, data: Data) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(next(iter(self._data.values())))

    def __getitem__(self, i: int) -> Any:
        return {name: values[i] for name, values in self._data.items()}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_model_of_the_zoo_is_trained(case: Case) -> None:
    dtype = precision(case)
    model, dataset = case.model(dtype=dtype), Rows(case.draw(24, dtype=dtype))
    plan = cw.Plan(cw.Poisson(len(dataset), 6), steps=2, clip=cw.Abadi(1.0), noise_multiplier=1.0)
    trained = [p for p in model.parameters() if p.requires_grad]
    private = cw.Private(plan, model, torch.optim.SGD(trained, lr=0.01), seed=1)
    for batch in private.loader(dataset):
        private.step(case.loss(model, **batch))
    assert private.ledger.steps == 2
    assert private.checked.steps or private.checked.unclear
    assert not modes()
