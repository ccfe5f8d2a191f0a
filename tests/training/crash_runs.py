"""Trains as a configuration says, is killed with SIGKILL again and again, and resumes to the end. Run as a program.

The parent imports everything once and forks a child per life. A life dies in the middle of writing a row, right after
a step, or at a moment that the clock decides.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

import torch

from clipwise.report import Run
from clipwise.report.folder import METRICS
from clipwise.training import Progress, train
from clipwise.training.run import train as train_module
from clipwise.training.run.folder import Folder

from .common import TINY, config, exact_panel

STEPS = 40
OPTIONS = (f"steps={STEPS}", "evaluation.every=5", "checkpoint_every=3", "optimizer.name='Adam'")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def live(text: str, folder: Path, death: Any, seen: Path | None) -> None:
    """One life: begin or resume, and train until the end or until death."""

    def watch(progress: Progress) -> None:
        if seen is not None:
            with open(seen, "a", encoding="utf-8") as file:
                file.write(f"{progress.step}\n")
        if death == progress.step:
            die()

    if isinstance(death, str):  # "row 20": half of that row is written
        append = Folder.append

        def cut(self: Folder, row: Any) -> None:
            if row["step"] == int(death.split()[1]):
                with open(self.path / METRICS, "a", encoding="utf-8") as file:
                    file.write(json.dumps(row)[:40])
                die()
            append(self, row)

        Folder.append = cut  # type: ignore[method-assign]
    if isinstance(death, float):
        threading.Timer(death, die).start()
    resume = (folder / "checkpoint").exists()
    train(config(*OPTIONS, text=text), output=folder, resume=resume, force=not resume, page=False, watch=watch)


def main(folder: Path, seeded: bool) -> dict[str, Any]:
    train_module.guarantees_of = exact_panel  # type: ignore[assignment]  # the other accountants take seconds
    text = TINY if seeded else TINY.replace("seed = 3\n", "")
    live(text, folder / "whole", None, None)
    deaths: list[Any] = [1, 4, "row 10", 11, "row 20", 0.05, 0.1, 26, 0.2, 39, None]
    killed = 0
    for death in deaths:
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
        "seen": [int(line) for line in (folder / "seen").read_text().split()],
        "files": sorted(path.name for path in (folder / "crashed").iterdir()),
        "seconds": [run.provenance["seconds"] for run in runs],
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.stdout.write(json.dumps(main(Path(sys.argv[1]), sys.argv[2] == "seeded")))
