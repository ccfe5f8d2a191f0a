"""The engine's large products beside torch's: `python -m benchmarks.products` writes products.json and tables.

Ratios are medians over rounds, in which all take their turns on the same numbers; it needs a quiet machine. On
processors on which the engine leaves products to torch there is nothing to compare (`clipwise.engine.matrices`).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter

import torch

from benchmarks.measure import Json
from benchmarks.report import header, row
from clipwise.engine.matrices import add_product, product, stacked_products
from papers.pages import BENCHMARKS, put

HERE = Path(__file__).parent
THREADS, ROUNDS = 2, 30
_OF_SAMPLES = 1 << 22  # numbers of a weight, up to which gradients of single samples are measured
SIZES = (  # rows that are summed, and both sides of a weight: of which model
    (788, 768, 768, "ViT-base, attention"),
    (788, 768, 3072, "ViT-base, first map"),
    (788, 3072, 768, "ViT-base, second map"),
    (1024, 512, 1376, "Llama-style, first map"),
    (1024, 32_000, 512, "Llama-style, head"),
    (512, 50_257, 768, "GPT-2, head"),
    (2048, 1024, 256, "LSTM, a layer"),
)


def speeds(ways: dict[str, Callable[[], object]], operations: int) -> dict[str, float]:
    """Thousand million operations a second."""
    for way in ways.values():
        way()
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, way in ways.items():
            begin = perf_counter()
            way()
            times[name].append(perf_counter() - begin)
    return {name: round(operations / median(each) / 1e9, 1) for name, each in times.items()}


def measured() -> Json:
    """The sum over rows of outer products, as a new matrix and onto another; and a stack of four samples."""
    torch.set_num_threads(THREADS)
    torch.manual_seed(0)
    found = []
    for rows, m, n, title in SIZES:
        left, right, total = torch.randn(rows, m), torch.randn(rows, n), torch.zeros(m, n)
        turned = left.t()
        ways: dict[str, Callable[[], object]] = {
            "torch": partial(torch.matmul, turned, right),
            "engine": partial(product, turned, right),
            "torch, onto a sum": partial(total.addmm_, turned, right),
            "engine, onto a sum": partial(add_product, total, turned, right),
        }
        if m * n <= _OF_SAMPLES:
            several = left.unflatten(0, (4, -1)).mT, right.unflatten(0, (4, -1))
            ways["torch, four samples"] = partial(torch.matmul, *several)
            ways["engine, four samples"] = partial(stacked_products, *several)
        found.append({"title": title, "rows": rows, "m": m, "n": n, "speeds": speeds(ways, 2 * rows * m * n)})
    return {"date": date.today().isoformat(), "torch": torch.__version__, "threads": THREADS, "rows": found}


def tables(found: Json) -> str:
    """The part of the page."""
    kinds = ("new", "onto a sum", "four samples")
    lines = [
        f"`python -m benchmarks.products` on {found['date']}, torch {found['torch']}, {found['threads']} threads of an "
        "AMD EPYC with AVX-512. The sum over rows of outer products, in thousand million operations a second: by the "
        "engine (oneDNN) and, in brackets, by torch (MKL); as a new matrix, added to another one, and as the gradients "
        f"of four samples apart. Medians of {ROUNDS} rounds in turns.",
        "",
        *header("product", "rows, sides", *kinds),
    ]
    for each in found["rows"]:
        cells = []
        for kind in kinds:
            end = "" if kind == "new" else f", {kind}"
            ours, torchs = (each["speeds"].get(f"{who}{end}") for who in ("engine", "torch"))
            cells.append("–" if ours is None else f"{ours:.0f} ({torchs:.0f})")
        lines.append(row(each["title"], f"{each['rows']:,}, {each['m']:,} x {each['n']:,}", *cells))
    return "\n".join(lines) + "\n"


def main() -> None:
    found = measured()
    (HERE / "products.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    put(BENCHMARKS, "products", tables(found))


if __name__ == "__main__":
    main()
