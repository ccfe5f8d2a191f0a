"""A style that changes while it is in force: its noise was found once, and its clipping anew in every step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import clipwise as cw
from clipwise.errors import InvalidPlan


@dataclass
class Growing:
    R: float

    @property
    def sensitivity(self) -> float:
        return self.R

    def __call__(self, norms: Tensor) -> Tensor:
        return (self.R / norms).clamp(max=1.0)

    def grow(self) -> None:
        self.R = 100.0


def layerwise() -> tuple[cw.Layerwise, Callable[[], None]]:
    style = cw.Layerwise({"": cw.Abadi(0.01)})
    rules: Any = style.rule
    return style, lambda: rules.update({"": cw.Abadi(100.0)})


def groupwise() -> tuple[cw.Groupwise, Callable[[], None]]:
    style = cw.Groupwise({"*": cw.Abadi(0.01)})
    rules: Any = style.rules
    return style, lambda: rules.update({"*": cw.Abadi(100.0)})


def own_rule() -> tuple[Growing, Callable[[], None]]:
    rule = Growing(0.01)
    return rule, rule.grow


def run_of(clip: Any) -> tuple[cw.Private, Callable[[], Tensor]]:
    torch.manual_seed(0)
    model, x = nn.Linear(5, 1), torch.randn(8, 5)
    plan = cw.Plan(cw.FullBatch(8), 3, clip, noise_multiplier=1.0)
    private = cw.Private(plan, model, torch.optim.SGD(model.parameters(), lr=0.0), own_batches=True)
    return private, lambda: 1e3 * model(x).squeeze(1)


@pytest.mark.parametrize("made", [layerwise, groupwise, own_rule])
def test_between_steps(made: Callable[[], tuple[Any, Callable[[], None]]]) -> None:
    clip, change = made()
    private, losses = run_of(clip)
    private.step(losses())
    change()
    with pytest.raises(InvalidPlan, match="changed while it was in force"):
        private.step(losses())
    assert private.ledger.steps == 1


@pytest.mark.parametrize("made", [layerwise, groupwise, own_rule])
def test_between_clipping_and_noise(made: Callable[[], tuple[Any, Callable[[], None]]]) -> None:
    clip, change = made()
    private, losses = run_of(clip)
    private.backward(losses())
    change()
    with pytest.raises(InvalidPlan, match="changed while it was in force"):
        private.step()
