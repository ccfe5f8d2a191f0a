"""Measurements inside one process: interleaved time ratios, peak memory, errors, and the cost of the first step.

Every number is a ratio to the plain step of the same run. Time is the process's CPU time (all threads) and wall time;
on a shared machine the CPU ratio is the trustworthy one.
"""

from __future__ import annotations

import ctypes
import gc
import json
import random
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from benchmarks.methods import CLIP, FALLBACK, METHODS, ClippedSum, Clipwise, Method, Plain
from benchmarks.workloads import WORKLOADS, Batch, Workload, bert_workload

Json: TypeAlias = dict[str, Any]
FAR_TOO_SLOW = 10.0  # a method that costs more plain steps than this is timed once, not in every round
SHORTEST = 0.02  # seconds: shorter steps are timed several at a time


class CannotRun(Exception):
    """A method cannot run a workload; the message is the reason it gave."""


@dataclass(frozen=True)
class Prepared:
    """A method that has made a step on the workload (its warm-up), and what had to be changed for it."""

    method: Method
    note: str = ""

    def again(self) -> Method:
        """The same method with fresh weights."""
        return METHODS[self.method.name](self.method.workload)


def prepare(workload: Workload, name: str) -> Prepared:
    """Build a method and make its first step; where it fails, try the adaptations that leave the mathematics as is."""
    attempts = [(workload, name, "")]
    explicit = workload.with_explicit_ids()
    if name.startswith("opacus"):
        attempts += [(explicit, name, "position ids passed for every sample")] if explicit else []
        if name in FALLBACK:
            note = "ghost norms refused: fast gradient clipping instead"
            attempts += [(workload, FALLBACK[name], note)]
            attempts += [(explicit, FALLBACK[name], f"{note}; position ids for every sample")] if explicit else []
    reason = ""
    for each, kind, note in attempts:
        try:
            method = METHODS[kind](each)
            method.step(each.batch())
        except Exception as error:  # the reason is the result
            first = str(error).strip().splitlines() or [""]
            reason = reason or f"{type(error).__name__}: {first[0][:160]}"
            continue
        return Prepared(method, f"{note} (unmodified: {reason})" if note else "")
    raise CannotRun(reason)


# Time ------------------------------------------------------------------------------------------------------------


def interleaved(methods: Mapping[str, Method], *, seconds: float, most: int, fewest: int = 3) -> Json:
    """Rounds in which every method makes the same steps, in shuffled order; ratios to `plain` within each round.

    The methods are warm: each has made a step. A first round sorts out what is far too slow and is not counted,
    unless a step takes seconds.
    """
    batches = {name: [method.workload.batch(seed) for seed in range(3)] for name, method in methods.items()}
    once = {name: _clocked(method, batches[name], 1) for name, method in methods.items()}
    repeats = max(1, round(SHORTEST / once["plain"][0]))
    slow = {n: t for n, t in once.items() if repeats == 1 and t[0] > FAR_TOO_SLOW * once["plain"][0]}
    methods = {name: method for name, method in methods.items() if name not in slow}
    cpu: dict[str, list[float]] = {name: [] for name in methods}
    wall: dict[str, list[float]] = {name: [] for name in methods}
    if once["plain"][0] > 1.0:
        for name in methods:
            cpu[name].append(once[name][0])
            wall[name].append(once[name][1])
    order, shuffle = list(methods), random.Random(0)
    begin = time.perf_counter()
    while len(cpu["plain"]) < most and (len(cpu["plain"]) < fewest or time.perf_counter() - begin < seconds):
        shuffle.shuffle(order)
        for name in order:
            gc.collect()
            cpu_seconds, wall_seconds = _clocked(methods[name], batches[name], repeats)
            cpu[name].append(cpu_seconds)
            wall[name].append(wall_seconds)
    result = {name: _summary(cpu[name], cpu["plain"], wall[name], wall["plain"], repeats) for name in methods}
    for name, (cpu_seconds, wall_seconds) in slow.items():
        result[name] = _summary([cpu_seconds], [once["plain"][0]], [wall_seconds], [once["plain"][1]], 1)
    return result


