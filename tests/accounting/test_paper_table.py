"""The saved table of the paper's epsilons is what its command would write, and says what the paper got wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from clipwise.accounting._problem import pose
from clipwise.accounting.accountants.edgeworth import saddle_interval
from clipwise.cli.published import PUBLISHED, Published

FOLDER = Path(__file__).parents[2] / "papers" / "epsilons"
ROWS = json.loads((FOLDER / "epsilons.json").read_text())
EXACT = {
    "CIFAR10, 15 epochs": 2.104702,
    "MNIST, 60 epochs": 2.379555,
    "SNLI, 3 epochs": 5.130682,
    "SNLI, as run": 5.163332,
    "California, 50 epochs": 4.623863,
    "Wine, full batch": 4.395915,
}


def test_table_holds_the_known_values() -> None:
    assert [row["experiment"] for row in ROWS] == [run.title for run in PUBLISHED.values()] == list(EXACT)
    for row in ROWS:
        assert row["exact"] == pytest.approx(EXACT[row["experiment"]], abs=1e-6)
        assert row["exact"] <= row["pld"] * (1 + 1e-6) and row["exact"] <= row["rdp"]


@pytest.mark.parametrize("run", PUBLISHED.values(), ids=lambda run: run.title)
def test_a_proven_interval_holds_the_exact_value(run: Published) -> None:
    low, high = saddle_interval(pose(run.events).upper[0], run.delta)
    assert low - 1e-6 <= EXACT[run.title] <= high + 1e-6


def test_gdp_reproduces_the_claims_and_under_states() -> None:
    # California's claim is the central limit theorem's value for 3,628 steps.
    assert all(abs(row["gdp"] - row["claim"]) < 0.04 for row in ROWS)
    assert all(row["gdp"] < row["exact"] for row in ROWS[:5])
    assert ROWS[2]["exact"] / ROWS[2]["claim"] > 4.0
