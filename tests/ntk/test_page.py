"""The theory page and what it is made from: the committed results support what the page says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from papers.theory.__main__ import failures

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
