"""Is killed at chosen moments around a switch of noise, resumes, and prints what was found. Run as a program.

Every case is a run of its own: one life that dies at a moment of a step, and one that goes on to the end.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import torch

import clipwise as cw
from clipwise.noise import GaussianNoise
from clipwise.private.checkpoint import Journal
from tests.core.common import N, data, losses_of, mlp, plan

STEPS, SWITCH = 8, 5
NOISE = cw.Steps({0: 300.0, SWITCH: 3.0})
BETWEEN = 40.0  # the clipped sum is far below, so the size of a release shows its noise
R, EXPECTED = 0.1, 3
CASES = [
    *product([3], [SWITCH - 1, SWITCH], ["recorded", "counting", "counted", "noised", "used", "stepped"]),
    *((3, SWITCH, "saving"), (3, SWITCH + 1, "counted")),
    *((5, SWITCH - 1, "stepped"), (5, SWITCH - 1, "saving"), (5, SWITCH, "before"), (5, SWITCH, "counted")),
]
"""Steps between saves (5: just at the switch), the step in which the process dies, and when."""


def never(*_: Any) -> bool:
    return False


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hooked(owner: Any, name: str, before: Callable[..., bool], after: Callable[..., bool]) -> None:
    """Die before or after a call."""
    whole = getattr(owner, name)

    def call(*args: Any, **options: Any) -> Any:
        if before(*args):
            die()
        found = whole(*args, **options)
        if after(*args):
            die()
        return found

    setattr(owner, name, call)


class Seen(torch.optim.SGD):
    """Writes down every release before it is used: the step, and the size of its noise."""

    log: int
    number: Callable[[], int]

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        released = torch.cat([p.grad.flatten() for group in self.param_groups for p in group["params"]])
        size = float(released.square().mean().sqrt()) * EXPECTED / R
        os.write(self.log, f"{self.number()} {size}\n".encode())
        return super().step(closure)


def live(folder: Path, seed: int | None, every: int, death: tuple[int, str] | None) -> None:
    path, model = folder / "run.ckpt", mlp(dropout=0.2)
    optimizer = Seen(model.parameters(), lr=1e-4)
    if path.exists():
        private = cw.Private.resume(path, model, optimizer)
    else:
        p = plan(sampling=cw.Poisson(N, EXPECTED), steps=STEPS, clip=cw.Abadi(R), noise_multiplier=NOISE)
        private = cw.Private(p, model, optimizer, seed=seed)
        private.save(path)
    optimizer.log = os.open(folder / "releases", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    optimizer.number = lambda: private.steps_done - 1

    before: Callable[..., bool] = never
    stepped: Callable[..., bool] = never
    if death is not None:
        step, moment = death

        def at(name: str, done: int) -> Callable[..., bool]:
            """Whether this is the moment, with this many steps done."""
            return lambda *_: moment == name and private.steps_done == done

        hooked(cw.Ledger, "record", never, at("recorded", step))
        hooked(Journal, "charge", at("counting", step + 1), at("counted", step + 1))
        hooked(GaussianNoise, "release", never, at("noised", step + 1))
        hooked(optimizer, "step", never, at("used", step + 1))
        hooked(os, "replace", at("saving", step + 1), never)
        before, stepped = at("before", step), at("stepped", step + 1)
    for x, y in private.loader(data(), physical_batch_size=2, yield_empty=True):
        if before():
            die()
        if private.step(losses_of(model, x, y)):
            if stepped():
                die()
            if private.steps_done % every == 0:
                private.save(path)
    private.save(path)


def forked(*arguments: Any) -> int:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            live(*arguments)
            code = 0
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1]


def main(folder: Path, seed: int | None) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as elsewhere:
        live(Path(elsewhere), seed, 3, None)  # loads everything once, for all the lives to come
    gc.freeze()  # a life would go through all of it, and copy its pages
    found = []
    for every, step, moment in CASES:
        own = folder / f"{every}-{step}-{moment}"
        own.mkdir()
        first = forked(own, seed, every, (step, moment))
        last = forked(own, seed, every, None)
        if last or not (os.WIFSIGNALED(first) or first == 0):
            raise SystemExit(f"a life of {own.name} ended with an error")
        model = mlp(dropout=0.2)
        events = cw.Private.resume(own / "run.ckpt", model, Seen(model.parameters(), lr=1e-4)).ledger.events
        lines = [line.split() for line in (own / "releases").read_text().splitlines()]
        found.append(
            {
                "case": own.name,
                "died": os.WIFSIGNALED(first),
                "charged": [event.noise_multiplier for event in events for _ in range(event.count)],
                "reasons": [event.reason for event in events for _ in range(event.count)],
                "released": [(int(number), 300.0 if float(size) > BETWEEN else 3.0) for number, size in lines],
            }
        )
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    text = sys.argv[2]
    sys.stdout.write(json.dumps(main(Path(sys.argv[1]), None if text == "none" else int(text))))
