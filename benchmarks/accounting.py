"""The exact accountant against dp-accounting's PLD and RDP and Opacus' PRV: value and time, side by side in one run.

    python -m benchmarks.accounting [--seconds 12]

Each accountant runs in a process of its own, one at a time, with a time and a memory limit; imports are not timed,
caches are cleared before every row, and times are processor seconds of one thread, the best of three. What comes within
0.1 % of the exact value counts as a rival, and the rows where a rival is faster are listed. Writes accounting.json and
its tables in docs/accounting.md.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import multiprocessing as mp
import resource
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from papers.pages import DOCS, put

Segments = list[tuple[float, float, int]]

ROWS: list[tuple[str, Segments, float]] = [
    ("CIFAR10, 15 epochs", [(1.3, 0.02, 750)], 1e-5),
    ("MNIST, 60 epochs", [(1.1, 256 / 60_000, 14_040)], 1e-5),
    ("SNLI, 3 epochs", [(0.4, 32 / 550_152, 51_576)], 1 / 550_152),
    ("q=1e-3 sigma=1 T=1e3", [(1.0, 1e-3, 1_000)], 1e-6),
    ("q=1e-3 sigma=1 T=1e4", [(1.0, 1e-3, 10_000)], 1e-6),
    ("q=1e-3 sigma=1 T=1e5", [(1.0, 1e-3, 100_000)], 1e-6),
    ("q=1e-3 sigma=1 T=1e6", [(1.0, 1e-3, 1_000_000)], 1e-6),
    ("10 epochs, sigma=0.7 T=1e3", [(0.7, 1e-2, 1_000)], 1e-6),
    ("10 epochs, sigma=0.7 T=1e4", [(0.7, 1e-3, 10_000)], 1e-6),
    ("10 epochs, sigma=0.7 T=1e5", [(0.7, 1e-4, 100_000)], 1e-6),
    ("10 epochs, sigma=0.7 T=1e6", [(0.7, 1e-5, 1_000_000)], 1e-6),
    ("20 noises 1.6 to 0.9, q=0.01, 500 each", [(1.6 - 0.7 * k / 19, 0.01, 500) for k in range(20)], 1e-5),
    ("20 rates 0.002 to 0.02, sigma=1, 500 each", [(1.0, 0.002 + 0.018 * k / 19, 500) for k in range(20)], 1e-5),
    ("200 noises, 50 steps each", [(1.6 - 0.7 * k / 199, 0.01, 50) for k in range(200)], 1e-5),
    ("1,000 noises, 10 steps each", [(1.6 - 0.7 * k / 999, 0.01, 10) for k in range(1_000)], 1e-5),
    ("sigma=0.3 q=1e-3 T=1e4", [(0.3, 1e-3, 10_000)], 1e-6),
    ("sigma=0.3 q=1e-6 T=1e6", [(0.3, 1e-6, 1_000_000)], 1e-6),
    ("sigma=0.3 q=1e-6 T=1e6, delta 1e-12", [(0.3, 1e-6, 1_000_000)], 1e-12),
    ("sigma=1 q=1e-6 T=1e6, delta 1e-12", [(1.0, 1e-6, 1_000_000)], 1e-12),
    ("sigma=1 q=0.01 T=1e6", [(1.0, 0.01, 1_000_000)], 1e-6),
    ("sigma=0.5 q=0.01 T=1e5", [(0.5, 0.01, 100_000)], 1e-5),
    ("sigma=20 q=0.5 T=1e3, delta 1e-10", [(20.0, 0.5, 1_000)], 1e-10),
    ("sigma=1 q=0.01 T=1e4, delta 1e-12", [(1.0, 0.01, 10_000)], 1e-12),
    ("sigma=1 q=0.01 T=1e4, delta 1e-15", [(1.0, 0.01, 10_000)], 1e-15),
    ("sigma=100 q=1e-3 T=1e4", [(100.0, 1e-3, 10_000)], 1e-6),
    ("sigma=0.1 q=1e-3 T=1e3", [(0.1, 1e-3, 1_000)], 1e-5),
]
TARGETS = [
    ("eps 1, q=0.01 T=1e3", 1.0, 1e-5, (100_000, 1_000), 1_000),
    ("eps 3, q=0.01 T=1e4", 3.0, 1e-6, (100_000, 1_000), 10_000),
    ("eps 8, q=0.02 T=5e3", 8.0, 1e-5, (50_000, 1_000), 5_000),
    ("eps 2, q=1e-4 T=1e6", 2.0, 1e-8, (10_000, 1), 1_000_000),
]


def _clear_caches() -> None:
    """Every row starts cold."""
    from clipwise.accounting._numerics import contour, grid, lattice, saddle
    from clipwise.accounting.accountants import edgeworth, rdp

    for module in (contour, edgeworth, grid, lattice, rdp, saddle):
        for value in vars(module).values():
            if hasattr(value, "cache_clear"):
                value.cache_clear()


def _exact(segments: Segments, delta: float) -> tuple[float, str]:
    from clipwise.accounting import GaussianSteps, account
    from clipwise.sampling import Poisson

    _clear_caches()
    found = account([GaussianSteps(Poisson(rate=q, batch_size=1), sigma, steps) for sigma, q, steps in segments], delta)
    return found.epsilon, found.accountant


def _pld(segments: Segments, delta: float) -> tuple[float, str]:
    from dp_accounting.pld import privacy_loss_distribution as pld

    total = None
    for sigma, q, steps in segments:
        piece = pld.from_gaussian_mechanism(sigma, sampling_prob=q, value_discretization_interval=1e-4).self_compose(
            steps
        )
        total = piece if total is None else total.compose(piece)
    return float(total.get_epsilon_for_delta(delta)), "pld"


def _rdp(segments: Segments, delta: float) -> tuple[float, str]:
    import dp_accounting as dpa
    from dp_accounting import rdp

    accountant = rdp.RdpAccountant()
    for sigma, q, steps in segments:
        accountant.compose(dpa.PoissonSampledDpEvent(q, dpa.GaussianDpEvent(sigma)), steps)
    return float(accountant.get_epsilon(delta)), "rdp"


def _prv(segments: Segments, delta: float) -> tuple[float, str]:
    import warnings

    from opacus.accountants import PRVAccountant

    warnings.simplefilter("ignore")
    accountant = PRVAccountant()
    accountant.history = [tuple(segment) for segment in segments]
    return float(accountant.get_epsilon(delta, eps_error=0.01)), "prv"


ACCOUNTANTS: dict[str, Callable[[Segments, float], tuple[float, str]]] = {
    "clipwise exact": _exact,
    "dp-accounting PLD 1e-4": _pld,
    "Opacus PRV upper": _prv,
    "dp-accounting RDP": _rdp,
}


def _serve(name: str, pipe: Connection) -> None:
    """A process for one accountant: import and warm up first, then answer rows."""
    limit = 6 * 2**30
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    function = ACCOUNTANTS[name]
    try:
        function([(2.0, 0.1, 10)], 1e-5)
        pipe.send("ready")
    except ImportError as error:
        pipe.send(f"not installed: {error}")
        return
    while True:
        segments, delta, repeats = pipe.recv()
        times, answer = [], (float("nan"), "")
        try:
            for _ in range(repeats):
                gc.collect()
                start = time.process_time()
                answer = function(segments, delta)
                times.append(time.process_time() - start)
                if times[0] > 1.0:
                    break
            found = {"epsilon": answer[0], "by": answer[1], "seconds": min(times)}
            pipe.send(found if math.isfinite(answer[0]) else {"error": "infinite"})
        except Exception as error:  # a rival's failure is a result
            pipe.send({"error": f"{type(error).__name__}: {str(error)[:44]}"})


class Worker:
    """Asks one accountant's process, and starts it again when it had to be stopped."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.missing = ""
        self._start()

    def _start(self) -> None:
        context = mp.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(self.name, theirs), daemon=True)
        self._process.start()
        said = self._pipe.recv() if self._pipe.poll(120) else "did not start"
        self.missing = "" if said == "ready" else said

    def ask(self, segments: Segments, delta: float, seconds: float) -> dict[str, Any]:
        if self.missing:
            return {"error": self.missing}
        self._pipe.send((segments, delta, 3))
        try:
            if self._pipe.poll(seconds):
                answer: dict[str, Any] = self._pipe.recv()
                return answer
            reason = f"over {seconds:g} s"
        except EOFError:
            reason = "died (memory)"
        self.stop()
        self._start()
        return {"error": reason}

    def stop(self) -> None:
        self._process.kill()
        self._process.join()


