"""What labels and digests cost a seeded run: `python -m benchmarks.seeds`."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch.utils.data import TensorDataset

from clipwise.entropy import Entropy
from clipwise.hashing import digest_of, whole
from clipwise.noise import GaussianNoise


def seconds(call: Callable[[int], object], times: int = 7) -> float:
    """The fastest of several calls, each with its own number."""
    found = []
    for k in range(times):
        begun = time.perf_counter()
        call(k)
        found.append(time.perf_counter() - begun)
    return min(found)


def main() -> None:
    """Print one line per cost."""
    torch.set_num_threads(1)
    records = TensorDataset(torch.randn(20_000, 784), torch.zeros(20_000, dtype=torch.long))
    size = sum(t.numel() * t.element_size() for t in records.tensors)
    print(f"a data set in memory: {size / 1e6 / seconds(lambda _: whole(records)):,.0f} MB/s, once per loader")
    image = torch.zeros(224, 224, 3, dtype=torch.uint8)
    for name, record in (("28 x 28 floats", torch.randn(784)), ("224 x 224 x 3 bytes", image)):
        item = (record, 3)
        each = seconds(lambda _, item=item: [digest_of(item) for _ in range(200)]) / 200
        print(f"a record of {name}: {1e6 * each:.1f} us, once, and it is read once more (twice if augmented)")
    sums = [torch.randn(4_000_000)]
    made = {seed: GaussianNoise(sums, Entropy(seed)) for seed in (None, 0)}
    costs = {
        seed: seconds(lambda k, noise=noise: noise.release([sums[0].clone()], [1.0], 1.0, k)) / 4e-3
        for seed, noise in made.items()
    }
    print(f"a release: {costs[None]:.1f} ns a number without a seed, {costs[0]:.1f} with one")


if __name__ == "__main__":
    main()
