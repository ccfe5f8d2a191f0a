"""Odd networks and odd numbers: fitted samples, one sample, nothing finite, frozen, unused, sparse, recurrent parts."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import clipwise as cw
from clipwise.errors import ClipwiseError, DataError, InvalidLosses, NotConverged
from tests.ntk.common import Opaque, gap, plain_jacobian, problem, squared_error

NOTHING_CLIPPED = [cw.NoClip(), cw.Abadi(1e6), cw.Layerwise(cw.Abadi(1e6)), cw.Global(1e6)]
Task = tuple[nn.Module, Any, Tensor, Tensor]


def task() -> Task:
    return problem("mlp", 2, "mse", n=4)


def fitted(model: nn.Module, x: Tensor, y: Tensor, samples: slice) -> Tensor:
    """The targets, but for some samples what the model says."""
    return torch.cat([model(x)[samples].detach(), y[len(x[samples]) :]])


# -- gradients of zero: training leaves them out, the theory must not call that clipping


@pytest.mark.parametrize("clip", NOTHING_CLIPPED, ids=str)
@pytest.mark.parametrize("samples", [slice(0, 1), slice(0, 4)], ids=["one", "all"])
def test_a_fitted_sample_is_not_clipped(clip: Any, samples: slice) -> None:
    model, loss_fn, x, y = task()
    found = cw.ntk.analyse(model, loss_fn, x, fitted(model, x, y, samples), clip)
    assert found.fraction_clipped == 0.0 and gap(found.matrix, cw.ntk.kernel(model, x)) < 1e-12
    assert found.symmetric and found.positive_quadratic and found.positive_eigenvalues


def test_rules_say_what_becomes_of_a_zero_gradient() -> None:
    model, loss_fn, x, y = task()
    y = fitted(model, x, y, slice(0, 1))
    expected = {cw.Abadi(0.1): 1.0, cw.Automatic(1.0, 0.5): 2.0, cw.Normalize(1.0): 0.0, cw.Global(1e-3): 1.0}
    for rule, factor in expected.items():
        factors = cw.ntk.analyse(model, loss_fn, x, y, rule).factors
        assert isinstance(factors, Tensor) and float(factors[0]) == factor
    factors = cw.ntk.analyse(model, loss_fn, x, y, cw.Global(1e-3)).factors
    assert isinstance(factors, Tensor) and factors[1:].tolist() == [0.0] * 3, "long gradients stay left out"
    batch = cw.ntk.analyse(model, loss_fn, x, y, cw.BatchClip(1.0))
    assert batch.symmetric and isinstance(batch.factors, Tensor) and len(batch.factors.unique()) == 1


def test_zero_gradients_where_the_engine_has_no_rule() -> None:
    torch.manual_seed(0)
    model, x = Opaque().double(), torch.randn(4, 3).double()
    y = fitted(model, x, torch.randn(4, 2).double(), slice(0, 2))
    found = cw.ntk.analyse(model, squared_error, x, y, cw.NoClip())
    assert found.fraction_clipped == 0.0 and found.symmetric


def test_nothing_moves_where_every_sample_is_fitted(tmp_path: Path) -> None:
    model, loss_fn, x, y = task()
    y = fitted(model, x, y, slice(0, 4))
    assert math.isnan(cw.ntk.descent(model, loss_fn, x, y, cw.Abadi(1.0)).alignment)
    assert float(cw.ntk.gradient_flow(model, loss_fn, x, y, cw.Normalize(1.0), 1.0, points=3).loss.max()) == 0.0
    cw.ntk.NTKMonitor(model, loss_fn, x, y, cw.Abadi(1.0)).save(tmp_path / "monitor.json")
    saved = json.loads((tmp_path / "monitor.json").read_text(), parse_constant=pytest.fail)  # NaN is no JSON
    assert saved["records"][0]["alignment"] is None and saved["records"][0]["loss"] == 0.0


# -- one sample, no sample


@pytest.mark.parametrize("clip", [cw.Abadi(0.1), cw.Layerwise(cw.Abadi(0.1))], ids=["flat", "layerwise"])
def test_one_sample_is_never_a_conflict(clip: Any) -> None:
    """With one output and one sample M is a positive number."""
    model, loss_fn, x, y = problem("mlp", 1, "mse", n=1)
    found = cw.ntk.analyse(model, loss_fn, x, y, clip)
    assert found.matrix.shape == (1, 1) and found.positive_quadratic and found.positive_eigenvalues
    assert found.loss_rate == pytest.approx(cw.ntk.measured_loss_rate(model, loss_fn, x, y, clip, 1e-5), rel=1e-5)
    flow = cw.ntk.gradient_flow(model, loss_fn, x, y, clip, 1.0, points=4)
    assert bool((flow.loss.diff() < 0).all())


# -- what is refused, and how


class Sum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).sum()


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 2, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(torch.complex128) @ self.weight).abs()


def bad_tasks() -> list[Any]:
    model, loss_fn, x, y = task()
    broken = x.clone()
    broken[2] = math.nan
    frozen = problem("mlp", 2, "mse", n=4)[0].requires_grad_(False)

    def constant(outputs: Tensor, y: Tensor) -> Tensor:
        return torch.ones(len(outputs), dtype=torch.float64)

    cases: dict[str, tuple[Task, type[ClipwiseError], str]] = {
        "not finite": ((model, loss_fn, broken, y), DataError, "1 of 4 samples are not finite, the first is 2"),
        "no sample": ((model, loss_fn, x[:0], y[:0]), DataError, "at least one"),
        "all frozen": ((frozen, loss_fn, x, y), DataError, "no trainable parameter"),
        "complex": ((Complex(), loss_fn, x, y), DataError, "complex"),
        "one number": ((Sum(), loss_fn, x, y), DataError, "single number"),
        "constant loss": ((model, constant, x, y), InvalidLosses, "depend|require grad"),
    }
    return [pytest.param(*case, id=name) for name, case in cases.items()]


@pytest.mark.parametrize("ask", ["analyse", "gradient_flow"])
@pytest.mark.parametrize(("bad", "error", "message"), bad_tasks())
def test_what_the_theory_cannot_treat_is_refused(bad: Task, error: Any, message: str, ask: str) -> None:
    more = (1.0,) if ask == "gradient_flow" else ()
    with pytest.raises(error, match=message):
        getattr(cw.ntk, ask)(*bad, cw.Abadi(1.0), *more)


def test_a_penalty_on_the_weights_is_refused() -> None:
    model, loss_fn, x, y = task()
    weights = dict(model.named_parameters())["0.weight"]
    temperature = torch.ones((), dtype=torch.float64, requires_grad=True)
    with pytest.raises(InvalidLosses, match="penalty"):
        cw.ntk.analyse(model, lambda f, y: loss_fn(f, y) + weights.square().sum(), x, y, cw.Abadi(1.0))
    warmer = cw.ntk.analyse(model, lambda f, y: loss_fn(f, y) * temperature, x, y, cw.Abadi(1.0))
    assert warmer.loss_rate == cw.ntk.analyse(model, loss_fn, x, y, cw.Abadi(1.0)).loss_rate, "no weight of the model"


def test_a_kernel_shows_what_is_not_finite() -> None:
    model, _, x, _ = task()
    x[2] = math.nan
    for route in ("gram", "jacobian"):
        H = cw.ntk.kernel(model, x, route=route)  # type: ignore[arg-type]
        bad = torch.zeros(8, dtype=torch.bool)
        bad[4:6] = True
        assert bool(H[bad].isnan().all()) and bool(H[~bad][:, ~bad].isfinite().all())


def test_the_monitor_records_a_run_that_diverged() -> None:
    model, loss_fn, x, y = task()
    monitor = cw.ntk.NTKMonitor(model, loss_fn, x, y, cw.Layerwise(cw.Abadi(1.0)), every=1)
    with torch.no_grad():
        next(model.parameters()).fill_(math.nan)
    record = monitor.update()
    assert record is not None and math.isnan(record.loss) and math.isnan(record.min_quadratic)
    assert not (record.symmetric or record.positive_quadratic or record.positive_eigenvalues)
    assert monitor.to_dict()["records"][1]["loss"] is None
    cw.plots.ntk_monitor({"run": monitor})


def test_flows_that_explode_end() -> None:
    model, _, x, y = task()
    with pytest.raises(NotConverged):
        cw.ntk.gradient_flow(model, lambda f, y: -f.pow(4).sum(1), x, y, cw.NoClip(), 1e3, max_evaluations=500)


@pytest.mark.parametrize(
    ("options", "message"), [({"points": 2.5}, "points"), ({"points": 1}, "points"), ({"method": "Euler"}, "method")]
)
def test_options_of_the_solver(options: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        cw.ntk.gradient_flow(*task(), cw.Abadi(1.0), 1.0, **options)


def test_clipped_kernels_need_groups_that_exist() -> None:
    model, _, x, _ = task()
    with pytest.raises(DataError, match="one factor per sample"):
        cw.ntk.clipped_kernel(model, x, {"a": ["0.weight"]}, {"b": torch.ones(4)})
    with pytest.raises(DataError, match=r"named 9\.weight"):
        cw.ntk.clipped_kernel(model, x, {"a": ["9.weight"]}, {"a": torch.ones(4)})


def test_matrices_of_other_kinds() -> None:
    assert not cw.ntk.properties(torch.tensor([[1, 2], [2, 1]])).positive_quadratic
    assert cw.ntk.properties(torch.eye(2, requires_grad=True)).positive_quadratic
    assert cw.ntk.properties(torch.zeros(3, 3)).positive_eigenvalues
    with pytest.raises(DataError, match="complex"):
        cw.ntk.properties(torch.eye(2, dtype=torch.complex64))


# -- networks of other kinds


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cell(x)[0][:, -1])


class Branching(nn.Module):
    """Which layer a sample meets depends on its values: `vmap` cannot run it."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([(self.one if float(row.sum()) > 0 else self.two)(row) for row in x])


