"""Trains as a configuration says, is killed with SIGKILL again and again, and resumes to the end. Run as a program.

The parent imports everything once and forks a child per life. A life dies in the middle of writing a row, right after
a step, or at a moment that the clock decides. Every release is written down before it can be used.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from clipwise.noise import GaussianNoise
from clipwise.report import Run
from clipwise.report.folder import METRICS, MODEL
from clipwise.training import Progress, train
from clipwise.training.run import train as train_module
from clipwise.training.run.folder import Folder

from .common import TINY, config, exact_panel

STEPS = 40
OPTIONS = (f"steps={STEPS}", "evaluation.every=5", "checkpoint_every=3", "optimizer.name='Adam'")
FEDERATED = 'algorithm = "dp-fedavg"\nfederated = { users = 100, split = "uniform" }\n' + TINY.replace("= 64", "= 10")
DEATHS = (1, 4, "row 10", 11, "row 20", 0.05, 0.1, 26, 0.2, 39)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def logged(seen: Path) -> None:
    """Write down every release from here on: its step, and a digest."""
    release = GaussianNoise.release

    def noted(self: GaussianNoise, sums: Any, deviations: Any, scale: Any, number: int, *rest: Any) -> Any:
        released = release(self, sums, deviations, scale, number, *rest)
        sha = hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in released)).hexdigest()
        with open(seen, "a", encoding="utf-8") as file:
            file.write(f"{number} {sha}\n")
        return released

    GaussianNoise.release = noted  # type: ignore[method-assign]


def live(text: str, folder: Path, death: Any, seen: Path | None) -> None:
    """One life: begin or resume, and train until the end or until death."""
    if seen is not None:
        logged(seen)

    def watch(progress: Progress) -> None:
        if isinstance(death, int) and progress.step >= death:
            die()

    if isinstance(death, str):  # "row 20": half of that row, or of the next one, is written
        append = Folder.append

        def cut(self: Folder, row: Any) -> None:
            if row["step"] >= int(death.split()[1]):
                with open(self.path / METRICS, "a", encoding="utf-8") as file:
                    file.write(json.dumps(row)[:40])
                die()
            append(self, row)

        Folder.append = cut  # type: ignore[method-assign]
    if isinstance(death, float):
        threading.Timer(death, die).start()
    resume = (folder / "checkpoint").exists()
    train(config(*OPTIONS, text=text), output=folder, resume=resume, force=not resume, page=False, watch=watch)


def main(folder: Path, seeded: bool, base: str = TINY, deaths: Sequence[Any] = DEATHS) -> dict[str, Any]:
    train_module.guarantees_of = exact_panel  # type: ignore[assignment]  # the other accountants take seconds
    text = base if seeded else base.replace("seed = 3\n", "")
    live(text, folder / "whole", None, None)
    killed = 0
    for death in (*deaths, None):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                live(text, folder / "crashed", death, folder / "seen")
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status):
            assert status == 0, "a life ended with an error"
            break
        killed += 1
    runs = [Run.load(folder / name) for name in ("whole", "crashed")]
    events = [[(event.reason, event.count) for event in run.ledger.events] for run in runs if run.ledger is not None]
    return {
        "killed": killed,
        "steps": [[row["step"] for row in run.curves] for run in runs],
        "rows": [[row["test"] for row in run.curves] for run in runs],
        "events": events,
        "seen": [line.split() for line in (folder / "seen").read_text().splitlines()],
        "equal": (folder / "whole" / MODEL).read_bytes() == (folder / "crashed" / MODEL).read_bytes(),
        "files": sorted(path.name for path in (folder / "crashed").iterdir()),
        "seconds": [run.provenance["seconds"] for run in runs],
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.stdout.write(json.dumps(main(Path(sys.argv[1]), sys.argv[2] == "seeded")))
