"""Which tests run which lines, and how long each takes: one run of the suite under coverage, kept in a file."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections import defaultdict
from collections.abc import Iterable, Set
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
_CONFIG = """[run]
source = clipwise
data_file = {data}
"""
_SHARDS = 2
SUITE = ("-q", "-m", "not slow", "-p", "no:cacheprovider", "--doctest-modules", "tests", "src")
SUITE += tuple(f"--ignore=tests/{name}" for name in ("thirdparty", "mutants", "federated/flower_app.py"))
"""What `pytest` is asked to collect: all tests, and the doctests of the package."""


@dataclass(frozen=True)
class Covering:
    """`lines[path][line]` are the test functions that run a line, `seconds[test]` what each takes."""

    lines: dict[str, dict[int, list[str]]]
    seconds: dict[str, float]

    @classmethod
    def read(cls, path: Path) -> Covering:
        body = json.loads(path.read_text(encoding="utf-8"))
        lines = {name: {int(k): tests for k, tests in rows.items()} for name, rows in body["lines"].items()}
        return cls(lines, body["seconds"])

    def write(self, path: Path) -> None:
        path.write_text(json.dumps({"lines": self.lines, "seconds": self.seconds}), encoding="utf-8")

    def without(self, failing: Set[str]) -> Covering:
        """The same without some tests: one that fails anyway, for example on a busy machine, notices nothing."""
        lines = {
            path: {line: [test for test in tests if test not in failing] for line, tests in rows.items()}
            for path, rows in self.lines.items()
        }
        return Covering(lines, self.seconds)

    def tests_of(self, path: str, line: int) -> list[str]:
        """The tests that run a line; of a line that runs on import, those that run the module.

        Those of a file with the module's name come first, since they look; then the fastest.
        """
        rows = self.lines.get(path, {})
        found = rows.get(line, [])
        if line in rows and not found:
            found = sorted({test for tests in rows.values() for test in tests})
        words = _words(path)
        found = [test for test in found if test in self.seconds]  # not a fixture that no test names
        return sorted(found, key=lambda test: (-len(words & _words(test)), self.seconds[test]))

    def time_of(self, tests: Iterable[str]) -> float:
        """Seconds that these tests take, one after the other."""
        return sum(self.seconds.get(test, 5.0) for test in tests)


@cache
def _words(path: str) -> frozenset[str]:
    """The words of a file's path, by which a test belongs to a module."""
    return frozenset(re.split(r"\W|_", path.partition("::")[0])) - {"", "clipwise", "tests", "test", "py"}


def measure(folder: Path) -> Covering:
    """Run the suite once, in as many processes as there are shards; takes about twice as long as without."""
    running = []
    for shard in range(_SHARDS):
        config, report = folder / f"coveragerc{shard}", folder / f"junit{shard}.xml"
        config.write_text(_CONFIG.format(data=folder / f"coverage{shard}"))
        command = [sys.executable, "-m", "coverage", "run", f"--rcfile={config}", "-m", "pytest", *SUITE]
        command += ["-p", "tests.mutants.recording", f"--junitxml={report}"]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "SHARD": f"{shard}/{_SHARDS}"}
        environment["FIXTURES"] = str(folder / f"fixtures{shard}.json")
        running.append(subprocess.Popen(command, cwd=ROOT, env=environment))
    for process in running:
        process.wait()
    lines: dict[str, dict[int, list[str]]] = {}
    seconds: defaultdict[str, float] = defaultdict(float)
    failing: set[str] = set()
    for shard in range(_SHARDS):
        fixtures = json.loads((folder / f"fixtures{shard}.json").read_text(encoding="utf-8"))
        _add_lines(folder / f"coverage{shard}", fixtures, lines)
        failing |= _add_seconds(folder / f"junit{shard}.xml", seconds)
    return Covering(lines, dict(seconds)).without(failing)


def _add_lines(data: Path, fixtures: dict[str, list[str]], found: dict[str, dict[int, list[str]]]) -> None:
    from coverage import CoverageData

    measured = CoverageData(str(data))
    measured.read()
    for name in measured.measured_files():
        rows = found.setdefault(Path(name).relative_to(ROOT / "src").as_posix(), {})
        for line, contexts in measured.contexts_by_lineno(name).items():
            tests = (test for context in contexts if context for test in fixtures.get(context, [context]))
            rows[line] = sorted({*rows.get(line, []), *tests})


def _add_seconds(report: Path, total: defaultdict[str, float]) -> set[str]:
    """Add what each test takes; the tests that fail on the program as it is."""
    failing = set()
    for case in ET.parse(report).getroot().iter("testcase"):
        name = re.sub(r"\[.*", "", case.get("name", ""), flags=re.DOTALL)
        path = Path(*case.get("classname", "").split(".")).with_suffix(".py").as_posix()
        test = f"{path}::{name}"
        total[test] += float(case.get("time", 0))
        if case.find("failure") is not None or case.find("error") is not None:
            failing.add(test)
    return failing
