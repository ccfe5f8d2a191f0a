"""The table of third-party models is well-formed; its packages are not needed for that."""

from __future__ import annotations

import json
from pathlib import Path

from .table import table

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
