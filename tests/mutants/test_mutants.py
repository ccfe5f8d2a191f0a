"""The tool itself: changes are whole programs, their names are theirs alone, and a test that looks notices one."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from tests.mutants import trial
from tests.mutants.__main__ import _FIRST, all_changes, killed_together
from tests.mutants.changes import Change, changes_of
from tests.mutants.coverage_of import ROOT, Covering, _add_seconds
from tests.mutants.pool import Pool
from tests.mutants.trial import CRASHED, copy_of_the_package, failing
from tests.mutants.warm import RunsOnImportError, Warm, exchanged

PROGRAM = '''"""Words stay."""
if TYPE_CHECKING:
    from types import Type
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
        broken = replace(change, new="raise")
        assert failing([broken], source, ["tests/core/test_exports.py"], 5.0) == [CRASHED]


@pytest.mark.slow
def test_a_change_is_noticed_by_a_doctest() -> None:
    change = next(c for c in all_changes(("_show.py",)) if " number: == -> !=" in c.name)
    doctest = "src/clipwise/_show.py::clipwise._show.number"
    with copy_of_the_package() as source:
        assert failing([change], source, [doctest, "tests/core/test_exports.py"], 5.0) == [doctest]


@pytest.mark.slow
def test_a_change_without_end_is_given_up_after_processor_time(monkeypatch: pytest.MonkeyPatch) -> None:
    change = next(c for c in all_changes(("sampling.py",)) if " split: " in c.name and c.new == "False")
    endless = replace(change, new="all(zero == 0 for zero in iter(int, 1))")
    monkeypatch.setattr(trial, "_GRACE", 6.0)
    with copy_of_the_package() as source:
        assert failing([endless], source, ["tests/core/test_sampling.py"], 1.0) is None


def test_a_test_that_fails_anyway_notices_nothing(tmp_path: Path) -> None:
    report = tmp_path / "junit.xml"
    case = '<testcase classname="tests.core.test_a" name="{}" time="2">{}</testcase>'
    cases = case.format("test_good[1]", "") + case.format("test_good[2]", "") + case.format("test_bad", "<failure/>")
    report.write_text(f"<testsuite>{cases}</testsuite>")
    seconds: defaultdict[str, float] = defaultdict(float)
    good, bad = "tests/core/test_a.py::test_good", "tests/core/test_a.py::test_bad"
    assert _add_seconds(report, seconds) == {bad}
    covering = Covering({"m.py": {1: [bad, good]}}, dict(seconds)).without({bad})
    assert covering.tests_of("m.py", 1) == [good] and covering.time_of([good]) == 4


def test_tests_of_the_same_subject_come_before_faster_ones() -> None:
    seconds = {
        "tests/core/test_fast.py::t": 1.0,
        "tests/core/test_loader.py::t": 9.0,
        "tests/core/test_loader.py::u": 3.0,
    }
    covering = Covering({"clipwise/private/loader.py": {1: list(seconds)}}, seconds)
    assert covering.tests_of("clipwise/private/loader.py", 1) == [
        "tests/core/test_loader.py::u", "tests/core/test_loader.py::t", "tests/core/test_fast.py::t",
    ]  # fmt: skip


class _Suite:
    """Stands for real trials: which change makes which test fail, alone or with another."""

    def __init__(
        self, fails: dict[str, set[str]], hang: set[str], anyway: set[str], crash: Sequence[set[str]] = ()
    ) -> None:
        self.fails, self.hang, self.anyway, self.crash = fails, hang, anyway, crash

    def failing(self, changes: Sequence[Change], tests: Sequence[str]) -> list[str] | None:
        names = {change.name for change in changes}
        # One name that is no test's keeps all from running, as an import that fails does.
        if not all(test.startswith("t") for test in tests) or any(together <= names for together in self.crash):
            return [CRASHED]
        if self.hang <= names:
            return None
        return sorted(self.anyway.union(*(self.fails[change.name] for change in changes)) & set(tests))

    def noticed(self, tests: Mapping[Change, Sequence[str]]) -> dict[Change, list[str] | None]:
        failed = {change: self.failing([change], own) for change, own in tests.items()}
        return {change: found for change, found in failed.items() if found != []}


def test_survivors_are_tried_together_and_judged_one_by_one() -> None:
    names = "abcdefg"
    changes = [Change("m.py", 1, 10 * k, 10 * k + 5, "", name) for k, name in enumerate(names)]
    changes.append(Change("m.py", 1, 0, 100, "", "around all"))
    seconds = {"t0": _FIRST, "t1": 20.0, "t2": 30.0, "t3": 40.0, "t4": 50.0}
    covering = Covering({"m.py": {1: list(seconds)}}, seconds)
    fails = {name: set[str]() for name in (*names, "around all")} | {"b": {"t1"}, "e": {"t3"}, "around all": {"t2"}}
    pool = cast(Pool, _Suite(fails, hang={"c", "d"}, anyway={"t4"}))
    found = {change.name: by for change, by in killed_together(changes, covering, pool)}
    assert found == {"b": "t1", "e": "t3", "around all": "t2"}


@pytest.mark.parametrize("anyway", [set[str](), {"t0"}, {"t2"}])
def test_a_change_that_breaks_an_import_hides_no_other(anyway: set[str]) -> None:
    names = "abcdefg"
    changes = [Change("m.py", 1, 10 * k, 10 * k + 5, "", name) for k, name in enumerate(names)]
    seconds = {"t0": 1.0, "t1": 2.0, "t2": 3.0}
    covering = Covering({"m.py": {1: list(seconds)}}, seconds)
    fails = {name: set[str]() for name in names} | {"b": {"t1"}, "g": {"t1"}}
    pool = cast(Pool, _Suite(fails, hang={"none"}, anyway=anyway, crash=[{"c"}, {"a", "e"}]))
    found = {change.name: by for change, by in killed_together(changes, covering, pool)}
    assert found == {"b": "t1", "c": CRASHED, "g": "t1"}


def test_tests_that_do_not_run_without_a_change_are_an_error_and_no_verdict() -> None:
    change = Change("m.py", 1, 0, 5, "", "a")
    covering = Covering({"m.py": {1: ["t1", "gone"]}}, {"t1": 1.0, "gone": 1.0})
    pool = cast(Pool, _Suite({"a": set()}, hang={"none"}, anyway=set()))
    with pytest.raises(RuntimeError, match="without any change, no test ended of 2"):
        list(killed_together([change], covering, pool))


def test_a_fixture_that_no_test_names_is_not_a_test() -> None:
    covering = Covering({"m.py": {1: ["fixture doctest_namespace", "t1"]}}, {"t1": 1.0})
    assert covering.tests_of("m.py", 1) == ["t1"]


TWO = """LIMIT = 1
def f(x):
    if x:
        raise ValueError(
            x)
    return x
