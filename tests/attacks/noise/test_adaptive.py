"""An adaptive norm as a way around the noise: by another split of it, or by the same noise under two norms."""

from __future__ import annotations

import math

import pytest
import torch

import clipwise as cw
from clipwise.mechanisms import Rounds
from tests.core.common import sgd


class Generous(cw.AdaptiveClip):
    """Keeps next to no noise for the gradients, at the epsilon of all of it."""

    def split(self, noise_multiplier: float) -> tuple[float, float]:
        return 0.01 * noise_multiplier, 1e-3


class Exact(cw.AdaptiveClip):
    """Moves by what it likes."""

    def move(self, bound: float, within: float) -> float:
        return within


@pytest.mark.parametrize("clip", [Generous(1.0), Exact(1.0)], ids=lambda clip: type(clip).__name__)
def test_a_class_of_ones_own_cannot_split_the_noise_otherwise(clip: cw.AdaptiveClip) -> None:
    """A plan took any subclass, and the run drew a hundredth of the noise that it charged."""
    for mechanism in (None, Rounds()):
        with pytest.raises(cw.InvalidPlan, match="a class of its own"):
            cw.Plan(cw.FullBatch(4), 3, clip, 1.0, mechanism=mechanism)  # type: ignore[arg-type]


def test_two_norms_of_one_seed_do_not_share_noise() -> None:
    """A saved state with another norm is another release: the difference of the two is no less noisy than either."""
    plan = cw.Plan(cw.FullBatch(4), 2, cw.AdaptiveClip(1.0, floor=0.1), 1.0)
    released = []
    for bound in (1.0, 0.5):
        model = torch.nn.Linear(3_000, 1, bias=False)
        torch.nn.init.zeros_(model.weight)
        private = cw.Private(plan, model, sgd(model), seed=3, own_batches=True)
        private.load_state_dict({**private.state_dict(), "bound": bound})
        private.backward(0.0 * model(torch.zeros(4, 3_000)).squeeze(1))
        private.release()
        assert model.weight.grad is not None
        released.append(model.weight.grad.flatten().double() / bound)
    assert abs(float(torch.corrcoef(torch.stack(released))[0, 1])) < 4.5 / math.sqrt(3_000)
    assert float((released[0] - released[1]).std()) > 1.3 * float(released[0].std())
