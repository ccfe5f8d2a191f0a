"""Table 1 and Theorems 1 and 2: every tick as a property, every cross by an instance that the search found.

The theory page and what it is made from: the committed results support what the page says.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import clipwise as cw
from papers.theory import order
from papers.theory.__main__ import failures, load_instances
from papers.theory.networks import Architecture, Case, Clipping, random_case
from papers.theory.search import positive_definite, rise, unsettled
from papers.theory.table import ROWS

INSTANCES = load_instances()
NETWORK = Architecture("mlp", (2, 8, 1))
UNCLIPPED = [
    pytest.param(Clipping("none"), id="none"),
    pytest.param(Clipping("batch", (0.5,)), id="batch"),
    pytest.param(Clipping("abadi", (1e6,)), id="large flat"),
    pytest.param(Clipping("abadi", (1e6,), True), id="large layerwise"),
]
SMALL = [
    pytest.param(Clipping(rule, numbers, layerwise), id=f"{rule} {'layerwise' if layerwise else 'flat'}")
    for rule, numbers in (("abadi", (0.3,)), ("automatic", (0.3, 0.01)), ("normalize", (0.3,)))
    for layerwise in (False, True)
]


def cases(clipping: Clipping, count: int = 8, t_end: float = 1.0) -> list[Case]:
    """Random networks whose kernel is positive definite."""
    found = [random_case(seed, NETWORK, 4, clipping, t_end, outliers=False) for seed in range(count)]
    return [case for case in found if positive_definite(case)]


def instance(name: str) -> Case:
    return Case.from_dict(INSTANCES[name]["case"])


# -- Theorem 2 and the rows of Table 1 that have only ticks


@pytest.mark.parametrize("clipping", UNCLIPPED)
def test_without_clipping_the_matrix_is_h(clipping: Clipping) -> None:
    for case in cases(clipping):
        found, H = cw.ntk.analyse(*case.arguments()), cw.ntk.kernel(case.model(), case.data[0])
        factor = float(found.matrix.trace() / H.trace())
        assert torch.allclose(found.matrix, factor * H, rtol=1e-9) and 0 < factor <= 1 + 1e-12
        assert found.symmetric and found.positive_quadratic and found.positive_eigenvalues
        assert found.min_quadratic > 0 and found.loss_rate < 0


@pytest.mark.slow
@pytest.mark.parametrize("clipping", UNCLIPPED)
def test_without_clipping_the_loss_falls_to_zero(clipping: Clipping) -> None:
    case = random_case(10_003, NETWORK, 4, clipping, 1000.0 if clipping.rule == "batch" else 200.0, outliers=False)
    flow = case.flow(points=51, atol=1e-10)
    assert bool((flow.loss_rate <= 1e-15).all()) and rise(flow.loss) < 1e-9
    assert float(flow.loss[-1]) < 1e-3 * float(flow.loss[0]) and positive_definite(case, flow)


# -- Theorem 1: what small clipping norms keep


@pytest.mark.slow
@pytest.mark.parametrize("clipping", [param for param in SMALL if "flat" in str(param.id)])
def test_flat_clipping_keeps_eigenvalues_positive(clipping: Clipping) -> None:
    for case in cases(clipping, 20):
        found = cw.ntk.analyse(*case.arguments())
        assert found.fraction_clipped > 0 and not found.symmetric
        assert found.positive_eigenvalues and found.min_eigenvalue > 0
        general = cw.ntk.properties(found.matrix)  # by the solver that does not know that H C is a product
        assert general.positive_eigenvalues
        assert general.min_eigenvalue == pytest.approx(found.min_eigenvalue, rel=1e-4)


def test_a_flat_flow_at_rest_is_at_zero_loss() -> None:
    """Theorem 1 (4) in the form that holds: |dw/dt|^2 = (Cg)^T H (Cg) >= least eigenvalue of H * |C dL/df|^2."""
    for case in cases(Clipping("abadi", (0.3,)), 20):
        found, at = cw.ntk.analyse(*case.arguments()), cw.ntk.descent(*case.arguments())
        assert isinstance(found.factors, torch.Tensor)
        speed = sum(float(part.square().sum()) for part in at.clipped.values())
        least = float(torch.linalg.eigvalsh(cw.ntk.kernel(case.model(), case.data[0]))[0])
        pushes = float((found.factors * found.output_gradient).square().sum())
        assert speed >= least * pushes * (1 - 1e-9) > 0


@pytest.mark.slow
def test_flat_flows_come_to_zero() -> None:
    case = random_case(10_003, NETWORK, 4, Clipping("abadi", (0.5,)), 400.0, outliers=False)
    flow = case.flow(points=21, atol=1e-10)
    assert float(flow.loss[-1]) < 1e-6 * float(flow.loss[0]) and float(flow.speed[-1]) < 1e-3


def distance_to_solution(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights of a linear model, and the solution with zero loss that is nearest to zero."""
    x, y = case.data
    return torch.tensor(case.weights, dtype=torch.float64), torch.linalg.lstsq(x, y.unsqueeze(1)).solution.squeeze(1)


