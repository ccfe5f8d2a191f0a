"""What correlated noise costs: the private step with noise of 8 bands over the one with independent noise.

`python -m benchmarks.correlated` measures and writes `correlated.json` and its part of README.md; `--tables` only
writes the table again. Both steps are made in turns by two equal models; CPU time of the process counts, because the
machine may be busy, and the ratio is the median over the pairs.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import numpy as np
import torch

import clipwise as cw
from benchmarks.measure import Json
from benchmarks.methods import Clipwise
from benchmarks.report import header, row
from benchmarks.workloads import WORKLOADS, Workload, trainable
from clipwise.entropy import Entropy
from clipwise.noise import GaussianNoise, chain_of
from papers.pages import BENCHMARKS, put

HERE = Path(__file__).parent
BANDS, STEPS = 8, 1_000
GOAL = 1.1
NAMES = ("mlp", "mnist_cnn", "vit_tiny", "vit_wide", "bert_wide")


def correlated(workload: Workload) -> Clipwise:
    """The same private step with banded noise; batches of one's own have no accounting with it, so it is put in."""
    method = Clipwise(workload)
    sampling = cw.CyclicPoisson(1_000 * workload.batch_size, workload.batch_size, BANDS)
    make = partial(chain_of, cw.Banded(BANDS), sampling, STEPS)
    like = [p.detach() for p in trainable(method.model)]
    method.private._release._noise = GaussianNoise(like, Entropy(), None, make)
    return method


def cost(workload: Workload, rounds: int) -> Json:
    """Medians of the ratio of CPU times of whole steps, and of the noise alone; milliseconds beside them."""
    torch.set_num_threads(1)
    methods = {"independent": Clipwise(workload), "banded": correlated(workload)}
    spent = dict.fromkeys(methods, 0.0)
    for name, method in methods.items():
        _timed(method, name, spent)
    steps: dict[str, list[float]] = {name: [] for name in methods}
    noise: dict[str, list[float]] = {name: [] for name in methods}
    order, shuffle = list(methods), random.Random(0)
    for number in range(BANDS + rounds):  # until all bands are there, it is a warm-up
        batch = workload.batch(number)
        shuffle.shuffle(order)
        for name in order:
            spent[name] = 0.0
            begun = time.process_time()
            methods[name].step(batch)
            whole = time.process_time() - begun
            if number >= BANDS:
                steps[name].append(whole)
                noise[name].append(spent[name])
    size = sum(p.numel() for p in trainable(methods["banded"].model))
    return {
        "workload": workload.title,
        "parameters": size,
        "rounds": rounds,
        "kept_mb": round(8e-6 * (BANDS - 1) * size, 1),
        "step_ms": {name: round(1e3 * statistics.median(found), 3) for name, found in steps.items()},
        "noise_ms": {name: round(1e3 * statistics.median(found), 3) for name, found in noise.items()},
        "ratio": round(_ratio(steps), 4),
        "noise_ratio": round(_ratio(noise), 3),
    }


def _timed(method: Clipwise, name: str, spent: dict[str, float]) -> None:
    """Let the release of the noise say how long it takes."""
    noise = method.private._release._noise
    release = noise.release

    def timed(*arguments: object) -> object:
        begun = time.process_time()
        result = release(*arguments)  # type: ignore[arg-type]
        spent[name] += time.process_time() - begun
        return result

    noise.release = timed  # type: ignore[assignment,method-assign]


def _ratio(found: dict[str, list[float]]) -> float:
    return statistics.median(b / a for a, b in zip(found["independent"], found["banded"], strict=True))


def measured(names: tuple[str, ...] = NAMES, most: int = 200) -> Json:
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "versions": {"torch": torch.__version__, "numpy": np.__version__},
        "bands": BANDS,
        "goal": GOAL,
        "steps": [cost(WORKLOADS[name], min(most, WORKLOADS[name].rounds)) for name in names],
    }


def tables(found: Json) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    lines = [
        f"Written by `python -m benchmarks.correlated` on {found['date']} ({versions}). The private step with noise of "
        f"{found['bands']} bands over the one with independent noise: CPU time on one thread of a busy machine, the "
        "median over pairs of steps that were made in turns. The goal is "
        f"{found['goal']:g}. `kept` is the past noise, in float64.",
        "",
        *header("workload", "parameters", "step", "goal met", "noise alone", "independent, ms", "banded, ms", "kept"),
    ]
    for each in found["steps"]:
        met = "yes" if each["ratio"] <= found["goal"] else "no"
        times = [f"{each['noise_ms'][name]:.2f}" for name in ("independent", "banded")]
        kept = f"{each['kept_mb']:,.1f} MB"
        ratios = f"{each['ratio']:.2f}", met, f"{each['noise_ratio']:.2f}"
        lines.append(row(each["workload"], f"{each['parameters']:,}", *ratios, *times, kept))
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", action="store_true", help="only write the table again")
    parser.add_argument("--rounds", type=int, default=200, help="pairs of steps at most")
    arguments = parser.parse_args()
    path = HERE / "correlated.json"
    if not arguments.tables:
        path.write_text(json.dumps(measured(most=arguments.rounds), indent=1) + "\n", encoding="utf-8")
    put(BENCHMARKS, "correlated", tables(json.loads(path.read_text(encoding="utf-8"))))


if __name__ == "__main__":
    main()
