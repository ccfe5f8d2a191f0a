"""Models of full size on all threads: `python -m benchmarks.full` writes full.json and a part of README.md.

Wall time in turns (CPU time of the first two besides): the clipped sum beside forward and backward; the whole private
step beside the plain step, on one physical batch and on a logical one of eight; peers on one physical batch; and the
first step of a run with the loader, which plans and checks. fastDP is measured where a copy of it is on PYTHONPATH.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from functools import partial
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import clipwise as cw
from benchmarks.measure import CannotRun, Json, allocated_peak, prepare
from benchmarks.methods import CLIP, METHODS, NOISE, Clipwise, Method, Plain
from benchmarks.report import header, row
from benchmarks.workloads import (
    BERT_VOCABULARY,
    GPT2_VOCABULARY,
    WORKLOADS,
    Batch,
    Workload,
    bert,
    classification_losses,
    cross_entropy,
    gpt2,
    images,
    language_model_losses,
    texts,
    trainable,
    vit,
    vit_losses,
)
from clipwise.engine import Clipper
from papers.pages import BENCHMARKS, put

HERE = Path(__file__).parent
THREADS = 2
PHYSICAL = 8
SHORT = 0.1  # seconds of a pass that is made as often as its workload says
PEERS = ("vmap", "opacus_hooks", "opacus_ghost", "fastdp")
LLAMA_VOCABULARY = 32_000


def llama(width: int = 512, layers: int = 8) -> Any:
    """A Llama-style language model with a tied head."""
    transformers: Any = import_module("transformers")
    config = transformers.LlamaConfig(
        vocab_size=LLAMA_VOCABULARY,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 64,
        intermediate_size=43 * width // 16,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    return transformers.LlamaForCausalLM(config)


class _Wide(nn.Module):
    """A residual block of a wide ResNet, with GroupNorm."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.first, self.second = nn.GroupNorm(16, before), nn.GroupNorm(16, after)
        self.one = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.two = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.skip = nn.Identity() if before == after else nn.Conv2d(before, after, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        ready = self.first(x).relu()
        around: Tensor = self.skip(ready if isinstance(self.skip, nn.Conv2d) else x)
        return around + self.two(self.second(self.one(ready)).relu())


def wide_resnet(depth: int = 16, widen: int = 4) -> nn.Module:
    """WRN-16-4 with GroupNorm, the usual network for CIFAR-10 with differential privacy."""
    widths, blocks = [16, *(16 * widen * 2**k for k in range(3))], (depth - 4) // 6
    parts: list[nn.Module] = [nn.Conv2d(3, 16, 3, 1, 1, bias=False)]
    for k, (before, after) in enumerate(pairwise(widths)):
        parts.append(_Wide(before, after, 2 if k else 1))
        parts += [_Wide(after, after, 1) for _ in range(blocks - 1)]
    head = [nn.GroupNorm(16, widths[3]), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[3], 10)]
    return nn.Sequential(*parts, *head)


