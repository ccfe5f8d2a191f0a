"""A finite loss whose gradient is not finite: an input of infinity behind a saturated function, a NaN behind a mask.

In float64 the length of such a row was zero, so the sample counted as one without a gradient, and the sum was NaN: one
record, and all weights of a release were.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import clipwise as cw
from clipwise.engine import clipped_gradients
from clipwise.engine.cost import Way
from clipwise.entropy import Entropy
from clipwise.errors import CheckFailed
from clipwise.noise import GaussianNoise
from tests.zoo import named

Build = Callable[[], nn.Module]


class Recurrent(nn.Module):
    """An RNN over one time."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.RNN(3, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.rnn(x[:, None])[0][:, 0]
        return out


MODELS: dict[str, Build] = {
    "linear": lambda: nn.Linear(3, 4, bias=False),
    "mlp": lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)),
    "recurrent": Recurrent,
    "convolution": lambda: nn.Sequential(nn.Unflatten(1, (1, 3)), nn.Conv1d(1, 4, 3), nn.Flatten()),
}


def losses_of(model: nn.Module, x: Tensor, *, masked: bool) -> Tensor:
    losses: Tensor = torch.tanh(model(x)).sum(1)
    return torch.where(x.isnan().any(1), 0.0, losses) if masked else losses


@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("way", ["bookkeeping", "second_backward"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_a_gradient_that_is_not_finite_contributes_zero(
    model: Build, dtype: torch.dtype, way: Way, value: float
) -> None:
    torch.manual_seed(0)
    net, x = model().to(dtype), torch.randn(5, 3, dtype=dtype)
    clipped_gradients(losses_of(net, x, masked=False), named(net), cw.Abadi(1.0), way=way)  # makes the plan
    x[0, 0] = value
    losses = losses_of(net, x, masked=math.isnan(value))
    assert bool(losses.isfinite().all())
    found = clipped_gradients(losses, named(net), cw.Abadi(1.0), way=way)
    assert found.bad.tolist() == [True, False, False, False, False]
    others = clipped_gradients(losses_of(net, x[1:], masked=False), named(net), cw.Abadi(1.0), way=way)
    for name, total in found.gradients.items():
        torch.testing.assert_close(total, others.gradients[name])


def test_a_run_with_such_a_record_goes_on() -> None:
    torch.manual_seed(0)
    model = MODELS["mlp"]().double()
    x = torch.randn(64, 3, dtype=torch.float64)
    x[5, 0] = math.inf
    plan = cw.Plan(cw.FixedSize(64, 32), 6, cw.Abadi(1.0), noise_multiplier=1.0)
    private = cw.Private(plan, model, torch.optim.SGD(model.parameters(), lr=0.1), seed=0)
    met = 0
    for (batch,) in private.loader(TensorDataset(x)):
        private.step(torch.tanh(model(batch)).sum(1))
        met += bool(batch.isinf().any())
    assert met and all(bool(p.isfinite().all()) for p in model.parameters())


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("sizes", [(30_000,), (100, 200)])
def test_a_sum_that_is_not_finite_is_not_released(value: float, sizes: tuple[int, ...]) -> None:
    sums = [torch.zeros(size) for size in sizes]
    noise = GaussianNoise(sums, Entropy(seed=0))
    sums[-1][7] = value
    with pytest.raises(CheckFailed, match="is not finite"):
        noise.release(sums, stds=[1.0] * len(sums), scale=1.0, step=0)
    noise.release([torch.zeros(size) for size in sizes], stds=[1.0] * len(sizes), scale=1.0, step=1)