@pytest.mark.parametrize(
    ("rule", "numbers"),
    [("abadi", (0.5,)), ("automatic", (0.5, 0.1)), ("normalize", (0.5,)), ("global", (5.0,)), ("batch", (0.5,))],
)
def test_flat_clipping_of_linear_models_points_to_every_solution(rule: str, numbers: tuple[float, ...]) -> None:
    """Why no flat instance with a finite solution diverges when H is constant: (w - w*) . G >= 0 whatever C is."""
    for seed in range(20):
        case = random_case(seed, Architecture("parallel", (2, 3)), 4, Clipping(rule, numbers), 1.0)
        w, solution = distance_to_solution(case)
        clipped = torch.cat([part.flatten() for part in cw.ntk.descent(*case.arguments()).clipped.values()])
        assert float((w - solution) @ clipped) >= 0


@pytest.mark.parametrize(("rule", "numbers"), [("abadi", (0.5,)), ("automatic", (0.5, 0.1))])
def test_flat_flows_of_linear_models_approach_every_solution(rule: str, numbers: tuple[float, ...]) -> None:
    case = random_case(1, Architecture("parallel", (2, 3)), 4, Clipping(rule, numbers), 3.0)
    distance = (case.flow(points=31).weights - distance_to_solution(case)[1]).norm(dim=1)
    assert bool((distance.diff() <= 1e-6).all()) and float(distance[-1]) < float(distance[0])


def test_global_clipping_may_stop_anywhere() -> None:
    """Factors of zero: the flow is at rest although the loss is not zero (erratum of Theorem 1)."""
    case = random_case(0, NETWORK, 4, Clipping("global", (1e-6,)), 1.0, outliers=False)
    flow = case.flow(points=3)
    assert float(flow.speed.max()) == 0.0 and float(flow.loss[-1]) == float(flow.loss[0]) > 0.1


# -- the crosses, by instances


def test_every_cross_has_an_instance() -> None:
    for row in ROWS:
        for place, verdict in enumerate(row.paper):
            if verdict == "n":
                assert INSTANCES[row.instances[place]]["case"] is not None, (row.name, place)


@pytest.mark.parametrize("name", ["flat_not_quadratic", "layerwise_not_quadratic"])
def test_quadratic_form_is_broken(name: str) -> None:
    case = instance(name)
    found = cw.ntk.analyse(*case.arguments())
    x = found.quadratic_witness
    assert positive_definite(case) and not found.symmetric and x is not None
    assert float(x @ found.matrix @ x) < -100 * found.tolerance


def test_layerwise_clipping_breaks_eigenvalues() -> None:
    negative, turning = instance("layerwise_negative_eigenvalue"), instance("layerwise_complex_eigenvalues")
    assert positive_definite(negative) and positive_definite(turning)
    found = cw.ntk.analyse(*negative.arguments())
    assert not found.positive_eigenvalues and found.min_eigenvalue < -1e-3
    found = cw.ntk.analyse(*turning.arguments())
    assert not found.positive_eigenvalues and found.min_eigenvalue > 0 and found.max_imaginary > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("name", ["flat_rising", "layerwise_rising"])
def test_the_loss_rises_for_a_while(name: str) -> None:
    case = instance(name)
    flow = case.flow(points=101)
    assert positive_definite(case, flow)
    assert rise(flow.loss) > 0.05 and float(flow.loss_rate.max()) > 0
    assert float(flow.loss[-1]) < 0.1 * float(flow.loss[0]), "it converges in the end"
    free = case.flow(clipping=Clipping("none"), points=101)
    assert rise(free.loss) < 1e-6, "and without clipping it never rises"


@pytest.mark.slow
def test_a_layerwise_flow_stops_above_zero() -> None:
    case = instance("layerwise_stuck")
    flow = case.flow(points=21)
    assert positive_definite(case, flow)
    assert float(flow.speed[-1]) < 1e-9 and float(flow.loss[-1]) > 1e-2
    assert float(case.flow(clipping=Clipping("abadi", case.clipping.numbers), points=2).loss[-1]) < float(flow.loss[-1])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["layerwise_diverging", "flat_diverging_normalized"])