def _clocked(method: Method, batches: Sequence[Batch], repeats: int) -> tuple[float, float]:
    """CPU and wall seconds of one step, averaged over `repeats` of them."""
    cpu_start, wall_start = time.process_time(), time.perf_counter()
    for repeat in range(repeats):
        method.step(batches[repeat % len(batches)])
    wall = (time.perf_counter() - wall_start) / repeats
    return (time.process_time() - cpu_start) / repeats, wall


def _summary(
    cpu: list[float], cpu_plain: list[float], wall: list[float], wall_plain: list[float], repeats: int
) -> Json:
    return {
        "cpu_ratio": spread([a / b for a, b in zip(cpu, cpu_plain, strict=True)]),
        "wall_ratio": spread([a / b for a, b in zip(wall, wall_plain, strict=True)]),
        "cpu_ms": 1e3 * statistics.median(cpu),
        "wall_ms": 1e3 * statistics.median(wall),
        "rounds": len(cpu),
        "steps_per_round": repeats,
    }


def spread(values: Sequence[float]) -> Json:
    """Median and quartiles."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    return {"median": middle, "q1": low, "q3": high}


# Correctness -----------------------------------------------------------------------------------------------------


def loop_reference(workload: Workload, model: nn.Module, batch: Batch) -> ClippedSum:
    """Norms and clipped sum by one backward per sample in float64: slow and beyond doubt."""
    model = model.double()
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    sums = {name: torch.zeros_like(p) for name, p in named.items()}
    norms = []
    for i in range(len(next(iter(batch.values())))):
        sample = {name: _double(value[i : i + 1]) for name, value in batch.items()}
        gradients = torch.autograd.grad(workload.losses(model, sample)[0], list(named.values()), allow_unused=True)
        norm = torch.stack([g.square().sum() for g in gradients if g is not None]).sum().sqrt()
        norms.append(norm)
        for name, gradient in zip(named, gradients, strict=True):
            if gradient is not None:
                sums[name] += (CLIP / norm).clamp(max=1.0) * gradient
    return ClippedSum(torch.stack(norms), sums)


def _double(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def error_of(found: ClippedSum, reference: ClippedSum) -> Json:
    """Largest relative error of a norm, and the error of the clipped sum relative to its length."""
    norm_error = ((found.norms.double() - reference.norms) / reference.norms).abs().max()
    squared, length = 0.0, 0.0
    for name, expected in reference.sums.items():
        got = found.sums[name].double() if name in found.sums else torch.zeros_like(expected)
        squared += float((got - expected).square().sum())
        length += float(expected.square().sum())
    return {"norms": float(norm_error), "sum": (squared / length) ** 0.5}


def errors(workload: Workload, prepared: Mapping[str, Prepared], samples: int = 4) -> Json:
    """Each method's error against the loop, on a few samples and fresh weights."""
    reference = loop_reference(workload, workload.model(), workload.batch(seed=7, size=samples))
    found: Json = {}
    for name, each in prepared.items():
        method = each.again()
        result = method.clipped(method.workload.batch(seed=7, size=samples))
        if result is not None:
            found[name] = error_of(result, reference)
    return found


# The first step, and batches of other lengths --------------------------------------------------------------------


def first_step(workload: Workload, steps: int = 2) -> Json:
    """What planning and checking cost: (first step - later steps), in plain steps. Must be first in its process."""
    plain = Plain(workload)
    batches = [workload.batch(seed) for seed in range(steps + 1)]
    plain.step(batches[-1])
    plain_seconds = statistics.median(_timed(plain, batch) for batch in batches[:steps])
    private = Clipwise(workload)
    first = _timed(private, batches[0])
    later = statistics.median(_timed(private, batch) for batch in batches[1:])
    return {
        "extra_plain_steps": (first - later) / plain_seconds,
        "first_cpu_ms": 1e3 * first,
        "later_cpu_ms": 1e3 * later,
        "plain_cpu_ms": 1e3 * plain_seconds,
    }


