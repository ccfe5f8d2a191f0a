"""Norms of linear maps from Gram matrices or from gradients that are kept: what each costs, and which one is chosen.

`python -m benchmarks.choice` writes choice.json and a part of README.md. Both are forced in turns, layer by layer and
on whole models, beside the choice that the engine makes by sizes. It needs a quiet machine.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor, nn

import clipwise as cw
from benchmarks.full import FULL, THREADS, timed
from benchmarks.measure import Json
from benchmarks.methods import CLIP, Plain
from benchmarks.report import header, row
from benchmarks.workloads import trainable
from clipwise.engine import Clipper, cost
from clipwise.engine import plan as engine_plan
from papers.pages import BENCHMARKS, put

HERE = Path(__file__).parent
MODELS = ("llama", "vit", "bert", "gpt2")
UNBOUNDED = 1 << 62
RULE = cw.Flat(cw.Abadi(CLIP))


class Way(NamedTuple):
    """Bytes that gradients may take, and how much cheaper than a Gram matrix they must be to be kept."""

    memory: int | None
    moved: int


WAYS = {"grams": Way(-1, cost._MOVED), "kept": Way(UNBOUNDED, 0), "chosen": Way(None, cost._MOVED)}


class Shape(NamedTuple):
    """A linear map of `inputs` to `outputs` numbers at each of `positions`."""

    batch: int
    positions: int
    inputs: int
    outputs: int

    def __str__(self) -> str:
        return f"{self.batch} x {self.positions}, {self.inputs} to {self.outputs}"


SHAPES = (
    Shape(4, 256, 512, 512), Shape(8, 256, 512, 512), Shape(4, 256, 512, 1376), Shape(4, 197, 768, 768),
    Shape(4, 197, 768, 3072), Shape(8, 128, 768, 768), Shape(8, 128, 768, 3072), Shape(4, 512, 768, 768),
    Shape(4, 1024, 512, 512), Shape(32, 64, 256, 256), Shape(16, 128, 256, 1024),
)  # fmt: skip


@contextmanager
def forced(way: Way) -> Iterator[None]:
    """The cost model with another price of memory, and one layer treated as it is in a large model."""
    before = cost._MOVED, engine_plan._SMALL
    cost._MOVED, engine_plan._SMALL = way.moved, 0
    try:
        yield
    finally:
        cost._MOVED, engine_plan._SMALL = before


def turns(losses: Callable[[], Tensor], parameters: list[nn.Parameter], rounds: int) -> dict[str, float]:
    """Ratios to the plain pass, in rounds in which each takes its turn."""
    clippers = {name: Clipper(parameters, way.memory) for name, way in WAYS.items()}

    def clipped(name: str) -> None:
        with forced(WAYS[name]):
            clippers[name](losses(), RULE)

    def plain() -> None:
        torch.autograd.grad(losses().sum(), parameters)

    for _ in range(2):
        plain()
        for name in WAYS:
            clipped(name)
    found: dict[str, list[float]] = {name: [] for name in WAYS}
    for _ in range(rounds):
        unit, _ = timed(plain)
        for name in WAYS:
            found[name].append(timed(lambda name=name: clipped(name))[0] / unit)
    return {name: round(median(ratios), 3) for name, ratios in found.items()}


def of_shape(shape: Shape, rounds: int) -> Json:
    """Two such layers one after the other: the second one's input needs a gradient, as inside a model."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(shape.inputs, shape.inputs), nn.Linear(shape.inputs, shape.outputs))
    layers[0].requires_grad_(requires_grad=False)
    shift = nn.Parameter(torch.zeros(shape.inputs))
    x = torch.randn(shape.batch, shape.positions, shape.inputs)
    return {
        "what": str(shape),
        **turns(lambda: layers(x + shift).square().mean((1, 2)), [shift, *layers[1].parameters()], rounds),
    }


def of_model(name: str, rounds: int) -> Json:
    """A whole model."""
    workload = next(each for each in FULL if each.name == name)
    plain, batch = Plain(workload), workload.batch(0)
    return {"what": workload.title, **turns(lambda: plain.losses(batch), trainable(plain.model), rounds)}


def tables(found: Json) -> str:
    """The part of the page."""
    lines = [
        f"`python -m benchmarks.choice` on {found['date']}, torch {found['torch']}, {found['threads']} threads, no "
        "GPU; medians of ratios to forward and backward, in turns, wall time. All norms of linear maps from Gram "
        "matrices, all from gradients that are kept whatever memory they take, and as the engine chooses by sizes, "
        "with the memory that it takes by default. Layers by batch x positions.",
        "",
        *header("layer or model", "Gram matrices", "gradients kept", "chosen"),
    ]
    lines += [row(each["what"], *(f"{each[name]:.2f}" for name in WAYS)) for each in found["rows"]]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="of a model; of a layer ten times as many")
    parser.add_argument("--tables", action="store_true", help="only write the table again")
    options = parser.parse_args()
    path = HERE / "choice.json"
    if not options.tables:
        torch.set_num_threads(THREADS)
        rows = [of_shape(shape, 10 * options.rounds) for shape in SHAPES]
        rows += [of_model(name, options.rounds) for name in MODELS]
        about = {"date": date.today().isoformat(), "torch": torch.__version__, "threads": THREADS}
        path.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n", "utf-8")
    put(BENCHMARKS, "choice", tables(json.loads(path.read_text(encoding="utf-8"))))


if __name__ == "__main__":
    main()