class A:
    b = [1]
    def g(self):
        return (lambda: 2)()
"""


@pytest.mark.parametrize(("old", "new", "changed"), [("return x", "return -x", "f"), ("2)()", "3)()", "A.g")])
def test_a_function_gets_the_code_of_the_changed_file(old: str, new: str, changed: str) -> None:
    ((place, code),) = exchanged(TWO, TWO.replace(old, new), "m.py").items()
    assert place == ("m.py", changed, {"f": 2, "A.g": 9}[changed]) and code.co_qualname == changed


def test_lines_that_move_are_not_a_change() -> None:
    shorter = TWO.replace("raise ValueError(\n            x)", "pass")
    assert [*exchanged(TWO, shorter, "m.py")] == [("m.py", "f", 2)]


@pytest.mark.parametrize(("old", "new"), [("LIMIT = 1", "LIMIT = 2"), ("b = [1]", "b = [2]"), ("f(x)", "f(x=1)")])
def test_what_ran_on_import_is_not_tried_in_a_fork(old: str, new: str) -> None:
    with pytest.raises(RunsOnImportError):
        exchanged(TWO, TWO.replace(old, new, 1), "m.py")


@pytest.mark.slow
def test_a_fork_of_a_warm_process_notices_what_a_new_process_does() -> None:
    change = next(c for c in all_changes(("sampling.py",)) if " split: " in c.name and c.new == "False")
    others, looking = (
        "tests/core/test_exports.py::test_every_error_is_exported",
        "tests/core/test_sampling.py::test_split",
    )
    warm = Warm()
    try:
        assert warm.failing(change, [others, looking], 60) == [looking]
        assert warm.failing(change, [others], 60) == warm.failing(None, [others, looking], 60) == []
    finally:
        warm.close()
