"""Gradients that lie in memory, or along axes, otherwise than they mostly do: norms must be those of a loop."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clipwise.clipping import Abadi
from clipwise.engine import cache, clipped_gradients, per_sample_gradients

R = 1.0


def length(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    return float(torch.cat([(first[name] - second[name]).double().flatten() for name in first]).norm())


class TimesFirst(nn.Module):
    """GroupNorm, and a head over (T, B, C), through which nothing comes back at first."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.GroupNorm(2, 8), nn.Linear(8, 1)
        nn.init.zeros_(self.head.weight)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(x).permute(2, 0, 1)).squeeze(2).t()
        return out


def test_group_norm_reads_the_gradient_of_its_own_sample() -> None:
    """The kernel of torch does not ask for strides: one target turned the gradients of all, 61.7 R."""
    torch.manual_seed(0)
    model = TimesFirst()
    params = {name: p for name, p in model.named_parameters() if name.startswith("norm")}

    def clipped(x: Tensor, y: Tensor) -> dict[str, Tensor]:
        found: dict[str, Tensor] = clipped_gradients((model(x) - y).square().sum(1), params, Abadi(R)).gradients
        return found

    clipped(torch.randn(32, 8, 32), torch.randn(32, 32))
    with torch.no_grad():
        model.head.weight.fill_(0.5)
    x, y = torch.randn(32, 8, 32), torch.randn(32, 32)
    y[0] = 1e6
    assert length(clipped(x, y), clipped(x, y.index_fill(0, torch.tensor(0), -1e6))) <= 2 * R * (1 + 1e-5)


class Sequences(nn.Module):
    """GroupNorm before layers that want times first."""

    def __init__(self, recurrent: bool) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(3, 16, 3, padding=1), nn.GroupNorm(4, 16)
        self.body = nn.GRU(16, 16) if recurrent else nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0)
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        out = self.body(self.norm(self.conv(x)).permute(2, 0, 1))
        out = self.head(out[0][-1] if isinstance(out, tuple) else out.mean(0))
        assert isinstance(out, Tensor)
        return out


@pytest.mark.parametrize("recurrent", [True, False])
def test_group_norm_before_times_first_is_accepted(recurrent: bool) -> None:
    torch.manual_seed(0)
    model, x, y = Sequences(recurrent), torch.randn(8, 3, 6), torch.randint(5, (8,))
    losses = F.cross_entropy(model(x), y, reduction="none")
    weight = model.norm.weight
    expected = torch.stack([torch.autograd.grad(loss, weight, retain_graph=True)[0] for loss in losses])
    found = per_sample_gradients(losses, dict(model.named_parameters()))["norm.weight"]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_a_layout_that_fits_by_zeros_does_not_hide_the_true_one() -> None:
    """Rows (T, B, N): where each sample's only time lies in another half, halves look like samples, 24 R."""
    torch.manual_seed(0)
    layer, times, y = nn.Linear(5, 6), torch.arange(4).view(4, 1), torch.randn(16)
    params = dict(layer.named_parameters())

    def losses(x: Tensor, last: Tensor, y: Tensor) -> Tensor:
        hidden, read = layer(x).tanh(), (times == last).double().view(4, -1, 1, 1)
        return ((hidden - y.view(1, -1, 1, 1)) * read).square().sum((0, 2, 3))

    layer.double()
    x, later = torch.randn(4, 16, 3, 5, dtype=torch.float64), torch.randint(4, (16,))
    alone = [torch.autograd.grad(loss, layer.weight, retain_graph=True)[0] for loss in losses(x, later, y)]
    for first in torch.cartesian_prod(torch.arange(4), torch.arange(4)):
        cache.ENGINE._cache.clear()
        clipped_gradients(losses(torch.randn(4, 2, 3, 5, dtype=torch.float64), first, y[:2]), params, Abadi(R))
        found = per_sample_gradients(losses(x, later, y), params)["weight"]
        torch.testing.assert_close(found, torch.stack(alone))


@pytest.mark.parametrize("dim", [1, 2])
@pytest.mark.parametrize("batch", [2, 6])
def test_images_of_one_pixel_with_their_channels_last(batch: int, dim: int) -> None:
    """Strides of axes of length one may be any; in float64 torch's kernel refused the folded batch."""
    torch.manual_seed(0)
    conv = (nn.Conv1d if dim == 1 else nn.Conv2d)(6, 12, 3, padding=1).double()
    x = torch.randn(batch, *[1] * dim, 6, dtype=torch.float64).movedim(-1, 1)
    found = clipped_gradients(conv(x).square().flatten(1).sum(1), dict(conv.named_parameters()), Abadi(1e9))
    expected = torch.autograd.grad(conv(x).square().sum(), conv.weight)[0]
    torch.testing.assert_close(found.gradients["weight"], expected)
