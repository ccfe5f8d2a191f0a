"""The tool itself: changes are whole programs, their names are theirs alone, and a test that looks notices one."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.mutants.__main__ import all_changes
from tests.mutants.changes import changes_of
from tests.mutants.coverage_of import ROOT
from tests.mutants.trial import copy_of_the_package, failing

PROGRAM = '''"""Words stay."""
def f(x: int = 1) -> bool:
    """So do these."""
    if not (x > 2) and min(x, 3) == -x:
        raise ValueError(f"{x + 1} is wrong")
    g(x)
    return max(x, 2.5) * (x + 1) <= 0
'''


def test_changes_are_those_of_the_code_and_not_of_its_words(tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    found = {change.name.split(": ", 1)[1].split(" in ", 1)[0] for change in changes_of(path, "program.py")}
    assert found == {
        "1 -> 2", "not -> nothing", "> -> >=", "2 -> 3", "and -> or", "min -> max", "3 -> 4", "== -> !=",
        "- -> nothing", 'raise ValueError(f"{x + 1} is wrong") -> pass', "g(x) -> pass", "max -> min",
        "2.5 -> (2.5 * 10)", "* -> /", "+ -> -", "<= -> <", "0 -> 1",
    }  # fmt: skip


def test_every_change_is_a_program_of_another_name() -> None:
    changes = all_changes()
    assert len({change.name for change in changes}) == len(changes) > 5000
    for change in changes[::97]:
        ast.parse(change.applied((ROOT / "src" / change.path).read_text(encoding="utf-8")))


@pytest.mark.slow
def test_a_change_is_noticed_by_a_test_that_looks() -> None:
    change = next(c for c in all_changes(("sampling.py",)) if " split: " in c.name and c.new == "False")
    with copy_of_the_package() as source:
        assert failing([change], source, ["tests/core/test_sampling.py"], 5.0)
        assert failing([change], source, ["tests/core/test_exports.py"], 5.0) == []
