"""Models in half precision, whole or under autocast: accepted, and clipped to float32 accuracy."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clipwise.clipping import Normalize
from clipwise.engine import clipped_gradients, per_sample_norms
from clipwise.errors import CheckFailed, ClipwiseError
from tests.zoo import named

from .reference import flat_sum, loop_gradients, norms_of

Losses = Callable[[nn.Module, Tensor], Tensor]


class Language(nn.Module):
    """Every token many times: autograd adds thousands of rows in half precision."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm, self.head = nn.Embedding(8, 16), nn.LayerNorm(16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        ids = (x[..., 0].float().abs() * 4).long().clamp(max=7)
        return F.cross_entropy(self.head(self.norm(self.table(ids))).transpose(1, 2), ids.roll(-1, 1), reduction="none")


class Cross(nn.Module):
    """Attention over other values than the queries: the weight is split inside."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.attention(x[:, :3], x, x)[0]
        return out


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerDecoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x[:, :3], x)
        return out


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)), (64, 64)),
    "conv_group_norm": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.GroupNorm(4, 4)
        ),
        (8, 2, 8, 8),
    ),
    "prelu": (lambda: nn.Sequential(nn.Linear(8, 8), nn.PReLU(), nn.Linear(8, 3)), (6, 8)),
    "prelu_channels": (lambda: nn.Sequential(nn.Conv1d(2, 4, 3), nn.PReLU(4)), (6, 2, 8)),
    "cross_attention": (Cross, (4, 5, 8)),
    "decoder": (Decoder, (4, 5, 8)),
    "encoder": (lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), (4, 5, 8)),
    "language": (Language, (32, 24, 1)),
}


# Small gradients are lost in float16, so that nothing can be told of them; the refusal says so.
UNDERFLOWS = {(name, torch.float16, False) for name in ("decoder", "encoder")}


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "autocast"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", MODELS)
def test_half_precision_is_accepted_and_keeps_its_bound(name: str, dtype: torch.dtype, whole: bool) -> None:
    build, shape = MODELS[name]
    torch.manual_seed(0)
    model = build()
    x = torch.randn(*shape)
    if whole:
        model, x = model.to(dtype), x.to(dtype)

    def losses() -> Tensor:
        with torch.autocast("cpu", dtype=dtype, enabled=not whole):
            out = model(x)
        return out.float().flatten(1).square().mean(1) * 16

    loop = norms_of(loop_gradients(losses(), named(model)))
    if (name, dtype, whole) in UNDERFLOWS:
        with pytest.raises(ClipwiseError, match="float16"):
            per_sample_norms(losses(), named(model))
        return
    norms = per_sample_norms(losses(), named(model))
    assert norms.dtype == torch.float32
    assert ((norms.double() - loop).abs() <= 2e-2 * loop).all()
    for sample in range(2):
        only = F.one_hot(torch.tensor(sample), shape[0])
        clipped = clipped_gradients(losses() * only, named(model), Normalize(1.0))
        assert all(g.dtype == torch.float32 for g in clipped.gradients.values())
        assert 0.99 <= flat_sum(clipped.gradients).norm() <= 1 + 1e-5


@pytest.mark.parametrize("wrong", [False, True])
def test_autograds_own_sum_over_many_rows_is_not_what_counts(wrong: bool) -> None:
    """It adds the rows of a normalization's gradient up in half precision, and is off by a tenth."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 300))
    x, y = torch.randn(8, 257, 64), torch.randn(8, 257, 300) + 1
    if wrong:
        model[2].weight.register_hook(lambda gradient: 1.2 * gradient)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        losses = F.mse_loss(model(x).float(), y, reduction="none").mean((1, 2))
    with pytest.raises(CheckFailed, match="disagree with autograd") if wrong else nullcontext():
        assert len(per_sample_norms(losses, named(model))) == 8
