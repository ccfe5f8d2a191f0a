"""What a frozen network says of every image, computed once and kept in the cache folder; and images to fine-tune on.

`python -m papers.cifar10.features [NETWORK [SIDE]]` computes them ahead of the studies. A shard is written whole or not
at all, so an interrupted computation continues where it stopped. The folder's name holds a SHA-256 of what made them.
"""

from __future__ import annotations

import json
import sys
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from torch.utils.data import TensorDataset

from clipwise.data import DataSet, load
from clipwise.report import write_text
from papers.cache import cache_folder, digest_of_weights, fill, kept
from papers.cifar10.networks import Network, called, extractor

SHARD, BATCH = 2_000, 4  # few at a time stay in the processor's caches


@lru_cache(maxsize=1)
def images(records: int | None = None, test_records: int | None = None, synthetic: bool = False) -> DataSet:
    """CIFAR-10 or its first records; `synthetic` ones are noise with a colour for each class, and need no files."""
    data = _synthetic() if synthetic else load("cifar10")
    parts = ((data.train, records), (data.test, test_records))
    train, test = (TensorDataset(*(tensor[:count] for tensor in part.tensors)) for part, count in parts)
    note = f"The first {len(train):,} training and {len(test):,} test images." if records or test_records else ""
    note = "Synthetic images: numbers mean nothing." if synthetic else note
    return DataSet(data.name, data.task, train, test, data.classes, source=data.source, licence=data.licence, note=note)


def _synthetic() -> DataSet:
    rng = torch.Generator().manual_seed(0)
    y = torch.arange(800) % 10
    colours = torch.rand(10, 3, 1, 1, generator=rng)
    x = (colours[y] + 0.3 * torch.randn(800, 3, 32, 32, generator=rng)).clamp(0, 1)
    parts = TensorDataset(x[:600], y[:600]), TensorDataset(x[600:], y[600:])
    return DataSet("synthetic images", "classification", *parts, classes=tuple(map(str, range(10))))


@lru_cache(maxsize=1)
def features(network: str, side: int | None = None, synthetic: bool = False) -> DataSet:
    """Features of all images as a data set; computed first where they are not in the cache folder."""
    model = extractor(network, side)
    data = None
    if synthetic:
        data = images(synthetic=True)
        parts = [(torch.from_numpy(compute(model, part)), part.tensors[1]) for part in (data.train, data.test)]
    else:
        folder = cached(network, model)
        parts = [_read(folder, "train"), _read(folder, "test")]
    train, test = (TensorDataset(x.float(), y) for x, y in parts)
    note = "Synthetic images: numbers mean nothing." if synthetic else f"Features of the frozen {called(network)}."
    return DataSet(
        f"cifar10 seen by {called(network)}",
        "classification",
        train,
        test,
        classes=data.classes if data else tuple(map(str, range(10))),
        source="synthetic" if synthetic else folder.name,
        note=note,
    )


def compute(model: Network, part: TensorDataset, start: int = 0, stop: int | None = None) -> np.ndarray:
    """Features of some records, float16 of shape (records, features)."""
    model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    with torch.inference_mode():
        pieces = [model(x).half() for x in part.tensors[0][start:stop].split(BATCH)]
    found: np.ndarray = torch.cat(pieces).numpy()
    return found


def cached(network: str, model: Network) -> Path:
    """The folder with all shards; what is missing in it is computed."""
    made_of = {
        "data": "cifar10, every record, in order",  # the loader checks the files' own hashes
        "weights": digest_of_weights(model),
        "inputs": f"bilinear to {model.side} pixels, (x - {model.mean!r}) / {model.std!r}",
        "form": f"float16, {SHARD} records a shard",
    }
    folder = cache_folder("features", f"cifar10-{called(network)}", made_of)
    if not _whole(folder):
        shards = _fill(folder, model)
        write_text(folder / "made_of.json", json.dumps({**made_of, "shards": shards}, indent=1) + "\n")
    return folder


def _whole(folder: Path) -> bool:
    """Is every shard there? The list of them is written last."""
    return (folder / "made_of.json").is_file() and all((folder / name).is_file() for name in _shards(folder))


def _shards(folder: Path) -> list[str]:
    told = folder / "made_of.json"
    with kept(told):
        return list(json.loads(told.read_text(encoding="utf-8"))["shards"])


def _fill(folder: Path, model: Network) -> list[str]:
    """Compute the shards that are missing; the names of all."""
    data = load("cifar10")
    parts = {"train": data.train, "test": data.test}
    wanted = [(name, part, k) for name, part in parts.items() for k in range(0, len(part), SHARD)]

    def make(place: int, file: BinaryIO) -> None:
        _, part, k = wanted[place]
        np.savez(file, x=compute(model, part, k, k + SHARD), y=part.tensors[1][k : k + SHARD].numpy())

    names = [_shard(name, k) for name, _, k in wanted]
    fill("shards of features", [folder / name for name in names], make)
    return names


def _shard(name: str, start: int) -> str:
    return f"{name}-{start:05d}.npz"


def _read(folder: Path, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    parts = []
    for shard in (shard for shard in _shards(folder) if shard.startswith(name)):
        path = folder / shard
        with kept(path), open(path, "rb") as file, np.load(file, allow_pickle=False) as arrays:
            parts.append((arrays["x"], arrays["y"]))
    x, y = (np.concatenate(values) for values in zip(*parts, strict=True))
    return torch.from_numpy(x), torch.from_numpy(y)


if __name__ == "__main__":
    chosen = sys.argv[1] if len(sys.argv) > 1 else "efficientnet_lite0"
    print(cached(chosen, extractor(chosen, int(sys.argv[2]) if len(sys.argv) > 2 else None)))
