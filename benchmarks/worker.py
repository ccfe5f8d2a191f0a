"""One measurement in a fresh process: `python -m benchmarks.worker KIND ...` prints one line of JSON.

The parent sets the environment: threads, and for memory an allocator that gives every freed block back to the system,
so that resident memory follows what is alive and not what was once alive.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace

import torch

from benchmarks import measure, scaling
from benchmarks.measure import CannotRun, Json
from benchmarks.methods import MEASURED
from benchmarks.workloads import WORKLOADS, Workload

MEMORY_ENVIRONMENT = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_MMAP_MAX_": "1000000",
    "MALLOC_TRIM_THRESHOLD_": "65536",
}


def time_workload(workload: Workload, seconds: float) -> Json:
    """First step, errors, then interleaved rounds of every method that can run."""
    result: Json = {"first_step": measure.first_step(workload), "cannot_run": {}, "notes": {}}
    prepared = {}
    for name in MEASURED:
        try:
            prepared[name] = measure.prepare(workload, name)
        except CannotRun as reason:
            result["cannot_run"][name] = str(reason)
            continue
        if prepared[name].note:
            result["notes"][name] = prepared[name].note
    methods = {name: each.method for name, each in prepared.items()}
    result["time"] = measure.interleaved(methods, seconds=seconds, most=workload.rounds)
    result["errors"] = measure.errors(workload, prepared)
    return result


def run(arguments: argparse.Namespace) -> Json:
    """The measurement that the arguments ask for."""
    if arguments.kind == "lengths":
        return measure.varying_lengths()
    if arguments.kind in ("scaling_time", "scaling_memory"):
        point = next(p for p in scaling.points() if p.key == arguments.point)
        return scaling.times(point) if arguments.kind == "scaling_time" else scaling.memories(point)
    workload = WORKLOADS[arguments.workload]
    if arguments.batch_size:
        workload = replace(workload, batch_size=arguments.batch_size)
    if arguments.kind == "time":
        return time_workload(workload, arguments.seconds)
    try:
        if arguments.kind == "form":
            return measure.form(workload, arguments.method)
        return measure.peak_memory(workload, arguments.method)
    except CannotRun as reason:
        return {"cannot_run": str(reason)}


def main() -> None:
    """Command line of the worker."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=("time", "memory", "form", "lengths", "scaling_time", "scaling_memory"))
    parser.add_argument("--workload", choices=sorted(WORKLOADS))
    parser.add_argument("--method", choices=MEASURED)
    parser.add_argument("--point")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=45.0)
    parser.add_argument("--batch-size", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    measure.quiet()
    print(json.dumps(run(arguments)))


if __name__ == "__main__":
    main()
