"""What the noise costs: per number beside the float32 numbers of torch that it replaced, and as a share of a step.

`python -m benchmarks.noise` measures and writes `noise.json` and its part of README.md; `--tables` only writes the
tables again. The ways are measured in turns, and CPU time (all threads) is what counts on a shared machine. It also
counts numbers in the tail: a billion draws of each source.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from benchmarks.measure import Json
from benchmarks.methods import Clipwise
from benchmarks.report import header, row
from benchmarks.workloads import WORKLOADS, Workload
from clipwise.entropy import Entropy
from clipwise.noise import DefaultNormals, GaussianNoise, SecureNormals
from papers.pages import BENCHMARKS, put

HERE = Path(__file__).parent
SIZES = (1_000, 10_000, 30_000, 300_000, 10_000_000)
THREADS = (1, 2)
STD, SCALE = 1.3, 0.01
PIECE = 1 << 18
FAR = 5.8
DRAWS = 10**9


class Float32:
    """As it was: float32 numbers in pieces of 2^18, each thread with its own buffer, added in float32."""

    def __init__(self, size: int) -> None:
        lanes = min(torch.get_num_threads(), -(-size // PIECE))
        self.pool = ThreadPoolExecutor(lanes)
        pieces = range(-(-size // PIECE))
        self.lanes = [(torch.empty(min(size, PIECE)), torch.Generator(), pieces[k::lanes]) for k in range(lanes)]

    def release(self, total: Tensor) -> None:
        def serve(lane: tuple[Tensor, torch.Generator, range]) -> None:
            buffer, generator, pieces = lane
            for piece in pieces:
                target = total[piece * PIECE : (piece + 1) * PIECE]
                drawn = buffer[: len(target)].normal_(generator=generator).mul_(STD * SCALE)
                target.mul_(SCALE).add_(drawn)

        list(self.pool.map(serve, self.lanes)) if len(self.lanes) > 1 else serve(self.lanes[0])


def ways(total: Tensor) -> dict[str, Callable[[], object]]:
    """The old and the new way, and the cryptographic one, on the same sum; and bare numbers, on one thread."""
    float32, source = Float32(len(total)), DefaultNormals()
    single, double = torch.empty(len(total)).split(PIECE), torch.empty(len(total), dtype=torch.float64).split(1 << 16)
    generator = torch.Generator()
    grid, secure = GaussianNoise([total], Entropy()), GaussianNoise([total], Entropy(), SecureNormals())
    steps = iter(range(10**9))
    return {
        "float32": lambda: float32.release(total),
        "grid": lambda: grid.release([total], [STD], SCALE, next(steps)),
        "secure": lambda: secure.release([total], [STD], SCALE, next(steps)),
        "normal_": lambda: [piece.normal_(generator=generator) for piece in single],
        "numbers": lambda: [source.fill_(piece, Entropy(), 0, 0) for piece in double],
    }


def per_number(size: int, threads: int, rounds: int = 15) -> Json:
    """Medians of CPU and wall nanoseconds per number, and of the ratio of CPU times within a round."""
    torch.set_num_threads(threads)
    found = ways(torch.zeros(size))
    repeat = max(1, 1_000_000 // size)
    cpu: dict[str, list[float]] = {name: [] for name in found}
    wall: dict[str, list[float]] = {name: [] for name in found}
    for turn in range(rounds + 1):
        for name, release in found.items():
            begun = time.process_time(), time.perf_counter()
            for _ in range(repeat):
                release()
            if turn:  # the first is a warm-up
                cpu[name].append((time.process_time() - begun[0]) / repeat / size * 1e9)
                wall[name].append((time.perf_counter() - begun[1]) / repeat / size * 1e9)
    ratio = statistics.median(b / a for a, b in zip(cpu["float32"], cpu["grid"], strict=True))
    return {
        "size": size,
        "threads": threads,
        "cpu": {name: round(statistics.median(values), 2) for name, values in cpu.items()},
        "best": {name: round(min(values), 2) for name, values in cpu.items()},
        "wall": {name: round(statistics.median(values), 2) for name, values in wall.items()},
        "ratio": round(ratio, 2),
    }


def share(workload: Workload, steps: int = 5) -> Json:
    """Which part of a step's CPU time the release of the noise is, on one thread."""
    torch.set_num_threads(1)
    method = Clipwise(workload)
    for seed in range(3):
        method.step(workload.batch(seed))
    noise, spent = method.private._release._noise, [0.0]
    release = noise.release

    def timed(*arguments: object) -> object:
        begun = time.process_time()
        result = release(*arguments)  # type: ignore[arg-type]
        spent[0] += time.process_time() - begun
        return result

    noise.release = timed  # type: ignore[assignment,method-assign]
    shares = []
    for seed in range(steps if workload.rounds < 60 else 20 * steps):
        batch, spent[0] = workload.batch(3 + seed), 0.0
        begun = time.process_time()
        method.step(batch)
        shares.append((spent[0], time.process_time() - begun))
    size = sum(p.numel() for p in method.model.parameters() if p.requires_grad)
    part, whole = (statistics.median(values) for values in zip(*shares, strict=True))
    return {"workload": workload.title, "parameters": size, "ms": round(1e3 * part, 3), "share": round(part / whole, 4)}


