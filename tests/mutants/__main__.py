"""`python -m tests.mutants`: change the source in one place at a time, run the tests that cover it, count who noticed.

A seeded sample over the modules where a silent change means a wrong epsilon, noise or sensitivity. Tests are chosen by
coverage, the fastest first; what survives a few seconds of them meets all the others that run its line. Interrupted, it
goes on with `--resume`. `known.toml` names survivors that change nothing, and why.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from tests.mutants.changes import Change, changes_of
from tests.mutants.coverage_of import ROOT, Covering, measure
from tests.mutants.trial import copy_of_the_package, tried

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

HERE = Path(__file__).resolve().parent
RESULTS, PAGE, KNOWN = HERE / "results.json", HERE / "RESULTS.md", HERE / "known.toml"
COVERAGE = ROOT / ".mutants.json"  # not committed: made anew where it is missing
MODULES = (
    "clipping.py", "noise", "sampling.py", "plan.py", "private", "engine", "accounting", "files.py", "federated",
    "recalibration.py", "report",
)  # fmt: skip
_FIRST = 20.0  # seconds of the fastest tests, before the others


def all_changes(modules: tuple[str, ...] = MODULES) -> list[Change]:
    """Every change of these modules and packages."""
    source = ROOT / "src"
    found = []
    for name in modules:
        path = source / "clipwise" / name
        for file in [path] if path.is_file() else sorted(path.rglob("*.py")):
            found += changes_of(file, file.relative_to(source).as_posix())
    return found


def verdict_on(change: Change, covering: Covering, source: Path) -> str:
    """Whether any test that runs the changed line notices."""
    tests = covering.tests_of(change.path, change.line)
    if not tests:
        return "no test runs it"
    first, spent = [], 0.0
    for test in tests:
        if first and spent + covering.seconds.get(test, _FIRST) > _FIRST:
            break
        first.append(test)
        spent += covering.seconds.get(test, _FIRST)
    rest = tests[len(first) :]
    for chosen in (first, rest):
        if chosen and tried(change, source, chosen, sum(covering.seconds.get(test, 5.0) for test in chosen)):
            return "killed"
    return "survived"


def page(body: dict[str, Any], known: dict[str, str]) -> str:
    """The committed summary."""
    rows = body["mutants"]
    left = {name: row for name, row in rows.items() if row["verdict"] != "killed"}
    counted = len(rows) - sum(name in known for name in left)
    open_ones = {name: row for name, row in left.items() if name not in known}
    lines = [
        "# Would the tests notice?",
        "",
        f"`python -m tests.mutants --seed {body['seed']} --count {body['count']}` on {body['date']}, revision "
        f"{body['revision']}: **{len(rows) - len(left)} of {counted} mutants killed "
        f"({100 * (len(rows) - len(left)) / max(1, counted):.1f} %)**; {len(left) - len(open_ones)} others change "
        "nothing that a test could see, and are named in `known.toml` with the reason.",
        "",
    ]
    if open_ones:
        lines += ["Not noticed:", ""]
        lines += [f"- line {row['line']}, {row['verdict']}: `{name}`" for name, row in open_ones.items()]
        lines.append("")
    return "\n".join(lines)


def main() -> int:
    """Sample, try, write; 1 when a mutant survived that is not known to change nothing."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="of the sample (default 1)")
    parser.add_argument("--count", type=int, default=300, help="mutants (default 300)")
    parser.add_argument(
        "--only", metavar="PART", action="append", help="mutants whose name contains this; writes nothing"
    )
    parser.add_argument("--jobs", type=int, default=2, help="at a time (default 2)")
    parser.add_argument("--resume", action="store_true", help="keep the verdicts of the last run of the same sample")
    options = parser.parse_args()

    if not COVERAGE.exists():
        print("running the tests once, to learn which of them run which line (half an hour)", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            measure(Path(folder)).write(COVERAGE)
    covering = Covering.read(COVERAGE)
    changes = all_changes()
    if options.only:
        chosen = [change for change in changes if all(part in change.name for part in options.only)]
    else:
        chosen = random.Random(options.seed).sample(changes, min(options.count, len(changes)))
    body: dict[str, Any] = {
        "seed": options.seed, "count": options.count, "date": date.today().isoformat(), "revision": _revision(),
        "mutants": {},
    }  # fmt: skip
    if options.resume and RESULTS.exists():
        before = json.loads(RESULTS.read_text(encoding="utf-8"))
        body["mutants"] = before["mutants"] if before["seed"] == options.seed else {}
    todo = [change for change in chosen if change.name not in body["mutants"]]
    sources: SimpleQueue[Path] = SimpleQueue()

    def try_one(change: Change) -> None:
        source = sources.get()
        try:
            verdict = verdict_on(change, covering, source)
        finally:
            sources.put(source)
        body["mutants"][change.name] = {"line": change.line, "verdict": verdict}
        print(f"{len(body['mutants'])}/{len(chosen)} {verdict:9} {change.path}:{change.line} {change.name}", flush=True)
        if not options.only:
            RESULTS.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")

    with ThreadPoolExecutor(options.jobs) as pool:
        folders = [copy_of_the_package() for _ in range(options.jobs)]
        try:
            for folder in folders:
                sources.put(folder.__enter__())
            list(pool.map(try_one, todo))
        finally:
            for folder in folders:
                folder.__exit__(None, None, None)
    known = tomllib.loads(KNOWN.read_text(encoding="utf-8")) if KNOWN.exists() else {}
    text = page(body, known)
    print("\n" + text)
    if not options.only:
        PAGE.write_text(text, encoding="utf-8")
    return int(any(row["verdict"] != "killed" and name not in known for name, row in body["mutants"].items()))


def _revision() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(main())
