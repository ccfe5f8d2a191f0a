"""The tangent kernel of the paper's MNIST network, by this package and by plain `vmap(jacrev)`: time, memory, accuracy.

    python -m benchmarks.ntk [--samples 1000] [--threads 2] [--write]

Every method runs in a process of its own, one after the other; what is imported is not timed, and memory is the highest
that the process ever held. CPU seconds are those of all threads: on a machine that does other work too they are the
number to trust. Inputs are random images of MNIST's shape. `--write` keeps ntk.json and its table in docs/theory.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap
from torch.nn import functional as F

import clipwise as cw
from benchmarks.measure import peak
from papers.mnist.network import layers as mnist_cnn
from papers.pages import DOCS, put

CHECKED = 8  # samples whose kernel is compared with float64


def problem(samples: int) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return mnist_cnn(), torch.randn(samples, 1, 28, 28)


def plain(model: nn.Module, x: Tensor) -> Tensor:
    """The Jacobian of all samples by `vmap(jacrev)`, and its product with itself, parameter by parameter."""
    weights = {name: p.detach() for name, p in model.named_parameters()}

    def single(values: dict[str, Tensor], sample: Tensor) -> Tensor:
        return functional_call(model, values, (sample.unsqueeze(0),)).squeeze(0)

    rows = vmap(jacrev(single), (None, 0))(weights, x)
    J = torch.cat([part.flatten(2).flatten(0, 1) for part in rows.values()], 1)
    return J @ J.T


def clipped(model: nn.Module, x: Tensor) -> Tensor:
    """Not the kernel alone: H C under clipping, its rate of the loss and all its properties, by Lanczos iteration."""
    y = torch.randint(0, 10, (len(x),), generator=torch.Generator().manual_seed(1))
    found = cw.ntk.analyse(model, lambda f, y: F.cross_entropy(f, y, reduction="none"), x, y, cw.Abadi(1.0))
    return found.matrix


METHODS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "clipwise, Gram route": lambda model, x: cw.ntk.kernel(model, x),
    "clipwise, Jacobian route": lambda model, x: cw.ntk.kernel(model, x, route="jacobian"),
    "vmap(jacrev)": plain,
    "clipwise, H C with positivity": clipped,
}


def reference(samples: int) -> Tensor:
    """The kernel of the first samples in float64, by one backward pass per row."""
    model, x = problem(samples)
    model, x = model.double(), x[:CHECKED].double()
    rows = [
        torch.cat([g.flatten() for g in torch.autograd.grad(f, list(model.parameters()), retain_graph=True)])
        for f in model(x).flatten()
    ]
    J = torch.stack(rows)
    return J @ J.T


def work(name: str, samples: int, threads: int) -> dict[str, Any]:
    """One method in this process."""
    torch.set_num_threads(threads)
    model, x = problem(samples)
    before, cpu, wall = peak(), time.process_time(), time.perf_counter()
    H = METHODS[name](model, x)
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    held = peak()
    result = {"method": name, "rows": len(H), "cpu_seconds": cpu, "wall_seconds": wall, "peak_gib": held / 2**30,
              "before_gib": before / 2**30}  # fmt: skip
    if METHODS[name] is not clipped:
        expected = reference(samples)
        part = H[: len(expected), : len(expected)].double()
        result["error"] = float((part - expected).abs().max() / expected.abs().max())
    return result


def in_own_process(name: str, samples: int, threads: int) -> dict[str, Any]:
    command = [
        sys.executable,
        "-m",
        "benchmarks.ntk",
        "--worker",
        name,
        "--samples",
        str(samples),
        "--threads",
        str(threads),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(
        f"{name}: {found['cpu_seconds']:.1f} CPU s, {found['wall_seconds']:.1f} s, {found['peak_gib']:.2f} GiB",
        flush=True,
    )
    return found


def markdown(result: dict[str, Any]) -> str:
    base = next(row for row in result["rows"] if row["method"] == "vmap(jacrev)")
    header = [
        "method",
        "CPU s",
        "wall s",
        "peak GiB",
        "CPU vs vmap(jacrev)",
        "memory vs vmap(jacrev)",
        "relative error",
    ]
    cells = [
        [
            row["method"], f"{row['cpu_seconds']:.1f}", f"{row['wall_seconds']:.1f}", f"{row['peak_gib']:.2f}",
            f"{row['cpu_seconds'] / base['cpu_seconds']:.2f}", f"{row['peak_gib'] / base['peak_gib']:.2f}",
            f"{row['error']:.1e}" if "error" in row else "",
        ]
        for row in result["rows"]
    ]  # fmt: skip
    lines = [header, ["---"] * len(header), *cells]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--write", action="store_true", help="keep the numbers and the table")
    parser.add_argument("--worker", choices=METHODS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        print(json.dumps(work(args.worker, args.samples, args.threads)))
        return
    load = os.getloadavg()[0]
    rows = [in_own_process(name, args.samples, args.threads) for name in METHODS]
    result = {
        "samples": args.samples, "outputs": 10, "threads": args.threads, "cores": os.cpu_count(), "load_before": load,
        "load_after": os.getloadavg()[0], "torch": torch.__version__, "machine": platform.machine(), "rows": rows,
    }  # fmt: skip
    print(markdown(result))
    if args.write:
        Path(__file__).with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        put(DOCS / "theory.md", "ntk", markdown(result))


if __name__ == "__main__":
    main()
