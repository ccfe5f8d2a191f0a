"""Whether a sample counts as bad, and what it contributes, is its own: the same alone and in any company.

Huge, tiny, infinite and undefined inputs; activations that saturate; gates that are closed. Noise is zero throughout.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations

import pytest
import torch
from torch import Tensor, nn

from clipwise.clipping import Abadi, Clip, Layerwise, Normalize
from clipwise.engine import clipped_gradients, per_sample_norms
from clipwise.engine.cost import Way
from tests.zoo import named

from .reference import flat_sum, loop_gradients, norms_of

MAGNITUDES = [1e-40, 1e-30, 1e-22, 1e-18, 1e-10, 1.0, 1e10, 1e18, 1e22, 1e30, 1e38, float("inf"), float("nan")]


class Gate(nn.Module):
    """A gate that is closed at the start."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gate


class Skip(nn.Module):
    """A branch beside the identity."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.branch = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.branch(x)
        return out


def zeroed(layer: nn.Linear) -> nn.Linear:
    nn.init.zeros_(layer.weight)
    return layer


MODELS: dict[str, Callable[[], nn.Module]] = {
    "tanh": lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)),
    "sigmoid": lambda: nn.Sequential(nn.Linear(4, 5), nn.Sigmoid(), nn.Linear(5, 3)),
    "relu": lambda: nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3), nn.Tanh()),
    "hardtanh": lambda: nn.Sequential(nn.Linear(4, 5), nn.Hardtanh(), nn.Linear(5, 3)),
    "softmax": lambda: nn.Sequential(nn.Linear(4, 5), nn.Softmax(-1), nn.Linear(5, 3)),
    "closed_gate": lambda: nn.Sequential(nn.Linear(4, 5), Skip(nn.Linear(5, 5), nn.Tanh(), Gate()), nn.Tanh()),
    "zero_weights": lambda: nn.Sequential(nn.Linear(4, 5), Skip(nn.Linear(5, 4), zeroed(nn.Linear(4, 5))), nn.Tanh()),
    "layer_norm": lambda: nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 3)),
}
CLIPS: dict[str, Clip] = {"flat": Abadi(1.0), "normalized": Normalize(1.0), "layerwise": Layerwise(Abadi(1.0))}  # type: ignore[dict-item]


def losses_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).reshape(len(x), -1).square().clamp(max=1e6).sum(1)


def fresh(name: str) -> nn.Module:
    torch.default_generator.manual_seed(0)  # at once; `torch.manual_seed` writes down who asks
    return MODELS[name]()


def records(rows: bool) -> Tensor:
    """One sample of each magnitude in a feature, and three ordinary ones; (B, 4) or sequences (B, 3, 4)."""
    torch.manual_seed(1)
    x = torch.randn(len(MAGNITUDES) + 3, *((3, 4) if rows else (4,)))
    for sample, magnitude in enumerate(MAGNITUDES):
        x[sample, ..., 0] = magnitude
    return x


def bad_and_sum(model: nn.Module, x: Tensor, clip: Clip) -> tuple[list[bool], Tensor]:
    clipped = clipped_gradients(losses_of(model, x), named(model), clip)
    return clipped.bad.tolist(), flat_sum(clipped.gradients)


@pytest.mark.parametrize("rows", [False, True], ids=["vectors", "sequences"])
@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("name", MODELS)
def test_a_sample_is_the_same_alone_and_in_company(name: str, clip: str, rows: bool) -> None:
    """Leave each sample out, take each alone, take the extreme ones among themselves: nobody else's part moves."""
    style, x = CLIPS[clip], records(rows)
    everybody = list(range(len(x)))
    bad, total = bad_and_sum(fresh(name), x, style)
    bound = 1.0 if clip != "layerwise" else style.sensitivity(list(dict.fromkeys(  # type: ignore[union-attr]
        key.rpartition(".")[0] for key in named(fresh(name)))))  # fmt: skip
    alone = [bad_and_sum(fresh(name), x[i : i + 1], style) for i in everybody]
    assert bad == [is_bad for (is_bad,), _ in alone]
    assert torch.isfinite(total).all()
    torch.testing.assert_close(total, torch.stack([part for _, part in alone]).sum(0), rtol=1e-4, atol=1e-4)
    for sample in everybody:
        rest = [i for i in everybody if i != sample]
        others, without = bad_and_sum(fresh(name), x[rest], style)
        assert others == [bad[i] for i in rest]
        assert (total - without).norm() <= bound * (1 + 1e-4)
    for few in ([9, 9, 9, 9], [10, 9, 8], [11, 11, 11], [12, 9, 11], [0, 1], [9, 13], [13, 9], [11, 10]):
        some, part = bad_and_sum(fresh(name), x[few], style)
        assert some == [bad[i] for i in few], few
        expected = torch.stack([alone[i][1] for i in few]).sum(0)
        torch.testing.assert_close(part, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_the_order_of_batches_does_not_matter(name: str) -> None:
    """One model and its cached plans: extreme batches first, between and last."""
    x = records(rows=False)
    batches = {"huge": [9, 9, 9, 9], "mixed": [9, 9, 9, 9, 13], "ordinary": [13, 14, 15], "one": [14], "none": [11, 12]}
    expected = {key: bad_and_sum(fresh(name), x[rows], Abadi(1.0)) for key, rows in batches.items()}
    for order in permutations(batches):
        model = fresh(name)
        for key in order:
            bad, total = bad_and_sum(model, x[batches[key]], Abadi(1.0))
            assert bad == expected[key][0], (order, key)
            torch.testing.assert_close(total, expected[key][1], rtol=1e-5, atol=1e-5)


def test_tiny_gradients_times_huge_activations_keep_their_norms() -> None:
    """Lengths of 1e-22 have lost their digits when they are squared in float32, and 1e20 brings them back."""
    torch.manual_seed(0)
    layer = nn.Linear(6, 5, bias=False)
    for scale in (1e16, 1e19, 1e22, 1e25):
        for rows in (1, 2, 3, 8):  # two: by Gram matrices
            x = torch.randn(4, rows, 6) * scale

            def losses(x: Tensor = x, scale: float = scale) -> Tensor:
                return (layer(x / 1.0) * (1e-3 / scale) ** 0.5 * (1e-3 / scale) ** 0.5).flatten(1).sum(1)

            loop = loop_gradients(losses(), named(layer))
            norms = per_sample_norms(losses(), named(layer))
            torch.testing.assert_close(norms.double(), norms_of(loop), rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("batch", [1, 2, 3])
def test_factors_are_not_rounded_to_the_dtype_of_the_losses(batch: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    for seed in range(20):
        torch.manual_seed(seed)
        x = torch.randn(batch, 6)
        clipped = clipped_gradients(model(x).square().sum(1).to(dtype), named(model), Normalize(1.0))
        assert isinstance(clipped.factors, Tensor) and clipped.factors.dtype == torch.float32
        assert flat_sum(clipped.gradients).norm() <= batch * (1 + 1e-5)


@pytest.mark.parametrize("batch", [1, 2])
def test_a_number_as_a_parameter_keeps_its_shape(batch: int) -> None:
    model = nn.Sequential(nn.Linear(4, 3), Gate())
    nn.init.ones_(model[1].gate)  # type: ignore[union-attr, arg-type]
    clipped = clipped_gradients(losses_of(model, torch.randn(batch, 4)), named(model), Abadi(1.0))
    assert {name: g.shape for name, g in clipped.gradients.items()} == {n: p.shape for n, p in model.named_parameters()}


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("width", [1024, 1025, 400_000])
def test_norms_of_long_rows_of_equal_numbers_do_not_read_low(width: int, turned: bool) -> None:
    """A running sum of float32 squares always rounds to the same side: 400 000 of them would read low by 2e-4."""
    bias = nn.Parameter(torch.zeros(width))
    for value in (0.1, 1 / 3, 0.7, 1.1):
        x = torch.full((2, width), value) * torch.tensor([[1.0], [3.0]])
        x = x.t().contiguous().t() if turned else x
        clipped = clipped_gradients(((x + bias) * x).sum(1), [bias], Abadi(1.0))
        torch.testing.assert_close(clipped.norms.double(), x.double().norm(dim=1), rtol=1e-5, atol=0)


@pytest.mark.parametrize("way", ["bookkeeping", "second_backward"])
@pytest.mark.parametrize("magnitude", [1e18, 1e25, 1e35])
@pytest.mark.parametrize("last", [float("nan"), float("inf"), 1e38, 1.0])
def test_a_bad_record_does_not_make_others_bad(last: float, magnitude: float, way: Way) -> None:
    """Whether gradients of 1e25 count must not depend on who is looked at: all of them would come or go with one."""
    torch.manual_seed(0)
    model, x = nn.Linear(4, 3), torch.rand(12, 4) * magnitude
    x[-1] = last

    def clipped(samples: Tensor) -> tuple[list[bool], Tensor]:
        found = clipped_gradients(model(samples).sum(1), named(model), Abadi(1.0), way=way)
        return found.bad.tolist(), flat_sum(found.gradients)

    (bad, total), (others, without) = clipped(x), clipped(x[:-1])
    assert bad[:-1] == others == [clipped(x[i : i + 1])[0][0] for i in range(11)]
    assert (total - without).norm() <= 1 + 1e-5


def test_norms_do_not_read_low_where_subnormal_numbers_are_zero() -> None:
    """Many numbers of 1e-20, whose squares vanish, are a part of a length that 1e20 brings back."""
    layer, x = nn.Linear(200_000, 1, bias=False), torch.full((2, 200_000), 1e-20)
    x[:, 0] = 1.2e-17
    torch.set_flush_denormal(True)
    try:
        norms = per_sample_norms(layer(x).squeeze(1) * 1e20, named(layer))
    finally:
        torch.set_flush_denormal(False)
    torch.testing.assert_close(norms.double(), 1e20 * x.double().norm(dim=1), rtol=1e-5, atol=0)