class Spare(nn.Module):
    """A layer that nothing reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.spare = nn.Linear(3, 2), nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(9, 4, sparse=True, padding_idx=0), nn.Linear(4, 2)

    def forward(self, index: Tensor) -> Tensor:
        return self.head(self.table(index).mean(1))


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv1d(1, 4, 3), nn.BatchNorm1d(4), nn.ReLU(), nn.GroupNorm(2, 4), nn.Flatten())
        self.head = nn.Linear(28, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


ODD: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "recurrent": (Recurrent, lambda: torch.randn(4, 6, 3).double()),
    "branching": (Branching, lambda: torch.randn(4, 3).double()),
    "a layer that is not reached": (Spare, lambda: torch.randn(4, 3).double()),
    "sparse": (Sparse, lambda: torch.randint(0, 9, (4, 5))),
    "batch and group norms": (Normed, lambda: torch.randn(4, 1, 9).double()),
    "an output per position": (lambda: nn.Linear(3, 2), lambda: torch.randn(4, 5, 3).double()),
}


@pytest.mark.parametrize("kind", ODD)
def test_networks_of_other_kinds(kind: str) -> None:
    torch.manual_seed(0)
    model, x = ODD[kind][0]().double().eval(), ODD[kind][1]()
    outputs = model(x).detach()
    y = outputs + torch.randn_like(outputs)
    if kind != "sparse":  # plain autograd has no sparse rows
        J = torch.cat(list(plain_jacobian(model, x).values()), 1)
        assert gap(cw.ntk.kernel(model, x), J @ J.T) < 1e-10
    for clip in (cw.Abadi(0.2), cw.Layerwise(cw.Abadi(0.2))):
        work = (model, lambda f, y: (f - y).flatten(1).square().sum(1), x, y, clip)
        found = cw.ntk.analyse(*work)
        assert found.loss_rate == pytest.approx(cw.ntk.measured_loss_rate(*work, step=1e-5), rel=1e-5)
        flow = cw.ntk.gradient_flow(*work, 0.1, points=2)
        assert float(flow.loss_rate[0]) == pytest.approx(found.loss_rate, rel=1e-9)


@pytest.mark.parametrize("clip", [cw.Abadi(0.2), cw.Layerwise(cw.Abadi(0.2))], ids=["flat", "layerwise"])
def test_single_precision_agrees_with_double(clip: Any) -> None:
    model, loss_fn, x, y = problem("mlp", 3, "mse", n=6)
    double = cw.ntk.analyse(model, loss_fn, x, y, clip)
    single = cw.ntk.analyse(model.float(), loss_fn, x.float(), y.float(), clip)
    assert single.matrix.dtype == torch.float32 and gap(single.matrix.double(), double.matrix) < 1e-5
    assert single.loss_rate == pytest.approx(double.loss_rate, rel=1e-5)
    assert single.symmetric == double.symmetric and single.positive_eigenvalues == double.positive_eigenvalues


@pytest.mark.parametrize("clip", [cw.Abadi(0.2), cw.Layerwise(cw.Abadi(0.2))], ids=["flat", "layerwise"])
def test_frozen_layers_take_no_part(clip: Any) -> None:
    model, loss_fn, x, y = problem("mlp", 3, "mse", n=6)
    model[0].requires_grad_(False)
    hidden = model[1](model[0](x)).detach()
    found = cw.ntk.analyse(model, loss_fn, x, y, clip)
    head = cw.ntk.analyse(model[2], loss_fn, hidden, y, clip)
    assert gap(found.matrix, head.matrix) < 1e-12 and found.loss_rate == pytest.approx(head.loss_rate)
    flow = cw.ntk.gradient_flow(model, loss_fn, x, y, clip, 0.5, points=2)
    assert set(flow.shapes) == {"2.weight", "2.bias"} and float(flow.loss[-1]) < float(flow.loss[0])
