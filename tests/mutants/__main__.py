"""`python -m tests.mutants`: change the source in one place at a time, run the tests that cover it, count who noticed.

A seeded sample over the modules where a silent change means a wrong epsilon, noise or sensitivity. Tests are chosen by
coverage. First each mutant meets a few seconds of tests that run its line, those of its own subject before others, in a
fork of a process that has imported everything (`warm.py`). The survivors then meet all tests that run their lines in
processes that import the changed files, many mutants at a time: only what fails is looked at for each of them.
Interrupted, it continues with `--resume`. `known.toml` names survivors that change nothing, and why.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import tomllib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from datetime import date
from itertools import accumulate
from pathlib import Path
from typing import Any

from tests.mutants.changes import Change, changes_of
from tests.mutants.coverage_of import ROOT, Covering, measure
from tests.mutants.pool import Pool
from tests.mutants.trial import CRASHED, copy_of_the_package, failing

HERE = Path(__file__).resolve().parent
RESULTS, PAGE, KNOWN = HERE / "results.json", HERE / "RESULTS.md", HERE / "known.toml"
COVERAGE = ROOT / ".mutants.json"  # not committed: made anew where it is missing
MODULES = (
    "clipping.py", "correlation.py", "noise", "sampling.py", "mechanisms", "plan.py", "_encoding.py", "private",
    "engine", "accounting", "entropy.py", "hashing.py", "packing.py", "files.py", "federated",
    "calibration/private_scaling.py", "report",
)  # fmt: skip
_FIRST = 10.0  # seconds of the nearest tests, before the others
_OPEN = "survived the nearest tests"
_ENDLESS = "did not end"  # noticed, as a test that hangs is; on a busy machine such verdicts are worth a second look
_NOTICED = ("killed", _ENDLESS)


def all_changes(modules: tuple[str, ...] = MODULES) -> list[Change]:
    """Every change of these modules and packages."""
    source = ROOT / "src"
    found = []
    for name in modules:
        path = source / "clipwise" / name
        for file in [path] if path.is_file() else sorted(path.rglob("*.py")):
            found += changes_of(file, file.relative_to(source).as_posix())
    return found


def nearest_tests(change: Change, covering: Covering) -> list[str]:
    """Of the tests that run the changed line, a few seconds of those that are the likeliest to notice."""
    tests = covering.tests_of(change.path, change.line)
    spent = list(accumulate(covering.time_of([test]) for test in tests))
    return tests[: max(1, bisect_right(spent, _FIRST))]


def killed_together(changes: Sequence[Change], covering: Covering, pool: Pool) -> Iterator[tuple[Change, str]]:
    """Those of the survivors that some test notices after all, with the test.

    All are made at once; what fails, and does not fail without any, is tried on each. Where they do not run as tests at
    all, for example since one change breaks an import, the first of its own tests is tried on each.
    """
    rest = {change: covering.tests_of(change.path, change.line) for change in changes}
    groups = [[change for change in changes if rest[change]]]
    while groups:
        group, others = apart(groups.pop())
        if others:
            groups.append(others)
        tests = sorted(set().union(*(rest[change] for change in group)))
        failed = pool.failing(group, tests) if group else []
        crashed = CRASHED in (failed or ())
        if failed and crashed:
            # That is the name of no test: it can neither be run without a change nor be tried on each.
            nearest = tests if len(group) == 1 else [rest[change][0] for change in group]
            failed = sorted({*failed, *nearest} - {CRASHED})
        if failed:
            failed = sorted({*failed} - _failing_anyway(failed, pool))
        if len(group) == 1 and failed != []:
            yield group[0], CRASHED if crashed else _by(failed)
        if len(group) <= 1 or (failed == [] and not crashed):
            continue
        noticed = pool.noticed({change: [t for t in rest[change] if t in (failed or ())] for change in group})
        yield from ((change, _by(found)) for change, found in noticed.items())
        left = [change for change in group if change not in noticed]
        # Without any, they hang or crash together, or do what none does alone.
        groups += [left] if noticed else [left[: len(left) // 2], left[len(left) // 2 :]]


def _failing_anyway(tests: Sequence[str], pool: Pool) -> set[str]:
    """The tests that fail without a change too; an error if they do not even run, since then nothing can be tried."""
    failed = {*(pool.failing([], tests) or ())}
    if CRASHED in failed:
        raise RuntimeError(f"without any change, {CRASHED} of {len(tests)}: is {COVERAGE.name} of an older suite?")
    return failed


def _by(failed: Sequence[str] | None) -> str:
    return _ENDLESS if failed is None else failed[0]


def apart(changes: Sequence[Change]) -> tuple[list[Change], list[Change]]:
    """As many changes as can be made at once, since none lies within another; and the others."""
    taken: list[Change] = []
    for change in changes:
        if all(change.path != c.path or change.stop <= c.start or c.stop <= change.start for c in taken):
            taken.append(change)
    return taken, [change for change in changes if change not in taken]


def page(body: dict[str, Any], known: dict[str, str]) -> str:
    """The committed summary."""
    rows = body["mutants"]
    left = {name: row for name, row in rows.items() if row["verdict"] not in _NOTICED}
    endless = sum(row["verdict"] == _ENDLESS for row in rows.values())
    counted = len(rows) - sum(name in known for name in left)
    open_ones = {name: row for name, row in left.items() if name not in known}
    lines = [
        "# Would the tests notice?",
        "",
        f"`python -m tests.mutants --seed {body['seed']} --count {body['count']}` on {body['date']}, revision "
        f"{body['revision']}: **{len(rows) - len(left)} of {counted} mutants killed "
        f"({100 * (len(rows) - len(left)) / max(1, counted):.1f} %)**, {endless} of them since the tests did not end; "
        f"{len(left) - len(open_ones)} others change "
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
    parser.add_argument(
        "--test", metavar="TEST", action="append", help="with --only: these tests, and not those that coverage names"
    )
    parser.add_argument("--jobs", type=int, default=2, help="at a time (default 2)")
    parser.add_argument("--resume", action="store_true", help="keep the verdicts of the last run of the same sample")
    options = parser.parse_args()

    if options.test and not options.only:
        parser.error("--test goes with --only")
    if options.test:
        return _with(options.test, [c for c in all_changes() if all(part in c.name for part in options.only)])
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
    verdicts = body["mutants"]

    known = tomllib.loads(KNOWN.read_text(encoding="utf-8")) if KNOWN.exists() else {}

    def note(change: Change, verdict: str, by: str = "") -> None:
        verdicts[change.name] = {"line": change.line, "verdict": verdict, "by": by}
        print(f"{len(verdicts)}/{len(chosen)} {verdict}: {change.path}:{change.line} {change.name}", flush=True)
        if not options.only:
            RESULTS.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")

    def judge(change: Change, failed: list[str] | None) -> None:
        note(change, _verdict(failed), _by(failed) if failed != [] else "")

    with Pool.of(options.jobs, covering) as pool:
        while new := [change for change in chosen if change.name not in verdicts]:
            pool.quickly_noticed({change: nearest_tests(change, covering) for change in new}, judge)
            covering = _without_failing(verdicts, covering, pool)
        survivors = [c for c in chosen if verdicts[c.name]["verdict"] == _OPEN and c.name not in known]
        for change, by in killed_together(survivors, covering, pool):
            note(change, "killed", by)
    for change in chosen:
        if verdicts[change.name]["verdict"] == _OPEN:
            note(change, "survived" if covering.tests_of(change.path, change.line) else "no test runs it")
    text = page(body, known)
    print("\n" + text)
    if not options.only:
        PAGE.write_text(text, encoding="utf-8")
    return int(any(row["verdict"] not in _NOTICED and name not in known for name, row in body["mutants"].items()))


def _with(tests: Sequence[str], changes: Sequence[Change]) -> int:
    """Try these tests, and no others, on each change, and first on the package as it is; 1 when one was not noticed."""
    with copy_of_the_package() as source:
        if failing([], source, tests, _FIRST):
            print("the tests fail on the package as it is")
            return 1
        verdicts = [_verdict(failing([change], source, tests, _FIRST, first=True)) for change in changes]
    for change, verdict in zip(changes, verdicts, strict=True):
        print(f"{verdict}: {change.path}:{change.line} {change.name}")
    return int(any(verdict not in _NOTICED for verdict in verdicts))


def _without_failing(verdicts: dict[str, Any], covering: Covering, pool: Pool) -> Covering:
    """Forget verdicts of tests that fail without a change too, and those tests."""
    by = sorted({row["by"] for row in verdicts.values()} - {"", _ENDLESS, CRASHED})
    anyway = pool.failing_anyway(by) if by else set[str]()
    for name in [name for name, row in verdicts.items() if row["by"] in anyway]:
        del verdicts[name]
    return covering.without(anyway)


def _verdict(failed: list[str] | None) -> str:
    return _ENDLESS if failed is None else "killed" if failed else _OPEN


def _revision() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(main())
