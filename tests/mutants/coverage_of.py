"""Which tests run which lines, and how long each takes: one run of the suite under coverage, kept in a file."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
_CONFIG = """[run]
dynamic_context = test_function
source = clipwise
data_file = {data}
"""


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

    def tests_of(self, path: str, line: int) -> list[str]:
        """The tests that run a line, the fastest first."""
        found = self.lines.get(path, {}).get(line, [])
        return sorted(found, key=lambda test: self.seconds.get(test, 1e9))


def measure(folder: Path) -> Covering:
    """Run the suite once; takes about twice as long as without."""
    config, data, report = folder / "coveragerc", folder / "coverage", folder / "junit.xml"
    config.write_text(_CONFIG.format(data=data))
    command = [sys.executable, "-m", "coverage", "run", f"--rcfile={config}", "-m", "pytest", "-q", "-m", "not slow"]
    command += ["-p", "no:cacheprovider", f"--junitxml={report}", "--ignore=tests/thirdparty", "tests"]
    subprocess.run(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False)
    return Covering(_lines(data), _seconds(report))


def _lines(data: Path) -> dict[str, dict[int, list[str]]]:
    from coverage import CoverageData

    measured = CoverageData(str(data))
    measured.read()
    found: dict[str, dict[int, list[str]]] = {}
    for name in measured.measured_files():
        path = Path(name).relative_to(ROOT / "src").as_posix()
        rows: dict[int, list[str]] = {}
        for line, contexts in measured.contexts_by_lineno(name).items():
            tests = sorted({test for context in contexts if (test := _node(context))})
            if tests:
                rows[line] = tests
        found[path] = rows
    return found


def _node(context: str) -> str:
    """`tests.core.test_plan.test_it` as pytest names it; classes and helpers have no file of that name."""
    module, _, function = context.rpartition(".")
    path = Path(*module.split(".")).with_suffix(".py") if module else Path()
    return f"{path.as_posix()}::{function}" if module and (ROOT / path).is_file() else ""


def _seconds(report: Path) -> dict[str, float]:
    total: defaultdict[str, float] = defaultdict(float)
    for case in ET.parse(report).getroot().iter("testcase"):
        name = re.sub(r"\[.*", "", case.get("name", ""), flags=re.DOTALL)
        path = Path(*case.get("classname", "").split(".")).with_suffix(".py").as_posix()
        total[f"{path}::{name}"] += float(case.get("time", 0))
    return dict(total)
