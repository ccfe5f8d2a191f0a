"""What noticing updates from elsewhere costs per step: `python -m benchmarks.guard` (a quiet machine, one thread).

Steps with the guard and without it take turns, in both orders, on one small network, where a step is short and the
cost shows most. On a busy machine the difference is lost in the noise, so the guard's own calls are timed as well.
"""

from __future__ import annotations

import statistics
import time
import timeit
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

import clipwise as cw
from clipwise.private import guard, release

BATCH, ROUNDS, BLOCK = 64, 600, 5


class _Off:
    """A guard that writes, and looks at nothing."""

    seen = None

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors

    def write(self, gradients: Sequence[Tensor]) -> None:
        for p, g in zip(self._tensors, gradients, strict=True):
            p.grad = g.to(p.dtype)

    def __getattr__(self, name: str) -> Any:
        return (lambda *_: nullcontext()) if name in ("stepping", "restoring") else (lambda *_: None)


@contextmanager
def without(private: cw.Private) -> Iterator[None]:
    """The same run, its guard taken away."""
    mine = private._release.guard
    private._release.guard = _Off(mine._tensors)  # type: ignore[assignment]
    with mock.patch.object(release, "check_one_process", int), mock.patch.object(guard, "_OPEN", ()):
        yield
    private._release.guard = mine


def calls(private: cw.Private, optimizer: Optimizer, gradients: Sequence[Tensor]) -> None:
    """What the guard does in one step of a loop over the loader, and nothing else."""
    mine, ledger = private._release.guard, private._release.ledger
    for _ in range(3):  # when the batch is handed out, when it is given back, and when it is left
        guard.check_one_process()
        mine.look(ledger, private.plan.sampling)
        mine.check()
    with mine.restoring():
        mine.write(gradients)
        with mine.stepping():
            guard._before_step(optimizer, (), {})
            guard._after_step(optimizer, (), {})
        mine.expect_none()


def main() -> None:
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    x, y = torch.randn(BATCH, 20), torch.randint(10, (BATCH,))
    plan = cw.Plan(cw.FullBatch(BATCH), 10**6, cw.Abadi(1.0), noise_multiplier=1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    private = cw.Private(plan, model, optimizer, own_batches=True)
    with private.watch((x, y)):
        losses = F.cross_entropy(model(x), y, reduction="none")
    private.step(losses)

    def clocked() -> float:
        """CPU microseconds of a block of steps, each."""
        start = time.thread_time()
        for _ in range(BLOCK):
            private.step(F.cross_entropy(model(x), y, reduction="none"))
        return 1e6 * (time.thread_time() - start) / BLOCK

    times: dict[bool, list[float]] = {True: [], False: []}
    for k in range(ROUNDS):
        for guarded in (True, False) if k % 2 else (False, True):  # who comes first is a little slower
            with nullcontext() if guarded else without(private):
                times[guarded].append(clocked())
    extra = [b - a for a, b in zip(times[False], times[True], strict=True)]
    middle = (statistics.median(extra[::2]) + statistics.median(extra[1::2])) / 2
    weights = sum(p.numel() for p in model.parameters())
    print(
        f"MLP with {weights:,} weights, batch {BATCH}; medians of {ROUNDS} blocks of {BLOCK} steps, CPU time per step:"
    )
    gradients = [torch.zeros_like(p) for p in model.parameters()]
    repeated = timeit.repeat(lambda: calls(private, optimizer, gradients), number=1_000, repeat=21)
    alone = 1e3 * statistics.median(repeated)
    print(f"without the guard {statistics.median(times[False]):.0f} us, with it {middle:+.1f} us")
    print(f"the guard's calls alone {alone:.1f} us")


if __name__ == "__main__":
    main()
