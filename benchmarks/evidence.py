"""What it costs to watch forward passes: `python -m benchmarks.evidence` writes evidence.json and a part of README.md.

A run of 500 steps watches its first three steps and one after about 64. Each is timed beside unwatched steps of the
same run, alternating, and the extra time is spread over the run. Memory is the peak of such a step over what was
resident before it.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import clipwise as cw
from benchmarks.measure import peak, reset_peak, settle
from benchmarks.workloads import WORKLOADS, Workload
from papers.pages import BENCHMARKS, put

HERE = Path(__file__).parent
STEPS = 500
WATCHED = (1, 2, 64)  # beside the first
NAMES = ("mlp", "mnist_cnn", "vit_tiny", "vit_wide")


def _private(workload: Workload, model: nn.Module) -> cw.Private:
    plan = cw.Plan(cw.FullBatch(workload.batch_size), STEPS, cw.Abadi(1.0), noise_multiplier=1.0)
    trained = [p for p in model.parameters() if p.requires_grad]
    return cw.Private(plan, model, torch.optim.SGD(trained, lr=1e-3), own_batches=True)


def _timed(private: cw.Private, workload: Workload, model: nn.Module, seed: int, watched: bool) -> float:
    batch = workload.batch(seed)
    start = time.perf_counter()
    losses: Tensor
    if watched:
        with private.watch(batch):
            losses = workload.losses(model, batch)
    else:
        losses = workload.losses(model, batch)
    private.step(losses)
    return time.perf_counter() - start


def _peak(private: cw.Private, workload: Workload, model: nn.Module, watched: bool) -> int:
    """The peak of a step over what is resident before it, in bytes."""
    before = settle()
    reset_peak()
    _timed(private, workload, model, 0, watched)
    return peak() - before


def measure(workload: Workload, rounds: int) -> dict[str, Any]:
    """Seconds of the first step watched and not, of later watched steps, and of unwatched ones."""
    model = workload.model()
    unwatched_first = _timed(_private(workload, model), workload, model, 0, watched=False)
    model = workload.model()
    private = _private(workload, model)
    first = _timed(private, workload, model, 0, watched=True)
    _timed(private, workload, model, 1, watched=False)
    watched, plain = [], []
    for k in range(rounds):
        watched.append(_timed(private, workload, model, 2 * k + 2, watched=True))
        plain.append(_timed(private, workload, model, 2 * k + 3, watched=False))
    step = median(plain)
    extra = first - unwatched_first + len(WATCHED) * (median(watched) - step)
    return {
        "name": workload.name,
        "title": workload.title,
        "step_seconds": step,
        "first_unwatched": unwatched_first / step,
        "first_watched": first / step,
        "watched": median(watched) / step,
        "share_of_a_step": extra / STEPS / step,
        "peak_mib": _peak(private, workload, model, watched=False) / 2**20,
        "peak_watched_mib": _peak(private, workload, model, watched=True) / 2**20,
    }


def markdown(body: dict[str, Any]) -> str:
    """The table and what was measured."""
    lines = [
        f"`python -m benchmarks.evidence` on {body['date']}, torch {body['torch']}, {body['threads']} threads; medians "
        f"of {body['rounds']} watched steps beside unwatched ones. All times in private steps of the same run that are "
        f"not watched. The last column spreads the first step and three later watched ones over {STEPS} steps.",
        "",
        "| workload | first step, not watched | first step, watched | later watched step | extra per step of the run | "
        "peak memory of a step, MiB | of a watched step, MiB |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in body["rows"]:
        numbers = row["first_unwatched"], row["first_watched"], row["watched"]
        times = " | ".join(f"{n:.1f}" for n in numbers)
        memory = f"{row['peak_mib']:.0f} | {row['peak_watched_mib']:.0f}"
        lines.append(f"| {row['title']} | {times} | {row['share_of_a_step']:.3f} | {memory} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="*", default=NAMES)
    options = parser.parse_args()
    rows = []
    for name in options.only:
        rows.append(measure(WORKLOADS[name], options.rounds))
        print(json.dumps(rows[-1]))
    body = {
        "date": date.today().isoformat(), "torch": torch.__version__, "python": platform.python_version(),
        "threads": torch.get_num_threads(), "rounds": options.rounds, "rows": rows,
    }  # fmt: skip
    if tuple(options.only) == NAMES:
        (HERE / "evidence.json").write_text(json.dumps(body, indent=1) + "\n")
        put(BENCHMARKS, "evidence", markdown(body))


if __name__ == "__main__":
    main()