def test_the_loss_grows_without_end(name: str) -> None:
    case = instance(name)
    assert unsettled(case, case.t_end)
    flow = case.flow(10 * case.t_end, points=11)
    assert bool((flow.loss.diff() > 0).all()) and positive_definite(case, flow)
    growth = flow.speed / flow.speed[0]
    assert float(growth.min()) > 0.1, "it does not slow down"


def test_the_account_of_what_was_not_found() -> None:
    """Abadi's rule, flat: no instance is known; the file says what was searched."""
    for searched in INSTANCES["flat_diverging_abadi"]:
        assert searched["tried"] > 20 and searched["searched"] and searched["not_followed"] < searched["tried"] / 2
        assert (searched["case"] is None) == (searched["with_the_effect"] == 0)


# -- Fact 4.1, and other optimizers


@pytest.mark.slow
def test_order_of_convergence() -> None:
    """1 without noise, 1/2 with it; the distance is what the sum of the noise amounts to."""
    etas = [2.0**-k for k in (4, 5, 6)]
    free, noisy = order.orders((0.0, 4.0), etas, seeds=6)
    assert free["order"] == pytest.approx(1.0, abs=0.05)
    assert noisy["order"] == pytest.approx(0.5, abs=0.2)
    for error, expected in zip(noisy["error"], noisy["noise_sum"], strict=True):
        assert error == pytest.approx(expected, rel=0.4)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["heavy_ball", "nesterov", "adam", "adagrad", "rmsprop"])
def test_other_optimizers_stop_where_gradient_descent_does(optimizer: str) -> None:
    """From the point where the layerwise flow rests, no optimizer moves: all are driven by the same clipped sum."""
    case = instance("layerwise_stuck")
    rest: Any = case.flow(points=2).weights[-1]
    flow = cw.ntk.gradient_flow(*case.arguments(rest), 5.0, optimizer, points=3)
    assert float(flow.loss[0]) > 1e-2 and float((flow.weights - rest).abs().max()) < 1e-6


ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "papers" / "theory"
PAGE = (ROOT / "docs" / "theory.md").read_text(encoding="utf-8")


def saved(name: str) -> Any:
    return json.loads((FOLDER / name).read_text(encoding="utf-8"))


def test_every_cell_of_the_table_is_as_the_paper_says() -> None:
    assert failures(saved("results.json")) == []


def test_orders_of_convergence() -> None:
    free, *noisy = saved("results.json")["orders"]
    assert free["noise_multiplier"] == 0 and free["order"] == pytest.approx(1.0, abs=0.01)
    assert noisy and all(row["order"] == pytest.approx(0.5, abs=0.05) for row in noisy)


def test_instances_are_positive_definite_and_show_what_they_claim() -> None:
    found = saved("results.json")["instances"]
    assert all(case["positive_definite"] for case in found.values())
    assert found["flat_rising"]["largest_loss"] > 1.05 * found["flat_rising"]["loss_at_the_start"]
    assert found["layerwise_stuck"]["speed_at_the_end"] < 1e-9 < 1e-2 < found["layerwise_stuck"]["loss_at_the_end"]
    for name in ("layerwise_diverging", "flat_diverging_normalized"):
        assert found[name]["loss_at_the_end"] == found[name]["largest_loss"] > 2 * found[name]["loss_at_the_start"]


def test_flat_flows_of_all_optimizers_come_to_zero_and_layerwise_ones_need_not() -> None:
    rows = saved("results.json")["optimizers"]
    for row in rows:
        if row["style"] == "flat":
            assert row["loss_at_the_end"] < 1e-3 * row["loss_at_the_start"], row["optimizer"]
    stopped = [row for row in rows if row["style"] == "layerwise" and row["speed_at_the_end"] < 1e-6]
    assert stopped and all(row["loss_at_the_end"] > 1e-2 for row in stopped)


def test_the_monitor_marks_private_probes() -> None:
    for run in saved("monitor.json").values():
        assert run["covered_by_epsilon"] is False and "not covered by epsilon" in run["note"]
        assert run["overhead"] < 0.5


def test_benchmark_reaches_its_goals() -> None:
    rows = {row["method"]: row for row in json.loads((ROOT / "benchmarks" / "ntk.json").read_text())["rows"]}
    ours, plain = rows["clipwise, Gram route"], rows["vmap(jacrev)"]
    assert ours["rows"] == 10_000 and ours["wall_seconds"] < 60 and ours["peak_gib"] < 4
    assert ours["cpu_seconds"] < plain["cpu_seconds"] and ours["peak_gib"] < plain["peak_gib"]


def test_the_page_shows_every_figure() -> None:
    shown = re.findall(r"!\[.+?\]\(\.\./papers/theory/figures/(.+?)\)", PAGE)
    assert set(shown) == {path.name for path in (FOLDER / "figures").iterdir()}
