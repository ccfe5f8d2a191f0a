"""dL/dt = -(dL/df) H C (dL/df)^T and its layerwise form, against real small-step training."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

import clipwise as cw
from clipwise.errors import InvalidLosses, InvalidPlan
from tests.ntk.common import Opaque, gap, problem, squared_error

TASKS = [("mlp", 1, "mse"), ("mlp", 3, "mse"), ("mlp", 3, "cross_entropy"), ("mlp", 2, "other"), ("cnn", 1, "mse"),
         ("cnn", 4, "cross_entropy"), ("transformer", 1, "mse"), ("transformer", 3, "cross_entropy")]  # fmt: skip
CLIPS = {
    "none": cw.NoClip(),
    "batch": cw.BatchClip(1.0),
    "abadi": cw.Abadi(0.3),
    "automatic": cw.Automatic(0.5, 0.1),
    "normalize": cw.Normalize(0.5),
    "global": cw.Global(3.0),
    "global scaled": cw.GlobalScaled(0.5, 3.0),
    "layerwise": cw.Layerwise(cw.Abadi(0.2)),
    "groupwise": cw.Groupwise({"*bias": cw.Abadi(0.1), "*": cw.Normalize(0.4)}),
}


def trained_rate(task: tuple[Any, ...], clip: Any, step: float) -> float:
    """(L after one step of full-batch training by `Private`, without noise, minus L before) over the step."""
    model, loss_fn, x, y = task
    model = copy.deepcopy(model).eval()
    before = float(loss_fn(model(x), y).mean().detach())
    optimizer = torch.optim.SGD(model.parameters(), lr=step)
    plan = cw.Plan(sampling=cw.FullBatch(len(x)), steps=1, clip=clip, noise_multiplier=0.0)
    private = cw.Private(plan, model, optimizer, seed=0)
    for xb, yb in private.loader(TensorDataset(x, y)):
        private.step(loss_fn(model(xb), yb))
    return (float(loss_fn(model(x), y).mean().detach()) - before) / step


@pytest.mark.parametrize("clip", [CLIPS["none"], CLIPS["abadi"], CLIPS["layerwise"]], ids=["none", "flat", "layerwise"])
@pytest.mark.parametrize(("kind", "outputs", "loss"), TASKS)
def test_the_formula_is_what_training_does(kind: str, outputs: int, loss: str, clip: Any) -> None:
    task = problem(kind, outputs, loss)
    formula = cw.ntk.analyse(*task, clip).loss_rate
    h = 1e-4
    seen = 2 * trained_rate(task, clip, h / 2) - trained_rate(task, clip, h)  # the error of order h cancels
    assert formula == pytest.approx(seen, rel=1e-5)
    assert formula == pytest.approx(cw.ntk.measured_loss_rate(*task, clip, step=1e-5), rel=1e-5)
    assert formula == pytest.approx(cw.ntk.loss_rate(*task, clip), rel=1e-10)


@pytest.mark.parametrize("name", CLIPS)
def test_every_rule_and_style(name: str) -> None:
    task, clip = problem("mlp", 2, "mse"), CLIPS[name]
    found = cw.ntk.analyse(*task, clip)
    assert found.loss_rate == pytest.approx(cw.ntk.loss_rate(*task, clip), rel=1e-10)
    if name != "global":  # a factor that jumps has no derivative to compare with, though none jumps here
        assert found.loss_rate == pytest.approx(cw.ntk.measured_loss_rate(*task, clip, step=1e-5), rel=1e-5)


@pytest.mark.parametrize("name", CLIPS)
def test_factors_follow_from_the_kernel(name: str) -> None:
    """|g_i|^2 = (dl_i/df_i) H_ii (dl_i/df_i)^T, for the whole and for every group."""
    model, loss_fn, x, y = problem("mlp", 2, "mse")
    found = cw.ntk.analyse(model, loss_fn, x, y, CLIPS[name])
    n, K = len(x), 2
    slope = (n * found.output_gradient).view(n, K)
    layers = cw.ntk.layer_kernels(model, x)

    def norms(H: Tensor) -> Tensor:
        blocks = torch.stack([H[K * i : K * i + K, K * i : K * i + K] for i in range(n)])
        return torch.einsum("ik,ikl,il->i", slope, blocks, slope).sqrt()

    if isinstance(found.factors, Tensor):
        assert torch.allclose(found.factors, found.clip.rule_of("")(norms(sum(layers.values()))), rtol=1e-9)
    elif name == "layerwise":
        for layer, H in layers.items():
            assert torch.allclose(found.factors[layer], found.clip.rule_of(layer)(norms(H)), rtol=1e-9)
    else:
        assert set(found.factors) == {"*bias", "*"}


def test_mse_of_section_3() -> None:
    """dL/dt = -4 (f - y)^T H (f - y)/n^2 for squared errors without clipping."""
    model, loss_fn, x, y = problem("mlp", 1, "mse")
    r = (model(x) - y).detach().flatten()
    expected = -4 * float(r @ cw.ntk.kernel(model, x) @ r) / len(x) ** 2
    assert cw.ntk.loss_rate(model, loss_fn, x, y, cw.NoClip()) == pytest.approx(expected, rel=1e-10)


def test_analysis_says_what_it_is_of() -> None:
    task = problem("mlp", 3, "cross_entropy")
    flat = cw.ntk.analyse(*task, cw.Abadi(0.1))
    assert isinstance(flat.factors, Tensor) and flat.factors.shape == (6,) and flat.fraction_clipped == 1.0
    H = cw.ntk.kernel(task[0], task[2])
    assert gap(flat.matrix, H @ torch.diag(flat.factors.repeat_interleave(3))) < 1e-12
    assert not flat.symmetric and flat.positive_eigenvalues and flat.min_eigenvalue >= -flat.tolerance
    large = cw.ntk.analyse(*task, cw.Layerwise(cw.Abadi(1e6)))
    assert gap(large.matrix, H) < 1e-12 and large.fraction_clipped == 0.0
    assert large.symmetric and large.positive_quadratic and large.positive_eigenvalues


def test_descent_compares_clipped_and_true_gradient() -> None:
    task = problem("mlp", 1, "mse")
    free = cw.ntk.descent(*task, cw.NoClip())
    assert free.alignment == pytest.approx(1.0) and free.loss_rate == pytest.approx(free.unclipped_rate)
    clipped = cw.ntk.descent(*task, cw.Abadi(0.1))
    assert -1.0 <= clipped.alignment < 1.0 and clipped.fraction_clipped == 1.0
    length = sum(float(g.square().sum()) for g in clipped.clipped.values()) ** 0.5
    assert clipped.loss_rate == pytest.approx(-clipped.alignment * length * (-clipped.unclipped_rate) ** 0.5)


def test_gradients_sample_by_sample_where_the_engine_has_no_rule() -> None:
    torch.manual_seed(0)
    task = Opaque().double(), squared_error, torch.randn(5, 3).double(), torch.randn(5, 2).double()
    for clip in (cw.Abadi(0.2), cw.Layerwise(cw.Abadi(0.2))):
        found = cw.ntk.analyse(*task, clip)
        assert found.loss_rate == pytest.approx(cw.ntk.measured_loss_rate(*task, clip, step=1e-5), rel=1e-5)


def test_what_is_no_loss_per_sample_is_refused() -> None:
    model, _, x, y = problem("mlp", 2, "mse")
    with pytest.raises(InvalidLosses, match="one loss per sample"):
        cw.ntk.analyse(model, lambda f, y: (f - y).square().mean(), x, y, cw.Abadi(1.0))
    with pytest.raises(InvalidPlan, match="schedule"):
        cw.ntk.loss_rate(model, lambda f, y: (f - y).square().sum(1), x, y, cw.MixUp(cw.Abadi(1.0), cw.Abadi(2.0), 0.5))
