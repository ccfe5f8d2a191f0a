"""Run the benchmarks: `python -m benchmarks` (full), `--quick` (two small workloads, under a minute).

Every measurement is a process of its own and is saved as soon as it is there, so an interrupted run continues where it
stopped; `--again` measures again. Results: `results.json`, and from them `README.md` and the figures.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from benchmarks import report, scaling
from benchmarks.measure import Json
from benchmarks.methods import MEASURED
from benchmarks.worker import MEMORY_ENVIRONMENT
from benchmarks.workloads import WORKLOADS

HERE = Path(__file__).parent
QUICK = ("mlp", "mnist_cnn")


@dataclass(frozen=True)
class Task:
    """One measurement: where its result goes, and the worker's arguments and environment."""

    path: tuple[str, ...]
    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    peer: bool = False  # the engine has no part in it


def tasks(names: Sequence[str], seconds: float, *, studies: bool, peers: bool = True) -> Iterator[Task]:
    """All measurements of a run, the workloads first; without `peers` memory is measured for two methods only."""
    for name in names:
        yield Task(("workloads", name, "steps"), ("time", "--workload", name, "--seconds", str(seconds)))
        for method in MEASURED if peers else ("plain", "clipwise"):
            arguments = ("memory", "--workload", name, "--method", method)
            path = ("workloads", name, "memory", method)
            yield Task(path, arguments, MEMORY_ENVIRONMENT, peer=method != "clipwise")
    if studies:
        yield Task(("lengths",), ("lengths",))
        for point in scaling.points():
            yield Task(("scaling", point.key, "time"), ("scaling_time", "--point", point.key))
            memory = ("scaling_memory", "--point", point.key)
            yield Task(("scaling", point.key, "memory"), memory, MEMORY_ENVIRONMENT)


def measure(task: Task, threads: int) -> Json:
    """Run a worker; a failure is an error with the worker's own words, never a missing number."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", **task.environment}
    command = [sys.executable, "-m", "benchmarks.worker", *task.arguments, "--threads", str(threads)]
    done = subprocess.run(command, cwd=HERE.parent, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    result: Json = json.loads(done.stdout.splitlines()[-1])
    return result


def lookup(results: Json, path: Sequence[str]) -> Json | None:
    """The value at a path, None when it is not there yet."""
    node: Json | None = results
    for part in path:
        node = None if node is None else node.get(part)
    return node


def store(results: Json, path: Sequence[str], value: Json) -> None:
    """Put a value at a path."""
    for part in path[:-1]:
        results = results.setdefault(part, {})
    results[path[-1]] = value


def machine() -> Json:
    """What the numbers were measured on."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        models = [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
        cpu = f"{models[0]} ({platform.machine()})" if models else cpu
    return {"cpu": cpu, "cores": os.cpu_count(), "system": platform.system(), "python": platform.python_version()}


def versions() -> dict[str, str]:
    """Versions of everything that was measured."""
    found = {}
    for package in ("torch", "transformers", "opacus", "numpy", "clipwise"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def revision() -> str:
    """The revision of the code that is measured, marked when its code was changed; empty outside a clone."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=HERE.parent, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        changed = git("status", "--porcelain", "--", "src", "benchmarks/*.py")
        return git("describe", "--always") + ("-dirty" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return ""


def settings(arguments: argparse.Namespace) -> Json:
    """What must be equal for an interrupted run to be continued."""
    return {"threads": arguments.threads, "seconds": arguments.seconds, "quick": arguments.quick}


def load(path: Path, arguments: argparse.Namespace) -> Json:
    """Earlier results to continue: only those of the same settings and versions."""
    fresh: Json = {"settings": settings(arguments), "machine": machine(), "versions": versions()}
    if (arguments.again == "all" and not arguments.only) or not path.exists():
        return fresh
    earlier: Json = json.loads(path.read_text())
    same = all(earlier.get(part) == fresh[part] for part in fresh)
    return earlier if same else fresh


def save(path: Path, results: Json) -> None:
    """Write the results whole or not at all."""
    results["date"] = dt.datetime.now(dt.UTC).strftime("%Y-%m-%d %H:%M UTC")
    partial = path.with_suffix(".part")
    partial.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    partial.replace(path)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="two small workloads, no studies; prints, writes nothing")
    parser.add_argument("--only", nargs="+", choices=sorted(WORKLOADS), help="some workloads, and no studies")
    parser.add_argument(
        "--threads", type=int, default=1, help="threads of torch (default 1: robust on shared machines)"
    )
    parser.add_argument("--seconds", type=float, default=25.0, help="time for the rounds of one workload")
    parser.add_argument(
        "--again",
        choices=("all", "engine"),
        nargs="?",
        const="all",
        help="measure again what is already in the results: all of it, or all but the memory of the other methods",
    )
    parser.add_argument("--report", action="store_true", help="only write the report of the results that are there")
    parsed = parser.parse_args(arguments)
    if parsed.quick:
        parsed.seconds = min(parsed.seconds, 3.0)
    return parsed


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what is missing, save after every measurement, write the report."""
    options = parse(arguments)
    path = HERE / "results.json"
    if options.report:
        report.write(json.loads(path.read_text()), HERE)
        return
    names = options.only or (QUICK if options.quick else tuple(WORKLOADS))
    results: Json = {"machine": machine(), "versions": versions()} if options.quick else load(path, options)
    studies = not options.only and not options.quick
    todo = list(tasks(names, options.seconds, studies=studies, peers=not options.quick))
    begin = time.perf_counter()
    for number, task in enumerate(todo, 1):
        again = options.again == "all" or (options.again == "engine" and not task.peer)
        if not again and lookup(results, task.path) is not None:
            continue
        start = time.perf_counter()
        conditions = {"revision": revision(), "load": round(os.getloadavg()[0], 2)}
        store(results, task.path, {**measure(task, options.threads), "conditions": conditions})
        took = time.perf_counter() - start
        print(
            f"[{number}/{len(todo)}] {' '.join(task.path)}: {took:.1f} s ({time.perf_counter() - begin:.0f} s in all)"
        )
        if not options.quick:
            save(path, results)
    if options.quick:
        print(report.table(results), report.memory_table(results), sep="\n\n")
    else:
        report.write(results, HERE)


if __name__ == "__main__":
    main()