def measure(seconds: float) -> list[dict[str, Any]]:
    workers = {name: Worker(name) for name in ACCOUNTANTS}
    results = []
    for label, segments, delta in ROWS:
        row: dict[str, Any] = {"case": label, "delta": delta}
        for name, worker in workers.items():
            row[name] = worker.ask(segments, delta, 60.0 if name == "clipwise exact" else seconds)
        ours = row["clipwise exact"]
        for name in list(ACCOUNTANTS)[1:]:
            if "epsilon" in row[name]:
                row[name]["over exact"] = row[name]["epsilon"] / ours["epsilon"]
                row[name]["times slower"] = row[name]["seconds"] / ours["seconds"]
        results.append(row)
        print(_line(row), flush=True)
    for worker in workers.values():
        worker.stop()
    return results


def _line(row: dict[str, Any]) -> str:
    ours = row["clipwise exact"]
    cells = [f"{row['case']:<42} {ours['epsilon']:<11.6g} {1e3 * ours['seconds']:6.0f} ms {ours['by']:<6}"]
    for name in list(ACCOUNTANTS)[1:]:
        cell = row[name]
        text = cell["error"][:20] if "error" in cell else f"{cell['over exact']:.4f} x{cell['times slower']:.1f}"
        cells.append(f"{name.split()[-2][:8]}: {text:<20}")
    return " | ".join(cells)


