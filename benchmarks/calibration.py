"""What an evaluation costs and what its intervals are worth; what a private temperature costs and brings.

    python -m benchmarks.calibration [--only stream intervals coverage private] [--samples 1000000] [--write]

`--write` keeps the numbers in benchmarks/calibration.json and the tables in docs/calibration.md.

Every row runs in a process of its own, on one thread. The scores of a stream come from a few batches that are used
again and again, so that making them costs neither time nor memory. Memory is the peak of the process (resident, from
the operating system) less what it was before the first batch. Seconds are CPU seconds.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import platform
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import clipwise as cw
from clipwise.calibration import Evaluator, PrivateTemperatureScaling, TemperatureScaling, evaluate
from papers.pages import DOCS, put

BATCH = 1_000
POOL = 8
CLASSES = 5
HERE = Path(__file__).resolve().parent
Row = dict[str, Any]


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _sample(seed: int, samples: int, classes: int, sharpness: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits that are `sharpness` times too large, and labels."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(samples, classes, generator=generator)
    labels = torch.multinomial(torch.softmax(logits, dim=1), 1, generator=generator)[:, 0]
    return sharpness * logits, labels


def stream(samples: int, classes: int, resamples: int, form: str) -> Row:
    """Batches of float32 probabilities or logits through an `Evaluator`."""
    torch.set_num_threads(1)
    pool = [_sample(seed, BATCH, classes, 2.0) for seed in range(POOL)]
    batches = [({form: torch.softmax(z, dim=1) if form == "probabilities" else z}, y) for z, y in pool]
    evaluate(logits=pool[0][0][:10], labels=pool[0][1][:10])  # first calls are not the stream's cost
    before, start = _peak_mb(), time.process_time()
    evaluator = Evaluator(resamples=resamples)
    for step in range(samples // BATCH):
        scores, labels = batches[step % POOL]
        evaluator.update(**scores, labels=labels)
    streamed, begun = time.process_time() - start, time.process_time()
    result = evaluator.result()
    return {
        "form": form,
        "samples": result.count,
        "classes": result.classes,
        "resamples": resamples,
        "input_mb_float32": round(samples * classes * 4 / 2**20),
        "added_memory_mb": round(_peak_mb() - before),
        "update_seconds": round(streamed, 1),
        "result_seconds": round(time.process_time() - begun, 2),
    }


def intervals(samples: int, classes: int, resamples: int) -> Row:
    """One call, with intervals for every metric when there are resamples: the median of five."""
    torch.set_num_threads(1)
    logits, labels = _sample(0, samples, classes, 2.0)
    times = []
    for _ in range(6):
        start = time.process_time()
        evaluate(logits=logits, labels=labels, resamples=resamples)
        times.append(time.process_time() - start)
    return {"samples": samples, "classes": classes, "resamples": resamples, "seconds": round(sorted(times[1:])[2], 3)}


def coverage(sharpness: float, samples: int, sets: int = 120, resamples: int = 300) -> Row:
    """The share of data sets whose 95 % interval holds the value of a million samples (or 0 of a calibrated model)."""
    torch.set_num_threads(1)
    logits, labels = _sample(10_000, 1_000_000, CLASSES, sharpness)
    truth = evaluate(logits=logits, labels=labels).metrics
    truth["debiased_ece"] = truth["ece"]  # what it estimates
    if sharpness == 1.0:
        truth |= {name: 0.0 for name in truth if "ce" in name and name not in ("accuracy", "confidence")}
    held = dict.fromkeys(truth, 0)
    for seed in range(sets):
        logits, labels = _sample(seed, samples, CLASSES, sharpness)
        found = evaluate(logits=logits, labels=labels, resamples=resamples).intervals or {}
        for name, (low, high) in found.items():
            held[name] += low <= truth[name] <= high
    return {
        "sharpness": sharpness,
        "samples": samples,
        "sets": sets,
        "true_ece": round(truth["ece"], 4),
        **{name: round(count / sets, 3) for name, count in held.items()},
    }


def private(samples: int, noise_multiplier: float, fits: int = 40) -> Row:
    """The ECE on 50,000 other samples after a private temperature, averaged over calibration sets and noise."""
    torch.set_num_threads(1)
    test_logits, test_labels = _sample(20_000, 50_000, CLASSES, 2.0)

    def error(fitted: Any) -> float:
        return evaluate(fitted.predict(test_logits), test_labels).ece

    noisy, public = [], []
    for seed in range(fits):
        data = _sample(seed, samples, CLASSES, 2.0)
        public.append(error(TemperatureScaling().fit(*data)))
        noisy.append(error(PrivateTemperatureScaling(noise_multiplier, seed=seed).fit(*data, ledger=cw.Ledger())))
    ledger = cw.Ledger([PrivateTemperatureScaling(noise_multiplier).event])
    return {
        "samples": samples,
        "noise_multiplier": noise_multiplier,
        "epsilon_alone": ledger.epsilon(1e-5),
        "ece_before": evaluate(logits=test_logits, labels=test_labels).ece,
        "ece_public": float(np.mean(public)),
        "ece_private": float(np.mean(noisy)),
        "ece_private_worst": float(np.max(noisy)),
    }


def _tasks(samples: int, classes: int) -> dict[str, tuple[Callable[..., Row], list[tuple[Any, ...]]]]:
    forms = [(samples, classes, resamples, form) for form in ("probabilities", "logits") for resamples in (0, 1_000)]
    return {
        "stream": (stream, forms),
        "intervals": (intervals, [(10_000, 10, 0), (10_000, 10, 1_000), (50_000, 1_000, 1_000)]),
        "coverage": (coverage, [(s, n) for s in (1.0, 1.1, 1.3, 2.0) for n in (500, 5_000)]),
        "private": (private, [(n, sigma) for n in (500, 2_000, 10_000) for sigma in (2.0, 5.0, 20.0)]),
    }


def _table(head: list[str], rows: Iterator[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def tables(report: dict[str, list[Row]]) -> dict[str, str]:
    stream_rows = (
        [f"{r['samples']:,} x {r['classes']:,} {r['form']}", "yes" if r["resamples"] else "no",
         f"{r['input_mb_float32']:,} MB", f"{r['added_memory_mb']} MB",
         f"{r['update_seconds'] + r['result_seconds']:.0f} s"]
        for r in report.get("stream", [])
    )  # fmt: skip
    shown = ("accuracy", "nll", "ece", "mce", "adaptive_ece", "debiased_ece", "smooth_ece", "classwise_ece")
    coverage_rows = (
        [f"{100 * r['true_ece']:.1f} %", f"{r['samples']:,}", *(f"{100 * r[name]:.0f}%" for name in shown)]
        for r in report.get("coverage", [])
    )
    private_rows = (
        [f"{r['samples']:,}", f"{r['noise_multiplier']:g}", f"{np.ceil(1000 * r['epsilon_alone']) / 1000:.3f}",
         *(f"{100 * r[f'ece_{name}']:.1f} %" for name in ("before", "public", "private", "private_worst"))]
        for r in report.get("private", [])
    )  # fmt: skip
    return {
        "stream": _table(["stream", "intervals", "size in float32", "memory added", "CPU time"], stream_rows),
        "coverage": _table(["true ECE", "samples", *(name.replace("_", " ") for name in shown)], coverage_rows),
        "private": _table(
            ["records", "noise multiplier", "epsilon alone", "ECE before", "public fit", "private fit", "worst of 40"],
            private_rows,
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Cost and worth of calibration metrics and private recalibration.")
    parts = ("stream", "intervals", "coverage", "private")
    parser.add_argument("--only", nargs="+", choices=parts, default=parts)
    parser.add_argument("--samples", type=int, default=1_000_000, help="length of the stream")
    parser.add_argument("--classes", type=int, default=1_000)
    parser.add_argument("--write", action="store_true", help="keep the numbers and the tables")
    args = parser.parse_args()
    target = HERE / "calibration.json"
    report: dict[str, Any] = json.loads(target.read_text(encoding="utf-8")) if target.exists() else {}
    for part in args.only:
        function, calls = _tasks(args.samples, args.classes)[part]
        report[part] = []
        for arguments in calls:
            with mp.get_context("spawn").Pool(1) as pool:
                report[part].append(pool.apply(function, arguments))
            print(part, json.dumps(report[part][-1]), flush=True)
        if args.write:
            report["batch"] = BATCH
            report["versions"] = {
                "python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__
            }  # fmt: skip
            target.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
            if part in (made := tables(report)):
                put(DOCS / "calibration.md", part, made[part])


if __name__ == "__main__":
    main()
