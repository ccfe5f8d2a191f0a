"""Which way the clipped sum is formed, and that the choice changes no number."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from clipwise.clipping import Abadi, Layerwise
from clipwise.engine import Clipper, clip, clipped_gradients, cost
from clipwise.engine.cache import ENGINE
from clipwise.engine.graph import unrecorded
from clipwise.engine.parameters import Parameters
from clipwise.engine.room import Room


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
    real = clip._by_second_backward

    def counted(*args: object, **kwargs: object) -> object:
        calls.append(1)
        return real(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(clip, "_by_second_backward", counted)
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


def test_many_groups_share_one_second_backward(second_backwards: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "free_bytes", lambda device: 0)
    model, x = convnet()
    clipped_gradients(model(x).square().sum(1), dict(model.named_parameters()), Layerwise(Abadi(1.0)))
    assert len(second_backwards) == 1


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


@pytest.mark.parametrize("content", [None, "MemFree: 3 kB\n", "MemAvailable: much\n"])
def test_where_free_memory_is_not_known_there_is_enough(
    content: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "meminfo"
    if content is not None:
        path.write_text(content)
    monkeypatch.setattr(cost, "_MEMORY", path)
    assert cost.free_bytes(torch.device("cpu")) == 1 << 62
    path.write_text("MemFree: 3 kB\nMemAvailable:   5 kB\n")
    assert cost.free_bytes(torch.device("cpu")) == 5 << 10


def test_each_group_has_its_own_factors_also_in_a_second_backward() -> None:
    model, x = convnet()
    params = dict(model.named_parameters())
    style = Layerwise(Abadi(1.0))
    booked = clipped_gradients(model(x).square().sum(1), params, style, way="bookkeeping")
    chosen = clipped_gradients(model(x).square().sum(1), params, style, way="second_backward")
    for name, gradient in chosen.gradients.items():
        assert torch.allclose(gradient, booked.gradients[name], rtol=1e-4, atol=1e-5), name


def sequences(widths: tuple[int, ...] = (24, 48, 24), positions: int = 40) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    layers = [nn.Linear(*sides, bias=False) for sides in pairwise(widths)]
    return nn.Sequential(*layers), torch.randn(3, positions, widths[0])


def kept_shapes(model: nn.Module, x: torch.Tensor, memory: int | None) -> list[tuple[int, ...]]:
    losses = model(x).square().sum((1, 2))
    with unrecorded():
        backward = ENGINE.backward(losses, Parameters(dict(model.named_parameters())), keep=True)
    chosen = cost.kept(backward.graph, backward.plan, len(x), memory)
    return sorted(tuple(backward.plan.shapes[edge]) for edge in chosen)


def test_gradients_of_samples_are_kept_where_inner_products_cost_more_and_memory_allows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Here 40 positions of 24 and 48 numbers are 2,880, and a gradient 1,152: it takes less to keep the gradient."""
    monkeypatch.setattr(cost, "_MOVED", 40 * 2_880 / 1_152 - 1)
    model, x = sequences()
    assert kept_shapes(model, x, 0) == [(24, 48), (48, 24)]
    monkeypatch.setattr(cost, "_MOVED", 40 * 2_880 / 1_152 + 1)
    assert kept_shapes(model, x, 1 << 30) == []


def test_memory_goes_to_the_layers_where_a_byte_saves_the_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of 100 x 100 beside operands of 10 x 200 numbers take 3 * 8,000 more, those of 60 x 100 3 * 4,400."""
    monkeypatch.setattr(cost, "_MOVED", 0)
    model, x = sequences((100, 100, 60), positions=10)
    narrow, wide = 3 * 4_400 * 4, 3 * 8_000 * 4
    assert kept_shapes(model, x, narrow - 1) == []
    assert kept_shapes(model, x, narrow) == [(100, 60)]
    assert kept_shapes(model, x, narrow + wide - 1) == [(100, 60)]
    assert kept_shapes(model, x, narrow + wide) == [(100, 60), (100, 100)]
    assert kept_shapes(model, x, None) == []  # a tenth of 16,000 parameters and the outputs is less than either


def test_one_position_needs_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its norm is a product of two lengths; operands always take less."""
    monkeypatch.setattr(cost, "_MOVED", 0)
    model, x = sequences(positions=1)
    assert kept_shapes(model, x, 1 << 30) == []


def test_room_is_given_out_again_at_the_next_step() -> None:
    room, like = Room(), torch.zeros(1)
    room.begin()
    first = room.take((2, 3), like), room.take((4,), like)  # nothing is there yet
    assert [part.shape for part in first] == [(2, 3), (4,)]
    room.begin()
    parts = room.take((2, 3), like), room.take((4,), like)
    assert parts[0].data_ptr() + 6 * 4 == parts[1].data_ptr()  # side by side in one block
    assert room.take((1,), like).data_ptr() != parts[1].data_ptr() + 4 * 4  # one more than there is
    room.begin()
    assert room.take((5,), like).data_ptr() + 5 * 4 == room.take((6,), like).data_ptr()  # it has grown
    room.begin()
    assert room.take((3,), like.double()).dtype == torch.float64


@pytest.mark.parametrize("size", [4, 3])
def test_what_is_kept_changes_no_number_and_nothing_of_an_earlier_step(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clipwise.engine.plan._SMALL", 0)
    monkeypatch.setattr(cost, "_MOVED", 1)
    model, _ = sequences((30, 40, 20), positions=10)
    params = dict(model.double().named_parameters())
    clipper, expected = Clipper(params, memory=1 << 30), Clipper(params, memory=0)
    before: list[tuple[Any, Any]] = []
    for step in range(3):
        x = torch.randn(size + step, 10, 30, dtype=torch.float64)
        found, right = (one(model(x).square().sum((1, 2)), Abadi(1.0)) for one in (clipper, expected))
        before.append((found, right))
        for ours, theirs in before:
            torch.testing.assert_close(ours.norms, theirs.norms)
            for name in params:
                torch.testing.assert_close(ours.gradients[name], theirs.gradients[name])