def beyond(draw: Callable[[int], Tensor], draws: int) -> int:
    return sum(int((draw(piece).abs_() > FAR).sum()) for piece in range(draws >> 20))


def tails(draws: int) -> Json:
    """How many numbers lie beyond 5.8 deviations."""
    source, buffer, single = DefaultNormals(), torch.empty(1 << 20, dtype=torch.float64), torch.empty(1 << 20)
    generator = torch.Generator().manual_seed(0)

    def drawn_now(piece: int) -> Tensor:
        source.fill_(buffer, Entropy(0), 0, piece)
        return buffer

    drawn = draws >> 20 << 20
    return {
        "draws": drawn,
        "expected": round(float(2 * stats.norm.sf(FAR) * drawn), 1),
        "grid": beyond(drawn_now, draws),
        "float32": beyond(lambda _: single.normal_(generator=generator), draws),
    }


def measured(draws: int) -> Json:
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "versions": {"torch": torch.__version__, "numpy": np.__version__},
        "numbers": [per_number(size, threads) for threads in THREADS for size in SIZES],
        "shares": [share(workload) for workload in WORKLOADS.values()],
        "tail": tails(draws),
    }


def tables(found: Json) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    tail = found["tail"]
    lines = [
        f"Written by `python -m benchmarks.noise` on {found['date']} ({versions}). CPU nanoseconds per number, all "
        "threads together, with adding, scaling and rounding to the grid: median and, in brackets, the least of 15 "
        "rounds in which the ways took turns, on a machine that others used too. The ratios are the median over the "
        "rounds and that of the least. `float32` is the noise before decision 0012; `normal_` and `numbers` are the "
        "old and the new numbers alone, which nothing is done with.",
        "",
        *header(
            "threads",
            "numbers",
            "float32",
            "now",
            "ratio",
            "of the least",
            "`normal_`",
            "`numbers`",
            "`SecureNormals`",
            "wall: float32",
            "wall: now",
        ),
    ]
    for each in found["numbers"]:
        names = ("float32", "grid", "normal_", "numbers", "secure")
        cpu = [f"{each['cpu'][name]:.1f} ({each['best'][name]:.1f})" for name in names]
        wall = [f"{each['wall'][name]:.1f}" for name in ("float32", "grid")]
        ratios = [f"{ratio:.2f}" for ratio in (each["ratio"], each["best"]["grid"] / each["best"]["float32"])]
        lines.append(row(str(each["threads"]), f"{each['size']:,}", *cpu[:2], *ratios, *cpu[2:], *wall))
    lines += ["", "Its share of a whole private step, in CPU time on one thread:", ""]
    lines += header("workload", "parameters", "ms", "share")
    for each in found["shares"]:
        lines.append(row(each["workload"], f"{each['parameters']:,}", f"{each['ms']:.2f}", f"{each['share']:.1%}"))
    lines += [
        "",
        f"Numbers beyond {FAR} standard deviations in {tail['draws']:,} draws: {tail['grid']}, expected "
        f"{tail['expected']}; of torch's float32 numbers: {tail['float32']}.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", action="store_true", help="only write the tables again")
    parser.add_argument("--draws", type=int, default=DRAWS, help="draws for the count in the tail")
    arguments = parser.parse_args()
    path = HERE / "noise.json"
    if not arguments.tables:
        path.write_text(json.dumps(measured(arguments.draws), indent=1) + "\n", encoding="utf-8")
    put(BENCHMARKS, "noise", tables(json.loads(path.read_text(encoding="utf-8"))))


if __name__ == "__main__":
    main()