class Reader(nn.Module):
    """An embedding, two layers of an LSTM, and a head on the last state."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(10_000, width), nn.Linear(width, 2)
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True)

    def forward(self, input_ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.lstm(self.embed(input_ids))[1][0][-1])
        return out


def reader_losses(model: nn.Module, batch: Batch) -> Tensor:
    """Cross entropy of each text."""
    return F.cross_entropy(model(batch["input_ids"]), batch["y"], reduction="none")


# fmt: off
FULL = (
    WORKLOADS["mlp"], WORKLOADS["mlp_full"],
    Workload("lstm", "LSTM, 2 layers of 256, length 64, batch 32",
             Reader, partial(texts, 10_000, 64), reader_losses, 32, None, 12),
    Workload("wrn", "WRN-16-4 with GroupNorm, 32 px, batch 64",
             wide_resnet, partial(images, 3, 32), cross_entropy, 64, None, 5),
    Workload("llama", "Llama-style 42M, tied head, length 256, batch 4",
             llama, partial(texts, LLAMA_VOCABULARY, 256, labelled=False), language_model_losses, 4, None, 6),
    Workload("vit", "ViT-base 86M, 224 px, batch 4",
             partial(vit, 768, 12, 12), partial(images, 3, 224), vit_losses, 4, None, 6),
    Workload("bert", "BERT-base 110M, length 128, batch 8",
             partial(bert, 768, 12, 12), partial(texts, BERT_VOCABULARY, 128), classification_losses, 8, None, 6),
    Workload("gpt2", "GPT-2 124M, length 128, batch 4",
             partial(gpt2, 768, 12, 12), partial(texts, GPT2_VOCABULARY, 128, labelled=False),
             language_model_losses, 4, None, 6),
)
# fmt: on


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Wall and CPU seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu


class _Samples(Dataset[Batch]):
    """The samples of some batches."""

    def __init__(self, batches: Sequence[Batch]) -> None:
        self._batch = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}

    def __len__(self) -> int:
        return len(next(iter(self._batch.values())))

    def __getitem__(self, index: int) -> Batch:
        return {name: values[index] for name, values in self._batch.items()}


def first_step(workload: Workload) -> Callable[[], None]:
    """The first step of a run with the loader, of eight physical batches, ready to be made."""
    method, dataset = Plain(workload), _Samples([workload.batch(k) for k in range(PHYSICAL)])
    plan = cw.Plan(sampling=cw.FullBatch(len(dataset)), steps=1, clip=cw.Abadi(CLIP), noise_multiplier=NOISE)
    private = cw.Private(plan, method.model, method.optimizer)

    def make() -> None:
        for batch in private.loader(dataset, physical_batch_size=workload.batch_size):
            private.step(method.losses(batch))

    return make


def turns(ways: Mapping[str, Callable[[int], object]], rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Wall and CPU seconds of each way, in rounds in which each is made once."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for number in range(rounds):
        for name, way in ways.items():
            found[name].append(timed(partial(way, number)))
    return found


def ratio(found: Mapping[str, Sequence[tuple[float, float]]], over: str, under: str, clock: int = 0) -> float:
    """The median over rounds."""
    pairs = zip(found[over], found[under], strict=True)
    return round(median(a[clock] / b[clock] for a, b in pairs), 3)


def left_out(method: Method, batch: Batch) -> int:
    """How many of the parameters that should be trained a step leaves as they were."""
    before = [p.detach().clone() for p in trainable(method.model)]
    method.step(batch)
    return sum(torch.equal(old, new) for old, new in zip(before, trainable(method.model), strict=True))


def _step(method: Method, batches: Sequence[Batch], number: int) -> None:
    method.step(batches[number])


def peers(workload: Workload, plain: Plain, private: Method, rounds: int) -> tuple[dict[str, float], dict[str, str]]:
    """Whole steps of others over plain ones on one physical batch, and why some cannot be made or are not whole.

    The private step takes its turn too: on a small model it matters what was run just before.
    """
    ratios, notes = {}, {}
    for name in PEERS:
        try:
            method = prepare(workload, name).method
        except CannotRun as reason:
            notes[name] = str(reason)
            continue
        untrained = left_out(method, method.workload.batch(0))
        if untrained:
            notes[name] = f"{untrained} of {len(trainable(method.model))} parameters are not trained"
        ways = {
            each: partial(_step, chosen, [chosen.workload.batch(1 + number) for number in range(rounds)])
            for each, chosen in (("plain", plain), ("private", private), ("peer", method))
        }
        ratios[name] = ratio(turns(ways, rounds), "peer", "plain")
    return ratios, notes


def cost(workload: Workload, most: int) -> Json:
    """Ratios to the plain step, as medians over rounds in which each is made once."""
    plain, private = Plain(workload), Clipwise(workload)
    clipper = Clipper(trainable(plain.model))
    clip = cw.Flat(cw.Abadi(CLIP))  # as a plan has it: a rule alone is checked at every call

    def backward(batch: Batch) -> None:
        torch.autograd.grad(plain.losses(batch).mean(), trainable(plain.model), allow_unused=True)

    warm = workload.batch(0)
    for _ in range(3):  # those that are watched, too
        backward(warm)
        plain.step(warm)
        clipper(plain.losses(warm), clip)
        private.step(warm)
    seconds, _ = timed(partial(backward, warm))
    rounds = workload.rounds if seconds < SHORT else min(most, workload.rounds)
    batches = [workload.batch(1 + number) for number in range(max(rounds, PHYSICAL))]
    found = turns(
        {
            "backward": lambda number: backward(batches[number]),
            "clipped": lambda number: clipper(plain.losses(batches[number]), clip),
            "step": lambda number: plain.step(batches[number]),
            "private": lambda number: private.step(batches[number]),
        },
        rounds,
    )
    logical = turns(
        {
            "plain": lambda number: plain.logical(batches[:PHYSICAL]),
            "private": lambda number: private.logical(batches[:PHYSICAL]),
        },
        max(1, rounds // 3),
    )
    others, notes = peers(workload, plain, private, max(1, rounds // 2))
    usual, after = (median(wall for wall, _ in logical[name]) for name in ("plain", "private"))
    first, _ = timed(first_step(workload))
    return {
        "workload": workload.title,
        "parameters": sum(p.numel() for p in trainable(plain.model)),
        "plain_ms": round(1e3 * median(wall for wall, _ in found["backward"]), 2),
        "clipped": ratio(found, "clipped", "backward"),
        "clipped_cpu": ratio(found, "clipped", "backward", 1),
        "private": ratio(found, "private", "step"),
        "private_cpu": ratio(found, "private", "step", 1),
        "logical": ratio(logical, "private", "plain"),
        "first": round((first - after) / usual, 2),
        "peers": others,
        "notes": notes,
    }


def memory(workload: Workload) -> Json:
    """Peaks of torch's allocator: of a step over the plain one's, and of a first logical step over a usual one."""
    plain, private = Plain(workload), Clipwise(workload)
    batch = workload.batch(0)
    for method in (plain, private):
        for _ in range(3):
            method.step(batch)
    before, usual = (allocated_peak(partial(method.step, batch)) for method in (plain, private))
    several = [workload.batch(number) for number in range(PHYSICAL)]
    logical, first = allocated_peak(partial(private.logical, several)), allocated_peak(first_step(workload))
    return {"plain_mb": round(before / 1e6, 1), "memory": round(usual / before, 2), "first": round(first / logical, 2)}


def measured(most: int, names: Sequence[str], path: Path | None = None, before: Sequence[Json] = ()) -> Json:
    """These rows, or all; kept in `path` as they come, where they take the places of those `before`.

    Without rounds only memory is measured, which is the same on a busy machine, and the times stay.
    """
    torch.set_num_threads(THREADS)
    rows = {row["workload"]: row for row in before}
    chosen = [each for each in FULL if not names or each.name in names]
    for each in chosen:
        times = cost(each, most) if most else rows[each.title]
        rows[each.title] = {**times, "allocated": memory(each)}
        found = {
            "date": date.today().isoformat(),
            "torch": torch.__version__,
            "threads": THREADS,
            "rows": [rows[each.title] for each in FULL if each.title in rows],
        }
        if path is not None:
            path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return found


def _cells(held: Json) -> tuple[str, ...]:
    return f"{held['plain_mb']:,.1f}", f"{held['memory']:.2f}", f"{held['first']:.2f}"


def _peer(row: Json, name: str) -> str:
    return f"{row['peers'][name]:.2f}{'*' if name in row['notes'] else ''}" if name in row["peers"] else "–"


def tables(found: Json) -> str:
    lines = [
        f"`python -m benchmarks.full` on {found['date']}, torch {found['torch']}, {found['threads']} threads, no GPU; "
        "medians of ratios in turns, wall time, CPU time in brackets. *Clipped sum* is forward, backward and clipping "
        "over forward and backward. *Whole step* has noise and optimizer too, over the plain step with its optimizer: "
        f"on one physical batch, and on a logical batch of {PHYSICAL}, which has one release. *First* is what planning "
        f"and checking add to the first step of a run with the loader, in plain steps of {PHYSICAL} physical batches. "
        "Peers make a whole step on one physical batch; a dash is a model that they do not run, * one that they train "
        "in part only. *Memory* is the peak "
        "of torch's allocator, by its own count, in a whole step over that in a plain one, and in the first step over "
        f"that in a usual one, both of {PHYSICAL} physical batches.",
        "",
        *header(
            *("workload", "parameters", "plain, ms", "clipped sum", "whole step", f"of {PHYSICAL}", "first"),
            *(METHODS[name].title for name in PEERS),
            *("plain, MB", "memory", "of the first"),
        ),
    ]
    for each in found["rows"]:
        pairs = (f"{each[name]:.2f} ({each[f'{name}_cpu']:.2f})" for name in ("clipped", "private"))
        count, plain = f"{each['parameters']:,}", f"{each['plain_ms']:,.1f}"
        others = (_peer(each, name) for name in PEERS)
        held = each.get("allocated")  # a row may have been measured before its memory was
        cells = ("–",) * 3 if held is None else _cells(held)
        times = (f"{each['logical']:.2f}", f"+{each['first']:.2f}")
        lines.append(row(each["workload"], count, plain, *pairs, *times, *others, *cells))
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", action="store_true", help="only write the table again")
    parser.add_argument(
        "--rounds", type=int, default=100, help="rounds at most, of passes that are not short; 0: memory alone"
    )
    parser.add_argument("--only", action="append", default=[], help="a workload to measure and print; writes nothing")
    parser.add_argument("--update", action="store_true", help="with --only: write these rows")
    options = parser.parse_args()
    path = HERE / "full.json"
    if options.only and not options.update:
        print(tables(measured(options.rounds, options.only)))
        return
    if not options.tables:
        before = json.loads(path.read_text(encoding="utf-8"))["rows"] if options.only or not options.rounds else ()
        measured(options.rounds, options.only, path, before)
    put(BENCHMARKS, "full", tables(json.loads(path.read_text(encoding="utf-8"))))


if __name__ == "__main__":
    main()
