"""Estimated norms (DP-SGD-JL) beside the exact engine: error, time, peak memory, and the price in privacy.

`python -m benchmarks.jl` measures and writes `jl.json` and the tables of docs/optimizers.md; `--tables` only writes the
tables again. Every measurement is a process of its own. Time and memory are ratios to the plain, non-private step of
the same run.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import measure, run, scaling
from benchmarks.measure import Json
from benchmarks.methods import CLIP, METHODS, ClippedSum, Clipwise, Method, Plain
from benchmarks.report import header, row
from benchmarks.worker import MEMORY_ENVIRONMENT
from benchmarks.workloads import WORKLOADS, Batch, Workload
from papers.pages import DOCS, put

HERE = Path(__file__).parent
COUNTS = (4, 16, 64, 256)
MEMORY_WORKLOADS = ("mnist_cnn", "resnet18", "vit_tiny", "bert_wide")
MEMORY_METHODS = ("plain", "clipwise", "projected")
PRIVACY_COUNTS = (16, 32, 64, 128, 256, 1024, 4096)
PRIVACY_PLAN = {"sample_size": 60_000, "batch_size": 256, "steps": 14_040, "noise_multiplier": 1.1, "delta": 1e-5}


class Projected(Method):
    """`ProjectedNorms`, as a user runs it. The noise is large, so that no plan is refused."""

    name, title = "projected", "estimated norms"

    def __init__(self, workload: Workload, count: int = 4) -> None:
        import clipwise as cw

        super().__init__(workload)
        sampling = cw.Poisson(sample_size=1_000 * workload.batch_size, batch_size=workload.batch_size)
        plan = cw.Plan(sampling, 1_000, cw.Abadi(CLIP), 1e6, mechanism=cw.mechanisms.ProjectedNorms(count))
        self.private = cw.Private(plan, self.model, self.optimizer, loss_fn=workload.losses, own_batches=True)

    def step(self, batch: Batch) -> None:
        self.private.step(self.private.losses(batch))


METHODS[Projected.name] = Projected


def timed_workloads() -> dict[str, Workload]:
    """Small enough for hundreds of forward passes per step."""
    return {
        "mnist_cnn": replace(WORKLOADS["mnist_cnn"], title="MNIST CNN of the paper, batch 64", batch_size=64),
        "small_bert": replace(scaling.small_bert(batch_size=16), title="BERT, width 128, 2 layers, batch 16"),
    }


# In a fresh process ----------------------------------------------------------------------------------------------


def times(name: str) -> Json:
    """CPU time of the step over that of the plain step, exact and with each number of projections."""
    workload = timed_workloads()[name]
    methods: dict[str, Method] = {"plain": Plain(workload), "exact": Clipwise(workload)}
    methods |= {str(count): Projected(workload, count) for count in COUNTS}
    for method in methods.values():
        method.step(workload.batch())
    found: dict[str, list[float]] = {each: [] for each in methods}
    for seed in range(3):
        batch = workload.batch(seed)
        plain = statistics.median(measure._clocked(methods["plain"], [batch], 5)[0] for _ in range(3))
        for each, method in methods.items():
            found[each].append(measure._clocked(method, [batch], 1)[0] / plain)
    return {each: measure.spread(values) for each, values in found.items()}


def errors(name: str) -> Json:
    """How far the estimates are from the exact norms of the same weights and batch, and what clipping makes of it."""
    import clipwise as cw
    from clipwise.entropy import Entropy
    from clipwise.private.norms.projections import Projections, Replay, sums_by_backward

    workload = timed_workloads()[name]
    model, batch = workload.model(), workload.batch()
    named = {key: p for key, p in model.named_parameters() if p.requires_grad}
    exact = cw.per_sample_norms(workload.losses(model, batch), named).double()
    rule = cw.Abadi(float(exact.min()) / 4)  # every sample is clipped
    wanted = cw.clipped_gradients(workload.losses(model, batch), named, rule)
    projections = Projections(model, workload.losses, named)
    found: Json = {}
    for count in COUNTS:
        norms = projections.norms(batch, count, Entropy(count), Replay(model))[0]
        factors = rule(norms)
        sums = sums_by_backward(workload.losses(model, batch), list(named.values()), factors)
        got = ClippedSum(norms, dict(zip(named, sums, strict=True)))
        found[str(count)] = {
            "norms": float((norms / exact - 1).square().mean().sqrt()),
            "sum": measure.error_of(got, ClippedSum(exact, {k: g.double() for k, g in wanted.gradients.items()}))[
                "sum"
            ],
            "largest": float((factors * exact).max()) / rule.R,
        }
    return found


def memory(name: str, method: str) -> Json:
    """Peak memory of the first step and of later ones over the state before; it does not depend on the projections."""
    return measure.peak_memory(WORKLOADS[name], method)


def privacy() -> Json:
    """The epsilon of the paper's MNIST run, and the noise that gives the epsilon of exact norms."""
    import clipwise as cw

    given: Mapping[str, Any] = PRIVACY_PLAN
    sampling, delta = cw.Poisson(given["sample_size"], given["batch_size"]), given["delta"]
    exact = cw.epsilon(given["noise_multiplier"], sampling, given["steps"], delta)
    rows = []
    for count in PRIVACY_COUNTS:
        estimated = cw.mechanisms.ProjectedNorms(count)
        plan = cw.Plan(sampling, given["steps"], cw.Abadi(1.0), given["noise_multiplier"], mechanism=estimated)
        needed = replace(plan, noise_multiplier=None).calibrate(exact, delta).noise_multiplier
        rows.append({"projections": count, "epsilon": plan.epsilon(delta), "noise_multiplier": needed})
    return {"exact": exact, "rows": rows}


