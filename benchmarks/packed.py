"""Recurrent layers over packed sequences beside a loop over samples and the plain step, with other lengths every time.

`python -m benchmarks.packed` writes packed.json and a part of README.md. Ratios are medians over rounds, in which all
take their turns on the same batch; it needs a quiet machine.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from benchmarks.measure import Json
from benchmarks.report import header, row
from clipwise import Abadi
from clipwise.engine import clipped_gradients
from papers.pages import BENCHMARKS, put

HERE = Path(__file__).parent
THREADS, WIDTHS = 2, (64, 256)
BATCH, SHORTEST, LONGEST, WORDS = 32, 5, 40, 100
RULE = Abadi(1.0)


class Batch(NamedTuple):
    """Words, padded, their numbers, and labels."""

    words: Tensor
    lengths: Tensor
    labels: Tensor

    def sample(self, i: int) -> Batch:
        """One of them, without padding."""
        one = slice(i, i + 1)
        return Batch(self.words[one, : int(self.lengths[i])], self.lengths[one], self.labels[one])


@dataclass(frozen=True)
class Case:
    """A kind of layer; `outputs`: of all times, not the last state."""

    kind: type[nn.LSTM] | type[nn.GRU] | type[nn.RNN]
    layers: int = 1
    bidirectional: bool = False
    outputs: bool = False

    def __str__(self) -> str:
        parts = [self.kind.__name__, f"{self.layers} layers" if self.layers > 1 else ""]
        parts += ["both directions" if self.bidirectional else "", "all outputs" if self.outputs else ""]
        return ", ".join(filter(None, parts))


CASES = (
    Case(nn.LSTM), Case(nn.LSTM, 2), Case(nn.LSTM, 1, True), Case(nn.LSTM, 2, True), Case(nn.LSTM, outputs=True),
    Case(nn.GRU), Case(nn.GRU, 2, True), Case(nn.RNN), Case(nn.RNN, 2, outputs=True),
)  # fmt: skip


class Model(nn.Module):
    """An embedding, recurrent layers over packed sequences, and a head."""

    def __init__(self, case: Case, width: int) -> None:
        super().__init__()
        self.case = case
        self.embed = nn.Embedding(WORDS, width)
        self.layers = case.kind(
            width, width, num_layers=case.layers, bidirectional=case.bidirectional, batch_first=True
        )
        self.head = nn.Linear(width * (1 + case.bidirectional), 2)

    def losses(self, batch: Batch) -> Tensor:
        """One for each sample."""
        rows = pack_padded_sequence(self.embed(batch.words), batch.lengths, batch_first=True, enforce_sorted=False)
        out, states = self.layers(rows)
        if self.case.outputs:
            found = pad_packed_sequence(out, batch_first=True)[0].sum(1)
        else:
            last = states[0] if isinstance(states, tuple) else states
            found = torch.cat([last[-2], last[-1]], 1) if self.case.bidirectional else last[-1]
        return F.cross_entropy(self.head(found), batch.labels, reduction="none")


def drawn() -> Batch:
    """A batch of other lengths."""
    lengths = torch.randint(SHORTEST, LONGEST + 1, (BATCH,))
    return Batch(torch.randint(WORDS, (BATCH, int(lengths.max()))), lengths, torch.randint(2, (BATCH,)))


def plain(model: Model, batch: Batch) -> None:
    """What is done without privacy."""
    torch.autograd.grad(model.losses(batch).mean(), list(model.parameters()))


def private(model: Model, batch: Batch) -> None:
    """The clipped sum."""
    clipped_gradients(model.losses(batch), dict(model.named_parameters()), RULE)


def loop(model: Model, batch: Batch) -> None:
    """The same, one sample after the other."""
    parameters = list(model.parameters())
    total = [torch.zeros_like(p) for p in parameters]
    for i in range(BATCH):
        gradients = torch.autograd.grad(model.losses(batch.sample(i)).sum(), parameters)
        factor = 1 / torch.stack([g.norm() for g in gradients]).norm().clamp(min=1)
        torch._foreach_add_(total, torch._foreach_mul(gradients, factor))


def seconds(step: Callable[[Model, Batch], None], model: Model, batch: Batch) -> float:
    """On the clock."""
    begin = perf_counter()
    step(model, batch)
    return perf_counter() - begin


def measure(case: Case, width: int, rounds: int) -> Json:
    """Milliseconds of the clipped sum, and its ratios to the loop over samples and to the plain step."""
    torch.manual_seed(0)
    model = Model(case, width)
    for _ in range(3):
        private(model, drawn())
    each = []
    for _ in range(rounds):
        batch = drawn()
        each.append([seconds(step, model, batch) for step in (private, loop, plain)])
    to_loop, to_plain = (round(median(times[0] / times[other] for times in each), 3) for other in (1, 2))
    milliseconds = round(1e3 * median(times[0] for times in each), 1)
    return {"layer": str(case), "width": width, "ms": milliseconds, "to_loop": to_loop, "to_plain": to_plain}


def tables(found: Json) -> str:
    """The part of the page."""
    lines = [
        f"`python -m benchmarks.packed` on {found['date']}, torch {found['torch']}, {found['threads']} threads, no "
        f"GPU; medians of {found['rounds']} ratios in turns, wall time. An embedding, recurrent layers and a head, "
        f"batch {BATCH}, other lengths from {SHORTEST} to {LONGEST} every time. The clipped sum, and its ratios to "
        "that of a loop over samples and to the plain step.",
        "",
        *header("layer", "width", "ms", "to the loop", "to the plain step"),
    ]
    for each in found["rows"]:
        ratios = f"{each['to_loop']:.2f}", f"{each['to_plain']:.2f}"
        lines.append(row(each["layer"], str(each["width"]), f"{each['ms']:.1f}", *ratios))
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tables", action="store_true", help="only write the table again")
    options = parser.parse_args()
    path = HERE / "packed.json"
    if not options.tables:
        torch.set_num_threads(THREADS)
        rows = [measure(case, width, options.rounds) for width in WIDTHS for case in CASES]
        about = {"date": date.today().isoformat(), "torch": torch.__version__, "threads": THREADS}
        path.write_text(json.dumps({**about, "rounds": options.rounds, "rows": rows}, indent=1) + "\n", "utf-8")
    put(BENCHMARKS, "packed", tables(json.loads(path.read_text(encoding="utf-8"))))


if __name__ == "__main__":
    main()
