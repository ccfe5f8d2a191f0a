"""Trains, is killed with SIGKILL at random moments, resumes, and prints what was found. Run as a program.

There is a run for each seed that is given, in a folder of its own. The parent imports everything once and forks a child
per life, so that a life costs milliseconds.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import clipwise as cw
from tests.core.common import N, data, losses_of, mlp, plan, weights

STEPS = 160
SAVE_EVERY = 3
RECORD_BYTES = 64
CLIPS: dict[str, Any] = {
    "mix-up": cw.MixUp(cw.Abadi(0.1), cw.Abadi(2.0), switch_at=0.5),
    "adaptive": cw.AdaptiveClip(R=5.0, quantile=0.6, learning_rate=0.5),
}


class Witness(torch.optim.Adam):
    """Writes down every noisy gradient before it is used: the releases that somebody could have seen."""

    log: int | None = None
    step_number: Any = None

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        if self.log is not None:
            sha = hashlib.sha256()
            for group in self.param_groups:
                for p in group["params"]:
                    sha.update(p.grad.numpy().tobytes())
            os.write(self.log, f"{self.step_number()} {sha.hexdigest()}\n".encode())
        return super().step(closure)


def live(
    folder: Path,
    seed: int | None,
    log: bool = True,
    steps: int = STEPS,
    witness: cw.Witness | None = None,
    clip: str = "mix-up",
) -> cw.Private:
    """One life: resume or start, train to the end, saving now and then."""
    path = folder / "run.ckpt"
    model = mlp(dropout=0.2)
    optimizer = Witness(model.parameters(), lr=0.01)
    if path.exists():
        private = cw.Private.resume(path, model, optimizer)
    else:
        p = plan(sampling=cw.Poisson(N, 3), steps=steps, clip=CLIPS[clip])
        private = cw.Private(p, model, optimizer, seed=seed, witness=witness)
        private.save(path)
    if log:
        optimizer.log = os.open(folder / "releases", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        optimizer.step_number = lambda: private.steps_done - 1
    for x, y in private.loader(data(), physical_batch_size=2):
        if private.step(losses_of(model, x, y)) and private.steps_done % SAVE_EVERY == 0:
            private.save(path)
    private.save(path)
    torch.save(weights(model), folder / "final.pt")
    return private


def charged(path: Path) -> int:
    """What a resume would find on the ledger now."""
    model = mlp(dropout=0.2)
    return cw.Private.resume(path, model, Witness(model.parameters(), lr=0.01)).ledger.steps


def wait_for_progress(child: int, releases: Path, more: int) -> None:
    """Let a life make `more` releases, or come to its end, however busy the machine is."""
    size = releases.stat().st_size if releases.exists() else 0
    while more and os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        now = releases.stat().st_size if releases.exists() else 0
        if now >= size + more * RECORD_BYTES:
            return
        time.sleep(0.0005)


def main(
    folder: Path,
    seed: int | None,
    kills: int,
    moments: int = 0,
    witness: cw.Witness | None = None,
    clip: str = "mix-up",
) -> dict[str, Any]:
    """Kill a run `kills` times at most, at moments of this number."""
    rng = random.Random(moments)
    path, releases = folder / "run.ckpt", folder / "releases"
    killed, under_counted, lives = 0, 0, 0
    while True:
        lives += 1
        child = os.fork()
        if child == 0:
            code = 1
            try:
                live(folder, seed, witness=witness, clip=clip)
                code = 0
            finally:
                os._exit(code)
        if killed < kills:
            wait_for_progress(child, releases, rng.randrange(8))
            time.sleep(rng.uniform(0.0, 0.004))  # somewhere within a step or a save
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status):
            killed += 1
        elif status:
            raise SystemExit("a life ended with an error")
        if seed is None and path.exists():
            seen = len(releases.read_text().splitlines()) if releases.exists() else 0
            under_counted += charged(path) < seen
        if not os.WIFSIGNALED(status):
            break
    lines = [line.split() for line in releases.read_text().splitlines()]
    model = mlp(dropout=0.2)
    end = cw.Private.resume(path, model, Witness(model.parameters(), lr=0.01))
    by_step: dict[str, set[str]] = {}
    for step, sha in lines:
        by_step.setdefault(step, set()).add(sha)
    return {
        "killed": killed,
        "lives": lives,
        "under_counted": under_counted,
        "ledger": end.ledger.steps,
        "interrupted": sum(e.count for e in end.ledger.events if e.reason == "interrupted"),
        "charged_ahead": sum(e.count for e in end.ledger.events if e.reason == "charged ahead"),
        "bound": end.bound,
        "releases": len(lines),
        "steps_released": len(by_step),
        "different_releases_of_a_step": max(map(len, by_step.values())),
        "left_over_files": sorted(p.name for p in folder.iterdir() if p.name.startswith(".")),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    root, kills_text, clip_name, *seeds = sys.argv[1:]
    with tempfile.TemporaryDirectory() as elsewhere:
        live(Path(elsewhere), None, log=False, steps=3, clip=clip_name)  # loads everything once, for all lives to come
    gc.freeze()  # a life would go through all of it, and copy its pages
    found = {}
    for text in seeds:
        own = Path(root, text)
        own.mkdir()
        found[text] = main(own, None if text == "none" else int(text), int(kills_text), clip=clip_name)
    sys.stdout.write(json.dumps(found))
