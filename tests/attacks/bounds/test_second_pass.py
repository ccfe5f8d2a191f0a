"""A second backward pass that computes with other numbers than the first, which the norms were found from."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from clipwise.clipping import Abadi, Layerwise, Rule, Style
from clipwise.engine import clipped_gradients
from clipwise.errors import CheckFailed


def losses(model: nn.Module, x: Tensor, preserve: bool) -> Tensor:
    """Of one sample that counts and one that adds nothing."""
    found: Tensor = checkpoint(model, x, use_reentrant=False, preserve_rng_state=preserve)
    return found.square().sum(1) * torch.tensor([1e3, 0.0])


def contribution(preserve: bool, clip: Rule | Style, seed: int) -> float:
    """The length of what the sample adds, with dropout that was almost off when the plan was made."""
    torch.manual_seed(seed)
    dropout = nn.Dropout(1e-7)
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), dropout, nn.Linear(64, 1))
    x, params = torch.randn(2, 8), dict(model.named_parameters())
    for rate in (1e-7, 1e-7, 0.5):
        dropout.p = rate
        found = clipped_gradients(losses(model, x, preserve), params, clip, way="second_backward")
    return float(torch.stack([g.double().norm() for g in found.gradients.values()]).norm())


@pytest.mark.parametrize("clip", [Abadi(1.0), Layerwise(Abadi(2**-0.5))], ids=["flat", "layerwise"])
def test_dropout_that_is_drawn_again_never_lets_more_through(clip: Rule | Style) -> None:
    refused = []
    for seed in range(8):
        try:
            assert contribution(False, clip, seed) <= 1 + 1e-4
        except CheckFailed as error:
            refused.append(str(error))
    assert refused
    assert all("preserve_rng_state" in message for message in refused)


def test_dropout_that_is_kept_is_no_matter() -> None:
    assert contribution(True, Abadi(1.0), 0) == pytest.approx(1)