# Tables ----------------------------------------------------------------------------------------------------------


def cost_table(results: Json) -> str:
    """Error and time over the number of projections."""
    lines = header("model", "projections", "error of a norm", "of the clipped sum", "largest contribution", "time")
    for name, workload in timed_workloads().items():
        time, error = results["time"][name], results["errors"][name]
        lines.append(row(workload.title, "exact norms", "–", "–", "1.00 R", f"{time['exact']['median']:.1f}"))
        for count in map(str, COUNTS):
            cells = error[count]
            lines.append(
                row(
                    "", count, f"{100 * cells['norms']:.1f} %", f"{100 * cells['sum']:.1f} %",
                    f"{cells['largest']:.2f} R", f"{time[count]['median']:.0f}",
                )
            )  # fmt: skip
    return "\n".join(lines)


def memory_table(results: Json) -> str:
    """Peak memory over that of the plain step."""
    lines = header(
        "model", "plain, MB", "exact norms", "their first step", "estimated norms", "their first step"
    )  # fmt: skip
    for name in MEMORY_WORKLOADS:
        found = results["memory"][name]
        plain = found["plain"]["later_bytes"]
        ratios = [
            f"{found[m][kind] / plain:.2f}" for m in MEMORY_METHODS[1:] for kind in ("later_bytes", "first_bytes")
        ]
        lines.append(row(WORKLOADS[name].title, f"{plain / 1e6:.0f}", *ratios))
    return "\n".join(lines)


def printed(epsilon: float) -> str:
    """Rounded up, as bounds are."""
    return f"{math.ceil(1e3 * epsilon) / 1e3:.3f}"


def privacy_table(results: Json) -> str:
    """The price of estimating."""
    found = results["privacy"]
    noise = PRIVACY_PLAN["noise_multiplier"]
    lines = header("projections", f"epsilon at noise multiplier {noise:g}", "noise multiplier for the exact epsilon")
    lines.append(row("exact norms", printed(found["exact"]), f"{noise:g}"))
    for each in found["rows"]:
        lines.append(row(str(each["projections"]), printed(each["epsilon"]), f"{each['noise_multiplier']:.4g}"))
    return "\n".join(lines)


def parts(results: Json) -> dict[str, str]:
    """The tables of docs/optimizers.md by their names."""
    machine, versions = results["machine"], results["versions"]
    about = (
        f"Measured {results['date']} at revision {results['revision']} on {machine['cores']} cores of "
        f"{machine['cpu']}, 1 thread, torch {versions['torch']}."
    )
    return {
        "jl-privacy": privacy_table(results),
        "jl-cost": f"{cost_table(results)}\n\n{about}",
        "jl-memory": memory_table(results),
    }


# The parent ------------------------------------------------------------------------------------------------------

WORKERS: dict[str, Callable[..., Json]] = {"time": times, "errors": errors, "memory": memory, "privacy": privacy}


def tasks() -> Iterator[tuple[str, ...]]:
    """All measurements: the worker and its arguments, which is also where the result goes."""
    yield ("privacy",)
    for name in timed_workloads():
        yield ("errors", name)
        yield ("time", name)
    for name in MEMORY_WORKLOADS:
        for method in MEMORY_METHODS:
            yield ("memory", name, method)


def in_a_fresh_process(task: tuple[str, ...]) -> Json:
    """One worker's result."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    if task[0] == "memory":
        environment |= MEMORY_ENVIRONMENT
    command = [sys.executable, "-m", "benchmarks.jl", "--worker", *task]
    done = subprocess.run(command, cwd=HERE.parent, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    found: Json = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worker", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--tables", action="store_true", help="only write the tables again from jl.json")
    parser.add_argument("--again", action="store_true", help="measure what is in jl.json already, too")
    arguments = parser.parse_args()
    if arguments.worker:
        torch.set_num_threads(1)
        measure.quiet()
        kind, *given = arguments.worker
        print(json.dumps(WORKERS[kind](*given)))
        return
    path = HERE / "jl.json"
    results: Json = json.loads(path.read_text()) if path.exists() and not arguments.again else {}
    for task in () if arguments.tables else tasks():
        if run.lookup(results, task) is None:
            run.store(results, task, in_a_fresh_process(task))
            results |= {"machine": run.machine(), "versions": run.versions(), "revision": run.revision()}
            run.save(path, results)
            print(" ".join(task), flush=True)
    for name, text in parts(results).items():
        put(DOCS / "optimizers.md", name, text)


if __name__ == "__main__":
    main()
