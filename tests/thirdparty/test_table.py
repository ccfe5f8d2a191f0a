"""The table of third-party models is well-formed; its packages are not needed for that."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

import clipwise as cw
from tests.zoo.case import floats, regress

from . import measure
from .__main__ import is_lost
from .row import Row, columns, on_x, table

HERE = Path(__file__).parent


def test_rows_are_distinct_and_measured() -> None:
    rows = [row for family in table().values() for row in family]
    names = [row.name for row in rows]
    assert len(set(names)) == len(names)
    assert list(json.loads((HERE / "results.json").read_text(encoding="utf-8"))["rows"]) == names


def test_every_table_is_listed_and_short() -> None:
    found = {path.stem.removeprefix("models_") for path in HERE.glob("models_*.py")}
    assert found == set(table())
    for path in HERE.glob("*.py"):
        assert len(path.read_text(encoding="utf-8").splitlines()) < 400, path.name


def test_requirements_are_pinned() -> None:
    lines = (HERE / "requirements.txt").read_text(encoding="utf-8").splitlines()
    assert all("==" in line for line in lines if line and not line.startswith("#"))


def centred(model: nn.Module, batch: Any) -> Tensor:
    """Standardised by the batch before the first layer."""
    return regress(model(batch["x"] - batch["x"].mean(0)))


def row(losses: Any = on_x, mixes: str = "") -> Row:
    return Row("row", "torch", lambda: nn.Linear(3, 2), columns(x=floats(3)), losses, mixes=mixes)


def test_honest_and_mixing_models_are_told_apart() -> None:
    assert measure.measure(row())["status"] == "exact"
    assert measure.measure(row(centred))["status"] == "label wrong"
    assert measure.measure(row(centred, "centred by the batch"))["status"].startswith("mixing")
    assert measure.measure(row(mixes="nothing"))["status"] == "label wrong"


def test_wrong_sum_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = cw.clipped_gradients

    def wrong(*args: Any, **options: Any) -> Any:
        clipped = right(*args, **options)
        next(iter(clipped.gradients.values())).mul_(1 + 1e-4)
        return clipped

    monkeypatch.setattr(cw, "clipped_gradients", wrong)
    assert measure.measure(row())["status"] == "wrong"


def test_lost_rows_are_noticed() -> None:
    good = {"status": "exact", "mixes": "", "engine": {"outcome": "exact"}, "private": {"outcome": "accepted"}}
    half = good | {"status": "refused", "engine": {"outcome": "refused"}}
    assert not is_lost(good, good) and not is_lost(half, half) and not is_lost(half, good) and not is_lost({}, half)
    assert is_lost(good, half)
    assert is_lost(half, half | {"private": {"outcome": "refused"}})
    assert is_lost(good, {"status": "time limit"})
    refused = {"status": "mixing, refused", "mixes": "why", "private": {"outcome": "refused"}}
    assert is_lost(refused, refused | {"status": "mixing, accepted", "private": {"outcome": "accepted"}})