def _timed(method: Method, batch: Batch) -> float:
    start = time.process_time()
    method.step(batch)
    return time.process_time() - start


def varying_lengths(lengths: Sequence[int] = (128, 96, 112, 80, 120, 64), width: int = 768) -> Json:
    """A length met for the first time beside the same length met again: no plan may be made again."""
    workload = bert_workload(width=width)
    batches = {n: bert_workload(length=n, width=width).batch() for n in lengths}
    plain, private = Plain(workload), Clipwise(workload)
    for n in lengths:
        plain.step(batches[n])
    private.step(batches[lengths[0]])
    new = {n: _timed(private, batches[n]) for n in lengths}
    again = {n: min(_timed(private, batches[n]) for _ in range(2)) for n in lengths}
    unit = {n: min(_timed(plain, batches[n]) for _ in range(2)) for n in lengths}
    rows = [
        {"length": n, "new": new[n] / unit[n], "again": again[n] / unit[n], "extra": (new[n] - again[n]) / unit[n]}
        for n in lengths
    ]
    return {"rows": rows, "largest_extra_plain_steps": max(row["extra"] for row in rows[1:])}


# Memory ----------------------------------------------------------------------------------------------------------


def resident() -> int:
    """Resident memory now, in bytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def reset_peak() -> None:
    """Let the kernel's high-water mark of resident memory start again."""
    Path("/proc/self/clear_refs").write_text("5")


def peak() -> int:
    """High-water mark of resident memory since `reset_peak`, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def settle() -> int:
    """Give freed memory back to the system; what is resident then."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return resident()


def peak_memory(workload: Workload, name: str) -> Json:
    """Peak increase of resident memory over the state just before the first step, in a process of its own.

    A step on a tiny model comes first, so that libraries loaded on first use are not counted. `first` is the step
    that plans and checks; `later` the largest of the next two.
    """
    prepare(replace(WORKLOADS["mlp"], batch_size=8), name)
    kind, source = _runnable(workload, name)
    method = METHODS[kind](source)
    batches = [source.batch(seed) for seed in range(3)]
    before = settle()
    reset_peak()
    method.step(batches[0])
    first = peak() - before
    gc.collect()
    reset_peak()
    for batch in batches[1:]:
        method.step(batch)
    return {"first_bytes": first, "later_bytes": peak() - before}


def _runnable(workload: Workload, name: str) -> tuple[str, Workload]:
    """The form of a method that runs this workload, tried out in another process: a try would leave its memory here."""
    explicit = workload.with_explicit_ids()
    if explicit is None or not name.startswith("opacus"):
        return name, workload
    command = [sys.executable, "-m", "benchmarks.worker", "form", "--workload", workload.name, "--method", name]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1])
    if "cannot_run" in found:
        raise CannotRun(found["cannot_run"])
    return found["method"], explicit if found["explicit_ids"] else workload


def form(workload: Workload, name: str) -> Json:
    """Which form of a method runs the workload."""
    method = prepare(replace(workload, batch_size=2), name).method
    return {"method": method.name, "explicit_ids": method.workload.explicit_ids}


def peak_between_steps(method: Method, batch: Batch) -> int:
    """Peak increase of resident memory during a step over the state between steps."""
    for _ in range(2):
        method.step(batch)
    before = settle()
    reset_peak()
    method.step(batch)
    return peak() - before


def allocated_peak(work: Callable[[], object]) -> int:
    """Bytes that torch's allocator gave out at most at a time during some work, by its own count."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        work()
    events: Any = trace.profiler
    changes = [event for event in events.kineto_results.events() if event.name() == "[memory]"]
    return max(accumulate((event.nbytes() for event in sorted(changes, key=lambda e: e.start_ns())), initial=0))


def quiet() -> None:
    """Peers warn about hooks and vmap fallbacks; the measurements are what is wanted here."""
    warnings.simplefilter("ignore")