def rivals_ahead(results: list[dict[str, Any]]) -> list[str]:
    """Rows where something within 0.1 % of the exact value (not below it) was faster."""
    found = []
    for row in results:
        for name in list(ACCOUNTANTS)[1:]:
            cell = row[name]
            if "epsilon" in cell and -1e-6 <= cell["over exact"] - 1.0 <= 1e-3 and cell["times slower"] < 1.0:
                found.append(f"{row['case']}: {name}")
    return found


def markdown(body: dict[str, Any]) -> str:
    """The table of the documentation: epsilon over the exact value, and time over ours."""
    names = list(ACCOUNTANTS)[1:]
    lines = [f"| case | exact ε | ours | {' | '.join(names)} |", "|" + " --- |" * (3 + len(names))]
    for row in body["rows"]:
        ours = row["clipwise exact"]
        cells = [
            row[name]["error"]
            if "error" in row[name]
            else f"{row[name]['over exact']:.4f}, {row[name]['times slower']:.1f}×"
            for name in names
        ]
        mark = "" if ours["by"] == "exact" else f" ({ours['by']} bound)"
        lines.append(
            f"| {row['case']} | {ours['epsilon']:.5g}{mark} | {1e3 * ours['seconds']:.0f} ms | {' | '.join(cells)} |"
        )
    ahead = ", ".join(body["rivals ahead"]) or "none"
    lines += ["", f"Rows where a rival within 0.1 % of the exact value was faster: {ahead}.", "", *_goals(body)]
    return "\n".join(lines) + "\n"


def _goals(body: dict[str, Any]) -> list[str]:
    """What was aimed at, and the slowest of what was measured."""
    taken = {row["case"]: row["clipwise exact"] for row in body["rows"]}
    several = {"20": 0.2, "1,000": 10.0}
    single = [name for name in taken if not any(word in name for word in ("noises", "rates"))]
    lines = ["| goal | aimed at | slowest measured |", "| --- | --- | --- |"]

    def line(goal: str, limit: float, names: list[str]) -> None:
        slowest = max(names, key=lambda name: taken[name]["seconds"])
        over = [name for name in names if taken[name]["seconds"] > limit]
        late = f"; over the goal: {', '.join(over)}" if over else ""
        lines.append(f"| {goal} | {limit:g} s | {taken[slowest]['seconds']:.2f} s ({slowest}){late} |")

    line("one segment, any number of steps", 0.3, single)
    for count, limit in several.items():
        line(f"{count} segments", limit, [name for name in taken if name.startswith(f"{count} ")])
    times = [row["seconds"] for row in body["calibration"]]
    shares = [row["epsilon over target"] for row in body["calibration"]]
    lines.append(f"| noise for a target | 0.5 s | {max(times):.2f} s |")
    lines.append(f"| epsilon at that noise, over the target | 0.999 to 1 | {min(shares):.5f} to {max(shares):.5f} |")
    return lines


def calibrations() -> list[dict[str, Any]]:
    from clipwise.accounting import epsilon, noise_multiplier
    from clipwise.sampling import Poisson

    results = []
    for label, target, delta, (size, batch), steps in TARGETS:
        _clear_caches()
        start = time.process_time()
        sigma = noise_multiplier(target, delta, Poisson(size, batch), steps)
        taken = time.process_time() - start
        share = epsilon(sigma, Poisson(size, batch), steps, delta) / target
        results.append({"case": label, "noise_multiplier": sigma, "epsilon over target": share, "seconds": taken})
        print(f"calibration {label:<24} sigma {sigma:.5f}, {share:.5f} of the target, {taken:.3f} s", flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=12.0, help="limit per rival and row")
    args = parser.parse_args()
    results = measure(args.seconds)
    ahead = rivals_ahead(results)
    body = {"seconds limit": args.seconds, "rows": results, "rivals ahead": ahead, "calibration": calibrations()}
    Path(__file__).with_suffix(".json").write_text(json.dumps(body, indent=1) + "\n")
    put(DOCS / "accounting.md", "accountants", markdown(body))
    print("rivals that are as exact and faster:", ", ".join(ahead) or "none")


if __name__ == "__main__":
    main()
