"""Which way the clipped sum is formed, and that the choice changes no number."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from clipwise.clipping import Abadi, Layerwise
from clipwise.engine import clip, clipped_gradients, cost, run


def convnet() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.Flatten(), nn.Tanh()
    )
    return model, torch.randn(24, 1, 64, 64)


@pytest.fixture
def second_backwards(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts the sums that were formed by a second backward pass."""
    calls: list[int] = []
    real = run.by_second_backward

    def counted(*args: object, **kwargs: object) -> object:
        calls.append(1)
        return real(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(clip, "by_second_backward", counted)
    monkeypatch.setattr(cost, "_NEVER_MIND", 0)
    return calls


@pytest.mark.parametrize(("free", "expected"), [(1 << 40, 0), (0, 1)])
def test_second_backward_is_chosen_only_when_memory_is_short(
    free: int, expected: int, second_backwards: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cost, "free_bytes", lambda device: free)
    model, x = convnet()
    params = dict(model.named_parameters())
    booked = clipped_gradients(model(x).square().sum(1), params, Abadi(1.0), way="bookkeeping")
    chosen = clipped_gradients(model(x).square().sum(1), params, Abadi(1.0))
    assert len(second_backwards) == expected
    for name, gradient in chosen.gradients.items():
        assert torch.allclose(gradient, booked.gradients[name], rtol=1e-4, atol=1e-5), name


def test_many_groups_are_never_given_a_backward_each(
    second_backwards: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cost, "free_bytes", lambda device: 0)
    model, x = convnet()
    clipped_gradients(model(x).square().sum(1), dict(model.named_parameters()), Layerwise(Abadi(1.0)))
    assert not second_backwards


def test_a_bad_sample_is_left_out_also_when_memory_is_short(
    second_backwards: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cost, "free_bytes", lambda device: 0)
    model, x = convnet()
    params = dict(model.named_parameters())
    clean = clipped_gradients(model(x[1:]).square().sum(1), params, Abadi(1.0))
    x[0] = torch.nan
    spoilt = clipped_gradients(model(x).square().sum(1), params, Abadi(1.0))
    assert spoilt.bad.tolist() == [True] + [False] * 23
    for name, gradient in spoilt.gradients.items():
        assert torch.allclose(gradient, clean.gradients[name], rtol=1e-4, atol=1e-5), name


def test_free_memory_is_told_on_this_machine() -> None:
    assert 1 << 20 < cost.free_bytes(torch.device("cpu")) < 1 << 62


def test_each_group_may_be_given_a_backward_of_its_own() -> None:
    model, x = convnet()
    params = dict(model.named_parameters())
    style = Layerwise(Abadi(1.0))
    booked = clipped_gradients(model(x).square().sum(1), params, style, way="bookkeeping")
    chosen = clipped_gradients(model(x).square().sum(1), params, style, way="second_backward")
    for name, gradient in chosen.gradients.items():
        assert torch.allclose(gradient, booked.gradients[name], rtol=1e-4, atol=1e-5), name
