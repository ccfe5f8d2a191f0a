"""Models of full size on all threads: `python -m benchmarks.full` writes full.json and a part of README.md.

Wall and CPU time in turns: the clipped sum beside forward and backward, and the whole private step of one physical
batch beside the plain step. The first call of the engine, which plans and checks, counts in plain
steps. A logical batch of eight physical ones has one release, so noise and optimizer count an eighth there.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
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

import clipwise as cw
from benchmarks.measure import Json
from benchmarks.methods import CLIP, Clipwise, Plain
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


def cost(workload: Workload, most: int) -> Json:
    """Ratios to the plain step, as medians over rounds in which each is made once."""
    plain, private = Plain(workload), Clipwise(workload)
    clipper = Clipper(trainable(plain.model))
    clip = cw.Abadi(CLIP)

    def backward(batch: Batch) -> None:
        torch.autograd.grad(plain.losses(batch).mean(), trainable(plain.model), allow_unused=True)

    ways: dict[str, Callable[[Batch], object]] = {
        "backward": backward,
        "clipped": lambda batch: clipper(plain.losses(batch), clip),
        "step": plain.step,
        "private": private.step,
    }
    warm = workload.batch(0)
    for _ in range(2):
        ways["backward"](warm)
        plain.step(warm)
    first = timed(lambda: ways["clipped"](warm))[0]
    for _ in range(3):  # those that are watched
        private.step(warm)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for number in range(min(most, workload.rounds)):
        batch = workload.batch(1 + number)
        for name, way in ways.items():
            found[name].append(timed(partial(way, batch)))

    def ratio(over: str, under: str, clock: int) -> float:
        pairs = zip(found[over], found[under], strict=True)
        return median(a[clock] / b[clock] for a, b in pairs)

    usual = median(wall for wall, _ in found["backward"])
    clipped = median(wall for wall, _ in found["clipped"])
    return {
        "workload": workload.title,
        "parameters": sum(p.numel() for p in trainable(plain.model)),
        "plain_ms": round(1e3 * usual, 2),
        "clipped": round(ratio("clipped", "backward", 0), 3),
        "clipped_cpu": round(ratio("clipped", "backward", 1), 3),
        "private": round(ratio("private", "step", 0), 3),
        "private_cpu": round(ratio("private", "step", 1), 3),
        "first": round((first - clipped) / usual, 1),
    }


def measured(most: int, names: list[str]) -> Json:
    torch.set_num_threads(THREADS)
    rows = [cost(each, most) for each in FULL if not names or each.name in names]
    return {"date": date.today().isoformat(), "torch": torch.__version__, "threads": THREADS, "rows": rows}


def tables(found: Json) -> str:
    lines = [
        f"`python -m benchmarks.full` on {found['date']}, torch {found['torch']}, {found['threads']} threads, medians "
        "of ratios in turns; wall time, CPU time in brackets. *Clipped sum* is forward, backward and clipping over "
        "forward and backward. *Whole step* has noise and optimizer too, over the plain step with its optimizer, for "
        f"one physical batch; of {PHYSICAL} physical ones the noise counts an eighth. *First* is what planning and "
        "checking add to the first call, in plain steps.",
        "",
        *header("workload", "parameters", "plain, ms", "clipped sum", "whole step", "first"),
    ]
    for each in found["rows"]:
        pairs = (f"{each[name]:.2f} ({each[f'{name}_cpu']:.2f})" for name in ("clipped", "private"))
        count, plain = f"{each['parameters']:,}", f"{each['plain_ms']:,.1f}"
        lines.append(row(each["workload"], count, plain, *pairs, f"+{each['first']:.1f}"))
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", action="store_true", help="only write the table again")
    parser.add_argument("--rounds", type=int, default=100, help="rounds at most")
    parser.add_argument("--only", action="append", default=[], help="a workload to measure and print; writes nothing")
    options = parser.parse_args()
    path = HERE / "full.json"
    if options.only:
        print(tables(measured(options.rounds, options.only)))
        return
    if not options.tables:
        path.write_text(json.dumps(measured(options.rounds, []), indent=1) + "\n", encoding="utf-8")
    put(BENCHMARKS, "full", tables(json.loads(path.read_text(encoding="utf-8"))))


if __name__ == "__main__":
    main()
