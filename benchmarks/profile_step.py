"""Where a step spends its time: `python -m benchmarks.profile_step WORKLOAD [--method clipwise] [--python]`.

Without `--python`, torch's operators by self CPU time, the plain step's own time beside each of them. With it, Python
functions by their own time: for small models, where dispatch and not arithmetic is the cost.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
from collections.abc import Mapping

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.methods import METHODS, Method
from benchmarks.workloads import WORKLOADS, Workload


def operator_times(method: Method, steps: int) -> dict[tuple[str, str], tuple[float, int]]:
    """(operator, input shapes) -> (self CPU milliseconds per step, calls per step)."""
    batch = method.workload.batch()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as trace:
        for _ in range(steps):
            method.step(batch)
    return {
        (event.key, str(event.input_shapes)): (event.self_cpu_time_total / 1e3 / steps, event.count // steps)
        for event in trace.key_averages(group_by_input_shape=True)
    }


def print_operators(workload: Workload, name: str, steps: int, rows: int) -> None:
    """The operators that cost the method more than they cost the plain step, dearest first."""
    times: dict[str, Mapping[tuple[str, str], tuple[float, int]]] = {}
    for each in ("plain", name):
        method = METHODS[each](workload)
        for seed in range(3):
            method.step(workload.batch(seed))
        times[each] = operator_times(method, steps)
    plain, mine = times["plain"], times[name]
    total = {each: sum(ms for ms, _ in table.values()) for each, table in times.items()}
    print(f"{workload.title}: plain {total['plain']:.2f} ms, {name} {total[name]:.2f} ms (sums of self CPU time)")
    print(f"{'more than plain':>16} {'self ms':>9} {'calls':>6}  operator and shapes")
    extra = sorted(mine, key=lambda key: plain.get(key, (0.0, 0))[0] - mine[key][0])
    for key in extra[:rows]:
        ms, calls = mine[key]
        print(f"{ms - plain.get(key, (0.0, 0))[0]:16.3f} {ms:9.3f} {calls:6d}  {key[0]} {key[1][:90]}")


def print_functions(workload: Workload, name: str, steps: int, rows: int) -> None:
    """Python functions by their own time."""
    method = METHODS[name](workload)
    batch = workload.batch()
    for _ in range(3):
        method.step(batch)
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(steps):
        method.step(batch)
    profiler.disable()
    pstats.Stats(profiler).strip_dirs().sort_stats("tottime").print_stats(rows)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", choices=sorted(WORKLOADS))
    parser.add_argument("--method", choices=sorted(METHODS), default="clipwise")
    parser.add_argument("--python", action="store_true", help="Python functions instead of torch operators")
    parser.add_argument("--steps", type=int, default=0, help="steps to average over (default: by the workload)")
    parser.add_argument("--rows", type=int, default=25)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    workload = WORKLOADS[arguments.workload]
    steps = arguments.steps or (50 if workload.rounds >= 60 else 3)
    show = print_functions if arguments.python else print_operators
    show(workload, arguments.method, steps, arguments.rows)


if __name__ == "__main__":
    main()
